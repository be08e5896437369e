"""What servers and networks do to a file that is being read: nothing wrong is ever read; every error says what and where."""

import os
import socket
import socketserver
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from synvirt.disks import open_reader
from synvirt.disks.noted_files import names_of_changed
from synvirt.disks.raw.changes import opening
from synvirt.disks.roots import raw_spec
from synvirt.disks.specs import ImageSpec
from synvirt.errors import AuthFailed, DiskReadFailed, NotFound, SourceUnreachable, SynvirtError, UnsupportedFormat
from synvirt.http_answers import LEAST_BYTES
from synvirt.programs import run
from synvirt.remote import places, retrying
from synvirt.remote.reading import RemoteReader
from tests.contracts.readers import read, read_all
from tests.drawn import drawn
from tests.running.ports import free_port
from tests.servers import remote_servers as servers
from tests.servers.remote_servers import RangeRequest, Script, honest

SIZE = (6 << 20) + 17
NAME = "disk.raw"


def disk_content() -> bytes:
    return drawn(SIZE)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSES_S", (0.01,) * 7)


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Nginx]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        (server.folder / NAME).write_bytes(disk_content())
        yield server


@pytest.fixture(scope="module")
def samba(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Samba]:
    with servers.samba(tmp_path_factory.mktemp("samba")) as server:
        (server.folder / NAME).write_bytes(disk_content())
        yield server


SMB = (("password", servers.PASSWORD), ("username", "root"))


def read_scripted(script: Script) -> bytes:
    with servers.scripted(script) as url:
        reader = RemoteReader(servers.remote(url), NAME)
        try:
            return read_all(reader)
        finally:
            reader.close()


# ── mended by trying again ───────────────────────────────────────────────────────────────────────────────────────────


def test_connections_that_are_cut_in_the_middle_cost_only_what_was_under_way(nginx: servers.Nginx) -> None:
    with servers.wire(nginx.port) as wire:
        # No more than may be cut in a row: on a busy machine a reset takes with it all that was not read yet.
        wire.cuts.update({number: 200_000 + 70_000 * number for number in range(1, 1 + len(retrying.PAUSES_S))})
        reader = RemoteReader(servers.remote(f"http://127.0.0.1:{wire.port}/open/"), NAME)
        assert read_all(reader) == disk_content()
        reader.close()
        assert wire.connections > 5
        # What came before a cut was kept: what is fetched twice is what was in the sockets' buffers.
        assert wire.bytes_back < 2 * SIZE


def test_a_broken_smb_connection_is_made_again_and_the_file_is_the_same(samba: servers.Samba) -> None:
    with servers.wire(samba.port) as wire:
        wire.cuts.update(dict.fromkeys(range(1, 5), 900000))
        reader = RemoteReader(servers.remote(f"smb://127.0.0.1:{wire.port}/disks/", credentials=SMB), NAME)
        assert read_all(reader) == disk_content()
        reader.close()
        assert wire.connections >= 3


def test_a_busy_server_is_asked_again() -> None:
    statuses = iter([503, 429, 500, 408])

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        status = next(statuses, None)
        return honest(disk_content(), request) if status is None else (status, {"Content-Length": "0"}, b"")

    assert read_scripted(script) == disk_content()


def test_retry_after_is_kept_to() -> None:
    waited: list[float] = []
    answers = iter([{"Retry-After": "7"}, {"Retry-After": "Fri, 01 Jan 2010 00:00:00 GMT"}, {"Retry-After": "soon"}])

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        headers = next(answers, None)
        return honest(disk_content(), request) if headers is None else (429, {**headers, "Content-Length": "0"}, b"")

    with servers.scripted(script) as url:
        place = places.place_of(servers.remote(url))
        retrying.retried(lambda: place.open(NAME), NAME, pause=waited.append)
        place.close()
    assert waited[0] == 7
    assert max(waited[1:3]) < 1


def test_a_server_that_asks_for_too_much_patience_is_away() -> None:
    with pytest.raises(SourceUnreachable, match="429"):
        read_scripted(lambda request: (429, {"Retry-After": "86400", "Content-Length": "0"}, b""))


