"""No failure becomes a number: whatever a verifier, an agent, a sandbox, a server or a stored byte does, a reward, a
score or an advantage exists only where the verifier of this very attempt wrote one, and is that one.

Each test goes through a place where a failure could turn into a number: the file a verifier leaves, the run of an
attempt, the rollout's view of its servers, a record as it is stored, a row of a batch.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.agents import rollout
from rl360.agents.base import AgentContext, AgentEnd, AgentFailure
from rl360.agents.records import refuse_unsigned
from rl360.agents.rollout import AttemptSpec, RolloutClient
from rl360.config.run import RunConfig
from rl360.config.services import Services
from rl360.errors import BadInput, CorruptObject, Rl360Error, StoreUnavailable
from rl360.harbor.outcome import ExitStatus, outcome_of
from rl360.harbor.protocol import RunReply, RunRequest, SandboxLimits
from rl360.harbor.runner import Attempt, Prepared, Runner
from rl360.harbor.task import load_task
from rl360.harbor.verdict import receipt_problem, run_key
from rl360.harbor.verifier import RewardError, read_reward
from rl360.ledger.outcomes import HAS_VERDICT, INFRA, Outcome
from rl360.sandboxes.provider import (
    ExecResult,
    SandboxGone,
    SandboxSpec,
    SandboxStartError,
    StopProof,
    Workspace,
)
from rl360.sandboxes.rooted import DiskMeter, Watch
from rl360.sessions.sample import AttemptRecord
from rl360.store.codec import pack, sha256_hex, unpack
from rl360.tasksets.harbor_files import BUILTIN_DIR
from rl360.training.results import parse_batch
from tests.property.whole_step import CONFIGS, CONSTANT, Choices, batches, configs, decided, records_of
from tests.unit.objective_data import sample_of, store_samples
from tests.unit.verdict_data import TOKEN, renamed, verdict

pytestmark = pytest.mark.timeout(900)  # of seconds on a core of its own, minutes on a busy machine
THOUSANDS = settings(deadline=None, max_examples=2000)
KEY = run_key(TOKEN, "demo")
NOT_NUMBERS = [
    None,
    True,
    False,
    "1",
    "1.0",
    "",
    "nan",
    [],
    [1.0],
    {},
    {"reward": 1},
    b"1",
    math.nan,
    math.inf,
    -math.inf,
]
junk = st.sampled_from(NOT_NUMBERS)


# -- the file a verifier leaves ---------------------------------------------------------------------------------------

SPELLED = ("1", "0", "1.0", " 0.5\n", "-1", "1e3", "1e999", "nan", "NaN", "inf", "-Infinity", "true", "null", "", "0x1")
SPELLED += ("1 2", "1_0", "\u0661", '"1"', "[1]", "{}", "--1", "+1", ".5", "5.", "Traceback (most recent call last):")
WORDS = st.sampled_from(SPELLED)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["reward", "score", "x"]), inner),
    max_leaves=3,
)
LEFT = (
    st.none()
    | st.builds(lambda value: json.dumps({"reward": value}).encode(), VALUES)
    | st.builds(lambda value: json.dumps(value).encode(), VALUES)
    | WORDS.map(str.encode)
    | st.binary(max_size=12)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def left(folder: Path, name: str, data: bytes | None) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)


def meant(as_json: bytes | None, as_text: bytes | None) -> float | None:
    """The number that these files state beyond doubt, read in another way than the product reads them."""

    def no_json(word: str) -> float:
        raise ValueError(f"{word}: Python reads it, but a file with it anywhere is not JSON")

    if as_json is not None:
        try:
            value = json.loads(as_json.decode(), parse_constant=no_json)["reward"]
        except (ValueError, TypeError, KeyError, IndexError):
            return None
        number = value if type(value) in (int, float) else math.nan
    elif as_text is not None:
        try:
            text = as_text.decode("ascii").strip()
            number = float(text) if set(text) <= set("0123456789.eE+-") else math.nan
        except ValueError:
            return None
    else:
        return None
    try:
        return float(number) if math.isfinite(number) else None
    except OverflowError:
        return None


@THOUSANDS
@given(LEFT, LEFT)
def test_a_reward_file_gives_the_number_it_states_or_none(folder: Path, as_json: Any, as_text: Any) -> None:
    left(folder, "reward.json", as_json)
    left(folder, "reward.txt", as_text)
    try:
        found = read_reward(folder)
    except RewardError:
        found = None
    assert found is None or math.isfinite(found)
    assert found == meant(as_json, as_text)


# -- the run of an attempt --------------------------------------------------------------------------------------------

# what a step of an attempt may raise; the last are of plug-ins and of bugs
ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: SandboxStartError("no room"),
    lambda: SandboxStartError("died", StopProof(False, "still there", 0.0)),
    lambda: SandboxGone("killed", by_contents=True),
    lambda: SandboxGone("killed", by_contents=False),
    lambda: OSError(28, "no space left"),
    lambda: TimeoutError(),
    lambda: BadInput("no such thing"),
    lambda: AgentFailure(ExitStatus.GENERATION_ERROR, "engine away", retryable=True),
    lambda: AgentFailure(ExitStatus.SESSION_LOST, "session away", retryable=False),
    lambda: RuntimeError("1.0"),
    lambda: ValueError("reward"),
    lambda: KeyError("reward"),
    lambda: ZeroDivisionError(),
    lambda: MemoryError(),
    lambda: asyncio.CancelledError(),
)
ENDS = (*ExitStatus, "Passed", "1.0", "")


class Script:
    """What each step of an attempt does, chosen beforehand: works, or raises, or answers wrong."""

    def __init__(self, choose: Choices, folder: Path) -> None:
        self.choose, self.folder = choose, folder
        self.went_well, self.wrote, self.verifying = True, None, False

    def may_fail(self, share: int = 8) -> None:
        if self.choose.below(share) == 0:
            self.went_well = False
            raise self.choose.of(ERRORS)()


class ScriptedSandbox:
    def __init__(self, script: Script, spec: SandboxSpec) -> None:
        self.script, self.spec = script, spec

    async def exec(self, command: str, timeout_s: float, cap_bytes: int | None = None) -> ExecResult:
        script = self.script
        data = script.choose.of((b"1", b"0", b"0.25", b"1", b"0", None, b"nan", b"true", b"", b"Traceback"))
        if script.verifying:
            left(self.spec.workspace.logs, "reward.txt", data)
            script.wrote = meant(None, data)
        script.may_fail()
        exit_code = script.choose.of((0, 1, 0, 1, 127, 137, 139))
        timed_out = script.choose.below(8) == 0
        if script.verifying and (timed_out or exit_code > 128):
            script.went_well = False
        return ExecResult(exit_code, b"1.0", 3, 0.1, timed_out)

    async def stop(self, deadline_s: float = 10.0) -> StopProof:
        confirmed = self.script.choose.below(8) != 0
        self.script.went_well = self.script.went_well and confirmed
        if not confirmed and self.script.choose.below(2):
            raise OSError(5, "stop failed")
        return StopProof(confirmed, "seen", 0.0)

    def pids(self) -> None:
        return None


class ScriptedProvider:
    def __init__(self, script: Script) -> None:
        self.script = script

    async def new_workspace(self, name: str, source: Path | None) -> Workspace:
        self.script.may_fail()
        return Workspace(self.script.folder)

    async def publish(self, source: Path, digest: str) -> Path:
        self.script.verifying = True
        self.script.may_fail()
        return source

    async def create(self, spec: SandboxSpec) -> ScriptedSandbox:
        self.script.may_fail()
        return ScriptedSandbox(self.script, spec)

    async def remove_workspace(self, workspace: Workspace) -> str | None:
        return self.script.choose.of((None, None, "something is left"))

    def meter(self, workspace: Workspace, storage_mb: int) -> DiskMeter:
        return DiskMeter(Watch(self.script.folder), workspace, storage_mb << 20)


TASK = load_task(next(path for path in sorted(BUILTIN_DIR.iterdir()) if path.is_dir()))
ASKED = RunRequest(instance_id=TASK.id, attempt_id="a", run="demo", base_url="http://h")


def agent_of(script: Script) -> Any:
    async def agent(context: AgentContext) -> AgentEnd:
        if script.choose.below(2):
            await context.exec("true", 1.0)
        script.may_fail()
        return AgentEnd(script.choose.of(ENDS), "reward 1.0")

    return agent


async def ran(script: Script) -> RunReply:
    prepared = Prepared(ASKED, TASK, agent_of(script), SandboxLimits(), 60.0, 20.0)
    return await Runner(cast(Any, ScriptedProvider(script)), cast(Any, None), TOKEN).run(prepared, Attempt(ASKED))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("workspace")
    (made / "logs").mkdir()
    (made / "work").mkdir()
    return made


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@THOUSANDS
@given(batches)
def test_an_attempt_whose_steps_fail_has_no_reward(workspace: Path, loop: asyncio.Runner, choose: Choices) -> None:
    left(workspace / "logs", "reward.txt", None)
    script = Script(choose, workspace)
    try:
        reply = loop.run(ran(script))
    except (Exception, asyncio.CancelledError):  # the server answers 500, and the rollout books a loss
        return
    assert (reply.verdict is not None) == (reply.outcome in HAS_VERDICT) == (reply.reward is not None)
    if reply.verdict is None:
        return
    # the agent may fail or be stopped and still be verified; nothing of the verifier's part may
    assert script.verifying and script.wrote is not None
    assert reply.reward == reply.verdict.reward == script.wrote
    assert reply.verdict.attempt_id == "a" and receipt_problem(reply.verdict, KEY, "demo") is None


@THOUSANDS
@given(st.sampled_from(ENDS) | st.text(max_size=8), st.sampled_from([None, *Outcome]))
def test_no_end_without_a_verdict_is_an_outcome_with_one(status: str, problem: Outcome | None) -> None:
    named = problem if problem in INFRA else None  # a verifier's problem is infrastructure
    assert outcome_of(status, None, named) in INFRA
    for reward in (1.0, 0.0):
        assert outcome_of(status, verdict("a", reward), named) in HAS_VERDICT


# -- the rollout's view of its servers --------------------------------------------------------------------------------

SPEC = AttemptSpec("s000000-g000-a00", "s000000-g000", "hello", "/tasks/hello", "d")
NAME = SPEC.attempt_id(0)
STORED_AT = f"demo/steps/000000/merged/0000/{NAME}.msgpack"
STORED = store_samples([sample_of(NAME, SPEC.group_id)], STORED_AT).to_wire()
OPENED = {"session_id": "an-id", "base_url": "http://h/v1"}
REWARD = 0.25
SAID = verdict(NAME, REWARD, task_id="hello")
REPLY: dict[str, Any] = {"trial_id": "1", "outcome": "failed", "exit_status": "Submitted", "reward": REWARD}
REPLY |= {"verdict": SAID.model_dump(), "cleanup": {"confirmed": True, "evidence": "seen"}}
LOST = [REPLY | {"outcome": str(outcome), "verdict": None, "reward": None} for outcome in sorted(INFRA)]
FOREIGN = [renamed(SAID, attempt_id=NAME.replace("a00", "a01")), renamed(SAID, task_id="other")]
FOREIGN += [renamed(SAID, run="other"), verdict(NAME, REWARD, task_id="hello", token="u" * 16)]
REPLIES = [REPLY, *LOST, *(REPLY | {"verdict": said.model_dump()} for said in FOREIGN)]
SERVICES = SimpleNamespace(
    secrets=lambda: SimpleNamespace(token=TOKEN),
    auth_headers=dict,
    session_urls=["http://s"],
    sandbox_urls=["http://b"],
)
NETWORK: tuple[Callable[[], BaseException], ...] = (
    lambda: TimeoutError(),
    lambda: aiohttp.ServerDisconnectedError(),
    lambda: aiohttp.ClientPayloadError("cut"),
    lambda: aiohttp.ConnectionTimeoutError(),
)


def spoilt(choose: Choices, value: Any) -> Any:
    """The value with one part of it, at any depth, gone or something else; now and then as it is."""
    if choose.below(8) == 0:
        return value
    if isinstance(value, dict) and value and choose.below(8):
        name = choose.of(sorted(value))
        rest = {key: item for key, item in value.items() if key != name}
        return rest if choose.below(4) == 0 else {**value, name: spoilt(choose, value[name])}
    if isinstance(value, list) and value and choose.below(8):
        at = choose.below(len(value))
        return [*value[:at], spoilt(choose, value[at]), *value[at + 1 :]]
    if type(value) in (int, float) and choose.below(2):
        return choose.of((value + 1, -value, value * 1.5, 1e300, 0))
    return choose.of(NOT_NUMBERS)


@contextmanager
def scripted_network(choose: Choices) -> Iterator[None]:
    good = {"/run": REPLIES, "/sessions": [OPENED], "/sessions/an-id/store": [STORED]}

    async def answer(_http: Any, _method: str, url: str, _body: Any, _timeout_s: float) -> tuple[int, bytes]:
        path = url.partition("://")[2].partition("/")[2]
        value = choose.of(good.get(f"/{path}", [{}]))
        kind = choose.below(8)
        if kind == 0:
            raise choose.of(NETWORK)()
        if kind == 1:
            return choose.of((500, 503, 422, 404)), choose.of((b"", b"1.0", b'{"error": {"code": "cannot_merge"}}'))
        if kind == 2:
            return 200, choose.of((b"", b"1", b"null", b'{"reward": 1.0}', b"[]", b"\xff"))
        if kind <= 5:
            value = spoilt(choose, value)
        return 200, json.dumps(value, default=str).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "_answer", answer)
        patch.setattr(rollout, "_PATIENCE_S", 0.0)
        yield


async def rolled_out() -> AttemptRecord:
    config = RunConfig(run="demo")
    async with RolloutClient(cast(Services, SERVICES), config, 0, 0, "demo:0") as client:
        return await client.attempt(SPEC, 0)


@THOUSANDS
@given(batches)
def test_whatever_servers_answer_a_record_has_this_attempts_verdict_or_none(
    loop: asyncio.Runner, choose: Choices
) -> None:
    with scripted_network(choose):
        try:
            record = loop.run(rolled_out())
        except (BadInput, CorruptObject, StoreUnavailable):
            return  # the step stops and says why
    assert (record.verdict is not None) == (record.outcome in HAS_VERDICT)
    if record.verdict is not None:
        assert (record.verdict.reward, record.verdict.attempt_id) == (REWARD, NAME)
        assert receipt_problem(record.verdict, KEY, "demo") is None
    (decision,) = decided([record], CONFIGS[0], False, CONSTANT).decisions
    assert decision.reward == decision.score == (None if record.verdict is None else REWARD)
    assert decision.advantage is None, "one attempt has nothing to be better than"


# -- a record as it is stored, a row of a batch -----------------------------------------------------------------------


def numbers_of(records: list[AttemptRecord]) -> dict[str, float]:
    return {record.attempt_id: record.verdict.reward for record in records if record.verdict is not None}


@THOUSANDS
@given(batches, configs, st.booleans())
def test_a_damaged_record_is_refused_or_has_the_reward_its_verifier_wrote(
    choose: Choices, config: Any, scored: bool
) -> None:
    records = records_of(choose)
    wires = unpack(pack([record.to_wire() for record in records]), "records")
    at = choose.below(len(wires))
    wires[at] = spoilt(choose, wires[at])
    try:
        read = [AttemptRecord.from_wire(wire, "records") for wire in wires]
        refuse_unsigned(read, run="demo", verdict_key=KEY, key="records")
        decisions = decided(read, config, scored, CONSTANT).decisions
    except Rl360Error:
        return
    wrote = numbers_of(records)
    for decision in decisions:
        if decision.reward is not None:
            assert decision.reward == wrote[decision.attempt_id]
            assert decision.score in (decision.reward, decision.reward - config.format_error_penalty)
        elif decision.score is not None:
            assert scored and decision.outcome is Outcome.AGENT_TIMEOUT and decision.score == 0.0
        assert decision.advantage is None or (decision.score is not None and math.isfinite(decision.advantage))


@THOUSANDS
@given(batches, configs)
def test_infrastructure_gets_no_number_in_any_objective(choose: Choices, config: Any) -> None:
    records = records_of(choose, tuple(Outcome))
    for decision in decided(records, config, False, CONSTANT).decisions:
        if decision.outcome in INFRA:
            assert decision.reward is decision.score is decision.advantage is decision.token_weight is None


@THOUSANDS
@given(batches)
def test_a_damaged_batch_is_refused_or_has_finite_numbers_of_their_type(choose: Choices) -> None:
    result = decided(records_of(choose), CONFIGS[0], False, CONSTANT)
    wire = unpack(pack(result.to_wire("demo", 0)), "batch")
    data = pack(spoilt(choose, wire))
    try:
        batch = parse_batch(data, "batch", sha256_hex(data), "demo", 0)
    except CorruptObject:
        return
    assert all(type(score) is float and math.isfinite(score) for _, score in batch.scored.values())
    for row in batch.rows:
        assert type(row.advantage) is float and math.isfinite(row.advantage)
        assert type(row.weight) is float and 0 < row.weight < math.inf
        assert type(row.trained) is int and row.trained >= 0


@given(junk)
@settings(deadline=None)
def test_a_verdict_takes_no_junk_for_a_reward(value: Any) -> None:
    with pytest.raises(ValueError, match="reward"):
        verdict("a", value)
