"""A VDI by /export_raw_vdi of a XenServer host: the answer to one GET is a stream (xapi, `ocaml/xapi/export_raw_vdi.ml`).

It has no ranges, no length and no second attempt: a stream that breaks off ends this reader, and the pass goes on from its
watermark with a new one. The host sends the answer's head before it opens the disk: if that fails, the body of the 200 contains
another answer, with 500.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

from synvirt.blocks import Extent
from synvirt.disks.specs import XapiExportSpec
from synvirt.disks.xen.flow import VhdFlow
from synvirt.errors import AuthFailed, DiskReadFailed, SourceUnreachable
from synvirt.sizes import MIB
from synvirt.transport import HttpClient, Trust

# A host is silent while it opens a disk of many layers, and while it skips an empty part of a raw one.
SILENCE_TIMEOUT_S: Final = 300.0
PATH: Final = "/export_raw_vdi"
_ANSWER: Final = b"HTTP/1."
_HEAD_BYTES: Final = 512
_PIECE_BYTES: Final = MIB
_HINT: Final = "the pass goes on from its watermark with a new export, which sends the disk from its start again"


class VdiReader:
    """With a base: the difference, if the host sends one; else the whole disk."""

    max_readers = 1

    def __init__(self, spec: XapiExportSpec) -> None:
        self._spec, self._name = spec, spec.name or "the VDI"
        self.size = spec.size_bytes
        self._closing = contextlib.ExitStack()
        self._at = 0
        self._head = memoryview(b"")
        self._flow: VhdFlow | None = None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        spec = self._spec
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        client = HttpClient(
            f"https://{host}:{spec.port}",
            Trust(spec.verify_tls, spec.fingerprint_sha256),
            connections=1,
            timeout_s=SILENCE_TIMEOUT_S,
        )
        self._closing.callback(client.close)
        query = {"session_id": spec.session_id, "vdi": spec.vdi, "format": spec.payload}
        if spec.base is not None:
            query["base"] = spec.base
        self._stream = self._closing.enter_context(client.stream("GET", PATH, query=query))
        if self._stream.status in (401, 403):
            raise AuthFailed(f"{spec.host} does not let us export {self._name}: it answers {self._stream.status}")
        if self._stream.status >= 500:
            raise self._lost(f"it answers {self._stream.status}")
        if self._stream.status != 200:
            raise DiskReadFailed(f"{spec.host} answers {self._stream.status} to the export of {self._name}")
        head = self._stream.read(min(_HEAD_BYTES, self.size) if spec.payload == "raw" else _HEAD_BYTES)
        # No disk begins so: it is the answer that the host should have sent.
        if head.startswith(_ANSWER):
            line = head.split(b"\r\n", 1)[0][:80].decode("ascii", "replace")
            raise self._lost(f"its status is 200, but its body is {line!r}")
        self._head = memoryview(head)
        if spec.payload == "vhd":
            self._flow = VhdFlow(self._fill, self.size, self._name)

    def extents(self) -> Iterator[Extent]:
        if self._flow is not None:
            return self._flow.extents()
        return iter((Extent(0, self.size),) if self.size else ())

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside {self._name} of {self.size}")
        if self._flow is not None:
            self._flow.read_into(offset, buffer)
            return
        if offset < self._at:
            raise DiskReadFailed(f"{self._name}: offset {offset} was passed already, at {self._at} of a stream")
        scratch = memoryview(bytearray(min(_PIECE_BYTES, offset - self._at)))
        while self._at < offset:
            part = min(offset - self._at, len(scratch))
            self._fill(scratch[:part])
            self._at += part
        self._fill(buffer)
        self._at += len(buffer)

    def _fill(self, buffer: memoryview) -> None:
        held = min(len(self._head), len(buffer))
        buffer[:held] = self._head[:held]
        self._head = self._head[held:]
        got = held
        while got < len(buffer):
            try:
                count = self._stream.read_into(buffer[got:])
            except SourceUnreachable as error:
                raise self._lost(error.detail) from error
            if not count:
                raise self._lost("the stream ended before the disk did")
            got += count

    def _lost(self, cause: str) -> SourceUnreachable:
        return SourceUnreachable(f"{self._spec.host} was lost while {self._name} was exported: {cause}", hint=_HINT)

    def close(self) -> None:
        self._closing.close()
