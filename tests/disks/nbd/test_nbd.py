"""NBD exports of real servers: the contract of readers, and what servers and networks do to a copy."""

import datetime as dt
import gc
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import nbd as libnbd
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from synvirt.blocks import Extent, coalesced, new_buffer
from synvirt.disks import open_reader
from synvirt.disks.nbd import held
from synvirt.disks.nbd import reader as nbd
from synvirt.disks.nbd.reader import NbdReader
from synvirt.disks.nbd.silence import Watch
from synvirt.disks.specs import NbdSpec
from synvirt.errors import CbtReset, DiskReadFailed, SourceUnreachable
from tests.contracts.readers import ReaderCase, ReaderContract, read_all
from tests.disks.block_images import bytes_of, qemu
from tests.needs import need
from tests.running.ports import free_port
from tests.running.processes import stopped
from tests.servers.nbd_servers import nbdkit, qemu_nbd, serving

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """8 MiB + 512: noise, holes and an odd end."""
    path = tmp_path / "disk.raw"
    with path.open("wb") as file:
        file.truncate(8 * MIB + 512)
        for at, length in ((0, 70_000), (3 * MIB, 2 * MIB), (8 * MIB, 512)):
            file.seek(at)
            file.write(os.urandom(length))
    return path


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nbd, "RECONNECT_DELAYS_S", (0.05, 0.1, 0.2))


@contextmanager
def enciphered(disk: Path, *options: str) -> Iterator[str]:
    """nbdkit with TLS, by a shared key."""
    keys = disk.parent / "keys.psk"
    keys.write_text("alice:00112233445566778899aabbccddeeff\n")
    with nbdkit(disk.parent, "--tls=require", f"--tls-psk={keys}", *options) as uri:
        yield f"{uri.replace('nbd+unix:///', 'nbds+unix://alice@/')}&tls-psk-file={keys}"


SERVERS = {
    "qemu-nbd": lambda disk: qemu_nbd(disk, "raw"),
    "qemu-nbd, one connection": lambda disk: qemu_nbd(disk, "raw", "-e", "1"),
    "nbdkit": lambda disk: nbdkit(disk.parent, "file", str(disk)),
    "nbdkit, TLS": lambda disk: enciphered(disk, "file", str(disk)),
    "nbdkit, no extents": lambda disk: nbdkit(disk.parent, "--filter=noextents", "file", str(disk)),
    "nbdkit, old protocol": lambda disk: nbdkit(disk.parent, "--no-sr", "file", str(disk)),
    "nbdkit, no second connection": lambda disk: nbdkit(
        disk.parent, "--filter=multi-conn", "file", str(disk), "multi-conn-mode=disable"
    ),
    "nbdkit, whole blocks only": lambda disk: nbdkit(
        disk.parent, "--filter=blocksize-policy", "file", str(disk),
        "blocksize-minimum=512", "blocksize-preferred=4K", "blocksize-maximum=64K", "blocksize-error-policy=error",
    ),
}  # fmt: skip


class TestNbdReader(ReaderContract):
    @pytest.fixture(params=SERVERS)
    def case(self, request: pytest.FixtureRequest, disk: Path) -> Iterator[ReaderCase]:
        with SERVERS[request.param](disk) as uri:
            yield ReaderCase(open=lambda: open_reader(NbdSpec(uri=uri)), content=disk.read_bytes())


def test_holes_are_zero_extents(disk: Path) -> None:
    for server in (qemu_nbd(disk, "raw"), nbdkit(disk.parent, "file", str(disk))):
        with server as uri:
            reader = NbdReader(uri)
            zeros = [(extent.start, extent.end) for extent in reader.extents() if extent.zero]
            assert zeros == [(72 * KIB, 3 * MIB), (5 * MIB, 8 * MIB)]
            reader.close()


@pytest.fixture
def tracked(tmp_path: Path) -> Path:
    """A qcow2 image with a dirty bitmap, written to since: 256 KiB of data at 1 MiB, zeros at 4 MiB."""
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "disk.qcow2", "10M", cwd=tmp_path)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 1 0 2M", "disk.qcow2", cwd=tmp_path)
    qemu("qemu-img", "bitmap", "--add", "-g", "64k", "disk.qcow2", "since", cwd=tmp_path)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 2 1M 256k", "-c", "write -z 4M 64k", "disk.qcow2", cwd=tmp_path)
    return tmp_path / "disk.qcow2"


