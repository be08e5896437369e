"""A rehearsal of a job that syncs on meanwhile, and is cut over afterwards: it is as it would have been without."""

import time
from functools import partial
from uuid import UUID

from synvirt.destinations.directory import DirectoryDestination
from synvirt.model.kinds import State
from synvirt.model.rehearsal import RehearsalRequest, RehearsalState
from tests.fakes.clones import CopyingDirectory, OverlayingDirectory
from tests.fakes.guests import MARK
from tests.house import VM
from tests.kinds.laws import End, Place, World
from tests.rehearsals.stage import DISK, WRITTEN, FakeNetwork, Stage, Writing, source_bytes

ENDS: dict[RehearsalState, End] = {
    RehearsalState.PASSED: "Completed",
    RehearsalState.FAILED: "Failed",
    RehearsalState.CANCELLED: "Cancelled",
}
WITHIN_S = 90.0
# So often the source writes meanwhile, from that offset on.
WRITES, AT = 10, 4096


class Rehearsed(World):
    def __init__(self, place: Place, *, conversion: str, destination: type[DirectoryDestination] = CopyingDirectory) -> None:
        self.place, self.conversion = place, conversion
        self.hypervisor: Writing = place.outside.setdefault("hypervisor", Writing())
        self.stage = Stage(
            place.folder, self.hypervisor, conversion=conversion, begin_network=FakeNetwork, destination=destination
        )
        self.store = self.stage.house.store
        self.is_dead = self.syncs = False

    def prepare(self) -> None:
        self.place.outside["job"] = self.stage.submit().id
        self.stage.begin_job(self.job_id)
        self.syncs = True
        self.stage.holds(self.job_id)

    @property
    def job_id(self) -> UUID:
        found: UUID = self.place.outside["job"]
        return found

    def submit(self) -> UUID:
        return self.stage.asking.ask(self.job_id, RehearsalRequest()).id

    def found(self) -> UUID | None:
        known = self.stage.asking.of(self.job_id)
        return known[0].id if known else None

    def run(self, job_id: UUID) -> End:
        if not self.syncs:
            self.stage.begin_job(self.job_id)
            self.syncs = True
        rehearsing = self.stage.begin(job_id)
        until, written = time.monotonic() + WITHIN_S, 0
        while rehearsing.is_alive():
            assert time.monotonic() < until, self.problem(job_id)
            if self.stage.died:
                break
            if not self.is_dead and written < WRITES:  # what the passes of that time copy
                self.stage.house.platform.guest_writes(VM, DISK, AT + written * 70_000, b"while it is rehearsed")
                written += 1
            rehearsing.join(0.01)
        if self.stage.died:
            raise self.stage.died[0]
        return ENDS[self.stage.asking.get(self.job_id, job_id).state]

    def problem(self, job_id: UUID) -> str:
        return str(self.stage.asking.get(self.job_id, job_id))

    def cancel(self, job_id: UUID) -> None:
        self.stage.asking.cancel(self.job_id, job_id)

    def check(self, job_id: UUID) -> None:
        found = self.stage.asking.get(self.job_id, job_id)
        assert [(one.name, one.ok) for one in found.checks] == [("boot", True), ("network", True)]
        self._cut_over()

    def check_undone(self, job_id: UUID) -> None:
        assert self.stage.asking.get(self.job_id, job_id).error is None
        self._cut_over()

    def _cut_over(self) -> None:
        assert self.stage.leftovers(self.store.get(self.job_id)) == []
        ended = self.stage.cut_over(self.job_id)
        assert ended.state is State.COMPLETED, ended.last_error
        assert ended.domain is not None
        moved, source = self.hypervisor.seen[UUID(ended.domain.uuid)], source_bytes(self.stage)
        assert moved == (MARK + source[len(MARK) :] if self.conversion == "always" else source)
        assert [path.name for path in self.stage.house.volume(ended).parent.iterdir()] == [self.stage.house.volume(ended).name]
        for uuid, first in self.hypervisor.seen.items():
            if uuid in self.hypervisor.last:
                assert self.hypervisor.last[uuid] == WRITTEN + first[len(WRITTEN) :], "its volume did not stay"

    def left(self, job_id: UUID | None) -> list[str]:
        return [*self.stage.leftovers(self.store.get(self.job_id)), *(f"network {one.ports}" for one in FakeNetwork.open)]

    def die(self) -> None:
        self.is_dead = True
        self.stage.let_go.set()
        self.stage.join()

    def close(self) -> None:
        if self.is_dead:
            self.stage.die()
        else:
            self.stage.close()


never, always = (partial(Rehearsed, conversion=conversion) for conversion in ("never", "always"))
on_overlays = partial(Rehearsed, conversion="always", destination=OverlayingDirectory)
