"""Whatever the model, the fleet, the transport and the bucket size: a plan brings every rank exactly what it needs."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.engines.fleet import EngineIdentity
from rl360.errors import BadInput
from rl360.weights.calls import source_side
from rl360.weights.messages import (
    Bucket,
    Delivery,
    EngineLayout,
    EngineSet,
    PushPlan,
    TensorSpec,
    Transport,
    loading_mark,
    parse_version,
    version_name,
)
from rl360.weights.plan import (
    expert_number,
    fill_buckets,
    group_name,
    plan_push,
    rank_needs,
    together,
)
from rl360.weights.shapes import ModelShape, model_shape
from rl360.weights.simulate import PlanBroken, simulate

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
DIM = st.integers(1, 64)
DTYPES = ("bfloat16", "float32")


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorSpec]:
    """Dense and MoE layers with any dimensions, in any order of tensors: enough for one rank."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    if draw(st.booleans()):
        names.append("lm_head.weight")
    for layer in range(draw(st.integers(1, 3))):
        head = f"model.layers.{layer}."
        names += [f"{head}self_attn.{p}.weight" for p in PROJECTIONS]
        names += [f"{head}self_attn.q_norm.weight", f"{head}input_layernorm.weight"]
        if draw(st.booleans()):
            names += [f"{head}self_attn.{p}.bias" for p in PROJECTIONS[:3]]
        if draw(st.booleans()):
            experts = range(draw(st.integers(1, 4)))
            names += [f"{head}mlp.experts.{e}.{p}_proj.weight" for e in experts for p in ("gate", "up", "down")]
            names.append(f"{head}mlp.gate.weight")
        else:
            names += [f"{head}mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for name in names:  # the experts of a layer are alike
        shape = tuple(draw(st.lists(DIM, min_size=1, max_size=2)))
        shapes.setdefault(re.sub(r"experts\.\d+", "experts", name), (shape, draw(st.sampled_from(DTYPES))))
    made = []
    for name in draw(st.permutations(names)):
        shape, dtype = shapes[re.sub(r"experts\.\d+", "experts", name)]
        made.append(TensorSpec.model_validate({"name": name, "shape": shape, "dtype": dtype}))
    return made


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    """A small model of a known family that four ranks can share."""
    wide = st.sampled_from((4, 8, 12))
    family = draw(st.sampled_from(("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")))
    layers = draw(st.integers(1, 3))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 4 * draw(wide),
        "num_hidden_layers": layers,
        "vocab_size": draw(st.integers(1, 700)),
        "num_attention_heads": 8,
        "intermediate_size": 4 * draw(wide),
        "tie_word_embeddings": draw(st.booleans()),
    }
    experts = draw(st.sampled_from((4, 8)))
    if family == "deepseek_v3":
        ranks = {name: draw(st.integers(1, 9)) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
        config |= ranks | {"v_head_dim": draw(st.integers(1, 9)), "q_lora_rank": draw(st.none() | st.integers(1, 9))}
    else:
        config |= {"num_key_value_heads": draw(st.sampled_from((1, 2, 4, 8))), "head_dim": draw(st.integers(1, 9))}
        config |= {"attention_bias": draw(st.booleans())}
    if family == "qwen3_moe":
        config |= {"num_experts": experts, "moe_intermediate_size": 4 * draw(wide)}
    elif family != "qwen3":
        config |= {"n_routed_experts": experts, "moe_intermediate_size": 4 * draw(wide)}
        config |= {"first_k_dense_replace": draw(st.integers(0, layers)), "n_shared_experts": draw(st.integers(0, 2))}
    made = model_shape(config)
    return ModelShape(tuple(draw(st.permutations(made.tensors))), made.kv_heads)


BUCKETS = st.integers(1, 200_000)
LAYOUTS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])


def engines(*marks: str, epoch: int = 1) -> EngineSet:
    members = tuple(EngineIdentity(url=f"http://h:{n}", incarnation=mark) for n, mark in enumerate(marks))
    return EngineSet(epoch=epoch, engines=members)