def test_a_hole_is_zeros_only_where_the_server_says_that_too() -> None:
    """A range that was discarded on a device is a hole whose old bytes may still be there (NBD_STATE_HOLE without ZERO)."""
    reader = NbdReader.__new__(NbdReader)
    hole, zero = libnbd.STATE_HOLE, libnbd.STATE_ZERO
    told = [(0, KIB, hole), (KIB, 2 * KIB, hole | zero), (2 * KIB, 3 * KIB, zero), (3 * KIB, 4 * KIB, 0)]
    reader._bitmap, reader._has_allocation, reader.size = None, True, 4 * KIB
    reader._pool = cast(Any, SimpleNamespace(ask=lambda *_: [told]))
    assert list(reader.extents()) == [Extent(0, KIB), Extent(KIB, 2 * KIB, zero=True), Extent(3 * KIB, KIB)]


def test_a_dirty_bitmap_is_all_the_extents_there_are(tracked: Path) -> None:
    with qemu_nbd(tracked, "qcow2", "-B", "since") as uri:
        reader = open_reader(NbdSpec(uri=uri, bitmap="qemu:dirty-bitmap:since"))
        assert list(reader.extents()) == [Extent(MIB, 256 * KIB), Extent(4 * MIB, 64 * KIB, zero=True)]
        assert bytes_of(reader, MIB - 1, 2) == b"\1\2"
        reader.close()


@pytest.mark.parametrize("step", [64 * KIB, 3 * MIB + 512, GIB])
def test_many_dirty_ranges_are_found_by_few_questions(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is a network's round trip; and however the disk is cut into questions, it is the same disk."""
    written = sorted(random.Random(7).sample(range(256), 100))
    zeroed = set(written[::3])
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "disk.qcow2", "16M", cwd=tmp_path)
    qemu("qemu-io", "-f", "qcow2", "-c", "write -P 1 0 8M", "disk.qcow2", cwd=tmp_path)
    qemu("qemu-img", "bitmap", "--add", "-g", "64k", "disk.qcow2", "since", cwd=tmp_path)
    writes = [f"write {'-z' if block in zeroed else '-P 2'} {64 * block}k 64k" for block in written]
    qemu("qemu-io", "-f", "qcow2", *(part for write in writes for part in ("-c", write)), "disk.qcow2", cwd=tmp_path)
    blocks = (Extent(64 * KIB * block, 64 * KIB, zero=block in zeroed) for block in written)
    monkeypatch.setattr(nbd, "_STATUS_BYTES", step)
    status, calls = nbd._status, []

    def counted(handle: Any, **about: Any) -> Any:
        calls.append(about)
        return status(handle, **about)

    monkeypatch.setattr(nbd, "_status", counted)
    with qemu_nbd(tmp_path / "disk.qcow2", "qcow2", "-B", "since") as uri:
        reader = NbdReader(uri, bitmap="qemu:dirty-bitmap:since")
        assert list(reader.extents()) == list(coalesced(blocks))
        assert len(calls) <= -(-16 * MIB // (step // 512 * 512)) + 1
        reader.close()


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_server_may_say_less_of_one_context_than_of_the_other(
    tracked: Path, monkeypatch: pytest.MonkeyPatch, shorter: int
) -> None:
    """The rest is asked for: what is written there is not left out."""
    status = nbd._status

    def cut_short(handle: Any, **about: Any) -> Any:
        found = status(handle, **about)
        return [one[:1] if number == shorter else one for number, one in enumerate(found)]

    monkeypatch.setattr(nbd, "_status", cut_short)
    with qemu_nbd(tracked, "qcow2", "-B", "since") as uri:
        reader = NbdReader(uri, bitmap="qemu:dirty-bitmap:since")
        assert list(reader.extents()) == [Extent(MIB, 256 * KIB), Extent(4 * MIB, 64 * KIB, zero=True)]
        reader.close()


def test_a_dirty_bitmap_that_is_not_there_is_a_reset(tracked: Path) -> None:
    with qemu_nbd(tracked, "qcow2") as uri, pytest.raises(CbtReset, match="qemu:dirty-bitmap:since"):
        NbdReader(uri, bitmap="qemu:dirty-bitmap:since")


@pytest.mark.parametrize("buffer", [new_buffer(MIB), memoryview(bytearray(MIB))], ids=["a copy's", "another"])
@pytest.mark.parametrize("offset", [0, 3])
def test_no_read_keeps_memory(disk: Path, buffer: memoryview, offset: int) -> None:
    """libnbd's Python library kept something of each request: 800 MiB for a disk of 1 TiB."""

    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, memoryview) for one in gc.get_objects())

    with nbdkit(disk.parent, "file", str(disk)) as uri:
        reader = NbdReader(uri)
        reader.read_into(offset, buffer)
        before = kept()
        for _ in range(20):
            reader.read_into(offset, buffer)
            assert buffer == disk.read_bytes()[offset : offset + MIB]
        assert kept() == before
        reader.close()


