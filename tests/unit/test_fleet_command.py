"""`rl360 fleet`: what it calls each engine, and when a person's word is taken."""

from __future__ import annotations

import pytest

from rl360.commands.fleet import describe, engine_state, engine_url, print_status
from rl360.config.services import Services
from rl360.engines.fleet import EngineIdentity, Probe
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
        (probe(None), True, "demo:1", "gone"),
        (probe(None, silent=True), True, "demo:1", "suspect"),
    ],
)
def test_state_seen_from_outside(seen: Probe, in_gateway: bool, version: str | None, state: str) -> None:
    assert engine_state(seen, in_gateway, version) == state


def test_engine_by_name_or_url(tmp_path: object) -> None:
    fields = dict.fromkeys(("home", "prefect_api_url", "prefect_ui_url", "s3_endpoint", "s3_bucket"), "-")
    more = dict.fromkeys(("gateway_url", "trainer_url", "model_dir"), "-")
    services = Services(**fields, **more, engine_urls=[URL, "http://h:2/"], session_urls=["-"], sandbox_urls=["-"])
    assert engine_url(services, "engine-1") == "http://h:2"
    assert engine_url(services, "http://h:9/") == "http://h:9"
    for bad in ("engine-2", "one", ""):
        with pytest.raises(BadInput, match="engine-0 to engine-1"):
            engine_url(services, bad)


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
    picture = describe([probe(None)], {}, fence.open_intents(store), None, store)
    assert picture["unfinished"][0]["engines"] == [{"url": URL, "incarnation": "aa", "confirmed_gone": False}]
    print_status(picture)
    out = capsys.readouterr().out
    assert "push epoch 3 of demo:2 did not finish" in out
    assert f"rl360 fleet confirm-gone {URL} --reason" in out


def test_a_word_needs_a_reason_and_something_to_confirm() -> None:
    store = MemoryStore()
    with pytest.raises(BadInput, match="nothing to confirm"):
        fence.confirm_gone(store, URL, "node off", "someone")
    unfinished(store)
    with pytest.raises(BadInput, match="needs a reason"):
        fence.confirm_gone(store, URL, "  ", "someone")
    (word,) = fence.confirm_gone(store, URL, "node off", "someone")
    assert (word.incarnation, word.epoch, word.reason) == ("aa", 3, "node off")
    assert fence.is_gone_confirmed(store, IDENTITY)
    with pytest.raises(BadInput, match="nothing to confirm"):
        fence.confirm_gone(store, URL, "again", "someone")


def test_of_two_pushes_one_takes_the_epoch() -> None:
    store = MemoryStore()
    intent = unfinished(store)
    fence.write_intent(store, intent)  # a put whose reply was lost, sent again
    other = intent.model_copy(update={"owner": fence.new_owner()})
    with pytest.raises(Exception, match="taken by another push"):
        fence.write_intent(store, other)
    assert fence.next_epoch(store) == 4
