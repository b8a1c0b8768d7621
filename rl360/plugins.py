"""Functions that a deployment or a run names by import path, `module:function`. Never one that a request or an agent
named: to load is to run code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rl360.errors import BadInput


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function at `path`; `BadInput` that names `what` asked for it."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise BadInput(f"{what} {path!r} cannot be imported: {error}; give module:function") from None
    if not callable(found):
        raise BadInput(f"{what} {path!r} is {type(found).__name__}, not a function; give module:function")
    return found
