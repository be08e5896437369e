"""The connection to libvirt, opened when it is first needed; and the embedded driver's folder.

    qemu:///embed?root=ROOT   the QEMU driver runs inside our own process, and keeps all its files in ROOT. No daemon.
    qemu:///system            the host's libvirtd

libvirt.org/drvqemu.html#embedded-driver. One process at a time may open a ROOT. QEMU goes on after our end: the next process
that opens ROOT finds the guests again. The driver needs an event loop, a thread of this process that is started once.
"""

import atexit
import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from synvirt.errors import DomainDefineFailed, HypervisorAway, Internal, SynvirtError
from synvirt.kvm import half_done, orphans, qemu_user
from synvirt.kvm import library as libvirt_library
from synvirt.kvm.limit import begun
from synvirt.kvm.qemu_user import QemuUser, embedded_root

# A login at the daemon takes milliseconds, and some seconds where systemd starts the daemon for it. libvirt itself would wait
# without end for a daemon that hangs.
OPEN_TIMEOUT_S = 30.0
# Whether a daemon that was silent for so long answers by now is seen in this time.
AGAIN_S = 1.0
# A call ends with an error, where the daemon has said nothing for a minute: it answers these even while it works.
KEEPALIVE_EVERY_S, KEEPALIVE_MISSED_MAX = 10, 6
# A Unix socket's path has at most 107 bytes, and libvirt puts up to 83 after ROOT:
# lib/qemu/channel/target/domain-NUMBER-TWENTY_LETTERS/org.qemu.guest_agent.0
ROOT_LIMIT_BYTES = 24

# The reasons: logs go into files, as there is no virtlogd. No security driver, as that needs profiles of the host. No mount
# namespaces or cgroups, as they need systemd or privileges that we may lack. No remembered owners, as all is root's.
QEMU_CONF = """\
stdio_handler = "file"
security_driver = "none"
namespaces = []
cgroup_controllers = []
remember_owner = 0
"""
# QEMU runs as our user, and nothing changes the volumes' owner.
QEMU_CONF_AS_WE = "dynamic_ownership = 0\n"
QEMU_CONF_AS_ROOT = 'user = "root"\ngroup = "root"\nswtpm_user = "root"\nswtpm_group = "root"\nseccomp_sandbox = 1\n'
# While a guest runs, its files belong to QEMU's user; when it has ended, to root again.
QEMU_CONF_AS_ANOTHER = """\
user = "{user.name}"
group = "{user.group}"
swtpm_user = "{user.tpm[0]}"
swtpm_group = "{user.tpm[1]}"
dynamic_ownership = 1
seccomp_sandbox = 1
"""


Lookup = Literal["lookupByName", "lookupByUUIDString"]


def short_root(uri: str) -> Path | None:
    """The embedded driver's folder by a path that is short enough for Unix sockets in it."""
    root = embedded_root(uri)
    return None if root is None else _short(root.resolve())


class Connection:
    """A connection, opened at the first `use()` and again after it broke. Safe from several threads, as libvirt's connections
    are.

    One thread calls `on_open` before each opening.
    """

    def __init__(self, uri: str, on_open: Callable[[], None]) -> None:
        self.uri = uri
        self._on_open = on_open
        self._lock = threading.Lock()
        self._open: Any = None
        # A connection that a daemon has not answered yet: its thread cannot be ended, so there is never a second one.
        self._opening: Future[Any] | None = None

    def use(self) -> Any:
        """The open virConnect. DomainDefineFailed, where the hypervisor cannot be opened; of a daemon, HypervisorAway."""
        with self._lock:
            if self._open is None or not _alive(self._open):
                self._open = self._connect()
            return self._open

    def _connect(self) -> Any:
        libvirt = load()
        self._on_open()
        root = embedded_root(self.uri)
        try:
            return self._opened(libvirt) if root is None else _embedded(libvirt, root.resolve())
        except libvirt.libvirtError as error:
            kind = HypervisorAway if root is None else DomainDefineFailed
            raise kind(f"the hypervisor {self.uri} cannot be opened: {error}", hint=_hint(str(error))) from error

    def _opened(self, libvirt: Any) -> Any:
        limit_s = OPEN_TIMEOUT_S if self._opening is None else AGAIN_S
        opening = self._opening = self._opening or begun(lambda: libvirt.open(self.uri))
        if not wait([opening], limit_s).done:
            raise HypervisorAway(
                f"the hypervisor {self.uri} accepts the connection, and does not answer", hint="its daemon hangs: restart it"
            )
        self._opening = None
        opened = opening.result()
        with contextlib.suppress(libvirt.libvirtError):  # a driver without a daemon has none
            opened.setKeepAlive(KEEPALIVE_EVERY_S, KEEPALIVE_MISSED_MAX)
        return opened

    def close(self) -> None:
        """Closes the connection; the embedded driver's stays open in the process. It may be called twice."""
        with self._lock:
            if self._open is not None and embedded_root(self.uri) is None:
                with contextlib.suppress(load().libvirtError):
                    self._open.close()
            self._open = None


def _alive(connection: Any) -> bool:
    try:
        return bool(connection.isAlive())
    except load().libvirtError:
        return False


_AWAY_HINT = "this host's libvirtd was restarted, or has ended: systemctl status libvirtd"


def _hint(message: str) -> str:
    if "driver.pid" in message or "already running" in message:
        return "another process has opened this folder: only one service can run on a data_dir"
    return "run `synvirt doctor`: it says what is missing; the setting libvirt_uri names the hypervisor"


# ── the library ──────────────────────────────────────────────────────────────────────────────────────────────────────


