"""Transports "disk_full" and "disk_delta": the trainer writes a version's files once, each engine's host fetches them.

`prepare` is called before the pause: it writes the files (rl360.weights.delta) into the plan's folder and has every
engine's door fetch, check and apply them while the engine still serves. `transfer` then only tells the engines to load;
what `prepare` did not bring there is fetched first, and said. An engine that lacks the base of a delta fetches every
tensor, as do all when this trainer does not hold the base (it restarted): also said, in the `note` of the engine.
The base is this process's own copy of what it wrote last, so a delta costs one more copy of the model in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl360.engines.client import EngineRefused, open_http
from rl360.errors import BadInput, ServiceError, StoreUnavailable
from rl360.weights.checksum import raw_bytes, tensor_specs
from rl360.weights.delta import Files, Held, StoreFolder, Weights, open_folder, write_version
from rl360.weights.messages import PushPlan, TransferReport, Transport
from rl360.weights.transports.common import (
    Engine,
    Loop,
    Tensors,
    Turn,
    carrying,
    check_tensors_held,
    end_update,
    leave_group,
    receivers_of,
    recorded,
    report_of,
    settle,
)

log = logging.getLogger("rl360.weights")

_BASE_MISSING = 409  # what a door answers
_SLOWEST_BYTES_S = 10e6  # a pull before the pause may take as long as this rate needs


@dataclass
class _Fetch:
    """What one engine fetched for one push."""

    dir: str = ""
    notes: list[str] = field(default_factory=list)
    calls: int = 0
    whole: bool = False  # every tensor, not a difference


@dataclass
class _Round:
    """One push of this transport: its files, and who has them. `base_version`: what the engines are to apply it to."""

    epoch: int
    version: str
    weights: Weights
    base: Weights | None
    base_version: str | None
    files: dict[str | None, int] = field(default_factory=dict)  # base version (null: all tensors) -> bytes
    fetched: dict[str, _Fetch] = field(default_factory=dict)  # by engine URL
    notes: list[str] = field(default_factory=list)

    def of(self, engine: Engine) -> _Fetch:
        return self.fetched.setdefault(engine.url, _Fetch())


class DiskTransport:
    """Both of them. It needs no groups: `address` and `deliver` are not used."""

    def __init__(self, address: str = "", turn: Turn | None = None, deliver: object = None) -> None:
        self._turn = turn or Turn()
        self._round: _Round | None = None
        self._kept: dict[str, Weights] = {}  # version -> copy of what was written as it
        self._written: dict[str, list[Files]] = {}  # plan folder -> what is in it

    def prepare(self, plan: PushPlan, tensors: Tensors) -> None:
        """Write the files and have the engines fetch them. One that fails here is tried again by
        `transfer`; when all refuse, the push ends before anything is paused (`ServiceError`)."""
        with self._turn.taken(plan):
            now = self._begin(plan, tensors)
            deadline_s = plan.call_deadline_s + max(now.files.values()) / _SLOWEST_BYTES_S
            with _receivers(plan) as (loop, engines):
                self._fetch(plan, now, loop, engines, deadline_s)
        failed = [engine for engine in engines if engine.error]
        if len(failed) == len(engines) and all(engine.answered for engine in failed):
            raise ServiceError(f"push of {plan.version}: no engine can fetch its files: {failed[0].error}")
        for engine in failed:
            log.warning("before the pause: %s", engine.error)

    def transfer(self, plan: PushPlan, tensors: Tensors) -> TransferReport:
        """Have every engine load the files."""
        began = time.monotonic()
        with self._turn.taken(plan):
            now = self._begin(plan, tensors)
            with _receivers(plan) as (loop, engines):
                late = [engine for engine in engines if not now.of(engine).dir]
                self._fetch(plan, now, loop, late, plan.call_deadline_s)
                for engine in late:
                    now.of(engine).notes.append("fetched inside the pause")

                async def load(engine: Engine) -> None:
                    if plan.stale_groups:  # of a push by another transport that left no end
                        await _leave(engine, plan.stale_groups)
                    await carrying(engine, engine.client.update_from_disk(now.of(engine).dir))

                _everywhere(loop, [e for e in engines if not e.error], load, plan.call_deadline_s)
        reports = []
        for engine in engines:
            fetched = now.of(engine)
            engine.calls, fetched.calls = engine.calls + fetched.calls, 0
            note = "; ".join([*now.notes, *fetched.notes])
            reports.append(engine.report().model_copy(update={"note": note, "whole": fetched.whole}))
        failed = [engine.url for engine in engines if engine.error]
        error = f"files did not reach {', '.join(failed)}" if failed else ""
        return report_of(plan, reports, began=began, sent_bytes=sum(now.files.values()), reused=False, error=error)

    def close(self) -> None:
        """Nothing is open; the copies are dropped."""
        self._kept.clear()
        self._round = None

    def _begin(self, plan: PushPlan, tensors: Tensors) -> _Round:
        """This push's round. Its files are written when it returns."""
        now = self._round
        if now is not None and (now.epoch, now.version) == (plan.engine_set.epoch, plan.version):
            return now
        if plan.folder is None:
            raise BadInput(f"push of {plan.version} by {plan.transport}: the plan names no folder")
        check_tensors_held(plan.tensors, tensors)
        specs = {spec.name: spec for spec in tensor_specs(tensors)}
        weights = {
            name: Held(specs[name], np.array(np.frombuffer(raw_bytes(tensor), np.uint8)))
            for name, tensor in tensors.items()
        }
        wanted = plan.base_version if plan.transport is Transport.DISK_DELTA else None
        base = self._kept.get(wanted) if wanted is not None else None
        now = _Round(plan.engine_set.epoch, plan.version, weights, base, wanted if base is not None else None)
        if plan.transport is Transport.DISK_DELTA and base is None:
            now.notes.append(f"all tensors: this trainer holds no base {wanted}")
        self._sweep(plan.folder)
        self._write(plan, now, now.base_version)
        self._kept = ({wanted: base} if wanted is not None and base is not None else {}) | {plan.version: weights}
        self._round = now
        return now

    def _write(self, plan: PushPlan, now: _Round, base_version: str | None) -> None:
        """Once a version and base: `now.files` says what is there."""
        if base_version in now.files:
            return
        files = open_folder(_folder(plan, base_version))
        base = None if base_version is None else now.base
        now.files[base_version] = write_version(files, now.weights, plan.version, base, base_version).size_bytes
        self._written.setdefault(str(plan.folder), []).append(files)

    def _sweep(self, folder: str) -> None:
        """Delete what was written for older versions of the run, but for the last one's; at this process's first push
        also what an earlier process left. Engines fetch a version while it is pushed and keep copies of their own."""
        if not self._written:
            try:
                self._written = {each: [open_folder(each)] for each in _older(folder)}
            except (StoreUnavailable, OSError) as error:
                log.warning("older versions beside %s are not looked for: %s", folder, error)
        old = [each for each in self._written if each != folder]
        for each in old[:-1]:
            try:
                for files in self._written[each]:
                    files.delete_all()
            except (StoreUnavailable, OSError) as error:
                log.warning("files of an older version stay in %s: %s", each, error)
            del self._written[each]

    def _fetch(self, plan: PushPlan, now: _Round, loop: Loop, engines: list[Engine], deadline_s: float) -> None:
        """Have the hosts fetch: the delta where there is one, every tensor where its base is missing."""
        lacking: list[Engine] = []

        async def one(engine: Engine, base_version: str | None) -> None:
            now.of(engine).calls += 1
            try:
                pulled = await engine.client.pull(_folder(plan, base_version), plan.version, base_version, deadline_s)
            except EngineRefused as error:
                if base_version is None or error.status != _BASE_MISSING:
                    raise
                lacking.append(engine)
                now.of(engine).notes.append(f"all tensors: {error}")
                return
            if pulled is None:
                raise EngineRefused(f"engine {engine.url} has no door to fetch files: use another transport", 404)
            now.of(engine).dir, now.of(engine).whole = pulled.dir, base_version is None

        _everywhere(loop, engines, lambda engine: one(engine, now.base_version), deadline_s)
        if lacking:
            self._write(plan, now, None)
            _everywhere(loop, lacking, lambda engine: one(engine, None), deadline_s)


