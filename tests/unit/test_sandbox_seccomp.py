"""The filter of system calls, run by an interpreter of its few instructions: what is refused, and nothing else is."""

from __future__ import annotations

import errno
import struct

import pytest

from rl360.sandboxes.seccomp import MACHINES, NAMES, NEW_USER, program

ALLOWED, REFUSED, ABSENT = "allowed", errno.EPERM, errno.ENOSYS
FORK = 0x01200011  # what glibc's fork asks of clone


def verdict(code: bytes, architecture: int, number: int, first_argument: int = 0) -> str | int:
    """What the kernel makes of one call."""
    data = struct.pack("=IIQQ", number, architecture, 0, first_argument)
    steps = list(struct.iter_unpack("=HBBI", code))
    accumulator = at = 0
    while True:
        kind, yes, no, value = steps[at]
        at += 1
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif kind == 0x06:
            return ALLOWED if value == 0x7FFF0000 else value & 0xFFFF
        else:
            true = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[kind]
            at += yes if true else no


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_what_is_refused_and_what_is_not(machine: str) -> None:
    code = program(machine)
    assert code is not None and len(code) < 4096, "a pipe takes it at once"
    architecture, refused, (unshare, clone, clone3, prlimit) = MACHINES[machine]
    assert len(refused) == len(NAMES)
    found = {number: verdict(code, architecture, number) for number in range(600)}
    of = [verdict(code, architecture, prlimit, pid) for pid in (0, 1, 2, 0xFFFFFFFF)]
    assert of == [ALLOWED, *[REFUSED] * 3], "limits of another process"
    assert {number for number, said in found.items() if said != ALLOWED} == {*refused, clone3}
    assert found[clone3] == ABSENT and all(found[number] == REFUSED for number in refused)
    for number in (unshare, clone):
        assert [verdict(code, architecture, number, flags) for flags in (0, FORK, NEW_USER, FORK | NEW_USER)] == [
            *[ALLOWED] * 2,
            *[REFUSED] * 2,
        ]
    assert verdict(code, architecture, 0x40000000) == REFUSED, "the other interface of x86_64"
    assert verdict(code, 0x40000003, 20) == REFUSED, "32-bit programs"


def test_no_filter_is_made_up_for_a_machine_that_is_not_known() -> None:
    assert program("riscv64") is None
