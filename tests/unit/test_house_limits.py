"""The sizes this code keeps to (docs/architecture.md, "Limits"): reached, something is to be deleted or moved first."""

from __future__ import annotations

import ast
from pathlib import Path

from pydantic import BaseModel

from rl360.config.run import RunConfig
from tests.unit.product_sources import ROOT, files, nodes_of, text_of
from tests.unit.test_dependency_rule import every

FILES = files("rl360", "tasks", "flows", "infra")
# The core is what a step runs: what the flows, their tasks and the three servers import, directly or not, but for pages
# that people read and the demo's own policy and tasks. Nothing leaves it by being listed here: it has to be unused.
# Of the servers what they do, not the shell of their processes: options, sockets, signals.
STARTS = (
    "flows/",
    "tasks/",
    "rl360/agents/registry.py",
    "rl360/harbor/app.py",
    "rl360/sessions/families/registry.py",
    "rl360/sessions/routes.py",
    "rl360/training/app.py",
)
NOT_CORE = (
    "rl360/policy/",
    "rl360/report/",
    "rl360/sessions/openapi.py",
    "rl360/tasksets/chores.py",
    "rl360/training/megatron/cpu_hook.py",  # does nothing where there is a GPU
)
ADAPTERS = (
    "rl360/agents/bash_agent.py",
    "rl360/agents/harness.py",
    "rl360/agents/harness_entry.py",
    "rl360/engines/launchers/",
    "rl360/harbor/real/",
    "rl360/http_api.py",
    "rl360/kube.py",
    "rl360/sandboxes/bubblewrap.py",
    "rl360/sandboxes/bwrap_process.py",
    "rl360/sandboxes/cgroups.py",
    "rl360/sandboxes/seccomp.py",
    "rl360/sandboxes/host.py",
    "rl360/sandboxes/providers/",
    "rl360/sandboxes/rooted.py",
    "rl360/sessions/families/glm4.py",
    "rl360/sessions/families/qwen3.py",
    "rl360/sessions/families/rl360_chat.py",
    "rl360/sessions/formats/",
    "rl360/tasksets/made/",
    "rl360/weights/transports/",
)
# the only modules of the core that import an adapter
CHOOSERS = {
    "rl360/agents/registry.py",
    "rl360/sessions/families/registry.py",
    "rl360/sessions/routes.py",
    "rl360/tasksets/sources.py",
}
CORE_LINES, ADAPTER_LINES = 14_000, 6_000
FILE_LINES, FUNCTION_LINES, KNOBS, BROAD_EXCEPTS = 600, 80, 120, 10
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_lines(path: Path) -> int:
    """Lines that are neither blank, comment nor docstring."""
    lines = text_of(path).splitlines()
    documented: set[int] = set()
    for node in nodes_of(path):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and ast.get_docstring(node) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        1
        for number, line in enumerate(lines, 1)
        if number not in documented and line.strip() and line.strip()[0] != "#"
    )


def reached() -> list[Path]:
    """What a step runs, adapters included."""
    imports = every()
    by_module = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in imports}
    found: set[str] = set()
    ahead = [name for name in imports if name.startswith(STARTS)]
    while ahead:
        name = ahead.pop()
        if name not in found and not name.startswith(NOT_CORE):
            found.add(name)
            ahead += [by_module[module] for module in imports[name] if module in by_module]
    return [ROOT / name for name in sorted(found)]


def core() -> list[Path]:
    """The modules of the core."""
    return [path for path in reached() if not name_of(path).startswith(ADAPTERS)]


def adapters() -> list[Path]:
    return [path for path in FILES if name_of(path).startswith(ADAPTERS)]


def test_the_core_is_small() -> None:
    names = set(map(name_of, core()))
    assert {"rl360/sessions/merge.py", "rl360/objective/losses.py", "tasks/train.py", "rl360/weights/push.py"} <= names
    assert sum(map(code_lines, core())) <= CORE_LINES


def test_adapters_are_few_lines_and_reached_only_where_one_is_chosen() -> None:
    names = set(map(name_of, adapters()))
    assert {"rl360/sandboxes/bubblewrap.py", "rl360/sessions/families/qwen3.py"} <= names
    assert sum(map(code_lines, adapters())) <= ADAPTER_LINES
    modules = {name.removesuffix(".py").replace("/", ".") for name in names if not name.endswith("/__init__.py")}
    imports = every()
    importers = {name for name in map(name_of, core()) if modules & set(imports[name])}
    assert importers <= CHOOSERS


def test_no_file_and_no_function_is_long() -> None:
    long = [name_of(path) for path in FILES if len(text_of(path).splitlines()) > FILE_LINES]
    functions = [(path, node) for path in FILES for node in nodes_of(path)]
    long += [
        f"{name_of(path)}:{node.name}"
        for path, node in functions
        if isinstance(node, FUNCTION) and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ]
    assert long == []


def test_broad_excepts_are_few_and_explained() -> None:
    found = []
    for path in FILES:
        lines = text_of(path).splitlines()
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                kinds = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
                if any(
                    k is None or (isinstance(k, ast.Name) and k.id in ("Exception", "BaseException")) for k in kinds
                ):
                    found.append((f"{name_of(path)}:{node.lineno}", "#" in lines[node.lineno - 1]))
    assert len(found) <= BROAD_EXCEPTS
    assert [place for place, explained in found if not explained] == []


def test_a_run_has_few_knobs() -> None:
    def knobs(section: type[BaseModel]) -> int:
        kinds = [field.annotation for field in section.model_fields.values()]
        return sum(knobs(k) if isinstance(k, type) and issubclass(k, BaseModel) else 1 for k in kinds)

    assert 50 < knobs(RunConfig) <= KNOBS