@pytest.mark.parametrize("tls", [False, True])
def test_an_error_of_the_server_names_the_offset_and_the_rest_is_still_read(disk: Path, *, tls: bool) -> None:
    trigger = disk.parent / "trigger"
    failing = ["--filter=error", "file", str(disk), "error-pread=EIO", "error-pread-rate=100%", f"error-pread-file={trigger}"]
    with enciphered(disk, *failing) if tls else nbdkit(disk.parent, *failing) as uri:
        reader = NbdReader(uri)
        trigger.touch()
        with pytest.raises(DiskReadFailed, match=f"offset {MIB}: .*Input/output error"):
            bytes_of(reader, MIB, 3 * MIB)
        trigger.unlink()
        assert read_all(reader) == disk.read_bytes()
        reader.close()


class Failing:
    """A connection whose requests for some offsets fail; each turn of `poll` answers one of those that are open."""

    def __init__(self, *, tls: bool, failing: int) -> None:
        self.tls, self.failing, self.open = tls, failing, list[int]()
        self.near, self.far = socket.socketpair()

    def get_block_size(self, _: int) -> int:
        return 0

    def get_tls_negotiated(self) -> bool:
        return self.tls

    def aio_get_fd(self) -> int:
        return self.near.fileno()

    def aio_pread(self, _: object, offset: int) -> int:
        self.open.append(offset)
        return offset

    def aio_in_flight(self) -> int:
        return len(self.open)

    def poll(self, _: int) -> int:
        self.open.pop()
        return 1

    def aio_command_completed(self, cookie: int) -> bool:
        self._refuse(cookie)
        return True

    def pread(self, length: int, offset: int) -> bytes:
        self._refuse(offset)
        return bytes(length)

    def _refuse(self, offset: int) -> None:
        if offset == self.failing:
            raise libnbd.Error("Input/output error", 5)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_whichever_part_of_a_read_fails_it_fails_and_nothing_still_comes(part: int, *, lasts: bool, tls: bool) -> None:
    handle = Failing(tls=tls, failing=part * 256 * KIB)
    pool: Any = SimpleNamespace(pieces=held.Pieces(), watch=Watch(60.0))
    with handle.near, handle.far, pytest.raises(libnbd.Error, match="Input/output"):
        nbd._read(handle, 0, new_buffer(MIB) if lasts else memoryview(bytearray(MIB)), MIB, pool)
    pool.watch.close()
    assert handle.open == []


def test_an_error_about_extents_names_the_offset(disk: Path) -> None:
    with nbdkit(disk.parent, "--filter=error", "file", str(disk), "error-extents-rate=100%") as uri:
        reader = NbdReader(uri)
        with pytest.raises(DiskReadFailed, match="offset 0"):
            list(reader.extents())
        reader.close()


