"""What this host has of what the service can use: one row a requirement of the specification (part 1) and of our own.

A row looks for one thing, and never changes anything. What the settings do not ask for may be missing without harm.
"""

import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from synvirt.cage import layers, may_open_others_files
from synvirt.errors import SynvirtError
from synvirt.hypervisor.accel import EMULATOR, accelerator
from synvirt.keyring import KEY_BYTES
from synvirt.kvm import qemu_user
from synvirt.kvm.connection import Connection
from synvirt.kvm.qemu_user import embedded_root
from synvirt.model.values import now
from synvirt.offline.hyperv.tool import vmcx_tool
from synvirt.programs import ProgramFailed, find, run
from synvirt.settings import RbdSetting, Settings, ZfsSetting
from synvirt.sizes import GIB

if TYPE_CHECKING:
    from sqlalchemy import Connection as Database

# A tool that says its version takes no time; one that hangs is as good as missing.
LOOK_TIMEOUT_S = 20
# What a host has changes when somebody installs something.
CHECKUP_EVERY_S = 600
# Of stored documents that cannot be read. Each has a line of its own in the service's log.
QUARANTINED_SHOWN = 20
# Specification part 8.
IMPORT_ROOT_MODE, KEY_MODE = 0o750, 0o600

log = structlog.get_logger(__name__)


class Missing(Exception):
    """Its text: what was looked for, and where."""


@dataclass(frozen=True, slots=True)
class Check:
    """`look`: what was found, in a few words, or Missing. `needed`: does the service as it is set fail without it?"""

    name: str
    what_for: str
    how_to_get: str
    look: Callable[[Settings], str]
    needed: Callable[[Settings], bool] = lambda _: False


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    found: bool
    needed: bool
    detail: str
    what_for: str
    how_to_get: str


def examine(settings: Settings) -> list[Finding]:
    """All checks, in the table's order; none stops another."""
    return [_examine(check, settings) for check in CHECKS]


def _examine(check: Check, settings: Settings) -> Finding:
    try:
        found, detail = True, check.look(settings)
    except Missing as missing:
        found, detail = False, str(missing)
    except SynvirtError as error:
        found, detail = False, error.detail
    return Finding(check.name, found, check.needed(settings), detail, check.what_for, check.how_to_get)


class Checkup:
    """The checks of a service that runs: made at its start and again when they are old and somebody asks, always in a thread of
    their own, so that nobody waits for them. `latest()`: when, and what was found; None before the first ones are done."""

    def __init__(self, settings: Settings, *, examine: Callable[[Settings], list[Finding]] = examine) -> None:
        self._settings, self._examine = settings, examine
        self._lock = threading.Lock()
        self._latest: tuple[datetime, list[Finding]] | None = None
        self._begun_at: float | None = None

    def begin(self) -> None:
        """At once, unless they are being made or are fresh."""
        with self._lock:
            if self._begun_at is not None and time.monotonic() - self._begun_at < CHECKUP_EVERY_S:
                return
            self._begun_at = time.monotonic()
        threading.Thread(target=self._run, name="checkup", daemon=True).start()

    def latest(self) -> tuple[datetime, list[Finding]] | None:
        self.begin()
        return self._latest

    def renew(self) -> tuple[datetime, list[Finding]]:
        """Whoever has mended something waits for the checks, and sees what they say now."""
        with self._lock:
            self._begun_at = time.monotonic()
        return self._run()

    def _run(self) -> tuple[datetime, list[Finding]]:
        findings = self._examine(self._settings)
        first = self._latest is None
        self._latest = latest = (now(), findings)
        for finding in findings if first else ():
            if finding.needed and not finding.found:
                log.warning(
                    "this host lacks what the service needs", name=finding.name, cause=finding.detail, hint=finding.how_to_get
                )
        return latest


def needs_met(findings: list[Finding]) -> bool:
    return all(finding.found or not finding.needed for finding in findings)


