"""Any program that speaks OpenAI's or Anthropic's HTTP, as an agent: `--harness NAME=FILE.toml` of a sandbox server.

The program runs inside the attempt's sandbox, for it executes what the model writes. That sandbox has no network; the
program finds its session, and nothing else, at an address of its loopback: `harness_entry` there passes bytes to a
socket in the one folder it shares with us, and here each request goes to the attempt's session (`Relay`), which counts
turns and notes refusals. Its end is the sandbox's: whatever it left running is proven gone before the verifier starts.

How it ends: exit 0 is submitted; turns over `max_turns` and a full sequence are refused with 400 and named as such; a
signal counts as a limit, for a command of the model may have sent it; another exit, or the deadline, after a model call
that failed is that failure, unless it was refused for what it asked (400, 422), which the model's commands can do too;
any other exit is an error of the program, and no verdict is sought.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import shutil
import socket
import time
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rl360.agents import harness_entry
from rl360.agents.base import AgentContext, AgentEnd, AgentFailure
from rl360.agents.bash_agent import refusal
from rl360.config.services import home_dir
from rl360.errors import BadInput
from rl360.harbor.outcome import ExitStatus
from rl360.harbor.task import RESERVED

INSIDE = "/run/rl360"
PORT = 41_360
MAX_BODY_BYTES = 32 << 20
PARALLEL = 4  # requests of one program under way, each with its body in memory; the others wait unread
TAIL_BYTES = 64 << 10  # of a reply: where its usage and its end are told
KEPT_BYTES = 1500
MARGIN_S = 0.5
# raw bytes of a reply: inside a text the quotes would be escaped
TOKENS = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d+)')
CUT = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"(?:length|max_tokens)"')
PLACE = re.compile(r"[a-z_]+(/[a-z_]+)*")
SAMPLES = ("chat/completions", "messages")
NO_FAILURE = (400, 422)  # the request's own fault, and what the model wrote may have sent it
PASSED_ON = ("content-type", "accept", "anthropic-version", "anthropic-beta")
PASSED_BACK = ("content-type", "x-should-retry", "retry-after")


class Terms(BaseModel):
    """The file of a harness. `command`: its words, in which {instruction}, {instruction_file}, {model}, {model_name}
    and {base_url} are replaced; `mounts`: folders that it is installed in, seen read-only at the same path; `env`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: tuple[str, ...] = Field(min_length=1)
    mounts: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("mounts")
    @classmethod
    def _usable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        secret = home_dir().resolve()
        for name in value:
            path = Path(name)
            if not path.is_absolute() or os.path.normpath(name) != name or not path.is_dir():
                raise ValueError(f"{name!r} is not the absolute, plain path of a folder on this host")
            if name in RESERVED or name.startswith(("/usr/", "/etc/", "/proc/", "/dev/", "/sys/", "/run/")):
                raise ValueError(f"{name!r} is a system folder, or is in one; every sandbox has /usr already")
            if secret.is_relative_to(path.resolve()):
                raise ValueError(f"{name!r} holds the deployment's secrets ({secret}); mount a folder beside it")
        return value


@dataclass
class Relay:
    """One attempt's way to its session. `failure`: of the last call, when it failed."""

    context: AgentContext
    failure: AgentFailure | None = None
    full: bool = False
    cut: bool = False
    over_turns: bool = False
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL))

    def left(self) -> float:
        """Seconds for the program: it ends a moment before the attempt's deadline, so that `late` is heard."""
        return max(0.1, self.context.deadline - asyncio.get_running_loop().time() - MARGIN_S)

    def late(self, detail: str) -> AgentEnd:
        """The end of a program whose time is over: of one that was still asking a model that failed, that failure."""
        if self.failure is not None:
            raise self.failure
        return AgentEnd(ExitStatus.AGENT_TIMEOUT, detail)

    async def carry(self, request: web.Request) -> web.StreamResponse:
        async with self.places:
            return await self._carry(request)

    async def _carry(self, request: web.Request) -> web.StreamResponse:
        place = request.match_info["place"]
        if not PLACE.fullmatch(place):
            return _refuse(404, "not_found", f"/v1/{place[:80]}: no such place")
        sampling = request.method == "POST" and place in SAMPLES
        body, started, metrics = await request.read(), time.monotonic(), self.context.metrics
        if sampling and metrics.turns >= self.context.max_turns:
            self.over_turns = True
            return _refuse(400, "turn_limit", f"{self.context.max_turns} turns were taken, and there are no more")
        if sampling and self.full:  # clients ask a refused 409 again
            return _refuse(400, "length", "the sequence is full")
        left = self.context.deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return _refuse(400, "no_time", "the attempt's time is over")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        call = self.context.http.stream(
            request.method,
            f"{self.context.base_url}/{place}",
            content=body,
            headers=headers,
            timeout=httpx.Timeout(left, connect=min(left, 10.0)),
        )
        given_back = sampling
        metrics.turns += sampling  # at once, so that requests side by side don't take more than there are
        try:
            async with call as reply:
                given_back = sampling and reply.status_code != 200
                return await self._pass(request, reply, sampling)
        except httpx.HTTPError as error:
            given_back = sampling
            late = isinstance(error, httpx.ReadTimeout)  # of all the time that was left
            status = ExitStatus.AGENT_TIMEOUT if late else ExitStatus.SESSION_LOST
            self.failure = AgentFailure(status, f"session: {error!r}"[:300], retryable=False)
            return _refuse(502, "session_lost", "the session cannot be reached")
        finally:
            if given_back:  # it was none: who was refused meanwhile may ask again
                metrics.turns, self.over_turns = metrics.turns - 1, False
            metrics.model_query_time_sum += time.monotonic() - started

    async def _pass(self, request: web.Request, reply: httpx.Response, sampling: bool) -> web.StreamResponse:
        back = {name: reply.headers[name] for name in PASSED_BACK if name in reply.headers}
        if reply.status_code != 200:
            said = await reply.aread()
            if sampling and ((failure := refusal(reply)) is None or reply.status_code not in NO_FAILURE):
                self.failure, self.full = failure, failure is None
                self.context.metrics.retries += failure is not None and failure.retryable
            return web.Response(status=reply.status_code, body=said, headers=back)
        answer = web.StreamResponse(headers=back)
        tail = b""
        await answer.prepare(request)
        async for part in reply.aiter_raw():
            tail = (tail + part)[-TAIL_BYTES:]
            await answer.write(part)
        await answer.write_eof()
        if sampling:
            self.failure, self.cut = None, CUT.search(tail) is not None
            self.context.metrics.completion_tokens += max((int(n) for n in TOKENS.findall(tail)), default=0)
        return answer


