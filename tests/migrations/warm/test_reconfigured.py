"""The owner of a source changes its hardware while its job runs, which may take weeks: the guest here gets it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.kvm.identity import identity_of
from synvirt.model.kinds import State
from synvirt.sizes import GIB
from tests.fakes.workers import in_process
from tests.house import SOURCE_ID, VM, House, live_plan
from tests.migrations.warm.warm_house import DISK, content, error, in_state, once

OLD, NEW = "52:54:00:00:00:01", "52:54:00:00:00:aa"
SIZES = {"cpu_count": 4, "cores_per_socket": 2, "memory_bytes": 3 * GIB}
HARDWARE: dict[str, Any] = {**SIZES, "nics": [{"key": "0", "mac": OLD}, {"key": "1", "mac": NEW, "network": "storage"}]}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {DISK: content()})
    yield house
    house.close()


@pytest.mark.parametrize(
    ("mode", "state"), [("Warm", State.DELTA_SYNCING), ("Warm", State.CUTTING_OVER), ("Cold", State.COPYING_FULL)]
)
def test_a_guest_has_the_hardware_that_its_source_had_at_last(house: House, mode: str, state: State) -> None:
    job = house.intake.submit(live_plan(mode))
    once(house, job, in_state(state), lambda: house.platform.reconfigure(VM, **HARDWARE))
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert ended.manifest is not None
    assert {name: getattr(ended.manifest, name) for name in SIZES} == SIZES
    assert ended.domain is not None
    assert identity_of(ended.domain.xml).macs == {OLD, NEW}
    assert f'<memory unit="b">{3 * GIB}</memory>' in ended.domain.xml


def test_what_the_plan_says_stays(house: House) -> None:
    job = house.intake.submit(live_plan(target={"memory_bytes": GIB}))
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.reconfigure(VM, **HARDWARE))
    ended = house.run(job.id)
    assert ended.domain is not None
    assert f'<memory unit="b">{GIB}</memory>' in ended.domain.xml


def test_a_card_that_is_taken_here_is_seen_while_the_source_runs(house: House) -> None:
    house.platform.add_vm("vm-2", {DISK: content(seed=2)})
    other = live_plan("Cold", source_ref={"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": "vm-2"})
    assert house.run(house.intake.submit(other).id).state is State.COMPLETED
    job = house.intake.submit(live_plan())
    taken = {"nics": [{"key": "nic-0", "mac": "52:54:00:00:00:02"}]}
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.reconfigure(VM, **taken))
    ended = house.run(job.id)
    assert (ended.state, error(ended)) == (State.FAILED, ("E_MIG_CONFLICT", True))
    assert house.platform.vm(VM)["powered"] == []
