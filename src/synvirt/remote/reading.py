"""A DiskReader of a remote file, its folder's names and its version. `pieces.py` fetches the bytes, `places.py` connects."""

from collections.abc import Iterator

from synvirt.blocks import Extent
from synvirt.errors import DiskReadFailed
from synvirt.remote import Remote
from synvirt.remote.pieces import Front
from synvirt.remote.places import acquire, release
from synvirt.remote.retrying import retried


class RemoteReader:
    """The bytes `offset … offset + length` of the file `name` under a Remote; `length` None means up to its end.

    `version`: an earlier value of `RemoteReader.version`; the file must still have it. NotFound, AuthFailed, SourceUnreachable,
    UnsupportedFormat (the server serves no ranges), DiskReadFailed (the file was changed).
    """

    max_readers = 64

    def __init__(
        self, remote: Remote, name: str, offset: int = 0, length: int | None = None, *, version: str | None = None
    ) -> None:
        self._remote = remote
        self._connection = acquire(remote)
        self._open = True
        self._front: Front | None = None
        try:
            self._pieces = self._connection.pieces(name)
            self._front = self._pieces.entered()
            self._offset = offset
            self.size = max(self._pieces.file.size - offset, 0) if length is None else length
            self._check(version)
        except BaseException:
            self.close()
            raise

    def _check(self, version: str | None) -> None:
        file = self._pieces.file
        if version is not None and version != file.version:
            raise DiskReadFailed(
                f"{file.shown} is not the file that it was: it was changed or replaced",
                hint="let it be written to its end first, then submit again",
            )
        if self._offset + self.size > file.size:
            raise DiskReadFailed(
                f"{file.shown}: bytes {self._offset} to {self._offset + self.size} are needed, but it ends at {file.size}",
                hint="the file is cut off: copy it again from where it came",
            )

    @property
    def name(self) -> str:
        """The file's name in errors."""
        return self._pieces.file.shown

    @property
    def version(self) -> str:
        return self._pieces.file.version

    def extents(self) -> Iterator[Extent]:
        return iter([Extent(0, self.size)] if self.size else [])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            shown = self._pieces.file.shown
            raise DiskReadFailed(f"{shown}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        self._pieces.read_into(self._offset + offset, buffer, self._front or Front())

    def close(self) -> None:
        if self._open:
            self._open = False
            if self._front is not None:
                self._pieces.left(self._front)
            release(self._remote, self._connection)


def names(remote: Remote, folder: str = "") -> list[str] | None:
    """The sorted names in a folder under the Remote; None, where its protocol has no folders."""
    connection = acquire(remote)
    try:
        found = retried(lambda: connection.place.names(folder), f"{remote.url}{folder}", pause=connection.closed.wait)
        return None if found is None else sorted(found)
    finally:
        release(remote, connection)


def version_of(remote: Remote, name: str) -> str:
    """The file's version, as `version_by` makes it."""
    reader = RemoteReader(remote, name)
    try:
        return reader.version
    finally:
        reader.close()
