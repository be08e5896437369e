"""Our NBD server, asked by those that others wrote: libnbd's reader and programs, QEMU; and by clients that mean no good."""

import contextlib
import errno
import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import nbd
import pytest

from synvirt.blocks import DiskReader, Extent
from synvirt.disks.nbd import server as nbd_server
from synvirt.disks.nbd.reader import NbdReader
from synvirt.disks.nbd.server import OPTION_BYTES_MAX, REQUEST_BYTES_MAX, NbdServer
from synvirt.errors import DiskReadFailed, Internal
from synvirt.sizes import MIB
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.fakes.disks import MemoryReader
from tests.needs import need

BLOCKS = "AB-0C" * 40 + "D"


def odd_disk() -> MemoryReader:
    return MemoryReader(BLOCKS, block_bytes=5000)


@contextmanager
def served(reader: DiskReader, folder: Path) -> Iterator[tuple[NbdServer, str]]:
    server = NbdServer(reader)
    try:
        yield server, server.listen(folder / "s")
    finally:
        server.close()
        (folder / "s").unlink()


class TestServed(ReaderContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Iterator[ReaderCase]:
        disk = odd_disk()
        with served(disk, tmp_path) as (_, uri):
            yield ReaderCase(open=lambda: NbdReader(uri), content=disk.content)


def test_libnbds_programs_and_qemus_read_it(tmp_path: Path) -> None:
    disk = odd_disk()
    (tmp_path / "as-it-is").write_bytes(disk.content)
    with served(disk, tmp_path) as (_, uri):
        reported = json.loads(_run(need("nbdinfo", "libnbd-bin"), "--json", uri))["exports"][0]
        assert reported["export-size"] == len(disk.content)
        assert reported["is_read_only"] is True
        assert reported["can_multi_conn"] is True
        assert reported["contexts"] == ["base:allocation"]
        areas = json.loads(_run("nbdinfo", "--map", "--json", uri))
        assert [(one["offset"], one["length"], bool(one["type"] & nbd.STATE_ZERO)) for one in areas] == [
            (one.start, one.length, one.zero) for one in disk.extents()
        ]
        _run(need("nbdcopy", "libnbd-bin"), uri, str(tmp_path / "copied"))
        assert [(tmp_path / "copied").read_bytes() == disk.content] == [True]
        _run(need("qemu-img", "qemu-utils"), "compare", "-f", "raw", "-F", "raw", uri, str(tmp_path / "as-it-is"))
    assert _left_of(tmp_path) == {"as-it-is", "copied"}


def test_a_loopback_port_serves_the_same(tmp_path: Path) -> None:
    disk = odd_disk()
    server = NbdServer(disk)
    try:
        uri = server.listen_loopback(0)
        assert uri.startswith("nbd://127.0.0.1:")
        assert _first_bytes(uri, 10) == disk.content[:10]
    finally:
        server.close()


def test_nothing_is_written(tmp_path: Path) -> None:
    disk = odd_disk()
    before = disk.content
    with served(disk, tmp_path) as (_, uri):
        client = nbd.NBD()
        client.set_strict_mode(0)  # libnbd itself would not ask
        client.connect_uri(uri)
        calls: tuple[tuple[Callable[..., object], tuple[object, ...]], ...] = (
            (client.pwrite, (b"x" * 512, 0)),
            (client.zero, (512, 0)),
            (client.trim, (512, 0)),
            (client.pread, (10, len(before))),
        )
        for ask, arguments in calls:
            with pytest.raises(nbd.Error):
                ask(*arguments)
        client.flush()
        assert client.pread(512, 0) == before[:512]
        client.shutdown()
    assert [disk.content == before] == [True]


def test_what_cannot_be_read_is_an_error_of_the_request_and_is_remembered(tmp_path: Path) -> None:
    class Broken(MemoryReader):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            if offset >= 5000:
                raise DiskReadFailed(f"broken at {offset}")
            super().read_into(offset, buffer)

    with served(Broken(BLOCKS, block_bytes=5000), tmp_path) as (server, uri):
        client = nbd.NBD()
        client.connect_uri(uri)
        with pytest.raises(nbd.Error, match="Input/output"):
            client.pread(10, 6000)
        assert client.pread(10, 0) == b"A" * 10, "the connection goes on"
        assert server.failure is not None
        assert server.failure.detail == "broken at 6000"
        client.shutdown()


def test_a_reader_that_breaks_is_an_error_of_the_request_too(tmp_path: Path) -> None:
    class Broken(MemoryReader):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            raise ValueError("a secret")

        def extents(self) -> Iterator[Extent]:
            raise MemoryError

    with served(Broken(BLOCKS, block_bytes=5000), tmp_path) as (server, uri):
        client = nbd.NBD()
        client.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
        client.connect_uri(uri)
        for number in (1, 2):
            with pytest.raises(nbd.Error, match="Input/output"):
                client.pread(10, 6000) if number == 1 else client.block_status(10, 0, lambda *_: 0)
        assert isinstance(server.failure, Internal)
        assert server.failure.detail == "a read of the disk broke: ValueError"
        client.shutdown()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_a_connection_that_cannot_be_taken_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refusals = [OSError(number, os.strerror(number))]
    really = socket.socket.accept

    def refusing(listening: socket.socket) -> object:
        if refusals:
            raise refusals.pop()
        return really(listening)

    monkeypatch.setattr(socket.socket, "accept", refusing)
    with served(odd_disk(), tmp_path) as (_, uri):
        assert _first_bytes(uri, 10) == b"A" * 10
    assert not refusals


def test_a_client_of_the_simple_replies_is_served(tmp_path: Path) -> None:
    """NBD_OPT_EXPORT_NAME, and no structured replies: what the Linux kernel's client may do."""
    disk = odd_disk()
    with served(disk, tmp_path), _greeted(tmp_path, flags=1) as client:
        client.sendall(b"IHAVEOPT" + struct.pack(">II", 1, 4) + b"name")
        size, flags = struct.unpack(">QH", _got(client, 10))
        assert (size, flags & 3) == (len(disk.content), 3)
        assert _got(client, 124) == bytes(124)
        client.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 0, 77, 4990, 20))
        assert struct.unpack(">IIQ", _got(client, 16)) == (0x67446698, 0, 77)
        assert _got(client, 20) == disk.content[4990:5010]
        client.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 7, 78, 0, 20))
        assert struct.unpack(">IIQ", _got(client, 16)) == (0x67446698, 22, 78)