@dataclass(frozen=True)
class Harness:
    """An agent: see the module's head."""

    path: str
    terms: Terms

    def mounts(self, folder: Path) -> Mapping[str, Path]:
        shutil.copyfile(harness_entry.__file__, folder / "entry.py")
        (folder / "entry.py").chmod(0o644)
        return {INSIDE: folder, **{name: Path(name) for name in self.terms.mounts}}

    async def __call__(self, context: AgentContext) -> AgentEnd:
        assert context.folder is not None, "the runner gives an agent with mounts its folder"
        (context.folder / "instruction.md").write_text(context.instruction, encoding="utf-8")
        (context.folder / "instruction.md").chmod(0o644)
        relay = Relay(context)
        async with listening(relay, context.folder):
            started = time.monotonic()
            try:
                result = await context.exec(self._command(context), relay.left())
            finally:
                context.metrics.env_execution_time_sum += time.monotonic() - started
        said = " ".join(result.output.decode("utf-8", "replace").split())[-300:]
        name = self.terms.command[0]
        if result.timed_out:
            return relay.late(f"{name} ran to the deadline; {said}")
        return ended(relay, name, result.exit_code, said)

    def _command(self, context: AgentContext) -> str:
        base_url = f"http://127.0.0.1:{PORT}"
        known = {
            "{instruction}": context.instruction,
            "{instruction_file}": f"{INSIDE}/instruction.md",
            "{model}": context.model,
            "{model_name}": context.model.partition("/")[2] or context.model,
            "{base_url}": f"{base_url}/v1",
        }
        replaced = re.compile("|".join(map(re.escape, known)))
        words = [replaced.sub(lambda found: known[found[0]], word) for word in self.terms.command]
        env = {
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_BASE": f"{base_url}/v1",
            "OPENAI_API_KEY": "rl360",
            "OPENAI_MODEL": known["{model_name}"],
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": "rl360",
            "ANTHROPIC_MODEL": known["{model_name}"],
            "RL360_INSTRUCTION": known["{instruction_file}"],
            **self.terms.env,
        }
        entry = ["python3", f"{INSIDE}/entry.py", str(PORT), f"{INSIDE}/session.sock", str(KEPT_BYTES)]
        return shlex.join(["env", *(f"{name}={value}" for name, value in env.items()), *entry, "--", *words])


def ended(relay: Relay, name: str, code: int, said: str) -> AgentEnd:
    turns = relay.context.metrics.turns
    if relay.full and turns == 0:
        raise AgentFailure(ExitStatus.GENERATION_ERROR, "the first prompt leaves no room for a reply", retryable=False)
    if relay.over_turns:
        return AgentEnd(ExitStatus.TURN_LIMIT, f"{turns} turns")
    if relay.full or (relay.cut and code == 0):
        return AgentEnd(ExitStatus.LENGTH_LIMIT, "no room for another turn" if relay.full else "cut by length")
    if code > 128:
        return AgentEnd(ExitStatus.SANDBOX_LIMIT, f"{name} was ended by signal {code - 128}; {said}")
    if code != 0 and relay.failure is not None:
        raise relay.failure
    if code == 0 and turns > 0:
        return AgentEnd(ExitStatus.SUBMITTED)
    why = f"exit {code}" if code else "it ended without a turn of the model"
    return AgentEnd(ExitStatus.AGENT_ERROR, f"{name}: {why}; {said}")


@asynccontextmanager
async def listening(relay: Relay, folder: Path) -> AsyncIterator[None]:
    """The relay at `folder`/session.sock, for the sandbox's user alone."""
    runner = await _runner(relay, "")
    bound = socket.socket(socket.AF_UNIX)
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # the path itself may be longer than the address of a socket can be
            bound.bind(f"/proc/self/fd/{place}/session.sock")
        finally:
            os.close(place)
        owner = (folder.parent / "work").stat()
        if os.geteuid() == 0:
            os.chown(folder / "session.sock", owner.st_uid, owner.st_gid)
        (folder / "session.sock").chmod(0o600)
        await web.SockSite(runner, bound).start()
        yield
    finally:
        await runner.cleanup()
        bound.close()


@asynccontextmanager
async def listening_here(relay: Relay) -> AsyncIterator[str]:
    """The relay for a program on this host: its base URL, which cannot be guessed."""
    secret = secrets.token_urlsafe(24)
    runner = await _runner(relay, f"/{secret}")
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}/v1"
    finally:
        await runner.cleanup()


async def _runner(relay: Relay, prefix: str) -> web.AppRunner:
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", prefix + "/v1/{place:.*}", relay.carry)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    return runner


def _refuse(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code, "type": code}}, status=status)


def load_harness(path: str) -> Harness:
    """The harness of a file. `BadInput` in one line."""
    try:
        return Harness(path, Terms.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"harness {path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"harness {path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
