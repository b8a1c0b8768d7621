"""Task sets: what is loaded, what is refused, and the stateless cursor."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl360.config.run import RunConfig, frozen_differences
from rl360.errors import BadInput
from rl360.harbor.check import nop_agent
from rl360.harbor.protocol import RunRequest
from rl360.harbor.runner import prepare
from rl360.tasksets.chores import FAMILIES, draw_chore
from rl360.tasksets.harbor_files import write_task
from rl360.tasksets.taskset import draw, instead, load_taskset


def _set_of(root: Path, names: list[str]) -> Path:
    for name in names:
        write_task(root, name, draw_chore(random.Random(name), "append"))
    return root


def test_builtin_set() -> None:
    chores = load_taskset("builtin:chores")
    assert len(chores) == 32
    assert Counter(chores[task].domain for task in chores.task_ids) == dict.fromkeys(FAMILIES, 2)
    assert all((chores[task].path / "tests" / "test.sh").is_file() for task in chores.task_ids)
    assert chores.digest == load_taskset("builtin:chores").digest


def test_a_directory_is_a_set_and_its_content_is_in_the_digest(tmp_path: Path) -> None:
    taskset = load_taskset(str(_set_of(tmp_path / "mine", ["b", "a"])))
    assert taskset.task_ids == ["rl360/a", "rl360/b"]
    (tmp_path / "mine" / "a" / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    assert load_taskset(str(tmp_path / "mine")).digest != taskset.digest


def test_what_copy_lines_change_is_in_the_digest(tmp_path: Path) -> None:
    root = _set_of(tmp_path / "mine", ["one"])
    file = root / "one" / "environment" / "Dockerfile"
    name = next(path.name for path in file.parent.iterdir() if path != file)
    seen = []
    for line in ("COPY . /app/", f"COPY {name} /app/in/", f"COPY {name} /app/in/it", ""):
        file.write_text(f"FROM x\nWORKDIR /app\n{line}\n")
        seen.append(load_taskset(str(root)).digest)
    file.unlink()
    assert load_taskset(str(root)).digest == seen[0] and len(set(seen)) == 4


def test_domain_without_metadata_is_the_sets_name(tmp_path: Path) -> None:
    root = _set_of(tmp_path / "mine", ["a"])
    toml = root / "a" / "task.toml"
    toml.write_text(toml.read_text().replace('[metadata]\nfamily = "append"\n', ""))
    assert load_taskset(str(root))["rl360/a"].domain == "mine"
    plain = toml.read_text()
    toml.write_text(plain + '[metadata]\nfamily = "of"\ndomain = "said"\n')
    assert load_taskset(str(root))["rl360/a"].domain == "said", "before a family"
    toml.write_text(plain + '[metadata]\nfamily = "of"\n')
    assert load_taskset(str(root))["rl360/a"].domain == "of"
    toml.write_text(plain + "[metadata]\ndomain = 3\n")
    with pytest.raises(BadInput, match=r"metadata.domain = 3"):
        load_taskset(str(root))


def test_refusals_name_the_value(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="builtin:chore' is unknown"):
        load_taskset("builtin:chore")
    with pytest.raises(BadInput, match="is not a directory"):
        load_taskset(str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match="no task directory"):
        load_taskset(str(tmp_path))
    root = _set_of(tmp_path / "mine", ["a", "b"])
    shutil.copytree(root / "a", root / "c")
    with pytest.raises(BadInput, match=r"rl360/a.* twice.*rename one"):
        load_taskset(str(root))
    shutil.rmtree(root / "c")
    (root / "b" / "instruction.md").unlink()
    with pytest.raises(BadInput, match=r"b: no instruction.md"):
        load_taskset(str(root))
    with pytest.raises(BadInput, match="'x' is not in task set"):
        load_taskset("builtin:chores")["x"]


def test_cursor_is_a_function_of_seed_step_and_n() -> None:
    chores = load_taskset("builtin:chores")
    assert draw(chores, 0, 7, 12) == draw(chores, 0, 7, 12)
    assert draw(chores, 0, 7, 12) != draw(chores, 1, 7, 12)
    assert draw(chores, 0, 7, 12) != draw(chores, 0, 8, 12)
    with pytest.raises(BadInput, match="cannot draw 0 tasks"):
        draw(chores, 0, 0, 0)


@pytest.mark.parametrize("n", [1, 5, 12, 32, 40])
def test_every_pass_holds_every_task_once(n: int) -> None:
    chores = load_taskset("builtin:chores")
    steps = 32 * 3 // n + 1
    sequence = [task for step in range(steps) for task in draw(chores, 3, step, n)]
    passes = [sequence[start : start + 32] for start in range(0, len(sequence) - 31, 32)]
    assert len(passes) >= 3
    assert all(sorted(one) == chores.task_ids for one in passes)
    assert passes[0] != passes[1]


# -- several sources --------------------------------------------------------------------------------------------------


def test_several_sources_are_one_set(tmp_path: Path) -> None:
    one, two = (str(_set_of(tmp_path / name, ["a", "b"])) for name in ("one", "two"))
    both = load_taskset([one, two])
    assert both.task_ids == ["one/rl360/a", "one/rl360/b", "two/rl360/a", "two/rl360/b"]
    assert both["two/rl360/a"].path == tmp_path / "two" / "a" and both["two/rl360/a"].domain == "append"
    assert load_taskset([one]).task_ids == ["one/rl360/a", "one/rl360/b"]
    assert len({load_taskset(spec).digest for spec in (one, [one], [one, two], [two])}) == 4
    assert "chores/rl360/append-1" in load_taskset(["builtin:chores", one]).task_ids
    with pytest.raises(BadInput, match=r"taskset.path: .*/one and .*/three/one are both named one; rename one"):
        load_taskset([one, str(_set_of(tmp_path / "three" / "one", ["a"]))])


def test_sources_are_weighed_by_their_names_or_by_domains(tmp_path: Path) -> None:
    one = str(_set_of(tmp_path / "one", ["a", "b"]))
    both = load_taskset(["builtin:chores", one])
    drawn = [name for step in range(10) for name in draw(both, 3, step, 8, {"chores": 1, "one": 3})]
    assert Counter(name.split("/")[0] for name in drawn) == {"chores": 20, "one": 60}
    assert drawn[8:16] == draw(both, 3, 1, 8, {"chores": 1, "one": 3})
    without = instead(both, drawn[:8], ["one/rl360/a"], {"chores": 1, "one": 3})
    assert Counter(name.split("/")[0] for name in without) == {"chores": 2, "one": 6}
    assert "one/rl360/a" not in without
    of_domains = dict.fromkeys(FAMILIES, 0.0) | {"append": 1.0}
    assert {both[name].domain for name in draw(both, 3, 0, 8, of_domains)} == {"append"}
    with pytest.raises(BadInput) as refused:
        draw(both, 3, 0, 8, {"chores": 1, "two": 1})
    assert "chores is unknown" in str(refused.value) and "or each source (chores, one)" in str(refused.value)
    with pytest.raises(BadInput, match=r"weights: one is missing; "):
        draw(both, 3, 0, 8, {"chores": 1})


def test_a_sandbox_server_knows_a_task_of_several_sources_by_its_whole_name(tmp_path: Path) -> None:
    """The verdict names it as the run's records do."""
    both = load_taskset([str(_set_of(tmp_path / "one", ["a"])), "builtin:chores"])
    provider: Any = SimpleNamespace(refusal=lambda _: None)
    for name, given in (("one/rl360/a", "one/rl360/a"), ("rl360/a", "rl360/a"), ("a", "rl360/a")):
        task_dir = str(both["one/rl360/a"].path)
        order = RunRequest(instance_id=name, task_dir=task_dir, attempt_id="a", base_url="http://h", agent_name="x")
        assert prepare(order, provider, {"x": nop_agent}, None).task.id == given


def test_a_config_with_several_sources_is_frozen_as_it_is() -> None:
    config = RunConfig.parse({"taskset": {"path": ["builtin:chores", "/two"]}})
    assert RunConfig.parse(config.to_json(), frozen=True) == config
    other = RunConfig.parse({"taskset": {"path": ["builtin:chores"]}})
    assert frozen_differences(config, other) == ["taskset.path: ['builtin:chores', '/two'] -> ['builtin:chores']"]
    with pytest.raises(BadInput, match=r"taskset.path"):
        RunConfig.parse({"taskset": {"path": []}})
