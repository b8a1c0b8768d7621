"""`rl360 fleet`: what it calls each engine, and when a person's word is taken."""

from __future__ import annotations

import time

import pytest

from rl360.commands.fleet import describe, engine_state, find_engine, known_engines, print_status
from rl360.config.services import Services
from rl360.engines import membership
from rl360.engines.fleet import EngineIdentity, Probe
from rl360.engines.fleet_log import FleetLog, FleetState
from rl360.engines.members import members
from rl360.engines.membership import add_external, drain, remove, start_more, take_back
from rl360.errors import BadInput
from rl360.weights import fence
from tests.unit.memory_store import MemoryStore

URL = "http://h:1"
IDENTITY = EngineIdentity(url=URL, incarnation="aa")


def probe(version: str | None = "demo:1", silent: bool = False) -> Probe:
    identity = None if version is None else IDENTITY
    return Probe(URL, identity, version, silent, "" if identity else "no connection")


@pytest.mark.parametrize(
    ("seen", "in_gateway", "version", "state"),
    [
        (probe(), True, "demo:1", "serving"),
        (probe(), False, "demo:1", "confirmed"),
        (probe("demo:1#loading-4"), False, "demo:1", "loading"),
        (probe("default"), False, "demo:1", "joining"),
        (probe("default"), True, None, "joining"),
        (probe(None), True, "demo:1", "joining"),
        (probe(None, silent=True), True, "demo:1", "suspect"),
    ],
)
def test_state_seen_from_outside(seen: Probe, in_gateway: bool, version: str | None, state: str) -> None:
    assert engine_state(seen, in_gateway, version) == state


def services_of(home: str, *urls: str) -> Services:
    fields = dict.fromkeys(("prefect_api_url", "prefect_ui_url", "s3_endpoint", "s3_bucket"), "-")
    more = dict.fromkeys(("gateway_url", "trainer_url", "model_dir"), "-")
    engines = list(urls) or [URL, "http://h:2/"]
    return Services(home=home, **fields, **more, engine_urls=engines, session_urls=["-"], sandbox_urls=["-"])


def test_engine_by_name_or_url() -> None:
    services = services_of("-")
    log = FleetLog(MemoryStore())
    start_more(log, services, "kubernetes", 1, "ann", "more")
    state = log.refresh()
    assert find_engine(services, state, "engine-1") == ("engine-1", "http://h:2")
    assert find_engine(services, state, "http://h:2/") == ("engine-1", "http://h:2")
    assert find_engine(services, state, "kubernetes-0") == ("kubernetes-0", "")
    for bad in ("engine-2", "one", "", "http://h:9"):
        with pytest.raises(BadInput, match="engine-0, engine-1, kubernetes-0"):
            find_engine(services, state, bad)


def test_status_says_what_the_log_knows_and_what_the_engine_answers(capsys: pytest.CaptureFixture[str]) -> None:
    services, store = services_of("-"), MemoryStore()
    log = FleetLog(store)
    add_external(log, EngineIdentity(url="http://h:9", incarnation="cc"), "ann", "borrowed")
    state = log.refresh()
    named = {"engine-0": probe(), "external-0": Probe("http://h:9", None, None, True, "no answer within 5 s")}
    picture = describe(named, {URL: "ready"}, state, [], None, store)
    first, second = picture["engines"]
    assert (first["state"], first["logged"], first["live"]) == ("joining", False, "answers")
    assert (second["state"], second["launcher"], second["live"]) == ("joining", "external", "silent")
    assert second["reason"] == "borrowed; no answer within 5 s"
    assert second["since"] == state.slots["external-0"].since and first["since"] is None
    second |= {"since": time.time() - 600, "push": 12, "start": "runs for 40 of 2400 s; loading shard 3 of 8"}
    print_status(picture, log.recent(5))
    out = capsys.readouterr().out
    assert "external-0    joining    10 min  -            push 12   external   silent    gateway: absent" in out
    assert "  its start: runs for 40 of 2400 s; loading shard 3 of 8" in out and "keeper: none" in out
    assert "new -> joining" in out and "person:ann" in out
    assert known_engines(services, state) == {"engine-0": URL, "engine-1": "http://h:2", "external-0": "http://h:9"}