@pytest.mark.parametrize(
    "sent",
    [
        b"IHAVEOPT" + struct.pack(">II", 7, OPTION_BYTES_MAX + 1),
        b"IHAVEOPT" + struct.pack(">II", 7, 2**32 - 1),
        b"GET / HTTP/1.1\r\n\r\n",
        b"IHAVEOPT" + struct.pack(">II", 1, 0) + struct.pack(">IHHQQI", 0x25609513, 0, 1, 1, 0, REQUEST_BYTES_MAX + 1),
        b"IHAVEOPT" + struct.pack(">II", 1, 0) + bytes(28),
    ],
)
def test_who_does_not_keep_to_the_protocol_is_hung_up_on(tmp_path: Path, sent: bytes) -> None:
    disk = odd_disk()
    with served(disk, tmp_path) as (_, uri):
        with _greeted(tmp_path, flags=3) as client:
            client.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 16):
                    pass
        assert _first_bytes(uri, 10) == disk.content[:10], "others are served"


def test_requests_out_of_range_are_refused_and_nothing_is_allocated_for_them(tmp_path: Path) -> None:
    disk = odd_disk()
    with served(disk, tmp_path), _greeted(tmp_path, flags=3) as client:
        client.sendall(b"IHAVEOPT" + struct.pack(">II", 1, 0))
        _got(client, 10)
        for offset, length in ((0, 2**32 - 1), (2**64 - 1, 2**32 - 1), (disk.size, 1), (0, 0), (disk.size - 1, 2)):
            client.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 0, 5, offset, length))
            assert struct.unpack(">IIQ", _got(client, 16)) == (0x67446698, 22, 5)
    assert disk.reads == []


def test_noise_does_not_bring_it_down(tmp_path: Path) -> None:
    random = Random(7)
    disk = odd_disk()
    with served(disk, tmp_path) as (_, uri):
        for _ in range(50):
            with _greeted(tmp_path, flags=random.choice((0, 1, 3))) as client, contextlib.suppress(OSError):
                option = struct.pack(">II", random.choice((3, 6, 7, 8, 9, 10, 99)), length := random.randrange(40))
                client.sendall(b"IHAVEOPT" + option + random.randbytes(length))
                client.sendall(b"IHAVEOPT" + struct.pack(">II", 1, 0) + random.randbytes(random.randrange(200)))
        assert _first_bytes(uri, 10) == disk.content[:10]


def test_who_takes_no_answer_is_hung_up_on_and_the_others_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nbd_server, "SEND_TIMEOUT_S", 1)
    disk = MemoryReader("A" * 4, block_bytes=MIB)
    with served(disk, tmp_path) as (_, uri), contextlib.ExitStack() as clients:
        for _ in range(nbd_server.THREADS):
            client = clients.enter_context(_greeted(tmp_path, flags=3))
            client.sendall(b"IHAVEOPT" + struct.pack(">II", 1, 0))
            _got(client, 10)
            client.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 0, 1, 0, 2 * MIB))
        assert _first_bytes(uri, 10) == disk.content[:10]


def test_it_ends_with_clients_connected(tmp_path: Path) -> None:
    server = NbdServer(odd_disk())
    server.listen(tmp_path / "s")
    with _greeted(tmp_path, flags=3) as client:
        server.close()
        server.close()
        assert client.recv(10) == b""


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def _first_bytes(uri: str, count: int) -> bytes:
    client = nbd.NBD()
    client.connect_uri(uri)
    content = bytes(client.pread(count, 0))
    client.shutdown()
    return content


@contextmanager
def _greeted(folder: Path, *, flags: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(30)
        client.connect(str(folder / "s"))
        assert _got(client, 18) == b"NBDMAGICIHAVEOPT\0\3"
        client.sendall(struct.pack(">I", flags))
        yield client


def _got(client: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        piece = client.recv(length - len(content))
        assert piece, "the server hung up"
        content += piece
    return content


def _left_of(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}
