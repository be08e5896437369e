"""A job whose guest does not boot from the first bus climbs; names are claimed before anything is copied. Fakes, real store."""

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.errors import Conflict, Internal, SourceUnreachable, SynvirtError
from synvirt.guests.virt_v2v import ALONE
from synvirt.kvm.identity import Identity
from synvirt.machines.loader import Loader
from synvirt.migrations import advance
from synvirt.migrations.planning.foreseen import check_host
from synvirt.model.job import BootAttempt, Migration
from synvirt.model.kinds import State
from synvirt.model.machine import DiskBus, Nic, VmManifest
from synvirt.sizes import KIB
from synvirt.store import Store
from tests.fakes.guests import FakePreparer
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan, offline_plan, states

SOMEBODY = UUID(int=99)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process)
    yield house
    house.close()


def appliance(house: House, name: str = "appliance") -> Path:
    folder = house.imports / name
    if not folder.exists():
        folder.mkdir()
        (folder / "disk-0.raw").write_bytes(b"boot" * KIB)
    return folder


def run(house: House, name: str = "appliance", **fields: Any) -> Migration:
    return house.run(house.intake.submit(offline_plan(appliance(house, name), **fields)).id)


def outcomes(attempts: tuple[BootAttempt, ...]) -> list[tuple[DiskBus, str | None, bool]]:
    return [(attempt.disk_bus, attempt.sign, attempt.trouble is not None) for attempt in attempts]


CLIMBED: list[tuple[DiskBus, str | None, bool]] = [("virtio", None, True), ("scsi", None, True), ("sata", "agent", False)]


# ── the ladder ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_guest_that_boots_at_once_has_one_attempt(house: House) -> None:
    job = run(house)
    assert outcomes(job.boot_attempts) == [("virtio", "agent", False)]
    assert job.boot_sign == "agent"


def test_a_linux_that_names_its_disks_by_their_devices_gets_the_bus_that_has_such_names(house: House) -> None:
    """By virtio it shows signs of life, as its root file system is found by its UUID, and stops in emergency mode later."""
    house.disks_say = {"mount /": "UUID=0b ext4", "mount /data": "/dev/sdb1 xfs"}
    job = run(house)
    assert outcomes(job.boot_attempts) == [("scsi", "agent", False)]
    assert job.manifest is not None
    (concern,) = (one for one in job.manifest.concerns if one.id.startswith("disk-names"))
    assert "/dev/sdb1" in concern.assessment


def test_a_linux_whose_initramfs_has_no_virtio_begins_by_a_bus_that_it_has(house: House) -> None:
    """By virtio it would wait for its root file system for minutes, and by virtio-scsi again."""
    house.disks_say = {"drivers in /boot/initrd.img-6.1.0-28-amd64": "ahci, sd_mod", "mount /": "UUID=0b ext4"}
    job = run(house)
    assert outcomes(job.boot_attempts) == [("sata", "agent", False)]
    assert job.manifest is not None
    (concern,) = (one for one in job.manifest.concerns if one.id.startswith("boot-drivers"))
    assert "update-initramfs" in concern.remedy


NOWHERE = {"drivers in /boot/initramfs-5.14.img": "none for disks here"}


class MakesInitramfs(FakePreparer):
    """Afterwards the initramfs has what it needs here."""

    house: House

    def adopt(self, name: str, devices: list[str], *, backing: Mapping[str, str] = ALONE) -> None:
        super().adopt(name, devices, backing=backing)
        self.house.disks_say = dict.fromkeys(NOWHERE, "virtio_blk, virtio_pci")


@pytest.mark.parametrize("mode", ["Cold", "Warm"])
def test_a_linux_whose_initramfs_finds_no_disk_here_gets_one_that_does(tmp_path: Path, mode: str) -> None:
    preparer = MakesInitramfs()
    preparer.house = house = House(tmp_path, workers=in_process, preparer=preparer)
    house.disks_say = NOWHERE
    house.platform.add_vm(VM, {"disk-0": b"boot" * KIB})
    job = house.run(house.intake.submit(live_plan(mode)).id)
    assert job.state == State.COMPLETED, job.last_error
    assert len(preparer.prepared) == 1
    assert outcomes(job.boot_attempts) == [("virtio", "agent", False)]
    assert job.manifest is not None
    assert not [one for one in job.manifest.concerns if one.id.startswith("boot-drivers")]
    house.close()


