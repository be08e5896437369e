"""A LUN of an iSCSI target (RFC 7143) as a disk: QEMU's iscsi driver reads it, qemu-nbd serves that, NbdReader reads.

QEMU's driver is libiscsi in a process of its own (Debian's qemu-block-extra): a target that sends nonsense crashes only that
process, and no worker. The LUN is opened read-only.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Final

from synvirt import outgoing
from synvirt.blocks import Extent
from synvirt.disks.nbd.reader import NbdReader
from synvirt.disks.nbd.served import place_for, reader_of
from synvirt.disks.specs import IscsiSpec
from synvirt.errors import DiskReadFailed, Internal, SourceUnreachable
from synvirt.programs import start

CONNECT_TIMEOUT_S: Final = 3.0
START_TIMEOUT_S: Final = 10.0
# After this long without an answer, QEMU repeats a request.
_SILENCE_TIMEOUT_S: Final = 30
_CONNECTIONS: Final = 4


class IscsiReader:
    """SourceUnreachable: the target is away; DiskReadFailed: it refuses our login, or has no such LUN. Known within 10 s."""

    def __init__(self, spec: IscsiSpec) -> None:
        self._spec = spec
        self._closing = contextlib.ExitStack()
        try:
            self._nbd = self._served(self._knock())
            self.size = self._checked_size()
        except BaseException:
            self.close()
            raise

    def _checked_size(self) -> int:
        wanted, has = self._spec.size_bytes, self._nbd.size
        if wanted is not None and has < wanted:
            raise DiskReadFailed(f"{self._spec.name}: its LUN has {has} bytes, and the disk {wanted}")
        return has if wanted is None else wanted

    def _knock(self) -> str:
        """The portal at the address that answers, as libiscsi would ask a name server again."""
        host, _, port = self._spec.portal.rpartition(":")
        try:
            with outgoing.sources().dial(host.strip("[]"), int(port), timeout_s=CONNECT_TIMEOUT_S) as reached:
                address = str(reached.getpeername()[0])
        except OSError as error:
            raise SourceUnreachable(
                f"{self._spec.portal} accepts no iSCSI connection: {error.strerror or 'no answer'}",
                hint="has the cluster a data services address, and does a firewall let this host reach TCP 3260 there?",
            ) from error
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def _served(self, portal: str) -> NbdReader:
        spec = self._spec
        place = place_for("qemu-iscsi", self._closing)
        options = {
            "driver": "raw",
            "file": {
                "driver": "iscsi",
                "transport": "tcp",
                "portal": portal,
                "target": spec.target,
                "lun": spec.lun,
                "initiator-name": spec.initiator,
                "timeout": _SILENCE_TIMEOUT_S,
            },
        }
        argv = ["qemu-nbd", "-r", "-k", str(place.socket), "-e", str(_CONNECTIONS), "--pid-file", str(place.ready)]
        child = start([*argv, "json:" + json.dumps(options)], stderr=place.log, missing=Internal)
        return reader_of(
            child,
            place,
            self._closing,
            program="qemu-nbd",
            name=spec.name,
            connections=_CONNECTIONS,
            timeout_s=START_TIMEOUT_S,
            ended=lambda message: DiskReadFailed(
                f"{spec.name} cannot be read by iSCSI from {spec.portal}: {message}", hint=_hint(message)
            ),
            late=SourceUnreachable(
                f"{spec.portal} does not answer as an iSCSI target: no login within {START_TIMEOUT_S:.0f} s"
            ),
        )

    @property
    def max_readers(self) -> int:
        return self._nbd.max_readers

    def extents(self) -> Iterator[Extent]:
        """By the LUN's provisioning; a LUN that is longer than the disk is cut."""
        for extent in self._nbd.extents():
            if extent.start < self.size:
                yield Extent(extent.start, min(extent.end, self.size) - extent.start, extent.zero)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside {self._spec.name} of {self.size}")
        self._nbd.read_into(offset, buffer)

    def close(self) -> None:
        self._closing.close()


def _hint(message: str) -> str | None:
    """A hint, where QEMU says that its module is missing."""
    return "apt-get install qemu-block-extra" if "nknown driver" in message or "nknown protocol" in message else None
