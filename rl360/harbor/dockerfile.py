"""What a task's Dockerfile puts into the working directory. It is read, never built: FROM, WORKDIR and plain COPY mean
what they mean to Docker, and so does `.dockerignore`; any other line needs an image build and is named.

The Dockerfile itself comes into no workspace, as if `.dockerignore` named it.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rl360.errors import BadInput

MAX_TEXT_BYTES = 1 << 20
GO = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]", "[^": "[^"}  # its patterns; `**` is .dockerignore's
Files = dict[str, Path | None]  # name below a folder, sorted -> the file or link that is put there; None: a folder


@dataclass(frozen=True)
class Layout:
    """A workspace at the start. `build`: lines that need an image build; `whole`: it is environment/ as it stands."""

    files: Files
    build: tuple[str, ...] = ()
    whole: bool = True


class _NotPlain(Exception):
    """Why a line is more than what is read."""


def text_of(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise BadInput(f"{path}: {size} bytes, limit {MAX_TEXT_BYTES}; shorten it")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from None


def tree_files(root: Path) -> Files:
    """All there is under `root`."""
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    return {name: path if path.is_symlink() or not path.is_dir() else None for name, path in sorted(found.items())}


def layout_of(environment: Path, workdir: str) -> Layout:
    """Raises `BadInput` for what Docker refuses too: a source that is not there, a file in the place of a folder."""
    everything = tree_files(environment)
    path = everything.pop("Dockerfile", None)
    if path is None or not path.is_file():
        return Layout(everything)
    context = {"": None, **_without_ignored(environment / ".dockerignore", everything)}
    files, build, at = Files({"": None}), list[str](), "/"
    text = re.sub(r"(?m)^[ \t]*(#.*)?\n", "", text_of(path) + "\n")  # within an instruction too
    for number, line in enumerate(re.sub(r"\\[ \t]*\n", "", text).split("\n")[:-1]):
        (keyword, said), shown = re.split(r"\s+", line.strip() + " ", maxsplit=1), line.strip()[:200]
        try:
            if keyword.upper() == "WORKDIR":
                at = posixpath.normpath(posixpath.join(at, *_words(said, 1, 1)))
                _put(files, at[len(workdir) + 1 :] if at.startswith(f"{workdir}/") else "", None)
            elif keyword.upper() == "COPY":
                _copy(files, _words(said, 2, len(said)), at, workdir, context)
            elif number or keyword.upper() != "FROM":
                build.append(shown)
        except _NotPlain as error:
            build.append(f"{shown} ({error})")
        except BadInput as error:
            raise BadInput(f"{path}: {shown}: {error}") from None
    del files[""]
    return Layout(dict(sorted(files.items())), tuple(build), files == everything)


def _words(said: str, least: int, most: int) -> list[str]:
    words = said.split()
    if re.search(r"""[$\\"'`]|^--|<<""", said):
        raise _NotPlain("flags, quotes, variables and here-documents are not read")
    if not least <= len(words) <= max(least, most):
        raise BadInput(f"{len(words)} words, expected {least}{'' if least == most else ' or more'}")
    return words


def _copy(files: Files, words: list[str], at: str, workdir: str, context: Files) -> None:
    *sources, target = words
    into = posixpath.normpath(posixpath.join(at, target))
    if not f"{into}/".startswith(f"{workdir}/"):
        raise _NotPlain(f"{into} is outside the working directory {workdir}")
    into, found = into[len(workdir) + 1 :], list[str]()
    for source in sources:
        name = posixpath.normpath(f"/{source}").strip("/")
        pattern = _pattern(re.sub(r"\*+", "*", name))
        here = [known for known in context if bool(known) == bool(name) and pattern.fullmatch(known)]
        if not here and (len(sources) == 1 or not re.search(r"[*?[]", name)):  # of several, a pattern may find nothing
            raise BadInput(f"environment/ has no {source}, or .dockerignore leaves it out")
        found += here
    below = target.endswith("/") or target.rpartition("/")[2] in (".", "..")
    if len(found) > 1 and not below:
        raise BadInput(f"{len(found)} sources need a folder to go to; write {target}/")
    below = below or files.get(into, context) is None
    for name in found:
        path = context[name]
        if path is not None and path.is_symlink():
            raise _NotPlain(f"{name} is a link")
        base = posixpath.join(into, posixpath.basename(name)) if path is not None and below else into
        for known, inner in context.items():
            if known == name or known.startswith(f"{name}/".lstrip("/")):
                _put(files, posixpath.join(base, known[len(name) :].strip("/")).rstrip("/"), inner)


def _put(files: Files, name: str, path: Path | None) -> None:
    for part, of in [*((str(parent), None) for parent in PurePosixPath(name).parents[-2::-1]), (name, path)]:
        if (files.setdefault(part, of) is None) != (of is None):
            raise BadInput(f"{part} would be a file and a folder")
        files[part] = of


def _without_ignored(path: Path, everything: Files) -> Files:
    """The last rule that matches a name, or a folder it is in, decides."""
    lines = map(str.strip, text_of(path).splitlines() if path.is_file() else [])
    rules = [
        (_pattern(posixpath.normpath("/" + line.strip("! ")).strip("/"), "(/.*)?"), line[0] == "!")
        for line in reversed([*lines])
        if line and line[0] != "#"
    ]
    kept = [name for name in everything if next((stays for rule, stays in rules if rule.fullmatch(name)), True)]
    return {name: everything[name] for name in kept}


def _pattern(text: str, end: str = "") -> re.Pattern[str]:
    try:
        made = re.sub(r"\[\^|\*\*/?|[^\w/\[\]-]", lambda found: GO.get(found[0]) or re.escape(found[0]), text)
        return re.compile(made + end, re.DOTALL)
    except re.error as error:
        raise BadInput(f"pattern {text!r}: {error}") from None
