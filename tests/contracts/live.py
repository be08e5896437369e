"""The laws of LiveAdapter, as one suite. An implementation joins by a subclass whose fixture `case` opens it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

import pytest

from synvirt.blocks import new_buffer
from synvirt.disks import open_reader
from synvirt.disks.specs import ReaderSpec
from synvirt.errors import CbtReset, SourceUnreachable, VmNotFound
from synvirt.live import LiveAdapter, ReportsGuestFacts, SnapshotRef
from synvirt.live.sessions import StaysLoggedIn
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk

T = TypeVar("T")
A = TypeVar("A", bound=LiveAdapter)


@dataclass(frozen=True, slots=True)
class LiveCase:
    """`open`: a new adapter, not connected. The VM `vm_id` runs, and its first disk holds `content`; `write` is its guest.

    `snapshots`: the names of ours on the platform. `lose_tracking`: the platform forgets what older change ids mean.
    `restart`: somebody else starts the VM that is off, and switches it off again.
    """

    open: Callable[[], LiveAdapter]
    vm_id: str
    content: Callable[[], bytes]
    write: Callable[[int, bytes], None]
    snapshots: Callable[[], list[str]]
    lose_tracking: Callable[[], None]
    restart: Callable[[], None]
    # The least that the platform tells apart.
    tracked_bytes: int = 65536


def read(spec: ReaderSpec, onto: bytes | None = None) -> tuple[bytes, int]:
    """What the reader's extents say, laid over `onto` (zeros); and how many bytes were data."""
    reader = open_reader(spec)
    try:
        disk, data_bytes = bytearray(onto or reader.size), 0
        assert len(disk) == reader.size
        for extent in reader.extents():
            with memoryview(disk)[extent.start : extent.end] as place:
                if extent.zero:
                    place[:] = bytes(extent.length)
                else:
                    reader.read_into(extent.start, place)
                    data_bytes += extent.length
    finally:
        reader.close()
    return bytes(disk), data_bytes


def data_read(spec: ReaderSpec) -> int:
    """How many bytes are data by the reader's extents. All of them are read."""
    reader = open_reader(spec)
    try:
        data = [extent for extent in reader.extents() if not extent.zero]
        for extent in data:
            reader.read_into(extent.start, new_buffer(extent.length))
    finally:
        reader.close()
    return sum(extent.length for extent in data)


def in_session(open_adapter: Callable[[], A], use: Callable[[A], Awaitable[T]]) -> T:
    """In a session of its own, as every step of a job has one."""

    async def session() -> T:
        adapter = open_adapter()
        try:
            await adapter.connect()
            return await use(adapter)
        finally:
            await adapter.close()

    return asyncio.run(session())


