"""The folder on another host where a backup job keeps what the guest overwrites meanwhile. Blocking code.

libvirt makes and removes the files themselves; the folder, and what is left of a job whose QEMU was killed, is reached by a
storage pool of libvirt's that lasts for a moment: it works over every transport, and no command is run on that host.
"""

import contextlib
import errno
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from xml.etree import ElementTree as ET  # only written here

import structlog

from synvirt.errors import Internal
from synvirt.live.libvirt.host import library
from synvirt.live.libvirt.manifest import parse
from synvirt.sizes import MIB

log = structlog.get_logger(__name__)

POOL_NAME: Final = "synvirt-scratch"
# What a guest may overwrite between two looks, and then some.
LEAST_FREE_BYTES: Final = 512 * MIB
LOOK_EVERY_S: Final = 1.0
# Another service has the pool for milliseconds; one that stays longer was left by one that was killed.
TAKEN_TRIES: Final = 50
TAKEN_PAUSE_S: Final = 0.1
LEFT_AFTER_TRIES: Final = 20

_lock = threading.Lock()


def make(connection: Any, folder: str) -> int | None:
    """The folder is there when it returns: how many bytes are free in it. None, where libvirt may not look after it: what
    forbids it will be said by the backup that does not begin."""
    try:
        with _pool(connection, folder) as pool:
            return int(pool.info()[3])
    except (library().libvirtError, Internal) as error:
        log.warning("the scratch folder cannot be looked after", folder=folder, cause=str(error))
        return None


def least_free(capacity_bytes: int) -> int:
    """What must be free for a backup of disks of this size: never more than all of them, once overwritten."""
    return min(LEAST_FREE_BYTES, capacity_bytes)


class Watch:
    """Ends a backup before its scratch folder is full: QEMU would pause the guest, or fail its writes, and not the backup."""

    def __init__(self, connection: Any, folder: str, least_bytes: int, end: Callable[[], None]) -> None:
        self._connection, self._folder, self._least_bytes, self._end = connection, folder, least_bytes, end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="scratch", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float | None = None) -> bool:
        """Has its last look ended, `limit_s` later? None: waits until it has."""
        self._stopped.set()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            free = make(self._connection, self._folder)
            if free is not None and free < self._least_bytes:
                log.warning("backup is ended for lack of room", folder=self._folder, free_bytes=free)
                with contextlib.suppress(library().libvirtError, Internal):
                    self._end()
                return


def clear(connection: Any, folder: str, name: str) -> None:
    """Remove what a snapshot left there, if anything. Idempotent."""
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
    """A pool over the folder: theirs, where that host has one, since libvirt allows no second; else ours, for this moment."""
    with _lock:
        for attempt in range(TAKEN_TRIES):
            if (found := theirs(connection, folder)) is not None:
                yield found
                return
            try:
                pool = _made(connection, folder)
            except library().libvirtError as error:
                taken = _taken(connection)
                if taken is None and attempt:  # at once, it may just have been released
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


def theirs(connection: Any, folder: str) -> Any | None:
    """The pool that the host has over the folder, looked at again: it knows room and files of when that was done last."""
    libvirt = library()
    for pool in connection.listAllStoragePools(libvirt.VIR_CONNECT_LIST_STORAGE_POOLS_ACTIVE):
        with contextlib.suppress(libvirt.libvirtError):  # another one's momentary pool is gone again
            if pool.name() == POOL_NAME or parse(pool.XMLDesc(0)).findtext("target/path") != folder:
                continue
            with contextlib.suppress(libvirt.libvirtError):  # it is in use
                pool.refresh(0)
            return pool
    return None


def _made(connection: Any, folder: str) -> Any:
    """A folder that is there keeps its owner and mode, which libvirt would change; one that is made is QEMU's. libvirtError."""
    libvirt = library()
    root = ET.Element("pool", type="dir")
    ET.SubElement(root, "name").text = POOL_NAME
    target = ET.SubElement(root, "target")
    ET.SubElement(target, "path").text = folder
    try:
        return connection.storagePoolCreateXML(ET.tostring(root, encoding="unicode"), 0)
    except libvirt.libvirtError as error:
        # virReportSystemError keeps the errno there.
        if error.get_error_code() != libvirt.VIR_ERR_SYSTEM_ERROR or error.get_int1() != errno.ENOENT:
            raise
    permissions = ET.SubElement(target, "permissions")
    ET.SubElement(permissions, "mode").text = "0711"
    for tag, number in zip(("owner", "group"), _qemu_user(connection), strict=False):
        ET.SubElement(permissions, tag).text = number
    return connection.storagePoolCreateXML(ET.tostring(root, encoding="unicode"), libvirt.VIR_STORAGE_POOL_CREATE_WITH_BUILD)


def _qemu_user(connection: Any) -> tuple[str, ...]:
    """User and group that QEMU runs as there, which makes the sockets; none where libvirt changes no owners."""
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
