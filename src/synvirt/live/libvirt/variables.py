"""Reads a guest's UEFI variables from its libvirt host. Blocking code.

libvirt gives files only as volumes of storage pools. A pool that has the file is used; else one is made over the file's folder
while it is read, which does not change the folder's files (libvirt.org/formatstorage.html, type dir).
"""

import contextlib
import posixpath
from collections.abc import Iterator
from typing import Any
from uuid import uuid4
from xml.etree import ElementTree as ET  # only for writing
from xml.etree.ElementTree import Element

from synvirt.errors import Internal
from synvirt.live.libvirt.host import library
from synvirt.live.libvirt.scratch import theirs

# OVMF's largest flash has 4 MiB; an eighth of that is for variables.
LIMIT_BYTES = 4 << 20
_PIECE_BYTES = 256 << 10
# The folder of the system's driver (libvirt, src/qemu/qemu_conf.c: nvramDir).
_FOLDER = "/var/lib/libvirt/qemu/nvram"


def uefi_variables(connection: Any, domain: Element) -> bytes | None:
    """None, where the domain has none, or was never started. libvirtError, Internal."""
    path = _path(domain)
    if path is None:
        return None
    with _pool_over(connection, posixpath.dirname(path)):
        volume = _volume(connection, path)
        return None if volume is None else _content(connection, volume)


def _path(domain: Element) -> str | None:
    """Older versions name the file only while the domain runs, if libvirt chose the firmware."""
    named = (domain.findtext("os/nvram") or "").strip()
    chosen = domain.find("os[@firmware='efi']") is not None
    return named or (f"{_FOLDER}/{domain.findtext('name', '')}_VARS.fd" if chosen else None)


@contextlib.contextmanager
def _pool_over(connection: Any, folder: str) -> Iterator[None]:
    """Makes no pool where one has that folder already."""
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
            pool.destroy()  # removes the pool; its files stay


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
            raise Internal(f"the UEFI variables have more than {LIMIT_BYTES} bytes: that is not a variable store")
    stream.finish()
    return bytes(content)
