"""What a task's Dockerfile puts into the working directory. It is read, never built: FROM, WORKDIR and plain COPY into
that directory mean what they mean to Docker, and all else is refused. The Dockerfile itself is never copied.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath

from rl360.errors import BadInput

MAX_TEXT_BYTES = 1 << 20
Files = dict[str, Path | None]  # name below a folder, sorted -> the file or link that is put there; None: a folder


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


def workspace_files(environment: Path, workdir: str) -> Files:
    """The working directory at the start; without a Dockerfile all of `environment`. Raises `BadInput` naming the line
    that Docker would refuse or that needs an image build."""
    context = tree_files(environment)
    path = context.pop("Dockerfile", None)
    if path is None or not path.is_file():
        return context
    if ".dockerignore" in context:
        raise BadInput(f"{environment / '.dockerignore'}: is not read; remove it, and let COPY name what is wanted")
    files, at = Files({"": None}), "/"
    text = re.sub(r"(?m)^[ \t]*(#.*)?\n", "", text_of(path) + "\n")  # within an instruction too
    for number, line in enumerate(re.findall(r".*\S.*", re.sub(r"\\[ \t]*\n", "", text))):
        keyword, *words = line.split()
        try:
            if not number and keyword.upper() != "FROM":
                raise BadInput("comes before FROM, which is the first line")
            if keyword.upper() == "WORKDIR":
                at = posixpath.normpath(posixpath.join(at, " ".join(_plain(words, 1))))
                _put(files, at[len(workdir) + 1 :] if at.startswith(f"{workdir}/") else "", None)
            elif keyword.upper() == "COPY":
                _copy(files, _plain(words, 2), at, workdir, {"": None, **context})
            elif number or keyword.upper() != "FROM":
                raise BadInput("needs an image build, which there is none of; leave it out")
        except BadInput as error:
            raise BadInput(f"{path}: {line.strip()[:200]}: {error}") from None
    del files[""]
    return dict(sorted(files.items()))


def _plain(words: list[str], least: int) -> list[str]:
    if re.search(r"""[$\\"'`]|^--|<<""", " ".join(words)):
        raise BadInput("flags, quotes, variables and here-documents are not read; use plain names")
    if len(words) < least:
        raise BadInput(f"{len(words)} words, at least {least} are needed")
    return words


def _copy(files: Files, words: list[str], at: str, workdir: str, context: Files) -> None:
    *sources, target = words
    into = posixpath.normpath(posixpath.join(at, target))
    if not f"{into}/".startswith(f"{workdir}/"):
        raise BadInput(f"{into} is outside the working directory {workdir} (environment.workdir of task.toml)")
    into, found = into[len(workdir) + 1 :], list[str]()
    for source in sources:
        pattern = posixpath.normpath(f"/{source}").replace("[^", "[!").replace("//", "/")
        here = [name for name in context if PurePosixPath(f"/{name}").match(pattern)]
        sure = len(sources) == 1 or not re.search(r"[*?[]", source)  # of several, a pattern may find nothing
        if sure and not here:
            raise BadInput(f"environment/ has no {source}")
        found += here
    if not (below := re.search(r"(^|/)\.{0,2}$", target)) and len(found) > 1:
        raise BadInput(f"{len(found)} sources need a folder to go to; write {target}/")
    for name in found:
        if (path := context[name]) and path.is_symlink():
            raise BadInput(f"{name} is a link; copy what it points to")
        inside = path and (below or files.get(into, path) is None)
        base = posixpath.join(into, posixpath.basename(name)) if inside else into
        for known, inner in context.items():
            if known == name or known.startswith(f"{name}/".lstrip("/")):
                _put(files, posixpath.join(base, known[len(name) :].strip("/")).rstrip("/"), inner)


def _put(files: Files, name: str, path: Path | None) -> None:
    for part, of in [*((str(parent), None) for parent in PurePosixPath(name).parents[-2::-1]), (name, path)]:
        if (files.setdefault(part, of) is None) != (of is None):
            raise BadInput(f"{part} would be a file and a folder")
        files[part] = of