def test_a_body_that_is_too_short_is_fetched_on_from_where_it_ended() -> None:
    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = honest(disk_content(), request)
        return status, headers, body[: len(body) * 2 // 3] if len(body) > LEAST_BYTES else body

    assert read_scripted(script) == disk_content()


def test_attempts_that_bring_a_byte_each_have_an_end() -> None:
    """Such a server would hold a copy forever."""

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = honest(disk_content(), request)
        return status, headers, body[:1] if 1 < request.number < 20 else body

    with pytest.raises(SourceUnreachable, match="8 times in a row"):
        read_scripted(script)


def test_tries_have_an_end() -> None:
    seen: list[int] = []

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        seen.append(request.number)
        return 503, {"Content-Length": "0"}, b""

    with pytest.raises(SourceUnreachable, match=r"disk\.raw: the server answers 503 Service Unavailable, 8 times in a row"):
        read_scripted(script)
    assert len(seen) == 8


def test_who_comes_back_after_a_failure_reads_on() -> None:
    down = threading.Event()

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        return (503, {"Content-Length": "0"}, b"") if down.is_set() else honest(disk_content(), request)

    with servers.scripted(script) as url:
        reader = RemoteReader(servers.remote(url), NAME)
        down.set()
        with pytest.raises(SourceUnreachable, match="offset 4000000"):
            read(reader, 4_000_000, 4096)
        down.clear()
        assert read(reader, 4_000_000, 4096) == disk_content()[4_000_000:4_004_096]
        reader.close()


def test_what_could_not_be_fetched_ahead_is_fetched_when_it_is_needed() -> None:
    down = threading.Event()

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        return (503, {"Content-Length": "0"}, b"") if down.is_set() and request.start else honest(disk_content(), request)

    with servers.scripted(script) as url:
        reader = RemoteReader(servers.remote(url), NAME)
        read(reader, 0, 32768)
        down.set()
        read(reader, 32768, 32768)  # what came with opening it: from here on it is read in order, and fetched ahead
        pieces = reader._pieces
        while not any(piece.failed for piece in list(pieces._by_start.values())):
            time.sleep(0.01)
        down.clear()
        assert read(reader, 65536, 1 << 20) == disk_content()[65536 : 65536 + (1 << 20)]
        reader.close()


def test_a_server_that_stops_answering_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.remote.http.READ_TIMEOUT_S", 0.2)
    answer = threading.Event()

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        if request.start:
            answer.wait(20)
        return honest(disk_content(), request)

    with servers.scripted(script) as url:
        reader = RemoteReader(servers.remote(url), NAME)
        try:
            with pytest.raises(SourceUnreachable, match="no byte came"):
                read(reader, 1 << 20, 4096)
        finally:
            answer.set()
            reader.close()


def test_closing_ends_what_is_under_way() -> None:
    answer = threading.Event()

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        if request.start:
            answer.wait(100)
        return honest(disk_content(), request)

    with servers.scripted(script) as url, ThreadPoolExecutor(1) as pool:
        reader = RemoteReader(servers.remote(url), NAME)
        waiting = pool.submit(read, reader, 1 << 20, 4096)
        while len(reader._pieces._by_start) < 2:
            time.sleep(0.01)
        reader.close()
        with pytest.raises(Exception):  # noqa: B017 - whatever it is, it comes at once
            waiting.result(timeout=60)
        answer.set()


# ── a file that is another ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_that_changes_in_the_middle_is_an_error_never_a_mixture(nginx: servers.Nginx) -> None:
    path = nginx.folder / "changing.raw"
    path.write_bytes(disk_content())
    reader = RemoteReader(servers.remote(nginx.url), path.name)
    read(reader, 0, 4096)
    path.write_bytes(bytes(SIZE))
    os.utime(path, (1, 1))
    with pytest.raises(DiskReadFailed, match=r"changing\.raw was changed or replaced .*offset \d+") as caught:
        read(reader, 3 << 20, 4096)
    assert caught.value.hint
    reader.close()
    with pytest.raises(DiskReadFailed, match="not the file that it was"):
        RemoteReader(servers.remote(nginx.url), path.name, version=reader.version)


def test_a_file_that_an_image_names_is_another_after_a_restart(nginx: servers.Nginx) -> None:
    """A worker that begins anew compares what it opens with what the one before it had opened."""
    base, top = nginx.folder / "base.raw", nginx.folder / "top.qcow2"
    base.write_bytes(disk_content())
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "raw", str(top)], timeout_s=60)
    root = servers.remote(nginx.url)
    spec = ImageSpec(format="qcow2", over=raw_spec(root, Path(top.name)), root=root, name=top.name)

    def found() -> tuple[str, ...]:
        with opening() as files, closing(open_reader(spec)):
            return files.found

    before = found()
    assert before == found()
    assert len(before) == 2
    os.utime(base, (1, 1))
    assert names_of_changed(before, found()) == [f"{nginx.url}base.raw"]


