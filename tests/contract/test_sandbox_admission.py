"""A real sandbox server promises no more than it may, one attempt after the other, and says what it has left."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.test_sandboxes import Server, free_port, make_task, request_for, why_not
from tests.scripted_session import Bash, Say, ScriptedSessions

pytestmark = [pytest.mark.contract, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

PROMISE = {"milli_cpus": 1_000, "memory_mb": 1_000, "pids": 500, "disk_mb": 10_000}


def health(server: Server) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/health", timeout=10).json())


def test_reservations_hold_attempts_back_and_are_given_back(tmp_path: Path) -> None:
    promise = "cpus=1,memory_mb=1000,pids=500,disk_mb=10000"
    server = Server(tmp_path / "home", free_port(), max_concurrent=8, options=("--promise", promise))
    task, sessions = make_task(tmp_path / "task"), ScriptedSessions()
    sessions.start()
    server.start()
    try:
        assert health(server)["room"] == health(server)["room_left"] == PROMISE

        def one(number: int) -> Any:
            turns = (Bash("cp hint.txt answer"), Bash("sleep 0.7"), Say("done"))
            body = request_for(task, f"a{number}", sessions.add(f"a{number}", *turns), limits={"memory_mb": 400})
            return server.run(body)

        with ThreadPoolExecutor(6) as pool:
            jobs = [pool.submit(one, number) for number in range(5)]
            seen = []
            while not all(job.done() for job in jobs):
                seen.append(health(server))
                time.sleep(0.05)
        replies = [job.result() for job in jobs]
        assert {reply.outcome for reply in replies} == {"passed"}
        assert max(one["running"] for one in seen) == 2, "two of 400 MB fit into 1000"
        assert min(one["room_left"]["memory_mb"] for one in seen) == 200
        assert max(one["queued"] for one in seen) >= 2
        assert max(reply.phases.queue for reply in replies) > 0.7
        after = health(server)
        assert after["room_left"] == PROMISE and after["starts"] == 5 and after["warm_starts"] == 4
        for limits, words in (({"memory_mb": 1024, "pids": 501}, "lower memory_mb, pids"), ({"pids": 501}, "pids 501")):
            toml = '[task]\nname = "t/answer"\n[environment]\nmemory_mb = 2048\n'
            greedy = make_task(tmp_path / words.replace(" ", ""), toml=toml)
            refused = server.post("/run", request_for(greedy, "greedy", "http://x", limits=limits))
            assert refused.status_code == 400 and words in refused.text, refused.text
        assert health(server)["room_left"] == PROMISE and server.live() == []
    finally:
        server.stop()
        sessions.stop()


def test_a_wave_starts_no_more_than_its_size(tmp_path: Path) -> None:
    # no start is late, however busy the machine: the window stays
    options = ("--wave-size", "2", "--wave-interval-s", "1.0", "--ready-goal-s", "60")
    server = Server(tmp_path / "home", free_port(), max_concurrent=8, options=options)
    task, sessions = make_task(tmp_path / "task"), ScriptedSessions()
    sessions.start()
    server.start()
    try:
        with ThreadPoolExecutor(6) as pool:
            lost = list(pool.map(server.run, [request_for(task, f"l{n}", sessions.url("none")) for n in range(5)]))
            bodies = [request_for(task, f"w{n}", sessions.add(f"w{n}", Say("done"))) for n in range(5)]
            began = time.monotonic()
            verified = list(pool.map(server.run, bodies))
        assert {reply.outcome for reply in lost} == {"session_lost"}, "without a verifier"
        waits = sorted(reply.phases.queue for reply in lost)
        assert waits[1] < 0.05 < waits[2] and waits[4] - waits[3] > 0.5, waits  # asked for at nearly the same time
        assert {reply.outcome for reply in verified} == {"failed"}
        assert time.monotonic() - began > 4.0, "ten starts, the verifiers' too, two in a second"
    finally:
        server.stop()
        sessions.stop()
