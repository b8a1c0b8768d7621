"""A fake fleet with its traffic and its pushers, and what must hold at every event that any of it sees.

`World.check` runs at each call that an engine or the gateway gets and at each write to the store: every event also
gives each running request one token, so that a token from weights that nobody confirmed cannot go by unseen. What is
found wrong is in `World.violations`. A push may be cancelled, or killed, at any of its points: each HTTP call and each
store call, before and after it. A killed one runs no clean-up: its calls never leave, its store never answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl360.config.run import PushConfig
from rl360.config.services import Services
from rl360.engines import fleet, membership
from rl360.engines.fleet import EngineState
from rl360.engines.launchers import local
from rl360.engines.processes import EndProof, ProcessTree, end_tree, host_id
from rl360.errors import CleanupUnconfirmed, EngineChurn, ServiceError, StoreUnavailable
from rl360.weights import ends, fence, push, receivers
from rl360.weights.messages import PushRecord, PushStatus
from tests.unit.fake_engines import show_token
from tests.unit.memory_store import MemoryStore
from tests.unit.push_fakes import RUN, TOKEN, Engine, Fault, Gateway, Request
from tests.unit.push_trainer import Trainer

REPEATABLE = (ServiceError, EngineChurn, StoreUnavailable)  # what a task tries again
HELD_S = 20.0
LETS_GO = {
    "/rl360/bar",
    "/abort_request",
    "/destroy_weights_update_group",
    "/end_weight_update",
    "/continue_generation",
}
BOUND_S = 120.0  # no push of a few engines takes longer, whatever goes wrong, on a busy machine too

_PUSHER: ContextVar[Pusher] = ContextVar("pusher")
_ENGINES: dict[str, Engine] = {}  # by URL, of all worlds: where `tree_of_url` looks


class Killed(Exception):
    """The process of a push is gone: what it waits for never comes."""


class Pusher:
    """One process that pushes. `cancel_at`, `die_at`: number of the point where that happens. `hold_at`: where it is
    held until `go`. `host`: where it runs, when that is not here; what runs elsewhere nobody knows."""

    def __init__(self, world: World, cancel_at: int = 0, die_at: int = 0, hold_at: int = 0, host: str = "") -> None:
        self.hold_at, self.host = hold_at, host or host_id()
        self.holding, self.go = asyncio.Event(), threading.Event()
        self.owns, self.met = set[str](), set[int]()  # tokens of its owners; epochs that its last listing showed
        self.world, self.cancel_at, self.die_at = world, cancel_at, die_at
        self.points = 0
        self.dead = asyncio.Event()
        self.task: asyncio.Task[PushRecord | None] | None = None
        self.loop = asyncio.get_running_loop()
        self.gone = False

    def point(self) -> None:
        """Called from the event loop, and from threads that use the store."""
        self.points += 1
        if self.points == self.cancel_at and self.task is not None:
            self.loop.call_soon_threadsafe(self.task.cancel)
        if self.points == self.die_at:
            self.gone = True
            self.loop.call_soon_threadsafe(self.dead.set)

    def held(self) -> None:
        """Blocks while it is to stand still here."""
        if self.points == self.hold_at and not self.go.is_set():
            self.loop.call_soon_threadsafe(self.holding.set)
            self.go.wait(HELD_S)


class _PushStore:
    """The store as one pusher sees it."""

    bucket = "test"

    def __init__(self, pusher: Pusher) -> None:
        self.pusher, self.world = pusher, pusher.world

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.world.store, name)

        def through(*args: Any) -> Any:
            self.pusher.point()
            self.pusher.held()
            if self.pusher.gone:
                raise Killed
            if self.world.fault("store", name):
                raise StoreUnavailable(f"object store did not answer while asked for {args[0]}")
            result = call(*args)
            if name == "list" and args[0] == "_fleet/push/":
                self.pusher.met = {int(key.split("/")[2]) for key in result if key.endswith("/intent.json")}
            if name.startswith("put"):
                self.pusher.loop.call_soon_threadsafe(self.world.event, f"store {name} {args[0]}")
            self.pusher.point()
            self.pusher.held()
            if self.pusher.gone:
                raise Killed
            return result

        return through


class _Wire(httpx.AsyncHTTPTransport):
    """The HTTP of one pusher."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pusher = _PUSHER.get()
        pusher.point()
        if pusher.points == pusher.hold_at:
            await asyncio.to_thread(pusher.held)
        pusher.world.check_taken_out(pusher, request)
        if pusher.gone:
            await asyncio.Event().wait()
        response = await super().handle_async_request(request)
        pusher.point()
        if pusher.points == pusher.hold_at:
            await asyncio.to_thread(pusher.held)
        if pusher.gone:
            await asyncio.Event().wait()
        return response