@pytest.mark.parametrize(("conversion", "missing"), [("never", False), ("auto", True)])
def test_a_linux_whose_initramfs_finds_no_disk_here_is_tried_as_it_is_where_nothing_can_make_another(
    tmp_path: Path, conversion: str, missing: bool
) -> None:
    house = House(tmp_path, workers=in_process, preparer=FakePreparer(missing=missing))
    house.disks_say = NOWHERE
    job = run(house, conversion=conversion)
    assert job.state == State.COMPLETED, job.last_error
    assert job.conversion is None
    assert job.manifest is not None
    assert [one.id for one in job.manifest.concerns if one.id.startswith("boot-drivers")] == ["boot-drivers:none"]
    house.close()


def test_a_linux_with_settings_for_a_network_card_by_its_name_is_noted(house: House) -> None:
    """It boots, and has no network."""
    house.disks_say = {"mount /": "UUID=0b ext4", "configures eth0": "/etc/network/interfaces"}
    house.platform.add_vm(VM, {"disk-0": b"boot" * KIB})
    job = house.run(house.intake.submit(live_plan("Cold")).id)
    assert job.state == State.COMPLETED
    assert job.manifest is not None
    (concern,) = (one for one in job.manifest.concerns if one.id == "card-names")
    assert "eth0 (/etc/network/interfaces)" in concern.assessment


def test_the_plan_decides_the_bus_of_a_linux_that_names_its_disks_by_their_devices(house: House) -> None:
    house.disks_say = {"mount /data": "/dev/sdb1 xfs"}
    assert outcomes(run(house, target={"disk_bus": "virtio"}).boot_attempts) == [("virtio", "agent", False)]


def test_a_domain_that_is_only_defined_has_the_bus_by_which_its_disks_have_their_names(house: House) -> None:
    house.disks_say = {"mount /data": "/dev/sdb1 xfs"}
    job = run(house, target={"start": False})
    assert job.domain is not None
    assert 'bus="scsi"' in job.domain.xml


def test_a_guest_climbs_to_the_bus_it_has_a_driver_for(tmp_path: Path) -> None:
    hypervisor = FakeHypervisor(boots_from=("sata", "ide"))
    house = House(tmp_path, workers=in_process, hypervisor=hypervisor)
    job = run(house)
    assert job.state == State.COMPLETED, job.last_error
    assert outcomes(job.boot_attempts) == CLIMBED
    assert all(attempt.ended_at for attempt in job.boot_attempts)
    assert job.domain is not None
    assert 'bus="sata"' in job.domain.xml
    assert [one.here for one in job.domain.differences if one.what == "bus of disk disk-0"] == ["sata"]
    assert hypervisor.screenshots == {}, "it came up"
    assert len(hypervisor.domains) == 1
    house.close()


def test_every_rung_is_reported_to_the_caller(tmp_path: Path) -> None:
    house = House(tmp_path, workers=in_process, hypervisor=FakeHypervisor(boots_from=("sata",)))
    job = run(house)
    reported = [Migration.model_validate_json(event.document) for event in house.store.events_after(0, job_id=job.id)]
    rungs = [len(one.boot_attempts) for one in reported if one.state == State.STARTING]
    assert set(rungs) >= {1, 2, 3}
    house.close()


def test_a_guest_that_boots_from_nothing_fails_with_all_it_tried_and_keeps_the_copy(tmp_path: Path) -> None:
    hypervisor = FakeHypervisor(boots_from=())
    house = House(tmp_path, workers=in_process, hypervisor=hypervisor)
    job = run(house)
    assert job.state == State.FAILED
    assert [attempt.disk_bus for attempt in job.boot_attempts] == ["virtio", "scsi", "sata", "ide"]
    assert all(attempt.trouble for attempt in job.boot_attempts)
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_GUEST_BOOT_FAILED"
    assert (hypervisor.domains, job.domain) == ({}, None)
    assert hypervisor.screenshot(job.id) is not None, "what it showed stays with the job"
    assert house.volume(job).exists()
    assert house.store.ledger(job.id) == []
    house.close()


def test_a_job_whose_domain_cannot_be_removed_goes_on_naming_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hypervisor = FakeHypervisor(fail="boot")
    house = House(tmp_path, workers=in_process, hypervisor=hypervisor)

    def away(uuid: UUID, owner: UUID) -> None:
        raise Internal("libvirt is away")

    monkeypatch.setattr(hypervisor, "undefine", away)
    monkeypatch.setattr(advance, "SWEEP_PAUSES_S", ())
    job = run(house)
    assert job.domain is not None
    assert (job.state, list(hypervisor.domains)) == (State.FAILED, [UUID(job.domain.uuid)])
    house.close()


def test_what_no_bus_helps_against_is_not_tried_on_each(tmp_path: Path) -> None:
    house = House(tmp_path, workers=in_process, hypervisor=FakeHypervisor(fail="boot"))
    job = run(house)
    assert [attempt.disk_bus for attempt in job.boot_attempts] == ["virtio"]
    house.close()