def test_members_are_the_configured_and_the_added_without_the_removed() -> None:
    services, log = services_of("-"), FleetLog(MemoryStore())
    add_external(log, EngineIdentity(url="http://h:9", incarnation="cc"), "ann", "borrowed")
    add_external(log, EngineIdentity(url="http://h:9", incarnation="cc"), "ann", "twice is once")
    start_more(log, services, "kubernetes", 1, "ann", "more")
    assert members(log.refresh(), services.engine_urls) == {
        "engine-0": URL, "engine-1": "http://h:2", "external-0": "http://h:9"
    }  # fmt: skip
    remove(log, services, "engine-0", URL, "ann", "off", 0)
    assert members(log.refresh(), services.engine_urls) == {"engine-1": "http://h:2", "external-0": "http://h:9"}
    # an engine that was configured once and is no more is nobody's
    remove(log, services, "external-0", "http://h:9", "ann", "off", 0)
    assert members(log.refresh(), ["http://other:1"]) == {}


def test_what_cannot_be_added_or_taken_back() -> None:
    services, log = services_of("-"), FleetLog(MemoryStore())
    with pytest.raises(BadInput, match="use one of local, kubernetes, slurm"):
        start_more(log, services, "docker", 1, "ann", "more")
    add_external(log, EngineIdentity(url="http://h:9", incarnation="cc"), "ann", "borrowed")
    with pytest.raises(BadInput, match="external-0 is in the fleet"):
        take_back(log, "external-0", None, "ann", "again", 0)
    remove(log, services, "external-0", "http://h:9", "ann", "off", 0)
    with pytest.raises(BadInput, match="use `rl360 fleet remove external-0`"):
        drain(log, services, "external-0", "http://h:9", "ann", "off", 0)
    take_back(log, "external-0", None, "ann", "again", 0)
    assert members(log.refresh(), services.engine_urls)["external-0"] == "http://h:9"


def unfinished(store: MemoryStore) -> fence.Intent:
    intent = fence.Intent(
        epoch=3,
        run="demo",
        step=1,
        version="demo:2",
        engines=(IDENTITY,),
        group_name="g",
        call_deadline_s=1.0,
        owner=fence.new_owner(),
        written_at=0.0,
    )
    fence.write_intent(store, intent)
    return intent


def test_status_names_the_evidence_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    intent = unfinished(store)
    fence.note_unconfirmed(store, intent, IDENTITY, "its processes are not on this host")
    picture = describe({"engine-0": probe(None)}, {}, FleetState(), fence.open_intents(store), None, store)
    assert picture["unfinished"][0]["engines"] == [{"url": URL, "incarnation": "aa", "confirmed_gone": False}]
    print_status(picture, [])
    out = capsys.readouterr().out
    assert "push epoch 3 of demo:2 did not finish" in out
    assert f"rl360 fleet confirm-gone {URL} --reason" in out


def test_a_word_needs_a_reason_and_something_to_confirm() -> None:
    store = MemoryStore()
    with pytest.raises(BadInput, match="nothing to confirm"):
        membership.confirm_gone(store, URL, "node off", "someone")
    unfinished(store)
    with pytest.raises(BadInput, match="needs a reason"):
        membership.confirm_gone(store, URL, "  ", "someone")
    (word,) = membership.confirm_gone(store, URL, "node off", "someone")
    assert (word.incarnation, word.epoch, word.reason) == ("aa", 3, "node off")
    assert fence.is_gone_confirmed(store, IDENTITY)
    with pytest.raises(BadInput, match="nothing to confirm"):
        membership.confirm_gone(store, URL, "again", "someone")


def test_of_two_pushes_one_takes_the_epoch() -> None:
    store = MemoryStore()
    intent = unfinished(store)
    fence.write_intent(store, intent)  # a put whose reply was lost, sent again
    other = intent.model_copy(update={"owner": fence.new_owner()})
    with pytest.raises(Exception, match="taken by another push"):
        fence.write_intent(store, other)
    assert fence.next_epoch(store) == 4
