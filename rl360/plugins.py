"""Functions that a deployment or a run names by import path, `module:function`. Never one that a request or an agent
named: to load is to run code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from rl360.errors import BadInput

FOLDER = "RL360_PLUGINS"  # the folder where `rl360 up` was typed, for its services


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function at `path`; `BadInput` that names `what` asked for it. The folder one types in is looked in last, so
    that what lies there takes the place of no other module."""
    module, _, name = path.partition(":")
    sys.path += {os.environ.get(FOLDER) or os.getcwd()} - {*sys.path}
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        where = "beside rl360, on PYTHONPATH, or in the folder where `rl360 up` and `rl360 run` are typed"
        raise BadInput(
            f"{what} {path!r} cannot be imported: {error}; give module:function, installed {where}"
        ) from None
    if not callable(found):
        raise BadInput(f"{what} {path!r} is {type(found).__name__}, not a function; give module:function")
    return found
