"""Whatever the model and the bucket size: each tensor travels once, fused ones together, buckets bounded."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.engines.fleet import EngineIdentity
from rl360.errors import BadInput
from rl360.weights.messages import EngineSet, PushPlan, TensorSpec, loading_mark, parse_version, version_name
from rl360.weights.plan import expert_number, fill_buckets, group_name, plan_push, together

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
DIM = st.integers(1, 64)
DTYPES = ("bfloat16", "float32")


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    """Dense and MoE layers in any order of tensors."""
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


@settings(max_examples=40)
@given(models(), st.integers(1, 20_000))
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


def engines(*marks: str, epoch: int = 1) -> EngineSet:
    members = tuple(EngineIdentity(url=f"http://h:{n}", incarnation=mark) for n, mark in enumerate(marks))
    return EngineSet(epoch=epoch, engines=members)


@settings(max_examples=40)
@given(models(), st.lists(st.text("abcdef", min_size=1), min_size=1, max_size=4), st.integers(1, 10**6))
def test_plan_is_a_function_of_its_inputs_and_survives_the_wire(
    model: list[TensorSpec], marks: list[str], bucket_bytes: int
) -> None:
    def make() -> PushPlan:
        return plan_push(
            model, engines(*marks), run="demo", version="demo:3", bucket_bytes=bucket_bytes, call_deadline_s=5.0
        )

    plan = make()
    assert plan == make()
    assert PushPlan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.total_bytes == sum(t.size_bytes for t in model)
    assert plan.calls_per_engine == len(plan.buckets)


def test_group_changes_with_the_set_only() -> None:
    assert group_name(engines("a", "b", epoch=1)) == group_name(engines("a", "b", epoch=9))
    names = {group_name(engines(*marks)) for marks in (("a", "b"), ("b", "a"), ("a",), ("a", "c"))}
    assert len(names) == 4


@settings(max_examples=40)
@given(models())
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
