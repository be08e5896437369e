"""qemu-nbd as a reader: what our own refuse is read, no server and no secret is left behind, and no other file is opened."""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from synvirt.disks import open_reader
from synvirt.disks.nbd.qemu import QemuNbdReader
from synvirt.disks.qcow2.reader import Qcow2Reader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import QemuDriver, QemuSpec
from synvirt.errors import HostPathRejected, MalformedArchive, SourceUnreachable, UnsupportedFormat
from tests.contracts.readers import ReaderCase, ReaderContract, read_all
from tests.disks.block_images import bytes_of, qemu
from tests.disks.luks_images import luks_image, luks_in_qcow2

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    path.write_bytes(os.urandom(200_000) + bytes(2 * MIB) + os.urandom(3 * MIB - 200_000))
    return path


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets, secrets and servers of a test lie in a folder of its own, which is empty at its end.

    Not under tmp_path: with the names of pytest and xdist before it, a socket's path is longer than it may be. That folder
    is asked for all the same: pytest makes its own first, and keeps it for the whole run, wherever temporary files lie then.
    """
    with tempfile.TemporaryDirectory(prefix="qn-", dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []
        assert servers(Path(folder)) == []


def servers(folder: Path) -> list[int]:
    """The living qemu-nbd processes with a socket under `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it ended meanwhile
    return found


class TestQemuNbdReader(ReaderContract):
    @pytest.fixture(params=["parallels", "qed", "a part of a file"])
    def case(self, request: pytest.FixtureRequest, raw: Path) -> ReaderCase:
        driver = "qed" if request.param == "a part of a file" else request.param
        image = raw.with_name("image")
        qemu("qemu-img", "convert", "-f", "raw", "-O", driver, raw.name, image.name, cwd=raw.parent)
        offset, length = 0, None
        if driver != request.param:
            offset, length = 1536, image.stat().st_size
            image.write_bytes(b"\xff" * offset + image.read_bytes() + b"\xff" * 5000)
        spec = QemuSpec(driver=cast(QemuDriver, driver), path=str(image), offset=offset, length=length)
        # Formats count in clusters of their own.
        with QemuNbdReaderOf(spec) as size:
            content = raw.read_bytes().ljust(size, b"\0")
        return ReaderCase(open=lambda: open_reader(spec), content=content)


class QemuNbdReaderOf:
    """The size of a spec's disk."""

    def __init__(self, spec: QemuSpec) -> None:
        self._reader = open_reader(spec)

    def __enter__(self) -> int:
        return self._reader.size

    def __exit__(self, *_: object) -> None:
        self._reader.close()


def aes_in_qcow2(image: Path, raw: Path, key: Path) -> Path:
    secret = ["--object", f"secret,id=s,file={key.name}", "-o", "encrypt.format=aes,encrypt.key-secret=s"]
    qemu("qemu-img", "convert", *secret, "-f", "raw", "-O", "qcow2", raw.name, image.name, cwd=raw.parent)
    return image


@pytest.mark.parametrize(
    ("make", "driver"), [(luks_in_qcow2, "qcow2"), (aes_in_qcow2, "qcow2"), (luks_image, "luks")], ids=["luks", "aes", "whole"]
)
def test_an_encrypted_image_is_read_with_its_passphrase(
    raw: Path, scratch: Path, make: Callable[[Path, Path, Path], Path], driver: str
) -> None:
    (raw.parent / "passphrase").write_text("open, sesame")
    image = make(raw.with_name("image"), raw, raw.with_name("passphrase"))
    if driver == "qcow2":
        with pytest.raises(UnsupportedFormat, match="encrypted"):
            Qcow2Reader(RawReader(str(image)), name="image")
    reader = QemuNbdReader(str(image), driver, passphrase="open, sesame")
    (server,) = servers(scratch)[:1]
    assert b"sesame" not in Path(f"/proc/{server}/cmdline").read_bytes()
    assert b"sesame" not in Path(f"/proc/{server}/environ").read_bytes()
    assert read_all(reader) == raw.read_bytes()
    reader.close()
    reader.close()
    if make is not aes_in_qcow2:  # which has no way to know a wrong one
        with pytest.raises(MalformedArchive, match=r"(?i)password|passphrase"):
            QemuNbdReader(str(image), driver, passphrase="wrong")


def test_what_qemu_cannot_open_is_malformed_with_its_reason(raw: Path) -> None:
    with pytest.raises(MalformedArchive, match=r"disk.raw.*not a Parallels|in Parallels format"):
        QemuNbdReader(str(raw), "parallels")


@pytest.mark.parametrize("sign", ["KILL", "SEGV"])
def test_a_server_that_is_ended_as_it_opens_the_image(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    """By the kernel, as memory was short: the image is not to blame. Where the image breaks QEMU, it is."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "qemu-nbd"
    program.write_text(f"#!/bin/sh\nkill -{sign} $$\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    expected = SourceUnreachable if sign == "KILL" else MalformedArchive
    with pytest.raises(expected, match=f"qemu-nbd.* was ended by SIG{sign}") as failed:
        QemuNbdReader(str(raw), "dmg")
    assert failed.value.hint is None or "journalctl" in failed.value.hint


def test_a_server_that_is_ended_while_its_disk_is_read(raw: Path, scratch: Path) -> None:
    qemu("qemu-img", "convert", "-f", "raw", "-O", "qed", raw.name, "image", cwd=raw.parent)
    reader = QemuNbdReader(str(raw.with_name("image")), "qed")
    for server in servers(scratch):
        os.kill(server, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(SourceUnreachable, match="qemu-nbd, which reads image, was ended by SIGKILL") as failed:
        reader.read_into(0, memoryview(bytearray(4096)))
    assert "firewall" not in str(failed.value.hint)
    assert time.monotonic() - began < 5  # it does not come back
    reader.close()


def test_the_format_is_named_and_known(raw: Path) -> None:
    for driver in ("vmdk", "raw", "nbd", "file", "json:{}"):
        with pytest.raises(UnsupportedFormat, match="not given to QEMU"):
            QemuNbdReader(str(raw), driver)


@pytest.mark.parametrize("driver", ["qcow2", "qcow", "qed"])
def test_an_image_that_needs_another_file_is_never_given_to_qemu(raw: Path, driver: str) -> None:
    qemu("qemu-img", "create", "-q", "-f", driver, "-b", str(raw), "-F", "raw", "image", "1M", cwd=raw.parent)
    with pytest.raises(HostPathRejected, match="another file"):
        QemuNbdReader(str(raw.with_name("image")), driver)


def test_an_image_whose_data_lies_elsewhere_is_never_given_to_qemu(raw: Path) -> None:
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-o", "data_file=other", "image", "1M", cwd=raw.parent)
    with pytest.raises(HostPathRejected, match="another file"):
        QemuNbdReader(str(raw.with_name("image")), "qcow2")


def test_a_worker_that_is_killed_leaves_no_server(raw: Path, scratch: Path) -> None:
    qemu("qemu-img", "convert", "-f", "raw", "-O", "qed", raw.name, "image", cwd=raw.parent)
    code = (
        "import sys, time; from synvirt.disks.nbd.qemu import QemuNbdReader\n"
        "reader = QemuNbdReader(sys.argv[1], 'qed'); print('open', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "TMPDIR": str(scratch)}
    argv = [sys.executable, "-c", code, str(raw.with_name("image"))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"open\n"
        assert len(servers(scratch)) == 1
        worker.kill()
    deadline = time.monotonic() + 60
    while servers(scratch):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for left in scratch.iterdir():  # its folder, which the sweep of the job would remove
        for file in left.iterdir():
            file.unlink()
        left.rmdir()


@pytest.mark.parametrize("apart", [0, 8])
@pytest.mark.parametrize("driver", ["qcow", "qed"])
def test_tables_over_one_another_are_no_way_to_grow_a_disk(driver: QemuDriver, apart: int, tmp_path: Path) -> None:
    """A file of a few MiB would be looked at for hours."""
    cluster, named = 64 * KIB, 4096
    entries = 8192  # of a table: a cluster full, for both
    places = [2 * cluster + number * apart for number in range(named)]
    size = named * entries * cluster
    if driver == "qcow":
        header = struct.pack(">4sIQIIQBBHIQ", b"QFI\xfb", 1, 0, 0, 0, size, 16, 13, 0, 0, cluster)
    else:
        header = struct.pack("<4sIIIQQQQQ", b"QED\0", cluster, 1, 1, 0, 0, 0, cluster, size)
    directory = struct.pack(f"{'>' if driver == 'qcow' else '<'}{named}Q", *places)
    path = tmp_path / "image"
    path.write_bytes(header.ljust(cluster, b"\0") + directory.ljust(cluster, b"\0") + bytes(2 * cluster))
    began = time.process_time()
    with pytest.raises(MalformedArchive, match=f"its tables have more entries than a file of {4 * cluster} bytes holds"):
        QemuNbdReader(str(path), driver)
    assert time.process_time() - began < 2


def test_a_header_that_is_cut_off(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"QED\0" + struct.pack("<I", 65536))
    with pytest.raises(MalformedArchive, match="only 8 bytes"):
        QemuNbdReader(str(image), "qed")
    assert bytes_of(RawReader(str(image)), 0, 3) == b"QED"
