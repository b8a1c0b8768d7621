"""The push state machine against engines and a gateway with faults: what a push must never leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_engines import TENSORS, TOKEN, FakeEngine, FakeGateway, FakeTrainer, show_token
from safetensors.numpy import save_file

from rl360.config.run import PushConfig
from rl360.config.services import Services
from rl360.engines import fleet, membership
from rl360.engines.fleet import EngineIdentity, EngineState
from rl360.engines.fleet_log import FleetLog
from rl360.engines.processes import ProcessId, tree_of_pid
from rl360.errors import BadInput, CleanupUnconfirmed, CorruptObject, ServiceError
from rl360.weights import fence, push
from rl360.weights.messages import PushRecord, PushStatus, loading_mark
from rl360.weights.plan import group_name
from tests.unit.memory_store import MemoryStore
from tests.unit.push_world import LETS_GO

CONFIG = PushConfig(call_deadline_s=30.0, bucket_bytes=1024)  # no fake is slow, a busy machine may be
SHORT = CONFIG.model_copy(update={"call_deadline_s": 1.0})  # where an engine hangs: waited out
RUN = "demo"


class PatientGateway(push.GatewayClient):
    """The fake gateway never hangs: a short deadline of the engines' calls is not its own."""

    def __init__(self, url: str, http: httpx.AsyncClient, deadline_s: float) -> None:
        super().__init__(url, http, max(deadline_s, 30.0))


