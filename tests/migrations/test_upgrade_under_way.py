"""Jobs that a version before typed memory and the one ledger left under way go on after the upgrade."""

from pathlib import Path

import pytest

from synvirt.model.kinds import State
from synvirt.sizes import KIB, MIB
from tests.drawn import drawn
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import VM, Crash, House, crash_at, live_plan
from tests.store.downgrading import to_0017

DISK = "disk-0"


def disk_content() -> bytes:
    return drawn(700 * KIB, zeros=400 * KIB, end=500)


@pytest.mark.parametrize("part", range(2))
def test_a_warm_job_goes_on_from_each_commit(tmp_path: Path, part: int) -> None:
    """Every sixth commit in each part: with a snapshot that is being made, noted, released; with the guest off; swept."""
    commit, noted, crashed = 2 + 3 * part, 0, True
    while crashed:
        folder, hypervisor = tmp_path / str(commit), FakeHypervisor()
        folder.mkdir()
        house = House(folder, hypervisor=hypervisor, workers=in_process)
        house.platform.add_vm(VM, {DISK: disk_content()})
        job = house.intake.submit(live_plan(warm={"delta_threshold_bytes": MIB}))
        house.store.on_commit = crash_at(commit)
        crashed = False
        try:
            house.run(job.id)
        except Crash:
            crashed = True
        house.close()
        house.platform.guest_writes(VM, DISK, commit * 8 * KIB, b"written meanwhile")
        noted = max(noted, to_0017(f"sqlite:///{folder / 'store.db'}"))
        again = House(folder, hypervisor=hypervisor, workers=in_process)
        ended = again.run(job.id)
        assert ended.state is State.COMPLETED, (commit, ended.last_error)
        assert again.volume(ended).read_bytes() == again.platform.disk_path(VM, DISK).read_bytes()
        assert again.platform.vm(VM)["snapshots"] == {}, commit
        again.close()
        commit += 6
    assert noted > 10
