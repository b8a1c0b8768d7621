"""The environment of real Harbor: a Python 3.12 and the packages of requirements/harbor.txt, made once."""

from __future__ import annotations

import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

from rl360.config.services import home_dir
from rl360.errors import BadInput, Rl360Error

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements" / "harbor.txt"
STAMP = "rl360-requirements.sha256"
MAKE_S = 1800


def default_folder() -> Path:
    return home_dir() / "harbor"


def ready(folder: Path) -> bool:
    """Whether `folder` was made whole from today's requirements."""
    try:
        return (folder / STAMP).read_text() == _wanted() and (folder / "bin" / "python").exists()
    except OSError:
        return False


def require_ready(folder: Path) -> None:
    """`BadInput` where that is no environment for today's requirements."""
    if not ready(folder):
        raise BadInput(f"{folder} is no environment for Harbor, or one of other versions: run `rl360 harbor setup`")


def make(folder: Path, python: str) -> tuple[bool, Path]:
    """The environment at `folder`; False when it was there. `BadInput` without a Python 3.12."""
    if ready(folder):
        return False, folder
    found = shutil.which(python)
    version = None
    if found is not None:
        said = _run([found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], 30, check=False)
        version = said.strip()
    if version != "3.12":
        have = "is not there" if found is None else f"is Python {version or 'unknown'}"
        raise BadInput(f"{python} {have}; Harbor is installed for 3.12: give --python /path/to/python3.12")
    assert found is not None
    (folder / STAMP).unlink(missing_ok=True)
    _run([found, "-m", "venv", "--clear", str(folder)], 300)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "install", "-r", str(REQUIREMENTS)], MAKE_S)
    (folder / STAMP).write_text(_wanted())
    return True, folder


def _wanted() -> str:
    return sha256(REQUIREMENTS.read_bytes()).hexdigest()


def _run(argv: list[str], limit_s: float, *, check: bool = True) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Rl360Error(f"{' '.join(argv[:4])}: {error}") from None
    if check and done.returncode != 0:
        raise Rl360Error(f"{' '.join(argv[:4])}: exit {done.returncode}: {' '.join(done.stderr.split())[-800:]}")
    return done.stdout
