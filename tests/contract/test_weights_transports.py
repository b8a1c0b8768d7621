"""What every transport promises, on real gloo groups with engines that keep what they get: all bytes arrive, calls are
those of the plan, groups are kept as long as they may be, and an engine that fails holds up nobody but itself."""

from __future__ import annotations

import ctypes
import gc
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl360.engines.fleet import EngineIdentity
from rl360.engines.processes import ProcessId, ProcessTree, boot_id, host_id
from rl360.errors import BadInput, EngineChurn
from rl360.weights.checksum import expected_checksums, tensor_specs
from rl360.weights.messages import Bucket, Delivery, EngineSet, PushPlan, Transport
from rl360.weights.plan import engine_name, plan_push
from rl360.weights.transports import Senders
from rl360.weights.transports.colocated import handle_of
from rl360.weights.transports.common import SenderFault, bury, connect, flatten, listen
from rl360.weights.transports.rdma import Remote, writes
from tests.unit.fake_engines import show_token
from tests.unit.gloo_engines import GlooEngine, bytes_of, engine_set, moe_tensors, run_beside

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

DEADLINE_S = 2.0
TENSORS = moe_tensors()
EACH = pytest.mark.parametrize("transport", [Transport.BROADCAST, Transport.DIRECT_EXPERTS, Transport.P2P])
POINT_TO_POINT = pytest.mark.parametrize("transport", [Transport.DIRECT_EXPERTS, Transport.P2P])


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GlooEngine]]:
    show_token(monkeypatch, tmp_path)
    made = [GlooEngine() for _ in range(3)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def senders() -> Iterator[Senders]:
    made = Senders()
    yield made
    made.close()


def is_payload(found: object, plan: PushPlan) -> bool:
    sizes = {bucket.size_bytes for bucket in (*plan.buckets, *(b for d in plan.deliveries for b in d.buckets))}
    return type(found) is torch.Tensor and found.dtype is torch.uint8 and found.numel() in sizes


def plan_for(transport: Transport, receivers: EngineSet, tensors: Any = TENSORS, **more: Any) -> PushPlan:
    fields = {"run": "r1", "version": "r1:1", "bucket_bytes": 1 << 10, "call_deadline_s": DEADLINE_S} | more
    return plan_push(tensor_specs(tensors), receivers, transport=transport, **fields)


@EACH
def test_every_engine_gets_every_byte_in_the_calls_of_the_plan(
    transport: Transport, engines: list[GlooEngine], senders: Senders
) -> None:
    plan = plan_for(transport, engine_set(engines))
    assert plan.calls_per_engine > 2
    report = senders.transfer(plan, TENSORS)
    assert report.ok and not report.group_reused
    assert report.sent_bytes == plan.total_bytes
    assert not [tensor for tensor in gc.get_objects() if is_payload(tensor, plan)], "a kept group keeps no weights"
    for engine, told in zip(engines, report.engines, strict=True):
        assert engine.held == bytes_of(TENSORS)
        assert (told.url, told.calls) == (engine.url, plan.calls_per_engine)
        assert engine.seen["/update_weights_from_distributed"] == plan.calls_per_engine
        # the rest of what it was asked carried no weights
        assert told.control_calls == len(engine.calls) - plan.calls_per_engine
        assert not engine.session


@EACH
def test_groups_are_kept_while_the_same_members_meet(
    transport: Transport, engines: list[GlooEngine], senders: Senders
) -> None:
    senders.transfer(plan_for(transport, engine_set(engines)), TENSORS)
    other = moe_tensors(seed=1)
    for engine in engines:
        engine.calls.clear()
    report = senders.transfer(plan_for(transport, engine_set(engines, epoch=2)), other)
    assert report.ok and report.group_reused
    for engine, told in zip(engines, report.engines, strict=True):
        assert engine.held == bytes_of(other)
        assert engine.seen["/init_weights_update_group"] == engine.seen["/destroy_weights_update_group"] == 0
        assert told.control_calls == 2, "begin and end"


@EACH
def test_after_a_swap_the_path_and_the_calls_are_the_same(
    transport: Transport, engines: list[GlooEngine], senders: Senders
) -> None:
    before = plan_for(transport, engine_set(engines))
    senders.transfer(before, TENSORS)
    newcomer = GlooEngine(incarnation="b")
    try:
        swapped = [engines[0], newcomer, engines[2]]
        for engine in engines:
            engine.calls.clear()
        after = plan_for(transport, engine_set(swapped, epoch=2))
        report = senders.transfer(after, TENSORS)
        assert report.ok and not report.group_reused
        assert newcomer.held == bytes_of(TENSORS)
        assert after.calls_per_engine == before.calls_per_engine
        assert [told.calls for told in report.engines] == [before.calls_per_engine] * 3
        joined = [engine.seen["/init_weights_update_group"] for engine in swapped]
        # of the groups of two only the newcomer's is new; that of all members is new for all
        assert joined == {Transport.BROADCAST: [1, 1, 1], Transport.DIRECT_EXPERTS: [1, 2, 1]}.get(transport, [0, 1, 0])
    finally:
        newcomer.close()


@EACH
@pytest.mark.parametrize(
    ("first", "second", "more"),
    [(1, 3, {}), (1, 2, {"stale_groups": ["rl360-of-a-dead-push"]})],
    ids=["an epoch of somebody else between", "a stale group"],
)
def test_groups_that_others_may_have_used_are_made_again(
    transport: Transport, first: int, second: int, more: dict[str, Any], engines: list[GlooEngine], senders: Senders
) -> None:
    senders.transfer(plan_for(transport, engine_set(engines, first)), TENSORS)
    for engine in engines:
        engine.groups.update(more.get("stale_groups", ()))
    report = senders.transfer(plan_for(transport, engine_set(engines, second), **more), TENSORS)
    assert report.ok and not report.group_reused
    for engine in engines:
        assert engine.held == bytes_of(TENSORS)
        assert not engine.groups & set(more.get("stale_groups", ()))


@EACH
def test_a_new_sender_takes_over_groups_of_one_that_died(transport: Transport, engines: list[GlooEngine]) -> None:
    plan = plan_for(transport, engine_set(engines))
    Senders().transfer(plan, TENSORS)  # never closed: its engines still hold the groups' names
    again = Senders()
    assert again.transfer(plan, TENSORS).ok
    again.close()


@POINT_TO_POINT
@pytest.mark.parametrize("fault", ["hang", "500"])
def test_an_engine_that_fails_in_a_delivery_holds_up_nobody_else(
    transport: Transport, fault: str, engines: list[GlooEngine], senders: Senders
) -> None:
    deadline_s = 6.0 if fault == "hang" else 30.0
    plan = plan_for(transport, engine_set(engines), call_deadline_s=deadline_s)
    pair = plan.deliveries[1].group_name
    take = GlooEngine.answer

    class Failing(GlooEngine):
        def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            if path == "/update_weights_from_distributed" and body["group_name"] == pair:
                if fault == "hang":
                    self.released.wait(30)
                return 500, {"error": "broken on purpose"}
            return take(self, method, path, body)

    engines[1].__class__ = Failing
    began = time.monotonic()
    report = senders.transfer(plan, TENSORS)
    took_s = time.monotonic() - began
    assert not report.ok and engines[1].url in report.error
    assert [bool(told.error) for told in report.engines] == [False, True, False]
    assert [told.answered for told in report.engines] == [True, fault != "hang", True]
    assert [engine.held == bytes_of(TENSORS) for engine in engines] == [True, False, True]
    # a refusal is told at once; who is silent has until the deadline, and the others were whole long before
    assert (took_s > deadline_s) == (fault == "hang") and took_s < 2 * deadline_s
    assert all(engine.taken_at - began < deadline_s - 1 for engine in (engines[0], engines[2]))
    # the fast path again, on those that are left, and on groups that were never broken
    left = [engines[0], engines[2]]
    for engine in left:
        engine.calls.clear()
    again = senders.transfer(plan_for(transport, engine_set(left), moe_tensors(seed=2)), moe_tensors(seed=2))
    assert again.ok
    for engine in left:
        assert engine.held == bytes_of(moe_tensors(seed=2))
        assert engine.seen["/init_weights_update_group"] == (0 if transport is Transport.P2P else 1)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stuck_engine_holds_no_other_in_a_broadcast(index: int, engines: list[GlooEngine], senders: Senders) -> None:
    """In gloo's own tree of three receivers the second would wait for the third, or the third for the second."""
    engines[index].faults["/update_weights_from_distributed"] = "hang"
    plan = plan_for(Transport.BROADCAST, engine_set(engines))
    report = senders.transfer(plan, TENSORS)
    assert [bool(told.error) for told in report.engines] == [number == index for number in range(3)]
    first = {tensor.name for tensor in plan.buckets[0].tensors}
    assert [set(engine.held) == first for engine in engines] == [number != index for number in range(3)]


def test_who_failed_first_is_told_from_who_only_waited(engines: list[GlooEngine], senders: Senders) -> None:
    """In a group of all, the broken broadcast may make the others answer with errors too."""
    engines[1].faults["/update_weights_from_distributed"] = "500"
    report = senders.transfer(plan_for(Transport.BROADCAST, engine_set(engines)), TENSORS)
    assert not report.ok
    assert "500" in report.engines[1].error and not report.engines[1].after_stop
    assert all(told.after_stop == bool(told.error) for told in (report.engines[0], report.engines[2]))
    assert report.sent_bytes == 0


@EACH
def test_a_transfer_frees_engines_that_wait_in_a_group_when_another_is_away(
    transport: Transport, engines: list[GlooEngine], senders: Senders
) -> None:
    engines[2].faults["/init_weights_update_group"] = "500"
    began = time.monotonic()
    report = senders.transfer(plan_for(transport, engine_set(engines)), TENSORS)
    assert not report.ok and "500" in report.engines[2].error
    assert time.monotonic() - began < 3 * DEADLINE_S + 3
    whole = [engine for engine in engines if engine.held == bytes_of(TENSORS)]
    assert whole == (engines[:2] if transport is Transport.P2P else [])


def test_a_sender_that_cannot_listen_blames_no_engine(engines: list[GlooEngine]) -> None:
    for transport in (Transport.BROADCAST, Transport.P2P):
        with pytest.raises(SenderFault, match=r"cannot listen on 192\.0\.2\.1"):
            Senders("192.0.2.1").transfer(plan_for(transport, engine_set(engines)), TENSORS)
    assert not any(engine.seen["/init_weights_update_group"] for engine in engines)


@EACH
def test_one_transfer_at_a_time_and_none_of_an_epoch_that_is_over(
    transport: Transport, engines: list[GlooEngine], senders: Senders
) -> None:
    senders.transfer(plan_for(Transport.BROADCAST, engine_set(engines, epoch=5)), TENSORS)
    for engine in engines:
        engine.calls.clear()
    with pytest.raises(EngineChurn, match="push epoch 4 is over: epoch 5 has begun"):
        senders.transfer(plan_for(transport, engine_set(engines, epoch=4)), TENSORS)
    assert not any(engine.calls for engine in engines)
    reports: list[Any] = []
    plan = plan_for(transport, engine_set(engines, epoch=6))
    threads = [run_beside(lambda: reports.append(senders.transfer(plan, TENSORS))) for _ in range(3)]
    for thread in threads:
        thread.join(30)
    assert [report.ok for report in reports] == [True, True, True]


# -- refusals before anything leaves ------------------------------------------------------------------------------


def refused(senders: Senders, plan: PushPlan, tensors: Any, engines: list[GlooEngine], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        senders.transfer(plan, tensors)
    assert not any(engine.calls for engine in engines)


@EACH
def test_tensors_that_are_not_the_plans_are_refused(
    transport: Transport, engines: list[GlooEngine], senders: Senders
) -> None:
    plan = plan_for(transport, engine_set(engines))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    for bad in (None, torch.ones(8, 6, dtype=torch.bfloat16), TENSORS[name].float()):
        held = {key: value for key, value in TENSORS.items() if key != name} | ({} if bad is None else {name: bad})
        refused(senders, plan, held, engines, r"plan names .*experts\.3.*, the trainer holds")


def test_deliveries_that_no_engine_could_take_are_refused(engines: list[GlooEngine], senders: Senders) -> None:
    plan = plan_for(Transport.P2P, engine_set(engines))
    first, *others = plan.deliveries
    bucket = first.buckets[0]

    def with_first(**changes: Any) -> PushPlan:
        return plan.model_copy(update={"deliveries": (first.model_copy(update=changes), *others)})

    refused(senders, with_first(rank=1), TENSORS, engines, "delivery to its rank 1")
    refused(senders, with_first(group_name=""), TENSORS, engines, "names no group")
    refused(senders, with_first(buckets=(bucket, bucket)), TENSORS, engines, "twice to engine")
    refused(
        senders, plan.model_copy(update={"deliveries": (first, first, *others)}), TENSORS, engines, "engines of one"
    )
    refused(senders, plan.model_copy(update={"deliveries": tuple(others)}), TENSORS, engines, "no delivery for engine")
    cut = bucket.tensors[0].model_copy(update={"part": (0, 0, 1)})
    refused(senders, with_first(buckets=(Bucket(tensors=(cut,)),)), TENSORS, engines, "plan cuts tensor")


def test_experts_that_were_broadcast_already_are_not_delivered_again(
    engines: list[GlooEngine], senders: Senders
) -> None:
    plan = plan_for(Transport.DIRECT_EXPERTS, engine_set(engines))
    doubled = Delivery(**{**dict(plan.deliveries[0]), "buckets": (*plan.deliveries[0].buckets, plan.buckets[0])})
    plan = plan.model_copy(update={"deliveries": (doubled, *plan.deliveries[1:])})
    with pytest.raises(BadInput, match="twice to engine"):
        senders.transfer(plan, TENSORS)


# -- shared memory ------------------------------------------------------------------------------------------------


def test_colocated_is_refused_for_an_engine_on_another_host(engines: list[GlooEngine], senders: Senders) -> None:
    me = ProcessId(pid=1, start_ticks=1)
    here = ProcessTree(host=host_id(), boot_id=boot_id(), root=me, members=(me,), group=None)
    for process, where in ((None, "another host"), (here.model_copy(update={"host": "n7/pid:[1]"}), r"n7/pid:\[1\]")):
        receivers = EngineSet(
            epoch=1, engines=(EngineIdentity(url=engines[0].url, incarnation="a", process=process),)
        )  # fmt: skip
        refused(senders, plan_for(Transport.COLOCATED, receivers), TENSORS, engines, f"is on {where}")


def test_a_handle_opens_as_the_tensors_of_its_bucket() -> None:
    bucket = Bucket(tensors=tuple(tensor_specs(TENSORS)))
    flat = flatten(bucket, TENSORS)
    before = torch.multiprocessing.get_sharing_strategy()
    import base64

    opened = pickle.loads(base64.b64decode(handle_of(bucket, flat)))
    assert torch.multiprocessing.get_sharing_strategy() == before
    assert [name for name, _ in opened] == list(TENSORS)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in opened)
    assert len({tensor.untyped_storage().data_ptr() for _, tensor in opened}) == 1, "one piece of memory"


# -- writes into an engine's memory -------------------------------------------------------------------------------


def engine_memory() -> tuple[dict[str, torch.Tensor], Remote]:
    """Empty parameters as an engine would register them."""
    sizes: dict[str, int] = {}
    for name, tensor in TENSORS.items():
        sizes[engine_name(name)] = sizes.get(engine_name(name), 0) + tensor.numel()
    memory = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    return memory, Remote("session", {name: (t.data_ptr(), t.numel(), 2) for name, t in memory.items()})


def test_writes_fill_an_engines_parameters_as_it_would_itself() -> None:
    memory, remote = engine_memory()
    plan = plan_for(Transport.P2P, EngineSet(epoch=1, engines=(EngineIdentity(url="http://e:1", incarnation="a"),)))
    known = {spec.name: spec for spec in plan.tensors}
    for bucket in plan.deliveries[0].buckets:
        flat = flatten(bucket, TENSORS)
        for write in writes(bucket, known, remote):
            ctypes.memmove(write.address, flat.data_ptr() + write.offset, write.size_bytes)
    assert expected_checksums(memory) == expected_checksums(TENSORS)


def test_writes_past_what_the_engine_registered_are_refused() -> None:
    _, remote = engine_memory()
    known = {spec.name: spec for spec in tensor_specs(TENSORS)}
    bucket = Bucket(tensors=(known["model.norm.weight"],))
    less = dict(remote.parameters) | {"model.norm.weight": (0, 4, 2)}
    with pytest.raises(BadInput, match="16 bytes to write, the engine holds 8"):
        writes(bucket, known, Remote("s", less))
    del less["model.norm.weight"]
    with pytest.raises(BadInput, match="registered no parameter"):
        writes(bucket, known, Remote("s", less))


def test_the_rdma_wire_says_what_it_needs(engines: list[GlooEngine]) -> None:
    with pytest.raises(BadInput, match=r"pip install 'rl360\[rdma\]'"):
        Senders(wire="rdma").transfer(plan_for(Transport.P2P, engine_set(engines)), TENSORS)
    assert not any(engine.calls for engine in engines)


def test_to_leave_a_group_ends_what_waits_in_it(engines: list[GlooEngine]) -> None:
    """Left to itself gloo waits for a receiver that never comes until the deadline, with the interpreter locked."""
    store = listen("127.0.0.1", 30.0)
    body = {"group_name": "g", "master_address": "127.0.0.1", "master_port": store.port}
    joining = run_beside(
        lambda: engines[0].answer("POST", "/init_weights_update_group", body | {"rank_offset": 1, "world_size": 2})
    )
    group = connect("g", store, 2, 30.0, "gloo")
    joining.join(30)
    work = group.broadcast(torch.zeros(1 << 20, dtype=torch.uint8))
    time.sleep(0.2)
    assert not work.is_completed()
    began = time.monotonic()
    group.leave()
    with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
        work.wait()
    del group, work
    bury()
    assert time.monotonic() - began < 10
