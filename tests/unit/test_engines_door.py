"""The door around an engine's app: who may change it, when it generates, who has to show the token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from rl360.engines.client import EngineClient, EngineRefused
from rl360.engines.door import Door, Doorkeeper, Phase
from rl360.engines.pull import Puller
from rl360.errors import BadInput
from rl360.weights.delta import Held, SharedFolder, open_tensors, version_of, write_version
from rl360.weights.messages import TensorSpec

TOKEN = "token-of-the-door-tests"
FAR = ("10.1.2.3", 999)


@dataclass
class Engine:
    """Behind the door: notes every request that reaches it."""

    keeper: Doorkeeper
    reached: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'{"success": true}'})

    def http(self, client: tuple[str, int] = ("127.0.0.1", 5)) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=Door(self, self.keeper), client=client)  # type: ignore[arg-type]
        return httpx.AsyncClient(transport=transport, base_url="http://engine")

    def client(self, epoch: int | None = None, token: str | None = None) -> EngineClient:
        return EngineClient("http://engine", self.http(), 5.0, epoch, token)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def engine(folder: Path, *, strict: bool = False, token: str | None = None, **limits: Any) -> Engine:
    return Engine(Doorkeeper(Puller(folder / "weights", folder / "model"), strict=strict, token=token, **limits))


def run(call: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(call(), 20))  # type: ignore[arg-type]


async def generate(made: Engine, path: str = "/generate") -> httpx.Response:
    return await made.http().post(path, json={})


def test_without_epochs_it_is_as_if_there_were_no_door(folder: Path) -> None:
    made = engine(folder)

    async def go() -> None:
        client = made.client()
        await client.pause("retract")
        await client.set_weight_version("r1:1")
        await client.resume()
        assert (await generate(made)).status_code == 200
        assert (await client.door() or {})["epoch"] == 0

    run(go)
    assert made.reached == ["/pause_generation", "/update_weight_version", "/continue_generation", "/generate"]


def test_a_call_of_an_epoch_that_is_over_does_not_reach_the_engine(folder: Path) -> None:
    made = engine(folder)

    async def go() -> None:
        await made.client(7).set_weight_version("r1:2")
        old = made.client(6)
        acts: list[Awaitable[Any]] = [old.pause("abort"), old.update_from_disk("/x"), old.flush_cache()]
        acts += [old.admit("r1:1"), old.bar("old"), old.pull("/x", "r1:1", None, 5)]
        for act in acts:
            with pytest.raises(EngineRefused, match=r"answered 409.*epoch 6 is over: 7 has begun"):
                await act
        assert (await generate(made)).status_code == 200  # never admitted or barred: nobody governs when it generates

    run(go)
    assert made.reached == ["/update_weight_version", "/generate"]


def test_strict_refuses_until_admitted_and_again_when_a_later_push_changes_it(folder: Path) -> None:
    made = engine(folder, strict=True)

    async def go() -> None:
        for path in ("/generate", "/v1/chat/completions", "/v1/responses", "/a_route_of_a_later_sglang"):
            reply = await made.http().post(path, headers={"X-RL360-Epoch": "1"})
            assert (reply.status_code, reply.json()) == (
                503,
                {"error": "not serving: no push has admitted this engine yet"},
            )
        with pytest.raises(EngineRefused, match=r"409.*send its X-RL360-Epoch"):
            await made.client().pause("retract")
        push = made.client(3)
        await push.pause("retract")
        await push.set_weight_version("r1:1")
        assert (await generate(made)).status_code == 503
        assert await push.admit("r1:1")
        await push.resume()
        assert (await generate(made)).status_code == 200
        facts = await made.client().door() or {}
        assert (facts["epoch"], facts["admitted_version"], facts["phase"]) == (3, "r1:1", Phase.SERVING)
        await made.client(4).set_weight_version("r1:2#loading-4")  # without a pause: nothing waits
        assert (await generate(made)).json()["error"] == "not serving: epoch 4 is changing it"
        assert (await made.client().door() or {})["admitted_version"] is None

    run(go)
    assert made.reached.count("/generate") == 1


@pytest.mark.parametrize(
    ("end", "status"),
    [("admit", 200), ("bar", 503), ("resume", 503)],
)
def test_requests_that_meet_a_push_wait_for_its_end(folder: Path, end: str, status: int) -> None:
    made = engine(folder, strict=True)

    async def go() -> None:
        await made.client(1).admit("r1:1")
        push = made.client(2)
        await push.pause("retract")
        waiting = [asyncio.create_task(generate(made)) for _ in range(3)]
        await asyncio.sleep(0.02)
        await push.set_weight_version("r1:2#loading-2")
        waiting += [asyncio.create_task(generate(made)) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in waiting) and "/generate" not in made.reached
        if end == "admit":
            await push.admit("r1:2")
        elif end == "bar":
            await push.bar("the push failed")
        await push.resume()
        assert [(await task).status_code for task in waiting] == [status] * 6
        assert (await generate(made)).status_code == status

    run(go)
    # whatever was let in came after the admission; the one that nobody admitted got nothing in
    assert made.reached.count("/generate") == (7 if status == 200 else 0)


def test_what_waits_is_bounded_in_number_and_in_time_and_counted(folder: Path) -> None:
    made = engine(folder, strict=True, hold_requests=2, hold_s=0.15)

    async def go() -> None:
        assert (await generate(made)).headers["retry-after"] == "5"
        await made.client(1).admit("r1:1")
        push = made.client(2)
        await push.pause("retract")
        waiting = [asyncio.create_task(generate(made)) for _ in range(2)]
        await asyncio.sleep(0.02)
        assert (await made.client().door() or {})["waiting"] == 2
        surplus = await generate(made)
        assert (surplus.status_code, surplus.headers["retry-after"]) == (503, "5")
        told = "not serving: epoch 2 has paused it"
        assert surplus.json()["error"] == f"{told}, and 2 requests wait, the limit (--hold-requests)"
        for late in [await task for task in waiting]:
            assert (late.status_code, late.headers["retry-after"]) == (503, "5")
            assert late.json()["error"] == f"{told}; waited 0.15 s, the limit (--hold-s)"
        again = asyncio.create_task(generate(made))  # those that were refused hold no place
        await asyncio.sleep(0.02)
        await push.admit("r1:2")
        assert (await again).status_code == 200
        facts = await made.client().door() or {}
        assert facts["waiting"] == 0
        assert facts["counts"] == {"barred": 1, "held": 3, "too_many": 1, "too_long": 2}

    run(go)
    assert made.reached.count("/generate") == 1


async def _ask(door: Door, sent: asyncio.Queue[dict[str, Any]]) -> int:
    """A request whose client sends what is put into `sent`: the status of its answer."""
    answered: list[Any] = []

    async def send(message: Any) -> None:
        answered.append(message)

    scope = {"type": "http", "method": "POST", "path": "/generate", "client": ("127.0.0.1", 5), "headers": []}
    await door(scope, sent.get, send)  # type: ignore[arg-type]
    return int(answered[0]["status"])


def test_a_client_that_leaves_gives_up_its_place_and_what_stays_arrives_whole(folder: Path) -> None:
    made = engine(folder, strict=True, hold_requests=2)
    bodies: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            bodies.append(message["body"])
            if not message["more_body"]:
                break
        await made(scope, receive, send)

    async def go() -> None:
        await made.client(1).admit("r1:1")
        await made.client(2).pause("retract")
        sent: list[asyncio.Queue[dict[str, Any]]] = [asyncio.Queue(), asyncio.Queue()]
        tasks = [asyncio.create_task(_ask(Door(app, made.keeper), queue)) for queue in sent]
        for queue in sent:
            queue.put_nowait({"type": "http.request", "body": b"a", "more_body": True})
        await asyncio.sleep(0.02)
        assert made.keeper.waiting == 2
        sent[0].put_nowait({"type": "http.disconnect"})
        assert await asyncio.wait_for(tasks[0], 5) == 503
        assert (made.keeper.waiting, made.keeper.counts["left"]) == (1, 1)
        await made.client(2).admit("r1:2")
        sent[1].put_nowait({"type": "http.request", "body": b"b", "more_body": False})
        assert await asyncio.wait_for(tasks[1], 5) == 200

    run(go)
    assert bodies == [b"a", b"b"]


def test_what_a_push_asks_of_an_engine_that_is_not_admitted(folder: Path) -> None:
    """Where its memory lies, for RDMA: between the pause and the admission. Not of an epoch that is over."""
    made = engine(folder, strict=True)

    async def go() -> None:
        async def ask(epoch: int) -> int:
            url = "/remote_instance_transfer_engine_info?rank=0"
            return (await made.http().get(url, headers={"X-RL360-Epoch": f"{epoch}"})).status_code

        await made.client(1).pause("retract")
        assert await ask(1) == 200
        await made.client(1).admit("r1:1")
        await made.client(2).pause("retract")
        assert await asyncio.wait_for(ask(2), 5) == 200
        assert await ask(1) == 409

    run(go)


def test_what_generates_is_not_open(folder: Path) -> None:
    made = engine(folder, strict=True, token=TOKEN)

    async def go() -> None:
        told = {"Authorization": f"Bearer {TOKEN}"}
        assert (await made.http().get("/health_generate")).status_code == 401
        assert (await made.http().get("/health_generate", headers=told)).status_code == 503
        await made.client(1, TOKEN).admit("r1:1")
        assert (await made.http().get("/health_generate", headers=told)).status_code == 200
        assert (await made.http(FAR).get("/health")).status_code == 200

    run(go)


def test_a_push_may_leave_groups_while_the_engine_serves_and_no_later_one(folder: Path) -> None:
    """What a push made it may take down by name, before the admission and after it; an epoch that is over may not."""
    made = engine(folder, strict=True)

    async def go() -> None:
        push = made.client(3)
        assert await push.destroy_group("of-a-smaller-set")
        await push.admit("r1:1")
        assert await push.destroy_group("of-two")
        assert (await generate(made)).status_code == 200
        with pytest.raises(EngineRefused, match="epoch 2 is over"):
            await made.client(2).destroy_group("of-two")
        assert await made.client(4).destroy_group("of-two")
        assert (await generate(made)).json()["error"] == "not serving: epoch 4 is changing it"

    run(go)
    assert made.reached.count("/destroy_weights_update_group") == 3


def test_a_retry_holds_on_to_what_waits(folder: Path) -> None:
    made = engine(folder, strict=True)

    async def go() -> None:
        await made.client(1).admit("r1:1")
        await made.client(2).pause("retract")
        waiting = asyncio.create_task(generate(made))
        await asyncio.sleep(0.02)
        await made.client(3).pause("retract")  # the pusher of epoch 2 was killed
        with pytest.raises(EngineRefused, match="epoch 2 is over"):
            await made.client(2).resume()
        await made.client(3).admit("r1:2")
        assert (await waiting).status_code == 200

    run(go)


def test_the_token_and_who_needs_none(folder: Path) -> None:
    open_, strict, bare = (engine(folder, token=TOKEN), engine(folder, strict=True, token=TOKEN), engine(folder))
    strict.keeper.admit(_admit())
    good, bad = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer no"}

    async def status(made: Engine, path: str, headers: dict[str, str], client: Any) -> int:
        return (await made.http(client).post(path, headers=headers | {"X-RL360-Epoch": "9"})).status_code

    async def go() -> None:
        near = ("127.0.0.1", 4)
        for made, path, headers, client, expected in [
            (open_, "/flush_cache", {}, near, 200),
            (open_, "/flush_cache", bad, FAR, 401),
            (open_, "/flush_cache", good, FAR, 200),
            (open_, "/generate", {}, FAR, 401),
            (open_, "/generate", good, FAR, 200),
            (strict, "/generate", {}, near, 401),
            (strict, "/generate", good, near, 200),
            (open_, "/generate", {}, near, 200),
            (strict, "/flush_cache", {}, near, 401),
            (strict, "/flush_cache", bad, near, 401),
            (strict, "/rl360/bar", {}, near, 401),
            (strict, "/a_route_of_a_later_sglang", {}, near, 401),
            (strict, "/flush_cache", good, FAR, 200),
            (bare, "/generate", {}, ("::1", 4), 200),
            (bare, "/generate", {}, FAR, 401),
            (bare, "/flush_cache", good, FAR, 401),
        ]:
            assert await status(made, path, headers, client) == expected, (path, headers, client)
        for path in ("/ping", "/server_info", "/model_info", "/metrics", "/health"):
            assert (await strict.http(FAR).get(path)).status_code == 200

    run(go)
    assert "/a_route_of_a_later_sglang" not in strict.reached


def _admit() -> Any:
    from rl360.engines.door import AdmitBody

    return AdmitBody(epoch=9, version="r1:1")


@pytest.mark.parametrize("epoch", ["0", "-1", "x", "1.5", "9" * 20, ""])
def test_an_epoch_that_is_none_is_refused(folder: Path, epoch: str) -> None:
    made = engine(folder)
    reply = run(lambda: made.http().post("/flush_cache", headers={"X-RL360-Epoch": epoch}))
    assert reply.status_code == 400 and "a number from 1" in reply.json()["error"]
    assert made.reached == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rl360/admit", {"epoch": 1}, 400),
        ("/rl360/admit", {"epoch": 0, "version": "r1:1"}, 400),
        ("/rl360/bar", {"epoch": 1, "reason": "", "more": 1}, 400),
        ("/rl360/pull", {"epoch": 1, "folder": "relative", "version": "r1:1"}, 400),
        ("/rl360/pull", {"epoch": 1, "folder": "/none", "version": "../../etc"}, 400),
        ("/rl360/pull", {"epoch": 1, "folder": "/none", "version": "r1:1"}, 422),
        ("/rl360/pull", {"epoch": 1, "folder": "/none", "version": "r1:2", "base_version": "r1:1"}, 409),
        ("/rl360/other", {}, 404),
        ("/rl360/bar", {"epoch": 1, "reason": "x" * 70_000}, 413),
    ],
)
def test_bodies_are_checked(folder: Path, path: str, body: dict[str, Any], status: int) -> None:
    made = engine(folder)
    reply = run(lambda: made.http().post(path, content=orjson.dumps(body)))
    assert (reply.status_code, list(reply.json())) == (status, ["error"])
    assert made.keeper.facts()["phase"] == Phase.SERVING and made.reached == []


def test_a_web_socket_is_closed_where_a_request_is_refused(folder: Path) -> None:
    made = engine(folder, strict=True)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "client": ("127.0.0.1", 1)}
    run(lambda: Door(made, made.keeper)(scope, receive, send))
    assert sent[0]["type"] == "websocket.close" and "not serving" in sent[0]["reason"]
    assert made.reached == []


def test_an_engine_without_a_door_is_told_apart(folder: Path) -> None:
    async def bare(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b'{"detail":"Not Found"}'})

    async def go() -> None:
        client = EngineClient("http://e", httpx.AsyncClient(transport=httpx.ASGITransport(app=bare)), 5, epoch=1)
        assert await client.door() is None
        assert not await client.admit("r1:1") and not await client.bar("x")
        assert await client.pull("/f", "r1:1", None, 5.0) is None
        with pytest.raises(BadInput, match="give the client its epoch"):
            await EngineClient("http://e", httpx.AsyncClient(), 5).admit("r1:1")

    run(go)


def _weights(seed: int) -> dict[str, Held]:
    data = np.random.default_rng(seed).integers(0, 256, 96, dtype=np.uint8)
    return {"a": Held(TensorSpec(name="a", shape=(6, 8)), data)}


def test_a_pull_leaves_the_engine_serving_and_is_made_once(folder: Path) -> None:
    made = engine(folder, strict=True)
    first, second = _weights(1), _weights(2)
    write_version(SharedFolder(folder / "v1"), first, "r1:1")
    write_version(SharedFolder(folder / "v2"), second, "r1:2", first, "r1:1")

    async def go() -> str:
        push = made.client(1)
        told = await push.pull(str(folder / "v1"), "r1:1", None, 5.0)
        assert told is not None and version_of(Path(told.dir)) == "r1:1"
        await push.admit("r1:1")
        later = made.client(2)
        pulls = await asyncio.gather(*(later.pull(str(folder / "v2"), "r1:2", "r1:1", 5.0) for _ in range(4)))
        assert len({(each.dir, each.seconds) for each in pulls if each}) == 1  # joined, not made four times
        assert (await generate(made)).status_code == 200
        assert pulls[0] is not None
        return pulls[0].dir

    into = Path(run(go))
    assert open_tensors(into)["a"].data.tobytes() == second["a"].data.tobytes()
    assert (into / "config.json").read_text() == "{}"
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["r1-1", "r1-2"]
    # the next one needs neither the version before its base, nor what a killed pull left
    (folder / "weights" / ".r1-3.9-0123abcd").mkdir()
    (folder / "weights" / "my-model").mkdir()
    write_version(SharedFolder(folder / "v3"), first, "r1:3", second, "r1:2")
    run(lambda: made.client(3).pull(str(folder / "v3"), "r1:3", "r1:2", 5.0))
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["my-model", "r1-1", "r1-2", "r1-3"]
    made.keeper.admitted_version = "r1:2"
    run(lambda: made.client(3).pull(str(folder / "v3"), "r1:3", "r1:2", 5.0))
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["my-model", "r1-2", "r1-3"]


def test_a_directory_damaged_since_is_made_again(folder: Path) -> None:
    made = engine(folder)
    write_version(SharedFolder(folder / "v1"), _weights(1), "r1:1")
    told = run(lambda: made.client(1).pull(str(folder / "v1"), "r1:1", None, 5.0))
    shard = next(Path(told.dir).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    again = run(lambda: made.client(1).pull(str(folder / "v1"), "r1:1", None, 5.0))
    assert again.dir == told.dir
    assert open_tensors(Path(again.dir))["a"].data.tobytes() == _weights(1)["a"].data.tobytes()