@pytest.mark.parametrize("etag", ['"v2"', 'W/"v2"', ""])
def test_a_server_that_does_not_check_for_us_is_checked(etag: str) -> None:
    """If-Match is ignored by many; a weak ETag cannot be asked for; some have a date alone."""

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = honest(disk_content(), request, etag="" if request.start == 0 and not etag else '"v1"')
        if request.start or not etag:
            headers["ETag"] = etag
        if not etag:
            del headers["ETag"]
            headers["Last-Modified"] = f"Fri, 01 Jan 2010 00:00:0{min(request.start, 1)} GMT"
        return status, headers, body

    with pytest.raises(DiskReadFailed, match="changed or replaced"):
        read_scripted(script)


def test_a_file_that_grows_or_shrinks_is_another() -> None:
    for size in (SIZE + 1, SIZE - 1):

        def script(request: RangeRequest, size: int = size) -> tuple[int, dict[str, str], bytes]:
            status, headers, body = honest(disk_content(), request)
            if request.start:
                headers["Content-Range"] = headers["Content-Range"].replace(str(SIZE), str(size))
            return status, headers, body

        with pytest.raises(DiskReadFailed, match="changed or replaced"):
            read_scripted(script)


def test_a_file_that_is_replaced_while_smb_is_away_is_an_error(samba: servers.Samba) -> None:
    path = samba.folder / "replaced.raw"
    path.write_bytes(disk_content())
    with servers.wire(samba.port) as wire:
        reader = RemoteReader(servers.remote(f"smb://127.0.0.1:{wire.port}/disks/", credentials=SMB), path.name)
        read(reader, 0, 4096)
        place = reader._connection.place
        path.unlink()
        path.write_bytes(bytes(SIZE))
        place.broken(place.tree())  # type: ignore[attr-defined]
        with pytest.raises(DiskReadFailed, match="changed or replaced"):
            read(reader, 3 << 20, 4096)
        reader.close()


# ── servers that do not serve ranges as they should ──────────────────────────────────────────────────────────────────


def test_a_server_that_ignores_ranges_is_reported_at_once(nginx: servers.Nginx) -> None:
    with pytest.raises(UnsupportedFormat, match="sends the whole file") as caught:
        RemoteReader(servers.remote(nginx.url.replace("/open/", "/whole/")), NAME)
    assert "import root" in (caught.value.hint or "")


def answered(number: int, **changes: str | None) -> Script:
    """Honest but for the answers from `number` on."""

    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = honest(disk_content(), request)
        if request.number >= number:
            headers |= {key.replace("_", "-"): value for key, value in changes.items() if value is not None}
            for key, value in changes.items():
                if value is None:
                    del headers[key.replace("_", "-")]
        return status, headers, body

    return script


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        (answered(1, Content_Range="bytes 0-65535/*"), UnsupportedFormat, "does not say how large"),
        (answered(1, Content_Range=None), UnsupportedFormat, "does not say how large"),
        (answered(1, Content_Range="bytes 5-65540/9000000"), DiskReadFailed, "were asked for, and the server answers"),
        (answered(1, Content_Encoding="gzip"), UnsupportedFormat, "compresses"),
        (answered(2, Content_Range=None), DiskReadFailed, "answers 'nothing'"),
        (answered(2, Content_Range=f"bytes 0-4095/{SIZE}"), DiskReadFailed, "were asked for"),
        (answered(2, Content_Length="5"), DiskReadFailed, "announces 5 bytes"),
        (lambda request: (416, {"Content-Length": "0"}, b""), DiskReadFailed, "416"),
        (lambda request: (404, {"Content-Length": "0"}, b""), NotFound, "404"),
        (lambda request: (401, {"Content-Length": "0"}, b""), AuthFailed, "401"),
        (lambda request: (418, {"Content-Length": "0"}, b""), DiskReadFailed, "418"),
        (lambda request: (200, {"Content-Length": "77"}, b"x" * 77), UnsupportedFormat, "whole file"),
    ],
)
def test_what_a_server_answers_is_checked(script: Script, error: type[SynvirtError], words: str) -> None:
    with pytest.raises(error, match=words):
        read_scripted(script)


def test_416_in_the_middle_names_the_offset() -> None:
    def script(request: RangeRequest) -> tuple[int, dict[str, str], bytes]:
        return honest(disk_content(), request) if request.start == 0 else (416, {"Content-Length": "0"}, b"")

    with pytest.raises(DiskReadFailed, match=rf"ends before offset \d+, but had {SIZE} bytes"):
        read_scripted(script)


