"""The rollout function: one attempt from an empty session to a record in the store.

An attempt is: open a session, have the sandbox server run agent and verifier against it (`POST /run`), have the
session server merge and store what it holds, write the `AttemptRecord` with the reference, close the session. No
payload comes through here. Both servers are idempotent by attempt id, so an attempt whose client was killed is joined,
not repeated. Whatever goes wrong becomes an outcome of this attempt alone; nothing here turns a failure into a reward.

A try that infrastructure lost may be tried again (`rollout.infra_retries`); every try keeps a record of its own, so
the tokens it sampled stay accounted for.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import orjson
from pydantic import ValidationError

from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.errors import BadInput, CorruptObject, StoreUnavailable
from rl360.harbor.outcome import RETRYABLE
from rl360.harbor.protocol import RunReply, RunRequest, SandboxLimits
from rl360.ledger.outcomes import HAS_VERDICT, Outcome
from rl360.pools import busy_pool
from rl360.sessions.sample import AttemptRecord, SampleRef
from rl360.store.layout import merged_key

_PATIENCE_S = 30.0  # how long a server may refuse connections (it restarts) or have no room before a try is lost
_PAUSE_S = (0.5, 3.0)  # first and longest pause between two requests
_REFUSED = frozenset({400, 401, 403, 501})  # the same request can never work, for this try and for all others
_FLUSH_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class AttemptSpec:
    """One planned attempt: which draw it belongs to and which task it tries."""

    slot_id: str
    group_id: str
    task_id: str
    task_dir: str
    domain: str

    def attempt_id(self, try_index: int) -> str:
        return f"{self.slot_id}-t{try_index}"


class _Lost(Exception):
    """This try is lost to infrastructure; carries its outcome."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


def _spread(urls: list[str], key: str) -> str:
    return urls[zlib.crc32(key.encode()) % len(urls)]