# ── what is looked for ───────────────────────────────────────────────────────────────────────────────────────────────


def _program(name: str, *version: str) -> Callable[[Settings], str]:
    def look(_: Settings) -> str:
        path = _path(name)
        return f"{path}: {_first_line([name, *version])}" if version else path

    return look


def _path(name: str) -> str:
    path = find(name)
    if path is None:
        raise Missing(f"no program {name}")
    return path


def _first_line(argv: list[str]) -> str:
    return next(iter(run(argv, timeout_s=LOOK_TIMEOUT_S).stdout.splitlines()), "")[:80]


def _module(name: str, version: Callable[[], str]) -> Callable[[Settings], str]:
    def look(_: Settings) -> str:
        try:
            return version()
        except ImportError as error:
            raise Missing(f"Python has no module {name}") from error

    return look


def _libvirt_version() -> str:
    from synvirt.kvm.library import module

    number = int(module().getVersion())
    return f"libvirt {number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def _libnbd_version() -> str:
    import nbd

    return f"libnbd {nbd.NBD().get_version()}"


def _pyvmomi_version() -> str:
    # Looked for and not loaded: it takes a while, and memory.
    return f"pyvmomi {metadata.version('pyvmomi')}"


def _nbdkit_vddk(_: Settings) -> str:
    _path("nbdkit")
    try:
        return _first_line(["nbdkit", "vddk", "--version"])
    except ProgramFailed as error:
        raise Missing("nbdkit has no plugin vddk") from error


def _zfs_settings(settings: Settings) -> list[ZfsSetting]:
    own = [ZfsSetting(kind="zfs", pool=settings.zfs_pool, namespace=settings.zfs_namespace)] if settings.zfs_pool else []
    return own + [one for one in settings.destinations.values() if one.kind == "zfs"]


def _zfs_pool(settings: Settings) -> str:
    _path("zfs")
    pools = sorted({one.pool for one in _zfs_settings(settings)})
    if not pools:
        raise Missing("no pool is set")
    health = {pool: _first_line(["zpool", "list", "-H", "-o", "health,free", pool]) for pool in pools}
    return ", ".join(f"{pool}: {' free '.join(said.split())}" for pool, said in health.items())


def _zfs_allow(settings: Settings) -> str:
    from synvirt.destinations import zfs_allow

    user, groups = zfs_allow.caller()
    if os.geteuid() == 0:
        return "root may do all of it"
    lacking = [
        f"`zfs allow -u {user} {','.join(lacks)} {one.pool}/{one.namespace}`"
        for one in _zfs_settings(settings)
        if (lacks := zfs_allow.missing(f"{one.pool}/{one.namespace}", user, groups))
    ]
    if zfs_allow.DEVICE_GROUP not in groups and not may_open_others_files():
        lacking.append(f"`usermod -aG {zfs_allow.DEVICE_GROUP} {user}`")
    if lacking:
        raise Missing(f"root has to call {' and '.join(lacking)}")
    return f"{user} may do all of it"


def _hyperv(settings: Settings) -> str:
    command, driver = settings.vmcx_tool, settings.vmcx_tool_driver
    _path(command)
    if settings.vmcx_way != "tool" and not vmcx_tool(settings).has_driver():
        raise Missing(f"{command} is here, but lists no input driver {driver}")
    return f"{command} -i {driver}"


def _virtio_win(settings: Settings) -> str:
    if not os.access(settings.virtio_win_iso, os.R_OK):
        raise Missing(f"no {settings.virtio_win_iso}")
    return str(settings.virtio_win_iso)


def _uefi(*, secure: bool) -> Callable[[Settings], str]:
    def look(_: Settings) -> str:
        from synvirt.hypervisor.libvirt_host import installed_uefi

        if (firmware := installed_uefi(secure=secure)) is None:
            raise Missing("no UEFI firmware with secure boot and enrolled keys" if secure else "no UEFI firmware for guests")
        return firmware.code

    return look


