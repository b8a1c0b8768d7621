"""Local engines as real processes: started once, found again, ended with proof, and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fleet_fakes import OPTIONS, FleetWorld, until

from rl360.engines import health
from rl360.engines.fleet import EngineState
from rl360.engines.fleet_log import FleetLog, Slot
from rl360.engines.keeper import Keeper
from rl360.engines.launchers import KINDS, local, open_launcher
from rl360.engines.launchers.base import Start
from rl360.engines.launchers.local import LocalLauncher
from rl360.engines.membership import remove, start_more
from rl360.engines.processes import tree_of_url
from rl360.errors import BadInput, CorruptObject, Rl360Error, ServiceError
from tests.unit.test_fleet_command import services_of

# answers as an engine does, with a child, as an engine has
TINY = """
import json, subprocess, sys, time, uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
subprocess.Popen(["sleep", "600"])
mark = uuid.uuid4().hex
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        data = json.dumps({"startup_time": {"load": mark}, "launch_command": "tiny", "loads": []}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
ARGV = (sys.executable, "-c", TINY)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    (tmp_path / "state.json").write_text('{"instance": "instance-of-test"}')
    monkeypatch.setattr(local, "MEMORY_BYTES", 0)
    made = LocalLauncher(services_of(str(tmp_path)), ARGV)
    yield made
    for handle in asyncio.run(made.find(5)):
        asyncio.run(made.end(handle, 5))


def start(number: int = 1) -> Start:
    return Start(name="local-0", number=number, model_dir="/model", port=free_port())


def environ(pid: int) -> dict[str, str]:
    return psutil.Process(pid).environ()


def test_a_life_of_a_local_engine(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL360_INCARNATION", "of-the-keeper")
    wish = start()
    handle = asyncio.run(launcher.start(wish, 5))
    assert handle.process is not None and handle.process.group == handle.process.root.pid
    pid = handle.process.root.pid
    until(lambda: httpx.get(f"{handle.url}/ping", timeout=1).status_code == 200 if tree_of_url(handle.url) else False)
    env = environ(pid)
    # `rl360 down` finds it by the instance; the supervisor does not end it with the keeper that started it
    assert env["RL360_INSTANCE"] == "instance-of-test" and "RL360_INCARNATION" not in env
    assert asyncio.run(launcher.start(wish, 5)).process.root == handle.process.root  # type: ignore[union-attr]
    child = psutil.Process(pid).children()[0].pid
    proof = asyncio.run(launcher.end(handle, 5))
    assert proof.gone and str(pid) in proof.evidence
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert asyncio.run(launcher.find(5)) == []
    assert "was never started" in asyncio.run(launcher.end(handle.model_copy(update={"process": None}), 5)).evidence


def test_another_keeper_finds_what_the_first_started(launcher: LocalLauncher, tmp_path: Path) -> None:
    wish = start()
    handle = asyncio.run(launcher.start(wish, 5))
    assert handle.process is not None
    other = LocalLauncher(launcher_services(tmp_path), ARGV)
    assert [found.process for found in asyncio.run(other.find(5))] == [handle.process]
    # killed between the process and the second half of its record
    record = tmp_path / "engines" / "local-0-1.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"process": None}))
    found = asyncio.run(other.start(wish, 5))
    assert found.process is not None and found.process.root == handle.process.root
    assert asyncio.run(other.end(found.model_copy(update={"process": None}), 5)).gone
    assert (
        not psutil.pid_exists(handle.process.root.pid)
        or not psutil.Process(handle.process.root.pid).is_running()
        or (psutil.Process(handle.process.root.pid).status() == psutil.STATUS_ZOMBIE)
    )


def launcher_services(home: Path) -> Any:
    return services_of(str(home))


def test_without_services_nothing_would_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL360_INSTANCE", raising=False)
    monkeypatch.setattr(local, "MEMORY_BYTES", 0)
    with pytest.raises(Rl360Error, match="run `rl360 up` first"):
        asyncio.run(LocalLauncher(services_of(str(tmp_path)), ARGV).start(start(), 5))


def test_no_memory_is_said_before_anything_starts(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MEMORY_BYTES", 1 << 60)
    with pytest.raises(ServiceError, match="MiB of memory are available"):
        asyncio.run(launcher.start(start(), 5))
    assert asyncio.run(launcher.find(5)) == []


def test_a_damaged_record_is_refused(launcher: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "local-0-1.json").write_text("{")
    with pytest.raises(CorruptObject, match="not a local engine's record"):
        asyncio.run(launcher.find(5))
    (tmp_path / "engines" / "local-0-1.json").unlink()


def test_routed_experts_are_as_up_has_them(launcher: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text('{"routed_experts": true}')
    handle = asyncio.run(launcher.start(start(), 5))
    assert handle.process is not None
    assert "--routed-experts" in psutil.Process(handle.process.root.pid).cmdline()


def test_launchers_by_name(tmp_path: Path) -> None:
    services = services_of(str(tmp_path))
    assert {open_launcher(kind, services).kind for kind in KINDS if kind != "kubernetes"} == set(KINDS) - {"kubernetes"}
    with pytest.raises(BadInput, match="use one of supervised, local"):
        open_launcher("docker", services)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetWorld]:
    (tmp_path / "state.json").write_text('{"instance": "instance-of-test"}')
    monkeypatch.setattr(local, "MEMORY_BYTES", 0)
    monkeypatch.setattr("rl360.engines.keeper.BACKOFF_S", 0.0)
    made = FleetWorld(tmp_path, monkeypatch)
    monkeypatch.setattr(health, "tree_of_url", lambda url: made.tree(url) or tree_of_url(url))
    yield made
    launcher = LocalLauncher(made.services, ARGV)
    for handle in asyncio.run(launcher.find(5)):
        asyncio.run(launcher.end(handle, 5))
    made.close()


def slot_of(world: FleetWorld) -> Slot:
    return FleetLog(world.store).refresh().slots["local-0"]


def run(world: FleetWorld, holds: Any, rounds: int = 60) -> None:
    """Rounds of one keeper until `holds`, then it is stopped."""

    async def use(keeper: Keeper) -> None:
        keeper.launchers["local"] = LocalLauncher(world.services, ARGV)
        for _ in range(rounds):
            await keeper.round()
            if holds():
                break
            await asyncio.sleep(0.1)
        await keeper.close()
        assert holds(), "\n".join(world.said)

    world.keep(use)


def test_scaled_up_killed_replaced_and_scaled_down(world: FleetWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.serve()
    log = FleetLog(world.store)
    monkeypatch.setattr(
        "rl360.engines.membership.LOCAL_PORT_OFFSET",
        free_port() - min(int(engine.url.rpartition(":")[2]) for engine in world.engines),
    )
    assert start_more(log, world.services, "local", 1, "ann", "more") == ["local-0"]
    run(world, lambda: bool(slot_of(world).incarnation))
    first = slot_of(world)
    assert first.state is EngineState.JOINING and first.process is not None and first.member is True
    assert first.url not in world.gateway.added
    os.kill(first.process.root.pid, signal.SIGKILL)
    run(world, lambda: slot_of(world).starts == 2 and bool(slot_of(world).incarnation))
    second = slot_of(world)
    assert second.incarnation != first.incarnation and second.url == first.url
    states = world.path("local-0")
    over = states.index("gone")
    assert states[over - 1] == "fenced", states
    # wanted, started, answers; and runs, when a round sees it before it answers
    assert states[over + 1 :] in (["joining"] * 3, ["joining"] * 4), states
    remove(log, world.services, "local-0", second.url, "ann", "less", 0)
    run(world, lambda: slot_of(world).state is EngineState.GONE)
    assert asyncio.run(LocalLauncher(world.services, ARGV).find(5)) == []


def test_what_the_log_does_not_know_is_ended(world: FleetWorld) -> None:
    """A keeper that was killed after a start of a slot that is over by now."""
    world.serve()
    log = FleetLog(world.store)
    launcher = LocalLauncher(world.services, ARGV)
    stray = asyncio.run(launcher.start(Start(name="local-0", number=9, model_dir="/m", port=free_port()), 5))
    start_more(log, world.services, "local", 1, "ann", "more")
    run(world, lambda: any("the log does not know it" in line for line in world.said), rounds=3)
    assert stray.process is not None
    assert [handle.mark for handle in asyncio.run(launcher.find(5))] == ["local-0-1"]


def test_patience_of_a_start_is_bounded(world: FleetWorld) -> None:
    import dataclasses

    world.serve()
    start_more(FleetLog(world.store), world.services, "local", 1, "ann", "more")

    async def use(keeper: Keeper) -> None:
        keeper.launchers["local"] = LocalLauncher(world.services, ("sleep", "600", "#"))
        keeper.launchers["local"].argv = (sys.executable, "-c", "import time; time.sleep(600)")  # type: ignore[attr-defined]
        for _ in range(40):  # when it began to run is kept to a tenth of a second
            await keeper.round()
            if "gone" in world.path("local-0"):
                break
        await keeper.close()

    world.keep(use, dataclasses.replace(OPTIONS, start_s=0.001))
    assert "gone" in world.path("local-0")
    assert "did not answer within 0.001 s of running" in " ".join(world.said)
