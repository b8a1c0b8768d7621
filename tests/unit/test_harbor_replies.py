"""An attempt runs once and has one reply, whichever servers are asked for it and whenever each is killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from rl360.errors import CorruptObject
from rl360.harbor import app as app_module
from rl360.harbor import replies as module
from rl360.harbor.app import Attempts, FlushRequest
from rl360.harbor.protocol import RunReply
from rl360.harbor.replies import Replies
from rl360.store.layout import reply_key
from tests.unit.memory_store import MemoryStore
from tests.unit.mortal_servers import AGENTS, Host, Server, heard, request_of
from tests.unit.virtual_time import gate, run_virtual


def test_a_restarted_server_answers_what_it_answered(store: MemoryStore, ran: Counter[str]) -> None:
    async def go() -> None:
        server = Server(store, "one", ran)
        first = await heard(server, request_of("a"))
        server.kill()
        server.start()
        assert await heard(server, request_of("a", deadline_s=190.0)) == first
        assert await heard(server, request_of("a", base_url="http://other")) == "OtherRequest"
        assert await heard(Server(store, "two", ran), request_of("a")) == first, "on whatever server it lands"
        assert await heard(server, request_of("a", run="other")) != first

    run_virtual(go())
    assert ran == {"a": 2}
    assert sorted(store.objects) == [
        f"{run}/replies/a.json{part}" for run in ("demo", "other") for part in ("", ".claim")
    ]


def test_a_reply_is_stored_before_it_is_answered(store: MemoryStore, ran: Counter[str]) -> None:
    """The store is away when the attempt ends: nobody is told, and whoever asks later is told the same."""

    async def go() -> None:
        server = Server(store, "one", ran)
        asked = asyncio.create_task(heard(server, request_of("a")))
        await asyncio.sleep(1.0)
        store.down = True
        assert await asked == "StoreUnavailable"
        assert await heard(server, request_of("a")) == "StoreUnavailable"
        assert await heard(server, request_of("b")) == "StoreUnavailable"
        assert ran == {"a": 1}, "nothing is begun that could not be claimed"
        assert server.attempts.outcomes == {} and server.attempts._open == {}
        store.down = False
        said = await asyncio.gather(*(heard(server, request_of("a")) for _ in range(3)))
        assert said == [said[0]] * 3 and cast(RunReply, said[0]).detail == "ran to its end"
        assert server.attempts.outcomes == {"generation_error": 1}

    run_virtual(go())
    assert ran == {"a": 1}


def test_a_reply_that_waits_for_the_store_is_not_forgotten(
    store: MemoryStore, ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        monkeypatch.setattr(app_module, "IN_STORE", 1)
        server = Server(store, "one", ran)
        asked = asyncio.create_task(heard(server, request_of("a")))
        await asyncio.sleep(1.0)
        store.down = True
        assert await asked == "StoreUnavailable"
        store.down = False
        for name in "bc":
            assert isinstance(await heard(server, request_of(name)), RunReply)
        assert cast(RunReply, await heard(server, request_of("a"))).detail == "ran to its end"
        await server.attempts.replies.claim(request_of("d"))  # type: ignore[union-attr]
        lost = cast(RunReply, await server.attempts.replies.claim(request_of("d")))  # type: ignore[union-attr]
        assert lost.outcome == "sandbox_lost", "claimed in this life, and begun: it does not run twice"

    run_virtual(go())
    assert ran == {"a": 1, "b": 1, "c": 1}


def test_an_attempt_flushed_while_it_is_claimed_is_aborted(store: MemoryStore, ran: Counter[str]) -> None:
    async def go() -> None:
        one, two = Server(store, "one", ran), Server(store, "two", ran)
        runs = asyncio.create_task(heard(two, request_of("a")))
        await asyncio.sleep(1.0)
        asked = [asyncio.create_task(heard(one, request_of("a"))) for _ in range(2)]
        await asyncio.sleep(1.0)
        assert one.attempts.flush(FlushRequest(attempt_ids=["a"])) == 1
        said = [cast(RunReply, reply) for reply in await asyncio.gather(*asked, runs)]
        assert said == [said[0]] * 3 and said[0].outcome == "aborted" and one.attempts._open == {}
        assert one.attempts.outcomes == {"aborted": 1}

    run_virtual(go())


def test_a_flush_says_what_runs_elsewhere_and_there_it_is_ended(store: MemoryStore, ran: Counter[str]) -> None:
    async def go() -> float:
        loop = asyncio.get_running_loop()
        one, two = Server(store, "one", ran), Server(store, "two", ran)
        asked = [asyncio.create_task(heard(two, request_of("a")))]
        await asyncio.sleep(1.0)
        asked += [asyncio.create_task(heard(one, request_of(name))) for name in "ab"]
        await asyncio.sleep(1.0)
        which, began = FlushRequest(attempt_ids=["a", "b", "never"]), loop.time()
        assert one.attempts.flush(which) == 2 and one.attempts.elsewhere(which) == ["a", "never"]
        assert two.attempts.flush(which) == 1 and two.attempts.elsewhere(which) == ["b", "never"]
        said = [cast(RunReply, reply) for reply in await asyncio.gather(*asked)]
        assert {reply.outcome for reply in said} == {"aborted"} and said[0] == said[1]
        assert one.attempts.elsewhere(FlushRequest(run="demo")) == []
        return loop.time() - began

    assert run_virtual(go()) < 1.0, "it does not run to its end"


def test_a_running_attempt_whose_server_died_is_lost_once(store: MemoryStore, ran: Counter[str]) -> None:
    async def go() -> None:
        server, other = Server(store, "one", ran), Server(store, "two", ran)
        asked = asyncio.create_task(heard(server, request_of("a")))
        await asyncio.sleep(1.0)
        server.kill()
        assert await asked == "CancelledError"
        elsewhere = asyncio.create_task(heard(other, request_of("a")))
        await asyncio.sleep(1.0)
        server.start()
        said = [await heard(server, request_of("a")) for _ in range(2)]
        assert [cast(RunReply, reply).outcome for reply in said] == ["sandbox_lost"] * 2
        assert said == [await elsewhere] * 2, "who waited elsewhere is told the same"
        assert "sandbox server one ended under it" in cast(RunReply, said[0]).detail
        assert not cast(RunReply, said[0]).cleanup.confirmed and cast(RunReply, said[0]).retryable

    run_virtual(go())
    assert ran == {"a": 1}


def test_what_only_waited_when_the_server_died_is_run_by_its_next_life(store: MemoryStore, ran: Counter[str]) -> None:
    """No sandbox was begun for it, so nothing is lost, and no retry is spent."""

    async def go() -> None:
        server, other = Server(store, "one", ran, slots=1), Server(store, "two", ran)
        asked = [asyncio.create_task(heard(server, request_of(name))) for name in "abc"]
        await asyncio.sleep(1.0)
        server.kill()
        assert await asyncio.gather(*asked) == ["CancelledError"] * 3 and ran == {"a": 1}
        elsewhere = asyncio.create_task(heard(other, request_of("c")))
        await asyncio.sleep(1.0)
        server.start()
        said = [cast(RunReply, reply) for reply in await asyncio.gather(*(heard(server, request_of(n)) for n in "abc"))]
        assert [reply.outcome for reply in said] == ["sandbox_lost", "generation_error", "generation_error"]
        assert await elsewhere == said[2], "who waited elsewhere is told the same"
        server.kill()
        server.start()
        assert await heard(server, request_of("b")) == said[1]

    run_virtual(go())
    assert ran == {"a": 1, "b": 1, "c": 1}


def test_an_attempt_whose_beginning_cannot_be_written_has_not_begun(store: MemoryStore, ran: Counter[str]) -> None:
    async def go() -> None:
        server = Server(store, "one", ran, slots=1)
        asked = [asyncio.create_task(heard(server, request_of(name))) for name in "ab"]
        await asyncio.sleep(1.0)
        store.down = True
        assert await asyncio.gather(*asked) == ["StoreUnavailable"] * 2 and ran == {"a": 1}
        store.down = False
        assert cast(RunReply, await heard(server, request_of("b"))).detail == "ran to its end"

    run_virtual(go())
    assert ran == {"a": 1, "b": 1}


def test_a_claim_of_an_earlier_version_may_have_begun(store: MemoryStore, ran: Counter[str]) -> None:
    async def go() -> None:
        server = Server(store, "one", ran)
        await server.attempts.replies.claim(request_of("a"))  # type: ignore[union-attr]
        key = f"{reply_key('demo', 'a')}.claim"
        claim = orjson.loads(store.objects[key])
        del claim["turn"]
        store.objects[key] = orjson.dumps(claim)
        server.kill()
        server.start()
        assert cast(RunReply, await heard(server, request_of("a"))).outcome == "sandbox_lost"

    run_virtual(go())
    assert not ran


def test_a_server_that_never_comes_back_is_waited_for_as_long_as_the_attempt_may_take(
    store: MemoryStore, ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(module, "time", SimpleNamespace(time=loop.time))
        server, other = Server(store, "one", ran), Server(store, "two", ran)
        asked = asyncio.create_task(heard(server, request_of("a")))
        await asyncio.sleep(1.0)
        server.kill()
        await asked
        started = loop.time()
        lost = cast(RunReply, await heard(other, request_of("a")))
        assert lost.outcome == "sandbox_lost" and "no word of the sandbox server one" in lost.detail
        assert 200 < loop.time() - started < 300

    run_virtual(go())


def test_an_attempt_under_way_elsewhere_is_waited_for_and_not_run_twice(store: MemoryStore, ran: Counter[str]) -> None:
    async def go() -> None:
        servers = [Server(store, name, ran) for name in ("one", "two", "three")]
        said = await asyncio.gather(*(heard(server, request_of("a")) for server in servers * 2))
        assert said == [said[0]] * 6 and isinstance(said[0], RunReply)
        assert sum(server.attempts.outcomes.total() for server in servers) == 1, "counted where it ran"

    run_virtual(go())
    assert ran == {"a": 1}


def test_an_attempt_flushed_while_it_waits_is_aborted_for_good(store: MemoryStore, ran: Counter[str]) -> None:
    async def go() -> None:
        server = Server(store, "one", ran, slots=1)
        asked = [asyncio.create_task(heard(server, request_of(name))) for name in "ab"]
        await asyncio.sleep(1.0)
        assert server.attempts.flush(FlushRequest(attempt_ids=["b"])) == 1
        replies = await asyncio.gather(*asked)
        assert [cast(RunReply, reply).outcome for reply in replies] == ["generation_error", "aborted"]
        server.kill()
        server.start()
        assert await heard(server, request_of("b")) == replies[1]

    run_virtual(go())
    assert ran == {"a": 1}


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schema_version": 2, "reply": {}}', b'{"schema_version": 1}'])
def test_a_damaged_record_is_named(store: MemoryStore, data: bytes) -> None:
    replies = Replies(cast(Any, store), "one")
    key = reply_key("demo", "a")
    store.objects |= {key: data, f"{key}.claim": orjson.dumps({"schema_version": 1})}
    with pytest.raises(CorruptObject, match=r"demo/replies/a\.json"):
        run_virtual(replies.claim(request_of("a")))


def test_without_a_store_what_is_asked_again_and_not_known_is_lost(ran: Counter[str]) -> None:
    """It may have begun on a server that died: its session has its turns already."""

    async def go() -> None:
        attempts = Attempts(cast(Any, Host(ran)), gate(1), 1)
        lost = await attempts.submit(request_of("a", resent=True), "", AGENTS)
        assert lost.outcome == "sandbox_lost" and await attempts.submit(request_of("a"), "", AGENTS) == lost

    run_virtual(go())
    assert not ran


@pytest.mark.parametrize(
    ("run", "attempt", "key"),
    [
        ("demo", "s000000-g000-a00-t0", "demo/replies/s000000-g000-a00-t0.json"),
        ("", "a/../b", None),
        ("Demo", "a", None),
        ("demo", "\u00e9" * 200, None),
    ],
)
def test_keys_are_plain_and_of_one_attempt(run: str, attempt: str, key: str | None) -> None:
    found = reply_key(run, attempt)
    assert found == key or (key is None and ".." not in found and len(found) < 300 and found.isascii())
    assert len({reply_key(r, a) for r in (run, "other", "Other") for a in (attempt, "x", "X")}) == 9


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def ran() -> Counter[str]:
    return Counter()
