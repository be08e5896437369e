"""Sends a file to the service as one multipart/form-data body (RFC 7578), without holding it in memory."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from secrets import token_hex

from synvirt.errors import BadRequest, unreadable

CHUNK_BYTES = 1 << 20
_LET_FINISH = "let the program that writes it finish first"


class Sending(AbstractContextManager["Sending"]):
    """The part `file`, then the part `sha256`, which is known only after the file is read. BadRequest, if it cannot be read."""

    def __init__(self, path: Path, sha256: str | None, on_sent: Callable[[int, int], None]) -> None:
        self._path, self._sha256, self._on_sent = path, sha256, on_sent
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would wait for its writer
            found = os.fstat(descriptor)
        except OSError as error:
            raise unreadable(path, error) from error
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise BadRequest(
                f"{path} is not a file", hint="an upload is one file: pack a folder into a .ova, or copy it by SCP"
            )
        if not found.st_size:
            os.close(descriptor)
            raise BadRequest(f"{path} is empty", hint="copy it here again")
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        self.size_bytes, self._changed_ns = found.st_size, found.st_mtime_ns
        boundary = token_hex(16)
        # The characters that browsers escape in a file name; a service ignores the rest of the path.
        name = os.fsencode(path.name).decode(errors="replace").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        self._head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        self._middle = f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="sha256"\r\n\r\n'.encode()
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        length = len(self._head) + self.size_bytes + len(self._middle) + len(sha256 or "x" * 64) + len(self._tail)
        self.headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(length)}

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        digest, sent = hashlib.sha256(), 0
        yield self._head
        while sent < self.size_bytes:
            chunk = self._chunk(min(CHUNK_BYTES, self.size_bytes - sent))
            digest.update(chunk)
            yield chunk
            sent += len(chunk)
            self._on_sent(sent, self.size_bytes)
        self._refuse_changed()
        yield self._middle
        yield (self._sha256 or digest.hexdigest()).encode()
        yield self._tail

    def _refuse_changed(self) -> None:
        """BadRequest, where another program wrote to the file meanwhile: the service would have a mixture of two versions, or
        the beginning of one, and its SHA-256 would be right."""
        found = os.fstat(self._file.fileno())
        if (found.st_size, found.st_mtime_ns) != (self.size_bytes, self._changed_ns):
            raise BadRequest(f"{self._path} was changed while it was sent", hint=_LET_FINISH)

    def _chunk(self, most: int) -> bytes:
        try:
            chunk = self._file.read(most)
        except OSError as error:
            raise BadRequest(f"{self._path} cannot be read: {error.strerror}") from error
        if not chunk:
            raise BadRequest(f"{self._path} became shorter while it was sent", hint=_LET_FINISH)
        return chunk
