"""The laws of DiskReader, and random reads, of files on real servers: nginx, S3 by moto, Samba."""

import errno
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt import outgoing
from synvirt.errors import SourceUnreachable
from synvirt.remote import Remote, pieces, retrying
from synvirt.remote.pieces import Kept
from synvirt.remote.places import connected, requested_bytes
from synvirt.remote.reading import RemoteReader, names
from synvirt.remote.smb import SmbPlace
from synvirt.sizes import MIB
from tests.cases import cases
from tests.contracts.readers import ReaderCase, ReaderContract, read, read_all
from tests.drawn import drawn
from tests.servers import remote_servers as servers

NAME = "disk ä+1.raw"
# Of a place, instead of 64 MiB: tests' memory is limited too.
KEPT_BYTES = 16 << 20
SIZE = (5 << 20) + 333


def disk_content() -> bytes:
    return drawn(SIZE)


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Nginx]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        (server.folder / "a folder").mkdir()
        (server.folder / "a folder" / NAME).write_bytes(disk_content())
        (server.folder / "empty").touch()
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3]:
    with servers.s3(tmp_path_factory.mktemp("s3")) as server:
        server.put(f"a folder/{NAME}", disk_content())
        server.put("a folder/inner/other", b"x")
        server.put("empty", b"")
        yield server


@pytest.fixture(scope="module")
def samba(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Samba]:
    with servers.samba(tmp_path_factory.mktemp("samba")) as server:
        (server.folder / "a folder" / "inner").mkdir(parents=True)
        (server.folder / "a folder" / NAME).write_bytes(disk_content())
        (server.folder / "empty").touch()
        yield server


def by_http(server: servers.Nginx) -> Remote:
    return servers.remote(f"{server.url}a%20folder/")


def by_https(server: servers.Nginx) -> Remote:
    return servers.remote(
        f"https://localhost:{server.tls_port}/private/a%20folder/",
        ca_file=str(server.certificates.authority),
        credentials=(("password", servers.PASSWORD), ("username", servers.USER)),
    )


def by_s3(server: servers.S3) -> Remote:
    return servers.remote(f"s3://{server.bucket}/a folder/", endpoint=server.endpoint, credentials=s3_keys(server))


def s3_keys(server: servers.S3) -> tuple[tuple[str, str], ...]:
    return (("access_key_id", server.access_key_id), ("secret_access_key", server.secret_access_key))


def by_smb(server: servers.Samba) -> Remote:
    return servers.remote(f"{server.url}a%20folder/", credentials=(("password", servers.PASSWORD), ("username", "root")))


WAYS = {"http": ("nginx", by_http), "https": ("nginx", by_https), "s3": ("s3", by_s3), "smb": ("samba", by_smb)}


@pytest.fixture(params=WAYS)
def remote(request: pytest.FixtureRequest) -> Remote:
    server, way = WAYS[request.param]
    made: Remote = way(request.getfixturevalue(server))  # type: ignore[operator]
    return made


class TestRemote(ReaderContract):
    @pytest.fixture
    def case(self, remote: Remote) -> ReaderCase:
        return ReaderCase(open=lambda: RemoteReader(remote, NAME), content=disk_content())


class TestRange(ReaderContract):
    """A tar's member, say."""

    @pytest.fixture
    def case(self, remote: Remote) -> ReaderCase:
        return ReaderCase(
            open=lambda: RemoteReader(remote, NAME, 70_001, 3 << 20), content=disk_content()[70_001 : 70_001 + (3 << 20)]
        )


@given(
    reads=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 600_000)), min_size=1, max_size=6),
    at_once=st.booleans(),
)
@cases(10)
def test_any_reads_are_those_of_the_local_bytes(
    nginx: servers.Nginx, samba: servers.Samba, s3: servers.S3, reads: list[tuple[int, int]], at_once: bool
) -> None:
    for remote in (by_http(nginx), by_smb(samba), by_s3(s3)):
        reader = RemoteReader(remote, NAME)
        for offset, length in reads:
            part = min(length, SIZE - offset)
            assert read(reader, offset, part) == disk_content()[offset : offset + part]
            if not at_once:  # nothing is kept from read to read
                reader.close()
                reader = RemoteReader(remote, NAME)
        reader.close()


def test_reading_in_order_asks_for_each_byte_once_and_ahead_of_the_reader(remote: Remote) -> None:
    with connected(remote):
        reader = RemoteReader(remote, NAME)
        assert read_all(reader) == disk_content()
        assert requested_bytes(remote, NAME) == SIZE
        reader.close()


