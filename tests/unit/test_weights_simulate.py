"""The simulator runs good plans and names what is wrong with bad ones; the planner refuses shapes no engine holds."""

from __future__ import annotations

from typing import Any

import pytest

from rl360.engines.fleet import EngineIdentity
from rl360.errors import BadInput
from rl360.weights.calls import CallKind, Send, engine_side, source_side
from rl360.weights.messages import Bucket, EngineLayout, EngineSet, PushPlan, TensorSpec, Transport
from rl360.weights.plan import plan_push, rank_needs
from rl360.weights.shapes import model_shape
from rl360.weights.simulate import PlanBroken, Wire, execute, simulate

MODEL = model_shape(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 32,
        "num_experts": 8,
        "moe_intermediate_size": 8,
    }
)
SHAPES = MODEL.tensors
LAYER = "model.layers.0"


def fleet(count: int) -> EngineSet:
    return EngineSet(
        epoch=1, engines=tuple(EngineIdentity(url=f"http://h:{n}", incarnation=f"i{n}") for n in range(count))
    )


def plan(transport: str = "broadcast", *, count: int = 2, tp: int = 1, ep: int = 1, **more: Any) -> PushPlan:
    options: dict[str, Any] = {"bucket_bytes": 2000, "sources": 2, **more}
    return plan_push(
        options.pop("shapes", SHAPES),
        options.pop("engines", fleet(count)),
        run="demo",
        version="demo:1",
        call_deadline_s=1.0,
        transport=transport,
        layout=EngineLayout(tp=tp, ep=ep, kv_heads=options.pop("kv_heads", 2)),
        **options,
    )


def changed(made: PushPlan, **parts: Any) -> PushPlan:
    return made.model_copy(update=parts)


def part_of(rank: list[TensorSpec], name: str) -> tuple[int, int, int] | None:
    return next(tensor.part for tensor in rank if tensor.name == name)


def test_ranks_hold_what_the_layout_says() -> None:
    ranks = rank_needs(SHAPES, EngineLayout(tp=4, ep=2, kv_heads=2))
    owned = [sorted({int(t.name.split(".")[5]) for t in rank if ".experts." in t.name}) for rank in ranks]
    assert owned == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    assert [part_of(rank, f"{LAYER}.self_attn.q_proj.weight") for rank in ranks] == [(0, 4 * r, 4) for r in range(4)]
    # two heads of keys for four ranks: pairs of ranks hold the same one
    assert [part_of(rank, f"{LAYER}.self_attn.k_proj.weight") for rank in ranks] == [
        (0, 0, 4), (0, 0, 4), (0, 4, 4), (0, 4, 4)
    ]  # fmt: skip
    assert [part_of(rank, f"{LAYER}.self_attn.o_proj.weight") for rank in ranks] == [(1, 4 * r, 4) for r in range(4)]
    gate, down = (f"{LAYER}.mlp.experts.5.{p}_proj.weight" for p in ("gate", "down"))
    assert [(part_of(rank, gate), part_of(rank, down)) for rank in ranks[2:]] == [
        ((0, 0, 4), (1, 0, 4)), ((0, 4, 4), (1, 4, 4))
    ]  # fmt: skip
    # 100 words are padded to 128, 32 a rank: the last rank has four
    assert [part_of(rank, "lm_head.weight") for rank in ranks] == [(0, 0, 32), (0, 32, 32), (0, 64, 32), (0, 96, 4)]
    assert part_of(ranks[3], f"{LAYER}.input_layernorm.weight") is None


def test_a_plan_runs_and_its_time_adds_up() -> None:
    made = plan(bucket_bytes=10**9)
    wire = Wire(call_s=1.0, link_bytes_per_s=100.0)
    done = simulate(made, SHAPES, wire)
    size = sum(tensor.size_bytes for tensor in SHAPES)
    # pause, mark, leave, join, begin, one bucket, end, and six to confirm and serve
    assert done.seconds == done.paused_s == pytest.approx(13 + size / 100)
    assert (done.calls, done.control_calls) == ((1, 1), (12, 12))
    kept = engine_side(made, kept_groups=[made.group_name])
    assert [sum(call.kind is not CallKind.WEIGHTS for call in calls) for calls in kept] == [made.control_calls] * 2
    files = plan("disk_full", folder="/files")
    assert simulate(files, SHAPES).control_calls == (files.control_calls,) * 2
    pulled = simulate(files, SHAPES, Wire(call_s=0.0, fetch_bytes_per_s=10.0, load_bytes_per_s=100.0))
    assert pulled.paused_s == pytest.approx(size / 100) and pulled.seconds == pytest.approx(size * 0.11)


