"""vim_api against VMware's own simulator: the laws of LiveAdapter, then what the platform may do wrong.

What this proves: the order of calls, VMware's types, the bytes. What it cannot: VMware's own change tracking, locks and speed.
"""

import asyncio
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from synvirt import __version__
from synvirt.disks import open_reader
from synvirt.disks.changed import coarser
from synvirt.disks.specs import ChangedSpec, DatastoreSpec, DeltaSpec, ReaderSpec
from synvirt.disks.vsphere.datastore import ReadForbidden
from synvirt.errors import (
    AuthFailed,
    BadRequest,
    CbtReset,
    CbtUnsupported,
    DiskReadFailed,
    Internal,
    MalformedArchive,
    SnapshotFailed,
    SourceUnreachable,
    VmNotFound,
)
from synvirt.live import SourceAccess
from synvirt.live.registry import BY_KIND
from synvirt.live.vsphere import changes as vim_changes
from synvirt.live.vsphere import session as session_module
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.privileges import EXPORT, PRIVILEGES
from synvirt.live.vsphere.session import library, warn_if_missing
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from tests.cases import cases
from tests.contracts.live import LiveCase, LiveContract, in_session, read
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.disks.vmdk_images import Cowd, SeSparse, write_image
from tests.fakes.vcenter import DISK_BYTES, PASSWORD, USER, VCenter

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)

T = TypeVar("T")
BLOCK = 65536
VM = "vm-57"


def content(seed: int = 0, size: int = DISK_BYTES) -> bytes:
    """Data, with holes: every third MiB is zeros."""
    generator = random.Random(seed)
    return b"".join(bytes(1 << 20) if part % 3 == 2 else generator.randbytes(1 << 20) for part in range(size >> 20))


@pytest.fixture
def disk(platform: VCenter) -> Path:
    """The running VM's disk, as its guest sees it."""
    return platform.add_disk(VM, content())


def ask(access: SourceAccess, use: Callable[[VimApi], Awaitable[T]]) -> T:
    return in_session(lambda: VimApi(access), use)


async def tracked(adapter: VimApi) -> None:
    await adapter.enable_cbt(VM, [disk.key for disk in (await adapter.inspect(VM)).disks])


def write(disk: Path, offset: int, data: bytes) -> None:
    with disk.open("r+b") as file:
        file.seek(offset)
        file.write(data)


class TestLaws(LiveContract):
    @pytest.fixture
    def case(self, platform: VCenter, disk: Path) -> LiveCase:
        def restart() -> None:
            ask(platform.access(), lambda adapter: adapter.power_on(VM))
            ask(platform.access(), lambda adapter: adapter.shutdown(VM))

        return LiveCase(
            open=lambda: VimApi(platform.access()),
            vm_id=VM,
            content=disk.read_bytes,
            write=lambda offset, data: write(disk, offset, data),
            snapshots=platform.snapshots,
            lose_tracking=lambda: platform.control("reset", vm=VM),
            restart=restart,
            tracked_bytes=BLOCK,
        )


# ── control plane ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_inventory_is_listed_with_its_folders(platform: VCenter, disk: Path) -> None:
    rows = ask(platform.access(), lambda adapter: adapter.list_vms())
    # One walk for all VMs, one for their folders and one for their hosts, however many there are: none a VM.
    assert (platform.calls("CreateContainerView"), platform.calls("RetrievePropertiesEx")) == (3, 3)
    assert all(row.host for row in rows)
    assert (rows[0].vm_id, rows[0].name, rows[0].power_state, rows[0].folder) == (VM, "DC0_H0_VM0", "on", "DC0")
    assert rows[0].cpu_count == 1
    assert rows[0].memory_bytes == 32 << 20
    assert len(rows) == 2


