"""The open connections of this process to places. All readers of one Remote share one login, its connections and its pieces."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from synvirt.errors import SourceUnreachable, SynvirtError
from synvirt.remote import Place, Remote, urls
from synvirt.remote.pieces import Kept, Pieces
from synvirt.remote.retrying import retried


@dataclass(slots=True)
class Connection:
    """A connected place. `users`: how many have acquired it. `files`: the pieces of each file, by name."""

    url: str
    place: Place
    pool: ThreadPoolExecutor
    users: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    kept: Kept = field(default_factory=Kept)
    files: dict[str, Pieces] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pieces(self, name: str) -> Pieces:
        """The pieces of the file `name`, which is opened if it is not open yet."""
        with self.lock:
            if name not in self.files:
                file = retried(lambda: self.place.open(name), f"{self.url}{name}", pause=self.closed.wait)
                self.files[name] = Pieces(
                    file, kept=self.kept, pool=self.pool, closed=self.closed, readers_enough=self.place.fetches_at_once
                )
            return self.files[name]

    def close(self) -> None:
        """Closes the place and its files. Reads under way raise SourceUnreachable."""
        self.closed.set()
        self.place.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for pieces in self.files.values():
            pieces.file.close()


_connections: dict[Remote, Connection] = {}
_lock = threading.Lock()


def acquire(remote: Remote) -> Connection:
    """The connection to the Remote's place; the first caller makes it. Each caller must `release` it."""
    with _lock:
        connection = _connections.get(remote)
        if connection is None or connection.closed.is_set():
            place = place_of(remote)
            pool = ThreadPoolExecutor(place.fetches_at_once, thread_name_prefix="remote")
            connection = _connections[remote] = Connection(remote.url, place, pool)
        connection.users += 1
        return connection


def release(remote: Remote, connection: Connection) -> None:
    """Closes the connection when its last user has released it."""
    with _lock:
        connection.users -= 1
        if connection.users:
            return
        if _connections.get(remote) is connection:
            del _connections[remote]
    connection.close()


@contextmanager
def connected(remote: Remote, *, within_s: float | None = None) -> Iterator[None]:
    """Keeps the connection to the Remote open: to inspect an archive, its files are opened many times, after one login.

    `within_s`: after this time it is closed, even during a read, which then raises SourceUnreachable. A server that sends a
    byte now and then must not make a caller wait forever.
    """
    connection = acquire(remote)
    timer = threading.Timer(within_s or 0, connection.close)
    timer.daemon = True
    if within_s is not None:
        timer.start()
    try:
        yield
    except SynvirtError as error:
        if not connection.closed.is_set():
            raise
        raise SourceUnreachable(
            f"{remote.url} did not send what was needed within {within_s:.0f} s",
            hint="is the server, or the network in between, very slow?",
        ) from error
    finally:
        timer.cancel()
        release(remote, connection)


def place_of(remote: Remote) -> Place:
    """The table of protocols. A module is imported when it is needed: SMB's is slow to load."""
    match urls.parse(remote.url).scheme:
        case "s3":
            from synvirt.remote.s3 import S3Place

            return S3Place(remote)
        case "smb":
            from synvirt.remote.smb import SmbPlace

            return SmbPlace(remote)
        case _:
            from synvirt.remote.http import HttpPlace

            return HttpPlace(remote)


def requested_bytes(remote: Remote, name: str) -> int:
    """How many bytes were requested from the server for an open file, with read-ahead. For tests and benchmarks."""
    with _lock:
        connection = _connections[remote]
    return connection.files[name].requested_bytes
