"""The laws of Hypervisor, as one suite. An implementation joins by a subclass whose fixture `case` opens it."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.errors import Cancelled, Conflict, DomainDefineFailed, GuestBootFailed
from synvirt.hypervisor import Hypervisor, Lived, Volume
from synvirt.kvm.identity import identity_of
from synvirt.migrations.landing import machine_of
from synvirt.model.job import BootAttempt, Domain, Migration
from synvirt.model.kinds import Mode, OfflineKind
from synvirt.model.machine import Disk, Nic, VmManifest
from synvirt.model.plan import HostPathRef, MigrationPlan, PlanSource
from synvirt.model.values import now
from synvirt.sizes import MIB


@dataclass(frozen=True, slots=True)
class EarlyGuest:
    """One that was started before its volume is whole. `writes`: waits until it has written; `kept(path)`: raises, unless
    that disk is the guest's own with all that it wrote. The volume is whole from the beginning here."""

    migration: Migration
    domain: Domain
    volume: Volume
    writes: Callable[[], None]
    kept: Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class HypervisorCase:
    """`running`: None where no such domain is. `silence`: from now on, guests that start never show a sign of life. `early`
    defines and starts a guest over an export; as many as are asked for."""

    hypervisor: Hypervisor
    folder: Path
    running: Callable[[UUID], bool | None]
    add_foreign: Callable[[str, UUID], None]
    power_off: Callable[[UUID], None]
    silence: Callable[[], None]
    early: Callable[[], EarlyGuest]


def job(manifest: VmManifest | None = None, **target: object) -> Migration:
    """A job that has been copied and stands before its Starting."""
    plan = MigrationPlan.model_validate(
        {
            "source": PlanSource(Offline=OfflineKind.OVA_ARCHIVE),
            "source_ref": HostPathRef(kind="offline_host_path", path="/imports/x.ova"),
            "mode": Mode.COLD,
            "target": target,
        }
    )
    number = uuid4()
    empty = Disk(key="disk1", label="disk1", capacity_bytes=MIB)
    manifest = manifest or VmManifest(vm_id="x", name=f"guest {number.hex[:6]}", disks=(empty,), memory_bytes=64 * MIB)
    return Migration(id=number, name="x", plan=plan, manifest=manifest, mode_effective=Mode.COLD, created_at=now())


def define(case: HypervisorCase, migration: Migration | None = None) -> Domain:
    """An empty disk, so a guest that never boots and never stops."""
    migration = migration or job()
    image = case.folder / f"{migration.id}.raw"
    with image.open("wb") as file:
        file.truncate(MIB)
    domain = case.hypervisor.domain_xml(machine_of(migration), [Volume("disk1", str(image), "file")])
    case.hypervisor.define(domain)
    return domain


def _with_identity(name: str, uuid: str | None, mac: str | None) -> VmManifest:
    empty = Disk(key="disk1", label="disk1", capacity_bytes=MIB)
    cards = () if mac is None else (Nic(key="n1", mac=mac, network="lan"),)
    return VmManifest(vm_id="x", name=name, uuid=uuid, disks=(empty,), nics=cards, memory_bytes=64 * MIB)


def never() -> bool:
    return False