def test_an_answer_of_nothing_about_extents_ends_the_walk(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = nbd._ranges
    with nbdkit(disk.parent, "file", str(disk)) as uri:
        reader = NbdReader(uri)
        for answer in ([], [0, 0], [0, 3, 0, 0]):
            monkeypatch.setattr(nbd, "_ranges", lambda entries, *place, answer=answer: ranges(answer, *place))
            with pytest.raises(DiskReadFailed, match="no answer about the extents at offset 0"):
                list(reader.extents())
        reader.close()


def test_a_connection_that_is_lost_is_made_again(disk: Path) -> None:
    """The server is killed and started again while four threads read: not a byte is missing or wrong."""
    expected = disk.read_bytes()
    address = disk.parent / "again.sock"
    argv = [need("nbdkit", "nbdkit"), "-f", "-r", "-U", str(address), "--filter=delay", "file", str(disk), "delay-read=20ms"]
    reads = 0
    wrong: list[object] = []

    def read_some(reader: NbdReader, first: int) -> None:
        nonlocal reads
        try:
            for at in range(first * MIB, 8 * MIB, 256 * KIB):
                if bytes_of(reader, at, 256 * KIB) != expected[at : at + 256 * KIB]:
                    wrong.append(at)
                reads += 1
        except Exception as error:
            wrong.append(error)

    with serving(argv, address):
        reader = NbdReader(f"nbd+unix:///?socket={address}")
        threads = [threading.Thread(target=read_some, args=(reader, first)) for first in range(4)]
        for thread in threads:
            thread.start()
        while reads < 10:
            time.sleep(0.01)
    with serving(argv, address):
        for thread in threads:
            thread.join()
        reader.close()
    assert not wrong
    assert reads == 32 + 28 + 24 + 20


@pytest.mark.parametrize("tls", [False, True])
def test_a_server_that_is_gone_for_good_is_unreachable(disk: Path, *, tls: bool) -> None:
    with enciphered(disk, "file", str(disk)) if tls else nbdkit(disk.parent, "file", str(disk)) as uri:
        reader = NbdReader(uri)
    with pytest.raises(SourceUnreachable, match="offset 4096"):
        bytes_of(reader, 4096, 4096)
    with pytest.raises(SourceUnreachable):
        list(reader.extents())
    reader.close()
    with pytest.raises(DiskReadFailed, match="closed"):
        bytes_of(reader, 0, 1)


def test_an_export_of_another_size_is_another_disk(disk: Path) -> None:
    with nbdkit(disk.parent, "file", str(disk)) as uri:
        reader = NbdReader(uri)
    with nbdkit(disk.parent, "memory", "1M"), pytest.raises(SourceUnreachable, match="another disk"):
        bytes_of(reader, 0, 1)
    reader.close()


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(SourceUnreachable, match="NBD server"):
        NbdReader(f"nbd+unix:///secret-export?socket={tmp_path}/none")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(SourceUnreachable, match=r"127\.0\.0\.1:\d+"):
            NbdReader(f"nbd://127.0.0.1:{unused.getsockname()[1]}/disk")


def test_an_export_that_does_not_exist(disk: Path) -> None:
    with qemu_nbd(disk, "raw", "-x", "real") as uri, pytest.raises(SourceUnreachable):
        NbdReader(uri)


@pytest.mark.parametrize("way", ["socket", "TCP with TLS"])
def test_a_server_that_stops_answering_is_given_up(disk: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not nbdkit: when several requests have lost their client at once, it may end itself (an assertion in its connections.c).
    monkeypatch.setattr(nbd, "SILENCE_TIMEOUT_S", 1.0)
    if way == "socket":
        uri = f"nbd+unix:///?socket={disk.parent / 'stopped'}"
        options = ["-k", str(disk.parent / "stopped")]
    else:
        keys, port = authority(disk.parent / "keys"), free_port()
        uri = f"nbds://localhost:{port}/?tls-certificates={keys}"
        secret = f"tls-creds-x509,id=keys,dir={keys},endpoint=server,verify-peer=no"
        options = ["--object", secret, "--tls-creds", "keys", "-b", "127.0.0.1", "-p", str(port)]
    argv = [need("qemu-nbd", "qemu-utils"), "-r", "-t", "-e", "8", "-f", "raw", *options, str(disk)]
    with serving(argv, disk.parent / "stopped") as server:
        reader = NbdReader(uri)
        for name, value in {"MORE_CONNECTIONS_TIMEOUT_S": 0.5, "_POLL_MS": 50}.items():
            monkeypatch.setattr(nbd, name, value)
        # From here on: the first connection has all the time that it needs on a loaded machine.
        monkeypatch.setattr(reader._pool, "_connect_timeout_s", 0.5)
        os.kill(server.pid, signal.SIGSTOP)
        stopped(server.pid)
        with pytest.raises(SourceUnreachable, match=r"sent nothing|not answered"):
            bytes_of(reader, 0, MIB)
        os.kill(server.pid, signal.SIGCONT)
        monkeypatch.undo()
        assert bytes_of(reader, 0, MIB) == disk.read_bytes()[:MIB]
        reader.close()


@pytest.mark.parametrize(("mode", "connections"), [("unsafe", 4), ("disable", 1)])
def test_as_many_connections_as_the_server_allows_are_used(disk: Path, mode: str, connections: int) -> None:
    log = disk.parent / "log"
    filters = ["--filter=log", "--filter=multi-conn", "--filter=delay"]
    options = [f"logfile={log}", f"multi-conn-mode={mode}", "delay-read=200ms"]
    with nbdkit(disk.parent, *filters, "file", str(disk), *options) as uri:
        reader = NbdReader(uri, connections=4)
        with ThreadPoolExecutor(8) as pool:
            expected = disk.read_bytes()
            for at, got in enumerate(pool.map(lambda at: bytes_of(reader, at * MIB, MIB), range(8))):
                assert got == expected[at * MIB : (at + 1) * MIB]
        assert reader.max_readers == 2 * connections
        reader.close()
    reads = {line.split("connection=")[1].split()[0] for line in log.read_text().splitlines() if " Read " in line}
    assert len(reads) == connections


@pytest.mark.parametrize("pause_s", [0.0, 1000.0])
def test_a_connection_that_was_refused_is_tried_again_later(
    disk: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """A server that was busy for a moment costs its speed for that moment, not for the rest of a terabyte."""
    refused = threading.Event()
    connected = nbd._connected

    def refuse(*_: object) -> Any:
        refused.set()
        raise nbd._Lost("it is busy")

    monkeypatch.setattr(nbd, "MORE_AGAIN_S", pause_s)
    with nbdkit(disk.parent, "file", str(disk)) as uri, ThreadPoolExecutor(2) as threads:
        pool = NbdReader(uri, connections=2)._pool
        monkeypatch.setattr(nbd, "_connected", refuse)
        only = pool._take()
        waiting = threads.submit(pool._take)
        assert refused.wait(60)
        pool._give_back(only)
        assert waiting.result(60) is only
        monkeypatch.setattr(nbd, "_connected", connected)
        another = threads.submit(pool._take)
        if pause_s == 0.0:
            assert another.result(60) is not only
        else:
            pool._give_back(only)
            assert another.result(60) is only
        pool.close()


@contextmanager
def tcp_server(disk: Path, *options: str) -> Iterator[int]:
    port = free_port()
    argv = [need("nbdkit", "nbdkit"), "-f", "-r", "-i", "127.0.0.1", "-p", str(port), *options, "file", str(disk)]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as child:
        try:
            for _ in range(1200):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield port
        finally:
            child.kill()


def authority(folder: Path) -> Path:
    """A certificate authority, and a server's certificate for localhost, named as GnuTLS' users name them."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
    now = dt.datetime.now(dt.UTC)

    def signed(subject: x509.Name, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject).issuer_name(name).public_key(public).serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        )  # fmt: skip
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    server = ec.generate_private_key(ec.SECP256R1())
    (folder / "ca-cert.pem").write_bytes(signed(name, key.public_key(), x509.BasicConstraints(ca=True, path_length=None)))
    (folder / "server-cert.pem").write_bytes(
        signed(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]),
            server.public_key(),
            x509.SubjectAlternativeName([x509.DNSName("localhost")]),
        )
    )
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server-key.pem").write_bytes(server.private_bytes(*encoding))
    return folder


def test_tls_with_certificates(disk: Path) -> None:
    trusted, other = authority(disk.parent / "trusted"), authority(disk.parent / "other")
    with tcp_server(disk, "--tls=require", f"--tls-certificates={trusted}") as port:
        reader = NbdReader(f"nbds://localhost:{port}/?tls-certificates={trusted}")
        assert read_all(reader) == disk.read_bytes()
        reader.close()
        with pytest.raises(SourceUnreachable):  # another authority's
            NbdReader(f"nbds://localhost:{port}/?tls-certificates={other}")
        with pytest.raises(SourceUnreachable):  # no TLS
            NbdReader(f"nbd://localhost:{port}/")


def test_tls_with_a_wrong_key(disk: Path) -> None:
    wrong = disk.parent / "wrong.psk"
    wrong.write_text("alice:ff112233445566778899aabbccddeeff\n")
    with enciphered(disk, "file", str(disk)) as uri, pytest.raises(SourceUnreachable) as failure:
        NbdReader(uri.replace("keys.psk", "wrong.psk"))
    assert "alice" not in failure.value.detail
    assert "psk" not in failure.value.detail