def test_answers_that_are_no_http_are_not_believed() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def answer() -> None:
        listening.settimeout(0.1)
        while not ended.is_set():
            try:
                client, _ = listening.accept()
            except TimeoutError:
                continue
            with client:
                client.recv(4096)
                client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(SourceUnreachable, match="BadStatusLine"):
            RemoteReader(servers.remote(f"http://127.0.0.1:{listening.getsockname()[1]}/"), NAME)
    finally:
        ended.set()
        thread.join()
        listening.close()


# ── who is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_wrong_passwords(nginx: servers.Nginx, samba: servers.Samba) -> None:
    wrong = (("password", "secret-guess"), ("username", servers.USER))
    for url in (f"http://127.0.0.1:{nginx.port}/private/", samba.url):
        with pytest.raises(AuthFailed) as caught:
            RemoteReader(servers.remote(url, credentials=wrong), NAME)
        assert "secret-guess" not in str(caught.value)
        assert "secret-guess" not in repr(servers.remote(url, credentials=wrong))


def test_what_is_not_there(nginx: servers.Nginx, samba: servers.Samba) -> None:
    for remote in (
        servers.remote(nginx.url),
        servers.remote(samba.url, credentials=SMB),
        servers.remote(samba.url.replace("/disks/", "/no-share/"), credentials=SMB),
    ):
        with pytest.raises(NotFound, match=r"gone\.raw"):
            RemoteReader(remote, "gone.raw")


def test_a_missing_bucket_and_a_wrong_key(tmp_path: Path) -> None:
    with servers.s3(tmp_path) as s3:
        s3.put(NAME, disk_content())
        keys = (("access_key_id", s3.access_key_id), ("secret_access_key", s3.secret_access_key))
        with pytest.raises(NotFound, match="NoSuchBucket"):
            RemoteReader(servers.remote("s3://no-bucket/", endpoint=s3.endpoint, credentials=keys), NAME)
        with pytest.raises(NotFound, match="NoSuchKey"):
            RemoteReader(servers.remote(f"s3://{s3.bucket}/", endpoint=s3.endpoint, credentials=keys), "gone")
        wrong = (keys[0], ("secret_access_key", "secret-guess"))
        with pytest.raises(AuthFailed, match="SignatureDoesNotMatch") as caught:
            RemoteReader(servers.remote(f"s3://{s3.bucket}/", endpoint=s3.endpoint, credentials=wrong), NAME)
        assert "secret-guess" not in str(caught.value)
        with pytest.raises(AuthFailed):
            RemoteReader(servers.remote(f"s3://{s3.bucket}/", endpoint=s3.endpoint), NAME)


def test_names_that_no_share_has_are_looked_for_nowhere(samba: servers.Samba) -> None:
    (samba.folder / "inner").mkdir()
    for name in ("..\\disk.raw", "a\\b", "\udcff.raw", "*", "disk.raw:stream", "a\0b", "inner"):
        with pytest.raises(NotFound):
            RemoteReader(servers.remote(f"{samba.url}inner/" if "\\" in name else samba.url, credentials=SMB), name)


def test_what_speaks_no_smb_is_no_smb_server(nginx: servers.Nginx) -> None:
    """«HTTP» as the length of a message is 1.13 GiB: that much of memory must not be taken for it."""
    tracemalloc.start()
    try:
        with pytest.raises(SourceUnreachable, match=rf"127\.0\.0\.1:{nginx.port}/share/x: "):
            RemoteReader(servers.remote(f"smb://127.0.0.1:{nginx.port}/share/", credentials=SMB), "x")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_nobody_listens_there() -> None:
    port = free_port()
    for url in (f"http://127.0.0.1:{port}/", f"https://127.0.0.1:{port}/", f"smb://127.0.0.1:{port}/share/"):
        with pytest.raises(SourceUnreachable, match=f"127.0.0.1, port {port}|127.0.0.1:{port}"):
            RemoteReader(servers.remote(url), NAME)


def test_a_server_that_dribbles_does_not_keep_a_caller_for_ever() -> None:

    class Dribbling(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            head = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-65535/9999999\r\nContent-Length: 65536\r\n\r\n"
            try:
                self.request.sendall(head)
                while not ended.wait(0.05):
                    self.request.sendall(b".")
            except OSError:
                pass

    ended = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dribbling) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        remote = servers.remote(f"http://127.0.0.1:{server.server_address[1]}/")

        def look() -> None:
            with places.connected(remote, within_s=0.6):
                reader = RemoteReader(remote, NAME)
                try:
                    read(reader, 0, 65536)
                finally:
                    reader.close()

        try:
            with pytest.raises(SourceUnreachable, match="did not send"):
                look()
        finally:
            ended.set()
            server.shutdown()
            thread.join()
    assert places._connections == {}
