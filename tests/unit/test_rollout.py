"""The rollout function and a wave's errors, over HTTP: what is an outcome, what is asked again, what stops a step."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from rl360.agents import rollout
from rl360.agents.budgets import Budgets, StepBudget
from rl360.agents.rollout import AttemptSpec, RolloutClient, roll_out_slot, spread
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.errors import BadInput, CorruptObject, StoreUnavailable
from rl360.ledger.outcomes import Outcome
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack
from tasks.launch_waves import waves_at_once
from tasks.roll_out import gravest
from tests.unit.memory_store import MemoryStore
from tests.unit.objective_data import sample_of, store_samples
from tests.unit.verdict_data import TOKEN, verdict

SPEC = AttemptSpec("s000000-g000-a00", "s000000-g000", "hello", "/tasks/hello", "d")
GONE = "http://127.0.0.1:9"


KEY = "demo/steps/000000/merged/0003/s000000-g000-a00-t0.msgpack"
UNMERGED: tuple[int, dict] = (
    422,
    {"error": {"code": "cannot_merge", "message": "session a turn 2: ids are not those it sampled"}},
)


def run_reply(outcome: str, token: str = TOKEN) -> dict:
    cleanup = {"confirmed": True, "evidence": "seen"}
    reply: dict = {"trial_id": "1", "outcome": outcome, "exit_status": "x", "cleanup": cleanup}
    if outcome == "passed":
        said = verdict("s000000-g000-a00-t0", 1.0, task_id="hello", token=token)
        reply |= {"verdict": said.model_dump(), "reward": 1.0}
    return reply


def stored_at(key: str) -> dict:
    """What a session server answers after it stored an attempt's two samples under `key`."""
    return store_samples(
        [sample_of("s000000-g000-a00-t0", "s000000-g000", leaf=leaf) for leaf in (0, 1)], key
    ).to_wire()