def test_a_look_here_and_there_asks_for_little(nginx: servers.Nginx) -> None:
    remote = by_http(nginx)
    with connected(remote):
        reader = RemoteReader(remote, NAME)
        for offset in (0, 1 << 20, 3 << 20, (5 << 20) - 512):
            read(reader, offset, 512)
        assert requested_bytes(remote, NAME) <= 4 * (64 << 10)
        reader.close()


@pytest.fixture
def little_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept.__init__, "__defaults__", (KEPT_BYTES,))


def test_what_is_kept_is_bounded(nginx: servers.Nginx, little_kept: None) -> None:
    large = nginx.folder / "large"
    with large.open("wb") as file:
        file.truncate(3 * KEPT_BYTES)
    remote = servers.remote(nginx.url)
    with connected(remote):
        reader = RemoteReader(remote, "large")
        for at in range(0, reader.size, 4 << 20):
            assert read(reader, at, 4 << 20) == bytes(4 << 20)
        kept = reader._pieces
        assert sum(piece.length for piece in kept._by_start.values()) <= KEPT_BYTES + (4 << 20)
        assert sorted(kept._by_start) == kept._starts
        reader.close()
    large.unlink()


def test_an_empty_file_has_no_byte(nginx: servers.Nginx, samba: servers.Samba, s3: servers.S3) -> None:
    for remote in (
        servers.remote(nginx.url),
        servers.remote(samba.url, credentials=by_smb(samba).credentials),
        servers.remote(f"s3://{s3.bucket}/", endpoint=s3.endpoint, credentials=s3_keys(s3)),
    ):
        reader = RemoteReader(remote, "empty")
        assert (reader.size, list(reader.extents())) == (0, [])
        reader.close()


def test_folders_are_listed_where_there_are_folders(nginx: servers.Nginx, samba: servers.Samba, s3: servers.S3) -> None:
    assert names(by_http(nginx)) is None
    assert names(by_smb(samba)) == [NAME, "inner"]
    assert names(by_smb(samba), "inner") == []
    assert names(by_s3(s3)) == [NAME]  # S3 has no folders within: only names with slashes
    assert names(by_s3(s3), "inner") == ["inner/other"]


def test_names_on_a_share_may_have_blanks_and_marks_of_any_script(samba: servers.Samba) -> None:
    """Python does not call them printable; people in Japan put them between words."""
    folder = samba.folder / "odd"
    folder.mkdir()
    found = ["no\u00a0break.raw", "soft\u00adhyphen.raw", "joined\u200dtogether.raw", "仮想\u3000マシン.raw"]
    remote = servers.remote(f"{samba.url}odd/", credentials=by_smb(samba).credentials)
    for name in found:
        (folder / name).write_bytes(name.encode())
    assert names(remote) == sorted(found)
    for name in found:
        reader = RemoteReader(remote, name)
        assert read_all(reader) == name.encode()
        reader.close()