def test_an_engine_that_never_comes_is_a_deadlock() -> None:
    made = plan()
    calls = engine_side(made)
    sends = source_side(made)
    with pytest.raises(PlanBroken, match=r"deadlock: 2 of 4 never end: source 0 waits in joining group"):
        execute(made, SHAPES, [calls[0], []], sends, Wire())
    stops = [call for call in calls[1] if call.name != "broadcast"]
    with pytest.raises(PlanBroken, match=r"deadlock: .*; engine 0 waits in broadcast on group"):
        execute(made, SHAPES, [calls[0], stops], sends, Wire())


def test_senders_in_crossed_order_are_a_deadlock() -> None:
    made = plan("p2p", tp=2, ep=2)
    calls = engine_side(made)
    sends = source_side(made)
    execute(made, SHAPES, calls, sends, Wire())
    # engine after engine instead of round by round, and the two senders begin at different ends
    for sender, backwards in zip(sends, (False, True), strict=True):
        pairs = [(send.bucket is not None, -(send.engine or 0) if backwards else send.engine or 0) for send in sender]
        sender[:] = [send for _, send in sorted(zip(pairs, sender, strict=True), key=lambda pair: pair[0])]
    with pytest.raises(PlanBroken, match="deadlock"):
        execute(made, SHAPES, calls, sends, Wire())


def test_whatever_a_plan_does_wrong_is_named() -> None:
    direct, pairs = plan("direct_experts", tp=2, ep=2), plan("p2p")
    first, second, *rest = direct.deliveries
    swapped = (first.model_copy(update={"buckets": second.buckets}), second, *rest)
    with pytest.raises(PlanBroken, match=r"engine 0, rank 0: .*experts\.0\..*does not arrive whole"):
        simulate(changed(direct, deliveries=swapped), SHAPES)
    with pytest.raises(PlanBroken, match=r"engine 0, rank 0: .*experts\.0\..* arrives twice"):
        simulate(changed(direct, deliveries=(*direct.deliveries, first)), SHAPES)
    with pytest.raises(PlanBroken, match=r"embed_tokens.*does not arrive whole"):
        simulate(changed(direct, buckets=direct.buckets[1:]), SHAPES)
    # everything to everybody is more than a rank needs
    everything = Bucket(tensors=tuple(t for t in SHAPES if ".experts." in t.name))
    too_much = (first.model_copy(update={"buckets": (everything,)}), second, *rest)
    with pytest.raises(PlanBroken, match=r"rank 0: .*experts\.4\..*is not needed there"):
        simulate(changed(direct, deliveries=too_much), SHAPES)
    one_name = tuple(d.model_copy(update={"group_name": "g"}) for d in pairs.deliveries)
    with pytest.raises(PlanBroken, match="group g is made twice"):
        simulate(changed(pairs, deliveries=one_name), SHAPES)


def test_parts_of_one_parameter_in_two_buckets_are_named() -> None:
    made = plan(bucket_bytes=10**9)
    (bucket,) = made.buckets
    key = f"{LAYER}.self_attn.k_proj.weight"
    torn = tuple(Bucket(tensors=tuple(t for t in bucket.tensors if (t.name == key) is one)) for one in (True, False))
    with pytest.raises(PlanBroken, match=rf"the parts of {LAYER}.self_attn.qkv_proj.weight come in more than one"):
        simulate(changed(made, buckets=torn), SHAPES)
    expert = f"{LAYER}.mlp.experts.3."
    torn = tuple(
        Bucket(tensors=tuple(t for t in bucket.tensors if (t.name == f"{expert}up_proj.weight") is one))
        for one in (True, False)
    )
    with pytest.raises(PlanBroken, match=r"experts\.w13_weight come in more than one"):
        simulate(changed(made, buckets=torn), SHAPES)


def test_other_tensors_than_the_model_has_are_named() -> None:
    made = plan(bucket_bytes=10**9)
    norm = TensorSpec(name="model.norm.weight", shape=(17,))
    wrong = Bucket(tensors=tuple(norm if t.name == norm.name else t for t in made.buckets[0].tensors))
    with pytest.raises(PlanBroken, match=r"model.norm.weight: \(17,\) bfloat16, has \(16,\)"):
        simulate(changed(made, buckets=(wrong,)), SHAPES)
    extra = Bucket(tensors=(TensorSpec(name="model.extra", shape=(1,)),))
    with pytest.raises(PlanBroken, match=r"tensor model\.extra is not in the model"):
        simulate(changed(made, buckets=(*made.buckets, extra)), SHAPES)
    calls = engine_side(made)
    sends = source_side(changed(made, buckets=(wrong,)))[:1]
    with pytest.raises(PlanBroken, match="sender and receivers of a transfer name different tensors"):
        execute(made, SHAPES, calls, sends, Wire())
    with pytest.raises(PlanBroken, match="one waits for 3 members, another for 2"):
        execute(made, SHAPES, calls, [[Send(made.group_name, None, None, None, 2)]], Wire())