def test_a_bus_that_the_plan_names_is_the_only_one(tmp_path: Path) -> None:
    house = House(tmp_path, workers=in_process, hypervisor=FakeHypervisor(boots_from=("sata",)))
    job = run(house, target={"disk_bus": "virtio"})
    assert job.state == State.FAILED
    assert outcomes(job.boot_attempts) == [("virtio", None, True)]
    house.close()


def test_a_guest_that_is_not_to_be_started_is_not_tried(house: House) -> None:
    job = run(house, target={"start": False})
    assert (job.state, job.boot_attempts) == (State.COMPLETED, ())


# ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_jobs_of_one_name_at_once_end_as_one_guest(tmp_path: Path) -> None:
    """Each in a house of its own over the same store, as two threads of one service are: whoever claims first has it."""
    hypervisor = FakeHypervisor()
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        houses = [House(folder, workers=in_process, hypervisor=hypervisor) for _ in range(2)]
        plans = [offline_plan(appliance(houses[0], name), target={"name": f"web-{attempt}"}) for name in ("a", "b")]
        jobs = [houses[0].intake.submit(plan) for plan in plans]
        with ThreadPoolExecutor() as pool:
            ended = list(pool.map(lambda house, job: house.run(job.id), houses, jobs))
        assert {job.state for job in ended} == {State.COMPLETED, State.FAILED}
        (refused,) = [job for job in ended if job.state == State.FAILED]
        assert refused.last_error is not None
        assert refused.last_error.code == "E_MIG_CONFLICT"
        assert states(refused) == [State.QUEUED, State.FAILED], "before anything was copied"
        assert house_is_clean(houses[0].store, refused)
        for house in houses:
            house.close()


def house_is_clean(store: Store, job: Migration) -> bool:
    return store.ledger(job.id) == []


def test_a_domain_that_came_before_the_copy_ends_the_job_before_it(house: House) -> None:
    job = house.intake.submit(offline_plan(appliance(house), target={"name": "web"}))
    house.hypervisor.add_foreign("web", SOMEBODY)
    ended = house.run(job.id)
    assert ended.last_error is not None
    assert (states(ended), ended.last_error.code) == ([State.QUEUED, State.FAILED], "E_MIG_CONFLICT")


def test_a_hardware_address_is_claimed_as_a_name_is(house: House) -> None:
    other = house.intake.submit(offline_plan(appliance(house)))
    house.store.claim(other.id, ["MAC address 52:54:00:00:00:01"], hint="")
    house.platform.add_vm(VM, {"disk-0": bytes(KIB)})
    ended = house.run(house.intake.submit(live_plan("Cold")).id)
    assert ended.last_error is not None
    assert (states(ended), ended.last_error.code) == ([State.QUEUED, State.FAILED], "E_MIG_CONFLICT")
    assert "MAC address" in ended.last_error.message


def test_a_domain_that_comes_while_the_copy_runs_is_a_conflict_and_stays(house: House) -> None:
    """Between the check and the landing lie hours."""
    folder = appliance(house)
    job = house.intake.submit(offline_plan(folder, target={"name": "web"}))

    def committed() -> None:
        if house.store.get(job.id).state == State.COPYING_FULL:
            house.store.on_commit = lambda: None
            house.hypervisor.add_foreign("web", SOMEBODY)

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.last_error is not None
    assert (ended.state, ended.last_error.code) == (State.FAILED, "E_MIG_CONFLICT")
    assert list(house.hypervisor.domains) == [SOMEBODY]
    assert house.volume(ended).exists(), "the copy is whole, and kept"


def test_a_plan_is_refused_at_once_where_its_name_is_taken(house: House) -> None:
    assert run(house, target={"name": "web"}).state == State.COMPLETED
    plan = offline_plan(appliance(house, "other"), target={"name": "web"})
    for manifest in (None, house.store.documents(limit=1) and run(house, "third").manifest):
        with pytest.raises(Conflict, match="name"):
            check_host(house.rooms, plan, manifest)
    check_host(house.rooms, offline_plan(appliance(house, "other")), None)


def test_a_plan_is_refused_at_once_where_a_job_that_has_not_ended_has_its_name(house: House) -> None:
    """Its own job would say so a moment later, and fail."""
    first = house.intake.submit(offline_plan(appliance(house), target={"name": "web"}))
    house.store.claim(first.id, Identity("web", macs=frozenset({"52:54:00:00:00:01"})).claims, hint="")
    plan = offline_plan(appliance(house, "other"), target={"name": "web"})
    for manifest in (None, VmManifest(vm_id="other", name="other")):
        with pytest.raises(Conflict, match=rf"migration {first.id}, which has not ended, has the name web too") as caught:
            check_host(house.rooms, plan, manifest)
        assert "cancel it" in (caught.value.hint or "")
    nic = Nic(key="n", mac="52:54:00:00:00:01")
    with pytest.raises(Conflict, match="has the MAC address 52:54:00:00:00:01 too"):
        check_host(house.rooms, offline_plan(appliance(house, "other")), VmManifest(vm_id="b", name="b", nics=(nic,)))
    assert house.run(first.id).state == State.COMPLETED
    house.hypervisor.domains.clear()
    check_host(house.rooms, plan, None)


