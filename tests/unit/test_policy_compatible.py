"""A run may start from another policy than the services did, when both read and write ids alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.errors import BadInput
from rl360.policy.compatible import refuse_other_tokenizer


def model(path: Path, tokenizer: str, template: str = "t") -> str:
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "chat_template.jinja").write_text(template)
    return str(path)


def test_only_weights_may_differ(tmp_path: Path) -> None:
    served = model(tmp_path / "served", "a")
    refuse_other_tokenizer(served, served)
    refuse_other_tokenizer(model(tmp_path / "same", "a"), served)
    refuse_other_tokenizer(str(tmp_path / "on-another-host"), served)
    for name, tokenizer, template in (("tokenizer.json", "b", "t"), ("chat_template.jinja", "a", "u")):
        other = model(tmp_path / name, tokenizer, template)
        with pytest.raises(BadInput, match=rf"different {name}; run `rl360 down` and `rl360 up --model {other}`"):
            refuse_other_tokenizer(other, served)