@contextmanager
def server(
    *answers: tuple[int, object],
    stored: tuple[int, object] = UNMERGED,
    bodies: dict[str, dict] | None = None,
    hangs_up: str = "",
    described: tuple[int, object] = (404, {}),
    together: tuple[int, object] = (404, {}),
) -> Iterator[tuple[str, list[str]]]:
    """Answers `/run` with these in turn, the last one again and again; a session is always made, and answers `stored`
    when it is to store its samples. `bodies`: gets the last body of each path. Connections are kept; the first request
    to `hangs_up` is read and its connection closed without a word."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # an answer in one write

        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == hangs_up and self.path not in asked:
                asked.append(self.path)
                self.close_connection = True
                return
            if self.path == "/run":
                status, body = answers[min(asked.count("/run"), len(answers) - 1)]
            elif self.path == "/sessions":
                status, body = (
                    200,
                    {"session_id": "id-of-a-session", "base_url": "http://h/sessions/id-of-a-session/v1"},
                )
            elif self.path == "/sessions/store":
                status, body = together
            else:
                status, body = stored if self.path == "/sessions/id-of-a-session/store" else (200, {})
            if bodies is not None:
                bodies[self.path] = sent
            asked.append(self.path)
            self.answer(status, body)

        def do_GET(self) -> None:
            self.answer(*described)

        def do_DELETE(self) -> None:
            self.answer(200, {})

        def answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def services_at(home: Path, sandbox: str, sessions: str) -> Services:
    (home / "secrets.json").write_text(json.dumps({"token": TOKEN, "s3_access_key": "a", "s3_secret_key": "b"}))
    (home / "secrets.json").chmod(0o600)
    urls = dict.fromkeys(("prefect_api_url", "prefect_ui_url", "s3_endpoint", "gateway_url", "trainer_url"), GONE)
    return Services(
        home=str(home), s3_bucket="b", engine_urls=[GONE], session_urls=[sessions], sandbox_urls=[sandbox],
        model_dir="m", **urls,
    )  # fmt: skip


def budgets_of(config: RunConfig) -> Budgets:
    return Budgets(cast(Any, MemoryStore()), config, 0, StepBudget(config.run, 0, config.rollout.max_infra_rate, 8))


def roll_out(
    home: Path, url: str, sessions: str | None = None, collect_s: float = 20, **rollout_fields: object
) -> list[AttemptRecord]:
    services = services_at(home, url, sessions or url)
    kept: list[AttemptRecord] = []
    mended: list[AttemptRecord] = []

    async def keep(record: AttemptRecord) -> None:
        kept.append(record)

    async def mend(lost: AttemptRecord) -> None:
        mended.append(lost)

    async def go() -> None:
        config = RunConfig.parse({"rollout": rollout_fields, "deadlines": {"collect_s": collect_s}})
        async with RolloutClient(services, config, 0, 3, "demo:0") as client:
            await roll_out_slot(client, SPEC, [], asyncio.Semaphore(1), keep, mend, budgets_of(config))

    asyncio.run(go())
    assert mended == kept[:-1], "each lost try is told of once, before the next"
    return kept


@pytest.mark.parametrize("servers", [2, 3, 16, 64])
def test_attempts_are_spread_evenly(servers: int) -> None:
    urls = [str(number) for number in range(servers)]
    ids = [f"s000012-g{group:03}-a{attempt:02}-t0" for group in range(1024) for attempt in range(8)]
    placed = Counter(spread(urls, attempt_id) for attempt_id in ids)
    assert len(placed) == servers
    assert max(placed.values()) <= 1.05 * len(ids) / servers


def test_a_record_holds_the_reference_the_session_server_answered(tmp_path: Path) -> None:
    bodies: dict[str, dict] = {}
    with server((200, run_reply("passed")), stored=(200, stored_at(KEY)), bodies=bodies) as (url, asked):
        (record,) = roll_out(tmp_path, url, pick="all", session_mode="tree", sampling_params="record")
    assert record.outcome is Outcome.PASSED and record.verdict is not None
    assert record.stored is not None and record.stored.to_wire() == stored_at(KEY)
    assert record.sampled_tokens == 12 and len(record.stored.leaves) == 2
    assert bodies["/sessions/id-of-a-session/store"] == {"key": KEY, "pick": "all"}
    said = {name: bodies["/sessions"][name] for name in ("mode", "matcher", "sampling_policy", "thinking")}
    assert said == {"mode": "tree", "matcher": "strict", "sampling_policy": "record", "thinking": False}
    assert asked == ["/sessions", "/run", "/sessions/id-of-a-session/store"], "nothing of the samples is fetched"
    assert len(pack(record.to_wire())) < 2048


@pytest.mark.parametrize(
    ("stored", "detail"),
    [
        ((404, {"error": {"code": "not_found", "message": "id-of-a-session is gone"}}), "ID is gone"),
        ((422, {"error": {"code": "bad_body", "message": "no key"}}), "no key"),
        ((422, "a proxy's own words"), "a proxy's own words"),
        ((200, stored_at(KEY.replace("0003", "0004"))), "was asked for"),
        ((200, {"key": KEY}), "not a reference"),
        ((200, "nothing"), "not a reference"),
        ((409, {"error": {"code": "conflict", "message": "other bytes"}}), "other bytes"),
    ],
    ids=["gone", "bad body", "proxy", "other key", "half a reference", "text", "conflict"],
)
def test_a_verdict_without_its_samples_is_a_lost_session(
    tmp_path: Path, stored: tuple[int, object], detail: str
) -> None:
    with server((200, run_reply("passed")), stored=stored) as (url, _):
        records = roll_out(tmp_path, url, infra_retries=0)
    assert [(record.outcome, record.verdict, record.stored) for record in records] == [
        (Outcome.SESSION_LOST, None, None)
    ]
    assert detail in records[0].detail
    assert "id-of-a-session" not in records[0].detail, "who has the id may speak in the session"


@pytest.mark.parametrize(("switch", "outcome"), [("mask", Outcome.AGENT_TIMEOUT), ("score_zero", Outcome.SESSION_LOST)])
def test_a_timeout_that_would_be_scored_without_its_samples_is_a_lost_session(
    tmp_path: Path, switch: str, outcome: Outcome
) -> None:
    with server((200, run_reply("agent_timeout")), stored=(404, {"error": {"code": "not_found"}})) as (url, _):
        (record,) = roll_out(tmp_path, url, infra_retries=0, unverified_timeout=switch)
    assert (record.outcome, record.verdict, record.stored) == (outcome, None, None)


@pytest.mark.parametrize(
    ("told", "sampled"),
    [({"sampled_tokens": 37}, 37), ({}, 0), ({"sampled_tokens": -1}, 0), ({"sampled_tokens": "9"}, 0)],
)
def test_a_session_that_cannot_be_merged_keeps_its_verdict(tmp_path: Path, told: dict, sampled: int) -> None:
    """What it sampled trains nothing and is counted; its reward is one of its group."""
    refusal = (422, {"error": UNMERGED[1]["error"] | told})
    with server((200, run_reply("passed")), stored=refusal) as (url, asked):
        (record,) = roll_out(tmp_path, url)
    assert record.outcome is Outcome.PASSED and record.verdict is not None and record.stored is None
    assert record.unmerged_tokens == record.sampled_tokens == sampled
    assert "ids are not those it sampled" in record.detail
    assert asked == ["/sessions", "/run", "/sessions/id-of-a-session/store"]


def test_a_lost_try_that_cannot_be_merged_is_counted_too(tmp_path: Path) -> None:
    refusal = (422, {"error": UNMERGED[1]["error"] | {"sampled_tokens": 37}})
    with server((200, run_reply("sandbox_lost")), stored=refusal) as (url, _):
        records = roll_out(tmp_path, url)
    assert [(record.outcome, record.unmerged_tokens) for record in records] == [(Outcome.SANDBOX_LOST, 37)] * 2


@pytest.mark.parametrize("ended", ["sandbox_lost", "agent_timeout", "passed"])
@pytest.mark.parametrize(
    ("described", "sampled"),
    [((200, {"sampled_tokens": 41}), 41), ((404, {}), None), ((200, {"sampled_tokens": "9"}), None), ((200, []), None)],
)
def test_what_a_session_sampled_stays_in_the_books_when_it_cannot_be_stored(
    tmp_path: Path, ended: str, described: tuple[int, object], sampled: int | None
) -> None:
    """Whatever its try ended as, with a verdict or without: the session is asked for the count."""
    refusal = (409, {"error": {"message": "the object holds something else", "code": "conflict"}})
    with server((200, run_reply(ended)), stored=refusal, described=described) as (url, _):
        (record,) = roll_out(tmp_path, url, infra_retries=0)
    assert record.outcome is (Outcome.SESSION_LOST if ended == "passed" else Outcome(ended))
    assert (record.verdict, record.stored, record.unmerged_tokens) == (None, None, sampled or 0)
    assert record.detail.endswith("what it sampled is unknown") == (sampled is None)


def test_a_store_that_is_away_loses_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the wave's task, which may be repeated; the session still holds its samples then."""
    monkeypatch.setattr(rollout, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(rollout, "_PAUSE_S", (0.01, 0.02))
    away = (503, {"error": {"message": "object store did not answer" + " at all" * 60, "code": "store_unavailable"}})
    refusal = pytest.raises(StoreUnavailable, match="object store did not answer")
    with server((200, run_reply("passed")), stored=away) as (url, asked), refusal:
        roll_out(tmp_path, url)
    assert asked.count("/sessions/id-of-a-session/store") > 1


def test_a_session_server_that_cannot_store_at_all_stops_the_step(tmp_path: Path) -> None:
    stored = (501, {"error": {"code": "no_store", "message": "this server was started without --store"}})
    refusal = pytest.raises(BadInput, match=r"answered 501: .*without --store")
    with server((200, run_reply("passed")), stored=stored) as (url, _), refusal:
        roll_out(tmp_path, url)


@pytest.mark.parametrize("status", [400, 401])
def test_a_request_that_can_never_work_stops_the_step(tmp_path: Path, status: int) -> None:
    refusal = pytest.raises(BadInput, match=f"answered {status}: .*Dockerfile needs an image")
    with server((status, {"error": "Dockerfile needs an image"})) as (url, asked), refusal:
        roll_out(tmp_path, url)
    assert asked.count("/run") == 1


def test_a_verdict_that_the_runs_verifier_did_not_sign_stops_the_step(tmp_path: Path) -> None:
    """Nothing of it is recorded: a record is written once, and would be refused by every later collect."""
    refusal = pytest.raises(
        BadInput, match=r"/run: verdict of attempt s000000-g000-a00-t0 is not signed by the verifier"
    )
    with server((200, run_reply("passed", token="u" * 16)), stored=(200, stored_at(KEY))) as (url, _), refusal:
        roll_out(tmp_path, url)


def test_a_verdict_without_a_signature_is_none(tmp_path: Path) -> None:
    reply = run_reply("passed")
    del reply["verdict"]["signature"]
    with server((200, reply), stored=(200, stored_at(KEY))) as (url, _):
        (record,) = roll_out(tmp_path, url)
    assert (record.outcome, record.verdict) == (Outcome.UNCLASSIFIED, None)
    assert "malformed" in record.detail and "signature" in record.detail


def test_a_full_queue_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_PAUSE_S", (0.01, 0.02))
    with server((503, "full"), (503, "full"), (200, run_reply("verifier_error"))) as (url, asked):
        records = roll_out(tmp_path, url)
    assert [record.outcome for record in records] == [Outcome.VERIFIER_ERROR]
    assert asked.count("/run") == 3


@pytest.mark.parametrize(("outcome", "tries"), [("sandbox_lost", 2), ("no_engine", 2), ("no_verdict", 1)])
def test_only_what_another_try_may_change_is_tried_again(tmp_path: Path, outcome: str, tries: int) -> None:
    with server((200, run_reply(outcome))) as (url, _):
        records = roll_out(tmp_path, url)
    assert [record.outcome for record in records] == [Outcome(outcome)] * tries
    assert [record.try_index for record in records] == list(range(tries))


def test_a_server_that_stays_away_is_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(rollout, "_PAUSE_S", (0.01, 0.02))
    with server((200, run_reply("failed"))) as (url, asked):
        records = roll_out(tmp_path, url, sessions=GONE)
    assert {record.outcome for record in records} == {Outcome.SESSION_LOST}
    assert "refuses connections" in records[0].detail and not asked


@pytest.mark.parametrize("path", ["/sessions", "/sessions/id-of-a-session/store"])
def test_a_session_server_that_hangs_up_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Opened or stored again, a session is the same one."""
    monkeypatch.setattr(rollout, "_PAUSE_S", (0.01, 0.02))
    with server((200, run_reply("passed")), stored=(200, stored_at(KEY)), hangs_up=path) as (url, asked):
        (record,) = roll_out(tmp_path, url)
    assert record.outcome is Outcome.PASSED and record.stored is not None
    assert asked.count(path) == 2 and asked.count("/run") == 1


def test_a_run_that_may_have_begun_is_asked_for_again_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox server that comes back knows what became of it, or says that it is lost."""
    monkeypatch.setattr(rollout, "_PAUSE_S", (0.01, 0.02))
    bodies: dict[str, dict] = {}
    answer = (200, run_reply("passed"))
    with server(answer, stored=(200, stored_at(KEY)), bodies=bodies, hangs_up="/run") as (url, asked):
        (record,) = roll_out(tmp_path, url)
    assert record.outcome is Outcome.PASSED and record.verdict is not None
    assert asked == ["/sessions", "/run", "/run", "/sessions/id-of-a-session/store"]
    assert bodies["/run"]["resent"] is True and bodies["/run"]["attempt_id"] == "s000000-g000-a00-t0"
    assert bodies["/run"]["deadline_s"] == 280.0, "the reply comes before the client's own deadline of 300 s"


def test_a_deadline_is_an_outcome(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (record,) = roll_out(tmp_path, url, collect_s=0.05, infra_retries=0)
    assert record.outcome is Outcome.SESSION_LOST and record.detail == f"{url}/sessions: no answer within 0.05 s"


def test_neither_a_redirect_nor_a_proxy_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", GONE)
    monkeypatch.setenv("http_proxy", GONE)
    with server((302, {"error": "elsewhere"})) as (url, asked):
        (record,) = roll_out(tmp_path, url, infra_retries=0)
    assert record.outcome is Outcome.SANDBOX_LOST and "/run answered 302" in record.detail
    assert asked.count("/run") == 1


@pytest.mark.parametrize(("outcome", "waiting"), [("verifier_error", [False]), ("no_engine", [True, False])])
def test_only_a_lost_try_holds_its_place_until_it_is_stored(tmp_path: Path, outcome: str, waiting: list[bool]) -> None:
    held: list[bool] = []

    async def go() -> None:
        room = asyncio.Semaphore(1)

        async def keep(_record: AttemptRecord) -> None:
            held.append(room.locked())

        async def mend(_lost: AttemptRecord) -> None:
            assert room.locked()

        async with RolloutClient(services_at(tmp_path, url, url), RunConfig(), 0, 3, "demo:0") as client:
            await roll_out_slot(client, SPEC, [], room, keep, mend, budgets_of(RunConfig()))

    with server((200, run_reply(outcome))) as (url, _):
        asyncio.run(go())
    assert held == waiting


@pytest.mark.parametrize(
    "together",
    [
        (500, {"error": {}}),
        (404, {}),
        (200, {"stored": [None]}),
        (200, {"stored": [0, "x"]}),
        (200, {"stored": [{"key": KEY}, {}]}),
        (200, {"stored": [stored_at(KEY.replace("a00-t0", "a01-t0"))] * 2}),
        (200, []),
        (200, "no"),
    ],
    ids=["500", "404", "short", "no objects", "half", "another's key", "list", "text"],
)
def test_whatever_is_answered_for_several_each_is_then_asked_for_alone(tmp_path: Path, together: tuple) -> None:
    async def go() -> list[AttemptRecord]:
        async with RolloutClient(services_at(tmp_path, url, url), RunConfig(), 0, 3, "demo:0") as client:
            played = await client.play(SPEC, 0)
            return await asyncio.gather(*(client.finish(played) for _ in range(2)))

    with server((200, run_reply("passed")), stored=(200, stored_at(KEY)), together=together) as (url, asked):
        records = asyncio.run(go())
    assert [record.outcome for record in records] == [Outcome.PASSED] * 2
    assert all(record.stored is not None and record.stored.key == KEY for record in records)
    assert asked.count("/sessions/store") == 1 and asked.count("/sessions/id-of-a-session/store") == 2


def test_a_waves_error_keeps_its_type() -> None:
    down, broken = StoreUnavailable("down"), CorruptObject("k", "broken")
    assert gravest(ExceptionGroup("", [down])) is down
    assert gravest(ExceptionGroup("", [down, broken])) is broken


def test_waves_in_flight_follow_the_plan_not_the_newest_wave_size() -> None:
    assert waves_at_once({"attempts": 256, "waves": 4, "wave_size": 64}, 128) == 2
    assert waves_at_once({"attempts": 256, "waves": 4}, 64) == 1
    assert waves_at_once({"attempts": 256, "waves": 1, "wave_size": 256}, 8) == 1