def test_a_hypervisor_that_is_away_refuses_no_plan(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: object) -> None:
        raise Internal("libvirtd does not answer")

    monkeypatch.setattr(house.hypervisor, "check_free", away)
    check_host(house.rooms, offline_plan(appliance(house), target={"name": "web"}), None)


# ── UEFI variables ───────────────────────────────────────────────────────────────────────────────────────────────────


class UefiAdapter(FakeAdapter):
    """Of a platform that keeps UEFI variables as OVMF does; `variables` None: this VM has none; an error: it does not say."""

    variables: bytes | SynvirtError | None = b"boot entries and keys"

    async def inspect(self, vm_id: str) -> VmManifest:
        return (await super().inspect(vm_id)).model_copy(update={"firmware": "uefi"})

    async def uefi_variables(self, vm_id: str) -> bytes | None:
        if isinstance(self.variables, SynvirtError):
            raise self.variables
        return self.variables


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        (b"boot entries and keys", True),
        (b"useless to this host's firmware", False),
        (None, False),
        (SourceUnreachable("its storage pool cannot be made"), False),
    ],
)
def test_uefi_variables_come_along_where_the_source_has_ours(
    house: House, monkeypatch: pytest.MonkeyPatch, variables: bytes | SynvirtError | None, *, kept: bool
) -> None:
    monkeypatch.setattr(UefiAdapter, "variables", variables)
    monkeypatch.setattr(house, "connect", lambda *_: _connected(house))
    house.rooms = dataclasses.replace(house.rooms, connect=house.connect)
    house.platform.add_vm(VM, {"disk-0": b"boot" * KIB})
    job = house.run(house.intake.submit(live_plan("Cold")).id)
    assert job.state == State.COMPLETED, job.last_error
    assert house.hypervisor.variables == ({job.id: variables} if kept else {})
    assert job.domain is not None
    assert any(one.what == "uefi variables" for one in job.domain.differences) is not kept


async def _connected(house: House) -> UefiAdapter:
    return UefiAdapter(house.platform)


@pytest.mark.parametrize("fails", [False, True])
def test_loaders_get_entries_where_none_come_along(house: House, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """Of a source that has variables, its own are kept: they know better which of several systems is started."""
    house.loaders = [Loader(1, 2048, 6144, uuid4(), r"\EFI\debian\shimx64.efi")]
    house.rooms = dataclasses.replace(house.rooms, connect=lambda *_: _connected(house))
    house.platform.add_vm(VM, {"disk-0": b"boot" * KIB})
    kept = house.run(house.intake.submit(live_plan("Cold")).id)
    assert house.hypervisor.variables == {kept.id: UefiAdapter.variables}
    house.hypervisor.undefine(UUID(kept.domain.uuid), kept.id)  # type: ignore[union-attr]
    house.hypervisor.variables.clear()
    house.hypervisor.fail = "boot" if fails else None
    monkeypatch.setattr(UefiAdapter, "variables", None)
    house.platform.power(VM, "on")
    job = house.run(house.intake.submit(live_plan("Cold")).id)
    assert job.manifest is not None
    (concern,) = (one for one in job.manifest.concerns if one.id == "boot-entries")
    assert r"\EFI\debian\shimx64.efi" in concern.assessment
    if fails:
        assert (job.state, house.hypervisor.variables, house.store.ledger(job.id)) == (State.FAILED, {}, [])
        return
    assert house.hypervisor.variables == {job.id: b"['Boot0000', 'BootOrder']"}
    assert job.domain is not None
    (difference,) = (one for one in job.domain.differences if one.what == "uefi variables")
    assert difference.here == "an entry for each loader on its disks"


def test_variables_of_a_job_that_fails_go_with_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.rooms = dataclasses.replace(house.rooms, connect=lambda *_: _connected(house))
    house.hypervisor.fail = "boot"
    house.platform.add_vm(VM, {"disk-0": b"boot" * KIB})
    job = house.run(house.intake.submit(live_plan("Cold")).id)
    assert job.state == State.FAILED
    assert house.hypervisor.variables == {}
    assert house.store.ledger(job.id) == []
