"""Every family: right commands earn 1, every wrong sequence and doing nothing earn 0, by the real verifier."""

from __future__ import annotations

import random
from pathlib import Path

from chores_judge import judge_all

from rl360.tasksets.chores import FAMILIES, WORDS, draw_chore
from rl360.tasksets.harbor_files import BUILTIN_DIR, builtin_chores, solution_text, task_files, verifier_text


def _draws(count: int) -> list:
    return [draw_chore(random.Random(f"test:{name}:{i}"), name) for name in FAMILIES for i in range(count)]


def test_right_passes_and_wrong_fails(tmp_path: Path) -> None:
    cases, wanted, names = [], [], []
    for chore in _draws(1):
        for commands in chore.right:
            cases.append((chore.files, commands, verifier_text(chore)))
            wanted.append("1")
            names.append((chore.family, commands))
        for commands in (*chore.wrong, ()):
            cases.append((chore.files, commands, verifier_text(chore)))
            wanted.append("0")
            names.append((chore.family, commands))
    got = judge_all(tmp_path, cases)
    assert [name for name, g, w in zip(names, got, wanted, strict=True) if g != w] == []


def test_verifier_sees_side_damage_and_links(tmp_path: Path) -> None:
    backup = draw_chore(random.Random(1), "backup")
    name = next(iter(backup.files)).removesuffix(".txt")
    rename = draw_chore(random.Random(1), "rename")
    bystander = next(path for path, text in rename.expected.items() if text is not None and path in rename.files)
    cases = [
        (backup.files, (f"ln -s {name}.txt {name}.bak",), verifier_text(backup)),
        (backup.files, (*backup.right[0], f"echo x >> {name}.txt"), verifier_text(backup)),
        (rename.files, (*rename.right[0], f"rm {bystander}"), verifier_text(rename)),
        (backup.files, (f"mkfifo {name}.bak",), verifier_text(backup)),
        (backup.files, ("rm -rf /app",), verifier_text(backup)),
    ]
    assert judge_all(tmp_path, cases) == ["0"] * len(cases)


def test_every_builtin_oracle_passes(tmp_path: Path) -> None:
    chores = [chore for _, chore in builtin_chores()]
    assert len(chores) == 32
    solved = [(chore.files, (solution_text(chore),), verifier_text(chore)) for chore in chores]
    untouched = [(chore.files, (), verifier_text(chore)) for chore in chores]
    assert judge_all(tmp_path, solved + untouched) == ["1"] * 32 + ["0"] * 32


def test_committed_tasks_are_what_the_generator_writes() -> None:
    wanted = {
        f"{name}/{path}": text for name, chore in builtin_chores() for path, text in task_files(name, chore).items()
    }
    found = {str(p.relative_to(BUILTIN_DIR)): p.read_text() for p in BUILTIN_DIR.rglob("*") if p.is_file()}
    assert found == wanted


def test_draws_are_a_function_of_the_generator() -> None:
    for family in FAMILIES:
        assert draw_chore(random.Random("x"), family) == draw_chore(random.Random("x"), family)
        assert draw_chore(random.Random("x"), family) != draw_chore(random.Random("y"), family) or family == "purge"


def test_no_word_is_part_of_another() -> None:
    assert [(a, b) for a in WORDS for b in WORDS if a != b and a in b] == []