def test_a_datastores_space_is_looked_at(platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has that the tests run on: none is enough."""
    monkeypatch.setattr("synvirt.live.vsphere.concerns.LOW_SPACE", 2)
    monkeypatch.setattr("synvirt.live.vsphere.concerns.capacity_of", lambda _: 1 << 62)
    concerns = ask(platform.access(), lambda adapter: adapter.inspect(VM)).concerns
    assert "vim.store_full:LocalDS_0" in [concern.id for concern in concerns]


def test_folders_are_reported_but_for_those_that_nobody_named(platform: VCenter, disk: Path) -> None:
    """One that somebody did call «vm», and one with a slash."""

    async def use(adapter: VimApi) -> str:
        session = adapter._session

        def moved(content: Any) -> None:
            folder = session.properties(session.machine(VM), ("parent",), what="look")["parent"]
            for name in ("vm", "a%2fb"):
                folder = folder.CreateFolder(name)
            session.wait(folder.MoveIntoFolder_Task([session.machine(VM)]), what="move", timeout_s=20)

        await asyncio.to_thread(session.call, "move it", moved)
        return next(row.folder for row in await adapter.list_vms() if row.vm_id == VM)

    assert ask(platform.access(), use) == "DC0/vm/a/b"


def test_a_manifest_has_what_the_platform_knows(platform: VCenter, disk: Path) -> None:
    manifest = ask(platform.access(), lambda adapter: adapter.inspect(VM))
    assert (manifest.name, manifest.firmware, manifest.power_state) == ("DC0_H0_VM0", "bios", "on")
    assert manifest.host == "DC0_H0"
    assert (manifest.cpu_count, manifest.memory_bytes) == (1, 32 << 20)
    one = manifest.disks[0]
    assert (one.capacity_bytes, one.format, one.source_path) == (DISK_BYTES, "vmdk", "[LocalDS_0] DC0_H0_VM0/disk1.vmdk")
    assert one.bus == "scsi"
    assert not one.cbt_enabled
    assert manifest.nics[0].mac
    assert manifest.nics[0].model == "e1000"
    assert (manifest.cbt_available, manifest.cbt_reason) == (True, None)
    assert [concern.id for concern in manifest.concerns] == ["vim.read_by"]


def test_networks_and_names_are_reported_as_people_know_them(platform: VCenter, disk: Path) -> None:
    """A distributed port group, which its card knows by a key; one of NSX, which it knows by an id; a name with a slash."""

    async def renamed(adapter: VimApi) -> VmManifest:
        session = adapter._session
        await asyncio.to_thread(session.call, "rename it", lambda _: session.machine(VM).Rename_Task("web%2f01"))
        return await adapter.inspect(VM)

    before = platform.calls("RetrievePropertiesEx")
    assert ask(platform.access(), lambda adapter: adapter.inspect(VM)).nics[0].network == "DC0_DVPG0"
    assert platform.calls("RetrievePropertiesEx") - before <= 3  # not one a network, nor one a datastore
    platform.control("opaque", vm=VM, id="0f1e2d3c-nsx", name="segment %2f 12")
    one = ask(platform.access(), renamed)
    assert (one.name, one.nics[0].network) == ("web/01", "segment / 12")
    assert ask(platform.access(), lambda adapter: adapter.list_vms())[0].name == "web/01"


def test_a_network_that_is_not_for_us_to_see_is_reported_by_what_its_card_holds(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.session.VimSession.each", lambda *_, **__: {})
    assert ask(platform.access(), lambda adapter: adapter.inspect(VM)).nics[0].network.startswith("dvportgroup-")


def test_privileges_are_asked_for_one_by_one(platform: VCenter) -> None:
    about = ask(platform.access(), lambda adapter: adapter.about())
    assert about.product == "VMware vCenter Server"
    assert [check.name for check in about.checks] == [f"privilege {name}" for name, _ in PRIVILEGES]


def test_a_privilege_that_is_missing_is_a_failed_check(platform: VCenter) -> None:
    platform.fault("HasPrivilegeOnEntities", "deny:VirtualMachine.State.CreateSnapshot")
    checks = ask(platform.access(), lambda adapter: adapter.about()).checks
    missing = [check for check in checks if not check.ok]
    assert [check.name for check in missing] == ["privilege VirtualMachine.State.CreateSnapshot"]
    assert USER in missing[0].detail
    assert "role" in str(missing[0].hint)


@pytest.mark.parametrize(
    ("denied", "options", "failed", "warned"),
    [
        ("Datastore.Browse", {}, [], ["Datastore.Browse"]),
        ("Datastore.Browse,VApp.Export", {}, ["Datastore.Browse"], []),
        ("VApp.Export", {}, [], []),
        ("Datastore.Browse", {"transport": "datastore"}, ["Datastore.Browse"], []),
        ("VApp.Export,Datastore.Browse", {"transport": "lease"}, ["VApp.Export"], []),
    ],
)
def test_without_files_an_export_lease_is_reported_as_the_way_that_is_left(
    platform: VCenter, denied: str, options: dict[str, str], failed: list[str], warned: list[str]
) -> None:
    platform.fault("HasPrivilegeOnEntities", f"deny:{denied}")
    access = platform.access(fingerprint_sha256=platform.fingerprint, **options)
    checks = ask(access, lambda adapter: adapter.about()).checks
    assert [check.name for check in checks if not check.ok] == [f"privilege {one}" for one in failed]
    warnings = [check for check in checks if check.warning]
    assert [check.name for check in warnings] == [f"privilege {one}" for one in warned]
    assert all(check.ok and "export lease" in check.detail and check.hint for check in warnings)


def test_a_host_that_does_not_tell_privileges_is_no_failure(platform: VCenter) -> None:
    platform.fault("HasPrivilegeOnEntities", "NotSupported")
    checks = ask(platform.access(), lambda adapter: adapter.about()).checks
    assert [(check.name, check.ok) for check in checks] == [("privileges", True)]


def test_closing_ends_the_session(platform: VCenter) -> None:
    ask(platform.access(), lambda adapter: adapter.list_vms())
    assert platform.sessions() == 0


def test_an_administrator_sees_whose_session_it_is(platform: VCenter) -> None:
    """As every client is listed in vCenter's monitor of sessions."""

    async def use(adapter: VimApi) -> str:
        session = adapter._session
        return str(
            await asyncio.to_thread(session.call, "say who we are", lambda one: one.sessionManager.currentSession.userAgent)
        )

    assert ask(platform.access(), use) == f"SynVirt/{__version__}"


def test_snapshots_of_the_operator_forbid_switching_the_tracking_on(platform: VCenter, disk: Path) -> None:
    async def theirs(adapter: VimApi) -> None:
        await adapter.snapshot(VM, "before the upgrade")

    ask(platform.access(), theirs)
    manifest = ask(platform.access(), lambda adapter: adapter.inspect(VM))
    assert [snapshot.name for snapshot in manifest.snapshots] == ["before the upgrade"]
    assert "snapshots" in str(manifest.cbt_reason)
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-x-1"))
    assert platform.snapshots() == ["before the upgrade"]


# ── the data plane ───────────────────────────────────────────────────────────────────────────────────────────────────


async def opened(adapter: VimApi, name: str, since: str | None = None) -> tuple[ReaderSpec, str]:
    """Of the first disk: its reader, and its change id."""
    snapshot = await adapter.snapshot(VM, name)
    one = (await adapter.inspect(VM)).disks[0]
    return await adapter.open_disk(VM, snapshot, one, since), snapshot.change_ids.get(one.key, "")


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


@pytest.fixture
def spec(platform: VCenter, disk: Path) -> DatastoreSpec:
    """The disk in a snapshot that is there until the test ends, to be read without a session of the adapter's."""
    found, _ = ask(platform.access(), lambda adapter: opened(adapter, "synvirt-a-1"))
    assert isinstance(found, DatastoreSpec)
    return found


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


def all_of(spec: DatastoreSpec) -> bytes:
    return read(spec)[0]


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


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.disks.vsphere.datastore.RETRY_DELAYS_S", (0.01, 0.01, 0.01))


def test_a_wrong_password(platform: VCenter) -> None:
    with pytest.raises(AuthFailed, match=USER) as refused:
        ask(platform.access(password="wr0ng"), lambda adapter: adapter.list_vms())
    assert "wr0ng" not in str(refused.value)


def test_nobody_listens() -> None:
    with pytest.raises(SourceUnreachable):
        ask(SourceAccess("https://127.0.0.1:1", {"user": "u", "password": "p"}), lambda adapter: adapter.list_vms())


def test_a_certificate_that_nobody_signed_is_not_trusted(platform: VCenter) -> None:
    before = platform.calls("Login")
    with pytest.raises(SourceUnreachable, match="not trusted"):
        ask(platform.access(verify_tls=True), lambda adapter: adapter.list_vms())
    assert platform.calls("Login") == before
    assert ask(platform.access(verify_tls=False), lambda adapter: adapter.list_vms())


def test_a_certificate_that_changed_gets_no_password(platform: VCenter, spec: DatastoreSpec) -> None:
    platform.control("certificate")
    before = platform.calls("Login")
    with pytest.raises(SourceUnreachable, match="is not the pinned one"):
        ask(platform.access(), lambda adapter: adapter.list_vms())
    with pytest.raises(SourceUnreachable, match="is not the pinned one"):
        open_reader(spec)
    assert platform.calls("Login") == before


def test_a_session_that_was_lost_is_made_again(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> bytes:
        spec, _ = await opened(adapter, "synvirt-a-1")
        reader = open_reader(spec)
        for number in range(4):
            platform.control("sessions")
            assert (await adapter.inspect(VM)).name == "DC0_H0_VM0"
            buffer = bytearray(1 << 20)
            await asyncio.to_thread(reader.read_into, number << 20, memoryview(buffer))
            assert buffer == content()[number << 20 : (number + 1) << 20]
        await asyncio.to_thread(reader.close)
        await adapter.cleanup(VM, "synvirt-a-1")
        return b""

    ask(platform.access(), use)
    assert platform.snapshots() == []


def test_a_password_that_was_changed_meanwhile(platform: VCenter, spec: DatastoreSpec) -> None:
    with pytest.raises(AuthFailed, match="refused our login"):
        open_reader(replace(spec, password="0ld"))


def test_a_task_that_fails_is_reported_with_the_platforms_words(platform: VCenter, disk: Path) -> None:
    platform.fault("PowerOffVM_Task", "task:SystemError")
    platform.fault("ShutdownGuest", "ToolsUnavailable")
    with pytest.raises(Internal, match="power it off"):
        ask(platform.access(), lambda adapter: adapter.shutdown(VM))
    platform.fault("ShutdownGuest", "ToolsUnavailable")
    ask(platform.access(), lambda adapter: adapter.shutdown(VM))
    assert ask(platform.access(), lambda adapter: adapter.inspect(VM)).power_state == "off"


@pytest.mark.parametrize(("kind", "said"), [("TaskInProgress", "TaskInProgress"), ("InvalidState", "present state")])
def test_a_vm_that_cannot_be_asked_now_is_not_powered_off_by_force(platform: VCenter, disk: Path, kind: str, said: str) -> None:
    platform.fault("ShutdownGuest", kind)
    with pytest.raises(SourceUnreachable, match=said):
        ask(platform.access(), lambda adapter: adapter.shutdown(VM))
    assert platform.calls("PowerOffVM_Task") == 0
    assert platform.guest_writes(VM, 0, b"it still runs")


@pytest.mark.parametrize("kind", ["task:SnapshotFault", "task:SystemError", "SnapshotFault", "NoPermission"])
def test_a_snapshot_that_fails_leaves_none(platform: VCenter, disk: Path, kind: str) -> None:
    platform.fault("CreateSnapshot_Task", kind)
    with pytest.raises(AuthFailed if kind == "NoPermission" else SnapshotFailed):
        ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))
    assert platform.snapshots() == []
    assert ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1")).id


