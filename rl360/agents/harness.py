"""Any program that speaks OpenAI's or Anthropic's HTTP, as an agent: `--harness NAME=FILE.toml` of a sandbox server.

The program runs inside the attempt's sandbox, for it executes what the model writes. That sandbox has no network; the
program finds its session, and nothing else, at an address of its loopback: `harness_entry` there passes bytes to a
socket in the one folder it shares with us, and here each request goes to the attempt's session (`Relay`), which counts
turns and notes refusals. Its end is the sandbox's: whatever it left running is proven gone before the verifier starts.

How it ends: what the policy wrote runs beside the program, as the same user, and can do to it and say in its session
whatever it likes. So no exit of a program that had a turn keeps the verifier away, whatever its code or words; only
what is seen from here does: a session that is gone, an engine that refused or was silent, with no turn after it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from rl360.sessions.refusals import HTTP_STATUS

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
OWN_FAULT = (400, 409, 413, 422, 429)  # of the request, and what the policy wrote may have sent it
CONNECTIONS, ACCEPT_S = 64, 0.001  # of one sandbox, and between two of them
PAUSE_S = 0.05  # after each request that is no turn: so that many of them cost us little
CODE = re.compile(rb'"code"\s*:\s*"([a-z_]+)"')
BEATS = re.compile(rb"(?::[^\n]*\n\n|event: ping\ndata: [^\n]*\n\n)+")
LAST_EVENT = re.compile(rb"(?:\A|\n\n)event: error\ndata: ([^\n]*)\n\n\Z")
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
    """One attempt's way to its session; what became of requests for turns is in `context.calls`."""

    context: AgentContext
    full: bool = False
    cut: bool = False
    over_turns: bool = False
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PARALLEL))
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def left(self) -> float:
        """Seconds for the program: it ends a moment before the attempt's deadline, so that its words are heard."""
        return max(0.1, self.context.deadline - asyncio.get_running_loop().time() - MARGIN_S)

    async def settle(self) -> None:
        """Of a program that ended while its session owed it a turn: wait until one comes, or is refused, or its time is
        over. Then it is known whether the model was silent, or asked by who did not mean to wait."""
        self.heard.clear()
        if self.context.calls.owed and self.context.calls.failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.heard.wait(), self.left())

    async def carry(self, request: web.Request) -> web.StreamResponse:
        async with self.places:
            try:
                answer = await self._carry(request)
            except ConnectionError:  # who asked is gone: no fault of ours, and no traceback each in our log
                answer = _refuse(400, "gone", "the request was given up")
            if answer.status != 200 or request.match_info["place"] not in SAMPLES:
                await asyncio.sleep(PAUSE_S)
            return answer

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
        call = self.context.http.stream(
            request.method,
            f"{self.context.base_url}/{place}",
            content=body,
            headers={name: request.headers[name] for name in PASSED_ON if name in request.headers},
            timeout=httpx.Timeout(left, connect=min(left, 10.0)),
        )
        taken, asked = False, None
        if sampling:  # at once, so that requests side by side don't take more than there are
            metrics.turns += 1
            asked = self.context.calls.asked()
        try:
            async with call as reply:
                begun, data = await _heard(request, reply)
            taken = asked is not None and await self._note(asked, reply, data)
        except httpx.ReadTimeout:  # of all the time that was left: still owed
            return _refuse(502, "session_lost", "the session has not answered")
        except httpx.HTTPError as error:
            if asked is not None:
                said = f"session: {error!r}"[:300]
                self.context.calls.refused(asked, AgentFailure(ExitStatus.SESSION_LOST, said, retryable=False))
            return _refuse(502, "session_lost", "the session cannot be reached")
        finally:
            if sampling and not taken:  # it was none: who was refused meanwhile may ask again
                metrics.turns, self.over_turns = metrics.turns - 1, False
            if taken or self.context.calls.failure is not None or not self.context.calls.owed:
                self.heard.set()
            metrics.model_query_time_sum += time.monotonic() - started
        if begun is None:
            return web.Response(status=reply.status_code, body=data, headers=_passed_back(reply))
        await begun.write(data)
        return begun

    async def _note(self, asked: float, reply: httpx.Response, data: bytes) -> bool:
        """What a reply to a request for a turn says, and whether it is one."""
        tail, calls = data[-TAIL_BYTES:], self.context.calls
        error = LAST_EVENT.search(tail) if reply.status_code == 200 else None
        if reply.status_code == 200 and error is None:
            self.cut = CUT.search(tail) is not None
            self.context.metrics.completion_tokens += max((int(n) for n in TOKENS.findall(tail)), default=0)
            calls.answered(asked)
            return True
        told = httpx.Response(reply.status_code, content=data, headers=_passed_back(reply))
        if error is not None:  # of a stream that had begun: the status was sent long ago
            code = CODE.search(error[1])
            known = {str(each): status for each, status in HTTP_STATUS.items()}
            told = httpx.Response(known.get(code[1].decode(), 502) if code else 502, content=error[1])
        failure = refusal(told)
        self.full = self.full or failure is None
        if told.status_code in OWN_FAULT or (told.status_code == 404 and await self._has_session()):
            failure = None
        self.context.metrics.retries += failure is not None and failure.retryable
        calls.refused(asked, failure)
        return False

    async def _has_session(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self.context.http.get(f"{self.context.base_url}/models", timeout=10.0)).status_code == 200
        return False