def tensor(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape)


EXPERTS = [tensor(f"l.experts.{e}.{p}_proj.weight", 8, 4) for e in range(4) for p in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shapes": []}, "the trainer named no tensors"),
        ({"shapes": [tensor("a", 0, 3)]}, r"tensor a has shape \(0, 3\)"),
        ({"shapes": [*EXPERTS[:3], *EXPERTS[6:]]}, r"expert 1 has no gate_proj.weight, expert 3 has"),
        ({"shapes": EXPERTS[:-1]}, "4 experts have gate_proj.weight, 3 have down_proj.weight"),
        ({"shapes": [*EXPERTS[:-1], tensor(EXPERTS[-1].name, 8, 5)]}, r"experts.3.down_proj.weight is \(8, 5\)"),
        ({"shapes": EXPERTS, "tp": 3, "ep": 3}, "ep 3 does not divide its 4 experts"),
        ({"transport": "p2p", "tp": 2, "shapes": [tensor("l.q_proj.weight", 7, 4)]}, "2 ranks do not divide axis 0"),
        ({"transport": "p2p", "tp": 2, "shapes": [tensor("l.o_proj.weight", 7)]}, "cuts axis 1, it has none"),
        ({"transport": "p2p", "tp": 2, "kv_heads": None}, "name the model's kv_heads"),
        ({"transport": "p2p", "tp": 2, "kv_heads": 3}, "kv_heads 3 don't divide it"),
        (
            {"transport": "p2p", "tp": 3, "shapes": [tensor("l.k_proj.weight", 8, 4)]},
            "3 ranks do not divide its 2 heads",
        ),
        ({"transport": "direct_experts", "shapes": SHAPES[:1]}, "no routed experts; use broadcast"),
        ({"transport": "carrier pigeon"}, "use one of broadcast, direct_experts, p2p"),
        ({"transport": "disk_full"}, "folder None: disk transports need one"),
        ({"transport": "disk_full", "folder": "here"}, "use an absolute path"),
        ({"transport": "disk_delta", "folder": "/x"}, "a delta needs one"),
        ({"transport": "disk_delta", "folder": "/x", "base_version": "demo:1"}, "the base must be another version"),
        ({"folder": "/x"}, "the others take none"),
        ({"sources": 0}, "sources 0: use at least 1"),
        ({"engines": EngineSet(epoch=1, engines=fleet(1).engines * 2)}, "names an engine twice"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        plan(**options)


def test_messages_refuse_what_no_plan_has() -> None:
    with pytest.raises(ValueError, match="ep 2 does not divide tp 3"):
        EngineLayout(tp=3, ep=2)
    with pytest.raises(ValueError, match=r"part \(0, 3, 2\) .* is not inside shape \(4,\)"):
        TensorSpec(name="a", shape=(4,), part=(0, 3, 2))
    made = plan("p2p")
    with pytest.raises(ValueError, match="sends nothing"):
        PushPlan.model_validate({**made.model_dump(), "deliveries": ()})
    for wrong in ({"engine": 2}, {"rank": 1}, {"source": 2}):
        parts = [d.model_dump() | (wrong if n == 0 else {}) for n, d in enumerate(made.deliveries)]
        with pytest.raises(ValueError, match="the plan has 2 sources, and 2 engines of 1 ranks"):
            PushPlan.model_validate({**made.model_dump(), "deliveries": parts})
    text = made.model_dump_json()
    assert text.count("experts.0.gate_proj") == 2, "engines of one layout get one parcel, written once (two layers)"
    with pytest.raises(ValueError, match="repeats the buckets of delivery 5: none before it"):
        PushPlan.model_validate_json(text.replace('"buckets":0', '"buckets":5'))


def test_every_transport_runs_on_every_layout() -> None:
    for transport in Transport:
        for tp, ep in ((1, 1), (2, 1), (4, 2), (4, 4)):
            files = {"folder": "s3://b/p"} if transport.startswith("disk") else {}
            base = {"base_version": "demo:0"} if transport is Transport.DISK_DELTA else {}
            made = plan(transport, count=3, tp=tp, ep=ep, sources=5, **files, **base)
            assert len(simulate(made, SHAPES).calls) == 3
