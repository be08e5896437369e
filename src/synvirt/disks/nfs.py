"""A file of an NFSv3 export as a disk, by libnfs (Debian's libnfs13): no mount, no root, and a limit to every wait.

    mount (RFC 1813, appendix I) ─▶ open ─▶ read_into: a connection of the pool, READ by READ into the caller's buffer

The kernel's client waits forever for a silent server, and a container with an allow-list does not answer other hosts. Compared
with QEMU's nfs driver behind qemu-nbd, libnfs has several connections, no copy through NBD, and the server's own error numbers;
bench/platforms/nutanix.py measures it. Each connection has a context of its own, as libnfs 4 cannot share one between threads.
"""

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, TypeVar

from synvirt import outgoing
from synvirt.blocks import Extent
from synvirt.disks.specs import NfsSpec
from synvirt.disks.vsphere.datastore import FileGone
from synvirt.errors import AuthFailed, DiskReadFailed, Internal, SourceUnreachable
from synvirt.sizes import MIB

# A refusal is found within 10 s: this is for the connection, and the next for the server's first answer.
CONNECT_TIMEOUT_S: Final = 3.0
MOUNT_TIMEOUT_S: Final = 5.0
# A controller that fails over is silent for some 20 s, and then answers.
READ_TIMEOUT_S: Final = 30.0
# Pauses before each new attempt after a failed one.
RETRY_DELAYS_S: Final = (0.1, 1.0)
CONNECTIONS: Final = 4
# libnfs 4 and 5, by their sonames; 6 has another order of nfs_pread's arguments. ctypes.util would start programs.
LIBRARIES: Final = ("libnfs.so.13", "libnfs.so.14")
PORTMAPPER_PORT: Final = 111
# Mostly the largest READ of a server.
_STEP_BYTES: Final = MIB
_GONE: Final = frozenset({errno.ESTALE, errno.ENOENT, errno.ENOTDIR})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM})
ALLOW_LIST_HINT: Final = (
    "put this host's address on the allow-list of the container (Prism: Storage, its container, Filesystem Allowlists)"
)

# libnfs.h: struct nfs_stat_64.
_STAT: Final = (
    *("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks"),
    *("atime", "mtime", "ctime", "atime_n", "mtime_n", "ctime_n", "used"),
)

T = TypeVar("T")


class _Lost(Exception):
    """This attempt failed, and another may not."""


class _Silent(AuthFailed):
    """No answer to a mount: this host is not on the allow-list, or the server is away for a moment."""


class _Stat(ctypes.Structure):
    _fields_ = tuple((f"nfs_{name}", ctypes.c_uint64) for name in _STAT)


def found() -> str:
    """The soname of this host's libnfs. Internal: none."""
    for name in LIBRARIES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    raise Internal("libnfs is not installed on this host", hint="apt-get install libnfs13")


@cache
def library() -> Any:
    """libnfs. Internal, where it is not installed."""
    loaded = ctypes.CDLL(found())
    context, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    shapes: dict[str, tuple[Any, list[Any]]] = {
        "nfs_init_context": (context, []),
        "nfs_destroy_context": (None, [context]),
        "nfs_parse_url_full": (ctypes.c_void_p, [context, text]),
        "nfs_destroy_url": (None, [ctypes.c_void_p]),
        "nfs_set_timeout": (None, [context, number]),
        "nfs_set_autoreconnect": (None, [context, number]),
        "nfs_mount": (number, [context, text, text]),
        "nfs_open": (number, [context, text, number, ctypes.POINTER(ctypes.c_void_p)]),
        "nfs_close": (number, [context, ctypes.c_void_p]),
        "nfs_fstat64": (number, [context, ctypes.c_void_p, ctypes.POINTER(_Stat)]),
        "nfs_pread": (number, [context, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]),
        "nfs_get_error": (text, [context]),
    }
    for function, (answer, arguments) in shapes.items():
        getattr(loaded, function).restype = answer
        getattr(loaded, function).argtypes = arguments
    return loaded


