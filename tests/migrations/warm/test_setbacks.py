"""How often a pass is begun again, what is noted of it, and what it then reads: without a run, each is asked for directly."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.disks.checking.sampling import ChangesMissed
from synvirt.disks.specs import AllocatedSpec, ChangedSpec, RawSpec, ReaderSpec
from synvirt.errors import CbtReset, CbtUnsupported, SnapshotFailed, SynvirtError
from synvirt.jobs.stop import Stop
from synvirt.live import SnapshotRef
from synvirt.migrations.job import Job
from synvirt.migrations.memory import PassMemory
from synvirt.migrations.warm.one_pass import _opened_disks
from synvirt.migrations.warm.setbacks import is_whole, note_setback
from synvirt.migrations.warm.snapshots import Kind
from synvirt.model.kinds import State
from synvirt.model.machine import Disk
from synvirt.sizes import KIB
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan
from tests.migrations.jobs.running import run_until_death
from tests.migrations.warm.warm_house import DISK, content

MANY = 5


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process)
    yield house
    house.close()


@pytest.fixture
def job(house: House) -> Job:
    """A warm job between its first pass and its first delta."""
    house.platform.add_vm(VM, {DISK: content(64 * KIB)})
    submitted = house.intake.submit(live_plan())
    run_until_death(house, submitted, lambda: house.store.get(submitted.id).state is State.DELTA_SYNCING)
    return Job(house.store.get(submitted.id), house.rooms, Stop())


@pytest.mark.parametrize(
    ("error", "kind", "power", "times", "resets"),
    [
        (SnapshotFailed("it is gone"), "delta", "on", 3, 1),
        (SnapshotFailed("it is gone"), "final", "off", 3, 1),
        (CbtReset("it began anew"), "delta", "on", 0, 1),
        (CbtReset("it began anew"), "delta", "off", MANY, 1),
        (CbtReset("it began anew"), "final", "off", MANY, 1 + MANY),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, SynvirtError) else str(one),
)
def test_a_pass_is_begun_again_as_often_as_it_may_help(
    house: House, job: Job, error: SynvirtError, kind: Kind, power: str, times: int, resets: int
) -> None:
    """Its source has forgotten once, while it ran: where it does so again, it never converges. A guest that is off changes no
    more. `resets`: how many are noted in the end."""
    house.platform.power(VM, power)

    async def noted() -> int:
        await job.note(cbt_resets=1)
        for number in range(MANY):
            try:
                await note_setback(job, 2, kind, error)
            except type(error):
                return number
        return MANY

    assert asyncio.run(noted()) == times
    assert asyncio.run(job.memory()).cbt_resets == resets


@pytest.mark.parametrize("error", [ChangesMissed("it left out a change"), CbtUnsupported("it lists none any more")])
def test_a_source_that_is_not_to_be_trusted_is_never_trusted_again(job: Job, error: SynvirtError) -> None:
    asyncio.run(note_setback(job, 2, "delta", error))
    assert asyncio.run(is_whole(job, PassMemory()))
    assert job.migration.distrusted == (error.detail if isinstance(error, ChangesMissed) else None)
    assert job.migration.last_error is not None
    assert (job.migration.last_error.code, job.migration.last_error.fatal) == (error.code, False)


DISK_IS = RawSpec(path="/disk")
WRITTEN, CHANGED = AllocatedSpec(over=DISK_IS, areas=((0, 512),)), ChangedSpec(over=DISK_IS, areas=((0, 512),))


@pytest.mark.parametrize(
    ("number", "whole", "since", "given", "read", "compared", "sampled"),
    [
        (1, False, None, WRITTEN, WRITTEN, False, True),
        (1, False, None, DISK_IS, DISK_IS, False, False),
        (2, False, "id-1", CHANGED, CHANGED, False, True),
        (1, True, None, WRITTEN, DISK_IS, False, False),
        (2, True, None, WRITTEN, DISK_IS, True, False),
    ],
)
def test_what_a_source_leaves_out_is_sampled_or_read(
    number: int, whole: bool, since: str | None, given: ReaderSpec, read: ReaderSpec, compared: bool, sampled: bool
) -> None:
    """A source that is trusted no more is not believed either which blocks were never written."""
    disk = Disk(key=DISK, label="", capacity_bytes=512)

    async def open_disk(*asked: object) -> ReaderSpec:
        assert asked[-1] == since
        return given

    job: Any = SimpleNamespace(
        id="j",
        vm_id=VM,
        copied_disks=[(disk, "v")],
        manifest=SimpleNamespace(name="web"),
        migration=SimpleNamespace(retry_of=None),
    )
    before = None if since is None else SnapshotRef(id="s-1", change_ids={DISK: since})
    adapter: Any = SimpleNamespace(open_disk=open_disk)
    snapshot = SnapshotRef(id="s-2", change_ids={})
    (found,) = asyncio.run(_opened_disks(job, adapter, snapshot, before, number, whole=whole, verify=False))
    assert (found.reader, found.compare, found.sample is not None) == (read, compared, sampled)
