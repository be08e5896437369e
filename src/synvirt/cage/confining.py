"""Confines this process, before it has threads: it loses rights permanently."""

import contextlib
import ctypes
import errno
import os
import pwd
import re
import resource
import socket
import sys
from dataclasses import dataclass
from enum import Flag
from pathlib import Path

from synvirt.cage import landlock, seccomp
from synvirt.sizes import GIB

_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_SET_KEEPCAPS = 38, 24, 8
_PR_CAP_AMBIENT, _AMBIENT_RAISE = 47, 2
_PR_SET_SECUREBITS, _NO_SETUID_FIXUP = 28, 1 << 2
_CLONE_NEWNET, _CLONE_NEWIPC = 0x40000000, 0x08000000
# include/uapi/linux/capability.h. Import folders and volumes belong to other users than us; Landlock limits which of their
# files may be opened.
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _CAP_NET_BIND_SERVICE, _CAPABILITIES_MAX = 1, 2, 10, 63
_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 6, 7, 21
_CAPABILITY_VERSION = 0x20080522
# Files that Python and the libraries of a reader need: their own, names of hosts and certificates, the kernel's figures. Not
# /etc as a whole, as the host's keys and password hashes are there.
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/proc", "/sys"),
    *("/dev/zero", "/dev/urandom", "/dev/random"),
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/hosts"),
    *("/etc/gai.conf", "/etc/host.conf", "/etc/services", "/etc/protocols", "/etc/passwd", "/etc/group"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/ca-certificates", "/etc/alternatives"),
    *("/run/systemd/resolve", "/etc/krb5.conf", "/etc/samba", "/etc/gnutls", "/etc/crypto-policies", "/etc/mime.types"),
)
# A program that gets no input opens it for reading and writing; it stores nothing.
_SINK = "/dev/null"


class Network(Flag):
    """What sockets a child may open: of this host (Unix sockets), and to elsewhere. A right to open others' files is one to
    connect to their Unix sockets, too: only a child that needs those may open them."""

    NONE = 0
    LOCAL = 1
    ELSEWHERE = 2
    ANY = 3


_FAMILIES = {
    Network.LOCAL: (socket.AF_UNIX,),
    Network.ELSEWHERE: (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK),
}


