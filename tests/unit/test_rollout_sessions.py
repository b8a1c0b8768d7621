"""The rollout function against the real session server: what one stores, the flow counts and the trainer reads.

The engine and the agent are scripted; everything between them is the product.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import pytest

from rl360.agents import rollout
from rl360.agents.rollout import AttemptSpec, RolloutClient
from rl360.config.run import ObjectiveConfig, RunConfig
from rl360.config.services import Services
from rl360.errors import StoreUnavailable
from rl360.ledger.outcomes import Bucket, Outcome
from rl360.objective.filters import filter_groups
from rl360.sessions.sample import AttemptRecord
from rl360.training.results import read_samples
from tests.unit.memory_store import MemoryStore
from tests.unit.sessions_data import VERSION, template
from tests.unit.sessions_server import TOKEN, Bench, session_bench
from tests.unit.verdict_data import verdict

_Result = TypeVar("_Result")
GROUP = "s000000-g000"
FIRST = [{"role": "system", "content": "Use bash."}, {"role": "user", "content": "Create hello.txt"}]
OTHER = [FIRST[0], {"role": "user", "content": "Create bye.txt"}]


@contextmanager
def agent(requests: list[dict[str, Any]]) -> Iterator[str]:
    """A sandbox server whose agent sends these bodies to its session. An attempt it ran before gets the same answer."""
    answered: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            data = answered.get(asked["attempt_id"]) or self.run_agent(asked)
            answered[asked["attempt_id"]] = data
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def run_agent(self, asked: dict[str, Any]) -> bytes:
            for body in requests:
                reply = httpx.post(f"{asked['base_url']}/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
            reward = float(asked["attempt_id"].endswith("a00-t0"))
            said = verdict(asked["attempt_id"], reward, task_id="hello", run=asked["run"], token=TOKEN)
            answer = {"trial_id": "1", "outcome": "passed" if reward else "failed", "exit_status": "Submitted"}
            answer |= {
                "cleanup": {"confirmed": True, "evidence": "seen"},
                "verdict": said.model_dump(),
                "reward": reward,
            }
            return json.dumps(answer).encode()

        def log_message(self, *_: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()


def with_client(
    home: Path, bench: Bench, sandbox: str, work: Callable[[RolloutClient], Awaitable[_Result]], **fields: object
) -> _Result:
    (home / "secrets.json").write_text(json.dumps({"token": TOKEN, "s3_access_key": "a", "s3_secret_key": "b"}))
    (home / "secrets.json").chmod(0o600)
    nowhere = dict.fromkeys(
        ("prefect_api_url", "prefect_ui_url", "s3_endpoint", "gateway_url", "trainer_url"), "http://127.0.0.1:9"
    )
    services = Services(
        home=str(home), s3_bucket="b", engine_urls=["http://127.0.0.1:9"], session_urls=[bench.url],
        sandbox_urls=[sandbox], model_dir="m", **nowhere,
    )  # fmt: skip
    config = RunConfig.parse({"rollout": fields})

    async def go() -> _Result:
        async with RolloutClient(services, config, 0, 0, VERSION) as client:
            return await work(client)

    return asyncio.run(go())


def attempts(home: Path, bench: Bench, sandbox: str, count: int, **fields: object) -> list[AttemptRecord]:
    async def one_by_one(client: RolloutClient) -> list[AttemptRecord]:
        specs = [AttemptSpec(f"{GROUP}-a{i:02}", GROUP, "hello", "/tasks/hello", "d") for i in range(count)]
        return [await client.attempt(spec, 0) for spec in specs]

    return with_client(home, bench, sandbox, one_by_one, **fields)


def test_two_branches_of_a_session_are_two_samples_that_train_once(tmp_path: Path) -> None:
    store = MemoryStore()
    more = [*FIRST, {"role": "assistant", "content": "done"}, {"role": "user", "content": "go on"}]
    requests = [{"messages": FIRST}, {"messages": OTHER}, {"messages": more}]
    with session_bench(store=store) as bench, agent(requests) as sandbox:
        records = attempts(tmp_path, bench, sandbox, 2, session_mode="tree", pick="all")
        sampled = sum(len(bench.engine.script(body)["output_ids"]) for body in bench.engine.bodies)
    assert [record.outcome for record in records] == [Outcome.PASSED, Outcome.FAILED], records
    assert sorted(store.objects) == [
        f"demo/steps/000000/merged/0000/{GROUP}-a00-t0.msgpack",
        f"demo/steps/000000/merged/0000/{GROUP}-a01-t0.msgpack",
    ]
    result = filter_groups(records, ObjectiveConfig(), expected_version=VERSION, max_seq_len=384)
    assert [decision.leaves for decision in result.decisions] == [(Bucket.TRAINED, Bucket.TRAINED)] * 2
    assert [row.advantage for row in result.kept] == [0.5, 0.5, -0.5, -0.5]
    assert result.tokens == {Bucket.TRAINED: sampled}
    assert store.read == [], "nothing before the trainer reads a sample"
    held = read_samples(cast(Any, store), result.kept, template().vocab_size)
    assert sum(int(sample.loss_mask.sum()) for sample in held) == sampled
    assert [len(sample.tokens) for sample in held] == [row.tokens for row in result.kept]


@pytest.mark.parametrize(("policy", "buckets"), [("pin", Bucket.TRAINED), ("record", Bucket.STALE)])
def test_parameters_an_agent_names(tmp_path: Path, policy: str, buckets: Bucket) -> None:
    """Pinned: the run's are used and the sample trains. Recorded: the agent's are, and it never does."""
    with session_bench(store=MemoryStore()) as bench, agent([{"messages": FIRST, "temperature": 0.2}]) as sandbox:
        records = attempts(tmp_path, bench, sandbox, 2, sampling_params=policy)
        used = {body["sampling_params"]["temperature"] for body in bench.engine.bodies}
    assert used == {1.0 if policy == "pin" else 0.2}
    result = filter_groups(records, ObjectiveConfig(), expected_version=VERSION, max_seq_len=384)
    assert [decision.bucket for decision in result.decisions] == [buckets] * 2
    assert len(result.kept) == (2 if policy == "pin" else 0)


def test_attempts_that_end_together_are_stored_by_one_request(tmp_path: Path) -> None:
    """Among them one that cannot be merged: it alone is asked for again, and its record says why."""
    store = MemoryStore()

    async def go(client: RolloutClient) -> tuple[list[AttemptRecord], list[str]]:
        specs = [AttemptSpec(f"{GROUP}-a{i:02}", GROUP, "hello", "/tasks/hello", "d") for i in range(4)]
        played = [await client.play(spec, 0) for spec in specs[:3]]
        empty = await client._open_session(specs[3], specs[3].attempt_id(0))
        lost = replace(played[0], spec=specs[3], session_id=empty[0], reply=None, outcome=Outcome.SANDBOX_LOST)
        asked: list[str] = []
        answer = rollout._answer

        async def seen(http: Any, method: str, url: str, *args: Any) -> Any:
            asked.append(url.partition("/sessions/")[2])
            return await answer(http, method, url, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout, "_answer", seen)
            return await asyncio.gather(*map(client.finish, [*played, lost])), asked

    with session_bench(store=store) as bench, agent([{"messages": FIRST}]) as sandbox:
        records, asked = with_client(tmp_path, bench, sandbox, go)
    assert asked == ["store", f"{records[3].session_id}/store"]
    assert [record.stored is not None for record in records] == [True, True, True, False]
    assert sorted(record.stored.key for record in records[:3] if record.stored) == sorted(store.objects)
    assert "no recorded turn" in records[3].detail


def test_an_attempt_that_sampled_nothing_has_its_verdict_and_no_samples(tmp_path: Path) -> None:
    store = MemoryStore()
    with session_bench(store=store) as bench, agent([]) as sandbox:
        (record,) = attempts(tmp_path, bench, sandbox, 1)
    assert record.outcome is Outcome.PASSED and record.verdict is not None
    assert (record.stored, record.unmerged_tokens) == (None, 0)
    assert "no recorded turn" in record.detail
    assert store.objects == {}


def test_a_wave_that_runs_again_after_the_store_was_away_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(rollout, "_PAUSE_S", (0.01, 0.02))
    store = MemoryStore()
    with session_bench(store=store) as bench, agent([{"messages": FIRST}]) as sandbox:
        store.down = True
        with pytest.raises(StoreUnavailable):
            attempts(tmp_path, bench, sandbox, 1)
        store.down = False
        (record,) = attempts(tmp_path, bench, sandbox, 1)
        again = attempts(tmp_path, bench, sandbox, 1)  # its record was not written: the same reference once more
        assert len(bench.engine.bodies) == 1, "nothing is sampled twice"
    assert record.outcome is Outcome.PASSED and record.stored is not None
    assert again[0].stored == record.stored
    assert list(store.objects) == [record.stored.key]
