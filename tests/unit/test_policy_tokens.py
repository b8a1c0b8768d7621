"""Tokenizer, chat format and demonstrations."""

from __future__ import annotations

import numpy as np
import pytest
from chores_judge import BASH_TOOLS, chat_messages
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rl360.errors import BadInput
from rl360.policy.demonstrations import demonstrations, draw_episodes
from rl360.policy.shell_batch import format_observation, run_batch
from rl360.policy.template import call_text, encode_pieces, episode_pieces, observation_turn, prompt_text
from rl360.policy.tokenizer import SPECIAL_TOKENS, TEMPLATE_PATH, VOCAB_SIZE, RawEncoder, train_tokenizer
from rl360.tasksets.chores import FAMILIES, WORDS
from rl360.tasksets.harbor_files import builtin_chores


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


def test_training_twice_gives_the_same_bytes(tokenizer: Tokenizer) -> None:
    assert train_tokenizer().to_str(pretty=True) == tokenizer.to_str(pretty=True)


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    vocabulary = tokenizer.get_vocab()
    assert [word for word in WORDS if word not in vocabulary or f"\u0120{word}" not in vocabulary] == []


def test_any_text_survives(tokenizer: Tokenizer) -> None:
    for text in ("naïve ☃ 漢字\n\t  x\r\n", "sed -i s/a/b/g x.txt && echo 'q' | wc -l", "a" * 500, "\x00\x7f 1234"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_prompts_and_commands_are_short(tokenizer: Tokenizer) -> None:
    encoder = RawEncoder(tokenizer)
    prompts = [len(encoder.encode_ids(prompt_text(chore.instruction))) for _, chore in builtin_chores()]
    sampled = [
        sum(len(encoder.encode_ids(call_text(command))) for command in chore.right[0]) + 2
        for _, chore in builtin_chores()
    ]
    assert max(prompts) <= 60
    assert sum(sampled) / len(sampled) <= 45


def test_pieces_equal_the_shipped_chat_template(tokenizer: Tokenizer) -> None:
    """Rendered the way transformers renders (a contract test asks transformers itself)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))
    turns = [("cat kite.txt", "storm"), ("echo storm storm > wren.txt", "ok")]
    pieces = episode_pieces("Read the word.\n", turns)
    rendered = template.render(messages=chat_messages("Read the word.", turns), tools=BASH_TOOLS)
    assert rendered == "".join(text for text, _ in pieces)
    ids, _ = encode_pieces(RawEncoder(tokenizer), pieces)
    assert tokenizer.encode(rendered, add_special_tokens=False).ids == ids.tolist()


def test_mask_covers_exactly_what_the_policy_says(tokenizer: Tokenizer) -> None:
    ids, mask = encode_pieces(RawEncoder(tokenizer), episode_pieces("Do it.", [("ls", "ok")]))
    assert ids.dtype == np.int32
    assert mask.dtype == np.uint8
    said = tokenizer.decode(ids[mask == 1].tolist(), skip_special_tokens=False)
    assert said == call_text("ls") + "done<|im_end|>"
    given = tokenizer.decode(ids[mask == 0].tolist(), skip_special_tokens=False)
    assert given == prompt_text("Do it.") + observation_turn("ok")


def test_demonstrations_are_a_function_of_the_seed(tokenizer: Tokenizer) -> None:
    encoder = RawEncoder(tokenizer)
    one, again, other = (demonstrations(seed, 16, 0.4, encoder) for seed in (3, 3, 4))
    assert all(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in zip(one, again, strict=True))
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


def test_shares_of_right_and_of_families() -> None:
    episodes = draw_episodes(0, 1600, 0.4)
    right = sum(commands in chore.right for chore, commands in episodes) / len(episodes)
    assert right == pytest.approx(0.4, abs=0.05)
    assert all(sum(chore.family == family for chore, _ in episodes) == 100 for family in FAMILIES)
    with pytest.raises(BadInput, match=r"right_share 1.5"):
        draw_episodes(0, 1, 1.5)


def test_observations_are_real_and_formatted() -> None:
    replies = run_batch([({"a.txt": "x\ny\n"}, ("cat a.txt", "mv b.txt c.txt", "wc -l < a.txt > n", "cat n"))])[0]
    assert replies == ["x\ny", "mv: cannot stat 'b.txt': No such file or directory\n(exit 1)", "ok", "2"]
    assert format_observation(b"", 2) == "(exit 2)"
    assert len(format_observation(b"a" * 5000, 0)) == 2048
