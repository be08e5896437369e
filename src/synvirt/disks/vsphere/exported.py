"""A disk by vSphere's export lease: the answer to one GET is the disk as a compressed stream («vSphere Web Services SDK
Programming Guide», HttpNfcLease).

It has no ranges and no second attempt: a stream that breaks off ends this reader, and the pass goes on from its watermark with
a new lease. The part before the watermark then comes again, and is skipped. The adapter that made the lease keeps it alive.

If the lease is only the cheaper way to a disk, the other way is used from the point where the lease fails.
"""

import contextlib
import http.client
import io
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Final

from synvirt.blocks import DiskReader, Extent
from synvirt.disks.specs import LeaseSpec, ReaderSpec
from synvirt.disks.vmdk.flow import VmdkFlow
from synvirt.errors import DiskReadFailed, MalformedArchive, SourceUnreachable, UnsupportedFormat
from synvirt.sizes import MIB
from synvirt.transport import https, tls

CONNECT_TIMEOUT_S: Final = 20.0
# A host is silent while it searches an empty part of a thick disk: 300 GB in this time, if it reads 1 GB/s.
SILENCE_TIMEOUT_S: Final = 300.0
_BUFFER_BYTES: Final = MIB
_FAILED: Final = (DiskReadFailed, MalformedArchive, SourceUnreachable, UnsupportedFormat)


class ExportedReader:
    """Data that is not in the stream is zeros, which is known only once it was read: the whole disk is one extent."""

    max_readers = 1

    def __init__(self, spec: LeaseSpec) -> None:
        self._spec, self._name = spec, spec.name
        self.size = spec.size_bytes
        self._closing = contextlib.ExitStack()
        # The body ended where its headers say.
        self._ended_whole = False
        self._left: Callable[[], int | None] = lambda: None
        try:
            self._body = self._asked()
            self._flow = self._begun()
        except BaseException:
            self.close()
            raise

    def _asked(self) -> io.BufferedReader:
        spec = self._spec
        if spec.fingerprint_sha256 is None and spec.thumbprint is not None:
            context = tls.context_by_thumbprint(spec.host, spec.thumbprint)
        else:
            context = tls.context(spec.host, verify=spec.verify_tls, fingerprint_sha256=spec.fingerprint_sha256)
        connection = https.Connection(spec.host, spec.port, timeout=CONNECT_TIMEOUT_S, context=context)
        self._closing.callback(connection.close)
        headers = {"Accept": "application/x-vnd.vmware-streamVmdk", **({"Cookie": spec.cookie} if spec.cookie else {})}
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_TIMEOUT_S)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.request("GET", spec.target, headers=headers)
            answer = connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            raise tls.not_trusted(spec.host, error.verify_message) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        self._closing.callback(answer.close)
        if answer.status in (http.client.NOT_FOUND, http.client.GONE) or answer.status >= 500:
            raise self._lost(f"it answers {answer.status}: is the lease over?")
        if answer.status != http.client.OK:
            raise DiskReadFailed(f"{spec.host} answers {answer.status} for {self._name}, exported by a lease")
        self._left = lambda: answer.length
        # http.client's answer has readinto, and more is not needed of a raw stream.
        return io.BufferedReader(answer, _BUFFER_BYTES)

    def _begun(self) -> VmdkFlow:
        try:
            flow = VmdkFlow(self._fill, self._name)
        except SourceUnreachable as error:
            if not self._ended_whole:
                raise
            # A new request would get the same; a guest that is off must not wait for that.
            raise DiskReadFailed(
                f"{self._spec.host} sent no disk for {self._name}: its answer ended before a VMDK had begun",
                hint="the host cannot export this disk now: see its events, or choose options.transport datastore or vddk",
            ) from error
        except MalformedArchive as error:
            raise MalformedArchive(
                f"{self._spec.host} sent no disk: {error.detail}",
                hint="does a proxy between here and there answer in its place? Choose options.transport datastore or vddk else",
            ) from error
        if flow.size != self.size:
            raise MalformedArchive(f"{self._name}: {self._spec.host} sends a disk of {flow.size} bytes, not {self.size}")
        return flow

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside {self._name} of {self.size}")
        self._flow.read_into(offset, buffer)

    def _fill(self, buffer: memoryview) -> None:
        got = 0
        try:
            while got < len(buffer):
                count = self._body.readinto(buffer[got:])
                if not count:
                    # http.client does not report a body that is shorter than its Content-Length.
                    self._ended_whole = not self._left()
                    raise self._lost("the stream ended before the disk did")
                got += count
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._lost(error) from error

    def _lost(self, cause: BaseException | str) -> SourceUnreachable:
        if isinstance(cause, TimeoutError):
            cause = f"it sent nothing for {SILENCE_TIMEOUT_S:.0f} s"
        return SourceUnreachable(
            f"{self._spec.host} was lost while {self._name} was read by an export lease: {cause or type(cause).__name__}",
            hint="the pass goes on from its watermark with a new lease, which sends the disk from its start again",
        )

    def close(self) -> None:
        self._closing.close()


class EitherReader:
    """The lease, and from its failure on the `instead` of its spec. A cut or unordered stream, or no stream at all, costs the
    disk only the time that the lease would have saved."""

    max_readers = 1

    def __init__(self, spec: LeaseSpec, open_reader: Callable[[ReaderSpec], DiskReader]) -> None:
        if spec.instead is None:
            raise ValueError("there is nothing to read instead")
        self._instead, self._open = spec.instead, open_reader
        self.size = spec.size_bytes
        self._exported: ExportedReader | None = None
        self._other: DiskReader | None = None
        with contextlib.suppress(*_FAILED):
            self._exported = ExportedReader(spec)
        if self._exported is None:
            self._other = open_reader(spec.instead)

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._exported is not None:
            try:
                return self._exported.read_into(offset, buffer)
            except _FAILED:
                self._exported.close()
                self._exported = None
        if self._other is None:
            self._other = self._open(self._instead)
        return self._other.read_into(offset, buffer)

    def close(self) -> None:
        for reader in (self._exported, self._other):
            if reader is not None:
                reader.close()
