"""Sixteen families of shell chores that one to three commands solve.

A family is a pure function of a random generator: it draws words and file contents and returns a `Chore`, which holds
the instruction, the files it starts from, right command sequences, plausibly wrong ones (a flag swapped, `cp` for
`mv`, `>` for `>>`, the last step skipped) and the exact end state that counts as done. The end state is written by
hand per family, never by running the right commands, so that the oracle is really checked. Everything is kept short
on purpose: a prompt or command token costs CPU time on every attempt of every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Commands = tuple[str, ...]

_WORDS = """
apple arrow berry cedar cloud eagle fern frost grape honey ivory kite lake lemon maple mint north ocean olive
pearl pine plum raven reed ridge river robin rose shell silk solar stone storm sun swan tiger valley wave winter
wolf
"""
WORDS: tuple[str, ...] = tuple(_WORDS.split())
EXTENSIONS = ("log", "tmp", "csv", "old")


@dataclass(frozen=True)
class Chore:
    """One chore. `expected` maps a path in the work directory to its exact final text, or to None where it must not
    exist any more.
    """

    family: str
    instruction: str
    files: Mapping[str, str]
    right: tuple[Commands, ...]
    wrong: tuple[Commands, ...]
    expected: Mapping[str, str | None] = field(default_factory=dict)


def _words(rng: random.Random, count: int) -> list[str]:
    """`count` different words, none a part of another (so that `grep` and `sed` patterns never hit by accident)."""
    return rng.sample(WORDS, count)


def _text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def create(rng: random.Random) -> Chore:
    name, word, other = _words(rng, 3)
    files = {f"{other}.txt": _text(_words(rng, 2))}
    return Chore(
        family="create",
        instruction=f"Create {name}.txt with the line {word}.",
        files=files,
        right=((f"echo {word} > {name}.txt",),),
        wrong=((f"touch {name}.txt",), (f"echo {name} > {word}.txt",), (f"echo {word} > {name}",), (f"echo {word}",)),
        expected={**files, f"{name}.txt": f"{word}\n"},
    )


def append(rng: random.Random) -> Chore:
    name, word, *lines = _words(rng, 4)
    return Chore(
        family="append",
        instruction=f"Add the line {word} at the end of {name}.txt.",
        files={f"{name}.txt": _text(lines)},
        right=((f"echo {word} >> {name}.txt",),),
        wrong=(
            (f"echo {word} > {name}.txt",),
            (f"echo {name} >> {word}.txt",),
            (f"echo {word} >> {name}",),
            (f"echo {word}",),
        ),
        expected={f"{name}.txt": _text([*lines, word])},
    )


def rename(rng: random.Random) -> Chore:
    old, new, other, *lines = _words(rng, 5)
    bystander = {f"{other}.txt": f"{other}\n"}
    return Chore(
        family="rename",
        instruction=f"Rename {old}.txt to {new}.txt.",
        files={f"{old}.txt": _text(lines), **bystander},
        right=((f"mv {old}.txt {new}.txt",),),
        wrong=(
            (f"cp {old}.txt {new}.txt",),
            (f"mv {new}.txt {old}.txt",),
            (f"mv {old}.txt {new}",),
            (f"touch {new}.txt",),
        ),
        expected={f"{old}.txt": None, f"{new}.txt": _text(lines), **bystander},
    )


def shelve(rng: random.Random) -> Chore:
    name, folder, *lines = _words(rng, 4)
    return Chore(
        family="shelve",
        instruction=f"Make the directory {folder} and move {name}.txt into it.",
        files={f"{name}.txt": _text(lines)},
        right=((f"mkdir {folder}", f"mv {name}.txt {folder}"),),
        wrong=(
            (f"mkdir {folder}",),
            (f"mkdir {folder}", f"cp {name}.txt {folder}"),
            (f"mv {name}.txt {folder}",),
            (f"mkdir {name}", f"mv {name}.txt {name}"),
        ),
        expected={f"{name}.txt": None, f"{folder}/{name}.txt": _text(lines)},
    )


def backup(rng: random.Random) -> Chore:
    name, *lines = _words(rng, 3)
    return Chore(
        family="backup",
        instruction=f"Copy {name}.txt to {name}.bak and keep {name}.txt.",
        files={f"{name}.txt": _text(lines)},
        right=((f"cp {name}.txt {name}.bak",),),
        wrong=(
            (f"mv {name}.txt {name}.bak",),
            (f"cp {name}.bak {name}.txt",),
            (f"touch {name}.bak",),
            (f"cp {name}.txt bak",),
        ),
        expected={f"{name}.txt": _text(lines), f"{name}.bak": _text(lines)},
    )


def count(rng: random.Random) -> Chore:
    source, target, *_ = _words(rng, 2)
    lines = [" ".join(_words(rng, 2)) for _ in range(rng.randint(3, 7))]
    return Chore(
        family="count",
        instruction=f"Write only the number of lines of {source}.txt to {target}.txt.",
        files={f"{source}.txt": _text(lines)},
        right=((f"wc -l < {source}.txt > {target}.txt",),),
        wrong=(
            (f"wc -w < {source}.txt > {target}.txt",),
            (f"wc -c < {source}.txt > {target}.txt",),
            (f"wc -l {source}.txt > {target}.txt",),
            (f"wc -l < {source}.txt",),
        ),
        expected={f"{source}.txt": _text(lines), f"{target}.txt": f"{len(lines)}\n"},
    )


def _shuffled(rng: random.Random, lines: list[str]) -> list[str]:
    """`lines` in an order that is neither ascending nor descending (needs three or more different ones)."""
    while True:
        rng.shuffle(lines)
        if lines not in (sorted(lines), sorted(lines, reverse=True)):
            return list(lines)


def sort(rng: random.Random) -> Chore:
    source, target, *lines = _words(rng, 6)
    lines, backwards = _shuffled(rng, lines), rng.random() < 0.5
    good, bad = ("sort -r", "sort") if backwards else ("sort", "sort -r")
    return Chore(
        family="sort",
        instruction=f"Sort {source}.txt in {'reverse' if backwards else 'normal'} order into {target}.txt.",
        files={f"{source}.txt": _text(lines)},
        right=((f"{good} {source}.txt > {target}.txt",),),
        wrong=(
            (f"{bad} {source}.txt > {target}.txt",),
            (f"{good} {source}.txt > {source}.txt",),
            (f"{good} {source}.txt",),
            (f"cp {source}.txt {target}.txt",),
        ),
        expected={f"{source}.txt": _text(lines), f"{target}.txt": _text(sorted(lines, reverse=backwards))},
    )


def unique(rng: random.Random) -> Chore:
    source, target, first, second, third = _words(rng, 5)
    first, second, third = _shuffled(rng, [first, second, third])
    lines = [first, second, second, third, first]
    return Chore(
        family="unique",
        instruction=f"Write each different line of {source}.txt once, sorted, to {target}.txt.",
        files={f"{source}.txt": _text(lines)},
        right=((f"sort -u {source}.txt > {target}.txt",),),
        wrong=(
            (f"uniq {source}.txt > {target}.txt",),
            (f"sort {source}.txt > {target}.txt",),
            (f"sort -u {source}.txt",),
            (f"sort -u {source}.txt > {source}.txt",),
        ),
        expected={f"{source}.txt": _text(lines), f"{target}.txt": _text(sorted(set(lines)))},
    )


def _ends(rng: random.Random, family: str, side: str, tool: str, other: str) -> Chore:
    source, target, *lines = _words(rng, 8)
    number = rng.randint(2, 4)
    kept = lines[:number] if tool == "head" else lines[-number:]
    return Chore(
        family=family,
        instruction=f"Write the {side} {number} lines of {source}.txt to {target}.txt.",
        files={f"{source}.txt": _text(lines)},
        right=((f"{tool} -n {number} {source}.txt > {target}.txt",),),
        wrong=(
            (f"{other} -n {number} {source}.txt > {target}.txt",),
            (f"{tool} -n {number + 1} {source}.txt > {target}.txt",),
            (f"{tool} -c {number} {source}.txt > {target}.txt",),
            (f"{tool} -n {number} {source}.txt",),
        ),
        expected={f"{source}.txt": _text(lines), f"{target}.txt": _text(kept)},
    )


def head(rng: random.Random) -> Chore:
    return _ends(rng, "head", "first", "head", "tail")


def tail(rng: random.Random) -> Chore:
    return _ends(rng, "tail", "last", "tail", "head")


def grep(rng: random.Random) -> Chore:
    source, target, word, *others = _words(rng, 6)
    lines = _shuffled(rng, [f"{word} {others[0]}", f"{others[1]} {word}", others[2], others[0], others[1]])
    return Chore(
        family="grep",
        instruction=f"Write the lines of {source}.txt with {word} to {target}.txt.",
        files={f"{source}.txt": _text(lines)},
        right=((f"grep {word} {source}.txt > {target}.txt",),),
        wrong=(
            (f"grep -v {word} {source}.txt > {target}.txt",),
            (f"grep -c {word} {source}.txt > {target}.txt",),
            (f"grep {target} {source}.txt > {word}.txt",),
            (f"grep {word} {source}.txt",),
        ),
        expected={
            f"{source}.txt": _text(lines),
            f"{target}.txt": _text([line for line in lines if word in line.split()]),
        },
    )


def replace(rng: random.Random) -> Chore:
    name, old, new, other = _words(rng, 4)
    lines = [f"{old} {other} {old}", other, f"{other} {old} {old}"]
    return Chore(
        family="replace",
        instruction=f'Replace every "{old}" by "{new}" in {name}.txt.',
        files={f"{name}.txt": _text(lines)},
        right=((f"sed -i s/{old}/{new}/g {name}.txt",),),
        wrong=(
            (f"sed -i s/{old}/{new}/ {name}.txt",),
            (f"sed -i s/{new}/{old}/g {name}.txt",),
            (f"sed s/{old}/{new}/g {name}.txt",),
            (f"echo {new} > {name}.txt",),
        ),
        expected={f"{name}.txt": _text(lines).replace(old, new)},
    )


def merge(rng: random.Random) -> Chore:
    first, second, target, *words = _words(rng, 7)
    one, two = _text(words[:2]), _text(words[2:])
    join = f"cat {first}.txt {second}.txt > {target}.txt"
    return Chore(
        family="merge",
        instruction=f"Join {first}.txt and {second}.txt into {target}.txt, then delete both.",
        files={f"{first}.txt": one, f"{second}.txt": two},
        right=((join, f"rm {first}.txt {second}.txt"),),
        wrong=(
            (join,),
            (f"cat {second}.txt {first}.txt > {target}.txt", f"rm {first}.txt {second}.txt"),
            (join, f"rm {first}.txt"),
            (join, f"rm {target}.txt"),
        ),
        expected={f"{first}.txt": None, f"{second}.txt": None, f"{target}.txt": one + two},
    )


def secret(rng: random.Random) -> Chore:
    source, target, word = _words(rng, 3)
    return Chore(
        family="secret",
        instruction=f"Read the secret word in {source}.txt and write it twice on one line to {target}.txt.",
        files={f"{source}.txt": f"word: {word}\n"},
        right=((f"cat {source}.txt", f"echo {word} {word} > {target}.txt"),),
        wrong=(
            (f"cat {source}.txt",),
            (f"cat {source}.txt", f"echo {word} > {target}.txt"),
            (f"cp {source}.txt {target}.txt",),
            (f"cat {source}.txt", f"echo {word} {word} > {source}.txt"),
        ),
        expected={f"{source}.txt": f"word: {word}\n", f"{target}.txt": f"{word} {word}\n"},
    )


def fix(rng: random.Random) -> Chore:
    name, good, bad = _words(rng, 3)
    return Chore(
        family="fix",
        instruction=f'Read {name}.sh and fix it: it must print "{good}".',
        files={f"{name}.sh": f'echo "{bad}"\n'},
        right=((f"cat {name}.sh", f"sed -i s/{bad}/{good}/ {name}.sh"),),
        wrong=(
            (f"cat {name}.sh",),
            (f"cat {name}.sh", f"sed -i s/{good}/{bad}/ {name}.sh"),
            (f"cat {name}.sh", f"sed s/{bad}/{good}/ {name}.sh"),
            (f"cat {name}.sh", f"echo {good} > {name}.sh"),
        ),
        expected={f"{name}.sh": f'echo "{good}"\n'},
    )


def purge(rng: random.Random) -> Chore:
    first, second, kept, spare = _words(rng, 4)
    extension, other = rng.sample(EXTENSIONS, 2)
    stay = {f"{kept}.txt": f"{kept}\n", f"{spare}.{other}": f"{spare}\n"}
    return Chore(
        family="purge",
        instruction=f"Delete all {extension} files and keep the rest.",
        files={f"{first}.{extension}": f"{first}\n", f"{second}.{extension}": f"{second}\n", **stay},
        right=((f"rm *.{extension}",),),
        wrong=(("rm *",), ("rm *.txt",), (f"rm {extension}",), (f"ls *.{extension}",)),
        expected={f"{first}.{extension}": None, f"{second}.{extension}": None, **stay},
    )


FAMILIES: dict[str, Callable[[random.Random], Chore]] = {
    make.__name__: make
    for make in (
        create,
        append,
        rename,
        shelve,
        backup,
        count,
        sort,
        unique,
        head,
        tail,
        grep,
        replace,
        merge,
        secret,
        fix,
        purge,
    )
}


def draw_chore(rng: random.Random, family: str | None = None) -> Chore:
    """One random chore; of `family` when given, else of a family drawn uniformly."""
    return FAMILIES[family or rng.choice(list(FAMILIES))](rng)
