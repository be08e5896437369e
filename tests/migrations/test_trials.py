"""The snapshots of deep tests: gone whatever moment the service dies at, whatever the source does meanwhile."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest

from synvirt import repeating
from synvirt.errors import NotFound
from synvirt.keyring import Keyring
from synvirt.live import SnapshotRef
from synvirt.live.registry import BY_KIND, Platform
from synvirt.migrations.sources import trials
from synvirt.migrations.sources.registered import Sources
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, Mode, State
from synvirt.model.sources import SourceRequest, SourceTest
from synvirt.model.values import now
from synvirt.sizes import KIB
from synvirt.store import Store
from synvirt.store.sources import Trial
from tests.fakes.live import FakeAdapter, FakePlatform
from tests.house import VM, Crash, live_plan
from tests.running.processes import until

AWAY = 1_000_000
MOMENTS_MAX = 40


class Mortal(FakeAdapter):
    """`moment` is called around each thing that is done at the platform."""

    moment: Callable[[], None] = staticmethod(lambda: None)

    async def snapshot(self, vm_id: str, name: str, disks: object = None) -> SnapshotRef:
        self.moment()
        made = await super().snapshot(vm_id, name, ["disk-0"])
        self.moment()
        return made

    async def cleanup(self, vm_id: str, name: str) -> None:
        self.moment()
        await super().cleanup(vm_id, name)
        self.moment()


@dataclass
class Lab:
    store: Store
    folder: Path
    platform: FakePlatform
    moment: Callable[[], None] = lambda: None

    def dies_at(self, number: int) -> None:
        """At a commit, or before or after the platform did something; counted from 1. 0: never."""
        left = count(1)

        def moment() -> None:
            if next(left) == number:
                raise Crash

        self.moment = self.store.on_commit = moment

    def started(self, *, host: str = "h") -> Sources:
        """As a service starts on this folder."""
        keyring = Keyring(self.folder / "migrator.key")
        return Sources(self.store.sources, keyring, host=host, platforms=self._platforms(), folder=self.folder / "sources")

    def _platforms(self) -> Mapping[LiveKind, Platform]:
        def opened(_: object) -> Mortal:
            adapter = Mortal(self.platform)
            adapter.moment = self.moment
            return adapter

        return {**BY_KIND, LiveKind.LIBVIRT_REMOTE: replace(BY_KIND[LiveKind.LIBVIRT_REMOTE], open=opened)}

    def source(self) -> UUID:
        endpoint = "qemu:///system"
        return self.started().add(SourceRequest(name="lab", kind=LiveKind.LIBVIRT_REMOTE, endpoint=endpoint)).id

    def tested(self, source_id: UUID) -> SourceTest:
        return asyncio.run(self.started().test(source_id, deep=True))

    def left(self) -> list[str]:
        snapshots = list(self.platform.vm(VM)["snapshots"])
        return [*snapshots, *(one.name for one in self.store.sources.trials(host="h"))]


@pytest.fixture
def lab(database_url: str, tmp_path: Path) -> Iterator[Lab]:
    store = Store(database_url)
    platform = FakePlatform(tmp_path / "platform")
    platform.add_vm(VM, {"disk-0": bytes(64 * KIB)})
    yield Lab(store, tmp_path, platform)
    store.close()


class Clock(SimpleNamespace):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def left_behind(lab: Lab, source_id: UUID) -> None:
    """Its service died with the snapshot there."""
    lab.dies_at(3)
    with pytest.raises(Crash):
        lab.tested(source_id)
    lab.dies_at(0)
    assert lab.platform.vm(VM)["snapshots"]


def test_a_death_at_any_moment_leaves_no_snapshot_after_the_next_start(lab: Lab) -> None:
    """Of the test, and of the start after it, which may die in its turn."""
    source_id = lab.source()
    with_something_left = 0
    for moment in range(1, MOMENTS_MAX):
        lab.dies_at(moment)
        try:
            lab.tested(source_id)
        except Crash:
            pass
        else:
            break
        with_something_left += bool(lab.platform.vm(VM)["snapshots"])
        for second in range(1, MOMENTS_MAX):
            lab.dies_at(second)
            try:
                lab.started().trials.look()
            except Crash:
                continue
            break
        lab.dies_at(0)
        lab.started().trials.look()
        assert lab.left() == []
    assert moment < MOMENTS_MAX - 1
    assert with_something_left >= 2  # before the cleanup, and in the middle of the snapshot


def test_a_test_that_ends_well_owes_nothing(lab: Lab) -> None:
    assert lab.tested(lab.source()).ok
    assert lab.left() == []


def test_a_source_that_went_away_in_the_middle_is_tried_again_ever_more_seldom(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    source_id = lab.source()
    calls = count(1)
    lab.moment = lambda: lab.platform.fault("unreachable", AWAY if next(calls) >= 2 else 0)
    sources = lab.started()
    result = asyncio.run(sources.test(source_id, deep=True))
    cleanup = result.checks[-1]
    assert (cleanup.name, cleanup.ok) == ("cleanup", False)
    (name,) = lab.platform.vm(VM)["snapshots"]
    assert name in str(cleanup.hint)
    lab.moment = lambda: None

    clock = Clock()
    monkeypatch.setattr(repeating, "time", clock)

    def tries() -> int:
        with lab.platform._state() as state:
            return AWAY - int(state["faults"]["unreachable"])

    lab.platform.fault("unreachable", AWAY)
    sources.trials.look()
    for pause_s in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        before = tries()
        clock.now += pause_s - 1
        sources.trials.look()
        assert tries() == before
        clock.now += 1
        sources.trials.look()
        assert tries() > before
    lab.platform.fault("unreachable", 0)
    clock.now += trials.LONGEST_PAUSE_S
    sources.trials.look()
    assert lab.left() == []


def test_a_test_that_is_under_way_keeps_its_snapshot(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    source_id = lab.source()
    sources = lab.started()
    seen = []
    read = FakeAdapter.open_disk

    async def looked_at(adapter: FakeAdapter, vm_id: str, snapshot: SnapshotRef, *rest: object) -> object:
        await asyncio.to_thread(sources.trials.look)
        seen.append(list(lab.platform.vm(VM)["snapshots"]))
        return await read(adapter, vm_id, snapshot, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeAdapter, "open_disk", looked_at)
    assert asyncio.run(sources.test(source_id, deep=True)).ok
    assert len(seen[0]) == 1
    assert lab.left() == []


def test_a_vm_that_a_job_reads_is_left_alone_until_the_job_has_ended(lab: Lab) -> None:
    source_id = lab.source()
    left_behind(lab, source_id)
    plan = live_plan(source_ref={"kind": "live_vm", "source_id": str(source_id), "vm_id": VM})
    job = Migration(id=uuid4(), name="web", plan=plan, state=State.QUEUED, mode_effective=Mode.WARM, created_at=now())
    lab.store.add(job, host="h")
    lab.started().trials.look()
    assert lab.platform.vm(VM)["snapshots"]
    lab.store.change(job.id, State.QUEUED, lambda one: one.model_copy(update={"state": State.CANCELLED}))
    lab.started().trials.look()
    assert lab.left() == []


def test_another_host_leaves_it_alone(lab: Lab) -> None:
    left_behind(lab, lab.source())
    lab.started(host="another").trials.look()
    assert lab.left()


def test_what_nobody_can_reach_any_more_is_not_tried_for_ever(lab: Lab) -> None:
    source_id = lab.source()
    lab.store.sources.note_trial(Trial(source_id, "vm-that-was-removed", "synvirt-test-1-1"), host="h")
    lab.started().trials.look()
    assert lab.left() == []
    left_behind(lab, source_id)
    lab.started().remove(source_id)
    assert lab.store.sources.trials(host="h") == []
    with pytest.raises(NotFound):
        lab.store.sources.note_trial(Trial(source_id, VM, "synvirt-test-2-1"), host="h")


def test_a_service_begins_with_it(lab: Lab) -> None:
    left_behind(lab, lab.source())
    with trials.swept(lab.started().trials):
        until(lambda: not lab.left())
