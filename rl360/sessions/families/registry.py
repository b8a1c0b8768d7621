"""Which family a model directory speaks, and its chat template.

A directory is recognised by
1. its chat template being, word for word, one of the packaged ones; or, where it ships the model's stock template,
2. `model_type` in config.json, the tokens in tokenizer.json, and marks of the format in that stock template (one model
   type may speak several formats).
Nothing is guessed: a directory that fits no family is refused, with what each family misses. `family` names one
outright; then only its tokens must be there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from rl360.errors import BadInput
from rl360.sessions.families import glm4, qwen3, rl360_chat
from rl360.sessions.families.base import ChatTemplate, Family

FAMILIES: dict[str, Family] = {family.name: family for family in (rl360_chat.FAMILY, qwen3.FAMILY, glm4.FAMILY)}
TEMPLATE_FILE = "chat_template.jinja"


def load_template(model_dir: str | Path, family: str | None = None) -> ChatTemplate:
    """Read tokenizer.json, config.json and the directory's own template; refuse what fits no family."""
    folder = Path(model_dir)
    config = _json(folder / "config.json")
    tokenizer_json, tokens, size = _tokenizer(folder / "tokenizer.json")
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise BadInput(f"{folder}/config.json names no vocab_size: is it a language model's?")
    if size > vocab_size:
        raise BadInput(f"{folder}: vocab_size {vocab_size} is below the tokenizer's {size}")
    if family is not None:
        if family not in FAMILIES:
            raise BadInput(f"no family {family!r}; known are {', '.join(FAMILIES)}")
        return ChatTemplate(FAMILIES[family], tokenizer_json, vocab_size)
    return ChatTemplate(_recognise(folder, config, tokens), tokenizer_json, vocab_size)


def stock_template(model_dir: str | Path) -> str | None:
    """The directory's own template: chat_template.jinja, else the one in tokenizer_config.json, else None."""
    folder = Path(model_dir)
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from None
    path = folder / "tokenizer_config.json"
    stated = _json(path).get("chat_template") if path.is_file() else None
    return stated if isinstance(stated, str) else None


def why_not(family: Family, model_type: Any, tokens: set[str], stock: str | None) -> str | None:
    """What keeps a directory from being of this family; None when nothing does."""
    if not family.model_types:
        return f"needs its own {TEMPLATE_FILE}"
    if model_type not in family.model_types:
        return f"model_type is {model_type!r}, not {' or '.join(sorted(family.model_types))}"
    missing = [token for token in family.tokens if token not in tokens]
    if missing:
        return f"the tokenizer lacks {', '.join(missing)}"
    if stock is None:
        return "the directory has no chat template that would show its format"
    unsaid = [mark for mark in family.stock_marks if mark not in stock]
    return f"the model's chat template never writes {', '.join(map(repr, unsaid))}: another format" if unsaid else None


def _recognise(folder: Path, config: dict[str, Any], tokens: set[str]) -> Family:
    stock = stock_template(folder)
    for family in FAMILIES.values():
        if stock is not None and stock.strip() == family.template_text().strip():
            return family
    claimed = re.match(r"\{#-? family: ([\w-]+)", stock or "")
    if claimed:
        raise BadInput(
            f"{folder / TEMPLATE_FILE} names family {claimed[1]} and is not a template of this rl360; copy one of "
            f"{', '.join(FAMILIES)} from rl360/sessions/families"
        )
    reasons = {family.name: why_not(family, config.get("model_type"), tokens, stock) for family in FAMILIES.values()}
    fitting = [name for name, reason in reasons.items() if reason is None]
    if len(fitting) == 1:
        return FAMILIES[fitting[0]]
    if fitting:
        raise BadInput(f"{folder} fits several families, {', '.join(fitting)}; name one")
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise BadInput(f"{folder} is of no known family ({listed}); docs/templates.md says how to add one")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise BadInput(
            f"{path}: {error.strerror}; name a Hugging Face model directory, or make one with `rl360 model warm-start`"
        ) from None
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path} is not a JSON object")
    return value


def _tokenizer(path: Path) -> tuple[str, set[str], int]:
    """(its JSON text, added tokens, number of tokens)."""
    if not path.is_file():
        raise BadInput(f"{path} does not exist; save the tokenizer there")
    try:
        text = path.read_text("utf-8")
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the tokenizers library raises bare Exception for every malformed file
        raise BadInput(f"{path} is not a tokenizers file: {error}") from None
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return text, added, tokenizer.get_vocab_size()
