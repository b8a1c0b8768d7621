"""The rollout function: one attempt from an empty session to a record in the store.

An attempt is: open a session, have the sandbox server run agent and verifier against it (`POST /run`), have the
session server merge and store what it holds (together with others that end then), write the `AttemptRecord` with the
reference, close the session. No payload comes through here. Both servers are idempotent by attempt id, so an attempt
whose client was killed is joined, not repeated, and one whose server was killed is asked for again: the server that
comes back knows what became of it. Whatever goes wrong becomes an outcome of this attempt alone; nothing here turns a
failure into a reward.

A try that infrastructure lost may be tried again, within what an attempt, its group and its task may cost
(rl360.agents.budgets); every try keeps a record of its own, so the tokens it sampled stay accounted for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from pydantic import ValidationError

from rl360.agents.budgets import Budgets
from rl360.agents.places import EVERY_S, Places
from rl360.agents.stores import Item, StoreGroups
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.errors import BadInput, CorruptObject, StoreUnavailable
from rl360.harbor.protocol import JudgeOrder, RunReply, RunRequest, SandboxLimits
from rl360.harbor.verdict import receipt_problem, run_key
from rl360.ledger.outcomes import HAS_VERDICT, Outcome
from rl360.plugins import load_function
from rl360.sandboxes.placement import Placement
from rl360.sessions.sample import AttemptRecord, SampleRef
from rl360.store.layout import merged_key

_PATIENCE_S = 30.0  # how long a server may refuse connections (it restarts) or have no room before a try is lost
_PAUSE_S = (0.5, 3.0)  # first and longest pause between two requests
_CONNECT_S = 5.0
_TO_ONE_SESSION_SERVER = 64  # connections; the others wait here, where no deadline runs, and not in the server
_REFUSED = frozenset({400, 401, 403, 501})  # the same request can never work, for this try and for all others
_FLUSH_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class AttemptSpec:
    """One planned attempt: which draw it belongs to, which task it tries, which `image` it shares with other tasks."""

    slot_id: str
    group_id: str
    task_id: str
    task_dir: str
    domain: str
    image: str = ""  # none that others share, or planned before plans said so: placed by its task

    def attempt_id(self, try_index: int) -> str:
        return f"{self.slot_id}-t{try_index}"


@dataclass(frozen=True)
class Played:
    """A try whose agent and verifier are done: `reply` is what the sandbox server said, None when that is lost. What it
    sampled is still in its session."""

    spec: AttemptSpec
    try_index: int
    started_at: float
    ended_at: float
    session_id: str
    reply: RunReply | None
    outcome: Outcome
    detail: str

    @property
    def attempt_id(self) -> str:
        return self.spec.attempt_id(self.try_index)


class _Lost(Exception):
    """This try is lost to infrastructure; carries its outcome, the answer of a server that refused, and whether it was
    `gone`: refused connections for as long as a restart may take."""

    def __init__(self, outcome: Outcome, detail: str, answer: bytes = b"", *, gone: bool = False) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.answer = answer
        self.gone = gone


Run = Callable[[RunRequest], Awaitable[RunReply]]
Generate = Callable[[RunRequest, AttemptSpec, Run], Awaitable[RunReply]]
Specs = Sequence[AttemptSpec]
Play = Callable[[AttemptSpec], Coroutine[Any, Any, None]]


async def run_as_asked(request: RunRequest, spec: AttemptSpec, run: Run) -> RunReply:
    """The generate function (docs/agents.md) where a run names none."""
    return await run(request)


async def all_at_once(specs: Specs, play: Play) -> None:
    """The rollout function where a run names none: every attempt of the wave is begun now."""
    async with asyncio.TaskGroup() as group:
        for spec in specs:
            group.create_task(play(spec))


def spread(urls: list[str], key: str) -> str:
    """The server of an attempt: a pure function of its id, so that whoever asks again asks the same one."""
    return urls[zlib.crc32(key.encode()) % len(urls)]


class RolloutClient:
    """Talks to the session and sandbox servers of one deployment, for one wave at one weight version."""

    def __init__(
        self, services: Services, config: RunConfig, step: int, wave: int, weight_version: str, specs: Specs = ()
    ) -> None:
        """specs: the wave's, in the order of its plan; they decide which sandbox server each goes to."""
        self.services = services
        self.config = config
        self.step = step
        self.wave = wave
        self.weight_version = weight_version
        self._verdict_key = run_key(services.secrets().token, config.run)
        scored = {Outcome.AGENT_TIMEOUT} if config.rollout.unverified_timeout == "score_zero" else set()
        self._counted = HAS_VERDICT | scored  # outcomes that enter a baseline
        judge = config.judge.model_dump() | {"timeout_s": config.deadlines.judge_s}
        self._judge = JudgeOrder(**judge) if config.judge.model else None
        headers = services.auth_headers()
        self._sessions = _http(headers, limit_per_host=_TO_ONE_SESSION_SERVER)
        self._sandboxes = _http(headers)  # every attempt that runs holds a connection
        self._stores = StoreGroups(self._ask_stores)
        self._placement = Placement(services.sandbox_urls, Counter(spec.image or spec.task_id for spec in specs))
        for spec in specs:
            self._placement.place(spec.slot_id, spec.image or spec.task_id)
        self.places = Places()  # or those of all waves of a flow
        box = config.sandbox
        self._need = {"milli_cpus": 1000 * box.reserved_cpus, "memory_mb": box.memory_mb, "pids": box.pids}
        self._lines: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # before each server
        path = config.rollout.generate
        self._generate: Generate = load_function(path, "rollout.generate") if path else run_as_asked

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stores.aclose()
        await self._sessions.close()
        await self._sandboxes.close()

    async def attempt(self, spec: AttemptSpec, try_index: int) -> AttemptRecord:
        """Run one try to its end. What a server or the network does is an outcome; a request that a server refuses as
        wrong (a task it cannot run, another token) raises `BadInput`, for no other attempt would fare better, as does a
        verdict that the run's verifier did not sign, for no record may hold it. A store that is away for the session
        server raises `StoreUnavailable`: the session still holds everything."""
        return await self.finish(await self.play(spec, try_index))

    async def play(self, spec: AttemptSpec, try_index: int) -> Played:
        """The first part of `attempt`: until agent and verifier are done. It is all that keeps a sandbox and engines
        busy; `finish` may wait for others."""
        attempt_id = spec.attempt_id(try_index)
        server, place = await self._place(spec, try_index)
        started_at = time.time()
        session_id, reply = "", None
        with self._stores.player():
            try:
                session_id, base_url = await self._open_session(spec, attempt_id)
                reply = await self._run(spec, attempt_id, base_url, server)
                outcome, detail = reply.outcome, reply.detail
            except _Lost as lost:
                outcome, detail = lost.outcome, lost.detail
                if lost.gone and outcome is Outcome.SANDBOX_LOST:
                    with contextlib.suppress(ValueError, BadInput):  # others lost it before; there is no other
                        self._placement.lose(server)
                if session_id:
                    await self._flush(attempt_id, server)
            finally:
                self.places.leave(server, place)
        return Played(spec, try_index, started_at, time.time(), session_id, reply, outcome, detail)

    async def finish(self, played: Played) -> AttemptRecord:
        """The second part of `attempt`: what it sampled is stored; its record."""
        spec, attempt_id, session_id, reply = played.spec, played.attempt_id, played.session_id, played.reply
        outcome, detail = played.outcome, played.detail
        stored, unmerged = None, None
        if session_id:
            try:
                stored = await self._store(attempt_id, session_id)
            except _Lost as lost:
                unmerged = _unmerged_tokens(lost.answer)
                if unmerged is not None:
                    detail = detail or lost.detail
                else:
                    unmerged = await self._sampled_tokens(attempt_id, session_id)
                    if outcome in self._counted:
                        # its samples may be anywhere or nowhere: its reward or score must not be in the books
                        outcome, detail = lost.outcome, lost.detail
                    if unmerged is None:
                        detail = f"{detail[:450]}; what it sampled is unknown"
        verdict = reply.verdict if reply is not None and outcome in HAS_VERDICT else None
        return AttemptRecord(
            attempt_id=attempt_id,
            group_id=spec.group_id,
            task_id=spec.task_id,
            try_index=played.try_index,
            outcome=outcome,
            verdict=verdict,
            exit_status=reply.exit_status if reply is not None else "",
            session_id=session_id,
            stored=stored,
            domain=spec.domain,
            detail=detail[:500],
            started_at=played.started_at,
            finished_at=played.ended_at,
            phases_s=reply.phases.model_dump() if reply is not None else {},
            agent_metrics=dict(reply.agent_metrics) if reply is not None else {},
            cleanup_confirmed=reply.cleanup.confirmed if reply is not None else False,
            cleanup_evidence=reply.cleanup.evidence[:200] if reply is not None else "",
            unmerged_tokens=unmerged or 0,
        ).check(attempt_id)

    def _sandbox_server(self, spec: AttemptSpec, try_index: int) -> str:
        """Where a try runs: it follows from the wave's plan and the servers alone, so that whoever asks again asks the
        same one. Attempts of one image share few servers; a try after one that was lost goes to the image's next."""
        if spec.slot_id not in self._placement:
            self._placement.place(spec.slot_id, spec.image or spec.task_id)
        return self._placement.node_of(spec.slot_id, try_index)

    async def _place(self, spec: AttemptSpec, try_index: int) -> tuple[str, str]:
        """Its server, when that has a place for it, and what it counts as there; another one if it is lost
        meanwhile."""
        while True:
            server = self._sandbox_server(spec, try_index)
            async with self._lines[server]:  # in the order of asking
                if server != self._sandbox_server(spec, try_index):
                    continue
                place = await self.places.take(server, spec.image, spec.task_id, self._need, self._health)
            if place is None:
                await asyncio.sleep(2 * EVERY_S)
            elif server == self._sandbox_server(spec, try_index):
                return server, place
            else:
                self.places.leave(server, place)

    async def _health(self, server: str) -> Any:
        return await _told(self._sandboxes, f"{server}/health")

    async def _flush(self, attempt_id: str, server: str) -> None:
        """End an attempt nobody waits for any more, so that it neither holds a slot nor samples on. Best effort: the
        sandbox server ends it at its own deadline at the latest."""

        async def ran_at(url: str) -> bool:
            try:
                which = {"attempt_ids": [attempt_id]}
                _, answer = await _answer(self._sandboxes, "POST", f"{url}/flush", which, _FLUSH_TIMEOUT_S)
                return attempt_id not in orjson.loads(answer)["elsewhere"]
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
                return False

        if not await ran_at(server):  # an earlier flow run had it somewhere else
            await asyncio.gather(*(ran_at(url) for url in self.services.sandbox_urls if url != server))

    async def close_session(self, attempt_id: str, session_id: str) -> None:
        """Free the session once its record is stored. Best effort: an idle session expires by itself."""
        try:
            url = f"{spread(self.services.session_urls, attempt_id)}/sessions/{session_id}"
            await _answer(self._sessions, "DELETE", url, None, self.config.deadlines.collect_s)
        except (aiohttp.ClientError, TimeoutError):
            return

    async def _open_session(self, spec: AttemptSpec, attempt_id: str) -> tuple[str, str]:
        rollout = self.config.rollout
        body = {
            "attempt_id": attempt_id,
            "group_id": spec.group_id,
            "task_id": spec.task_id,
            "sampling": {
                "temperature": rollout.temperature,
                # what narrows sampling is in no log-prob: importance weights would be wrong without a trace
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": rollout.max_new_tokens,
            },
            "max_seq_len": rollout.max_seq_len,
            "expected_weight_version": self.weight_version,
            "mode": rollout.session_mode,
            "matcher": rollout.matcher,
            "sampling_policy": rollout.sampling_params,
            "thinking": rollout.thinking,
        }
        url = f"{spread(self.services.session_urls, attempt_id)}/sessions"
        answer = await self._ask_sessions(url, body)
        try:
            reply = orjson.loads(answer)
            return str(reply["session_id"]), str(reply["base_url"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise _Lost(Outcome.SESSION_LOST, f"{url}: reply is not a session ({error!r})"[:500]) from None

    async def _run(self, spec: AttemptSpec, attempt_id: str, base_url: str, server: str) -> RunReply:
        config, deadlines = self.config, self.config.deadlines
        request = RunRequest(
            instance_id=spec.task_id,
            task_dir=spec.task_dir,
            attempt_id=attempt_id,
            group_id=spec.group_id,
            run=config.run,
            step=self.step,
            base_url=base_url,
            agent_name=config.rollout.agent,
            max_seq_len=config.rollout.max_seq_len,
            limits=SandboxLimits(**config.sandbox.model_dump()),
            max_turns=config.rollout.max_turns,
            queue_timeout_s=deadlines.queue_s,
            setup_timeout_s=deadlines.setup_s,
            agent_timeout_s=deadlines.agent_s,
            verifier_timeout_s=deadlines.verifier_s,
            judge=self._judge,
            deadline_s=deadlines.client_s - deadlines.collect_s,  # answered before nobody waits any more
        )
        url = f"{server}/run"

        async def run(order: RunRequest) -> RunReply:
            body = order.model_dump(mode="json")
            answer = await _send(self._sandboxes, url, body, deadlines.client_s, Outcome.SANDBOX_LOST, {"resent": True})
            try:
                return RunReply.model_validate(orjson.loads(answer))
            except (orjson.JSONDecodeError, ValidationError) as error:
                raise _Lost(Outcome.UNCLASSIFIED, f"sandbox server's reply is malformed: {error}"[:500]) from None

        reply = await self._generate(request, spec, run)
        problem = None if reply.verdict is None else receipt_problem(reply.verdict, self._verdict_key, config.run)
        if problem is not None:
            raise BadInput(f"{url}: {problem}")
        return reply

    async def _store(self, attempt_id: str, session_id: str) -> SampleRef:
        """Have the session server write the attempt's samples to the store; asked again, it answers the same."""
        key = merged_key(self.config.run, self.step, self.wave, attempt_id)
        server = spread(self.services.session_urls, attempt_id)
        url, body = f"{server}/sessions/{session_id}/store", {"key": key, "pick": self.config.rollout.pick}
        together = await self._stores.store(server, {"session_id": session_id, **body})
        try:
            if together is not None and (ref := SampleRef.from_wire(together, url)).key == key:
                return ref
        except CorruptObject:
            pass  # asked alone, the server says what is the matter
        try:
            ref = SampleRef.from_wire(orjson.loads(await self._ask_sessions(url, body)), url)
        except (orjson.JSONDecodeError, CorruptObject) as error:
            raise _Lost(Outcome.SESSION_LOST, _shown(f"{url}: reply is not a reference ({error})"[:500], url)) from None
        if ref.key != key:
            raise _Lost(Outcome.SESSION_LOST, _shown(f"{url}: stored under {ref.key}, was asked for {key}", url))
        return ref

    async def _ask_stores(self, server: str, sessions: list[Item]) -> list[Item | None] | None:
        """What the server answers for each; None when it does not answer as it should."""
        try:
            limit_s, body = self.config.deadlines.collect_s, {"sessions": sessions}
            status, answer = await _answer(self._sessions, "POST", f"{server}/sessions/store", body, limit_s)
            stored = orjson.loads(answer)["stored"] if status == 200 else None
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError):
            return None
        return stored if isinstance(stored, list) and len(stored) == len(sessions) else None

    async def _sampled_tokens(self, attempt_id: str, session_id: str) -> int | None:
        """What a session that could not be stored says it sampled; None when it cannot be asked."""
        url = f"{spread(self.services.session_urls, attempt_id)}/sessions/{session_id}"
        told = await _told(self._sessions, url)
        sampled = told.get("sampled_tokens") if isinstance(told, dict) else None
        return sampled if type(sampled) is int and sampled >= 0 else None

    async def _ask_sessions(self, url: str, body: dict[str, Any]) -> bytes:
        """A session opened or stored again is the same one, so these may be sent again whatever became of the first."""
        limit_s = self.config.deadlines.collect_s
        return await _send(self._sessions, url, body, limit_s, Outcome.SESSION_LOST, {})


def _http(headers: dict[str, str], limit_per_host: int = 0) -> aiohttp.ClientSession:
    """A client without cookies and proxies. It drops connections that are idle for 15 s, long before our servers do."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=limit_per_host, keepalive_timeout=15.0),
        headers={**headers, "Content-Type": "application/json"},
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        trust_env=False,
    )


async def _answer(
    http: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None, timeout_s: float
) -> tuple[int, bytes]:
    """Status and body of one answer. `timeout_s` runs from when the request was sent."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=timeout_s)
    data = None if body is None else orjson.dumps(body)
    async with http.request(method, url, data=data, timeout=timeout, allow_redirects=False) as reply:
        return reply.status, await reply.read()


async def _told(http: aiohttp.ClientSession, url: str) -> Any:
    """What it answers when it is asked; None when it does not answer."""
    told: Any = None
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
        status, answer = await _answer(http, "GET", url, None, _FLUSH_TIMEOUT_S)
        told = None if status >= 500 else {}  # what follows may be no JSON
        told = orjson.loads(answer) if status < 300 else told
    return told


async def _send(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    timeout_s: float,
    lost_as: Outcome,
    again: dict[str, Any],
) -> bytes:
    """The answer to one POST, which is sent again while the server refuses connections or has no room, within
    `_PATIENCE_S`: these are known not to have begun. Where the connection breaks later, even an idle one that the
    server closed just as it was used again, the request may have begun: it then says `again` too, and the server, which
    may have died and come back, has `_PATIENCE_S` from there on. `StoreUnavailable` when the server could not reach the
    store at the end of that time: nothing is lost yet, and a task that runs again asks for the same."""
    give_up_at, pause_s = time.monotonic() + _PATIENCE_S, _PAUSE_S[0]
    at_the_latest = give_up_at + timeout_s
    while True:
        unstored = gone = False
        try:
            status, answer = await _answer(http, "POST", url, body, timeout_s)
            if status < 300:
                return answer
            said = _shown(f"{url} answered {status}: {' '.join(answer.decode(errors='replace').split())[:300]}", url)
            if status in _REFUSED:
                raise BadInput(said)
            if status != 503:
                raise _Lost(lost_as, said, answer)
            unstored = _error(answer).get("code") == "store_unavailable"
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            gone = True
            said = _shown(f"{url} refuses connections ({error})", url)
        except TimeoutError:
            raise _Lost(lost_as, _shown(f"{url}: no answer within {timeout_s:g} s", url)) from None
        except aiohttp.ClientError as error:
            said = _shown(f"{url}: {type(error).__name__} {error}"[:300], url)
            body, give_up_at = body | again, min(time.monotonic() + _PATIENCE_S, at_the_latest)
        if time.monotonic() + pause_s > give_up_at:
            raise StoreUnavailable(said) if unstored else _Lost(lost_as, said, gone=gone)
        await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))
        pause_s = min(2 * pause_s, _PAUSE_S[1])