class HypervisorContract:
    @pytest.fixture
    def case(self) -> HypervisorCase:
        raise NotImplementedError

    def test_the_same_job_is_the_same_domain(self, case: HypervisorCase) -> None:
        migration = job()
        volume = Volume("disk1", str(case.folder / "a volume & more.raw"), "file")
        domain = case.hypervisor.domain_xml(machine_of(migration), [volume])
        assert domain == case.hypervisor.domain_xml(machine_of(migration), [volume])
        draft = case.hypervisor.domain_xml(machine_of(migration), [])
        assert (draft.name, draft.uuid) == (domain.name, domain.uuid)
        assert domain.uuid != case.hypervisor.domain_xml(machine_of(job()), [volume]).uuid
        assert "a volume &amp; more.raw" in domain.xml

    def test_a_card_can_be_plugged_into_what_it_names_first(self, case: HypervisorCase) -> None:
        names = case.hypervisor.networks()
        assert all(name == "user" or name.startswith(("network:", "bridge:")) for name in names)
        drawn = case.hypervisor.domain_xml(machine_of(job(_with_identity("carded", None, "52:54:00:00:00:01"))), []).xml
        assert f'<interface type="{names[0].partition(":")[0]}">' in drawn

    def test_define_start_undefine_each_twice(self, case: HypervisorCase) -> None:
        migration = job()
        domain = define(case, migration)
        uuid = UUID(domain.uuid)
        assert case.running(uuid) is False
        define(case, migration)
        assert case.running(uuid) is False
        assert case.hypervisor.job_of(uuid) == str(migration.id)
        before = case.hypervisor.capacity()
        assert before.vcpus_max >= min(before.cpu_count, 255)
        case.hypervisor.start(uuid)
        case.hypervisor.start(uuid)
        assert case.running(uuid) is True
        now = case.hypervisor.capacity()
        assert (now.memory_bytes, now.cpu_count) == (before.memory_bytes, before.cpu_count)
        took = now.guests_memory_bytes - before.guests_memory_bytes, now.guests_cpus - before.guests_cpus
        assert took == (migration.manifest.memory_bytes, migration.manifest.cpu_count)  # type: ignore[union-attr]
        case.hypervisor.define(domain)
        assert case.running(uuid) is True, "defining again must not stop the guest"
        case.hypervisor.undefine(uuid, migration.id)
        assert case.running(uuid) is None
        assert case.hypervisor.job_of(uuid) is None
        case.hypervisor.undefine(uuid, migration.id)
        assert case.running(uuid) is None

    def test_a_guest_with_as_many_processors_as_one_can_have_is_defined(self, case: HypervisorCase) -> None:
        """What is more is refused with the plan: a guest that cannot be defined has been copied by then."""
        empty = Disk(key="disk1", label="disk1", capacity_bytes=MIB)
        count = case.hypervisor.capacity().vcpus_max
        migration = job(VmManifest(vm_id="x", name="wide", disks=(empty,), memory_bytes=64 * MIB, cpu_count=count))
        uuid = UUID(define(case, migration).uuid)
        assert case.running(uuid) is False
        case.hypervisor.undefine(uuid, migration.id)

    def test_whether_a_domain_was_ever_started_is_seen(self, case: HypervisorCase) -> None:
        never_was, migration = Lived(runs=False, trace=None), job()
        uuid = UUID(define(case, migration).uuid)
        assert case.hypervisor.lived(uuid) == never_was
        define(case, migration)
        assert case.hypervisor.lived(uuid) == never_was
        case.hypervisor.start(uuid)
        running = case.hypervisor.lived(uuid)
        assert running is not None
        assert running.runs
        case.power_off(uuid)
        off = case.hypervisor.lived(uuid)
        assert off is not None
        assert (off.runs, off.trace is None) == (False, False)
        case.hypervisor.undefine(uuid, migration.id)
        assert case.hypervisor.lived(uuid) is None
        define(case, migration)
        assert case.hypervisor.lived(uuid) == never_was
        case.hypervisor.undefine(uuid, migration.id)

    def test_does_not_start_what_is_not_defined(self, case: HypervisorCase) -> None:
        with pytest.raises(DomainDefineFailed):
            case.hypervisor.start(uuid4())

    def test_what_is_of_the_same_job_is_free(self, case: HypervisorCase) -> None:
        migration = job()
        case.hypervisor.check_free(identity_of(case.hypervisor.domain_xml(machine_of(migration), []).xml))
        define(case, migration)
        case.hypervisor.check_free(identity_of(case.hypervisor.domain_xml(machine_of(migration), []).xml))

    def test_what_another_job_has_is_taken_by_name_uuid_and_mac(self, case: HypervisorCase) -> None:
        theirs = job(_with_identity("theirs", str(uuid4()), "52:54:00:aa:bb:01"))
        domain = define(case, theirs)
        uuid = UUID(domain.uuid)
        assert domain.uuid != str(theirs.id), "the source's UUID is kept"
        wanted = {
            "name": _with_identity("theirs", None, None),
            "UUID": _with_identity("other", domain.uuid, None),
            "MAC": _with_identity("other", None, "52:54:00:AA:BB:01"),
        }
        for what, manifest in wanted.items():
            mine = job(manifest)
            with pytest.raises(Conflict, match=what) as caught:
                case.hypervisor.check_free(identity_of(case.hypervisor.domain_xml(machine_of(mine), []).xml))
            assert "target.identity" in str(caught.value.hint)
            with pytest.raises(Conflict, match=what):
                define(case, mine)
            case.hypervisor.undefine(uuid, mine.id)
            assert case.running(uuid) is False, "another job's domain stays"
        beside = job(_with_identity("theirs", domain.uuid, "52:54:00:aa:bb:01"), name="a copy", identity="new")
        case.hypervisor.check_free(identity_of(case.hypervisor.domain_xml(machine_of(beside), []).xml))

    def test_a_rehearsed_guest_runs_next_to_the_one_that_it_is_a_copy_of(self, case: HypervisorCase) -> None:
        """Its own name and UUID; the address of its card is the other's, and nobody hears it."""
        mac, number = "52:54:00:11:22:33", uuid4()
        migration = job(_with_identity("erp", str(uuid4()), mac))
        moved = define(case, migration)
        image = case.folder / f"{number}.raw"
        image.write_bytes(bytes(MIB))
        machine = replace(machine_of(migration), id=number, rehearsed=True)
        rehearsed = case.hypervisor.domain_xml(machine, [Volume("disk1", str(image), "file")])
        case.hypervisor.define(rehearsed)
        assert rehearsed.name.startswith("erp-rehearsal-")
        assert rehearsed.uuid == str(number) != moved.uuid
        assert mac in rehearsed.xml
        assert '<link state="down"' in rehearsed.xml
        wired = case.hypervisor.domain_xml(replace(machine, wires=(4711,)), [Volume("disk1", str(image), "file")])
        assert '<source address="127.0.0.1" port="4711"' in wired.xml
        assert '<link state="down"' not in wired.xml
        case.hypervisor.define(wired)
        case.hypervisor.define(rehearsed)
        assert case.hypervisor.picture(number) is None, "it is off"
        case.hypervisor.start(number)
        assert case.running(number)
        assert (case.hypervisor.picture(number) or b"").startswith(b"\x89PNG")
        case.hypervisor.check_free(identity_of(moved.xml))
        case.hypervisor.undefine(number, number)
        assert case.running(number) is None
        assert case.running(UUID(moved.uuid)) is False

    def test_leaves_foreign_domains_alone(self, case: HypervisorCase) -> None:
        migration, other = job(name="foreign"), uuid4()
        case.add_foreign("foreign", other)
        assert case.hypervisor.job_of(other) is None
        with pytest.raises(Conflict, match="foreign"):
            case.hypervisor.check_free(identity_of(case.hypervisor.domain_xml(machine_of(migration), []).xml))
        with pytest.raises(Conflict):
            define(case, migration)
        case.hypervisor.undefine(other, migration.id)
        assert case.running(other) is False

    def test_the_next_rung_stops_the_guest_and_is_another_domain_of_the_same_job(self, case: HypervisorCase) -> None:
        migration = job()
        domain = define(case, migration)
        uuid = UUID(domain.uuid)
        case.hypervisor.start(uuid)
        climbed = migration.model_copy(
            update={
                "boot_attempts": (BootAttempt(disk_bus="virtio", began_at=now()), BootAttempt(disk_bus="scsi", began_at=now()))
            }
        )
        next_domain = define(case, climbed)
        assert (next_domain.name, next_domain.uuid) == (domain.name, domain.uuid)
        assert next_domain.xml != domain.xml
        assert case.running(uuid) is False
        case.hypervisor.start(uuid)
        define(case, climbed)
        assert case.running(uuid) is True

    def test_a_job_that_booted_has_no_screenshot(self, case: HypervisorCase) -> None:
        assert case.hypervisor.screenshot(uuid4()) is None
        case.hypervisor.forget_screenshot(uuid4())

    def test_a_guest_that_stops_fails_at_once(self, case: HypervisorCase) -> None:
        case.silence()
        uuid = UUID(define(case).uuid)
        case.hypervisor.start(uuid)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(case.hypervisor.wait_until_booted, uuid, 600, never)
            time.sleep(0.5)
            case.power_off(uuid)
            with pytest.raises(GuestBootFailed, match="stopped"):
                waiting.result(timeout=60)

    def test_a_guest_that_never_started_fails_at_once(self, case: HypervisorCase) -> None:
        uuid = UUID(define(case).uuid)
        with pytest.raises(GuestBootFailed):
            case.hypervisor.wait_until_booted(uuid, 60, never)
        with pytest.raises(GuestBootFailed):
            case.hypervisor.wait_until_booted(uuid4(), 60, never)

    def test_a_silent_guest_fails_when_its_time_is_over(self, case: HypervisorCase) -> None:
        case.silence()
        uuid = UUID(define(case).uuid)
        case.hypervisor.start(uuid)
        began = time.monotonic()
        with pytest.raises(GuestBootFailed, match="2 s"):
            case.hypervisor.wait_until_booted(uuid, 2, never)
        assert 2 <= time.monotonic() - began < 60
        assert case.running(uuid) is True, "whoever waited decides what becomes of the domain"

    def test_a_wait_ends_when_it_is_cancelled(self, case: HypervisorCase) -> None:
        case.silence()
        uuid = UUID(define(case).uuid)
        case.hypervisor.start(uuid)
        began = time.monotonic()
        with pytest.raises(Cancelled):
            case.hypervisor.wait_until_booted(uuid, 600, lambda: time.monotonic() > began + 1)
        assert time.monotonic() - began < 60

    def test_a_guest_that_was_started_early_gets_onto_its_volume_without_a_stop(self, case: HypervisorCase) -> None:
        guest = case.early()
        uuid, volume = UUID(guest.domain.uuid), Path(guest.volume.path)
        assert case.hypervisor.resume(uuid) is None, "it does not stand still"
        guest.writes()
        assert not case.hypervisor.has_moved(uuid, [guest.volume])
        case.hypervisor.onto_volumes(uuid, [guest.volume], never)
        assert case.hypervisor.has_moved(uuid, [guest.volume])
        assert case.running(uuid) is True
        guest.kept(volume)
        case.hypervisor.onto_volumes(uuid, [guest.volume], never)
        on_it = case.hypervisor.domain_xml(machine_of(guest.migration), [replace(guest.volume, early=None)])
        case.hypervisor.define(on_it)
        assert case.running(uuid) is True, "it never stopped"
        guest.writes()
        guest.kept(volume)
        case.hypervisor.undefine(uuid, guest.migration.id)
        assert not case.hypervisor.has_moved(uuid, [guest.volume])

    def test_one_that_went_off_meanwhile_too(self, case: HypervisorCase) -> None:
        guest = case.early()
        uuid = UUID(guest.domain.uuid)
        guest.writes()
        case.power_off(uuid)
        assert case.hypervisor.resume(uuid) is None
        for _ in range(2):
            case.hypervisor.onto_volumes(uuid, [guest.volume], never)
            guest.kept(Path(guest.volume.path))
        assert case.running(uuid) is False
        case.hypervisor.define(case.hypervisor.domain_xml(machine_of(guest.migration), [replace(guest.volume, early=None)]))
        case.hypervisor.start(uuid)
        guest.writes()
        guest.kept(Path(guest.volume.path))
        case.hypervisor.undefine(uuid, guest.migration.id)

    def test_a_move_onto_volumes_is_cancelled_and_goes_on(self, case: HypervisorCase) -> None:
        guest = case.early()
        uuid = UUID(guest.domain.uuid)
        guest.writes()
        with pytest.raises(Cancelled):
            case.hypervisor.onto_volumes(uuid, [guest.volume], lambda: True)
        case.hypervisor.onto_volumes(uuid, [guest.volume], never)
        guest.kept(Path(guest.volume.path))
        case.hypervisor.undefine(uuid, guest.migration.id)
        assert case.hypervisor.resume(uuid) is None, "nor is it there"

    def test_serves_several_jobs_at_once(self, case: HypervisorCase) -> None:
        def live_and_die(_: int) -> UUID:
            migration = job()
            uuid = UUID(define(case, migration).uuid)
            case.hypervisor.start(uuid)
            assert case.running(uuid) is True
            case.hypervisor.undefine(uuid, migration.id)
            return uuid

        with ThreadPoolExecutor(4) as pool:
            ended = list(pool.map(live_and_die, range(4)))
        assert [case.running(uuid) for uuid in ended] == [None] * 4
