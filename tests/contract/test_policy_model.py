"""The policy directory as transformers and Megatron-core read it: real libraries, a short real warm start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from chores_judge import BASH_TOOLS, chat_messages

from rl360.policy.parity import PARITY_LIMIT, gap, probe_examples, transformers_logprobs
from rl360.policy.template import episode_pieces
from rl360.policy.tokenizer import END, PAD
from rl360.policy.warm_start import Recipe, ensure_warm_start

pytestmark = pytest.mark.contract
SHORT = Recipe(demonstrations=64, steps=4, batch_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines: list[str] = []
    home = tmp_path_factory.mktemp("home")
    made = ensure_warm_start(0, home, SHORT, lines.append)
    assert any("step 4 of 4" in line for line in lines)
    lines.clear()
    assert ensure_warm_start(0, home, SHORT, lines.append) == made
    assert lines == []
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    return made


def test_transformers_renders_the_same_chat(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    turns = [("cat kite.txt", "storm"), ("echo storm storm > wren.txt", "ok")]
    rendered = tokenizer.apply_chat_template(chat_messages("Read the word.", turns), tools=BASH_TOOLS, tokenize=False)
    assert rendered == "".join(text for text, _ in episode_pieces("Read the word.", turns))


def test_config_is_explicit(folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert (config.model_type, config.vocab_size, config.tie_word_embeddings) == ("qwen3", len(tokenizer), True)
    assert config.rope_parameters["rope_theta"] == 10_000.0
    assert config.eos_token_id == tokenizer.eos_token_id


def test_megatron_agrees_with_transformers(folder: Path) -> None:
    from rl360.training.logprobs import megatron_logprobs

    probes = [ids for ids, _ in probe_examples(folder, 8)]
    found = gap(megatron_logprobs(folder, probes), transformers_logprobs(folder, probes))
    assert found.tokens > 200
    assert found.maximum < PARITY_LIMIT