async def _heard(request: web.Request, reply: httpx.Response) -> tuple[web.StreamResponse | None, bytes]:
    """A whole reply, whether or not who asked reads it: only signs of life go on at once, as the answer that begun."""
    if reply.status_code != 200:
        return None, await reply.aread()
    begun: web.StreamResponse | None = None
    parts: list[bytes] = []
    async for part in reply.aiter_raw():
        if parts or BEATS.fullmatch(part) is None:
            parts.append(part)
            continue
        with contextlib.suppress(OSError):  # who asked is gone
            if begun is None:
                begun = web.StreamResponse(headers=_passed_back(reply))
                await begun.prepare(request)
            await begun.write(part)
    return begun, b"".join(parts)


def _passed_back(reply: httpx.Response) -> dict[str, str]:
    return {name: reply.headers[name] for name in PASSED_BACK if name in reply.headers}


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
                raise AgentFailure(ExitStatus.AGENT_TIMEOUT, f"{name} ran to the deadline; {said}", retryable=False)
            return await ended(relay, name, result.exit_code, said)

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


async def ended(relay: Relay, name: str, code: int, said: str) -> AgentEnd:
    """The end of a program by itself."""
    if code <= 128:
        await relay.settle()
    turns = relay.context.metrics.turns - len(relay.context.calls.owed)
    if relay.full and turns == 0:
        raise AgentFailure(ExitStatus.GENERATION_ERROR, "the first prompt leaves no room for a reply", retryable=False)
    if relay.over_turns:
        return AgentEnd(ExitStatus.TURN_LIMIT, f"{turns} turns")
    if relay.full:
        return AgentEnd(ExitStatus.LENGTH_LIMIT, "no room for another turn")
    if code > 128:
        return AgentEnd(ExitStatus.SANDBOX_LIMIT, f"{name} was ended by signal {code - 128}; {said}")
    if (failure := relay.context.kept_by()) is not None:
        raise failure
    if turns == 0:  # nothing the policy wrote was there to do it
        why = f"exit {code}" if code else "it ended without a turn of the model"
        return AgentEnd(ExitStatus.AGENT_ERROR, f"{name}: {why}; {said}")
    if relay.cut:
        return AgentEnd(ExitStatus.LENGTH_LIMIT, "cut by length")
    return AgentEnd(ExitStatus.AGENT_EXITED, f"{name}: exit {code}; {said}") if code else AgentEnd(ExitStatus.SUBMITTED)


@asynccontextmanager
async def listening(relay: Relay, folder: Path) -> AsyncIterator[None]:
    """The relay at `folder`/session.sock, for the sandbox's user alone."""
    runner = await _runner(relay, "")
    bound = socket.socket(socket.AF_UNIX)
    accepting: asyncio.Future[None] | None = None
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
        bound.setblocking(False)
        bound.listen(CONNECTIONS)
        accepting = asyncio.ensure_future(_accept(bound, runner))
        yield
    finally:
        if accepting is not None:
            accepting.cancel()
            await asyncio.wait({accepting})
        await runner.cleanup()
        bound.close()


async def _accept(bound: socket.socket, runner: web.AppRunner) -> None:
    """What a sandbox has too many of, or makes too fast, waits in its own kernel queue: it costs us no descriptor."""
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    while True:
        await asyncio.sleep(ACCEPT_S)
        if len(server.connections) < CONNECTIONS:
            with contextlib.suppress(OSError):  # this host's descriptors
                connection, _ = await loop.sock_accept(bound)
                await loop.connect_accepted_socket(server, connection)


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