def planned(
    model: ModelShape,
    transport: Transport,
    fleet: EngineSet,
    bucket_bytes: int = 1 << 14,
    layout: tuple[int, int] = (1, 1),
    sources: int = 1,
) -> PushPlan | None:
    """None: a dense model has no experts to send directly."""
    if transport is Transport.DIRECT_EXPERTS and not any(expert_number(t.name) is not None for t in model.tensors):
        return None
    return plan_push(
        model.tensors,
        fleet,
        run="demo",
        version="demo:3",
        bucket_bytes=bucket_bytes,
        call_deadline_s=5.0,
        transport=transport,
        layout=EngineLayout(tp=layout[0], ep=layout[1], kv_heads=model.kv_heads),
        sources=sources,
        folder="/shared/demo-3" if transport in (Transport.DISK_DELTA, Transport.DISK_FULL) else None,
        base_version="demo:2" if transport is Transport.DISK_DELTA else None,
    )


@settings(max_examples=40)
@given(tensors(), st.integers(1, 20_000))
def test_each_tensor_once_fused_together_and_bounded(model: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = fill_buckets(model, bucket_bytes)
    sent = [tensor for bucket in buckets for tensor in bucket.tensors]
    assert Counter(t.name for t in sent) == Counter(t.name for t in model)
    assert {t.name: t for t in sent} == {t.name: t for t in model}
    whole = Counter[str]()
    for tensor in model:
        whole[together(tensor.name)] += tensor.size_bytes

    def unit(tensor: TensorSpec) -> tuple[str, int | None]:
        """What must not be divided: a layer's experts may be, between experts, when they don't fit into a bucket."""
        name = together(tensor.name)
        return name, expert_number(tensor.name) if whole[name] > bucket_bytes else None

    place: dict[tuple[str, int | None], int] = {}
    for number, bucket in enumerate(buckets):
        for tensor in bucket.tensors:
            assert place.setdefault(unit(tensor), number) == number
        assert bucket.size_bytes <= bucket_bytes or len({unit(t) for t in bucket.tensors}) == 1
    for left, right in itertools.pairwise(buckets):
        first = sum(t.size_bytes for t in right.tensors if unit(t) == unit(right.tensors[0]))
        assert left.size_bytes + first > bucket_bytes  # no bucket is cut short


@settings(max_examples=120, deadline=None)
@given(models(), st.sampled_from(Transport), st.integers(1, 4), BUCKETS, LAYOUTS, st.integers(1, 6))
def test_every_rank_gets_what_it_needs_once(
    model: ModelShape, transport: Transport, count: int, bucket_bytes: int, layout: tuple[int, int], sources: int
) -> None:
    fleet = engines(*"abcd"[:count])
    plan = planned(model, transport, fleet, bucket_bytes, layout, sources)
    if plan is None:
        return
    done = simulate(plan, model.tensors)
    total = sum(tensor.size_bytes for tensor in model.tensors)
    if layout == (1, 1):
        assert set(done.received_bytes) == {total}
    # bytes are conserved: an expert goes to the ranks of one expert-parallel group, which share it
    experts = sum(tensor.size_bytes for tensor in model.tensors if expert_number(tensor.name) is not None)
    if transport is Transport.BROADCAST:
        assert sum(done.sent_bytes) == total == plan.total_bytes
    elif transport is Transport.DIRECT_EXPERTS:
        assert sum(done.sent_bytes) == total - experts + count * experts
    elif plan.folder is None:
        needs = [sum(t.size_bytes for t in rank) for rank in rank_needs(model.tensors, plan.layout)]
        assert sum(done.sent_bytes) == count * sum(needs)
        assert set(done.received_bytes) == {sum(needs)}
    # every sender works, as evenly as can be
    load = Counter(delivery.source for delivery in plan.deliveries)
    if load:
        assert len(load) == min(sources, len(plan.deliveries)) and max(load.values()) - min(load.values()) <= 1


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from(Transport), st.integers(1, 3), BUCKETS, LAYOUTS, st.integers(1, 4))
def test_a_plan_is_a_function_of_its_inputs_and_survives_the_wire(
    model: ModelShape, transport: Transport, count: int, bucket_bytes: int, layout: tuple[int, int], sources: int
) -> None:
    inputs = (transport, engines(*"abcd"[:count]), bucket_bytes, layout, sources)
    plan = planned(model, *inputs)
    if plan is None:
        return
    assert plan == planned(model, *inputs)
    assert PushPlan.model_validate_json(plan.model_dump_json()) == plan
    names = {tensor.name for tensor in plan.tensors}
    assert names == {tensor.name for tensor in model.tensors}
    sent = [send for side in source_side(plan) for send in side if send.bucket is not None]
    if plan.folder is None:
        assert len(sent) == len(plan.buckets) + sum(len(d.buckets) for d in plan.deliveries)


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from(Transport), st.integers(1, 4), st.data(), LAYOUTS, st.integers(1, 4))
def test_another_engine_changes_its_own_part_only(
    model: ModelShape, transport: Transport, count: int, data: st.DataObject, layout: tuple[int, int], sources: int
) -> None:
    marks = list("abcd"[:count])
    before = planned(model, transport, engines(*marks), layout=layout, sources=sources)
    replaced = data.draw(st.integers(0, count - 1))
    marks[replaced] = "new"
    after = planned(model, transport, engines(*marks), layout=layout, sources=sources)
    if before is None or after is None:
        return
    assert (after.buckets, after.calls_per_engine) == (before.buckets, before.calls_per_engine)
    assert after.group_name != before.group_name
    for old, new in zip(before.deliveries, after.deliveries, strict=True):
        if old.engine != replaced or not old.group_name:
            assert new == old
        else:
            assert new.group_name != old.group_name
            assert new.model_copy(update={"group_name": old.group_name}) == old


