"""What is filled in, as a plan, and back: no browser, no service."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.model.kinds import Mode
from synvirt.model.machine import Concern, Disk, Nic, VmManifest
from synvirt.model.plan import LiveVmRef, MigrationPlan, NetworkMap, PlanSource, Target, Warm
from synvirt.model.times import Schedule
from synvirt.sizes import GIB, MIB
from synvirt.web.forms import Form
from synvirt.web.plans import FIELDS, filled, networks_of, written
from synvirt.web.review import lines, runs_cold
from tests.cases import cases

REF = LiveVmRef(kind="live_vm", source_id=UUID(int=1), vm_id="vm-1")
SOURCE = PlanSource.model_validate({"Live": "vim_api"})
BROKEN = Concern(id="disk-unreadable:2001", category="Critical", label="Unreadable", assessment="It is.", remedy="Correct it.")
MACHINE = VmManifest(
    vm_id="vm-1",
    name="erp",
    disks=tuple(Disk(key=key, label=f"Disk {key}", capacity_bytes=GIB) for key in ("2000", "2001")),
    nics=(Nic(key="a", network="LAN"), Nic(key="b", network="LAN"), Nic(key="c", network="")),
)

SIZES = st.integers(MIB, 1 << 45)
# As a text box gives it back: without what surrounds it.
NAMES = st.text(st.characters(categories=("L", "N", "P"), max_codepoint=0x2FFF), min_size=1, max_size=40)
PLANS = st.builds(
    MigrationPlan,
    source=st.just(SOURCE),
    source_ref=st.just(REF),
    mode=st.sampled_from(Mode),
    skip_disks=st.sampled_from([(), ("2000",), ("2001",)]),
    waive_concerns=st.sampled_from([(), ("target-too-small",)]),
    conversion=st.sampled_from(["auto", "always", "never"]),
    target=st.builds(
        Target,
        name=st.none() | NAMES,
        cpu_count=st.none() | st.integers(1, 1024),
        memory_bytes=st.none() | SIZES,
        start=st.booleans(),
        network_map=st.lists(
            st.builds(NetworkMap, source=st.sampled_from(["LAN", ""]), target=NAMES), unique_by=lambda one: one.source
        ).map(tuple),
        disk_bus=st.none() | st.sampled_from(["virtio", "sata"]),
        destination=st.none() | st.just("fast"),
        identity=st.sampled_from(["keep", "new"]),
    ),
    warm=st.builds(
        Warm,
        max_passes=st.integers(1, 1000),
        delta_threshold_bytes=st.integers(0, 1 << 45),
        interval_s=st.floats(0, 7 * 86400),
        cutover=st.sampled_from(["auto", "manual"]),
        verify=st.sampled_from(["auto", "sample", "full"]),
    ),
    schedule=st.just(Schedule()) | st.just(Schedule.model_validate_json('{"start_at": "2030-11-28T22:00:00Z"}')),
    limits=st.fixed_dictionaries({"bandwidth_bps": st.none() | st.integers(64 << 10, 1 << 40)}),
)


def made(**fields: str | tuple[str, ...]) -> Form:
    """A form that somebody left as it was, but for these fields."""
    usual = {"start": ("on",), "mode": ("Cold",), "disk": ("2000", "2001")}
    return Form(usual | {name: (value,) if isinstance(value, str) else value for name, value in fields.items()})


@cases(100)
@given(plan=PLANS)
def test_what_a_plan_is_written_as_gives_that_plan(plan: MigrationPlan) -> None:
    read = filled(written(plan, MACHINE), ref=REF, source=SOURCE, manifest=MACHINE)
    assert read.mistakes == {}
    assert read.plan == plan.model_copy(update={"name": plan.target.name or "erp"})


def test_an_untouched_form_asks_for_nothing_but_the_machine() -> None:
    read = filled(made(), ref=REF, source=SOURCE, manifest=MACHINE)
    assert read.plan == MigrationPlan(source=SOURCE, source_ref=REF, mode=Mode.COLD, name="erp")


MISTAKES = [
    ("cpu_count", "four", "is not a whole number"),
    ("cpu_count", "0", "must be 1 or more"),
    ("memory", "4", "is not a size, such as 4 GiB or 512 MiB"),
    ("memory", "1 KiB", "must be 1 MiB or more"),
    ("bandwidth", "1 B", "must be 64 KiB or more"),
    ("max_passes", "1001", "must be 1000 or less"),
    ("outage_budget", "0", "must be more than 0"),
    ("name", "a\x00b", "has a character that it cannot have"),
    ("name", "x" * 256, "is longer than 255 characters"),
    ("destination", "../etc", "has a character that it cannot have"),
    ("mode", "Hot", "must be 'Warm' or 'Cold'"),
    ("disk_bus", "usb", "must be 'virtio', 'scsi', 'sata', 'ide' or 'nvme'"),
    ("disk", (), "Choose at least one disk to copy."),
]


@pytest.mark.parametrize(("name", "value", "words"), MISTAKES)
def test_a_mistake_is_reported_at_its_field(name: str, value: str | tuple[str, ...], words: str) -> None:
    warm = {"mode": "Warm"} if name == "outage_budget" else {}
    read = filled(made(**(warm | {name: value})), ref=REF, source=SOURCE, manifest=MACHINE)
    assert read.plan is None
    assert read.mistakes == {name: words}


@cases(100)
@given(fields=st.dictionaries(st.sampled_from([*FIELDS, "disk", "waive", "start", "network_source"]), st.text(max_size=30)))
def test_whatever_is_typed_is_a_plan_or_a_mistake(fields: dict[str, str]) -> None:
    read = filled(made(**fields), ref=REF, source=SOURCE, manifest=MACHINE)
    assert (read.plan is None) == bool(read.mistakes)


def test_the_outage_of_a_warm_job_has_a_budget_and_a_cold_one_has_none() -> None:
    form = made(mode="Warm", outage_budget="300", on_overrun="roll_back", shutdown="hold", shutdown_timeout="900")
    plan = filled(form, ref=REF, source=SOURCE, manifest=MACHINE).plan
    assert plan is not None
    assert (plan.outage_budget_s, plan.on_overrun) == (300, "roll_back")
    assert (plan.shutdown, plan.shutdown_timeout_s) == ("hold", 900)
    assert filled(written(plan, MACHINE), ref=REF, source=SOURCE, manifest=MACHINE).plan == plan
    cold = filled(made(outage_budget="300", on_overrun="roll_back"), ref=REF, source=SOURCE, manifest=MACHINE).plan
    assert cold is not None
    assert (cold.outage_budget_s, cold.on_overrun) == (None, "go_on")
    alone = filled(made(mode="Warm", on_overrun="roll_back"), ref=REF, source=SOURCE, manifest=MACHINE)
    assert "needs outage_budget_s" in alone.mistakes[""]


def test_a_critical_concern_is_confirmed_or_its_disk_left_out() -> None:
    machine = MACHINE.model_copy(update={"concerns": (BROKEN,)})
    for form, fine in (
        (made(), False),
        (made(waive=BROKEN.id), True),
        (made(disk="2000"), True),
        (made(disk="2001"), False),
    ):
        assert ("waive" not in filled(form, ref=REF, source=SOURCE, manifest=machine).mistakes) == fine


def test_a_network_is_reported_once_with_its_cards() -> None:
    assert networks_of(MACHINE) == {"LAN": 2, "": 1}


def test_the_review_says_what_becomes_different_and_nothing_else() -> None:
    form = made(cpu_count="8", disk="2000", network_source=("LAN", ""), network_target=("bridge:br0", " "), identity="new")
    plan = filled(form, ref=REF, source=SOURCE, manifest=MACHINE).plan
    assert plan is not None
    changed = {line.what: line.here for line in lines(plan, MACHINE, network="user", destination="zfs") if line.changed}
    assert changed == {"Processors": "8", "Disk 2001": "left out", "Network": "bridge:br0", "Addresses": "new ones"}


def test_a_warm_plan_that_would_run_cold_is_said_to() -> None:
    plan = MigrationPlan(source=SOURCE, source_ref=REF, mode=Mode.WARM)
    assert (
        runs_cold(plan, MACHINE.model_copy(update={"cbt_reason": "it has an independent disk"})) == "it has an independent disk"
    )
    assert runs_cold(plan, MACHINE.model_copy(update={"cbt_available": True})) is None
    assert runs_cold(plan.model_copy(update={"mode": Mode.COLD}), MACHINE) is None