def test_a_missing_privilege_is_named(platform: VCenter, disk: Path) -> None:
    platform.fault("CreateSnapshot_Task", "NoPermission")
    with pytest.raises(AuthFailed, match=r"VirtualMachine\.State\.CreateSnapshot"):
        ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))


@pytest.mark.parametrize("kind", ["refuse", "status:503"])
def test_a_platform_that_stops_answering_in_the_middle(platform: VCenter, disk: Path, kind: str) -> None:
    platform.fault("CreateSnapshot_Task", kind)
    with pytest.raises(SourceUnreachable, match="does not answer"):
        ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))
    assert ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1")).id


BUSY = (
    "TaskInProgress",
    "HostNotConnected",
    "HostNotReachable",
    "HostCommunication",
    "Timedout",
    "FileLocked",
    "ConcurrentAccess",
)


@pytest.mark.parametrize("kind", BUSY)
def test_what_passes_by_itself_is_asked_again_wherever_it_is_reported(kind: str) -> None:
    """By a call, and by a task that it started."""
    vmware = library()
    fault = getattr(vmware.vim.fault, kind, None) or getattr(vmware.vmodl.fault, kind)
    session = VimApi(SourceAccess("https://vcenter", {"user": "u", "password": "p"}))._session
    with pytest.raises(SourceUnreachable, match=kind) as reported, session.mapped("do it"):
        raise fault
    assert "asked again" in str(reported.value.hint)
    session.properties = lambda *_, **__: {"info.state": "error", "info.error": fault()}  # type: ignore[method-assign]
    with pytest.raises(SourceUnreachable, match=kind):
        session.wait("task-1", what="do it", timeout_s=1)


