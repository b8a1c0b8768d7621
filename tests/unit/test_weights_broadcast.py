"""The transport's bookkeeping: an engine's failure is the engine's, a failure of our own is nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import psutil
import pytest
import torch
import torch.distributed as dist

from rl360.engines.client import EngineClient, EngineRefused, EngineSilent
from rl360.engines.fleet import EngineIdentity
from rl360.errors import BadInput, EngineChurn
from rl360.weights.checksum import tensor_specs
from rl360.weights.messages import Bucket, EngineSet, PushPlan
from rl360.weights.plan import plan_push
from rl360.weights.transports.broadcast import BroadcastTransport
from rl360.weights.transports.common import Engine, Loop, TransferStopped, flatten, listen

TENSORS = {"model.norm.weight": torch.arange(4, dtype=torch.bfloat16), "lm_head.weight": torch.ones(2, 3)}


@pytest.fixture
def loop() -> Iterator[Loop]:
    with Loop() as running:
        yield running


def engines(count: int) -> list[Engine]:
    http = httpx.AsyncClient()
    return [Engine(EngineClient(f"http://127.0.0.1:{i}", http, 1.0)) for i in range(1, count + 1)]


def plan(epoch: int = 1) -> PushPlan:
    engine_set = EngineSet(epoch=epoch, engines=(EngineIdentity(url="http://127.0.0.1:1", incarnation="a"),))
    return plan_push(
        tensor_specs(TENSORS), engine_set, run="r1", version="r1:1", bucket_bytes=1 << 20, call_deadline_s=0.2
    )


def test_every_failure_is_in_the_record_of_its_engine(loop: Loop) -> None:
    fleet = engines(3)

    async def call(engine: Engine) -> None:
        if engine.url.endswith(":1"):
            raise EngineRefused("no")
        if engine.url.endswith(":2"):
            raise EngineSilent("nothing")

    with pytest.raises(TransferStopped, match=r"failed on http://127\.0\.0\.1:1, http://127\.0\.0\.1:2"):
        BroadcastTransport()._everywhere(fleet, loop, call, 1.0)
    assert [(engine.error, engine.answered) for engine in fleet] == [("no", True), ("nothing", False), ("", True)]


def test_a_call_that_never_ends_counts_as_unanswered(loop: Loop) -> None:
    fleet = engines(2)

    async def call(engine: Engine) -> None:
        await asyncio.sleep(60 if engine.url.endswith(":1") else 0)

    with pytest.raises(TransferStopped):
        BroadcastTransport()._everywhere(fleet, loop, call, -1.5)  # half a second with the slack
    assert "still open" in fleet[0].error and not fleet[0].answered
    assert not fleet[1].error


def test_an_error_of_our_own_is_raised_and_blames_no_engine(loop: Loop) -> None:
    """Taken for an engine's silence it would have that engine, or its neighbours, fenced and killed."""
    fleet = engines(3)

    async def call(engine: Engine) -> None:
        if engine.url.endswith(":1"):
            raise BadInput("a defect of the caller")
        await asyncio.sleep(0.1)

    with pytest.raises(BadInput, match="a defect of the caller"):
        BroadcastTransport()._everywhere(fleet, loop, call, 2.0)
    assert [engine.error for engine in fleet] == ["", "", ""]


def test_a_plan_of_other_tensors_or_of_an_older_epoch_touches_nothing() -> None:
    transport = BroadcastTransport()
    with pytest.raises(BadInput, match=r"plan names .*the trainer holds"):
        transport.transfer(plan(), TENSORS | {"lm_head.weight": torch.ones(3, 2)})
    transport.turn.epoch = 5
    with pytest.raises(EngineChurn, match="push epoch 4 is over: epoch 5 has begun"):
        transport.transfer(plan(epoch=4), TENSORS)


def test_an_engine_that_is_away_ends_the_transfer_and_is_named() -> None:
    report = BroadcastTransport().transfer(plan(), TENSORS)
    assert not report.ok
    assert not report.engines[0].answered and "no connection" in report.engines[0].error
    assert report.sent_bytes == 0


def _listening() -> set[tuple[str, int]]:
    rows = psutil.Process().net_connections(kind="tcp")
    return {(row.laddr.ip, row.laddr.port) for row in rows if row.status == psutil.CONN_LISTEN}


def test_the_meeting_point_listens_on_its_address_alone_and_goes_with_its_group() -> None:
    before = _listening()
    store = listen("127.0.0.1", 5.0)
    assert _listening() - before == {("127.0.0.1", store.port)}
    member = dist.TCPStore("127.0.0.1", store.port, None, is_master=False, wait_for_workers=False)
    member.set("key", "value")
    assert store.get("key") == b"value"
    del member, store
    assert _listening() == before


def test_a_bucket_travels_as_the_bytes_of_its_tensors_in_order() -> None:
    specs = tensor_specs(TENSORS)
    found = flatten(Bucket(tensors=tuple(specs)), TENSORS)
    assert found.numpy().tobytes() == b"".join(
        TENSORS[spec.name].contiguous().view(torch.uint8).numpy().tobytes() for spec in specs
    )
