"""Trees in and out of a sandbox that is elsewhere, as tars on disk. What comes out was made by the policy's code.

Unpacking follows nothing: all folders and plain files are made first, in a new folder where no link exists yet, then
hard links among them, then symbolic links. Devices and pipes are left out. Counted while it is written, never before.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rl360.sandboxes.workspace import MAX_FILES, MAX_LEVELS

COPY_BYTES = 1 << 20
# what names and links in a tar can lead to (EPERM: a second name for a folder)
BY_NAMES = {"EEXIST", "ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP", "EMLINK", "EINVAL", "EILSEQ", "EPERM"}


class Hostile(Exception):
    """A tar that only what ran inside could have made so: over its limits, or with names that lead outside."""


@dataclass(frozen=True)
class Part:
    """A tree of this host and its place inside. `uid` owns it there; `writable=False` takes every write bit away."""

    host: Path
    inside: str
    uid: int = 0
    writable: bool = True


def pack(parts: list[Part], out: IO[bytes], *, roots: bool) -> int:
    """Write a tar of the parts, names without the leading slash; returns its bytes. `roots=False` leaves out the
    parts' own folders and their parents, for places that are there already and belong to somebody else."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if roots:
            above = {str(p) for part in parts for p in Path(part.inside).parents} - {"/"}
            for name in sorted(above - {part.inside for part in parts}):
                archive.addfile(_entry(name, 0, 0o755, tarfile.DIRTYPE))
        for part in parts:
            for folder, names, files in os.walk(part.host):
                here = os.path.join(part.inside, os.path.relpath(folder, part.host))
                if roots or folder != str(part.host):
                    archive.addfile(_entry(here, part.uid, 0o755 if part.writable else 0o555, tarfile.DIRTYPE))
                for name in (*files, *(name for name in names if os.path.islink(os.path.join(folder, name)))):
                    _add(archive, Path(folder, name), os.path.join(here, name), part)
    return out.tell()


def _entry(name: str, uid: int, mode: int, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(os.path.normpath(name).lstrip("/"))
    info.uid, info.gid, info.mode, info.type = uid, uid, mode, kind
    return info


def _add(archive: tarfile.TarFile, path: Path, name: str, part: Part) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        info = _entry(name, part.uid, 0o777, tarfile.SYMTYPE)
        info.linkname = os.readlink(path)
        archive.addfile(info)
    elif stat.S_ISREG(status.st_mode):
        mode = stat.S_IMODE(status.st_mode) & 0o777
        info = _entry(name, part.uid, mode if part.writable else mode & 0o555, tarfile.REGTYPE)
        info.size, info.mtime = status.st_size, status.st_mtime
        with path.open("rb") as data:
            archive.addfile(info, data)


def unpack(data: IO[bytes], target: Path, limit_bytes: int, strip: int = 1) -> None:
    """Put a tar into `target`, which must not exist, without the first `strip` parts of each name. Raises
    `Hostile`, and `tarfile.TarError` for what is no whole tar; then something of it may be in `target`."""
    target.mkdir()
    total = entries = 0
    later: list[tuple[tarfile.TarInfo, Path]] = []
    try:
        with tarfile.open(fileobj=data, mode="r:") as archive:
            for member in archive:
                entries += 1
                total += member.size if member.isreg() else 0
                if total > limit_bytes or entries > MAX_FILES or member.issparse():
                    raise Hostile(f"more than {limit_bytes >> 20} MB or {MAX_FILES} files")
                made = target.joinpath(*_inside(member.name, strip))
                if member.isdir():
                    made.mkdir(parents=True, exist_ok=True)
                elif member.isreg():
                    _write(archive, member, made)
                elif member.islnk() or member.issym():
                    later.append((member, made))
        for _, made in later:  # before the first link: none of them is ever followed
            made.parent.mkdir(parents=True, exist_ok=True)
        for member, made in sorted(later, key=lambda pair: pair[0].issym()):
            if member.issym():
                os.symlink(member.linkname, made)
            else:
                os.link(target.joinpath(*_inside(member.linkname, strip)), made, follow_symlinks=False)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) not in BY_NAMES:  # this host's doing
            raise
        raise Hostile(f"a tar that cannot be unpacked: {error}") from None


def _inside(name: str, strip: int) -> list[str]:
    """The parts of a member's name that are kept."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or len(parts) > MAX_LEVELS:
        raise Hostile(f"a tar with the name {name[:80]!r}")
    return parts[strip:]


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, made: Path) -> None:
    made.parent.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    source = archive.extractfile(member)
    if source is None:
        raise Hostile(f"a tar whose file {member.name[:80]!r} has no content")
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        shutil.copyfileobj(source, out, COPY_BYTES)
        os.fchmod(out.fileno(), (member.mode & 0o777) | 0o600)
