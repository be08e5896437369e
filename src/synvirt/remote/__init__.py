"""Remote files, read in place: by HTTP ranges, from S3, from SMB shares. They are never downloaded first.

    Remote ── as data: which folder, which credentials    a field of specs, sealed with its job, opened again after a crash
    RemoteReader (reading.py) ── a DiskReader of a file    made of pieces (pieces.py), each fetched with retries (retrying.py)
        │ fetch(offset, length)
    places.py ── the open connections to places, and the table of protocols
    http.py · s3.py · smb.py ── one file a protocol        each knows what «the same file as before» means there
        │ connect
    Guard ── which hosts may be connected to at all

A file has a version: its ETag, its date, or the handle that keeps others from writing. All bytes come from one version. A file
that changes while it is read is an error, never a mixture.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Protocol

from synvirt.records import Record, field

if TYPE_CHECKING:  # a copy of a local disk connects to no host, and does not load these modules
    from synvirt.outgoing import Guard


class Remote(Record):
    """A remote folder with files to read. `url` ends with a slash and has no secrets in it.

    `query` (of a signed URL) goes with every request; `credentials` are those of `urls.CREDENTIALS` for the scheme. `ca_file`
    is trusted beside the host's authorities; a `fingerprint_sha256` (hexadecimal, with or without colons) is trusted instead of
    all.
    `frozen`: a platform keeps the files unchanged. They are read even where its own program has them open for writing.
    `allowed_hosts`: the setting remote_allowed_hosts; `of_source`: a source's own host, to which source_allowed_hosts applies.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    url: str
    query: str = field(default="", repr=False)
    credentials: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    verify_tls: bool = True
    fingerprint_sha256: str | None = None
    ca_file: str | None = None
    region: str | None = None
    endpoint: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    frozen: bool = False
    of_source: bool = False

    @property
    def guard(self) -> "Guard":
        """The guard for its connections."""
        from synvirt.outgoing import Guard, sources

        return sources() if self.of_source else Guard(self.allowed_hosts)

    def credential(self, name: str) -> str:
        return dict(self.credentials).get(name, "")


def version_by(size: int, stamp: object) -> str:
    """A file's version, which differs after a change. `stamp`: the ETag or the time of the last change; empty, where the server
    gives neither."""
    return f"{size} {stamp}"


def is_size_alone(version: str) -> bool:
    """Whether the version has no stamp."""
    return version.endswith(" ")


class Interrupted(Exception):
    """One attempt failed, and another may succeed. `got`: the bytes that came before; `after_s`: how long the server wants us
    to wait. It is never raised outside this package."""

    def __init__(self, cause: str, *, got: int = 0, after_s: float | None = None) -> None:
        super().__init__(cause)
        self.cause, self.got, self.after_s = cause, got, after_s


class RemoteFile(Protocol):
    """An open file, at one version. `head` is what came with opening it: its first bytes, or none."""

    @property
    def shown(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def version(self) -> str: ...
    @property
    def head(self) -> bytes: ...

    def fetch(self, offset: int, into: memoryview) -> None:
        """Fills `into`, in one attempt, from any thread. Interrupted, or an error that a retry would not mend."""

    def close(self) -> None: ...


class Place(Protocol):
    """A connection to the place of a Remote. `fetches_at_once`: the number of requests at once that gives the full speed."""

    fetches_at_once: int

    def open(self, name: str) -> RemoteFile:
        """The file `name` under the Remote, in one attempt. NotFound, AuthFailed, SourceUnreachable, Interrupted …"""

    def names(self, folder: str) -> Iterable[str] | None:
        """The names in a folder of the Remote (`""`: the Remote itself); None, where the protocol has no folders."""

    def close(self) -> None:
        """Closes the place. Requests of other threads end too."""


__all__ = ["Interrupted", "Place", "Remote", "RemoteFile"]
