"""Disks read from VMware's own simulator: whole, by changed areas, by the reader of a datastore's files."""

import asyncio
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks import open_reader
from synvirt.disks.changed import coarser
from synvirt.disks.specs import ChangedSpec, DatastoreSpec, DeltaSpec, ReaderSpec
from synvirt.disks.vsphere.datastore import ReadForbidden
from synvirt.errors import DiskReadFailed, MalformedArchive, SourceUnreachable
from synvirt.live.vsphere import changes as vim_changes
from synvirt.live.vsphere.adapter import VimApi
from tests.cases import cases
from tests.contracts.live import read
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.disks.vmdk.vmdk_images import Cowd, SeSparse, write_image
from tests.fakes.vcenter import DISK_BYTES, PASSWORD, VCenter
from tests.live.vsphere.api.asking import BLOCK, VM, all_of, ask, content, opened, tracked, write

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)


def test_a_first_pass_reads_what_is_allocated_and_zeros_the_rest(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> tuple[bytes, int]:
        await tracked(adapter)
        spec, _ = await opened(adapter, "synvirt-a-1")
        return await asyncio.to_thread(read, spec, os.urandom(DISK_BYTES))

    copy, data_bytes = ask(platform.access(), use)
    assert copy == content()
    assert data_bytes == 3 << 20


def test_many_changed_areas_come_page_by_page(platform: VCenter, disk: Path) -> None:
    """The simulator lists 8 areas an answer."""
    blocks = range(0, DISK_BYTES // BLOCK, 2)

    async def use(adapter: VimApi) -> ReaderSpec:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        await adapter.release(VM, "synvirt-a-1")
        for block in blocks:
            write(disk, block * BLOCK + 5, os.urandom(10))
        return (await opened(adapter, "synvirt-a-2", since))[0]

    spec = ask(platform.access(), use)
    assert isinstance(spec, ChangedSpec)
    assert spec.areas == tuple((block * BLOCK, BLOCK) for block in blocks)


def test_areas_are_joined_before_there_are_too_many_to_hold(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vim_changes, "AREAS_MAX", 4)
    held: list[int] = []

    def counted(areas: list[tuple[int, int]], most: int) -> tuple[tuple[int, int], ...]:
        held.append(len(areas))
        return coarser(areas, most)

    monkeypatch.setattr(vim_changes, "coarser", counted)

    async def use(adapter: VimApi) -> ReaderSpec:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        for block in range(0, DISK_BYTES // BLOCK, 2):
            write(disk, block * BLOCK, os.urandom(BLOCK))
        return (await opened(adapter, "synvirt-a-2", since))[0]

    spec = ask(platform.access(), use)
    assert isinstance(spec, ChangedSpec)
    assert len(spec.areas) <= 4
    assert max(held) <= 2 * 4 + 8  # and one answer of the simulator's
    covered = {block for start, length in spec.areas for block in range(start // BLOCK, (start + length) // BLOCK)}
    assert covered >= set(range(0, DISK_BYTES // BLOCK, 2))


def test_an_area_ends_where_its_disk_does(platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks have sectors of 512 bytes, and are tracked in steps of 64 KiB or more."""
    size = DISK_BYTES - 512
    monkeypatch.setattr(vim_changes, "capacity_of", lambda _: size)

    async def use(adapter: VimApi) -> tuple[tuple[int, int], ...]:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        write(disk, DISK_BYTES - BLOCK, b"the last block")
        snapshot = await adapter.snapshot(VM, "synvirt-a-2")
        key, found = next(iter(vim_changes.disks_of(adapter._session, snapshot.id).items()))
        assert key in snapshot.change_ids
        return vim_changes.changed(adapter._session, VM, snapshot.id, found, since)

    assert ask(platform.access(), use) == ((DISK_BYTES - BLOCK, BLOCK - 512),)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)), max_size=60).map(
        lambda drawn: [(start * 65536, length * 65536) for start, length in drawn]
    ),
    st.integers(1, 20),
)
@cases(100)
def test_coarser_areas_hold_the_finer_ones(areas: list[tuple[int, int]], most: int) -> None:
    def blocks(listed: Iterable[tuple[int, int]]) -> set[int]:
        return {block for start, length in listed for block in range(start // 65536, (start + length) // 65536)}

    joined = coarser(areas, most)
    assert len(joined) <= most
    assert blocks(areas) <= blocks(joined)
    if len(areas) <= most:
        assert blocks(areas) == blocks(joined)
    ends = max((start + length for start, length in areas), default=0)
    assert max((start + length for start, length in joined), default=0) == ends


def test_a_disk_under_snapshots_of_the_operator_is_read_from_all_its_files(platform: VCenter, disk: Path) -> None:
    """Two, one of each sort that hosts make: VMFS 5's and VMFS 6's."""
    sectors = DISK_BYTES // 512
    older = Cowd(capacity=sectors, grain=8, grains={0: 1, 5: 2, 1000: 3})
    newer = SeSparse(capacity=sectors, grains={5: 4, 6: "zeros", 1023: 5})
    write_image(disk.parent, "disk1-000001", older, parent_cid=0xFFFFFFFE, parent="disk1.vmdk")
    write_image(disk.parent, "disk1-000002", newer, parent_cid=1, parent="disk1-000001.vmdk")
    for name in ("disk1-000001.vmdk", "disk1-000002.vmdk"):
        platform.control("lay", vm=VM, file=name)

    async def use(adapter: VimApi) -> tuple[bytes, int]:
        manifest = await adapter.inspect(VM)
        # It has no snapshot that would account for its further files.
        assert [concern.id for concern in manifest.concerns] == ["vim.read_by", "vim.linked_clone"]
        spec, _ = await opened(adapter, "synvirt-a-1")
        assert isinstance(spec, DeltaSpec)
        assert PASSWORD not in repr(spec)
        return await asyncio.to_thread(read, spec)

    assert ask(platform.access(), use)[0] == newer.disk(older.disk(content()))


def test_a_file_that_is_shorter_than_its_disk_is_named_with_both_sizes(platform: VCenter, disk: Path) -> None:
    os.truncate(disk, DISK_BYTES // 2)

    async def use(adapter: VimApi) -> None:
        spec, _ = await opened(adapter, "synvirt-a-1")
        reader = await asyncio.to_thread(open_reader, spec)
        try:
            await asyncio.to_thread(reader.read_into, DISK_BYTES - (1 << 20), memoryview(bytearray(1 << 20)))
        finally:
            reader.close()

    with pytest.raises(DiskReadFailed, match=r"shorter|bytes, and its disk at least") as short:
        ask(platform.access(), use)
    assert "disk1" in f"{short.value} {short.value.hint}"


def test_a_snapshots_disk_of_another_size_is_refused(platform: VCenter, disk: Path) -> None:
    write_image(disk.parent, "disk1-000001", SeSparse(capacity=8, grains={0: 1}), parent_cid=1, parent="disk1.vmdk")
    platform.control("lay", vm=VM, file="disk1-000001.vmdk")
    spec, _ = ask(platform.access(), lambda adapter: opened(adapter, "synvirt-a-1"))
    with pytest.raises(MalformedArchive, match="not a snapshot's extent of a disk of 4194304 bytes"):
        open_reader(spec)


def test_the_password_is_in_no_repr(platform: VCenter, disk: Path) -> None:
    spec, _ = ask(platform.access(), lambda adapter: opened(adapter, "synvirt-a-1"))
    assert PASSWORD not in repr(spec)
    assert PASSWORD not in repr(platform.access())


class TestDatastoreReader(ReaderContract):
    @pytest.fixture(params=["all of it", "what is allocated"])
    def case(self, request: pytest.FixtureRequest, spec: DatastoreSpec) -> ReaderCase:
        # Out of order and overlapping, as platforms may list them; each third MiB is zeros.
        areas = ((3 << 20, 1 << 20), (0, 1 << 20), (1 << 19, 3 << 19)) if request.param == "what is allocated" else None
        return ReaderCase(open=lambda: open_reader(replace(spec, areas=areas)), content=content())


@pytest.mark.parametrize(
    ("status", "reported"), [(200, "ranges"), (302, "302"), (403, "Datastore.Browse"), (416, "shorter than the disk")]
)
def test_an_answer_that_is_no_range_is_reported_by_what_it_means(
    platform: VCenter, spec: DatastoreSpec, status: int, reported: str
) -> None:
    platform.fault("folder", f"status:{status}")
    with pytest.raises(DiskReadFailed, match=reported):
        open_reader(spec)


def test_a_file_that_its_host_cannot_open_is_reported_from_a_moments_trouble(platform: VCenter, spec: DatastoreSpec) -> None:
    """vCenter answers 500 for both: an answer to the last of some tries is none of the host's moods."""
    platform.fault("folder", "status:500", times=3)
    reader = open_reader(spec)
    platform.fault("folder", "status:500", times=4)
    with pytest.raises(SourceUnreachable, match="500"):
        reader.read_into(0, memoryview(bytearray(512)))
    reader.close()
    platform.fault("folder", "status:500", times=4)
    with pytest.raises(ReadForbidden, match=r"500 .* cannot open it"):
        open_reader(spec)
    platform.fault("folder", "status:503", times=4)
    with pytest.raises(SourceUnreachable, match="503"):
        open_reader(spec)


def test_reads_at_odd_places(spec: DatastoreSpec) -> None:
    reader = open_reader(spec)
    for offset, length in ((0, 1), (1, 3), (511, 2), (DISK_BYTES - 1, 1), (12345, 1 << 20), (DISK_BYTES, 0)):
        buffer = bytearray(length)
        reader.read_into(offset, memoryview(buffer))
        assert buffer == content()[offset : offset + length]
    for offset, length in ((DISK_BYTES, 1), (-1, 1), (0, DISK_BYTES + 1)):
        with pytest.raises(DiskReadFailed):
            reader.read_into(offset, memoryview(bytearray(length)))
    reader.close()


def test_many_threads_read_by_one_session(platform: VCenter, spec: DatastoreSpec) -> None:
    before = platform.calls("Login")
    reader = open_reader(spec)
    wrong: list[int] = []

    def part(number: int) -> None:
        buffer = bytearray(DISK_BYTES // 16)
        reader.read_into(number * len(buffer), memoryview(buffer))
        if buffer != content()[number * len(buffer) : (number + 1) * len(buffer)]:
            wrong.append(number)

    threads = [threading.Thread(target=part, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert wrong == []
    assert platform.calls("Login") == before + 1
    assert platform.sessions() == 0


def test_a_host_that_goes_in_the_middle_of_a_read_is_asked_again(platform: VCenter, spec: DatastoreSpec) -> None:
    reader = open_reader(spec)
    for kind in ("cut", "refuse", "status:503"):
        platform.fault("folder", kind, times=2)
        buffer = bytearray(1 << 20)
        reader.read_into(0, memoryview(buffer))
        assert buffer == content()[: 1 << 20]
    platform.fault("folder", "cut", times=100)
    with pytest.raises(SourceUnreachable, match="offset 1048576"):
        reader.read_into(1 << 20, memoryview(bytearray(1 << 20)))
    platform.control("nofaults")
    reader.close()
    assert all_of(spec) == content()


def test_a_file_that_is_gone_is_no_network_trouble(platform: VCenter, spec: DatastoreSpec) -> None:
    reader = open_reader(spec)
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    with pytest.raises(DiskReadFailed, match="no longer exists"):
        reader.read_into(0, memoryview(bytearray(512)))
    reader.close()
    with pytest.raises(DiskReadFailed, match="no longer exists"):
        open_reader(spec)
