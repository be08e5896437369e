"""A disk in a snapshot of a vSphere VM, by VMware's own transport: nbdkit's vddk plugin, where the operator has installed it.

VDDK («Virtual Disk Development Kit Programming Guide») is VMware's to give out, and closed; nbdkit-vddk-plugin(1) speaks it and
serves NBD, so that our side is an NBD export like any other. This nbdkit is ours alone: it ends with the reader.
"""

import contextlib
import hashlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from synvirt.blocks import Extent
from synvirt.disks.nbd.reader import NbdReader
from synvirt.disks.nbd.served import place_for, reader_of
from synvirt.disks.specs import VddkSpec
from synvirt.errors import DiskReadFailed, SourceUnreachable, UnsupportedFormat
from synvirt.programs import start
from synvirt.transport import tls

# VDDK logs in and opens the disk before it serves: seconds on a quiet vCenter.
START_TIMEOUT_S: Final = 120.0
CONNECTIONS: Final = 4


class VddkReader:
    """Its extents are what the host says is allocated."""

    def __init__(self, spec: VddkSpec) -> None:
        self._closing = contextlib.ExitStack()
        try:
            self._nbd = self._served(spec)
        except BaseException:
            self.close()
            raise

    def _served(self, spec: VddkSpec) -> NbdReader:
        place = place_for("vddk", self._closing)
        # Neither on the command line, which every user of the host can read, nor in a file, which a crash would leave behind.
        secret = os.memfd_create("secret")
        try:
            os.write(secret, spec.password.encode())
            os.lseek(secret, 0, os.SEEK_SET)
            command = _command(spec, secret, place.socket, place.ready)
            child = start(command, stderr=place.log, descriptors=[secret], missing=UnsupportedFormat)
        finally:
            os.close(secret)
        return reader_of(
            child,
            place,
            self._closing,
            name=spec.file,
            connections=CONNECTIONS,
            timeout_s=START_TIMEOUT_S,
            ended=lambda said: DiskReadFailed(
                f"VDDK cannot open {spec.file}: {said}", hint="options.transport datastore reads without VDDK"
            ),
            late=SourceUnreachable(f"VDDK does not open {spec.file} within {START_TIMEOUT_S:.0f} s"),
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


def _command(spec: VddkSpec, secret: int, socket: Path, ready: Path) -> list[str]:
    return [
        "nbdkit", "--foreground", "--readonly", "--exit-with-parent", "--unix", str(socket), "--pidfile", str(ready), "vddk",
        f"libdir={spec.libdir}",
        f"server={spec.host}",
        f"port={spec.port}",
        f"user={spec.user}",
        f"password=-{secret}",
        f"thumbprint={_thumbprint(spec)}",
        f"vm=moref={spec.vm_id}",
        f"snapshot={spec.snapshot_id}",
        f"file={spec.file}",
        *([f"transports={spec.transports}"] if spec.transports else []),
    ]  # fmt: skip


def _thumbprint(spec: VddkSpec) -> str:
    """VDDK knows certificates by SHA-1: that of the one which our own check has just let pass."""
    context = tls.context(spec.host, verify=spec.verify_tls, fingerprint_sha256=spec.fingerprint_sha256)
    try:
        der = tls.shown_certificate(spec.host, spec.port, context)
    except ssl.SSLCertVerificationError as error:
        raise tls.not_trusted(spec.host, error.verify_message) from error
    except OSError as error:
        raise SourceUnreachable(f"{spec.host} does not answer on port {spec.port}: {error}") from error
    return hashlib.sha1(der).digest().hex(":").upper()  # noqa: S324 - VDDK's choice, after a check by SHA-256
