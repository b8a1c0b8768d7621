"""Sandbox servers of many lives over one store, in virtual time: each may be killed between any two store calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

from rl360.agents import bash_agent
from rl360.errors import StoreUnavailable
from rl360.harbor.app import Attempts
from rl360.harbor.outcome import ExitStatus
from rl360.harbor.protocol import RunReply, RunRequest
from rl360.harbor.replies import Replies
from rl360.harbor.runner import Attempt, Prepared
from rl360.sandboxes.provider import SandboxNeeds
from rl360.tasksets.harbor_files import BUILTIN_DIR
from tests.unit.memory_store import MemoryStore
from tests.unit.virtual_time import gate

TASK = next(path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir())
AGENTS = {"bash": bash_agent.run}


class Mortal:
    """The store as a process sees it that may be killed between any two of its calls, or under one that was carried
    out and never heard of."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.dead, self.calls_left = store, False, 10**9

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.dead:
                raise StoreUnavailable("this process is dead")
            self.calls_left -= 1
            done = getattr(self.store, name)(*args)
            if self.calls_left <= 0:
                self.dead = True
                raise StoreUnavailable("killed before it heard")
            return done

        return call


class Host:
    """What the runner of a server does: it counts, takes a while, and says which life it was."""

    judge = image = None

    def __init__(self, ran: Counter[str]) -> None:
        self.provider, self.ran = self, ran

    def refusal(self, _: SandboxNeeds) -> str | None:
        return None

    async def run(self, prepared: Prepared, attempt: Attempt) -> RunReply:
        self.ran[prepared.request.attempt_id] += 1
        try:
            await asyncio.sleep(5.0)
            attempt.failed("agent", ExitStatus.GENERATION_ERROR, "ran to its end")
        except asyncio.CancelledError:
            attempt.failed("agent", ExitStatus.ABORTED, "cancelled")
        return attempt.reply()


class Server:
    """A server of a name: it may be killed and started again."""

    def __init__(self, store: MemoryStore, name: str, ran: Counter[str], slots: int = 4) -> None:
        self.shared, self.name, self.ran, self.slots = store, name, ran, slots
        self.start()

    def start(self) -> None:
        self.store = Mortal(self.shared)
        replies = Replies(cast(Any, self.store), self.name)
        self.attempts = Attempts(cast(Any, Host(self.ran)), gate(self.slots), 100, replies)
        self.asked: set[asyncio.Task[RunReply]] = set()

    def kill(self) -> None:
        self.store.dead = True
        for task in (*self.asked, *(entry.job for entry in self.attempts._open.values())):
            task.cancel()

    async def ask(self, request: RunRequest) -> RunReply:
        task = asyncio.create_task(self.attempts.submit(request, "", AGENTS))
        self.asked.add(task)
        return await task


def request_of(name: str, **more: Any) -> RunRequest:
    given = {"instance_id": "t", "task_dir": str(TASK), "base_url": "http://h", "run": "demo", "deadline_s": 200.0}
    return RunRequest(attempt_id=name, **{**given, **more})


async def heard(server: Server, request: RunRequest) -> RunReply | str:
    """The reply, or why there is none."""
    found = (await asyncio.gather(server.ask(request), return_exceptions=True))[0]
    return found if isinstance(found, RunReply) else type(found).__name__