class World:
    """Two engines, a gateway, a trainer and a store."""

    def __init__(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        show_token(monkeypatch, model_dir)
        self.engines = [FakeEngine(), FakeEngine()]
        self.gateway = FakeGateway()
        self.store = MemoryStore()
        self.trainer = FakeTrainer(self.engines)
        self.local = True
        self.services = Services(
            home="-",
            prefect_api_url="-",
            prefect_ui_url="-",
            s3_endpoint="-",
            s3_bucket="-",
            gateway_url=self.gateway.url,
            engine_urls=[engine.url for engine in self.engines],
            session_urls=["-"],
            sandbox_urls=["-"],
            trainer_url="-",
            model_dir=str(model_dir),
        )
        # the servers live in this process; their `sleep` children stand for the engines' process trees
        monkeypatch.setattr(fleet, "tree_of_url", self.tree)
        monkeypatch.setattr(push, "tree_of_url", self.tree)
        monkeypatch.setattr(push, "GatewayClient", PatientGateway)

    def tree(self, url: str) -> fleet.ProcessTree | None:
        engine = next(engine for engine in self.engines if engine.url == url)
        return tree_of_pid(engine.process.pid) if self.local else None

    async def push_async(self, step: int, config: PushConfig = CONFIG) -> PushRecord:
        self.trainer.step = step + 1
        return await push.push(self.store, self.services, RUN, step, f"{RUN}:{step + 1}", self.trainer, config)

    def push(self, step: int, config: PushConfig = CONFIG) -> PushRecord:
        return asyncio.run(self.push_async(step, config))

    def ensure(self, k: int) -> PushRecord | None:
        return asyncio.run(push.ensure_weights(self.store, self.services, RUN, f"{RUN}:{k}", self.trainer, CONFIG))

    def leave_intent(self, epoch: int = 1) -> fence.Intent:
        """What a push that was killed leaves: receivers paused, half written, in a group; an intent and no end."""
        identities = tuple(
            EngineIdentity(
                url=engine.url,
                incarnation=fleet.incarnation_of({"startup_time": {"load": engine.startup}, "launch_command": "fake"}),
                process=self.tree(engine.url),
            )
            for engine in self.engines
        )
        owner = fence.new_owner().model_copy(update={"process": ProcessId(pid=2**22 + 1, start_ticks=1)})
        intent = fence.Intent(
            epoch=epoch,
            run=RUN,
            step=0,
            version=f"{RUN}:1",
            engines=identities,
            group_name="rl360-left",
            call_deadline_s=0.5,
            owner=owner,
            written_at=0.0,
        )
        fence.write_intent(self.store, intent)
        for engine in self.engines:
            engine.paused = engine.session = True
            engine.version = loading_mark(f"{RUN}:1", epoch)
            engine.groups = {"rl360-left"}
            engine.checksums = dict.fromkeys(engine.checksums, "e" * 16)
        return intent


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    save_file({t.name: np.zeros(t.shape, np.float16) for t in TENSORS}, tmp_path / "model.safetensors")
    made = World(tmp_path, monkeypatch)
    yield made
    for engine in made.engines:
        engine.close()
    made.gateway.stop()


def assert_serving(world: World, engine: FakeEngine, version: str) -> None:
    assert engine.version == version
    assert engine.checksums == world.trainer.held()
    assert not engine.paused
    assert engine.url in world.gateway.urls()


def test_push_confirms_every_engine_and_records_it(world: World) -> None:
    record = world.push(0)
    for engine in world.engines:
        assert_serving(world, engine, "demo:1")
        assert "/flush_cache" in [path for path, _ in engine.calls]
    assert record.status is PushStatus.CONFIRMED
    assert [engine.state for engine in record.engines] == [EngineState.SERVING] * 2
    assert record.bytes == sum(t.size_bytes for t in TENSORS)
    assert record.calls_per_engine == world.trainer.plans[0].calls_per_engine
    stored = PushRecord.model_validate_json(world.store.get("demo/steps/000000/push.json"))
    assert stored == record
    assert fence.open_intents(world.store) == []


def test_version_is_never_ahead_of_the_weights(world: World) -> None:
    """While weights move, an engine calls them by a name nobody accepts; the version comes after the checksum."""
    seen = []
    world.trainer.before = lambda plan: seen.extend(engine.version for engine in world.engines)
    world.push(0)
    assert seen == ["demo:1#loading-1"] * 2
    paths = [path for path, _ in world.engines[0].calls]
    assert paths.index("/weights_checker") < len(paths) - 1 - paths[::-1].index("/update_weight_version")
    assert paths.index("/pause_generation") < paths.index("/weights_checker") < paths.index("/continue_generation")


def test_again_returns_the_record_without_a_transfer(world: World) -> None:
    first = world.push(0)
    calls = len(world.trainer.plans)
    assert world.push(0) == first
    assert world.ensure(1) is None
    assert len(world.trainer.plans) == calls


def test_again_registers_an_engine_the_gateway_forgot(world: World) -> None:
    first = world.push(0)
    world.gateway.workers.clear()
    assert world.push(0) == first
    assert world.gateway.urls() == sorted(engine.url for engine in world.engines)
    assert len(world.trainer.plans) == 1


def test_a_restarted_engine_is_pushed_to(world: World) -> None:
    world.push(0)
    restarted = world.engines[1]
    restarted.startup, restarted.version = "another start", "default"
    restarted.checksums = dict.fromkeys(restarted.checksums, "0" * 16)
    record = world.ensure(1)
    assert record is not None and record.step is None and record.epoch == 2
    assert_serving(world, restarted, "demo:1")


def test_same_version_but_other_weights_is_noticed(world: World) -> None:
    world.push(0)
    world.engines[0].checksums["model.embed_tokens.weight"] = "d" * 16
    record = world.ensure(1)
    assert record is not None
    assert_serving(world, world.engines[0], "demo:1")


@pytest.mark.parametrize("path", ["/pause_generation", "/weights_checker", "/flush_cache"])
def test_hanging_engine_is_fenced_and_the_rest_completes(world: World, path: str) -> None:
    bad, good = world.engines
    bad.faults[path] = "hang"
    record = world.push(0, SHORT)
    assert [engine.state for engine in record.engines] == [EngineState.GONE, EngineState.SERVING]
    assert bad.process.wait(5) == -9
    assert world.gateway.urls() == [good.url]
    assert_serving(world, good, "demo:1")
    assert "none alive" in record.engines[0].reason


def test_engine_that_dies_in_the_transfer_makes_a_new_plan(world: World) -> None:
    bad, good = world.engines

    def die(plan: object) -> None:
        bad.process.kill()
        bad.faults["*"] = "hang"

    world.trainer.before = die
    record = world.push(0, SHORT)
    assert record.rounds == 2
    assert [len(plan.engine_set.engines) for plan in world.trainer.plans] == [2, 1]
    assert world.trainer.plans[0].group_name != world.trainer.plans[1].group_name
    assert_serving(world, good, "demo:1")


def test_engine_that_keeps_refusing_is_fenced(world: World) -> None:
    bad, good = world.engines
    world.trainer.refusing = {bad.url}
    record = world.push(0)
    assert record.rounds == 3
    assert record.engines[0].state is EngineState.GONE
    assert_serving(world, good, "demo:1")


def test_wrong_checksum_is_fenced(world: World) -> None:
    bad, good = world.engines
    wrong = {**dict.fromkeys(bad.checksums, f"{1:016x}"), "model.embed_tokens.weight": "b" * 16}
    bad.faults["/weights_checker"] = lambda body: (200, {"success": True, "ranks": [{"checksums": wrong}]})
    record = world.push(0)
    assert "1 of 3 parameters differ" in record.engines[0].reason
    assert record.engines[0].state is EngineState.GONE
    assert_serving(world, good, "demo:1")


def test_engine_that_lies_about_its_version_is_fenced(world: World) -> None:
    bad, good = world.engines
    bad.faults["/update_weight_version"] = lambda body: (200, {"success": True})
    record = world.push(0)
    assert "says it holds 'default'" in record.engines[0].reason
    assert bad.url not in world.gateway.urls()
    assert_serving(world, good, "demo:1")


def test_all_engines_wrong_alike_ends_none(world: World) -> None:
    """The same fault everywhere is not the engines': the push fails, releases them, and kills nobody."""
    for engine in world.engines:
        engine.faults["/weights_checker"] = lambda body: (200, {"success": True, "ranks": [{"checksums": {"x": "1"}}]})
    with pytest.raises(ServiceError, match="no engine holds what was sent"):
        world.push(0)
    assert_released(world)
    assert all(engine.process.poll() is None for engine in world.engines)


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weight_version", "/weights_checker", "/flush_cache"])
def test_all_engines_refusing_alike_ends_none(world: World, path: str) -> None:
    for engine in world.engines:
        engine.faults[path] = "500"
    with pytest.raises(ServiceError, match=f"every engine refuses while .*{path}: answered 500"):
        world.push(0)
    if path == "/flush_cache":  # by then they hold the version and may say so; old KV keeps them out of traffic
        assert world.gateway.urls() == [] and not any(engine.paused for engine in world.engines)
    else:
        assert_released(world)
    assert all(engine.process.poll() is None for engine in world.engines)


def assert_released(world: World) -> None:
    assert world.gateway.urls() == []
    for engine in world.engines:
        assert not engine.paused
        assert not engine.session
        assert engine.version != "demo:1"
    assert fence.open_intents(world.store) == []


def test_trainer_failure_leaves_no_engine_paused_or_ahead(world: World) -> None:
    def fail(plan: object) -> None:
        raise ServiceError("trainer: no answer within 1 s")

    world.trainer.before = fail
    with pytest.raises(ServiceError, match="trainer: no answer"):
        world.push(0)
    assert_released(world)
    world.trainer.before = None
    assert world.push(0).epoch == 2
    for engine in world.engines:
        assert_serving(world, engine, "demo:1")


def test_cancelled_push_releases_the_engines(world: World) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(push.push(world.store, world.services, RUN, 0, "demo:1", world.trainer, CONFIG))
        world.trainer.before = lambda plan: task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert_released(world)


def test_unproven_end_refuses_for_good_until_a_person_confirms(world: World) -> None:
    """An engine on another host that stops answering: nothing here proves its end."""
    world.local = False
    bad, good = world.engines
    bad.faults["/pause_generation"] = "hang"
    with pytest.raises(CleanupUnconfirmed, match=r"rl360 fleet confirm-gone http://127"):
        world.push(0, SHORT)
    assert not good.paused
    assert bad.url not in world.gateway.urls()
    bad.faults = {"*": "500"}
    for _ in range(2):  # a retry meets the fence before it changes anything
        before = len(good.calls)
        with pytest.raises(CleanupUnconfirmed, match="does not answer as that incarnation"):
            world.push(0, SHORT)
        assert {path for path, _ in good.calls[before:]} <= {"/server_info", "/model_info", "/rl360/door"} | LETS_GO
    assert any("/unconfirmed/" in key for key in world.store.objects)
    words = membership.confirm_gone(world.store, bad.url, "pod deleted", "someone")
    assert [word.url for word in words] == [bad.url]
    record = world.push(0, SHORT)
    assert record.absent == (bad.url,)
    assert_serving(world, good, "demo:1")
    assert fence.open_intents(world.store) == []


def test_confirmed_gone_engine_never_comes_back_as_the_same_incarnation(world: World) -> None:
    world.local = False
    intent = world.leave_intent()
    membership.confirm_gone(world.store, world.engines[0].url, "thought it was gone", "someone")
    record = world.push(0)
    assert [engine.identity.url for engine in record.engines] == [world.engines[1].url]
    assert world.engines[0].url not in world.gateway.urls()
    assert intent.engines[0].incarnation not in {engine.identity.incarnation for engine in record.engines}


def test_killed_push_with_living_receivers_is_taken_over(world: World) -> None:
    world.leave_intent()
    record = world.push(0)
    assert record.epoch == 2
    assert world.trainer.plans[0].stale_groups == ("rl360-left",)
    assert fence.read_end(world.store, 1).status is PushStatus.SUPERSEDED  # type: ignore[union-attr]
    for engine in world.engines:
        assert_serving(world, engine, "demo:1")


def test_what_a_killed_push_left_is_let_go_though_its_heir_fails_before_it_pauses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their push is over then, and nobody else would."""
    world.leave_intent()

    async def away(*_: object) -> list[str]:
        raise ServiceError("gateway: no answer")

    monkeypatch.setattr(push.GatewayClient, "keep_only", away)
    with pytest.raises(ServiceError, match="gateway: no answer"):
        world.push(0)
    assert_released(world)
    assert [engine.groups for engine in world.engines] == [set(), set()]


def test_killed_push_with_a_dead_receiver_proves_its_end(world: World) -> None:
    intent = world.leave_intent()
    dead = world.engines[0]
    dead.process.kill()
    dead.process.wait()
    dead.stop()  # the port refuses, as after a death
    record = world.push(0)
    assert record.absent == (intent.engines[0].url,)
    assert_serving(world, world.engines[1], "demo:1")
    dead.start()


def test_restarted_receiver_needs_the_old_ones_proof(world: World) -> None:
    """A new incarnation at the URL says nothing about the old one's processes when they are elsewhere."""
    world.local = False
    world.leave_intent()
    world.engines[0].startup = "another start"
    with pytest.raises(CleanupUnconfirmed, match="not on this host"):
        world.push(0)


def test_a_push_that_still_runs_is_not_disturbed(world: World) -> None:
    intent = world.leave_intent()
    running = intent.owner.model_copy(update={"process": fence.new_owner().process})
    world.store.objects[fence.intent_key(1)] = intent.model_copy(update={"owner": running}).model_dump_json().encode()
    fence.mark_running(running, True)
    with pytest.raises(ServiceError, match="still runs in pid"):
        world.push(0)
    assert all(engine.calls == [] for engine in world.engines)
    fence.mark_running(running, False)
    world.push(0)


def test_push_taken_over_in_mid_flight_stops_without_touching(world: World) -> None:
    """Epoch 1 was closed by somebody else while it ran (its owner looked dead from there): it must not serve."""

    def supersede(plan: object) -> None:
        world.store.put(fence.end_key(1), b"{}")

    world.trainer.before = supersede
    with pytest.raises(Exception, match="taken over by a later push"):
        world.push(0)
    assert all(engine.paused for engine in world.engines)  # the later push's business
    assert world.gateway.urls() == []


def test_engine_down_at_the_start_gets_no_traffic_and_is_named(world: World) -> None:
    world.push(0)
    down = world.engines[0]
    down.stop()
    record = world.push(1)
    assert record.absent == (down.url,)
    assert world.gateway.urls() == [world.engines[1].url]
    down.start()


def test_too_few_engines_fails_before_touching(world: World) -> None:
    world.engines[0].stop()
    with pytest.raises(ServiceError, match="1 engines answer, min_engines is 2"):
        world.push(0, CONFIG.model_copy(update={"min_engines": 2, "call_deadline_s": 0.2}))
    assert "/pause_generation" not in [path for path, _ in world.engines[1].calls]
    assert fence.open_intents(world.store) == []
    world.engines[0].start()


def test_versions_never_go_back(world: World) -> None:
    world.push(2)
    with pytest.raises(BadInput, match="versions never go back"):
        world.push(1)


def test_step_recorded_with_another_version_is_refused(world: World) -> None:
    world.push(0)
    with pytest.raises(CorruptObject, match="records version demo:1"):
        asyncio.run(push.push(world.store, world.services, RUN, 0, "demo:5", world.trainer, CONFIG))


def test_trainer_with_another_model_is_refused_before_sending(world: World, tmp_path: Path) -> None:
    save_file({"model.norm.weight": np.zeros(4, np.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="trainer and engines must be started with the same model"):
        world.push(0)
    assert "/pause_generation" not in [path for path, _ in world.engines[0].calls]


def test_group_name_follows_the_set_not_the_epoch(world: World) -> None:
    world.push(0)
    world.push(1)
    first, second = world.trainer.plans
    assert first.group_name == second.group_name == group_name(second.engine_set)
    assert first.engine_set.epoch < second.engine_set.epoch


def test_a_step_that_trained_nothing_sends_nothing(world: World) -> None:
    first = world.push(0)
    record = asyncio.run(push.push(world.store, world.services, RUN, 1, "demo:1", world.trainer, CONFIG))
    assert (record.step, record.bytes, record.paused_s, record.version) == (1, 0, 0.0, first.version)
    assert len(world.trainer.plans) == 1
    assert PushRecord.model_validate_json(world.store.get("demo/steps/000001/push.json")) == record


def test_the_steps_record_is_written_once(world: World) -> None:
    first = world.push(0)
    world.engines[0].startup = "another start"
    assert world.push(0) == first  # pushed again, epoch 2, but the step's record stays
    assert fence.read_end(world.store, 2).status is PushStatus.CONFIRMED  # type: ignore[union-attr]
    assert len(world.trainer.plans) == 2


def test_the_record_says_when_path_or_calls_change(world: World) -> None:
    first, second = world.push(0), world.push(1)
    assert (first.changed, first.plan_reused) == ("", False)
    assert (second.changed, second.plan_reused) == ("", True)
    third = world.push(2, CONFIG.model_copy(update={"bucket_bytes": 1 << 20}))
    assert third.calls_per_engine < second.calls_per_engine
    assert third.changed == f"{second.way} -> {third.way}"
    world.engines[0].faults["/pause_generation"] = "hang"
    fourth = world.push(3, SHORT.model_copy(update={"bucket_bytes": 1 << 20}))
    assert (fourth.changed, fourth.plan_reused) == ("", False)
    assert [engine.identity.url for engine in fourth.fenced] == [world.engines[0].url]


def test_an_engine_nobody_configured_gets_no_traffic(world: World) -> None:
    """It may hold any version: a push, or the check that opens a step, takes it out of the gateway."""
    ours = sorted(engine.url for engine in world.engines)
    for act in (lambda: world.push(0), lambda: world.ensure(1)):
        world.gateway.answer("POST", "/workers", {"url": "http://127.0.0.1:9"})
        act()
        assert world.gateway.urls() == ours


@dataclass
class Foreign(FakeEngine):
    """Somebody else's engine: notes what it is shown, and lets everybody in."""

    shown: set[str | None] = field(default_factory=set)

    def lets_in(self, path: str, authorization: str | None) -> bool:
        self.shown.add(authorization)
        return True


def test_the_token_goes_to_our_engines_and_their_gateway_and_to_nobody_elses(world: World) -> None:
    foreign = Foreign()
    world.engines.append(foreign)
    world.trainer.engines[foreign.url] = foreign
    told = {"startup_time": {"load": foreign.startup}, "launch_command": "fake"}
    identity = EngineIdentity(url=foreign.url, incarnation=fleet.incarnation_of(told))
    membership.add_external(FleetLog(world.store), identity, "a person", "borrowed")
    record = world.push(0)
    assert [engine.state for engine in record.engines] == [EngineState.SERVING] * 3
    assert [engine.identity.external for engine in record.engines] == [False, False, True]
    assert foreign.shown == {None}
    assert world.gateway.keys == {engine.url: TOKEN for engine in world.engines[:2]} | {foreign.url: None}
    stored = b"".join(world.store.get(key) for key in world.store.list(""))
    assert TOKEN.encode() not in stored
    world.ensure(1)
    assert foreign.shown == {None}


@pytest.mark.parametrize("token", ["", "of-another-deployment"])
def test_a_pusher_that_a_door_does_not_know_is_refused_before_it_touches_an_engine(
    world: World, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token:
        show_token(monkeypatch, tmp_path, token)
    else:
        monkeypatch.delenv("RL360_TOKEN_FILE")
        monkeypatch.setenv("RL360_HOME", str(tmp_path / "none"))
    with pytest.raises(ServiceError, match=r"answered 401: .*name the file of its token in RL360_TOKEN_FILE"):
        world.push(0)
    for engine in world.engines:
        assert engine.process.poll() is None and not engine.paused
        assert {path for path, _ in engine.calls} <= {"/server_info", "/model_info", "/rl360/door"}
    assert fence.open_intents(world.store) == []
