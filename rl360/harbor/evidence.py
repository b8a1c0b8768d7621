"""What a judge is shown of an attempt: the transcript that the host kept and files of the workspace, as bounded text.

All of it is the agent's and hostile. It is read after the agent's processes are proven gone and before any verifier
runs, so nothing changes it meanwhile; no link is followed, nothing is executed, and what is cut says how much. Lines
that were said or written are indented: whose they are and what is cut, only the host can say.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from rl360.harbor.dockerfile import Files
from rl360.sandboxes.workspace import MAX_DEPTH, MAX_FILES

MAX_LISTED = 256  # names that are listed, of which the first MAX_SHOWN are shown
MAX_SHOWN = 64
COMPARED_BYTES = 64 << 20  # a longer file counts as changed
CHUNK_BYTES = 1 << 16


def clip(text: str, limit_bytes: int) -> str:
    """`text` as UTF-8 of at most `limit_bytes` and a note: its first quarter and its end, where agents conclude. That
    goes on in the note's line, for it may begin in the middle of one."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return data.decode()
    head = limit_bytes // 4
    start, end = data[:head].decode("utf-8", "ignore"), data[len(data) - (limit_bytes - head) :]
    return f"{start}\n[... {len(data) - limit_bytes} bytes cut ...] {end.decode('utf-8', 'ignore')}"


def transcript_text(messages: Sequence[Mapping[str, Any]], instruction: str) -> str:
    """The conversation as text; what the task itself said (system prompt, instruction) is left out."""
    parts = []
    for message in messages:
        if not isinstance(message, Mapping):  # an agent of somebody's; shown as it stands
            parts.append(_json(message))
            continue
        role, content = str(message.get("role")), message.get("content")
        if role == "system" or content == instruction:
            continue
        said = content if isinstance(content, str) else "" if content is None else _json(content)
        listed = message.get("tool_calls")
        calls = [c.get("function") for c in listed if isinstance(c, Mapping)] if isinstance(listed, list) else []
        parts.append(
            "\n".join([f"[{role}]", *([_quoted(said)] if said else []), *(f"calls {_json(call)}" for call in calls)])
        )
    return "\n".join(parts) or "(the agent left no transcript)"


def _quoted(text: str) -> str:
    """Indented, so that no line of it is taken for a heading or a note."""
    return "\n".join(f"  {line}" for line in text.splitlines())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def files_text(folder: Path, before: Files, wanted: Sequence[str] | None, limit_bytes: int) -> str:
    """Names and contents of files under `folder`: those `wanted` names (a file, a folder or a pattern), or all that
    differ from what was there `before`, with what is there no more. Blocking."""
    names = list(_walk(folder))
    if wanted is None:
        names = [name for name in names if (its := before.get(name)) is None or _differs(folder / name, its)]
        gone = [
            f"{json.dumps(name)}: removed" for name, its in before.items() if its and not os.path.lexists(folder / name)
        ]
    else:
        names = [name for name in names if any(_meant(name, pattern) for pattern in wanted)]
        gone = [f"{json.dumps(item)}: not there" for item in wanted if not any(_meant(n, item) for n in names)]
    shown, listed = names[:MAX_SHOWN], names[MAX_SHOWN:MAX_LISTED]
    share = limit_bytes // max(1, len(shown))
    parts = [f"--- {json.dumps(name)}\n{_content(folder / name, share)}" for name in shown]
    parts += [f"--- {json.dumps(name)} (not shown)" for name in listed]
    parts += [f"--- and {len(names) - MAX_LISTED} more files"] if len(names) > MAX_LISTED else []
    return clip("\n".join([*gone[:MAX_LISTED], *parts]) or "(no files)", limit_bytes)


def _meant(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}/") or fnmatchcase(name, pattern)


def _walk(root: Path) -> Iterator[str]:
    """Sorted relative names of what is no folder, at most `MAX_FILES` and `MAX_DEPTH` deep."""
    found: list[str] = []
    folders, seen = [(root, 0)], 0
    while folders and seen < MAX_FILES:
        folder, depth = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    seen += 1
                    if seen > MAX_FILES:
                        break
                    if not entry.is_dir(follow_symlinks=False):
                        found.append(os.path.relpath(entry.path, root))
                    elif depth < MAX_DEPTH:
                        folders.append((Path(entry.path), depth + 1))
        except OSError:
            found.append(os.path.relpath(folder, root))  # named, so that the judge sees that something was there
    yield from sorted(found)


def _differs(ours: Path, theirs: Path) -> bool:
    """Whether a file of the workspace is another than the task's own of that name."""
    try:
        mine, its = ours.lstat(), theirs.lstat()
        if stat.S_IFMT(mine.st_mode) != stat.S_IFMT(its.st_mode) or mine.st_size != its.st_size:
            return True
        if not stat.S_ISREG(mine.st_mode):
            return not stat.S_ISLNK(mine.st_mode) or os.readlink(ours) != os.readlink(theirs)
        if mine.st_size > COMPARED_BYTES:
            return True
        with _plain(ours) as one, _plain(theirs) as other:
            while (data := one.read(CHUNK_BYTES)) == other.read(CHUNK_BYTES):
                if not data:
                    return False
        return True
    except OSError:
        return True


def _plain(path: Path) -> BinaryIO:
    """A plain file, opened to be read; OSError of anything else."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("not a plain file")
    return file


def _content(path: Path, limit_bytes: int) -> str:
    try:
        size = path.lstat().st_size
        if path.is_symlink():
            return f"(a link to {json.dumps(os.readlink(path))}, not followed)"
        with _plain(path) as file:
            data = file.read(limit_bytes)
    except OSError as error:
        return f"(cannot be read: {error.strerror or error})"
    if b"\0" in data:
        return f"(binary, {size} bytes)"
    cut = f"\n[... {size - len(data)} bytes cut ...]" if size > len(data) else ""
    return _quoted(data.decode("utf-8", "replace")) + cut
