"""Landlock: which files a process may open, enforced by the kernel for it and all its children (landlock(7), Linux 5.13).

Three system calls; no library in Debian offers them to Python.
"""

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

# include/uapi/linux/landlock.h; the numbers are the same on every architecture.
_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
# The rights that each version of the interface knows: a right that the kernel does not know is refused.
_RIGHTS_BY_VERSION = ((1, (1 << 13) - 1), (2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# Version 4 covers TCP, version 6 abstract sockets and signals to processes outside.
_BIND_TCP, _CONNECT_TCP, _NET_SINCE = 1, 2, 4
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS, _SCOPE_SINCE = 1, 2, 6


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """The version of the interface; 0, where the kernel lacks it or has it turned off."""
    return max(0, _syscall(_CREATE, None, 0, _CREATE_VERSION))


def restrict(
    *, reads: Iterable[Path], writes: Iterable[Path], network: bool, opened: Iterable[int] = (), exact: Iterable[Path] = ()
) -> None:
    """This thread, threads that it starts and its children may open only what lies under these paths. They may read, too, what
    `opened` descriptors and `exact` paths lead to; the paths must not lead through symbolic links. OSError."""
    known = version()
    rights = 0
    for since, more in _RIGHTS_BY_VERSION:
        rights |= more if known >= since else 0
    net = 0 if network or known < _NET_SINCE else _BIND_TCP | _CONNECT_TCP
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if known >= _SCOPE_SINCE else 0
    size = 8 if known < _NET_SINCE else 16 if known < _SCOPE_SINCE else 24
    ruleset = _checked(_CREATE, ctypes.byref(_RulesetAttr(rights, net, scoped)), size, 0)
    try:
        for path in reads:
            _allow(ruleset, path, rights & _READ)
        for descriptor in opened:
            _allow_opened(ruleset, descriptor, rights & _READ)
        for path in exact:
            _allow(ruleset, path, rights & _READ, exact=True)
        for path in writes:
            _allow(ruleset, path, rights)
        _checked(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int, *, exact: bool = False) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a path that does not exist needs no right
    try:
        if not exact or Path(f"/proc/self/fd/{descriptor}").readlink() == path:
            _allow_opened(ruleset, descriptor, rights)
    finally:
        os.close(descriptor)


def _allow_opened(ruleset: int, descriptor: int, rights: int) -> None:
    """The rule belongs to the inode: it applies to this file, even if its names later lead elsewhere."""
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _OF_A_FILE
    _checked(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(_PathBeneath(rights, descriptor)), 0)


def _checked(number: int, *arguments: object) -> int:
    found = _syscall(number, *arguments)
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return found


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(ctypes.c_long(number), *arguments))