def _swtpm(_: Settings) -> str:
    return f"{_path('swtpm')}, {_path('swtpm_setup')}"


def _network(settings: Settings) -> str:
    """What a network card is plugged into that the plan maps nowhere."""
    if not _is_system(settings):
        return "user: the emulator's own, which needs nothing of the host"
    connection = Connection(settings.hypervisor_uri, lambda: None)
    try:
        active = {network.name() for network in connection.use().listAllNetworks(_ACTIVE)}
    finally:
        connection.close()
    if "default" not in active:
        raise Missing(f"libvirt has no active network default; it has {', '.join(sorted(active)) or 'none'}")
    return "network:default"


def _tun(_: Settings) -> str:
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise Missing(f"/dev/net/tun cannot be opened: {error.strerror}") from error
    return "opens"


def _is_system(settings: Settings) -> bool:
    return settings.hypervisor_uri.startswith("qemu:///system")


def _kvm(settings: Settings) -> str:
    found = accelerator(settings.data_dir / "libvirt" if settings.data_dir.is_dir() else None)
    if found.kind != "kvm":
        raise Missing(f"{found.reason}; guests are emulated, slowly")
    return found.reason


def _hypervisor(settings: Settings) -> str:
    """The embedded driver is only looked for: a service that runs has it open, and a second may not."""
    if embedded_root(settings.hypervisor_uri) is None:
        connection = Connection(settings.hypervisor_uri, lambda: None)
        try:
            connection.use()
        finally:
            connection.close()
        return settings.hypervisor_uri
    driver = next(Path("/usr").glob("lib*/**/libvirt/connection-driver/libvirt_driver_qemu.so"), None)
    if driver is None:
        raise Missing("libvirt's QEMU driver is not installed")
    return f"{settings.hypervisor_uri}: {driver}"


def _qemu_user(settings: Settings) -> str:
    found = qemu_user.choose(settings)
    if found.lacking:
        raise Missing(found.why)
    return found.why


def _data_dir(settings: Settings) -> str:
    folder = settings.data_dir
    # Where it is to be made, the folder above it decides.
    present = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        raise Missing(f"{present} cannot be written: {error.strerror}") from error
    return f"{folder}: {shutil.disk_usage(present).free / GIB:.0f} GiB free"


def _import_root(settings: Settings) -> str:
    return _ours(settings.imports_dir, IMPORT_ROOT_MODE)


def _key(settings: Settings) -> str:
    path = settings.keyring_dir / "migrator.key"
    found = _ours(path, KEY_MODE)
    if path.exists() and path.stat().st_size != KEY_BYTES:
        raise Missing(f"{path} has {path.stat().st_size} bytes, not {KEY_BYTES}: it is no key")
    return found


