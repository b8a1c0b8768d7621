"""A library that one file of tests needs and that takes seconds to import: only the worker that runs the file pays."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Stands for a module and imports it at the first use of a name of it."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks each name of a file for `_mock_name` and `__wrapped__` as it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)
