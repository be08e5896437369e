"""The folder on another host where a backup job keeps what the guest overwrites meanwhile. Blocking code.

libvirt makes and removes the files themselves; the folder, and what is left of a job whose QEMU was killed, is reached by a
storage pool of libvirt's that lasts for a moment: it works over every transport, and no command is run on that host.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, Final
from xml.etree import ElementTree as ET  # only written here

import structlog

from synvirt.errors import Internal
from synvirt.live.libvirt_remote_host import library
from synvirt.live.libvirt_remote_manifest import parse

log = structlog.get_logger(__name__)

POOL_NAME: Final = "synvirt-scratch"
# Another session has the pool for milliseconds.
TAKEN_TRIES: Final = 50
TAKEN_PAUSE_S: Final = 0.1

_lock = threading.Lock()


def make(connection: Any, folder: str) -> None:
    """The folder is there when it returns. What forbids it will be said by the backup that does not begin."""
    try:
        with _pool(connection, folder):
            pass
    except (library().libvirtError, Internal) as error:
        log.warning("the scratch folder cannot be looked after", folder=folder, cause=str(error))


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
    libvirt = library()
    root = ET.Element("pool", type="dir")
    ET.SubElement(root, "name").text = POOL_NAME
    target = ET.SubElement(root, "target")
    ET.SubElement(target, "path").text = folder
    permissions = ET.SubElement(target, "permissions")
    ET.SubElement(permissions, "mode").text = "0711"
    for tag, number in zip(("owner", "group"), _qemu_user(connection), strict=False):
        ET.SubElement(permissions, tag).text = number
    with _lock:
        for _ in range(TAKEN_TRIES):
            try:
                pool = connection.storagePoolCreateXML(
                    ET.tostring(root, encoding="unicode"), libvirt.VIR_STORAGE_POOL_CREATE_WITH_BUILD
                )
            except libvirt.libvirtError as error:
                # A pool of this name or folder: another session's, or one that a killed session left.
                left = _left_over(connection)
                if left is None:
                    raise Internal(f"the folder {folder} cannot be made: {error.get_error_message() or error}") from error
                with contextlib.suppress(libvirt.libvirtError):
                    left.destroy()
                time.sleep(TAKEN_PAUSE_S)
            else:
                break
        else:
            raise Internal(f"the pool {POOL_NAME} is in use all the time")
        try:
            yield pool
        finally:
            with contextlib.suppress(libvirt.libvirtError):
                pool.destroy()


def _qemu_user(connection: Any) -> tuple[str, ...]:
    """User and group that QEMU runs as there, which makes the sockets; none where libvirt changes no owners."""
    root = parse(connection.getCapabilities())
    for model in root.iterfind("host/secmodel"):
        if model.findtext("model") == "dac":
            found = re.fullmatch(r"\+([0-9]+):\+([0-9]+)", (model.findtext("baselabel") or "").strip())
            return found.groups() if found else ()
    return ()


def _left_over(connection: Any) -> Any | None:
    libvirt = library()
    try:
        return connection.storagePoolLookupByName(POOL_NAME)
    except libvirt.libvirtError:
        return None
