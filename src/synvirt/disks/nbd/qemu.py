"""Images that only QEMU reads: encrypted qcow2, and obsolete formats. qemu-nbd serves them, NbdReader reads.

qemu-nbd trusts images more than we do, so it gets little. The format is named and never probed. It gets an open descriptor of
the one file, without its name. An image that leads to further files is refused here. It writes nothing. Its socket and a secret
are in a folder that no other user may enter. It ends with this process, so a killed worker leaves no server behind.
"""

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from synvirt.blocks import DiskReader, Extent, bytes_of
from synvirt.disks.nbd.cut_off import require_whole_parallels, require_whole_qcow, require_whole_qcow2, require_whole_qed
from synvirt.disks.nbd.reader import NbdReader
from synvirt.disks.nbd.served import place_for, reader_of
from synvirt.disks.qcow2.header import ENCRYPTIONS, read_header
from synvirt.disks.roots import open_here
from synvirt.errors import HostPathRejected, MalformedArchive, SourceUnreachable, UnsupportedFormat
from synvirt.programs import start

START_TIMEOUT_S = 20.0
_CONNECTIONS = 8
_MESSAGE_CHARS = 400


class QemuNbdReader:
    """The disk in an image file, or in a part of a file, served by qemu-nbd. `driver` is QEMU's name of the format.

    UnsupportedFormat: a format not in DRIVERS; HostPathRejected: the image needs another file; MalformedArchive: QEMU cannot
    open it, with its reason. `passphrase` opens an encrypted image.
    """

    def __init__(
        self,
        path: str,
        driver: str,
        *,
        offset: int = 0,
        length: int | None = None,
        passphrase: str | None = None,
        name: str = "",
        beneath: str | None = None,
    ) -> None:
        self._name = name or Path(path).name
        self._closing = contextlib.ExitStack()
        try:
            reader = open_here(path, offset, length, beneath)
            self._closing.callback(reader.close)
            options = _options(reader, driver, self._name, locked=passphrase is None)
            self._nbd = self._served(reader.descriptor, options, (offset, reader.size), passphrase)
        except BaseException:
            self.close()
            raise

    def _served(self, opened: int, options: dict[str, Any], part: tuple[int, int], passphrase: str | None) -> NbdReader:
        place = place_for("qemu-nbd", self._closing)
        argv = ["qemu-nbd", "-r", "-k", str(place.socket), "-e", str(_CONNECTIONS), "--pid-file", str(place.ready)]
        if passphrase is not None:
            # Not on the command line, which every user of the host can read.
            secret = place.folder / "secret"
            secret.touch(mode=0o600)
            secret.write_text(passphrase)
            argv += ["--object", f"secret,id=secret,file={secret}"]
        # The very file that was checked; opened again, since copies of a descriptor share its position.
        descriptor = os.open(f"/proc/self/fd/{opened}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset, length = part
            file = {"driver": "file", "filename": f"/proc/self/fd/{descriptor}"}
            # QEMU takes parts of files only in whole sectors, and whole files of any length.
            whole = offset == 0 and length == os.fstat(descriptor).st_size
            options["file"] = file if whole else {"driver": "raw", "offset": offset, "size": length, "file": file}
            argv.append("json:" + json.dumps(options))
            child = start(argv, stderr=place.log, descriptors=[descriptor], missing=UnsupportedFormat)
        finally:
            os.close(descriptor)
        return reader_of(
            child,
            place,
            self._closing,
            program="qemu-nbd",
            name=self._name,
            connections=_CONNECTIONS,
            timeout_s=START_TIMEOUT_S,
            ended=lambda message: MalformedArchive(f"QEMU cannot open {self._name}: {message[-_MESSAGE_CHARS:]}"),
            late=SourceUnreachable(f"qemu-nbd does not begin to serve {self._name}"),
        )

    @property
    def size(self) -> int:
        return self._nbd.size

    @property
    def max_readers(self) -> int:
        return self._nbd.max_readers

    def extents(self) -> Iterator[Extent]:
        return self._nbd.extents()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._nbd.read_into(offset, buffer)

    def close(self) -> None:
        self._closing.close()


def _options(image: DiskReader, driver: str, name: str, *, locked: bool) -> dict[str, Any]:
    """The image's node in QEMU's words, without its file. Refuses an image that needs another file, or a passphrase (`locked`:
    none was given)."""
    options = DRIVERS.get(driver)
    if options is None:
        raise UnsupportedFormat(f"{name}: images of format {driver!r} are not given to QEMU; {', '.join(sorted(DRIVERS))} are")
    chosen = options(image, name)
    if locked and ("key-secret" in chosen or "encrypt" in chosen):
        raise UnsupportedFormat(
            f"{name} is encrypted, and its passphrase is not given",
            hint=f"Put it into a file: --key-file FILE; for an import, call the file {name}.key, beside the image.",
        )
    return {"driver": driver, **chosen}


def _alone(image: DiskReader, name: str) -> dict[str, Any]:
    """For formats that cannot name another file, at least not to QEMU."""
    return {}


def _qcow2(image: DiskReader, name: str) -> dict[str, Any]:
    header = read_header(image, name, encrypted_too=True)
    _refuse_further_files(header.backing_file is not None or header.external_data, name)
    # Encryption is why a qcow2 image is given to QEMU.
    ways = {1: "aes", 2: "luks"}
    if not header.encryption:
        return {"backing": None}
    if header.encryption not in ways:
        raise UnsupportedFormat(f"{name} is encrypted by method {header.encryption}; known are {ENCRYPTIONS}")
    require_whole_qcow2(image, name)
    return {"backing": None, "encrypt": {"format": ways[header.encryption], "key-secret": "secret"}}


def _parallels(image: DiskReader, name: str) -> dict[str, Any]:
    require_whole_parallels(image, name)
    return {}


def _luks(image: DiskReader, name: str) -> dict[str, Any]:
    return {"key-secret": "secret"}


def _qcow(image: DiskReader, name: str) -> dict[str, Any]:
    """Version 1: QEMU's block/qcow.c, struct QCowHeader; big-endian; backing file's offset at 8, encryption method at 36."""
    _refuse_further_files(_field(image, 8, ">Q", name) != 0, name)
    require_whole_qcow(image, name)
    encryption = {"encrypt": {"format": "aes", "key-secret": "secret"}} if _field(image, 36, ">I", name) else {}
    return {"backing": None, **encryption}


def _qed(image: DiskReader, name: str) -> dict[str, Any]:
    """QEMU's docs/interop/qed_spec.txt: little-endian; bit 0 of the features, at byte 16, means a backing file."""
    _refuse_further_files(bool(_field(image, 16, "<Q", name) & 1), name)
    require_whole_qed(image, name)
    return {"backing": None}


def _field(image: DiskReader, at: int, layout: str, name: str) -> int:
    length = struct.calcsize(layout)
    if at + length > image.size:
        raise MalformedArchive(f"{name} has only {image.size} bytes")
    value: int = struct.unpack(layout, bytes_of(image, at, length))[0]
    return value


def _refuse_further_files(needed: bool, name: str) -> None:
    if needed:
        raise HostPathRejected(
            f"{name} needs another file, and QEMU would open any file that it names",
            hint="Convert the disk to a single file first: qemu-img convert -O qcow2 OLD NEW",
        )


# The formats that QEMU may read. Not vmdk: its descriptor may name any file as an extent.
DRIVERS: dict[str, Callable[[DiskReader, str], dict[str, Any]]] = {
    "qcow2": _qcow2,
    "luks": _luks,
    "qcow": _qcow,
    "qed": _qed,
    "bochs": _alone,
    "cloop": _alone,
    "dmg": _alone,
    "parallels": _parallels,
    "vdi": _alone,
    "vhdx": _alone,
    "vpc": _alone,
}