def test_group_changes_with_the_set_and_its_order_only() -> None:
    assert group_name(engines("a", "b", epoch=1)) == group_name(engines("a", "b", epoch=9))
    names = {group_name(engines(*marks)) for marks in (("a", "b"), ("b", "a"), ("a",), ("a", "c"))}
    assert len(names) == 4


@settings(max_examples=80, deadline=None)
@given(models(), st.sampled_from(list(Transport)), BUCKETS, LAYOUTS, st.data())
def test_a_plan_with_anything_missing_or_too_much_is_caught(
    model: ModelShape, transport: Transport, bucket_bytes: int, layout: tuple[int, int], data: st.DataObject
) -> None:
    plan = planned(model, transport, engines("a", "b"), bucket_bytes, layout, sources=2)
    if plan is None:
        return
    where = data.draw(st.sampled_from(["buckets"] * bool(plan.buckets) + ["deliveries"] * bool(plan.deliveries)))
    number = data.draw(st.integers(0, len(getattr(plan, where)) - 1))
    again = data.draw(st.booleans())

    def damaged(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        """One tensor more, or one less, in one bucket."""
        at = data.draw(st.integers(0, len(buckets) - 1))
        inside = buckets[at].tensors
        which = data.draw(st.integers(0, len(inside) - 1))
        changed = (*inside, inside[which]) if again else (*inside[:which], *inside[which + 1 :])
        middle = (Bucket(tensors=changed),) if changed else ()
        return (*buckets[:at], *middle, *buckets[at + 1 :])

    if where == "buckets":
        broken = plan.model_copy(update={"buckets": damaged(plan.buckets)})
    else:
        delivery = plan.deliveries[number]
        changed = delivery.model_copy(update={"buckets": damaged(delivery.buckets)})
        kept: tuple[Delivery, ...] = (changed,) if changed.buckets else ()
        deliveries = (*plan.deliveries[:number], *kept, *plan.deliveries[number + 1 :])
        broken = plan.model_copy(update={"deliveries": deliveries})
    if broken.buckets or broken.deliveries:
        with pytest.raises(PlanBroken):
            simulate(broken, model.tensors)


@settings(max_examples=40)
@given(tensors())
def test_a_tensor_named_twice_is_refused(model: list[TensorSpec]) -> None:
    with pytest.raises(BadInput, match="appears twice"):
        plan_push(
            [*model, model[0]], engines("a"), run="demo", version="demo:3", bucket_bytes=1000, call_deadline_s=5.0
        )


@given(st.from_regex(r"[a-z0-9][a-z0-9-]{1,40}", fullmatch=True), st.integers(0, 10**6), st.integers(1, 100))
def test_version_names_and_the_loading_mark_is_none(run: str, steps: int, epoch: int) -> None:
    version = version_name(run, steps)
    assert parse_version(version) == (run, steps)
    with pytest.raises(BadInput):
        parse_version(loading_mark(version, epoch))
