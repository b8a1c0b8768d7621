"""`soak`: thousands of attempts on a real sandbox server, a share of them struck; what became of each, what is left.

Struck are: sandboxes by SIGKILL, verifiers that hang, agents that raise, and the server itself by SIGKILL again and
again. The agent is scripted, so nothing but the server, its sandboxes and the object store is under load. Whoever asks
asks as a rollout does: again, until there is a reply; and once more at the end, for the reply must stay the same.

`soak`: attempts without exactly one outcome, or with one that their strike does not explain, and processes, control
groups and workspaces that are left: none. `soak_memory`: what the server's resident memory grows by over the last part,
in which it is not killed. Wants the object store (`rl360 up --only s3 --model DIR`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from rl360.agents.base import AgentContext, AgentEnd
from rl360.bench.processes import LOOPBACK, free_port
from rl360.bench.rows import Row, at_most
from rl360.config.services import Services, load_services
from rl360.errors import Rl360Error
from rl360.harbor.outcome import ExitStatus
from rl360.sandboxes import cgroups
from rl360.sandboxes.bubblewrap import ENV_NAME, marked_pids, safe_name
from rl360.store.layout import reply_key
from rl360.store.object_store import ObjectStore

SHARE = 0.05  # of the attempts that are struck one by one
RESTARTED = 0.6  # of the attempts, in which the server is killed again and again
RESTART_EVERY = 500
START_S, END_S, ASK_S = 60.0, 60.0, 180.0
VERIFIER_S = 3.0
MORE_CLIENTS = 2  # than attempts at once, so that some wait
SAMPLE_EVERY = 50  # attempts, between two looks at the server's memory
GROWTH_MIB = 2.0  # by 1,000 attempts
TASK = {
    "task.toml": '[task]\nname = "soak"\n',
    "instruction.md": "Write `right` into the file answer.\n",
    "environment/Dockerfile": "FROM scratch\n",
    "tests/test.sh": "[ -e /app/hang ] && sleep 60\n"
    'if [ "$(cat /app/answer)" = right ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n',
}
# what becomes of an attempt by how it was struck; any may be in flight when the server is killed
EXPECTED = {
    "not": {"passed"},
    "kill": {"sandbox_lost"},
    "hang": {"verifier_timeout"},
    "raise": {"unclassified"},
}
RESTART = "sandbox_lost"


async def agent(context: AgentContext) -> AgentEnd:
    """The scripted agent, told by the last part of its URL how it will be struck."""
    how = context.base_url.rpartition("/")[2]
    if how == "raise":
        raise RuntimeError("struck")
    commands = {"kill": "touch ready; sleep 60", "hang": "touch hang"}
    await context.exec(commands.get(how, "echo right > answer"), 60.0)
    return AgentEnd(ExitStatus.SUBMITTED)


@dataclass
class Soak:
    """One measurement: `attempts` is name -> how it is struck."""

    home: Path
    services: Services
    concurrent: int
    attempts: dict[str, str]
    port: int = field(default_factory=free_port)
    run: str = field(default_factory=lambda: f"soak-{secrets.token_hex(4)}")
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    server: subprocess.Popen[bytes] | None = None
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: int = 0
    restarts: int = 0
    memory: list[tuple[int, float]] = field(default_factory=list)  # attempts done, MiB, in the last part

    @property
    def live(self) -> Path:
        return self.home / "sandboxes" / str(self.port) / "live"

    def prepare(self) -> None:
        keys = self.services.secrets().model_dump() | {"token": self.token}
        for name, data in (("token", self.token.encode()), ("secrets.json", orjson.dumps(keys))):
            (self.home / name).touch(0o600)
            (self.home / name).write_bytes(data)
        here = self.services.model_copy(update={"home": str(self.home)})
        (self.home / "services.json").write_bytes(orjson.dumps(here.model_dump()))
        for name, text in TASK.items():
            (self.home / "task" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.home / "task" / name).write_text(text)

    def start(self) -> None:
        argv = [sys.executable, "-m", "rl360.harbor.server", "--port", str(self.port), "--home", str(self.home)]
        argv += ["--store", "--agent", f"soak={__name__}:agent", "--max-concurrent", str(self.concurrent)]
        env = {**os.environ, "RL360_TOKEN_FILE": str(self.home / "token")}
        with (self.home / "log").open("ab") as log:
            self.server = subprocess.Popen(argv, stdout=log, stderr=log, env=env)

    def end(self, how: int) -> None:
        if self.server is not None:
            self.server.send_signal(how)
            self.server.wait(END_S)

    def rss_mib(self) -> float:
        assert self.server is not None
        return psutil.Process(self.server.pid).memory_info().rss / (1 << 20)

    async def ask(self, http: aiohttp.ClientSession, name: str) -> dict[str, Any]:
        """As a rollout asks: until there is a reply, saying so where an earlier asking may have been heard."""
        body = {
            "instance_id": "soak", "task_dir": str(self.home / "task"), "attempt_id": name, "run": self.run,
            "agent_name": "soak", "base_url": f"http://{LOOPBACK}:9/soak/{self.attempts[name]}",
            "queue_timeout_s": 60.0, "setup_timeout_s": 30.0, "agent_timeout_s": 30.0,
            "verifier_timeout_s": VERIFIER_S, "deadline_s": 150.0,
        }  # fmt: skip
        give_up_at = time.monotonic() + ASK_S
        while time.monotonic() < give_up_at:
            try:
                async with http.post(f"http://{LOOPBACK}:{self.port}/run", data=orjson.dumps(body)) as answer:
                    if answer.status == 200:
                        return orjson.loads(await answer.read())
                    if answer.status != 503:
                        raise Rl360Error(f"{name}: the server answered {answer.status}: {(await answer.text())[:300]}")
            except aiohttp.ClientConnectorError:
                pass
            except (aiohttp.ClientError, TimeoutError):
                body["resent"] = True
            await asyncio.sleep(random.uniform(0.1, 0.3))
        return {"outcome": "no reply", "trial_id": ""}

    async def strike(self, name: str) -> None:
        """SIGKILL the attempt's sandbox from outside once its command is at work."""
        folder = self.live / safe_name(f"{self.run}/{name}")
        give_up_at = time.monotonic() + ASK_S
        while time.monotonic() < give_up_at and name not in self.replies:
            if (folder / "work" / "ready").exists():
                for pid in await asyncio.to_thread(marked_pids, folder):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.05)

    async def play(self, say: Callable[[str], None]) -> None:
        """All attempts, then each asked for again."""
        names = list(self.attempts)
        calm_from = int(RESTARTED * len(names))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=ASK_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
            queue = iter(names)

            async def client() -> None:
                for name in queue:
                    if self.attempts[name] == "kill":
                        self.replies[name], _ = await asyncio.gather(self._kept(http, name), self.strike(name))
                    else:
                        self.replies[name] = await self._kept(http, name)
                    done = len(self.replies)
                    if done % RESTART_EVERY == 0:
                        say(f"soak: {done} of {len(names)}, {self.restarts} restarts")
                        if done <= calm_from:
                            await asyncio.to_thread(self.end, signal.SIGKILL)
                            self.start()
                            self.restarts += 1
                    elif done > calm_from and done % SAMPLE_EVERY == 0:
                        self.memory.append((done, self.rss_mib()))

            await asyncio.gather(*(client() for _ in range(self.concurrent + MORE_CLIENTS)))
            again = iter(names)

            async def asks_again() -> None:
                for name in again:
                    reply = await self.ask(http, name)
                    self.changed += reply["trial_id"] != self.replies[name]["trial_id"]

            await asyncio.gather(*(asks_again() for _ in range(8)))

    async def _kept(self, http: aiohttp.ClientSession, name: str) -> dict[str, Any]:
        reply = await self.ask(http, name)
        return {key: reply[key] for key in ("trial_id", "outcome")}

    def left(self) -> dict[str, int]:
        """What is still there of any attempt when the server has ended."""
        mark = f"{ENV_NAME}={self.live}".encode()
        processes = 0
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                processes += any(part.startswith(mark) for part in path.read_bytes().split(b"\0"))
        own = cgroups.prefix(self.live.parent)
        groups = sum(1 for found in cgroups.planned("x").paths for _ in found.parent.glob(f"{own}*"))
        return {"processes": processes, "cgroups": groups, "workspaces": len(list(self.live.iterdir()))}

    def odd(self) -> list[str]:
        """Attempts whose outcome nothing explains. A kill of the server explains as many as were in flight."""
        odd = [name for name, how in self.attempts.items() if self.replies[name]["outcome"] not in EXPECTED[how]]
        lost = [name for name in odd if self.replies[name]["outcome"] == RESTART]
        explained = set(lost[: self.restarts * (self.concurrent + MORE_CLIENTS)])
        return [name for name in odd if name not in explained]

    def growth_mib(self) -> float:
        """Of the server's memory by 1,000 attempts, over the second half of the calm part; infinite when it was looked
        at less than twice there: nothing is known then."""
        half = self.memory[len(self.memory) // 2 :]
        if len(half) < 2:
            return math.inf
        (first, before), (last, after) = half[0], half[-1]
        return max(0.0, (after - before) / (last - first) * 1000)


def soak(count: int, concurrent: int, say: Callable[[str], None], seed: int = 0) -> Iterator[Row]:
    """Run it and say what was found. `concurrent`: attempts at once."""
    draw = random.Random(seed)
    kinds = [kind for kind in EXPECTED if kind != "not"]
    attempts = {f"a{number:05}": draw.choice(kinds) if draw.random() < SHARE else "not" for number in range(count)}
    home = Path(tempfile.mkdtemp(prefix="rl360-soak-"))
    home.chmod(0o755)
    work = Soak(home, load_services(), concurrent, attempts)
    store = ObjectStore.from_services(work.services)
    try:
        work.prepare()
        work.start()
        started = time.monotonic()
        asyncio.run(work.play(say))
        seconds = time.monotonic() - started
        work.end(signal.SIGTERM)
        records = sum(not key.endswith(".claim") for key in store.list(f"{work.run}/replies/"))
        left, odd = work.left(), work.odd()
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            work.end(signal.SIGKILL)
        with ThreadPoolExecutor(16) as pool:
            keys = [reply_key(work.run, name) for name in attempts]
            list(pool.map(store.delete, [*keys, *(f"{key}.claim" for key in keys)]))
    outcomes = Counter(reply["outcome"] for reply in work.replies.values())
    struck = Counter(how for how in attempts.values() if how != "not")
    found = {"odd": len(odd), "changed": work.changed, "records off": abs(records - count), **left}
    detail = f"{count} attempts in {seconds:.0f} s ({count / seconds:.1f}/s, the second asking included), struck "
    detail += f"{dict(struck)} and {work.restarts} kills of the server; outcomes {dict(outcomes)}; {found}"
    wrong = sum(found.values())
    if wrong:
        detail += f"; first odd {odd[:3]}; log in {home}"
    else:
        shutil.rmtree(home, ignore_errors=True)
    yield Row("soak", None, wrong, "attempts or things left", "0", wrong == 0, detail)
    said = ", ".join(f"{done}: {mib:.0f}" for done, mib in work.memory[:: max(1, len(work.memory) // 8)])
    looks = f"MiB at {said}" if said else "never looked at"
    if math.isinf(growth := work.growth_mib()):
        looks += f"; too few looks for a growth, raise --count {count}"
    yield at_most("soak_memory", ours=growth, unit="MiB per 1,000", limit=GROWTH_MIB, detail=looks)
