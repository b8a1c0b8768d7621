"""The trainer's HTTP and its client over a real socket: what may be tried again, and one answer for equal requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import pytest

from rl360.errors import (
    BadInput,
    CorruptObject,
    EngineChurn,
    ReplayMismatch,
    Rl360Error,
    ServiceError,
    StoreUnavailable,
)
from rl360.training.app import Commands, create_app
from rl360.training.client import TrainerClient, TrainerConflict
from rl360.training.director import Conflict, Director, UnknownRun
from tests.unit.sessions_server import serving

TOKEN = "a-token-of-the-trainer-tests"


class Scripted:
    """Stands where the director stands: `work` answers or raises."""

    def __init__(self) -> None:
        self.work: Callable[[], Any] = dict
        self.asked: list[str] = []

    @property
    def replica(self) -> Any:
        class Nowhere:
            at = None

        return Nowhere

    def open_run(self, run: str) -> Any:
        self.asked.append(run)
        return self.work()


@pytest.fixture
def trainer() -> Iterator[tuple[Scripted, str]]:
    director, commands = Scripted(), Commands()
    threading.Thread(target=_run, args=(commands,), daemon=True).start()
    with serving(create_app(cast(Director, director), commands, TOKEN, {"status": "ok"})) as url:
        yield director, url


def _run(commands: Commands) -> None:
    while True:
        commands.run_one()


def ask(url: str, token: str = TOKEN, count: int = 1, **options: Any) -> list[Any]:
    async def all_at_once() -> list[Any]:
        async with httpx.AsyncClient() as http:
            client = TrainerClient(url, http, {"Authorization": f"Bearer {token}"}, deadline_s=10.0)
            return await asyncio.gather(*(client.open_run("r1", **options) for _ in range(count)))

    return asyncio.run(all_at_once())


@pytest.mark.parametrize(
    ("raised", "found"),
    [
        (BadInput("x is 3, at most 2"), BadInput),
        (UnknownRun("no run 'r1'"), BadInput),
        (CorruptObject("r1/steps/0", "is damaged"), CorruptObject),
        (ReplayMismatch("replay of step 0 differs"), ReplayMismatch),
        (Conflict("the next step is 7"), TrainerConflict),
        (StoreUnavailable("store is away"), ServiceError),
        (EngineChurn("epoch 3 is over"), ServiceError),
        (ServiceError("cannot listen"), ServiceError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rl360Error) else value.__name__,
)
def test_an_error_arrives_as_what_it_is(
    trainer: tuple[Scripted, str], raised: Rl360Error, found: type[Rl360Error]
) -> None:
    director, url = trainer

    def work() -> Any:
        raise raised

    director.work = work
    with pytest.raises(Rl360Error) as error:
        ask(url)
    assert type(error.value) is found
    assert str(raised) in str(error.value) and "\n" not in str(error.value)
    director.work = lambda: {"version": 3}
    assert ask(url) == [{"version": 3}]  # it serves on


def test_another_token_is_refused_for_good_and_asks_nothing(trainer: tuple[Scripted, str]) -> None:
    director, url = trainer
    with pytest.raises(BadInput, match="401"):
        ask(url, token="another-token-entirely")
    assert director.asked == []
    assert httpx.get(f"{url}/health").json()["status"] == "ok"


def test_equal_requests_at_once_are_one_command(trainer: tuple[Scripted, str]) -> None:
    director, url = trainer
    gate = threading.Event()

    def work() -> Any:
        gate.wait(10)
        return {"version": 1}

    director.work = work
    threading.Timer(0.5, gate.set).start()
    assert ask(url, count=5) == [{"version": 1}] * 5
    assert director.asked == ["r1"]


def test_a_client_that_leaves_does_not_undo_the_work(trainer: tuple[Scripted, str]) -> None:
    director, url = trainer
    gate, done = threading.Event(), threading.Event()

    def work() -> Any:
        gate.wait(10)
        done.set()
        return {}

    director.work = work
    with pytest.raises(ServiceError, match="no answer within"):
        ask(url, deadline_s=0.2)
    gate.set()
    assert done.wait(5)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/steps/0", b"{"),
        ("PUT", "/steps/0", b'{"run": "r1", "batch_key": "k", "batch_digest": "short"}'),
        ("POST", "/runs/r1/export", b'{"dir": "relative"}'),
        ("POST", "/push/transfer", b'{"run": "r1"}'),
    ],
)
def test_a_bad_body_is_400_in_one_line(trainer: tuple[Scripted, str], method: str, path: str, body: bytes) -> None:
    reply = httpx.request(method, trainer[1] + path, content=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert reply.status_code == 400
    assert path in reply.json()["error"] and "\n" not in reply.json()["error"]