def _ours(path: Path, mode: int) -> str:
    """Of the service's user, and nobody else's to read or write; what the first start has yet to make is in order. root, who
    asks, need not be that user: then it is who owns the folder."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return f"{path}: made at the first start"
    except OSError as error:
        raise Missing(f"{path} cannot be looked at: {error.strerror}") from error
    service = path.parent.stat().st_uid if os.geteuid() == 0 else os.geteuid()
    if found.st_uid != service:
        raise Missing(f"{path} belongs to the user number {found.st_uid}, not to {service}")
    if stat.S_IMODE(found.st_mode) & ~mode:
        raise Missing(f"{path} has the mode {stat.S_IMODE(found.st_mode):04o}, which is wider than {mode:04o}")
    return f"{path}: {stat.S_IMODE(found.st_mode):04o}"


def _store(settings: Settings) -> str:
    """Looked at only: the service makes it, and brings an old one up to date."""
    import sqlalchemy

    url = sqlalchemy.make_url(settings.store_url)
    if url.get_backend_name() == "sqlite":
        path = Path(str(url.database))
        if not path.exists():
            return f"{path}: made at the first start"
        url = url.set(database=f"file:{path}", query={"mode": "ro", "uri": "true"})
    else:
        url = url.set(drivername="postgresql+psycopg")
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    try:
        with engine.connect() as connection:
            version = str(connection.scalar(sqlalchemy.text(_VERSIONS[url.get_backend_name()])))
            bad = _quarantined(connection)
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise Missing(f"the store cannot be opened: {str(getattr(error, 'orig', error)).splitlines()[0]}") from error
    finally:
        engine.dispose()
    if bad:
        shown = "; ".join(bad[:QUARANTINED_SHOWN])
        more = f"; and {len(bad) - QUARANTINED_SHOWN} more" if len(bad) > QUARANTINED_SHOWN else ""
        raise Missing(f"stored documents that this version cannot read, and leaves alone: {shown}{more}")
    return f"{url.get_backend_name()} {version}"


def _quarantined(connection: "Database") -> list[str]:
    """Each stored document that this version cannot read, with its cause. Of jobs only those that have not ended are read, of
    runs and restore points, which are many, only the versions."""
    import sqlalchemy

    from synvirt.backups.model import BackupJob, BackupRepository
    from synvirt.model.files import Upload
    from synvirt.model.job import Migration
    from synvirt.model.kinds import ENDS
    from synvirt.model.sources import Source
    from synvirt.model.values import Model
    from synvirt.store.documents import VERSION, check_version, parsed
    from synvirt.store.tables import backups, ledger, memory, migrations, sources, tokens, uploads

    looked_at = sqlalchemy.inspect(connection)
    ends = [str(end) for end in ENDS]
    kinds: dict[str, type[Model]] = {"job": BackupJob, "repository": BackupRepository}
    found = []
    kinds |= {"migration": Migration, "source": Source, "upload": Upload}
    for table in (migrations, sources, uploads, backups, tokens, memory, ledger):
        if not looked_at.has_table(table.name):
            continue
        there = {column["name"] for column in looked_at.get_columns(table.name)}
        columns = [column for column in table.c if column.name in there]
        query = sqlalchemy.select(*columns).order_by(*table.primary_key)
        for row in connection.execute(query.where(table.c.state.not_in(ends)) if table is migrations else query):
            kind = row.kind if table is backups else table.name.removesuffix("s")
            version = getattr(row, "version", VERSION)
            try:
                check_version(kind, version)
                if kind in kinds:
                    parsed(kinds[kind], row.document, version)
            except SynvirtError as error:
                found.append(f"{kind} {row.migration_id if table is memory else row.id}: {error.detail}")
    return found


def _rhsrvany(settings: Settings) -> str:
    from synvirt.guests.virt_v2v import SERVICE_STARTERS

    found = [name for name in SERVICE_STARTERS if (settings.virt_tools_dir / name).exists()]
    if not found:
        raise Missing(f"none of {', '.join(SERVICE_STARTERS)} in {settings.virt_tools_dir}")
    return str(settings.virt_tools_dir / found[0])


def _librbd(_: Settings) -> str:
    """Asked of a process of its own: Ceph's libraries cost 16 MiB, and most services never need them."""
    ask = "import rbd; print(*rbd.RBD().version(), sep='.')"
    try:
        return "librbd " + run([sys.executable, "-I", "-c", ask], timeout_s=LOOK_TIMEOUT_S).stdout.strip()
    except ProgramFailed as failed:
        if "ModuleNotFoundError" in failed.stderr:
            raise Missing("the Python module rbd is not installed") from failed
        raise Missing(f"the Python module rbd cannot be loaded: {failed.stderr}") from failed


def _qemu_module(name: str) -> Callable[[Settings], str]:
    def look(_: Settings) -> str:
        found = next(Path("/usr/lib").glob(f"*/qemu/{name}.so"), None)
        if found is None:
            raise Missing(f"QEMU's module {name} is not installed")
        return str(found)

    return look


