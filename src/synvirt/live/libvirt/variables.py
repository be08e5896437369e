"""A guest's UEFI variables, read where its libvirt keeps them. Blocking code.

libvirt hands out files as volumes of storage pools only: a pool that has the file is used; else one is made over the file's
folder for as long as the reading takes, which leaves what is in there alone (libvirt.org/formatstorage.html, type dir).
"""

import contextlib
import posixpath
from collections.abc import Iterator
from typing import Any
from uuid import uuid4
from xml.etree import ElementTree as ET  # only written here
from xml.etree.ElementTree import Element

from synvirt.errors import Internal
from synvirt.live.libvirt.host import library
from synvirt.live.libvirt.scratch import theirs

# The largest flash that OVMF is built for has 4 MiB, of which the variables are an eighth.
LIMIT_BYTES = 4 << 20
_PIECE_BYTES = 256 << 10
# Of the system's driver (libvirt, src/qemu/qemu_conf.c: nvramDir).
_FOLDER = "/var/lib/libvirt/qemu/nvram"


def uefi_variables(connection: Any, domain: Element) -> bytes | None:
    """None where the domain has none, or was never started. libvirtError, Internal."""
    path = _path(domain)
    if path is None:
        return None
    with _pool_over(connection, posixpath.dirname(path)):
        volume = _volume(connection, path)
        return None if volume is None else _content(connection, volume)


def _path(domain: Element) -> str | None:
    """A domain that leaves the choice of firmware to libvirt names its file only while it runs, in older versions."""
    named = (domain.findtext("os/nvram") or "").strip()
    chosen = domain.find("os[@firmware='efi']") is not None
    return named or (f"{_FOLDER}/{domain.findtext('name', '')}_VARS.fd" if chosen else None)


@contextlib.contextmanager
def _pool_over(connection: Any, folder: str) -> Iterator[None]:
    """Nothing is made where a pool has that folder already."""
    libvirt = library()
    if theirs(connection, folder) is not None:
        yield
        return
    root = ET.Element("pool", type="dir")
    ET.SubElement(root, "name").text = f"synvirt-{uuid4()}"
    ET.SubElement(ET.SubElement(root, "target"), "path").text = folder
    pool = connection.storagePoolCreateXML(ET.tostring(root, encoding="unicode"), 0)
    try:
        yield
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            pool.destroy()  # the pool; its files stay


def _volume(connection: Any, path: str) -> Any | None:
    libvirt = library()
    try:
        return connection.storageVolLookupByPath(path)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_STORAGE_VOL:
            return None
        raise


def _content(connection: Any, volume: Any) -> bytes:
    stream = connection.newStream(0)
    volume.download(stream, 0, LIMIT_BYTES + 1, 0)
    content = bytearray()
    while piece := stream.recv(_PIECE_BYTES):
        content += piece
        if len(content) > LIMIT_BYTES:
            stream.abort()
            raise Internal(f"the UEFI variables have more than {LIMIT_BYTES} bytes: that is no variable store")
    stream.finish()
    return bytes(content)
