"""What COPY lines put into the working directory: as Docker does, or refused by the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl360.errors import BadInput
from rl360.harbor.dockerfile import Files, workspace_files

NAMES = ("a.txt", "b.txt", ".hid", "d/x.txt", "d/sub/y.txt", "e/z.txt")
BELOW_D = {"sub": None, "sub/y.txt": "d/sub/y.txt", "x.txt": "d/x.txt"}


def laid_out(folder: Path, dockerfile: str | None) -> Files:
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "empty").mkdir()
    if dockerfile is not None:
        (folder / "Dockerfile").write_text(dockerfile)
    return workspace_files(folder, "/app")


def files_of(folder: Path, line: str) -> dict[str, str | None]:
    found = laid_out(folder, f"FROM x\nWORKDIR /app\n{line}\n")
    assert list(found) == sorted(found)
    return {name: path and path.relative_to(folder).as_posix() for name, path in found.items()}


@pytest.mark.parametrize("dockerfile", [None, "FROM x\nCOPY . /app\n", "FROM x\nWORKDIR /app\nCOPY ./ .\n"])
def test_without_a_dockerfile_or_copied_whole_it_is_the_folder(tmp_path: Path, dockerfile: str | None) -> None:
    found = laid_out(tmp_path, dockerfile)
    assert [name for name, path in found.items() if path] == sorted(NAMES)
    assert [name for name, path in found.items() if path is None] == ["d", "d/sub", "e", "empty"]


def test_without_copy_nothing_is_there(tmp_path: Path) -> None:
    assert laid_out(tmp_path, "FROM x\nWORKDIR /app\n") == {}


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("COPY a.txt /app/data/pond.txt", {"data": None, "data/pond.txt": "a.txt"}),
        ("COPY a.txt /app", {"a.txt": "a.txt"}),
        ("copy\ta.txt .", {"a.txt": "a.txt"}),
        ("COPY /a.txt ../../a.txt ../app/in/", {"in": None, "in/a.txt": "a.txt"}),
        ("COPY a.txt \\\n# why\n\n  b.txt \\\n  ./", {"a.txt": "a.txt", "b.txt": "b.txt"}),
        ("COPY [^b].txt q*.md ./", {"a.txt": "a.txt"}),
        ("COPY a.txt ./ \\", {"a.txt": "a.txt"}),
        ("COPY d .", BELOW_D),
        ("COPY d/ to", {"to": None, **{f"to/{name}": path for name, path in BELOW_D.items()}}),
        ("COPY empty to", {"to": None}),
        ("COPY [ab].txt q* ./", {"a.txt": "a.txt", "b.txt": "b.txt"}),
        ("COPY ?.txt ./", {"a.txt": "a.txt", "b.txt": "b.txt"}),
        ("COPY */x.txt ./", {"x.txt": "d/x.txt"}),
        ("COPY **/x.txt d*/ ./", BELOW_D),
        ("COPY [ab].txt d ./ignored/../in/", {
            "in": None, "in/a.txt": "a.txt", "in/b.txt": "b.txt", **{f"in/{name}": of for name, of in BELOW_D.items()}
        }),
        ("COPY .* ./", {".hid": ".hid"}),
        ("WORKDIR in/it\nCOPY a.txt ./", {"in": None, "in/it": None, "in/it/a.txt": "a.txt"}),
        ("COPY d to\nCOPY a.txt to\nCOPY b.txt to/x.txt", {
            "to": None, "to/a.txt": "a.txt", "to/sub": None, "to/sub/y.txt": "d/sub/y.txt", "to/x.txt": "b.txt"
        }),
    ],
)  # fmt: skip
def test_a_copy_goes_where_docker_puts_it(tmp_path: Path, line: str, files: dict[str, str | None]) -> None:
    assert files_of(tmp_path, line) == files


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("COPY missing.txt /app/", "environment/ has no missing.txt"),
        ("COPY Dockerfile /app/", "environment/ has no Dockerfile"),
        ("COPY q* ./", "environment/ has no q*"),
        ("COPY a.txt q.txt ./", "environment/ has no q.txt"),
        ("COPY *.txt /app/to", "2 sources need a folder to go to; write /app/to/"),
        ("COPY a.txt", "1 words, at least 2"),
        ("WORKDIR", "0 words, at least 1"),
        ("COPY a.txt to\nCOPY d to", "to would be a file and a folder"),
        ("COPY d a.txt\nCOPY a.txt ./", "a.txt would be a file and a folder"),
        ("COPY a.txt to\nCOPY b.txt to/", "to would be a file and a folder"),
        ("COPY [z-a] ./", "environment/ has no [z-a]"),
    ],
)
def test_what_docker_refuses_is_refused_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        files_of(tmp_path, line)
    assert f"{tmp_path / 'Dockerfile'}: {line.splitlines()[-1]}: " in str(refused.value) and words in str(refused.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("COPY --chown=1:1 a.txt ./", "flags"),
        ("COPY --from=b /x ./", "flags"),
        ("COPY $A ./", "variables"),
        ("WORKDIR $HOME", "variables"),
        ("COPY 'a.txt' ./", "quotes"),
        ('COPY ["a.txt", "./"]', "quotes"),
        ("COPY <<EOF /app/x", "here-documents"),
        ("COPY a.txt /srv/", "/srv is outside the working directory /app (environment.workdir of task.toml)"),
        ("COPY a.txt /application", "/application is outside"),
        ("WORKDIR /\nCOPY . .", "/ is outside"),
        ("COPY link ./", "link is a link"),
        ("ADD a.tar /app/", "needs an image build"),
        ("ENV A=1", "needs an image build"),
        ("FROM y", "needs an image build"),
    ],
)
def test_what_is_no_plain_copy_is_refused_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(BadInput) as refused:
        files_of(tmp_path, line)
    assert f"Dockerfile: {line.splitlines()[-1]}: " in str(refused.value) and words in str(refused.value)


@pytest.mark.parametrize("text", ["COPY a.txt /app/\n", "COPY . /app\nFROM x\n", "ARG V=1\nFROM x\n"])
def test_nothing_comes_before_from(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match=f"Dockerfile: {text.splitlines()[0]}: comes before FROM, which is the first"):
        laid_out(tmp_path, text)


def test_an_ignore_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*.txt\n")
    with pytest.raises(BadInput, match=r"/.dockerignore: is not read; remove it"):
        files_of(tmp_path, "COPY . .")


def test_links_in_a_copied_folder_stay_links(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to("x.txt")
    assert files_of(tmp_path, "COPY d ./") == {**BELOW_D, "link": "d/link"}
