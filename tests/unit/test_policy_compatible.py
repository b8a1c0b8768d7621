"""A run may start from another policy than the services did, when both read and write ids alike and are one shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl360.errors import BadInput
from rl360.policy.compatible import refuse_other_model


def model(path: Path, tokenizer: str, template: str = "t", width: int = 4, head: bool = False) -> str:
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "chat_template.jinja").write_text(template)
    tensors = {"model.embed_tokens.weight": np.zeros((8, width), np.float32)}
    tensors |= {"lm_head.weight": np.zeros((8, width), np.float32)} if head else {}
    save_file(tensors, path / "model.safetensors")
    return str(path)


def test_only_weights_may_differ(tmp_path: Path) -> None:
    served = model(tmp_path / "served", "a")
    refuse_other_model(served, served)
    refuse_other_model(model(tmp_path / "same", "a"), served)
    refuse_other_model(model(tmp_path / "tied", "a", head=True), served)
    refuse_other_model(str(tmp_path / "on-another-host"), served)
    for name, tokenizer, template in (("tokenizer.json", "b", "t"), ("chat_template.jinja", "a", "u")):
        other = model(tmp_path / name, tokenizer, template)
        with pytest.raises(BadInput, match=rf"different {name}; `rl360 down` and `rl360 up --model {other}`"):
            refuse_other_model(other, served)


def test_another_shape_is_named_with_both(tmp_path: Path) -> None:
    served, wide = model(tmp_path / "served", "a"), model(tmp_path / "wide", "a", width=6)
    with pytest.raises(BadInput, match=r"embed_tokens.weight of shape \(8, 6\), that of its parent r1, .*\(8, 4\)"):
        refuse_other_model(wide, served, "that of its parent r1")
