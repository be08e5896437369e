"""Seccomp: which system calls a process may make, enforced by the kernel for it and all its children (seccomp(2)).

A list of refused calls, not of allowed ones: libraries (Python, libnbd, glibc) make other calls with every version, and a
reader that dies of an unforeseen call is no safer. Refused is what an attacker needs next: programs, processes, sockets, other
processes' memory, namespaces, mounts, and kernel interfaces that no copy needs.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable
from typing import Final

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# struct seccomp_data: the call's number, the architecture, then the arguments, low halves first.
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
_X86_64, _X32_BIT = 0xC000003E, 0x40000000
_CLONE_THREAD = 0x10000
# include/uapi/linux/sched.h: mounts, cgroups, names, IPC, users, processes, networks. In a namespace of users a process has all
# capabilities, and reaches parts of the kernel that only root's processes reach outside.
_CLONE_NAMESPACES = 0x20000 | 0x7E000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# arch/x86/entry/syscalls/syscall_64.tbl
_ALWAYS: Final = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "open_tree_attr": 467, "quotactl_fd": 443,
    "unshare": 272, "setns": 308, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "add_key": 248, "request_key": 249, "keyctl": 250, "open_by_handle_at": 304, "name_to_handle_at": 303,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169,
    "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "syslog": 103, "personality": 135,
    "fanotify_init": 300, "lookup_dcookie": 212, "nfsservctl": 180, "vhangup": 153, "mknod": 133, "mknodat": 259,
    "setuid": 105, "setgid": 106, "setreuid": 113, "setregid": 114, "setresuid": 117, "setresgid": 119, "setgroups": 116,
}  # fmt: skip
_PROGRAMS: Final = {"execve": 59, "execveat": 322, "fork": 57, "vfork": 58}
_SOCKET, _SOCKETPAIR, _CLONE, _CLONE3, _IOCTL = 41, 53, 56, 435, 16
_MESSAGING: Final = {"mq_open": 240, "msgget": 68, "shmget": 29, "semget": 64}


def works() -> bool:
    """Whether the kernel has it, on this architecture; others have other numbers. A kernel that has it, and lets this process
    use it, looks for the filter, where none is."""
    if os.uname().machine != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def restrict(*, sockets: Iterable[int], programs: bool) -> None:
    """`sockets`: the address families that may be opened. `programs`: whether it may start programs. OSError."""
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    refused = {**_ALWAYS, **_MESSAGING, **({} if programs else _PROGRAMS)}
    for number in refused.values():
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    # glibc starts threads and processes by clone, where clone3 is missing. A filter reads clone's flags; clone3's are in
    # memory.
    code += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    code += _unless(_CLONE, [(_JUMP_ANY_BIT, 0, 1, _CLONE_NAMESPACES)], argument=0)
    if not programs:
        code += _unless(_CLONE, [(_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD)], argument=0)
    families = sorted(sockets)
    for number in (_SOCKET, _SOCKETPAIR):
        allowed = families if number == _SOCKET else [socket.AF_UNIX]
        code += _unless(number, [(_JUMP_EQUAL, len(allowed) - at, 0, family) for at, family in enumerate(allowed)], argument=0)
    code += [
        *((_JUMP_EQUAL, 0, 5, _IOCTL), (_LOAD, 0, 0, _ARGUMENT_AT + 8), (_JUMP_EQUAL, 1, 0, _TIOCSTI)),
        *((_JUMP_EQUAL, 0, 1, _TIOCLINUX), (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_LOAD, 0, 0, _NUMBER_AT)),
        (_RETURN, 0, 0, _ALLOW),
    ]
    _load(code)


Code = list[tuple[int, int, int, int]]


def _unless(number: int, tests: Code, *, argument: int) -> Code:
    """Refuses this call, unless one of the tests is true of its argument; a true test jumps past the refusal."""
    inside: Code = [(_LOAD, 0, 0, _ARGUMENT_AT + 8 * argument), *tests, (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_LOAD, 0, 0, 0)]
    return [(_JUMP_EQUAL, 0, len(inside), number), *inside]


def _load(code: Code) -> None:
    packed = b"".join(struct.pack("<HBBI", instruction, yes, no, value) for instruction, yes, no, value in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(code), ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: errno {error}")