def _libnfs(_: Settings) -> str:
    from synvirt.disks.nfs import found

    return found()


def _rbd_settings(settings: Settings) -> list[RbdSetting]:
    return [one for one in settings.destinations.values() if one.kind == "rbd"]


def _rbd_pools(settings: Settings) -> str:
    from synvirt.destinations.rbd import RbdDestination
    from synvirt.disks.specs import RbdPlace

    _librbd(settings)
    if not _rbd_is_set(settings):
        raise Missing("no pool is set")
    places = [RbdPlace(conf=str(one.conf), client=one.client, pool=one.pool) for one in _rbd_settings(settings)]
    free = {place.pool: RbdDestination(place).free_bytes() for place in places}
    return ", ".join(f"{pool}: {there / GIB:.0f} GiB free" for pool, there in free.items())


def _rbd_is_set(settings: Settings) -> bool:
    return bool(_rbd_settings(settings))


def _always(_: Settings) -> bool:
    return True


def _zfs_is_set(settings: Settings) -> bool:
    return settings.destination == "zfs" or bool(_zfs_settings(settings))


# virNetwork's flag VIR_CONNECT_LIST_NETWORKS_ACTIVE, known without the library.
_ACTIVE = 2
# The version, by a question that cannot be answered without reading the store.
_VERSIONS = {"sqlite": "SELECT sqlite_version(), count(*) FROM sqlite_master", "postgresql": "SHOW server_version"}
_DRIVERS = "https://fedorapeople.org/groups/virt/virtio-win/direct-downloads/stable-virtio/virtio-win.iso"
_VSPHERE = "vSphere as a live source"
_NUTANIX = "Nutanix AHV as a live source"
_WINDOWS = "Windows guests: their virtio drivers"

_READERS = "confining what reads images and copies disks"
# The layers of synvirt.cage: what each is for, and how a host gets it.
CAGE_LAYERS = {
    "no_new_privs": (f"{_READERS}: no program gives it more rights", "any Linux has it"),
    "limits": (f"{_READERS}: memory, files, processor time", "any Linux has it"),
    "network namespace": (f"{_READERS}: no network, where none is needed", "run the service as root, or rely on seccomp"),
    "user": (f"{_READERS}: another user than the service's", "run the service as root, as the package does"),
    "capabilities": (f"{_READERS}: root's rights dropped", "run the service as root, as the package does"),
    "landlock": (f"{_READERS}: no file but its own", "a kernel of 5.13 or newer with landlock in its list of security modules"),
    "seccomp": (f"{_READERS}: no programs, no sockets, no kernel interfaces", "a kernel with seccomp, on x86_64"),
}


def _layer(name: str) -> Callable[[Settings], str]:
    def look(_: Settings) -> str:
        if not layers()[name]:
            raise Missing("this host does not give it to the service")
        return "holds"

    return look


