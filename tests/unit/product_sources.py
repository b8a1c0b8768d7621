"""The product's own files, read and parsed once for every test that looks at them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def files(*tops: str) -> tuple[Path, ...]:
    """Python files below these folders of the repository, in order."""
    return tuple(sorted(path for top in tops for path in (ROOT / top).rglob("*.py")))


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of the file."""
    return tuple(ast.walk(tree_of(path)))
