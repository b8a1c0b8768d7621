"""The system calls that a sandbox is not given, as the classic BPF program that bwrap's --seccomp reads.

Keyrings belong to a user and know no namespaces, and all sandboxes of a root server are one user: without this an
attempt could leave another a message. User namespaces, BPF, perf, io_uring and the like are surface of the kernel that
no task needs; file handles and kexec need privileges that a sandbox has not, and are refused twice. A refused call
fails with EPERM; `clone3`, whose flags a filter cannot see, with ENOSYS, and libraries then use `clone`. Limits
(`prlimit64`) a process may set for itself, as pid 0: PID 1, which serves the sandbox, is of the same user.
"""

from __future__ import annotations

import errno
import platform
import struct

NEW_USER = 0x10000000  # CLONE_NEWUSER
X32 = 0x40000000  # numbers of x86_64's other interface begin here; no processor has so many of its own
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NAMES = (
    *("add_key", "request_key", "keyctl", "bpf", "perf_event_open", "userfaultfd", "open_by_handle_at"),
    *("kexec_load", "kexec_file_load", "io_uring_setup", "io_uring_enter", "io_uring_register"),
)
# machine -> audit architecture, the numbers of NAMES, and of unshare, clone, clone3, prlimit64
MACHINES = {
    "x86_64": (0xC000003E, (248, 249, 250, 321, 298, 323, 304, 246, 320, 425, 426, 427), (272, 56, 435, 302)),
    "aarch64": (0xC00000B7, (217, 218, 219, 280, 241, 282, 265, 104, 294, 425, 426, 427), (97, 220, 435, 261)),
}


def program(machine: str = platform.machine()) -> bytes | None:
    """The filter for this machine; None where the numbers are not known here. Of another architecture every call fails:
    32-bit programs do not run."""
    if machine not in MACHINES:
        return None
    architecture, refused, (unshare, clone, clone3, prlimit) = MACHINES[machine]
    checks: list[tuple[int, int, str]] = [(JUMP_AT_LEAST, X32, "fail"), (JUMP_EQUAL, clone3, "nosys")]
    checks += [(JUMP_EQUAL, number, "flags") for number in (unshare, clone)] + [(JUMP_EQUAL, prlimit, "pid")]
    checks += [(JUMP_EQUAL, number, "fail") for number in refused]
    # load and test the architecture, load the number, the checks, allow; then the labels in this order
    flags = 4 + len(checks)
    at = {"flags": flags, "pid": flags + 3, "fail": flags + 5, "nosys": flags + 6}
    code = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 0, at["fail"] - 2, architecture), (LOAD, 0, 0, NUMBER)]
    code += [(kind, at[label] - index - 1, 0, value) for index, (kind, value, label) in enumerate(checks, 3)]
    code += [(RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_BITS, 3, 0, NEW_USER), (RETURN, 0, 0, ALLOW)]
    code += [(LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_EQUAL, 2, 0, 0)]
    code += [(RETURN, 0, 0, FAIL | errno.EPERM), (RETURN, 0, 0, FAIL | errno.ENOSYS), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