CHECKS = (
    *(Check(f"cage: {name}", what_for, how, _layer(name)) for name, (what_for, how) in CAGE_LAYERS.items()),
    Check("data_dir", "all that the service keeps", "make it, and give it to the service's user", _data_dir, _always),
    Check("import root", "where files to import lie", "chown it to the service's user; chmod 0750", _import_root, _always),
    Check("migrator.key", "seals the credentials of sources", "chown it to the service's user; chmod 0600", _key, _always),
    Check("store", "jobs, watermarks, sources, uploads", "setting database_url; or free the disk of data_dir", _store, _always),
    Check(
        "python3-libvirt", "the hypervisor", "apt-get install python3-libvirt", _module("libvirt", _libvirt_version), _always
    ),
    Check("libvirt", "the hypervisor", "apt-get install libvirt-daemon; setting libvirt_uri", _hypervisor, _always),
    Check(
        "guests' user",
        "confining guests: QEMU is not root",
        "apt-get install libvirt-daemon-system; chmod o+x the folders on the way; docs/guests.md; setting qemu_user",
        _qemu_user,
    ),
    Check(EMULATOR, "runs the guests", "apt-get install qemu-system-x86", _program(EMULATOR, "--version"), _always),
    Check("kvm", "guests at full speed", "enable virtualisation in the host's firmware, or nesting where it is a guest", _kvm),
    Check("ovmf", "guests with UEFI firmware", "apt-get install ovmf", _uefi(secure=False)),
    Check("ovmf secure boot", "guests with secure boot", "apt-get install ovmf", _uefi(secure=True)),
    Check("swtpm", "guests with a TPM", "apt-get install swtpm swtpm-tools", _swtpm),
    Check("network", "guests whose network the plan does not map", "virsh net-start default", _network, _is_system),
    Check("tun", "a network for rehearsed guests", "modprobe tun; the service's user must be able to open /dev/net/tun", _tun),
    Check("qemu-img", "disk images of every sort", "apt-get install qemu-utils", _program("qemu-img", "--version"), _always),
    Check(
        "qemu-nbd", "images our own readers refuse", "apt-get install qemu-utils", _program("qemu-nbd", "--version"), _always
    ),
    Check("pyvmomi", _VSPHERE, "pip install 'synvirt[vmware]'", _module("pyvmomi", _pyvmomi_version)),
    Check(
        "nbdkit vddk",
        f"{_VSPHERE}, by VMware's own transport, the fastest one",
        "nbdkit-plugin-vddk (Debian 13, contrib) and VMware's VDDK; options.vddk_libdir: docs/platforms/vsphere.md",
        _nbdkit_vddk,
    ),
    Check("libnfs", f"{_NUTANIX}, by NFS", "apt-get install libnfs13", _libnfs),
    Check("qemu iscsi", f"{_NUTANIX}, by iSCSI", "apt-get install qemu-block-extra", _qemu_module("block-iscsi")),
    Check("python3-libnbd", "reading over NBD", "apt-get install python3-libnbd", _module("nbd", _libnbd_version), _always),
    Check("zfs", "volumes on zfs", "apt-get install zfsutils-linux (contrib)", _program("zfs", "version"), _zfs_is_set),
    Check("zfs pool", "volumes on zfs", "zpool create; settings zfs_pool, zfs_namespace", _zfs_pool, _zfs_is_set),
    Check("zfs allow", "volumes on zfs, made by another user than root", "docs/zfs.md", _zfs_allow, _zfs_is_set),
    Check("blkdiscard", "zeros that take no room on zfs", "apt-get install util-linux", _program("blkdiscard"), _zfs_is_set),
    Check("virt-v2v-in-place", _WINDOWS, "apt-get install virt-v2v", _program("virt-v2v-in-place", "--version")),
    Check("virtio-win.iso", _WINDOWS, f"{_DRIVERS}, put where the setting virtio_win_iso says", _virtio_win),
    Check("rhsrvany", f"{_WINDOWS}, with the agent of virtio-win.iso", "docs/windows.md; setting virt_tools_dir", _rhsrvany),
    Check("python3-rbd", "volumes in a Ceph pool", "apt-get install python3-rbd", _librbd, _rbd_is_set),
    Check(
        "qemu rbd",
        "guests on volumes in a Ceph pool",
        "apt-get install qemu-block-extra",
        _qemu_module("block-rbd"),
        _rbd_is_set,
    ),
    Check("ceph pool", "volumes in a Ceph pool", "docs/ceph.md", _rbd_pools, _rbd_is_set),
    Check(
        "virt-v2v hyperv",
        "Hyper-V exports by an outside tool, where our own readers are not to read them",
        "a virt-v2v with the input driver hyperv (Debian's has none), or settings vmcx_tool and vmcx_way",
        _hyperv,
        lambda settings: settings.vmcx_way == "tool",
    ),
)
