"""Whose a sandbox is: only what nobody holds may be reaped."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.sandboxes.leases import DEPLOYMENT, EXPIRES, GRACE_S, OWNER, REAPABLE, Lease, LeaseState, labels, owner

NOW = 1_800_000_000.0


def lease(**given: str) -> Lease:
    return Lease("docker", "x", {OWNER: owner(), EXPIRES: "0", **given})


def test_what_a_living_process_owns_is_held_as_long_as_its_lease_can_run() -> None:
    assert lease().state(GRACE_S - 1) is LeaseState.HELD
    assert lease().state(GRACE_S + 1) is LeaseState.EXPIRED  # its owner could not stop it
    assert lease(**{EXPIRES: "nan"}).state(NOW) is LeaseState.HELD
    assert lease(**{EXPIRES: "soon"}).state(NOW) is LeaseState.UNKNOWN
    with subprocess.Popen(["sleep", "60"]) as other:
        theirs = lease(**{OWNER: owner(other.pid), EXPIRES: str(NOW)})
        assert theirs.state(NOW) is LeaseState.HELD
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie holds nothing
        assert theirs.state(NOW) is LeaseState.ORPHANED
    assert theirs.state(NOW) is LeaseState.ORPHANED


def test_a_pid_that_is_another_process_now_holds_nothing() -> None:
    host, _, rest = owner().partition("/")
    assert lease(**{OWNER: f"{host}/{rest.partition('/')[0]}/1"}).state(NOW) is LeaseState.ORPHANED


@pytest.mark.parametrize(
    ("expires", "state"),
    [
        (str(NOW - GRACE_S - 1), LeaseState.EXPIRED),
        (str(NOW - GRACE_S + 1), LeaseState.ELSEWHERE),
        (str(NOW + 60), LeaseState.ELSEWHERE),
        ("soon", LeaseState.UNKNOWN),
        ("", LeaseState.UNKNOWN),
        ("nan", LeaseState.ELSEWHERE),
    ],
)
def test_owners_of_another_host_are_left_alone_until_their_lease_has_run_out(expires: str, state: LeaseState) -> None:
    assert lease(**{OWNER: "host:boot:1/7/9", EXPIRES: expires}).state(NOW) is state


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=40), st.text(max_size=20))
def test_nothing_unreadable_is_ever_reaped(who: str, when: str) -> None:
    """Whatever stands there: an owner on this host that cannot be read is not one that is gone."""
    found = lease(**{OWNER: who, EXPIRES: when}).state(NOW)
    where, _, process = who.partition("/")
    pid, _, started = process.partition("/")
    if not (where and pid.isdecimal() and started):
        assert found not in REAPABLE


def test_labels_say_whose_and_until_when() -> None:
    made = labels("n", "d", 60, {"run": "r", "attempt": "a/b", "owner": "spoofed"})
    assert made["rl360.run"] == "r" and made["rl360.attempt"] == "a/b" and made[OWNER] == owner()
    row = Lease("docker", "x", made).row(0.0)
    assert row["state"] == "held" and row["run"] == "r" and row["name"] == "n" and row["deployment"] == "d"


def test_a_row_has_numbers_for_numbers_and_null_for_what_nobody_says() -> None:
    given = {OWNER: owner(), EXPIRES: str(NOW + 60), "rl360.run": "r", "rl360.step": "4", DEPLOYMENT: ""}
    row = Lease("bubblewrap", "/x", given).row(NOW)
    assert (row["step"], row["expires"], row["lease_left_s"], row["owner_pid"]) == (4, NOW + 60, 60.0, os.getpid())
    assert (row["owner_state"], row["owner_host"]) == ("alive", socket.gethostname())
    assert (row["deployment"], row["group"], row["attempt"]) == (None, None, None)
    bare = Lease("docker", "x", {EXPIRES: "inf", "rl360.step": "four"}).row(NOW)
    assert set(bare) == set(row) and bare["state"] == bare["owner_state"] == "unknown"
    assert {name for name, value in bare.items() if value is not None} == {"provider", "id", "state", "owner_state"}


@pytest.mark.parametrize("process", ["9" * 5000 + "/1", "OWN/x", "/1", "-1/1", "1/"])
def test_an_owner_of_this_host_that_cannot_be_read_is_unknown(process: str) -> None:
    where, _, _ = owner().partition("/")
    process = process.replace("OWN", str(os.getpid()))
    assert lease(**{OWNER: f"{where}/{process}"}).state(NOW) is LeaseState.UNKNOWN


def test_an_owner_lives() -> None:
    with pytest.raises(ProcessLookupError):
        owner(1 << 30)