SPOKEN_TO = ("RetrieveServiceContent", "Login", "RetrievePropertiesEx", "CreateContainerView", "QueryChangedDiskAreas")


@pytest.mark.parametrize("method", SPOKEN_TO)
def test_a_trouble_inside_the_platform_passes_whatever_it_was_asked(platform: VCenter, disk: Path, method: str) -> None:
    """SystemError: a vCenter that restarts, or whose single sign-on does."""

    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        await adapter.snapshot(VM, "synvirt-a-2")
        if method not in SPOKEN_TO[:2]:
            platform.fault(method, "SystemError")
            with pytest.raises(SourceUnreachable, match="SystemError"):
                await (adapter.list_vms() if method == "CreateContainerView" else opened(adapter, "synvirt-a-2", since))
        assert await opened(adapter, "synvirt-a-2", since)
        for name in ("synvirt-a-1", "synvirt-a-2"):
            await adapter.cleanup(VM, name)

    if method in SPOKEN_TO[:2]:
        platform.fault(method, "SystemError")
        with pytest.raises(SourceUnreachable, match="SystemError"):
            ask(platform.access(), use)
    ask(platform.access(), use)


@pytest.mark.parametrize(("kind", "error"), [("GenericVmConfigFault", CbtReset), ("NotSupported", CbtUnsupported)])
def test_a_host_that_cannot_say_what_changed_leaves_the_whole_disk_to_be_compared(
    platform: VCenter, disk: Path, kind: str, error: type[Exception]
) -> None:
    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        await adapter.snapshot(VM, "synvirt-a-2")
        platform.fault("QueryChangedDiskAreas", kind)
        with pytest.raises(error):
            await opened(adapter, "synvirt-a-2", since)
        for name in ("synvirt-a-1", "synvirt-a-2"):
            await adapter.cleanup(VM, name)

    ask(platform.access(), use)


