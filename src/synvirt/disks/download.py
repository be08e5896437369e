"""A raw disk by one GET, from a server that sends it from start to end without ranges (Prism's image files).

A download that breaks off ends this reader. The pass goes on from its watermark with a new one. The server then sends what lies
before the watermark again; it is skipped, not written.
"""

import base64
import contextlib
from collections.abc import Iterator
from typing import Final

from synvirt.blocks import Extent
from synvirt.disks.specs import DownloadSpec
from synvirt.errors import AuthFailed, DiskReadFailed, SourceUnreachable
from synvirt.sizes import MIB
from synvirt.transport import HttpClient, Trust

SILENCE_TIMEOUT_S: Final = 120.0
_REFUSED: Final = frozenset({401, 403})


class DownloadReader:
    """In ascending order, each byte once. SourceUnreachable: the connection was lost; DiskReadFailed: the server has no such
    file, or one of another length; AuthFailed: it refuses our login."""

    max_readers = 1

    def __init__(self, spec: DownloadSpec) -> None:
        self._spec, self.size = spec, spec.size_bytes
        self._at = 0
        self._closing = contextlib.ExitStack()
        client = HttpClient(
            spec.origin,
            Trust(spec.verify_tls, spec.fingerprint_sha256),
            connections=1,
            timeout_s=SILENCE_TIMEOUT_S,
            headers={"authorization": basic(spec.user, spec.password), "accept": "application/octet-stream"},
        )
        self._closing.callback(client.close)
        try:
            self._stream = self._closing.enter_context(client.stream("GET", spec.path))
            self._check(client.where)
        except BaseException:
            self.close()
            raise

    def _check(self, where: str) -> None:
        status, name = self._stream.status, self._spec.name
        if status in _REFUSED:
            raise AuthFailed(f"{where} answers {status} for the download of {name}")
        if status >= 500 or status == 429:
            raise SourceUnreachable(f"{where} answers {status} for the download of {name}")
        if status != 200:
            raise DiskReadFailed(f"{where} answers {status} for the download of {name}")
        announced = self._stream.headers.get("content-length")
        if announced is not None and announced != str(self.size):
            raise DiskReadFailed(f"{where} sends {announced} bytes of {name}, which has {self.size}")

    def extents(self) -> Iterator[Extent]:
        if self.size:
            yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < self._at or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} of {self._spec.name}: it was read up to {self._at}")
        scratch = memoryview(bytearray(min(MIB, offset - self._at)))
        while self._at < offset:
            self._fill(scratch[: offset - self._at])
        self._fill(buffer)

    def _fill(self, buffer: memoryview) -> None:
        if len(buffer) == 0:
            return
        count = self._stream.read_into(buffer)
        if count < len(buffer):
            raise SourceUnreachable(
                f"the download of {self._spec.name} ended at offset {self._at + count} of {self.size}",
                hint="the pass goes on from its watermark; the download starts over",
            )
        self._at += count

    def close(self) -> None:
        self._closing.close()


def basic(user: str, password: str) -> str:
    """RFC 7617."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