def load() -> Any:
    """libvirt's module, with a running event loop. DomainDefineFailed, where it is missing."""
    return libvirt_library.load(DomainDefineFailed)


@contextlib.contextmanager
def translated(error: type[SynvirtError], doing: str, hint: Callable[[str], str | None] = lambda _: None) -> Iterator[None]:
    """Turns libvirt's errors into ours: HypervisorAway, where the connection was lost, else `error`."""
    libvirt = load()
    try:
        yield
    except libvirt.libvirtError as cause:
        detail = f"{doing}: {cause.get_error_message() or cause}"
        if libvirt_library.is_lost(cause):
            raise HypervisorAway(detail, hint=_AWAY_HINT) from cause
        raise error(detail, hint=hint(str(cause)) or libvirt_library.endless_lock_hint(detail)) from cause


def find_domain(connection: Connection, lookup: Lookup, key: str) -> Any | None:
    """The virDomain; None, if there is none. Look it up for each use: it may have been redefined or removed meanwhile, and one
    of a connection that was lost answers no more. Internal, HypervisorAway."""
    connected, libvirt = connection.use(), load()
    with translated(Internal, f"the hypervisor does not say whether it has {key}"):
        try:
            return getattr(connected, lookup)(key)
        except libvirt.libvirtError as error:
            if error.get_error_code() in (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_INVALID_ARG):
                return None
            raise


# libvirt's own record of a running domain (src/conf/domain_conf.c, virDomainObjFormat).
_UNBORN = re.compile(rb"<domstatus state='paused' reason='starting up' pid='0'")


# ── the embedded driver's folder ─────────────────────────────────────────────────────────────────────────────────────


# libvirt registers its drivers again when it is opened after the last close, and has room for few (9.0: "Too many drivers").
# So a connection stays open until the process ends, which releases the folder.
_embedded_open: dict[Path, Any] = {}
_embedded_lock = threading.Lock()
atexit.register(_embedded_open.clear)  # before the interpreter unloads the binding, which would complain


def _embedded(libvirt: Any, root: Path) -> Any:
    with _embedded_lock:
        if root not in _embedded_open:
            _prepare(root, qemu_user.of(f"qemu:///embed?root={quote(str(root))}"))
            short = _short(root)
            left, traces = orphans.suspects(short), orphans.traces(root)
            _forget_unborn(root)
            half_done.mend(root)
            _embedded_open[root] = opened = libvirt.open(f"qemu:///embed?root={quote(str(short))}")
            orphans.end(left, short, lambda uuid: _is_active(libvirt, opened, uuid))
            orphans.remove(traces, opened.listDomainsID())
        return _embedded_open[root]


def _is_active(libvirt: Any, opened: Any, uuid: str) -> bool:
    """Whether the guest may run; also True, where libvirt does not say."""
    try:
        return bool(opened.lookupByUUIDString(uuid).isActive())
    except libvirt.libvirtError as error:
        return bool(error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN)


def _prepare(root: Path, user: QemuUser | None) -> None:
    """Writes ROOT/etc/qemu.conf, which the driver reads when it opens. Mode 0700, as the sockets in there control the guests.
    If QEMU runs as another user, 0711: libvirt keeps each guest's sockets in a folder of that user."""
    try:
        (root / "etc").mkdir(parents=True, exist_ok=True)
        (root / "etc").chmod(0o700)
        root.chmod(0o700 if user is None else 0o711)
        if user is not None:
            qemu_user.open_own(root.parent)
            for name in qemu_user.PASSED:
                (root / name).mkdir(exist_ok=True)
                (root / name).chmod(0o711)
        (root / "etc/qemu.conf").write_text(QEMU_CONF + _conf_of(user))
    except OSError as error:
        raise Internal(f"the hypervisor's folder {root} cannot be made: {error.strerror}") from error


def _conf_of(user: QemuUser | None) -> str:
    if user is not None:
        return QEMU_CONF_AS_ANOTHER.format(user=user)
    return QEMU_CONF_AS_WE + (QEMU_CONF_AS_ROOT if os.geteuid() == 0 else "")


def _forget_unborn(root: Path) -> None:
    """Removes the record of a guest that was starting and has no process yet, as its service was killed before that.

    libvirt would wait half a minute for that guest's monitor, with the domain locked. If there were a process, it would wait
    for its parent before it becomes QEMU, and end with it (libvirt's virCommandRequireHandshake).
    """
    for status in root.glob("run/qemu/*.xml"):
        with contextlib.suppress(OSError):
            if _UNBORN.search(status.read_bytes()):
                status.unlink()


def _short(root: Path) -> Path:
    """ROOT, or a symbolic link to it: the sockets that libvirt makes in it need short paths.

    The link's name depends only on ROOT, so the next process that opens ROOT finds the paths that running guests were started
    with.
    """
    if len(os.fsencode(root)) <= ROOT_LIMIT_BYTES:
        return root
    folder = Path("/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR", "/tmp"))  # noqa: S108 - checked below
    link = folder / f"sv-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}"
    # A caller may ask before the driver was ever opened and then makes folders in ROOT: a link to nothing would fail.
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Internal(f"the hypervisor's folder {root} cannot be made: {error.strerror}") from error
    with contextlib.suppress(FileExistsError):
        link.symlink_to(root)
    # In a folder that others may write to, another user may have made the link first.
    if not link.is_symlink() or link.lstat().st_uid != os.geteuid() or link.readlink() != root:
        raise Internal(f"{link} is in the way: it should be our link to {root}", hint=f"remove {link}")
    return link