def test_an_answer_that_takes_long_is_given_more_time_each_time(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the same limit would fail three times, and hold a snapshot meanwhile."""
    monkeypatch.setattr(session_module, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(session_module, "ANSWERS", session_module._Answers())
    limits: list[str] = []

    async def use(adapter: VimApi) -> None:
        await adapter.inspect(VM)

    for _ in range(3):
        platform.fault("RetrievePropertiesEx", "hang:20000")
        with pytest.raises(SourceUnreachable, match="did not answer within") as reported:
            ask(platform.access(), use)
        limits.append(str(reported.value.hint).partition(";")[0])
    assert limits == [f"it is asked again, and given {grown} s" for grown in (1, 2, 4)]
    ask(platform.access(), use)


def test_closing_does_not_wait_for_a_platform_that_hangs(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LOGOUT_TIMEOUT_S", 0.2)
    platform.fault("Logout", "hang:60000")

    async def use(adapter: VimApi) -> float:
        began = time.monotonic()
        await adapter.close()
        return time.monotonic() - began

    assert ask(platform.access(), use) < 30


def test_another_server_at_the_endpoint_is_said_in_words(platform: VCenter) -> None:
    platform.fault("RetrieveServiceContent", "html")
    with pytest.raises(SourceUnreachable) as reported:
        ask(platform.access(), lambda adapter: adapter.list_vms())
    assert "NoneType" not in reported.value.detail
    assert "vSphere" in reported.value.detail


def test_a_task_that_its_platform_has_forgotten_is_no_vm_that_is_gone(platform: VCenter, disk: Path) -> None:
    """As a vCenter does that is restarted in the middle of a removal."""

    async def use(adapter: VimApi) -> None:
        forgotten = library().vim.Task("task-4711", adapter._session._stub)
        with pytest.raises(SourceUnreachable, match="no longer knows the task"):
            await asyncio.to_thread(adapter._session.wait, forgotten, what="remove a snapshot", timeout_s=5)

    ask(platform.access(), use)


@pytest.mark.parametrize("kind", ["TaskInProgress", "HostNotConnected", "FileLocked"])
def test_a_platform_that_is_busy_is_no_failure_of_a_snapshot_or_of_the_tracking(
    platform: VCenter, disk: Path, kind: str
) -> None:
    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        platform.fault("CreateSnapshot_Task", kind)
        with pytest.raises(SourceUnreachable, match=kind):
            await adapter.snapshot(VM, "synvirt-a-1")
        _, since = await opened(adapter, "synvirt-a-1")
        platform.fault("QueryChangedDiskAreas", kind)
        with pytest.raises(SourceUnreachable, match=kind):
            await opened(adapter, "synvirt-a-2", since)
        platform.fault("RemoveSnapshot_Task", kind)
        with pytest.raises(SourceUnreachable, match=kind):
            await adapter.cleanup(VM, "synvirt-a-1")
        for name in ("synvirt-a-1", "synvirt-a-2"):
            await adapter.cleanup(VM, name)

    ask(platform.access(), use)
    assert platform.snapshots() == []


def test_a_guest_that_is_not_quiet_in_time_is_snapshot_as_it_is_and_a_busy_one_later(platform: VCenter, disk: Path) -> None:
    platform.control("tools", vm=VM)
    platform.fault("CreateSnapshot_Task", "Timedout", match=">true</quiesce>")
    assert ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1")).id
    platform.fault("CreateSnapshot_Task", "TaskInProgress", match=">true</quiesce>")
    with pytest.raises(SourceUnreachable):
        ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-2"))
    assert platform.snapshots() == ["synvirt-a-1"]


@pytest.mark.parametrize(
    ("task", "waited"),
    [("VirtualMachine.consolidateDisks", 1), ("VirtualMachine.createSnapshot", 1), ("VirtualMachine.reconfigure", 0)],
)
def test_tasks_on_the_disks_that_run_already_are_waited_for(task: str, waited: int) -> None:
    asked: list[str] = []

    def properties(_: object, paths: Iterable[str], **__: object) -> dict[str, Any]:
        return {"recentTask": ["task-1"]} if "recentTask" in paths else {"info.descriptionId": task, "info.state": "running"}

    session: Any = SimpleNamespace(machine=str, properties=properties, wait=lambda one, **_: asked.append(one))
    vim_changes._let_tasks_end(session, VM)
    assert len(asked) == waited


def test_a_guest_that_cannot_be_quiesced_is_snapshot_as_it_is(platform: VCenter, disk: Path) -> None:
    platform.control("tools", vm=VM)
    platform.fault("CreateSnapshot_Task", "task:SnapshotFault", match=">true</quiesce>")
    assert ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1")).id
    assert platform.calls("CreateSnapshot_Task") == 2
    assert platform.snapshots() == ["synvirt-a-1"]


def test_the_tracking_that_was_reset_is_known_before_it_is_asked(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        platform.control("reset", vm=VM)
        before = platform.calls("QueryChangedDiskAreas")
        with pytest.raises(CbtReset, match="restarted its change tracking"):
            await opened(adapter, "synvirt-a-2", since)
        assert platform.calls("QueryChangedDiskAreas") == before

    ask(platform.access(), use)


def test_a_change_id_that_the_platform_does_not_know(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        with pytest.raises(CbtReset, match="FileFault"):
            await opened(adapter, "synvirt-a-2", since.partition("/")[0] + "/77")

    ask(platform.access(), use)


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


def test_a_snapshot_that_somebody_removed_is_to_be_taken_again(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> None:
        snapshot = await adapter.snapshot(VM, "synvirt-a-1")
        one = (await adapter.inspect(VM)).disks[0]
        await adapter.cleanup(VM, "synvirt-a-1")
        with pytest.raises(SnapshotFailed, match="no longer exists"):
            await adapter.open_disk(VM, snapshot, one, None)

    ask(platform.access(), use)


def test_disks_that_need_it_are_consolidated(platform: VCenter, disk: Path) -> None:
    ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.calls("ConsolidateVMDisks_Task") == 0
    platform.control("unconsolidated", vm=VM)
    for _ in range(2):
        ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.calls("ConsolidateVMDisks_Task") == 1


@pytest.mark.parametrize("kind", ["FileLocked", "task:SnapshotFault", "task:SystemError"])
def test_disks_that_cannot_be_consolidated_are_no_failure_and_tried_again(platform: VCenter, disk: Path, kind: str) -> None:
    """A backup tool that holds them harms no copy."""
    platform.control("unconsolidated", vm=VM)
    platform.fault("ConsolidateVMDisks_Task", kind)
    assert "vim.consolidation" in [one.id for one in ask(platform.access(), lambda adapter: adapter.inspect(VM)).concerns]
    ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.snapshots() == []
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.calls("ConsolidateVMDisks_Task") == 2
    assert "vim.consolidation" not in [one.id for one in ask(platform.access(), lambda adapter: adapter.inspect(VM)).concerns]


def test_a_session_that_was_lost_is_made_again_once_however_many_ask(platform: VCenter) -> None:
    async def use(adapter: VimApi) -> None:
        before = platform.calls("Login")
        for number in range(1, 4):
            platform.control("sessions")
            await asyncio.gather(*(adapter.inspect(VM) for _ in range(8)))
            assert (platform.calls("Login"), platform.sessions()) == (before + number, 1)

    ask(platform.access(), use)


def test_a_session_is_kept_alive_and_made_again_while_nobody_asks(platform: VCenter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.adapter.KEEP_ALIVE_S", 0.05)

    async def use(adapter: VimApi) -> None:
        while platform.calls("CurrentTime") < 2:
            await asyncio.sleep(0.02)
        platform.control("sessions")
        while platform.sessions() == 0:
            await asyncio.sleep(0.02)

    ask(platform.access(), use)
    assert platform.sessions() == 0


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6))
@cases(50)
def test_a_list_that_comes_in_pages_is_whole_and_in_order(pages: list[list[int]]) -> None:
    """The simulator gives all at once, whatever it is asked; vCenter does not."""

    class Collector:
        asked: ClassVar[list[str]] = []

        def page(self, number: int) -> Any:
            objects = [SimpleNamespace(obj=SimpleNamespace(_moId=str(one)), propSet=None) for one in pages[number]]
            return SimpleNamespace(objects=objects, token=str(number + 1) if number + 1 < len(pages) else None)

        def RetrievePropertiesEx(self, _filters: object, options: Any) -> Any:  # noqa: N802 - VMware's name
            assert options.maxObjects
            return self.page(0) if pages else None

        def ContinueRetrievePropertiesEx(self, token: str) -> Any:  # noqa: N802 - VMware's name
            return self.page(int(token))

    session = VimApi(SourceAccess("https://vcenter", {"user": "u", "password": "p"}))._session
    rows = session._retrieved(SimpleNamespace(propertyCollector=Collector()), [])
    assert [row.id for row in rows] == [str(one) for page in pages for one in page]


def test_each_call_that_wants_a_privilege_has_it_in_our_list() -> None:
    """By VMware's own word: pyvmomi knows of each method what it wants."""
    vim = library().vim
    machine, snapshot = vim.VirtualMachine, vim.vm.Snapshot
    called = [
        machine.CreateSnapshot,
        machine.QueryChangedDiskAreas,
        machine.PowerOff,
        machine.PowerOn,
        snapshot.Remove,
        snapshot.ExportSnapshot,
    ]
    wanted = {method.info.privId for method in called}
    listed = {name for name, _ in (*PRIVILEGES, EXPORT)}
    assert wanted - {None, "System.Anonymous", "System.Read"} <= listed, wanted


def test_a_vm_that_is_gone_needs_no_cleanup(platform: VCenter) -> None:
    ask(platform.access(), lambda adapter: adapter.cleanup("vm-4711", "synvirt-a-1"))
    for use in (lambda adapter: adapter.shutdown("vm-4711"), lambda adapter: adapter.power_on("vm-4711")):
        with pytest.raises(VmNotFound):
            ask(platform.access(), use)


@pytest.mark.parametrize("reported", ["of the VM", "of snapshots alone"])
def test_a_disk_is_tracked_once_it_has_a_change_id(platform: VCenter, disk: Path, reported: str) -> None:
    """Whatever the VM is set to: somebody switched its tracking on, and no stun came; later a disk was added."""
    if reported == "of snapshots alone":
        platform.control("silent")

    async def use(adapter: VimApi) -> None:
        session = adapter._session
        spec = library().vim.vm.ConfigSpec(changeTrackingEnabled=True)
        await asyncio.to_thread(session.call, "track it", lambda _: session.machine(VM).ReconfigVM_Task(spec))
        for number in (1, 2):
            platform.add_disk(VM, bytes(1 << 20), place=number - 1)
            assert not (await adapter.inspect(VM)).disks[-1].cbt_enabled
            await tracked(adapter)
            disks = (await adapter.inspect(VM)).disks
            assert [one.cbt_enabled for one in disks] == [reported == "of the VM"] * number
            assert set((await adapter.snapshot(VM, f"synvirt-a-{number}")).change_ids) == {one.key for one in disks}
            await adapter.cleanup(VM, f"synvirt-a-{number}")
        before = platform.calls("CreateSnapshot_Task")
        await tracked(adapter)
        assert platform.calls("CreateSnapshot_Task") == before + (reported != "of the VM")

    ask(platform.access(), use)
    assert platform.snapshots() == []


async def switched_off(adapter: VimApi) -> str:
    """The VM is set to be tracked, and its first disk not to be: the disk's key."""
    session, vim = adapter._session, library().vim
    setting = vim.option.OptionValue(key="scsi0:0.ctkEnabled", value="FALSE")
    spec = vim.vm.ConfigSpec(changeTrackingEnabled=True, extraConfig=[setting])
    await asyncio.to_thread(session.call, "set it", lambda _: session.machine(VM).ReconfigVM_Task(spec))
    return (await adapter.inspect(VM)).disks[0].key


def test_a_disk_whose_tracking_is_switched_off_is_named_with_the_setting(platform: VCenter, disk: Path) -> None:
    platform.add_disk(VM, bytes(1 << 20), place=1)

    async def use(adapter: VimApi) -> None:
        key = await switched_off(adapter)
        manifest = await adapter.inspect(VM)
        reported = [str(one.cbt_reason) for one in manifest.disks]
        assert "is not tracked: scsi0:0.ctkEnabled is FALSE" in reported[0]
        assert reported[1] == "None"
        assert manifest.cbt_reason_without([key]) is None
        with pytest.raises(CbtUnsupported, match=r"scsi0:0\.ctkEnabled is FALSE") as refused:
            await tracked(adapter)
        assert manifest.disks[0].label in refused.value.detail
        assert manifest.disks[1].label not in refused.value.detail
        await adapter.enable_cbt(VM, [manifest.disks[1].key])

    ask(platform.access(), use)
    assert platform.snapshots() == []


def test_a_crash_while_the_tracking_is_switched_on_leaves_no_snapshot(platform: VCenter, disk: Path) -> None:
    platform.fault("RemoveSnapshot_Task", "SystemError")
    with pytest.raises(SourceUnreachable):
        ask(platform.access(), tracked)
    assert platform.snapshots() == ["synvirt-tracking"]
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.snapshots() == []


# ── without the control plane ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["skipped", "not installed"])
def _left_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "skipped":
        monkeypatch.setenv("SYNVIRT_MIGRATOR_SKIP_GO_SHIM", "1")
        return

    def missing() -> None:
        raise ImportError("pyVmomi")

    monkeypatch.setattr("synvirt.live.vsphere.session._imported", missing)


@pytest.mark.usefixtures("_left_out")
def test_every_entry_of_the_control_plane_answers_internal() -> None:
    adapter = VimApi(SourceAccess("https://127.0.0.1:1", {"user": "u", "password": "p"}))
    entries: list[Callable[[], Awaitable[object]]] = [
        adapter.connect,
        adapter.about,
        adapter.supports_warm,
        adapter.list_vms,
        lambda: adapter.inspect(VM),
        lambda: adapter.enable_cbt(VM, []),
        lambda: adapter.snapshot(VM, "s"),
        lambda: adapter.shutdown(VM),
        lambda: adapter.power_on(VM),
        lambda: adapter.mark(VM, "note"),
        lambda: adapter.release(VM, "s"),
        lambda: adapter.cleanup(VM, "s"),
    ]

    async def asked(entry: Callable[[], Awaitable[object]]) -> None:
        await entry()

    for entry in entries:
        with pytest.raises(Internal, match="control plane"):
            asyncio.run(asked(entry))
    asyncio.run(adapter.close())


@pytest.mark.usefixtures("_left_out")
def test_the_service_says_at_its_start_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.session.find_spec", lambda _: None)
    with structlog.testing.capture_logs() as said:
        warn_if_missing()
    assert [(line["log_level"], line["event"]) for line in said] == [("warning", "vSphere is not served")]


def test_a_malformed_source_is_refused() -> None:
    for access in (
        SourceAccess("http://vcenter", {"user": "u", "password": "p"}),
        SourceAccess("https://vcenter", {"user": "u"}),
        SourceAccess("https://vcenter", {"user": "u", "password": "p"}, {"transport": "pigeon"}),
        SourceAccess("https://vcenter", {"user": "u", "password": "p"}, {"transport": "vddk"}),
        SourceAccess("https://vcenter", {"user": "u", "password": "p"}, {"vddk_libdir": "not absolute"}),
    ):
        with pytest.raises(BadRequest):
            BY_KIND[LiveKind.VIM_API].open(access)
