"""`rl360 sandboxes list|reap`: the living are left alone, what the killed left is named, removed and proven gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers shared by the parts of the suite
from sandbox_daemons import FakeDocker
from test_sandboxes import REASON

from rl360.commands import sandboxes
from rl360.errors import BadInput
from rl360.sandboxes import rooted
from rl360.sandboxes.bubblewrap import marked_pids
from rl360.sandboxes.workspace import remove_tree

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = "token-of-the-reaper-tests"
pytestmark = [pytest.mark.contract, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

HOLDS_ONE = """
import asyncio, sys
from pathlib import Path
from typing import Any
from rl360.harbor.protocol import SandboxLimits
from rl360.sandboxes.provider import SandboxSpec
from rl360.sandboxes.providers import open_provider

async def main():
    provider = open_provider(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    workspace = await provider.new_workspace("demo/one", None)
    labels = {"run": "demo", "step": "4", "attempt": "one"}
    await provider.create(SandboxSpec("demo/one", labels, SandboxLimits(), workspace))
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("RL360_HOME", str(tmp_path))
    return tmp_path


def owner_of_one(kind: str, home: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", HOLDS_ONE, kind, str(home / "sandboxes" / "13300"), TOKEN]
    made = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert made.stdout is not None and made.stdout.readline() == b"ready\n"
    return made


def rl360(*argv: str) -> Result:
    return CliRunner().invoke(sandboxes.app, list(argv))


def listed(kind: str, *options: str) -> list[dict[str, Any]]:
    done = rl360("list", "--provider", kind, "--json", *options)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def only_the_dead_are_reaped(kind: str, home: Path) -> None:
    owner = owner_of_one(kind, home)
    try:
        (row,) = listed(kind)
        assert row["state"] == "held" and row["provider"] == kind
        assert (row["run"], row["step"], row["attempt"]) == ("demo", 4, "one")
        assert (row["owner_pid"], row["owner_state"]) == (owner.pid, "alive")
        assert 0 < row["lease_left_s"] <= 3600 and abs(row["expires"] - time.time() - row["lease_left_s"]) < 5
        assert listed(kind, "--run", "demo", "--attempt", "one") and not listed(kind, "--run", "other")
        assert not listed(kind, "--attempt", "two")
        head, told, count = rl360("list", "--provider", kind).output.splitlines()
        assert head.split() == ["state", "owner", "lease", "left", "run", "step", "attempt", "sandbox"]
        assert told.split()[:4] == ["held", "pid", str(owner.pid), "alive"]
        assert told.split()[-4:] == ["demo", "4", "one", row["id"]] and count.startswith(f"1 sandbox of {kind}")
        for argv in (["reap"], ["reap", "--yes"]):
            assert "nothing to reap" in rl360(*argv, "--provider", kind).output
        assert [item["state"] for item in listed(kind)] == ["held"]
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    assert [(item["state"], item["owner_state"]) for item in listed(kind)] == [("orphaned", "ended")]
    assert f"pid {owner.pid} ended" in rl360("list", "--provider", kind).output
    dry = rl360("reap", "--provider", kind)
    assert dry.exit_code == 0 and "would be removed" in dry.output and "add --yes" in dry.output
    assert len(listed(kind)) == 1
    done = rl360("reap", "--provider", kind, "--yes")
    assert done.exit_code == 0 and "gone" in done.output and "NOT" not in done.output
    assert {"bubblewrap": "folder removed", "docker": "has no container"}[kind] in done.output
    assert listed(kind) == []


def test_bubblewrap(home: Path) -> None:
    assert f"0 sandboxes of bubblewrap in {home / 'sandboxes'}" in rl360("list").output
    only_the_dead_are_reaped("bubblewrap", home)
    assert marked_pids(home / "sandboxes" / "13300" / "live") == []
    assert list((home / "sandboxes" / "13300" / "live").iterdir()) == []


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDocker]:
    (tmp_path / "boxes").mkdir()
    fake = FakeDocker(tmp_path / "boxes")
    monkeypatch.setenv("DOCKER_HOST", fake.url.replace("http", "tcp"))
    yield fake
    fake.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="the fake gives files to a user of its own")
def test_docker(home: Path, docker: FakeDocker) -> None:
    only_the_dead_are_reaped("docker", home)
    assert docker.boxes == {}


def test_what_cannot_be_asked_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl360.sandboxes.providers.remote.UNDO_S", 0.5)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    done = rl360("reap", "--provider", "docker", "--yes")
    assert done.exit_code == 1 and "NOT asked" in done.output
    for kind, words in (("podman", "use one of"), ("daytona", "DAYTONA_API_KEY"), ("kubernetes", "KUBERNETES_SERVICE")):
        done = rl360("list", "--provider", kind)
        assert words in str(done.exception)


def test_what_cannot_be_removed_is_said(home: Path) -> None:
    owner = owner_of_one("bubblewrap", home)
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    (folder,) = (home / "sandboxes" / "13300" / "live").iterdir()
    (record,) = folder.glob("rl360-*.json")
    assert f"{folder} run demo step 4 attempt one (pid {owner.pid} ended): would be removed" in rl360("reap").output
    record.write_bytes(b"{")
    done = rl360("reap", "--yes")
    assert done.exit_code == 1 and "folder NOT removed: unreadable" in done.output, done.output
    assert rl360("list", "--json").output.count('"state":"unknown"') == 1
    record.unlink()
    assert rl360("reap", "--yes").exit_code == 0 and listed("bubblewrap") == []


def test_a_home_that_cannot_be_looked_into_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RL360_HOME", str(tmp_path / "file"))
    for argv in (["list"], ["reap"], ["reap", "--yes"]):
        done = rl360(*argv)
        assert isinstance(done.exception, BadInput) and "Not a directory; set RL360_HOME" in str(done.exception)


def test_a_token_file_is_taken(home: Path) -> None:
    (home / "token").unlink()
    for argv in (["list"], ["reap"]):
        done = rl360(*argv, "--provider", "docker", "--token-file", str(home / "none"))
        assert "cannot read the token in" in str(done.exception)


def test_gone_is_what_was_deleted_and_looking_deletes_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = home / "sandboxes" / "13300"
    for folder in ("trash/old", "live/a/work"):
        (root / folder).mkdir(parents=True)
    assert "live/a: would be removed" in rl360("reap").output and (root / "trash" / "old").exists()

    def stuck(path: Path, *deadline_s: float) -> str | None:
        kept = path.parent.name == "trash"
        return f"{path}: could not be deleted" if kept else remove_tree(path, *deadline_s)

    with monkeypatch.context() as patch:
        patch.setattr(rooted, "remove_tree", stuck)
        done = rl360("reap", "--yes")
    assert done.exit_code == 1 and done.output.count("NOT removed: ") == 2, done.output
    assert len(list((root / "trash").iterdir())) == 2
    assert rl360("reap", "--yes").exit_code == 0 and list((root / "trash").iterdir()) == []
