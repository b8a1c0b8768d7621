"""Byte-level BPE of 1,024 tokens, trained on the chores and their chat format; the same bytes every time.

Special tokens come first (ids 0-4), then the 256 bytes, then the merges. The training text is drawn with a fixed
seed, independent of any run's seed: all policies of one code version share one tokenizer.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rl360.errors import Rl360Error
from rl360.policy.template import episode_pieces
from rl360.tasksets.chores import EXTENSIONS, FAMILIES, WORDS, draw_chore
from rl360.tasksets.harbor_files import builtin_chores, task_files

VOCAB_SIZE = 1024
PAD, START, END, CALL_OPEN, CALL_CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
SPECIAL_TOKENS = (PAD, START, END, CALL_OPEN, CALL_CLOSE)
TEMPLATE_PATH = Path(__file__).parents[1] / "sessions" / "families" / "rl360_chat.jinja"
_DRAWS_PER_FAMILY = 60
# An extension, a flag and a digit are one piece with what stands before (`.txt`, ` -n`, ` 3`): a fifth fewer tokens.
_PIECES = r"\.[A-Za-z]+| ?-?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
_SHELL_TEXT = """
The shell reads a command, expands names, opens files for input and output, and runs the program with its arguments.
Every program returns an exit status: zero means success, any other number means failure. Permission denied. Is a
directory. Not a directory. File exists. Operation not permitted. Missing file operand. Invalid option. Try the help
option for more information. Unknown command. Syntax error near unexpected token. Cannot open, cannot create, cannot
remove, cannot access, cannot move, cannot copy, cannot read, cannot write. Broken pipe. No space left on device.
Argument list too long. Terminated. Killed. Segmentation fault. Warning: this value was changed before. Please check
the result and report what happened. if then else elif while until for do done case esac function return break
continue shift export local unset read printf test true false set eval exec trap wait kill sleep find xargs awk cut
paste join split tr tee date env diff patch tar gzip chmod chown ln stat du df ps which basename dirname seq import
def class self return None True False print len range list dict open with as from not and or in is lambda try except
finally raise assert x = 1; y = 2; print(x + y); for i in range(10): total += i; def main(): return 0; if [ -f "$1" ];
then echo "$name"; fi; $(cat "$file") | sort | uniq
"""


def corpus() -> Iterator[str]:
    """The training text: a fixed draw of chores of every family in the chat format, each word once more in its usual
    surroundings.
    """
    for family in FAMILIES:
        for number in range(_DRAWS_PER_FAMILY):
            chore = draw_chore(random.Random(f"tokenizer:{family}:{number}"), family)
            for commands in (*chore.right, *chore.wrong):
                for text, _ in episode_pieces(chore.instruction, [(command, "ok") for command in commands]):
                    yield text
            yield from chore.files.values()
    for name, chore in builtin_chores():
        yield from task_files(name, chore).values()
    yield _SHELL_TEXT
    for word in WORDS:
        yield f"{word} {word}\n{word}.txt s/{word}/{word}/g\n" * 20
    for extension in EXTENSIONS:
        yield f"*.{extension} {extension} " * 20
    yield (
        "cat: cp: mv: rm: cannot stat 'x.txt': No such file or directory\n(exit 1)\n(exit 2)\ncommand not found\n" * 50
    )


def train_tokenizer() -> Tokenizer:
    """The BPE itself. Deterministic: fixed text, fixed alphabet, ties broken by token id inside the trainer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise Rl360Error(
            f"tokenizer: {tokenizer.get_vocab_size()} tokens, wanted {VOCAB_SIZE}; add to the training text"
        )
    return tokenizer


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


class RawEncoder:
    """`rl360.policy.template.Encodes` on the raw tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into the model directory `folder`."""
    from transformers import PreTrainedTokenizerFast  # seconds of import that training alone does not need

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(str(folder))
    shutil.copyfile(TEMPLATE_PATH, folder / "chat_template.jinja")