@dataclass(frozen=True, slots=True)
class Cage:
    """`reads`, `writes`: files, or folders with all below. `programs`: it may start other programs, which are in the same cage.
    `as_root`: it stays the user that it is, because its peers check that; it opens no Unix sockets, as libvirtd and other
    daemons of this host would take it for the service. `files_as_service`: it becomes another user, but makes and opens files
    as the service's user (setfsuid(2)); programs that it starts do not. `opened`: descriptors of more files that it may read;
    `enter` closes them. `exact`: resolved paths of more; a path that leads through a symbolic link by now is left out.
    `temporary`: it and its programs make temporary files, in a folder of their own (`scratch.housed`). `memory_bytes`: of
    address space. `cpu_s`, `written_bytes` (of one file): None, where only the size of the work limits it."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    network: Network = Network.NONE
    programs: bool = False
    as_root: bool = False
    files_as_service: bool = False
    opened: tuple[int, ...] = ()
    exact: tuple[str, ...] = ()
    temporary: bool = False
    memory_bytes: int = 8 * GIB
    cpu_s: int | None = None
    files: int = 4096
    written_bytes: int | None = None


def enter(cage: Cage) -> tuple[str, ...]:
    """Confines this process permanently. Gives the layers that are in force; a layer that this host lacks is left out. OSError:
    one failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    _limit(cage)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")
    held = ["no_new_privs", "limits"]
    has = permitted()
    # Refused without CAP_SYS_ADMIN. A user namespace does not help: in one, capabilities do not apply to the host's files.
    if not cage.network & Network.ELSEWHERE and libc.unshare(_CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        held.append("network namespace")
    if has:
        changes_user = not cage.as_root and may_change_user(has)
        _give_up_rights(libc, cage, changes_user=changes_user)
        held += ["user", "capabilities"] if changes_user else ["capabilities"]
    if landlock.version() > 0:
        reads = [Path(path) for path in (*_SYSTEM, *_own_files(), *cage.reads)]
        writes = [Path(path) for path in (_SINK, *cage.writes)]
        exact = [Path(path) for path in cage.exact]
        elsewhere = bool(cage.network & Network.ELSEWHERE)
        landlock.restrict(reads=reads, writes=writes, opened=cage.opened, exact=exact, network=elsewhere)
        held.append("landlock")
    for descriptor in cage.opened:
        os.close(descriptor)
    if seccomp.works():
        network = cage.network & ~Network.LOCAL if cage.as_root else cage.network
        families = [family for kind, opened in _FAMILIES.items() if kind & network for family in opened]
        seccomp.restrict(sockets=families, programs=cage.programs)
        held.append("seccomp")
    return tuple(held)


def layers() -> dict[str, bool]:
    """The layers of `enter`, and whether this host gives them to this process."""
    has = permitted()
    return {
        "no_new_privs": True,
        "limits": True,
        "network namespace": bool(has >> _CAP_SYS_ADMIN & 1),
        "user": may_change_user(has),
        "capabilities": bool(has),
        "landlock": landlock.version() > 0,
        "seccomp": seccomp.works(),
    }


def _limit(cage: Cage) -> None:
    wanted = {resource.RLIMIT_AS: cage.memory_bytes, resource.RLIMIT_NOFILE: cage.files, resource.RLIMIT_CORE: 0}
    if cage.cpu_s is not None:
        wanted[resource.RLIMIT_CPU] = cage.cpu_s
    if cage.written_bytes is not None:
        wanted[resource.RLIMIT_FSIZE] = cage.written_bytes
    for limit, value in wanted.items():
        hard = resource.getrlimit(limit)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # One second more, so that the signal which says why ends it first.
        later = 1 if limit == resource.RLIMIT_CPU and (hard == resource.RLIM_INFINITY or hard > most) else 0
        resource.setrlimit(limit, (most, most + later))


def _own_files() -> list[str]:
    """The folders of this interpreter's modules and programs: the virtual environment's and its base's."""
    return [path for path in dict.fromkeys([sys.prefix, sys.base_prefix, *sys.path]) if path and path != "/"]


def _give_up_rights(libc: ctypes.CDLL, cage: Cage, *, changes_user: bool) -> None:
    """Becomes another user than the service's. Its one privilege, if the service has it, is to read and write files of other
    users. With Landlock it has that only for the files that the cage names."""
    # Capabilities stay when the user changes. access(2) checks the effective ones too, and libnbd calls it to look for a
    # certificate.
    libc.prctl(_PR_SET_SECUREBITS, _NO_SETUID_FIXUP, 0, 0, 0)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)  # where a unit took away CAP_SETPCAP, the line above is refused
    kept = (
        1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH | (1 << _CAP_NET_BIND_SERVICE if cage.as_root else 0)
    ) & permitted()
    for number in range(_CAPABILITIES_MAX + 1):
        if not kept >> number & 1:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # one that the kernel does not know does not exist either
    if changes_user:
        _change_user(libc, files_as_service=cage.files_as_service)
    _set_capabilities(libc, kept, inheritable=kept if cage.programs else 0)
    for number in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH) if cage.programs else ():
        # A capability that is not permitted is refused here, which does no harm.
        libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, number, 0, 0)  # else programs that it starts could not read its files


def _change_user(libc: ctypes.CDLL, *, files_as_service: bool) -> None:
    user, group = cage_user()
    owner, owners = os.geteuid(), os.getegid()
    # Sets its own group once more, where files belong to another group: else, from Linux 6.16 on, programs have no
    # capabilities, as its group seems to have changed.
    os.setgroups([group] if files_as_service else [])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    if not files_as_service:
        return
    # They may have become ineffective when root's user was given up.
    _set_capabilities(libc, permitted(), inheritable=0)
    # Only for this thread, which is the only one; threads that it starts inherit them.
    for change, wanted in ((libc.setfsgid, owners), (libc.setfsuid, owner)):
        change(wanted)
        if change(-1) != wanted:  # the only way to see that it was refused
            raise OSError(errno.EPERM, "setfsuid")


def _set_capabilities(libc: ctypes.CDLL, kept: int, *, inheritable: int) -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    low, high = 0xFFFF_FFFF, 32
    sets = (ctypes.c_uint32 * 6)(
        *(kept & low, kept & low, inheritable & low), *(kept >> high, kept >> high, inheritable >> high)
    )
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def permitted() -> int:
    """This process's capabilities, one bit each. A unit may have taken some from root, or given some to another user."""
    found = re.search(r"^CapPrm:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


def may_change_user(has: int | None = None) -> bool:
    """Whether it may change its user. A user namespace of its own, as a rehearsed guest's network has, has no other user."""
    both = 1 << _CAP_SETUID | 1 << _CAP_SETGID
    return (permitted() if has is None else has) & both == both and bool(Path("/proc/self/uid_map").read_text().strip())


def may_open_others_files() -> bool:
    return bool(permitted() >> _CAP_DAC_OVERRIDE & 1)


def cage_user() -> tuple[int, int]:
    """User and group of the package's user `synvirt-cage`; without the package, of `nobody`."""
    for name in ("synvirt-cage", "nobody"):
        with contextlib.suppress(KeyError):
            found = pwd.getpwnam(name)
            return found.pw_uid, found.pw_gid
    return 65534, 65534
