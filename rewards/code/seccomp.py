"""Builds the filter of system calls for a sandbox, as a program for the kernel (seccomp, classic BPF).

The filter denies: new namespaces and mounts; sockets; shared memory that outlives its mappings, because no process's
memory shows it; the memory and the limits of other processes; keys, which outlive a program; and large parts of the
kernel that no program needs.
"""

import errno
import platform
import struct

_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_JUMP_ANY_BIT = 0x45
_AND = 0x54
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_DENY = 0x00050000 | errno.EPERM
_ABSENT = 0x00050000 | errno.ENOSYS
# Offsets in struct seccomp_data; for the arguments the offset of the lower half of the first.
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
_OTHER_ABI = 0x40000000  # x32's numbers start here
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*, of clone
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS

# io_uring_*, open_tree to fspick, pidfd_getfd, mount_setattr, memfd_secret: the same numbers on every machine.
_DENIED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
_CLONE3 = 435  # a filter cannot read its flags; libraries use clone where this call does not exist
_DENIED = {
    "x86_64": {
        "shmget": 29, "socket": 41, "socketpair": 53, "semget": 64, "msgget": 68, "ptrace": 101, "pivot_root": 155,
        "chroot": 161, "mount": 165, "umount2": 166, "mq_open": 240, "kexec_load": 246, "add_key": 248,
        "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "kexec_load": 104, "ptrace": 117, "mq_open": 180,
        "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "add_key": 217,
        "request_key": 218, "keyctl": 219, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "unshare": 97,
    },
}  # fmt: skip
# AUDIT_ARCH_*, clone, mmap, prlimit64.
_MACHINES = {"x86_64": (0xC000003E, 56, 9, 302), "aarch64": (0xC00000B7, 220, 222, 261)}


def filter_program(machine: str | None = None) -> bytes:
    """Returns the seccomp filter for a machine type as `platform.machine` names it, by default this machine.

    Raises ValueError for an unknown machine type.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"there is no filter of system calls for {machine}, only for {' and '.join(_MACHINES)}")
    architecture, clone, mmap, prlimit = _MACHINES[machine]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, architecture, then=1),
        _step(_RETURN, _DENY),
        _step(_LOAD, _NUMBER),
        *_return_if(_JUMP_GREATER_EQUAL, _OTHER_ABI, _DENY),
        *_return_if(_JUMP_EQUAL, _CLONE3, _ABSENT),
        *_judge_call(clone, _step(_LOAD, _ARGUMENTS), *_return_if(_JUMP_ANY_BIT, _NEW_NAMESPACES, _DENY)),
        *_judge_call(
            mmap,
            _step(_LOAD, _ARGUMENTS + 3 * 8),
            _step(_AND, _SHARED_ANONYMOUS),
            *_return_if(_JUMP_EQUAL, _SHARED_ANONYMOUS, _DENY),
        ),
        # Process 0 is the caller: a process sets its own limits alone.
        *_judge_call(prlimit, _step(_LOAD, _ARGUMENTS), *_return_if(_JUMP_EQUAL, 0, _ALLOW), _step(_RETURN, _DENY)),
    ]
    for number in (*_DENIED[machine].values(), *_DENIED_EVERYWHERE):
        program += _return_if(_JUMP_EQUAL, number, _DENY)
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _judge_call(number: int, *steps: bytes) -> list[bytes]:
    """Returns the BPF instructions for one system call: `steps`; if these give no verdict, the call is allowed."""
    return [_step(_JUMP_EQUAL, number, otherwise=len(steps) + 1), *steps, _step(_RETURN, _ALLOW)]


def _return_if(jump: int, value: int, verdict: int) -> list[bytes]:
    return [_step(jump, value, otherwise=1), _step(_RETURN, verdict)]


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Returns one BPF instruction (struct sock_filter); `then`, `otherwise`: how many instructions a jump skips."""
    return struct.pack("=HBBI", code, then, otherwise, value)
