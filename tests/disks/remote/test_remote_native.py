"""Files of SMB shares read by Samba's own client, in processes of its own, beside smbprotocol."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from smbprotocol.exceptions import SharingViolation
from smbprotocol.open import (
    CreateDisposition,
    CreateOptions,
    FileAttributes,
    FilePipePrinterAccessMask,
    ImpersonationLevel,
    Open,
    ShareAccess,
)

from synvirt.errors import DiskReadFailed
from synvirt.remote import Interrupted, retrying, smb_native
from synvirt.remote.reading import RemoteReader
from synvirt.remote.smb import SmbPlace
from tests.drawn import shared_in_a_file
from tests.running.processes import until
from tests.servers.remote_servers import PASSWORD, Samba, remote, samba

SIZE = 9 << 20


@shared_in_a_file
def content() -> bytes:
    return random.Random(4).randbytes(SIZE)


@pytest.fixture(scope="module", params=["plain", "encrypted"])
def share(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Samba]:
    more = " server signing = mandatory\n server smb encrypt = required\n" if request.param == "encrypted" else ""
    with samba(tmp_path_factory.mktemp("samba"), more=more) as running:
        folder = running.folder / "a folder, ü"
        folder.mkdir()
        (folder / "50% #1.bin").write_bytes(content())
        yield running


NAME = "a folder, ü/50% #1.bin"


def opened(share: Samba) -> RemoteReader:
    return RemoteReader(remote(share.url, credentials=(("username", "root"), ("password", PASSWORD))), NAME)


def place_of(reader: RemoteReader) -> SmbPlace:
    place = reader._connection.place
    assert isinstance(place, SmbPlace)
    return place


def test_large_pieces_come_by_it_and_are_the_files(share: Samba) -> None:
    reader = opened(share)
    buffer = bytearray(SIZE)
    reader.read_into(0, memoryview(buffer))
    assert bytes(buffer) == content()
    native = place_of(reader).native()
    assert native is not None
    assert native.read_bytes >= SIZE // 2
    odd = bytearray(300_001)
    for offset in (1, (4 << 20) - 7, SIZE - len(odd)):
        reader.read_into(offset, memoryview(odd))
        assert bytes(odd) == content()[offset : offset + len(odd)]
    lanes = list(native._lanes)
    reader.close()
    assert [lane._process.poll() is None for lane in lanes] == [False] * len(lanes)


def test_many_that_read_large_parts_read_each_byte_once_and_keep_none(share: Samba) -> None:
    """Once as many read at once as the place takes."""
    reader = opened(share)
    pieces, step = reader._pieces, 1 << 20
    pieces._most_reading = place_of(reader).fetches_at_once
    found = bytearray(SIZE)
    view, kept = memoryview(found), len(pieces._starts)

    def part(at: int) -> None:
        reader.read_into(at, view[at : at + step])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(part, range(0, len(found), step)))
    assert bytes(found) == content()
    assert (pieces.requested_bytes, len(pieces._starts)) == (SIZE, kept)
    # A small one is read by pieces again, and a large one over them takes them.
    small = bytearray(4096)
    reader.read_into(step, memoryview(small))
    reader.read_into(step - 5, view[: 2 * step])
    assert bytes(small) + bytes(found[: 2 * step]) == content()[step : step + 4096] + content()[step - 5 : 3 * step - 5]
    reader.close()


def test_four_at_once_are_many(share: Samba, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = opened(share)
    all_in = threading.Barrier(4)
    read = reader._pieces._read

    def together(at: int, buffer: memoryview) -> None:
        all_in.wait(60)
        read(at, buffer)

    monkeypatch.setattr(reader._pieces, "_read", together)
    buffers = [bytearray(1 << 20) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: reader.read_into(number << 21, memoryview(buffers[number])), range(4)))
    assert [bytes(one) for one in buffers] == [content()[number << 21 :][: 1 << 20] for number in range(4)]
    assert reader._pieces._starts == []
    reader.close()


def test_a_lane_that_was_given_up_answers_nobody(share: Samba, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer to the question before would be taken for the next one's."""
    monkeypatch.setattr(smb_native, "LANES", 1)
    native = smb_native.NativeShare("127.0.0.1", share.port, "disks", user="root", password=PASSWORD, domain="")
    buffer = memoryview(bytearray(1 << 20))
    assert native.read(NAME, 0, buffer) == len(buffer)
    (lane,) = native._lanes
    os.kill(lane._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as late:
        late.setattr(smb_native, "ANSWER_TIMEOUT_S", 0.1)
        assert native.read(NAME, 0, buffer) is None
    os.kill(lane._process.pid, signal.SIGCONT)
    assert native.lost
    assert native.read(NAME, 4 << 20, buffer) is None
    native.close()


def test_a_process_that_dies_in_the_middle_costs_nothing_but_time(share: Samba, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "PAUSES_S", (0.01,) * 7)
    reader = opened(share)
    piece = bytearray(1 << 20)
    reader.read_into(0, memoryview(piece))
    native = place_of(reader).native()
    assert native is not None
    for lane in native._lanes:
        lane._process.kill()
    rest = bytearray(SIZE - (5 << 20))
    reader.read_into(5 << 20, memoryview(rest))
    assert bytes(rest) == content()[5 << 20 :]
    reader.close()


def test_without_the_library_pythons_smb_reads(share: Samba, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smb_native.NativeShare, "_no_library", True)
    reader = opened(share)
    buffer = bytearray(2 << 20)
    reader.read_into(0, memoryview(buffer))
    assert bytes(buffer) == content()[: 2 << 20]
    native = place_of(reader).native()
    assert native is not None
    assert native.read_bytes == 0
    reader.close()


def test_a_helper_that_cannot_begin_is_left_alone(share: Samba, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "helper.py"
    broken.write_text("raise SystemExit(7)")
    monkeypatch.setattr(smb_native, "_HELPER", broken)
    reader = opened(share)
    buffer = bytearray(2 << 20)
    reader.read_into(0, memoryview(buffer))
    assert bytes(buffer) == content()[: 2 << 20]
    reader.close()


def test_a_file_that_is_not_there_is_an_error_of_that_file_alone(share: Samba) -> None:
    native = smb_native.NativeShare("127.0.0.1", share.port, "disks", user="root", password=PASSWORD, domain="")
    buffer = bytearray(1 << 20)
    assert native.read("not there", 0, memoryview(buffer)) is None
    assert not native.lost
    assert native.read(NAME, 0, memoryview(buffer)) == len(buffer)
    # From many threads at once.
    failures: list[int] = []

    def read(number: int) -> None:
        mine = bytearray(500_000)
        got = native.read(NAME, number * 700_000, memoryview(mine))
        if got is None or mine[:got] != content()[number * 700_000 :][:got] or not got:
            failures.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    native.close()


def test_the_password_is_in_no_argument(share: Samba) -> None:
    native = smb_native.NativeShare("127.0.0.1", share.port, "disks", user="root", password=PASSWORD, domain="")
    assert native.read(NAME, 0, memoryview(bytearray(1 << 20)))
    for lane in native._lanes:
        process = Path(f"/proc/{lane._process.pid}")
        seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        assert PASSWORD.encode() not in seen
    native.close()


def test_a_fetch_that_sees_a_break_late_leaves_the_new_connection_alone(share: Samba) -> None:
    """Or the fetches of one reader would break each other's connections, one after the other, until it gives up."""
    place = SmbPlace(remote(share.url, credentials=(("username", "root"), ("password", PASSWORD))))
    try:
        file = place.open(NAME)
        before = place.tree()
        place.broken(before)
        buffer = bytearray(4096)
        file.fetch(0, memoryview(buffer))
        after = place.tree()
        assert after is not before
        assert isinstance(place.translated(ConnectionResetError(), NAME, tree=before), Interrupted)
        assert place.tree() is after
        file.fetch(0, memoryview(buffer))
        assert bytes(buffer) == content()[:4096]
        assert place.tree() is after
    finally:
        place.close()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_file_that_another_has_open_for_writing(share: Samba, *, frozen: bool) -> None:
    """Is refused, unless a platform holds it still: its own program may have it open so."""
    credentials = (("username", "root"), ("password", PASSWORD))
    other = SmbPlace(remote(share.url, credentials=credentials))
    path = NAME.replace("/", "\\")
    handle = Open(other.tree(), path)
    every = ShareAccess.FILE_SHARE_READ | ShareAccess.FILE_SHARE_WRITE

    def is_open() -> bool:
        with suppress(SharingViolation):  # the reader of the test before left without goodbye: Samba sees it a little later
            handle.create(
                ImpersonationLevel.Impersonation,
                FilePipePrinterAccessMask.GENERIC_READ | FilePipePrinterAccessMask.GENERIC_WRITE,
                FileAttributes.FILE_ATTRIBUTE_NORMAL,
                every,
                CreateDisposition.FILE_OPEN,
                CreateOptions.FILE_NON_DIRECTORY_FILE,
            )
            return True
        return False

    until(is_open)
    try:
        place = remote(share.url, credentials=credentials, frozen=frozen)
        if not frozen:
            with pytest.raises(DiskReadFailed, match="open for writing elsewhere"):
                RemoteReader(place, NAME)
            return
        reader = RemoteReader(place, NAME)
        buffer = bytearray(2 << 20)
        reader.read_into(0, memoryview(buffer))
        assert bytes(buffer) == content()[: 2 << 20]
        native = place_of(reader).native()
        assert native is not None
        assert native.read_bytes > 0
        reader.close()
    finally:
        handle.close()
        other.close()