class _Connection:
    """A mount of the export, with the file open. Used by one thread at a time."""

    def __init__(self, spec: NfsSpec) -> None:
        self._spec, self._nfs = spec, library()
        self._address = self._knock()
        self._context = ctypes.c_void_p(self._nfs.nfs_init_context())
        self._file = ctypes.c_void_p()
        try:
            self._mount()
        except BaseException:
            self.close()
            raise

    def open(self) -> "_Connection":
        try:
            code = self._nfs.nfs_open(self._context, _encoded(self._spec.path), os.O_RDONLY, ctypes.byref(self._file))
            self._done(code, "opened")
        except BaseException:
            self.close()
            raise
        self._nfs.nfs_set_timeout(self._context, int(READ_TIMEOUT_S * 1000))
        return self

    def _knock(self) -> str:
        """The address that answers, for libnfs, as it would ask a name server again. And it waits for a connection as long as
        the kernel does: two minutes."""
        port = self._spec.mount_port or PORTMAPPER_PORT
        try:
            with outgoing.sources().dial(self._spec.host, port, timeout_s=CONNECT_TIMEOUT_S) as reached:
                return str(reached.getpeername()[0])
        except OSError as error:
            raise SourceUnreachable(
                f"{self._spec.host} accepts no connection for NFS on port {port}: {error.strerror or 'no answer'}",
                hint="a firewall must let this host reach TCP 111 and 2049 of the cluster",
            ) from error

    def _mount(self) -> None:
        nfs, spec = self._nfs, self._spec
        ports = f"&nfsport={spec.nfs_port}" if spec.nfs_port else ""
        ports += f"&mountport={spec.mount_port}" if spec.mount_port else ""
        # Only for the options; the mount is below. AUTH_SYS as root, as the files are root's.
        host = f"[{self._address}]" if ":" in self._address else self._address
        url = nfs.nfs_parse_url_full(
            self._context, f"nfs://{host}/x/y?version=3&uid=0&gid=0&auto-traverse-mounts=0{ports}".encode()
        )
        if not url:
            raise DiskReadFailed(f"libnfs does not take {spec.host!r} as a server: {self._message()}")
        nfs.nfs_destroy_url(url)
        nfs.nfs_set_autoreconnect(self._context, 0)
        nfs.nfs_set_timeout(self._context, int(MOUNT_TIMEOUT_S * 1000))
        code = nfs.nfs_mount(self._context, _encoded(self._address), _encoded(spec.export))
        if code < 0:
            raise self._not_mounted(-code)

    def _not_mounted(self, code: int) -> AuthFailed | SourceUnreachable | DiskReadFailed:
        what = f"{self._spec.host} does not let this host mount {self._spec.export} by NFS: "
        if code in _FORBIDDEN or code == errno.ENOENT:
            return AuthFailed(f"{what}{self._message()}", hint=ALLOW_LIST_HINT)
        if code == errno.EINTR:
            return _Silent(f"{what}no answer within {MOUNT_TIMEOUT_S:.0f} s", hint=ALLOW_LIST_HINT)
        return SourceUnreachable(f"{what}{self._message()}", hint="is its NFS service up?")

    def size(self) -> int:
        found = _Stat()
        self._done(self._nfs.nfs_fstat64(self._context, self._file, ctypes.byref(found)), "looked at")
        return int(found.nfs_size)

    def read(self, offset: int, buffer: memoryview) -> None:
        at = 0
        while at < len(buffer):
            step = min(_STEP_BYTES, len(buffer) - at)
            into = (ctypes.c_char * step).from_buffer(buffer, at)
            count = self._nfs.nfs_pread(self._context, self._file, offset + at, step, into)
            self._done(count, f"read at offset {offset + at}")
            if count == 0:
                raise FileGone(f"{self._spec.name} ends before offset {offset + at}: it is shorter than it was")
            at += count

    def _done(self, code: int, what: str) -> None:
        if code >= 0:
            return
        if -code in _GONE:
            raise FileGone(
                f"{self._spec.name} cannot be {what} on {self._spec.host}: {os.strerror(-code)}",
                hint="its snapshot was removed: another is taken",
            )
        if -code in _FORBIDDEN:
            raise AuthFailed(f"{self._spec.name} may not be {what} on {self._spec.host}", hint=ALLOW_LIST_HINT)
        raise _Lost(f"it could not be {what}: {self._message()}")

    def _message(self) -> str:
        text = self._nfs.nfs_get_error(self._context) or b""
        return str(text.decode("utf-8", "replace")).strip()[:300] or "it gives no reason"

    def close(self) -> None:
        """Closes the connection; a READ needs no CLOSE in NFSv3."""
        if self._context:
            self._nfs.nfs_destroy_context(self._context)
            self._context = ctypes.c_void_p()


class NfsReader:
    """`spec.path` under `spec.export`. AuthFailed: this host is refused, known within 10 s; FileGone: the file no longer
    exists; SourceUnreachable: the server is away, or silent during a read. That is known within READ_TIMEOUT_S and two mounts,
    and the next read may succeed again."""

    max_readers = CONNECTIONS

    def __init__(self, spec: NfsSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._was_let_in = False
        self.size = self._tried(lambda connection: connection.size(), "its size", delays_s=())
        self._was_let_in = True
        if spec.size_bytes not in (None, self.size):
            self.close()
            raise DiskReadFailed(f"{spec.name} has {self.size} bytes on {spec.host}, and its disk {spec.size_bytes}")

    def extents(self) -> Iterator[Extent]:
        if self.size:
            yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside {self._spec.name} of {self.size}")
        if len(buffer):
            self._tried(lambda connection: connection.read(offset, buffer), f"offset {offset}")

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _tried(self, attempt: Callable[[_Connection], T], where: str, *, delays_s: tuple[float, ...] = RETRY_DELAYS_S) -> T:
        for delay_s in (*delays_s, None):
            connection: _Connection | None = None
            try:
                connection = self._borrowed()
                found = attempt(connection)
            except (_Lost, SourceUnreachable, _Silent) as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, _Silent) and not self._was_let_in:
                    raise  # waiting does not help
                if delay_s is None:
                    raise SourceUnreachable(
                        f"{self._spec.host} was lost while {self._spec.name} was read by NFS at {where}: {error}",
                        hint="the pass goes on from its watermark once the platform answers again",
                    ) from error
                time.sleep(delay_s)
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            else:
                with self._lock:
                    self._idle.append(connection)
                return found
        raise AssertionError("the last attempt returns or raises")

    def _borrowed(self) -> _Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Connection(self._spec).open()


def knock(spec: NfsSpec) -> None:
    """Checks that this host can read the file, or mount its export where no path is given. Raises the reader's errors."""
    if spec.path:
        with contextlib.closing(NfsReader(spec)):
            return
    with contextlib.closing(_Connection(spec)):
        return


def _encoded(text: str) -> bytes:
    if "\0" in text:
        raise DiskReadFailed("a path of the platform has a NUL in it")
    return text.encode("utf-8", "surrogateescape")