class LiveContract:
    @pytest.fixture
    def case(self) -> LiveCase:
        raise NotImplementedError

    def ask(self, case: LiveCase, use: Callable[[LiveAdapter], Awaitable[T]]) -> T:
        return in_session(case.open, use)

    async def copied(
        self, adapter: LiveAdapter, case: LiveCase, snapshot: SnapshotRef, since: str | None, onto: bytes | None = None
    ) -> tuple[bytes, int]:
        disk = await self.first_disk(adapter, case)
        spec = await adapter.open_disk(case.vm_id, snapshot, disk, since)
        return await asyncio.to_thread(read, spec, onto)

    async def tracked(self, adapter: LiveAdapter, case: LiveCase) -> None:
        await adapter.enable_cbt(case.vm_id, [(await self.first_disk(adapter, case)).key])

    async def first_disk(self, adapter: LiveAdapter, case: LiveCase) -> Disk:
        return (await adapter.inspect(case.vm_id)).disks[0]

    # ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────

    def test_the_kind_is_one_of_the_model(self, case: LiveCase) -> None:
        assert case.open().kind in LiveKind

    def test_a_session_may_be_closed_twice_and_unopened(self, case: LiveCase) -> None:
        async def close() -> None:
            adapter = case.open()
            await adapter.close()
            await adapter.connect()
            await adapter.close()
            await adapter.close()

        asyncio.run(close())

    def test_a_closed_session_asks_for_nothing_more(self, case: LiveCase) -> None:
        """The thread of a call that was cancelled goes on, and must change nothing once its job has tidied up."""

        async def use() -> None:
            adapter = case.open()
            await adapter.connect()
            await adapter.inspect(case.vm_id)
            await adapter.close()
            with pytest.raises(SourceUnreachable):
                await adapter.inspect(case.vm_id)

        asyncio.run(use())

    def test_a_session_at_rest_serves_the_next_user(self, case: LiveCase) -> None:
        name = f"synvirt-{uuid4()}"

        async def use(adapter: LiveAdapter) -> None:
            if not isinstance(adapter, StaysLoggedIn):
                return
            for number in (1, 2):
                made = await adapter.snapshot(case.vm_id, f"{name}-{number}")
                await adapter.open_disk(case.vm_id, made, await self.first_disk(adapter, case), None)
                await adapter.rest()
            assert (await adapter.inspect(case.vm_id)).disks
            for number in (1, 2):
                await adapter.cleanup(case.vm_id, f"{name}-{number}")

        self.ask(case, use)
        assert case.snapshots() == []

    def test_about_names_the_product(self, case: LiveCase) -> None:
        about = self.ask(case, lambda adapter: adapter.about())
        assert about.product
        assert about.version
        assert all(check.ok for check in about.checks), about.checks

    def test_the_vm_is_listed_once(self, case: LiveCase) -> None:
        rows = self.ask(case, lambda adapter: adapter.list_vms())
        assert [row.power_state for row in rows if row.vm_id == case.vm_id] == ["on"]

    def test_the_list_and_the_manifest_name_one_host(self, case: LiveCase) -> None:
        """Slots of a source's host are counted by either."""
        (row,) = [row for row in self.ask(case, lambda adapter: adapter.list_vms()) if row.vm_id == case.vm_id]
        assert row.host == self.ask(case, lambda adapter: adapter.inspect(case.vm_id)).host

    def test_inspection_knows_the_disk(self, case: LiveCase) -> None:
        manifest = self.ask(case, lambda adapter: adapter.inspect(case.vm_id))
        assert (manifest.vm_id, manifest.power_state) == (case.vm_id, "on")
        assert manifest.disks[0].capacity_bytes == len(case.content())
        assert len({disk.key for disk in manifest.disks}) == len(manifest.disks)
        assert manifest.cbt_available == (manifest.cbt_reason is None)

    def test_a_guest_says_what_it_says_or_nothing(self, case: LiveCase) -> None:
        """Where a platform asks guests at all: its test VMs have no system in them, and so say little or nothing."""

        async def ask(adapter: LiveAdapter) -> dict[str, str]:
            return await adapter.guest_facts(case.vm_id) if isinstance(adapter, ReportsGuestFacts) else {}

        found = self.ask(case, ask)
        assert all(name and isinstance(value, str) for name, value in found.items())

    def test_a_vm_that_is_not_there(self, case: LiveCase) -> None:
        for use in (
            lambda adapter: adapter.inspect("vm-that-never-was"),
            lambda adapter: adapter.snapshot("vm-that-never-was", "synvirt-x-1"),
        ):
            with pytest.raises(VmNotFound) as caught:
                self.ask(case, use)
            assert caught.value.hint
            assert "any more" not in caught.value.detail  # it may never have been there

    # ── copied ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_a_snapshot_is_the_disk_as_it_was(self, case: LiveCase) -> None:
        name, before = f"synvirt-{uuid4()}-1", case.content()

        async def use(adapter: LiveAdapter) -> tuple[bytes, int]:
            snapshot = await adapter.snapshot(case.vm_id, name)
            case.write(0, b"written after the snapshot")
            return await self.copied(adapter, case, snapshot, None)

        assert self.ask(case, use)[0] == before
        self.ask(case, lambda adapter: adapter.cleanup(case.vm_id, name))
        assert case.snapshots() == []

    def test_a_snapshot_of_one_name_is_made_once(self, case: LiveCase) -> None:
        name = f"synvirt-{uuid4()}-1"
        first = self.ask(case, lambda adapter: adapter.snapshot(case.vm_id, name))
        assert self.ask(case, lambda adapter: adapter.snapshot(case.vm_id, name)) == first
        assert len(case.snapshots()) == 1
        for _ in range(2):
            self.ask(case, lambda adapter: adapter.cleanup(case.vm_id, name))
        assert case.snapshots() == []

    def test_deltas_hold_what_changed_and_make_the_copy_whole(self, case: LiveCase) -> None:
        job, block = uuid4(), case.tracked_bytes

        async def one_pass(adapter: LiveAdapter, number: int, since: str | None, onto: bytes | None) -> tuple[bytes, int, str]:
            name = f"synvirt-{job}-{number}"
            snapshot = await adapter.snapshot(case.vm_id, name)
            copy, data_bytes = await self.copied(adapter, case, snapshot, since, onto)
            await adapter.release(case.vm_id, name)
            return copy, data_bytes, snapshot.change_ids[(await self.first_disk(adapter, case)).key]

        self.ask(case, lambda adapter: self.tracked(adapter, case))
        copy, _, since = self.ask(case, lambda adapter: one_pass(adapter, 1, None, None))
        assert copy == case.content()
        for number, (offset, text) in enumerate([(block * 3, b"first delta"), (block * 5 - 4, b"second, over two blocks")], 2):
            case.write(offset, text)
            case.write(block * 8, bytes(block))  # zeros are a change, too
            copy, data_bytes, since = self.ask(case, lambda adapter: one_pass(adapter, number, since, copy))  # noqa: B023
            assert copy == case.content()
            assert data_bytes <= 4 * block
        for number in range(1, 4):
            self.ask(case, lambda adapter: adapter.cleanup(case.vm_id, f"synvirt-{job}-{number}"))  # noqa: B023
        assert case.snapshots() == []

    def test_a_lost_change_tracking_is_reported_before_anything_is_copied(self, case: LiveCase) -> None:
        job = uuid4()
        self.ask(case, lambda adapter: self.tracked(adapter, case))
        first = self.ask(case, lambda adapter: adapter.snapshot(case.vm_id, f"synvirt-{job}-1"))
        self.ask(case, lambda adapter: adapter.release(case.vm_id, f"synvirt-{job}-1"))
        case.lose_tracking()

        async def delta(adapter: LiveAdapter) -> None:
            snapshot = await adapter.snapshot(case.vm_id, f"synvirt-{job}-2")
            disk = await self.first_disk(adapter, case)
            await adapter.open_disk(case.vm_id, snapshot, disk, first.change_ids[disk.key])

        with pytest.raises(CbtReset):
            self.ask(case, delta)
        for number in (1, 2):
            self.ask(case, lambda adapter: adapter.cleanup(case.vm_id, f"synvirt-{job}-{number}"))  # noqa: B023
        assert case.snapshots() == []

    # ── off, on, marked ──────────────────────────────────────────────────────────────────────────────────────────────

    def test_off_and_on_again(self, case: LiveCase) -> None:
        for wish, state in (("shutdown", "off"), ("power_on", "on")):
            for _ in range(2):
                self.ask(case, lambda adapter: getattr(adapter, wish)(case.vm_id))  # noqa: B023
                assert self.ask(case, lambda adapter: adapter.inspect(case.vm_id)).power_state == state

    def test_a_vm_that_is_off_is_copied_too_and_its_start_is_reported(self, case: LiveCase) -> None:
        """Also when it is off again by then; to be read starts nothing."""
        name = f"synvirt-{uuid4()}-1"
        self.ask(case, lambda adapter: adapter.shutdown(case.vm_id))

        async def use(adapter: LiveAdapter) -> tuple[bytes, str]:
            snapshot = await adapter.snapshot(case.vm_id, name)
            before = await adapter.last_start(case.vm_id)
            return (await self.copied(adapter, case, snapshot, None))[0], before

        copy, before = self.ask(case, use)
        assert copy == case.content()
        assert self.ask(case, lambda adapter: adapter.last_start(case.vm_id)) == before
        case.restart()
        assert self.ask(case, lambda adapter: adapter.last_start(case.vm_id)) != before
        self.ask(case, lambda adapter: adapter.cleanup(case.vm_id, name))
        assert case.snapshots() == []

    def test_a_mark_may_be_left_twice(self, case: LiveCase) -> None:
        for _ in range(2):
            self.ask(case, lambda adapter: adapter.mark(case.vm_id, "migrated to web (42)"))
