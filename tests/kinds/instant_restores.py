"""A restore whose guest starts at once, on a hypervisor in memory that outlives each service; it writes at each moment."""

import threading
from collections.abc import Sequence
from uuid import UUID

from synvirt.backups.model import RestoreRequest
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.service import Backups
from tests.fakes.exports import FakeExports
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.restoring import XML, restore_host_of
from tests.kinds.laws import End, Place
from tests.kinds.runs import GUEST, Runs, disk_content
from tests.running.processes import until

EVERY_BYTES = 4096
# Several threads commit.
_writing = threading.Lock()


def lives_on(place: Place, moment: int = 0) -> None:
    """What a guest does: while it runs, it writes."""
    written: list[tuple[int, bytes]] = place.outside.setdefault("written", [])
    with _writing:
        for uuid, guest in list(place.outside["hypervisor"].domains.items()):
            if guest.running:
                written.append((len(written) * EVERY_BYTES, b"write %d" % len(written)))
                place.outside["hypervisor"].guest_writes(uuid, 0, *written[-1])


class AtOnce(Runs):
    kind = "restore"

    def service(self) -> Backups:
        made = super().service()
        self.guests.xml = XML
        self.store.on_commit = lambda: lives_on(self.place)  # of a service whose moments nobody counts
        return made

    def restore_host(self) -> RestoreHost:
        self.hypervisor: FakeHypervisor = self.place.outside.setdefault("hypervisor", FakeHypervisor())
        return restore_host_of(self.place.folder, self.hypervisor)

    def prepare(self) -> None:
        super().prepare()
        self.place.outside["point"] = self.backed_up().id

    def is_moment(self) -> bool:
        lives_on(self.place)
        return True

    def steps(self) -> Sequence[tuple[object, str]]:
        return [*((FakeHypervisor, name) for name in ("define", "start", "onto_volumes")), (FakeExports, "end")]

    def submit(self) -> UUID:
        request = RestoreRequest(target="new_domain", name=f"{GUEST}-again", start=True, instant=True)
        return self.backups.restore(self.place.outside["point"], request).id

    def run(self, job_id: UUID) -> End:
        """With its last commit, at which its guest writes."""
        end = super().run(job_id)
        until(lambda: job_id not in self.backups.runs._at_work)
        return end

    def cancel(self, job_id: UUID) -> None:
        self.backups.runs.cancel(job_id, guest_writes="lose")

    def check(self, job_id: UUID) -> None:
        run = self.backups.runs.get(job_id)
        assert run.instant is not None
        assert (run.instant.state, run.error) == ("done", None)
        (guest,) = self.hypervisor.domains.values()
        (volume,) = (self.place.folder / "volumes").rglob("*.raw")
        assert guest.running
        assert str(volume) in guest.domain.xml
        assert "top.qcow2" not in guest.domain.xml
        expected = bytearray(disk_content())
        for offset, content in self.place.outside["written"]:
            expected[offset : offset + len(content)] = content
        assert volume.read_bytes() == expected, "a write was lost, or one of the point's bytes"
        assert len(self.place.outside["written"]) > 0

    def left(self, job_id: UUID | None) -> list[str]:
        folder, left = self.place.folder, super().left(job_id)
        left += [str(path) for path in (folder / "instant").rglob("*")]
        if job_id is None:
            left += [str(path) for path in (folder / "volumes").rglob("*")]
            left += [f"domain {uuid}" for uuid in self.hypervisor.domains]
            left += [f"variables {run_id}" for run_id in self.hypervisor.variables]
        return left
