"""The supervisor with the two cheap services (object store, gateway): real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.local import proc
from rl360.config.services import load_services
from rl360.store.object_store import ObjectStore

pytestmark = pytest.mark.chaos
PORT_BASE = 21_300
ONLY = "s3,gateway"


def rl360(home: Path, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl360.cli", *args, "--home", str(home)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | (env or {}),
        check=False,
    )


def up(home: Path, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return rl360(home, "up", "--only", ONLY, "--port-base", str(PORT_BASE), "--timeout", "60", *args, env=env)


def status(home: Path) -> dict[str, Any]:
    return json.loads(rl360(home, "status", "--json").stdout)


def eventually(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, "did not happen in time"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    yield folder
    rl360(folder, "down")


@pytest.fixture
def running(home: Path) -> Path:
    result = up(home)
    assert result.returncode == 0, result.stderr
    return home


def test_up_twice_is_fine_and_secrets_stay_secret(running: Path) -> None:
    before = status(running)
    again = up(running)
    assert again.returncode == 0
    assert "already up" in again.stderr
    after = status(running)
    assert before["up"]
    assert after["services"]["s3"]["pid"] == before["services"]["s3"]["pid"]
    for name in ("token", "secrets.json"):
        assert (running / name).stat().st_mode & 0o777 == 0o600
    secrets = json.loads((running / "secrets.json").read_text())
    shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in proc.marked(_marker(running), proc.table()))
    shown += b"".join(path.read_bytes() for path in (running / "logs").iterdir())
    shown += b"".join((running / name).read_bytes() for name in ("services.json", "state.json", "up.json"))
    assert shown
    for value in secrets.values():
        assert value.encode() not in shown


def test_only_the_s3_port_serves_objects_and_it_asks_for_the_keys(running: Path) -> None:
    """The store's filer, volume and master listen too: none may hand out or delete objects without the keys."""
    store = ObjectStore.from_services(load_services(running))
    store.put("private/object", b"x" * 100)
    first = status(running)["services"]["s3"]["port"]
    for port in range(first, first + 10):
        for path in ("/buckets/rl360/private/object", "/rl360/private/object", "/dir/assign", "/1,01"):
            with contextlib.suppress(httpx.HTTPError):  # a gRPC port
                assert httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code >= 400, (port, path)
    assert store.get("private/object") == b"x" * 100


def _marker(home: Path) -> str:
    return f"{proc.INSTANCE_ENV}={json.loads((home / 'state.json').read_text())['instance']}"


def test_a_killed_service_comes_back_as_a_new_incarnation(running: Path) -> None:
    before = status(running)["services"]["gateway"]
    os.kill(before["pid"], signal.SIGKILL)

    def back() -> bool:
        row = status(running)["services"]["gateway"]
        return row["status"] == "ready" and row["pid"] != before["pid"]

    eventually(back)
    after = status(running)["services"]["gateway"]
    assert after["incarnation"] != before["incarnation"]
    assert after["restarts"] == before["restarts"] + 1
    assert "incarnation" in rl360(running, "logs", "gateway", "-n", "400").stdout


def test_a_killed_supervisor_is_said_and_its_orphans_are_ended(running: Path) -> None:
    before = status(running)
    os.kill(before["supervisor_pid"], signal.SIGKILL)
    eventually(lambda: status(running)["supervisor"] == "dead")
    told = rl360(running, "status")
    assert told.returncode == 1
    assert "is gone, nothing is watched" in told.stdout
    assert "unwatched" in told.stdout
    again = up(running)
    assert again.returncode == 0, again.stderr
    assert "processes it left" in again.stderr
    # an orphan is reaped by whoever adopted it, which may take a moment: dead is what counts
    orphan = before["services"]["s3"]["pid"]
    eventually(lambda: (row := proc.read(orphan)) is None or not row.alive)


def test_down_leaves_nothing(running: Path) -> None:
    marker = _marker(running)
    assert proc.marked(marker, proc.table())
    result = rl360(running, "down")
    assert result.returncode == 0, result.stderr
    assert "checked: 0 processes, 0 sandboxes, 0 cgroups, 0 mounts left" in result.stdout
    assert not proc.marked(marker, proc.table())
    assert not list(Path("/tmp").glob(f"seaweedfs-*-{PORT_BASE + 600}.sock"))
    nothing = rl360(running, "status")
    assert nothing.returncode == 1
    assert "nothing is up" in nothing.stdout
