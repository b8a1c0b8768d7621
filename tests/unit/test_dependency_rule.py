"""Who may import whom: `flows -> tasks -> rl360`, and inside rl360 the pure parts import no service and no torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys

import pytest

from tests.unit.product_sources import ROOT, files, tree_of

LAYERS = ("rl360", "tasks", "flows", "infra")
PURE = ("objective", "ledger", "store", "config")
SERVICE_LIBRARIES = {"httpx", "fastapi", "starlette", "uvicorn", "sglang", "megatron", "prefect", "requests", "aiohttp"}
COMPUTES = (
    "rl360/bench/bare_trainer.py",
    "rl360/bench/objective.py",
    "rl360/bench/push.py",
    "rl360/bench/push_fleet.py",
    "rl360/replay/trainer.py",
    "rl360/training/",
    "rl360/policy/",
    "rl360/objective/losses.py",
    "rl360/objective/corrections.py",
    "rl360/objective/kl.py",
    "rl360/weights/transports/",
    "rl360/weights/checksum.py",
    "rl360/engines/launch.py",
    "rl360/engines/cpu_shims/",
)


def _imports(tree: ast.Module, module: str, *, typing_too: bool) -> set[str]:
    """Absolute names of what a module imports, wherever in it; `if TYPE_CHECKING:` blocks on request."""
    found: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and not typing_too and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        nodes += ast.iter_child_nodes(node)
    return found


@functools.cache
def _modules(*, typing_too: bool) -> dict[str, set[str]]:
    """Path of every product module -> what it imports."""
    found = {}
    for path in files(*LAYERS):
        name = path.relative_to(ROOT).as_posix()
        module = name.removesuffix(".py").replace("/", ".")
        found[name] = _imports(tree_of(path), module, typing_too=typing_too)
    return found


def every() -> dict[str, set[str]]:
    return _modules(typing_too=True)


def at_run_time() -> dict[str, set[str]]:
    return _modules(typing_too=False)


def _tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_walk_sees_late_relative_and_typing_imports() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    from ..b import c\n"
    tree = ast.parse(source)
    assert _imports(tree, "rl360.a.x", typing_too=False) == {"typing", "typing.TYPE_CHECKING", "rl360.b", "rl360.b.c"}
    assert "torch" in _imports(tree, "rl360.a.x", typing_too=True)
    assert len(every()) > 80
    assert "prefect" in _tops(every()["tasks/train.py"])


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [("rl360", {"prefect", "tasks", "flows"}), ("tasks", {"flows", "infra"}), ("flows", {"infra"})],
)
def test_layers_import_downwards_only(layer: str, forbidden: set[str]) -> None:
    wrong = {path: sorted(_tops(names) & forbidden) for path, names in every().items() if path.startswith(f"{layer}/")}
    assert not {path: names for path, names in wrong.items() if names}


def test_only_the_command_line_knows_the_local_supervisor() -> None:
    users = {path for path, names in every().items() if path.startswith("rl360/") and "infra" in _tops(names)}
    assert users == {"rl360/commands/services.py"}


@pytest.mark.parametrize("part", PURE)
def test_the_pure_parts_import_no_service(part: str) -> None:
    """Neither a library that talks to one nor a package of ours that is one; types are no dependency at run time."""
    allowed = {f"rl360.{name}" for name in (*PURE, "errors")}
    wrong = {}
    for path, names in at_run_time().items():
        if not path.startswith(f"rl360/{part}/"):
            continue
        ours = {".".join(name.split(".")[:2]) for name in names if name.startswith("rl360.")}
        wrong[path] = sorted((ours - allowed) | (_tops(names) & SERVICE_LIBRARIES))
    assert wrong, f"rl360/{part} has no modules"
    assert not {path: names for path, names in wrong.items() if names}


def test_torch_is_imported_only_where_something_computes() -> None:
    users = [path for path, names in at_run_time().items() if "torch" in _tops(names)]
    assert not [path for path in users if not path.startswith(COMPUTES)]


def test_the_objective_talks_to_no_process_group() -> None:
    for path, names in every().items():
        if path.startswith("rl360/objective/"):
            assert not [name for name in names if name.startswith("torch.distributed")], path


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        (
            "import rl360.config.run, rl360.config.services",
            ("torch", "megatron", "sglang", "transformers", "prefect", "httpx", "fastapi", "boto3"),
        ),
        ("import rl360.objective.filters, rl360.ledger.metrics, rl360.ledger.checks", ("torch", "prefect", "httpx")),
        ("import rl360.store.codec, rl360.store.layout", ("torch", "prefect", "httpx", "boto3", "pydantic")),
        ("import rl360.training.results, rl360.training.packing", ("torch", "megatron", "prefect", "httpx")),
    ],
)
def test_light_modules_stay_light(statement: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys; {statement}; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