@contextlib.contextmanager
def wired() -> Iterator[None]:
    """Product code sees the fakes' processes, and pushers' HTTP can be cut off; the gateway's patience is short."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        show_token(patch, Path(folder), TOKEN)
        patch.setattr(fleet, "tree_of_url", _tree)
        patch.setattr(push, "tree_of_url", _tree)
        patch.setattr(push, "open_http", lambda: httpx.AsyncClient(transport=_Wire(verify=False)))
        for module in (push, ends, local):
            patch.setattr(module, "end_tree", _watched_end)
        patch.setattr(fence, "new_owner", _owner_here)
        patch.setattr(fence, "owner_runs", _runs_here)
        patch.setattr(push, "GATEWAY_DEADLINE_S", 1.5)
        patch.setattr(receivers, "GATEWAY_DEADLINE_S", 1.5)
        yield


def _tree(url: str) -> ProcessTree | None:
    return _ENGINES[url].tree() if url in _ENGINES else None


_new_owner, _owner_runs = fence.new_owner, fence.owner_runs


def _owner_here() -> fence.Owner:
    owner, pusher = _new_owner(), _PUSHER.get()
    pusher.owns.add(owner.token)
    return owner.model_copy(update={"host": pusher.host})


def _runs_here(owner: fence.Owner) -> bool:
    return owner.host == _PUSHER.get().host and _owner_runs(owner.model_copy(update={"host": host_id()}))


async def _watched_end(tree: ProcessTree | None, deadline_s: float) -> EndProof:
    pusher = _PUSHER.get()
    for engine in pusher.world.engines:
        if tree is not None and engine.alive and engine.root == tree.root:
            pusher.world.check_met(pusher, engine.url, "ends")
    return await end_tree(tree, deadline_s)


class World:
    """Everything around the push code. `remote`: names of engines whose processes nobody here can see."""

    def __init__(
        self,
        model_dir: Path,
        seed: int = 0,
        engines: int = 3,
        remote: tuple[str, ...] = (),
        late: tuple[str, ...] = (),
        doors: bool = True,
        pause_mode: str = "retract",
        deadline_s: float = 0.25,
    ) -> None:
        self.rng = random.Random(seed)
        self.deadline_s = deadline_s
        self.config = PushConfig.model_validate(
            {"call_deadline_s": deadline_s, "deadline_s": 60, "bucket_bytes": 1024, "pause_mode": pause_mode}
        )
        self.model_dir = model_dir
        self.salted = True
        self.events, self.log, self.violations = 0, list[str](), list[str]()
        self.store = MemoryStore()
        self.gateway = Gateway(self)
        self.trainer = Trainer(self)
        self.engines = [Engine(self, f"e{n}", local=f"e{n}" not in remote, has_door=doors) for n in range(engines)]
        self.doors = doors
        self.late = late
        self.urls: list[str] = []  # as configured: only ever added to, and one may be there twice
        self.session_version = ""
        self.faults: list[Fault] = []
        self.at: dict[int, Callable[[], Any]] = {}  # number of an event from now -> what happens then
        self.calls_until: dict[str, list[Any]] = {}
        self.pusher: Pusher | None = None
        self.rivals = False  # several push at once
        self.seen: Counter[tuple[str, str]] = Counter()
        self.reached = set[str]()  # engines that a call of a push came to
        self.attempt_number = self.touched = self.changed = self.touched_before = self.points_of_a_push = 0
        self.push_began = 0  # the event
        self.hung: list[asyncio.Task[Any]] = []
        self.over = asyncio.Event()
        self.intents: dict[int, fence.Intent] = {}
        self.ends: dict[int, PushRecord] = {}

    # -- life ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """Started: gateway, engines, and one push that nothing disturbs."""
        try:
            await self.gateway.listen()
            for engine in self.engines:
                await engine.start()
                _ENGINES[engine.url] = engine
                self.urls.append(engine.url)
                if engine.name in self.late:
                    engine.die()
            yield self
        finally:
            self.over.set()
            for engine in self.engines:
                engine.die()
                _ENGINES.pop(engine.url, None)
            self.gateway.hang_up()
            for task in [*self.hung, *self.trainer.tasks]:
                task.cancel()
            for server in (self.gateway, *self.engines):
                for task in list(server.tasks):
                    task.cancel()
            if self.hung:
                await asyncio.wait(self.hung, timeout=5.0)

    async def join(self, name: str) -> Engine:
        """Another engine, at an URL that is configured from now on."""
        engine = Engine(self, name, has_door=self.doors)
        await engine.start()
        _ENGINES[engine.url] = engine
        self.engines.append(engine)
        self.urls.append(engine.url)
        return engine

    @property
    def services(self) -> Services:
        return Services(
            home="-",
            prefect_api_url="-",
            prefect_ui_url="-",
            s3_endpoint="-",
            s3_bucket="-",
            gateway_url=self.gateway.url,
            engine_urls=self.urls,
            session_urls=["-"],
            sandbox_urls=["-"],
            trainer_url="-",
            model_dir=str(self.model_dir),
        )

    def engine(self, url: str) -> Engine:
        return next(engine for engine in self.engines if engine.url == url)

    # -- what happens --------------------------------------------------------------------------------------------

    def fault(self, target: str, path: str) -> str:
        """The kind of fault that strikes this call, "" for none."""
        self.seen[target, path] += 1
        number = self.seen[target, path]
        for fault in self.faults:
            here = (fault.target, fault.path, fault.nth) == (target, path, number)
            if here and fault.attempt in (0, self.attempt_number):
                self.say(f"fault {target} {path} #{number}: {fault.kind}")
                return fault.kind
        return ""

    def arm(self, *faults: Fault) -> None:
        """Faults from now on; calls are counted from here."""
        self.faults = list(faults)
        self.seen.clear()

    def say(self, line: str) -> None:
        self.log.append(f"{self.events:4} {line}")

    def violate(self, what: str) -> None:
        self.say(f"VIOLATION {what}")
        self.violations.append(f"event {self.events}: {what}")

    def event(self, line: str = "") -> None:
        """Something was seen: traffic goes on, and everything is checked."""
        self.events += 1
        if line:
            self.say(line)
        for path, left in list(self.calls_until.items()):
            left[0] -= f" {path}" in line
            if left[0] <= 0:
                del self.calls_until[path]
                self.at[self.events] = left[1]
        for number in [number for number in self.at if number <= self.events]:
            act = self.at.pop(number)()
            if asyncio.iscoroutine(act):
                self.gateway.spawn(act)
        for engine in self.engines:
            engine.buried()
        serving = [self.engine(url) for url in self.gateway.urls()]
        if serving and self.session_version and self.rng.random() < 0.4:
            chosen = self.rng.choice(serving)
            if chosen.well:
                chosen.requests.append(Request(self.session_version, self.rng.randint(1, 12)))
        self.check()

    def soon_after(self, path: str, calls: int, act: Callable[[], Any]) -> None:
        """`act` once so many calls of `path` were seen from now on."""
        self.calls_until[path] = [calls, act]

    def kill_pusher(self) -> None:
        """The process of the push that runs now is gone."""
        assert self.pusher is not None
        self.pusher.gone = True
        self.pusher.dead.set()

    def soon(self, events: int, act: Callable[[], Any]) -> None:
        """`act` once so many more events were seen."""
        self.at[self.events + events] = act

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        for engine in self.engines:
            real = engine.alive and engine.version.startswith(f"{RUN}:") and "#" not in engine.version
            if real and engine.version != engine.content:
                self.violate(f"{engine.name} is called {engine.version} and holds {engine.content}")
            engine.generate()

    def read_store(self) -> None:
        for key in self.store.list("_fleet/push/"):
            epoch, name = int(key.split("/")[2]), key.split("/")[3]
            if name == "intent.json" and epoch not in self.intents:
                self.intents[epoch] = fence.Intent.model_validate_json(self.store.get(key))
            if name == "end.json" and epoch not in self.ends:
                self.ends[epoch] = PushRecord.model_validate_json(self.store.get(key))

    def unended(self) -> list[fence.Intent]:
        self.read_store()
        return [intent for epoch, intent in self.intents.items() if epoch not in self.ends]

    def check_met(self, pusher: Pusher, url: str, does: str) -> None:
        """An engine is ended, or taken out of the gateway: no intent names it that this pusher has not met."""
        objects = dict(self.store.objects)  # it is asked from threads
        open_epochs = {int(key.split("/")[2]) for key in objects if key.endswith("/intent.json")}
        intents = [fence.Intent.model_validate_json(objects[fence.intent_key(epoch)]) for epoch in sorted(open_epochs)]
        if any(intent.owner.token in pusher.owns for intent in intents):
            return  # it has met all that came before its own
        for intent in intents:
            unmet = intent.epoch not in pusher.met and fence.end_key(intent.epoch) not in objects
            if unmet and url in {engine.url for engine in intent.engines}:
                self.violate(f"a pusher {does} {self.engine(url).name}, which epoch {intent.epoch} has, unmet")

    def check_taken_out(self, pusher: Pusher, request: httpx.Request) -> None:
        if request.method == "DELETE":
            row = self.gateway.workers.get(request.url.path.rpartition("/")[2])
            if row is not None and row["status"] == "ready":
                self.check_met(pusher, row["url"], "takes out")

    def check_touch(self, engine: Engine, path: str, epoch: int) -> None:
        """A push changes something on an engine: its intent names it; receivers of earlier ones are accounted for."""
        self.touched += 1
        self.reached.add(engine.name)
        self.changed += path not in LETS_GO
        self.read_store()
        newest = epoch if self.rivals else max(self.intents, default=0)
        if newest not in self.intents or (newest in self.ends and not self.rivals):
            self.violate(f"{path} to {engine.name} without an open intent")
            return
        named = {(e.url, e.incarnation) for e in self.intents[newest].engines}
        if engine.url not in {url for url, _ in named}:
            self.violate(f"{path} to {engine.name}, which epoch {newest} does not name")
        if path in LETS_GO:
            return  # a refused push lets those go that answer; it writes nothing
        for epoch, intent in self.intents.items():
            ended = self.ends.get(epoch)
            if epoch >= newest or (ended is not None and ended.status is not PushStatus.SUPERSEDED):
                continue
            for old in intent.engines:
                living = self.engine(old.url)
                if (
                    living.alive
                    and living.incarnation == old.incarnation
                    and (old.url, old.incarnation) not in named
                    and not fence.is_gone_confirmed(self.store, old)
                ):
                    self.violate(f"epoch {newest} touches {engine.name} while {living.name} of epoch {epoch} lives")

    def check_end(self, outcome: PushRecord | BaseException | None, before: list[fence.Intent]) -> None:
        """After a push that was not killed; `before` were unfinished when it began, and may still be."""
        self.read_store()
        old = {intent.epoch for intent in before}
        noted = {
            note.identity.url for intent in self.unended() for note in fence.read_unconfirmed(self.store, intent.epoch)
        }
        if not isinstance(outcome, CleanupUnconfirmed):  # else its living receivers are let go before it is refused
            noted |= {engine.url for intent in self.unended() if intent.epoch in old for engine in intent.engines}
        # whom a person declared gone is nobody's to wake
        noted |= {e.url for e in self.engines if self.store.exists(fence.gone_key(e.url, e.incarnation))}
        for engine in self.engines:
            if not engine.well or engine.url in noted or self.restarted_under(engine):
                continue
            if engine.paused:
                self.violate(f"{engine.name} was left paused")
            if engine.session:
                self.violate(f"{engine.name} was left in an update session")
        # one that was cancelled before it touched anything, or when all was confirmed, has nothing to release
        left = [i.epoch for i in self.unended() if i.epoch not in old and not self.all_hold(i)]
        excused = noted or isinstance(outcome, (CleanupUnconfirmed, StoreUnavailable))
        excused = excused or "StoreUnavailable" in "".join(getattr(outcome, "__notes__", ()))  # the end was not written
        if left and self.touched > self.touched_before and not excused:
            self.violate(f"epochs {left} have no end after {outcome!r}")
        if isinstance(outcome, PushRecord):
            self.check_record(outcome)

    def restarted_under(self, engine: Engine) -> bool:
        """It began under the push and is no receiver: what was meant for the one before it may have reached it, so
        that it stays paused, but it gets nothing to generate. The next push has it."""
        named = {(old.url, old.incarnation) for intent in self.intents.values() for old in intent.engines}
        if engine.began < self.push_began or (engine.url, engine.incarnation) in named:
            return False
        self.check_kept_out(engine)
        return True

    def check_kept_out(self, engine: Engine) -> None:
        if engine.url in self.gateway.urls() or engine.door.facts()["admitted_version"] is not None:
            self.violate(f"{engine.name} restarted under the push, and is admitted or gets traffic")

    def all_hold(self, intent: fence.Intent) -> bool:
        engines = [self.engine(engine.url) for engine in intent.engines]
        return all(engine.version == engine.content == intent.version for engine in engines if engine.well)

    def check_record(self, record: PushRecord) -> None:
        """What it says is so."""
        if record.status is not PushStatus.CONFIRMED or not record.serving:
            self.violate(f"a push returned a record of status {record.status}")
        # what a step returns again is its first record; the engines follow the newest push
        last = fence.last_record(self.store)
        newest = last if last is not None and last.version == record.version else record
        serving = {engine.identity.url for engine in newest.serving}
        if not set(self.gateway.urls()) <= serving:
            self.violate(f"the gateway sends to {self.gateway.urls()}, confirmed are {sorted(serving)}")
        for held in newest.serving:
            engine = self.engine(held.identity.url)
            if engine.incarnation != held.identity.incarnation:  # it restarted after the last look at it
                self.check_kept_out(engine)
                if engine.looked_at:
                    self.violate(f"{engine.name} restarted, was looked at, and the record says that it serves")
                continue
            if engine.well and (engine.version, engine.content) != (record.version, record.version):
                self.violate(f"{engine.name} holds {engine.content} as {engine.version}, recorded is {record.version}")
            if engine.well and not engine.read_back:
                self.violate(f"the checksum of {engine.name} was not read back")
        if record.path != self.config.transport:
            self.violate(f"the record says {record.path}")
        if record.rounds and record.calls_per_engine != self.trainer.plans[-1].calls_per_engine:
            self.violate(f"the record says {record.calls_per_engine} calls per engine")

    # -- acts ----------------------------------------------------------------------------------------------------

    async def push(
        self, step: int, *, ensure: bool = False, cancel_at: int = 0, die_at: int = 0, deadline_s: float = 0.0
    ) -> PushRecord | BaseException | None:
        """One call of the push code, for the weights after `step`: its record, its error, or `Killed`."""
        version = f"{RUN}:{step + 1}"
        self.trainer.version = version
        self.attempt_number += 1
        pusher = self.pusher = Pusher(self, cancel_at, die_at)
        config = self.config.model_copy(update={"call_deadline_s": deadline_s or self.deadline_s})

        async def work() -> PushRecord | None:
            _PUSHER.set(pusher)
            store: Any = _PushStore(pusher)
            if ensure:
                return await push.ensure_weights(store, self.services, RUN, version, self.trainer, config)
            return await push.push(store, self.services, RUN, step, version, self.trainer, config)

        self.say(f"push of {version}, attempt {self.attempt_number}")
        before = self.unended()
        self.touched_before, self.push_began = self.touched, self.events
        task = pusher.task = asyncio.get_running_loop().create_task(work())
        dead = asyncio.get_running_loop().create_task(pusher.dead.wait())
        await asyncio.wait({task, dead}, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        outcome: PushRecord | BaseException | None
        if pusher.gone:
            await asyncio.wait({task}, timeout=0.01)
            self.hung.append(task)
            for intent in self.unended():
                fence.mark_running(intent.owner, False)
            outcome = Killed()
        elif not task.done():
            self.hung.append(task)
            self.violate(f"the push did not end within {BOUND_S:g} s")
            outcome = Killed()
        elif task.cancelled():
            outcome = asyncio.CancelledError()
        else:
            outcome = task.exception() or task.result()
        self.points = pusher.points
        self.say(f"push ended: {type(outcome).__name__} {str(outcome)[:300] if isinstance(outcome, Exception) else ''}")
        self.event()
        if not isinstance(outcome, Killed):
            self.check_end(outcome, before)
        if isinstance(outcome, PushRecord) and outcome.status is PushStatus.CONFIRMED:
            self.session_version = outcome.version
        return outcome

    async def push_until_done(self, step: int, tries: int = 5, **more: Any) -> PushRecord | BaseException | None:
        """As a task does: what may be repeated is, the rest is returned. Faults that kill a pusher strike once."""
        outcome: PushRecord | BaseException | None = None
        self.attempt_number = 0
        for _ in range(tries):
            outcome = await self.push(step, **more)
            more.pop("die_at", None), more.pop("cancel_at", None)
            if not isinstance(outcome, (*REPEATABLE, Killed, asyncio.CancelledError)):
                break
        return outcome

    def confirm_gone(self, engine: Engine) -> None:
        membership.confirm_gone(self.store, engine.url, "ended by hand", "someone")

    def states(self, record: PushRecord) -> dict[str, EngineState]:
        return {self.engine(engine.identity.url).name: engine.state for engine in record.engines}