@contextmanager
def _receivers(plan: PushPlan) -> Iterator[tuple[Loop, list[Engine]]]:
    with Loop() as loop:
        http = open_http()
        try:
            yield loop, receivers_of(plan, http)
        finally:
            loop.start(http.aclose()).result(timeout=10)


def _everywhere(
    loop: Loop, engines: list[Engine], call: Callable[[Engine], Awaitable[None]], deadline_s: float
) -> None:
    """The same call to every engine at once; failures are in their records."""
    settle([loop.start(recorded(engine, call(engine))) for engine in engines], engines, deadline_s)


async def _leave(engine: Engine, groups: tuple[str, ...]) -> None:
    for name in groups:
        await leave_group(engine, name)
    try:
        await end_update(engine)
    except EngineRefused as error:
        if "no weight-update session" not in str(error):
            raise


def _older(folder: str) -> list[str]:
    """Folders of the run's earlier versions, which lie beside this one under their numbers; oldest first."""
    above, _, number = folder.rstrip("/").rpartition("/")
    beside = open_folder(above)
    if isinstance(beside, StoreFolder):
        names = beside.store.list_folders(beside.prefix)
    else:
        names = [path.name for path in Path(above).glob("*") if path.is_dir()]
    return [
        f"{above}/{name}" for name in sorted(names) if name.isdecimal() and len(name) == len(number) and name < number
    ]


def _folder(plan: PushPlan, base_version: str | None) -> str:
    """Where a version's files are: all of it and each difference have a folder of their own."""
    return f"{str(plan.folder).rstrip('/')}/" + ("full" if base_version is None else base_version.replace(":", "-"))