def _shown(text: str, url: str) -> str:
    """`text` without the session id in `url`: who has the id may speak in the session, and this goes into logs."""
    _, found, rest = url.partition("/sessions/")
    return text.replace(rest.partition("/")[0], "ID") if found and rest else text


def _error(answer: bytes) -> dict[str, Any]:
    """The `error` of a refusal, or nothing."""
    try:
        error = orjson.loads(answer)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _unmerged_tokens(answer: bytes) -> int | None:
    """Of a session server's refusal to merge, the sampled tokens it names (0: none named); None of other answers."""
    error = _error(answer)
    if error.get("code") != "cannot_merge":
        return None
    sampled = error.get("sampled_tokens", 0)
    return sampled if type(sampled) is int and sampled >= 0 else 0


async def roll_out_slot(
    client: RolloutClient,
    spec: AttemptSpec,
    earlier: list[AttemptRecord],
    room: asyncio.Semaphore,
    keep: Callable[[AttemptRecord], Awaitable[None]],
    mend: Callable[[AttemptRecord], Awaitable[None]],
    budgets: Budgets,
) -> None:
    """Bring one planned attempt to its end: tries until one has a verdict, ended in a way that another try would not
    change (a broken verifier, a fault of the agent's code), or the `budgets` for infra are spent.

    `earlier` holds the tries an earlier, killed run of the wave already stored, in order; `keep` returns when a record
    is stored, and only then is its session closed. `mend` is told of a lost try before the next. An attempt holds its
    place in `room` while it plays, and between tries that were lost while playing, so that while there is no engine
    few others are lost to that; having samples stored holds no place.
    """
    tries = list(earlier)

    def again(outcome: Outcome, further: int) -> bool:
        return budgets.another(outcome, further, spec.group_id, spec.task_id, spec.attempt_id(further + 1))

    async def play() -> Played:
        refusal, now = budgets.refusal(spec.task_id), time.time()
        if refusal is None:
            return await client.play(spec, len(tries))
        return Played(spec, len(tries), now, now, "", None, Outcome.SANDBOX_START, refusal)

    async def settle(played: Played) -> None:
        record = await client.finish(played)
        tries.append(record)
        # first: whoever is killed in between asks again for what brought it about
        for quarantine in budgets.note(record):
            await asyncio.to_thread(budgets.publish, quarantine)
        await keep(record)
        if record.session_id:
            await client.close_session(record.attempt_id, record.session_id)

    while not tries or again(tries[-1].outcome, len(tries) - 1):
        async with room:
            if tries:
                await mend(tries[-1])
            played = await play()
            while again(played.outcome, len(tries)):
                await settle(played)
                await mend(tries[-1])
                played = await play()
        await settle(played)
    if len(tries) > len(earlier):
        budgets.ended(tries[-1])