def test_a_long_list_of_s3_comes_in_pages(s3: servers.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    from synvirt.remote import s3 as module

    for number in range(7):
        s3.put(f"many/{number}", b"")
    real = module.S3Place._page
    monkeypatch.setattr(module.S3Place, "_page", lambda self, query: real(self, {**query, "max-keys": "3"}))
    remote = servers.remote(f"s3://{s3.bucket}/many/", endpoint=s3.endpoint, credentials=s3_keys(s3))
    assert names(remote) == [str(number) for number in range(7)]


def test_any_key_of_s3_is_listed_as_it_is(s3: servers.S3) -> None:
    """XML has no place for some characters, and makes a line feed of a carriage return."""
    found = ["a+b c%20d", "bell\x07", "line\rfeed", "ä <&> 한"]
    for name in found:
        s3.put(f"odd/{name}", b"x")
    remote = servers.remote(f"s3://{s3.bucket}/odd/", endpoint=s3.endpoint, credentials=s3_keys(s3))
    assert names(remote) == found


def test_a_key_of_s3_may_begin_with_a_slash(s3: servers.S3) -> None:
    s3.put("/exports/this", b"this")
    s3.put("exports/other", b"other")
    remote = servers.remote(f"s3://{s3.bucket}//exports/", endpoint=s3.endpoint, credentials=s3_keys(s3))
    assert names(remote) == ["this"]
    reader = RemoteReader(remote, "this")
    assert read_all(reader) == b"this"
    reader.close()


def test_a_signed_url_is_an_ordinary_one(tmp_path: Path) -> None:
    with servers.s3(tmp_path, checked=False) as s3:
        s3.put(f"a folder/{NAME}", disk_content())
        base, _, query = s3.presigned(f"a folder/{NAME}").partition("?")
        assert "X-Amz-Signature" in query
        reader = RemoteReader(servers.remote(base.rpartition("/")[0] + "/", query=query), NAME)
        assert read_all(reader) == disk_content()
        reader.close()


def test_smb_with_few_credits_reads_nevertheless(samba: servers.Samba, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may grant one at a time: then 64 KiB are asked for at once."""
    monkeypatch.setattr("synvirt.remote.smb._CREDITS_WANTED", 1)
    reader = RemoteReader(by_smb(samba), NAME)
    assert read_all(reader) == disk_content()
    place = reader._connection.place
    assert isinstance(place, SmbPlace)
    assert place.request_bytes <= 1 << 20
    reader.close()


def test_nobody_may_write_the_file_while_it_is_read_by_smb(samba: servers.Samba, tmp_path: Path) -> None:
    from smbprotocol.exceptions import SharingViolation
    from smbprotocol.open import CreateDisposition, FilePipePrinterAccessMask, ImpersonationLevel, Open, ShareAccess

    reader = RemoteReader(by_smb(samba), NAME)
    other = SmbPlace(by_smb(samba))
    handle = Open(other.tree(), f"a folder\\{NAME}")
    with pytest.raises(SharingViolation):
        handle.create(
            ImpersonationLevel.Impersonation,
            FilePipePrinterAccessMask.GENERIC_WRITE,
            0,
            ShareAccess.FILE_SHARE_READ | ShareAccess.FILE_SHARE_WRITE,
            CreateDisposition.FILE_OPEN,
            0,
        )
    other.close()
    reader.close()


def test_two_that_read_the_same_file_in_order_fetch_it_once(
    nginx: servers.Nginx, little_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy and the checksum of an archive's member, whichever of them is quicker."""
    monkeypatch.setattr(pieces, "WAIT_FOR_S", 60.0)
    # Each as much smaller as what is kept.
    for name in ("AHEAD_MAX_BYTES", "PIECE_MAX_BYTES", "TOGETHER_BYTES"):
        monkeypatch.setattr(pieces, name, getattr(pieces, name) * KEPT_BYTES // pieces.KEPT_BYTES)
    large = nginx.folder / "twice"
    with large.open("wb") as file:
        file.truncate(3 * KEPT_BYTES)
    remote = servers.remote(nginx.url)

    def read_by(steps: int, pause_s: float) -> None:
        reader = RemoteReader(remote, "twice")
        for at in range(0, reader.size, steps):
            read(reader, at, steps)
            if at >= MIB:  # nobody waits for one that has read less
                begun.set()
            time.sleep(pause_s)
        reader.close()

    begun = threading.Event()
    with connected(remote), ThreadPoolExecutor(2) as pool:
        slow = pool.submit(read_by, 1 << 18, 0.005)
        assert begun.wait(60)
        pool.submit(read_by, 1 << 20, 0).result()
        slow.result()
        assert requested_bytes(remote, "twice") == 3 * KEPT_BYTES
    large.unlink()


def test_a_server_that_is_restarted_meanwhile_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens for some seconds. A file that is opened then fails at once, as before."""
    monkeypatch.setattr(retrying, "PAUSES_S", (0.01,) * 3)
    content, real, refusals = disk_content(), outgoing._dialled, iter([True] * 3)

    def dialled(addresses: Sequence[str], port: int, timeout_s: float) -> socket.socket:
        if next(refusals, False):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return real(addresses, port, timeout_s)

    with servers.scripted(lambda request: servers.honest(content, request)) as url:
        reader = RemoteReader(servers.remote(url), NAME)
        monkeypatch.setattr(outgoing, "_dialled", dialled)
        assert read(reader, 2 << 20, 100_000) == content[2 << 20 :][:100_000]
        refusals = iter([True] * 99)
        with pytest.raises(SourceUnreachable, match="refused, 4 times in a row"):
            read(reader, 4 << 20, 100_000)
        reader.close()
        refusals = iter([True] * 99)
        with pytest.raises(SourceUnreachable, match="does not answer"):
            RemoteReader(servers.remote(url), NAME)
        assert len(list(refusals)) == 98


def test_nobody_waits_for_a_reader_that_looks_here_and_there(nginx: servers.Nginx, little_kept: None) -> None:
    large = nginx.folder / "once"
    with large.open("wb") as file:
        file.truncate(KEPT_BYTES)
    remote = servers.remote(nginx.url)
    looking, copying = RemoteReader(remote, "once"), RemoteReader(remote, "once")
    read(looking, 0, 4096)
    began = looking._front
    assert began is not None
    for at in range(0, KEPT_BYTES, 1 << 20):
        read(copying, at, 1 << 20)
    assert not copying._pieces._is_ahead(copying._front, copying.size, began.moved_at)  # type: ignore[arg-type]
    looking.close()
    copying.close()
    large.unlink()
