"""The folder on another host where a backup job saves old data that the guest overwrites. Blocking code.

libvirt makes and removes the files themselves. The folder, and the leftovers of a job whose QEMU was killed, are reached
through a short-lived storage pool of libvirt: this works over every transport, and no command runs on that host.
"""

import contextlib
import errno
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from xml.etree import ElementTree as ET  # only for writing

import structlog

from synvirt.errors import Internal
from synvirt.live.libvirt.host import library
from synvirt.live.libvirt.manifest import parse
from synvirt.sizes import MIB

log = structlog.get_logger(__name__)

POOL_NAME: Final = "synvirt-scratch"
# More than a guest may overwrite between two checks.
LEAST_FREE_BYTES: Final = 512 * MIB
LOOK_EVERY_S: Final = 1.0
# Another service has the pool for milliseconds; one that stays longer was left by a killed service.
TAKEN_TRIES: Final = 50
TAKEN_PAUSE_S: Final = 0.1
LEFT_AFTER_TRIES: Final = 20

# One caller of this service at a time has the pool of a host. Hosts do not wait for each other: a call on a host whose storage
# hangs never returns.
_locks: dict[str, threading.Lock] = {}
LOCK_TIMEOUT_S: Final = 60.0


def make(connection: Any, folder: str) -> int | None:
    """Makes the folder, and gives its free bytes. None, where libvirt is not allowed to check it: the backup will then fail
    with the reason."""
    try:
        with _pool(connection, folder) as pool:
            return int(pool.info()[3])
    except (library().libvirtError, Internal) as error:
        log.warning("the scratch folder cannot be looked after", folder=folder, cause=str(error))
        return None


def least_free(capacity_bytes: int) -> int:
    """The space that a backup of disks of this size needs: at most their size, if all is overwritten once."""
    return min(LEAST_FREE_BYTES, capacity_bytes)


class Watch:
    """Ends a backup before its scratch folder is full: else QEMU would pause the guest or fail its writes."""

    def __init__(self, connection: Any, folder: str, least_bytes: int, end: Callable[[], None]) -> None:
        self._connection, self._folder, self._least_bytes, self._end = connection, folder, least_bytes, end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="scratch", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float | None = None) -> bool:
        """Whether its last check has ended after `limit_s`. None: waits until it has."""
        self._stopped.set()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            try:
                free = make(self._connection, self._folder)
                if free is not None and free < self._least_bytes:
                    log.warning("backup is ended for lack of room", folder=self._folder, free_bytes=free)
                    self._end()
                    return
            except Exception as error:  # whatever it is (the domain is busy), the folder still fills: the next look tries again
                log.warning("the scratch folder is looked after again", folder=self._folder, cause=str(error))


def clear(connection: Any, folder: str, name: str) -> None:
    """Removes a snapshot's leftovers there. Idempotent."""
    libvirt = library()
    try:
        with _pool(connection, folder) as pool:
            for volume in pool.listAllVolumes(0):
                if str(volume.name()).startswith(f"{name}-") and str(volume.name()).endswith(".scratch"):
                    volume.delete(0)
    except (libvirt.libvirtError, Internal) as error:
        log.warning("the scratch folder cannot be looked after", folder=folder, cause=str(error))


@contextlib.contextmanager
def _pool(connection: Any, folder: str) -> Iterator[Any]:
    """A pool over the folder: the host's own, if it has one, since libvirt allows no second; else ours, for this moment."""
    with _alone_on(connection):
        for attempt in range(TAKEN_TRIES):
            if (found := theirs(connection, folder)) is not None:
                yield found
                return
            try:
                pool = _made(connection, folder)
            except library().libvirtError as error:
                taken = _taken(connection)
                if taken is None and attempt:  # at once, as it may just have been released
                    raise Internal(f"the folder {folder} cannot be made: {error.get_error_message() or error}") from error
                if taken is not None and attempt >= LEFT_AFTER_TRIES:
                    with contextlib.suppress(library().libvirtError):
                        taken.destroy()
                time.sleep(TAKEN_PAUSE_S)
            else:
                break
        else:
            raise Internal(f"the pool {POOL_NAME} is in use all the time")
        try:
            yield pool
        finally:
            with contextlib.suppress(library().libvirtError):
                pool.destroy()


@contextlib.contextmanager
def _alone_on(connection: Any) -> Iterator[None]:
    """Internal, where another call on that host does not end."""
    host = str(connection.getHostname())
    lock = _locks.setdefault(host, threading.Lock())
    if not lock.acquire(timeout=LOCK_TIMEOUT_S):
        raise Internal(f"another call on {host} has not ended for {LOCK_TIMEOUT_S:.0f} s", hint="does its storage hang?")
    try:
        yield
    finally:
        lock.release()


def theirs(connection: Any, folder: str) -> Any | None:
    """The host's own pool over the folder, refreshed: it knows room and files only as of the last refresh."""
    libvirt = library()
    for pool in connection.listAllStoragePools(libvirt.VIR_CONNECT_LIST_STORAGE_POOLS_ACTIVE):
        with contextlib.suppress(libvirt.libvirtError):  # another service's short-lived pool is gone again
            if pool.name() == POOL_NAME or parse(pool.XMLDesc(0)).findtext("target/path") != folder:
                continue
            with contextlib.suppress(libvirt.libvirtError):  # it is in use
                pool.refresh(0)
            return pool
    return None


def _made(connection: Any, folder: str) -> Any:
    """An existing folder keeps its owner and mode, which libvirt would change; a new one is QEMU's. libvirtError."""
    libvirt = library()
    root = ET.Element("pool", type="dir")
    ET.SubElement(root, "name").text = POOL_NAME
    target = ET.SubElement(root, "target")
    ET.SubElement(target, "path").text = folder
    try:
        return connection.storagePoolCreateXML(ET.tostring(root, encoding="unicode"), 0)
    except libvirt.libvirtError as error:
        # virReportSystemError stores the errno there.
        if error.get_error_code() != libvirt.VIR_ERR_SYSTEM_ERROR or error.get_int1() != errno.ENOENT:
            raise
    permissions = ET.SubElement(target, "permissions")
    ET.SubElement(permissions, "mode").text = "0711"
    for tag, number in zip(("owner", "group"), _qemu_user(connection), strict=False):
        ET.SubElement(permissions, tag).text = number
    return connection.storagePoolCreateXML(ET.tostring(root, encoding="unicode"), libvirt.VIR_STORAGE_POOL_CREATE_WITH_BUILD)


def _qemu_user(connection: Any) -> tuple[str, ...]:
    """User and group that QEMU runs as there, as it makes the sockets; none, where libvirt changes no owners."""
    root = parse(connection.getCapabilities())
    for model in root.iterfind("host/secmodel"):
        if model.findtext("model") == "dac":
            found = re.fullmatch(r"\+([0-9]+):\+([0-9]+)", (model.findtext("baselabel") or "").strip())
            return found.groups() if found else ()
    return ()


def _taken(connection: Any) -> Any | None:
    libvirt = library()
    try:
        return connection.storagePoolLookupByName(POOL_NAME)
    except libvirt.libvirtError:
        return None