class RolloutClient:
    """Talks to the session and sandbox servers of one deployment, for one wave at one weight version."""

    def __init__(self, services: Services, config: RunConfig, step: int, wave: int, weight_version: str) -> None:
        self.services = services
        self.config = config
        self.step = step
        self.wave = wave
        self.weight_version = weight_version
        deadlines = config.deadlines
        self._http = httpx.AsyncClient(
            headers=services.auth_headers(),
            timeout=httpx.Timeout(deadlines.collect_s, connect=5.0),
            limits=busy_pool(),
        )

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def attempt(self, spec: AttemptSpec, try_index: int) -> AttemptRecord:
        """Run one try to its end. What a server or the network does is an outcome; a request that a server refuses as
        wrong (a task it cannot run, another token) raises `BadInput`, for no other attempt would fare better, and a
        store that is away for the session server raises `StoreUnavailable`: the session still holds everything."""
        attempt_id = spec.attempt_id(try_index)
        started_at = time.time()
        session_id, stored, reply = "", None, None
        outcome, detail = Outcome.UNCLASSIFIED, ""
        try:
            session_id, base_url = await self._open_session(spec, attempt_id)
            reply = await self._run(spec, attempt_id, base_url)
            outcome, detail = reply.outcome, reply.detail
        except _Lost as lost:
            outcome, detail = lost.outcome, lost.detail
            if session_id:
                await self._flush(attempt_id)
        if session_id:
            try:
                stored = await self._store(attempt_id, session_id)
            except _Lost as lost:
                if outcome in HAS_VERDICT:
                    # a verdict without its tokens can train nothing; the reward is not counted either
                    outcome, detail = lost.outcome, lost.detail
        verdict = reply.verdict if reply is not None and outcome in HAS_VERDICT else None
        return AttemptRecord(
            attempt_id=attempt_id,
            group_id=spec.group_id,
            task_id=spec.task_id,
            try_index=try_index,
            outcome=outcome,
            verdict=verdict,
            exit_status=reply.exit_status if reply is not None else "",
            session_id=session_id,
            stored=stored,
            domain=spec.domain,
            detail=detail[:500],
            started_at=started_at,
            finished_at=time.time(),
            phases_s=reply.phases.model_dump() if reply is not None else {},
            agent_metrics=dict(reply.agent_metrics) if reply is not None else {},
            cleanup_confirmed=reply.cleanup.confirmed if reply is not None else False,
        ).check(attempt_id)

    async def _flush(self, attempt_id: str) -> None:
        """End an attempt nobody waits for any more, so that it neither holds a slot nor samples on. Best effort: the
        sandbox server ends it at its own deadline at the latest."""
        try:
            await self._http.post(
                f"{_spread(self.services.sandbox_urls, attempt_id)}/flush",
                json={"attempt_ids": [attempt_id]},
                timeout=_FLUSH_TIMEOUT_S,
            )
        except httpx.HTTPError:
            return

    async def close_session(self, attempt_id: str, session_id: str) -> None:
        """Free the session once its record is stored. Best effort: an idle session expires by itself."""
        try:
            await self._http.delete(f"{_spread(self.services.session_urls, attempt_id)}/sessions/{session_id}")
        except httpx.HTTPError:
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
        url = f"{_spread(self.services.session_urls, attempt_id)}/sessions"
        response = await self._send("POST", url, body, self.config.deadlines.collect_s, Outcome.SESSION_LOST)
        try:
            reply = orjson.loads(response.content)
            return str(reply["session_id"]), str(reply["base_url"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise _Lost(Outcome.SESSION_LOST, f"{url}: reply is not a session ({error!r})"[:500]) from None

    async def _run(self, spec: AttemptSpec, attempt_id: str, base_url: str) -> RunReply:
        config, deadlines = self.config, self.config.deadlines
        request = RunRequest(
            instance_id=spec.task_id,
            task_dir=spec.task_dir,
            attempt_id=attempt_id,
            group_id=spec.group_id,
            run=config.run,
            step=self.step,
            base_url=base_url,
            max_seq_len=config.rollout.max_seq_len,
            limits=SandboxLimits(
                memory_mb=config.sandbox.memory_mb,
                pids=config.sandbox.pids,
                cpus=config.sandbox.cpus,
                cpu_time_s=config.sandbox.cpu_time_s,
                file_size_mb=config.sandbox.file_size_mb,
                output_bytes=config.sandbox.output_bytes,
            ),
            max_turns=config.rollout.max_turns,
            queue_timeout_s=deadlines.queue_s,
            setup_timeout_s=deadlines.setup_s,
            agent_timeout_s=deadlines.agent_s,
            verifier_timeout_s=deadlines.verifier_s,
            deadline_s=deadlines.client_s,
        )
        url = f"{_spread(self.services.sandbox_urls, attempt_id)}/run"
        body = request.model_dump(mode="json")
        response = await self._send("POST", url, body, deadlines.client_s, Outcome.SANDBOX_LOST)
        try:
            return RunReply.model_validate(orjson.loads(response.content))
        except (orjson.JSONDecodeError, ValidationError) as error:
            raise _Lost(Outcome.UNCLASSIFIED, f"sandbox server's reply is malformed: {error}"[:500]) from None

    async def _store(self, attempt_id: str, session_id: str) -> SampleRef:
        """Have the session server write the attempt's samples to the store; asked again, it answers the same."""
        key = merged_key(self.config.run, self.step, self.wave, attempt_id)
        url = f"{_spread(self.services.session_urls, attempt_id)}/sessions/{session_id}/store"
        body = {"key": key, "pick": self.config.rollout.pick}
        response = await self._send("POST", url, body, self.config.deadlines.collect_s, Outcome.SESSION_LOST)
        try:
            ref = SampleRef.from_wire(orjson.loads(response.content), url)
        except (orjson.JSONDecodeError, CorruptObject) as error:
            raise _Lost(Outcome.SESSION_LOST, f"{url}: reply is not a reference ({error})"[:500]) from None
        if ref.key != key:
            raise _Lost(Outcome.SESSION_LOST, f"{url}: stored under {ref.key}, was asked for {key}")
        return ref

    async def _send(
        self, method: str, url: str, body: dict | None, timeout_s: float, lost_as: Outcome
    ) -> httpx.Response:
        """One request, again while the server refuses connections or has no room, within `_PATIENCE_S`; nothing else is
        sent twice: these are known not to have begun. `StoreUnavailable` when the server could not reach the store at
        the end of that time: nothing is lost yet, and a task that runs again asks for the same."""
        content = orjson.dumps(body) if body is not None else None
        headers = {"content-type": "application/json"} if content is not None else {}
        give_up_at, pause_s, unstored = time.monotonic() + _PATIENCE_S, _PAUSE_S[0], False
        while True:
            try:
                response = await self._http.request(
                    method, url, content=content, headers=headers, timeout=httpx.Timeout(timeout_s, connect=5.0)
                )
                if response.status_code < 300:
                    return response
                said = f"{url} answered {response.status_code}: {' '.join(response.text.split())[:300]}"
                if response.status_code in _REFUSED:
                    raise BadInput(said)
                if response.status_code != 503:
                    raise _Lost(lost_as, said)
                unstored = _code(response) == "store_unavailable"
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                said, unstored = f"{url} refuses connections ({error})", False
            except httpx.HTTPError as error:
                raise _Lost(lost_as, f"{url}: {type(error).__name__} after at most {timeout_s:g} s") from None
            if time.monotonic() + pause_s > give_up_at:
                raise StoreUnavailable(said) if unstored else _Lost(lost_as, said)
            await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))
            pause_s = min(2 * pause_s, _PAUSE_S[1])


def _code(response: httpx.Response) -> str:
    """The `error.code` of a refusal, or nothing."""
    try:
        return str(orjson.loads(response.content)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""


async def roll_out_slot(
    client: RolloutClient,
    spec: AttemptSpec,
    earlier: list[AttemptRecord],
    keep: Callable[[AttemptRecord], None],
    mend: Callable[[AttemptRecord], Awaitable[None]],
) -> None:
    """Bring one planned attempt to its end: tries until one has a verdict, ended in a way that another try would not
    change (a broken verifier, a fault of the agent's code), or the infra budget is spent.

    `earlier` holds the tries an earlier, killed run of the wave already stored, in order; `keep` stores a record
    (blocking; called in a thread) and only then is its session closed. `mend` is told of a lost try before the next.
    """
    tries = list(earlier)
    while not tries or (tries[-1].outcome in RETRYABLE and len(tries) <= client.config.rollout.infra_retries):
        if tries:
            await mend(tries[-1])
        record = await client.attempt(spec, len(tries))
        await asyncio.to_thread(keep, record)
        if record.session_id:
            await client.close_session(record.attempt_id, record.session_id)
        tries.append(record)
