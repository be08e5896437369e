"""Domain XML: golden documents that libvirt's own schema accepts, and laws for whatever a manifest may say."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import DomainDefineFailed, Internal
from synvirt.hypervisor import Volume, domain_xml, hardware
from synvirt.hypervisor.domain_xml import NAME_LIMIT_BYTES, Host, safe_name
from synvirt.hypervisor.hardware import BUSES
from synvirt.kvm.identity import identity_of
from synvirt.migrations.landing import machine_of
from synvirt.model.job import BootAttempt, Domain, Migration, StateVisit
from synvirt.model.kinds import State
from synvirt.model.machine import Disk, DiskBus, GuestOs, Nic, VmManifest
from synvirt.model.plan import NetworkMap
from synvirt.model.values import now
from synvirt.sizes import GIB, MIB
from tests.contracts.hypervisors import job
from tests.fakes.hypervisor import HOST
from tests.needs import need

GOLDEN = Path(__file__).parent / "golden"
JOB_ID = UUID("6f1c3c0a-3c5f-4b52-9f57-7d8f4d3f6a01")


def build(job: Migration, given: list[Volume], host: Host) -> Domain:
    return domain_xml.build(machine_of(job), given, host)


def ladder(job: Migration) -> tuple[DiskBus, ...]:
    return hardware.ladder(machine_of(job))


def disk(key: str, *, boot_order: int | None = None, bus: DiskBus = "scsi") -> Disk:
    return Disk(key=key, label=key, capacity_bytes=GIB, boot_order=boot_order, bus=bus)


def climbed(migration: Migration, *buses: DiskBus) -> Migration:
    """Every bus but the last was tried, and the guest did not boot from it."""
    attempts = tuple(
        BootAttempt(disk_bus=bus, began_at=now(), trouble=None if bus == buses[-1] else "gave no sign of life") for bus in buses
    )
    return migration.model_copy(update={"boot_attempts": attempts})


def volumes(manifest: VmManifest, *, device_type: str = "file") -> list[Volume]:
    return [Volume(one.key, f"/volumes/{one.key}", device_type) for one in manifest.disks]


def fixed(manifest: VmManifest, *, prepared: bool = False, **target: object) -> Migration:
    history = (StateVisit(state=State.V2V_PROCESSING, at=now()),) if prepared else ()
    return job(manifest, **target).model_copy(update={"id": JOB_ID, "history": history})


LINUX = VmManifest(
    vm_id="vm-1",
    name="web 1 / front",
    cpu_count=4,
    cores_per_socket=2,
    memory_bytes=4 * GIB,
    guest_os=GuestOs(family="linux"),
    disks=(disk("data"), disk("system", boot_order=1)),
    nics=(
        Nic(key="n1", mac="00:50:56:AB:cd:01", model="vmxnet3", network="VM Network"),
        Nic(key="n2", network="Storage", connected=False),
    ),
)
WINDOWS = VmManifest(
    vm_id="vm-2",
    name="win",
    firmware="uefi",
    secure_boot=True,
    tpm=True,
    cpu_count=2,
    memory_bytes=8 * GIB,
    guest_os=GuestOs(family="windows"),
    disks=(disk("c"),),
    nics=(Nic(key="n1", mac="00:15:5d:01:02:03", network="lan"),),
)
WINDOWS_XP = VmManifest(
    vm_id="vm-4",
    name="till",
    uuid="564d4f4e-0000-4000-8000-0123456789ab",
    tpm=True,
    guest_os=GuestOs(family="windows", id="winXPProGuest", name="Microsoft Windows XP Professional (32-bit)"),
    disks=(*(disk(f"ide{number}", bus="ide") for number in range(5)),),
    nics=(Nic(key="n1", mac="00:0c:29:01:02:03", model="vlance", network="lan"),),
)
OTHER = VmManifest(vm_id="vm-3", name="appliance", disks=(disk("one"),), nics=(Nic(key="n1"),))
SYSTEM = Host("kvm", "/log/{uuid}.log", "network:default", "network", HOST.uefi, HOST.uefi_secure, tpm=True)
WITH_TPM = replace(HOST, tpm=True)

CASES: dict[str, Callable[[], str]] = {
    "linux": lambda: (
        build(fixed(LINUX, network_map=[NetworkMap(source="Storage", target="bridge:br0")]), volumes(LINUX), HOST).xml
    ),
    "windows-kvm": lambda: (
        build(
            fixed(WINDOWS, prepared=True, network_map=[NetworkMap(source="lan", target="office")]),
            volumes(WINDOWS, device_type="block"),
            SYSTEM,
        ).xml
    ),
    "other": lambda: build(fixed(OTHER), volumes(OTHER), HOST).xml,
    "sata-after-virtio": lambda: build(climbed(fixed(LINUX), "virtio", "scsi", "sata"), volumes(LINUX), HOST).xml,
    "uefi-secure-tcg": lambda: build(fixed(WINDOWS, prepared=True), volumes(WINDOWS), WITH_TPM).xml,
    "windows-xp": lambda: build(fixed(WINDOWS_XP), volumes(WINDOWS_XP), WITH_TPM).xml,
    "scsi": lambda: build(fixed(LINUX, disk_bus="scsi", name="renamed", cpu_count=3), volumes(LINUX), HOST).xml,
    "ide": lambda: build(fixed(OTHER, disk_bus="ide"), volumes(OTHER), HOST).xml,
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """After a change that is meant: SYNVIRT_WRITE_GOLDEN=1 writes the new document there. Read it."""
    if os.environ.get("SYNVIRT_WRITE_GOLDEN"):
        (GOLDEN / f"{name}.xml").write_text(CASES[name]())
    assert CASES[name]() == (GOLDEN / f"{name}.xml").read_text()


@pytest.mark.parametrize("name", CASES)
def test_libvirt_accepts_it(name: str) -> None:
    need("xmllint", "libxml2-utils")  # virt-xml-validate calls it
    validate = need("virt-xml-validate", "libvirt-clients")
    done = subprocess.run([validate, str(GOLDEN / f"{name}.xml"), "domain"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXT = st.text(st.characters(exclude_categories=()), max_size=40)  # control characters and lone surrogates too
FAMILY = st.sampled_from(["windows", "linux", "other"])
MANIFESTS = st.builds(
    VmManifest,
    vm_id=st.just("x"),
    name=TEXT,
    cpu_count=st.integers(-1, 64),
    cores_per_socket=st.integers(-1, 9),
    memory_bytes=st.integers(0, 1 << 45),
    guest_os=st.builds(GuestOs, family=FAMILY),
    disks=st.lists(TEXT, unique=True, max_size=30).map(lambda keys: tuple(disk(key) for key in keys)),
    nics=st.lists(st.builds(Nic, key=TEXT, mac=st.none() | TEXT, network=TEXT, model=TEXT), max_size=3).map(tuple),
)


def test_an_overlay_has_the_file_under_it_and_nothing_further() -> None:
    """libvirt would look into a chain that is not complete, and believe what a guest wrote there."""
    volumes = [Volume(one.key, f"/clones/{one.key}", "file", over=f"/volumes/{one.key}") for one in LINUX.disks]
    for volume, disk in zip(
        volumes, ET.fromstring(build(fixed(LINUX), volumes, HOST).xml).iterfind("devices/disk"), strict=True
    ):
        driver, beneath = disk.find("driver"), disk.find("backingStore")
        assert driver is not None
        assert beneath is not None
        assert driver.get("type") == "qcow2"
        assert [source.get("file") for source in disk.iter("source")] == [volume.path, volume.over]
        assert [one.get("type") for one in beneath.iterfind("format")] == ["raw"]
        assert [list(one) for one in beneath.iterfind("backingStore")] == [[]]


@given(MANIFESTS, st.lists(st.builds(NetworkMap, source=TEXT, target=TEXT), max_size=2), st.booleans())
def test_whatever_the_manifest_says_it_is_a_document_of_the_same_job(
    manifest: VmManifest, mapped: list[NetworkMap], prepared: bool
) -> None:
    migration = fixed(manifest, prepared=prepared).model_copy(
        update={
            "plan": job().plan.model_copy(
                update={"target": job().plan.target.model_copy(update={"network_map": tuple(mapped)})}
            )
        }
    )
    given_volumes = [Volume(one.key, f"/volumes/{number}", "file") for number, one in enumerate(manifest.disks)]
    domain = build(migration, given_volumes, HOST)
    assert domain == build(migration, list(reversed(given_volumes)), HOST)
    root = ET.fromstring(domain.xml.encode())
    assert root.findtext("uuid") == str(JOB_ID)
    assert root.findtext("name") == domain.name
    paths = [source.get("file") for source in root.findall("devices/disk/source")]
    assert paths == [volume.path for volume in given_volumes], "disks keep the manifest's order"
    assert len({target.get("dev") for target in root.findall("devices/disk/target")}) == len(given_volumes)
    assert len({serial.text for serial in root.findall("devices/disk/serial")}) == len(given_volumes)
    orders = sorted(int(boot.get("order", 0)) for boot in root.findall("devices/disk/boot"))
    assert orders == list(range(1, len(given_volumes) + 1))
    topology = root.find("cpu/topology")
    assert topology is not None
    assert int(topology.get("sockets", 0)) * int(topology.get("cores", 0)) == int(root.findtext("vcpu", "0")) >= 1


@pytest.mark.parametrize("name", ["till\r2", "till\r\n2", "till\n2", "till\r2\r"])
def test_a_title_is_one_line_for_libvirt(name: str) -> None:
    """Whoever reads XML takes a carriage return for the end of a line, which libvirt refuses there."""
    manifest = OTHER.model_copy(update={"name": name})
    assert ET.fromstring(build(fixed(manifest), volumes(manifest), HOST).xml).findtext("title") == "till 2"


@given(TEXT)
def test_a_safe_name_is_a_file_name_and_stays_what_it_is(wanted: str) -> None:
    name = safe_name(wanted, fallback="vm")
    assert name == safe_name(name, fallback="vm")
    assert 0 < len(name.encode()) <= NAME_LIMIT_BYTES + len("vm-")
    assert not set(name) & set("/\\ \n\0<>&'\"")
    assert name[0] not in "-."
    assert not name.isdecimal(), "virsh would take it for a number"


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("web 1 / front", "web-1-front"),
        ("..", "vm"),
        ("", "vm"),
        ("42", "vm-42"),
        ("Büro", "Büro"),
        ("driver", "vm-driver"),
    ],
)
def test_safe_names(wanted: str, name: str) -> None:
    assert safe_name(wanted, fallback="vm") == name


@pytest.mark.parametrize(
    ("asked", "why"),
    [("web2", "target.name asks for it"), ("web/2", "plain characters only"), ("\U0001f600", "plain characters only")],
)
def test_why_the_name_is_another_one(asked: str, why: str) -> None:
    """A name that libvirt does not take is not what the plan asks for."""
    domain = build(fixed(LINUX, name=asked), volumes(LINUX), HOST)
    assert [why in one.why for one in domain.differences if one.what == "name"] == [True]


# ── choices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("family", "prepared", "bus", "nic"),
    [
        ("linux", False, "virtio", "virtio"),
        ("windows", False, "sata", "e1000e"),
        ("windows", True, "virtio", "virtio"),
        ("other", False, "sata", "e1000e"),
    ],
)
def test_devices_are_those_the_guest_has_drivers_for(family: str, bus: str, nic: str, *, prepared: bool) -> None:
    manifest = VmManifest(vm_id="x", name="x", guest_os=GuestOs(family=family), disks=(disk("a"),), nics=(Nic(key="n"),))
    root = ET.fromstring(build(fixed(manifest, prepared=prepared), volumes(manifest), HOST).xml)
    assert [target.get("bus") for target in root.findall("devices/disk/target")] == [bus]
    assert [model.get("type") for model in root.findall("devices/interface/model")] == [nic]


@pytest.mark.parametrize("bus", BUSES)
def test_the_plan_chooses_the_bus(bus: str) -> None:
    root = ET.fromstring(build(fixed(LINUX, disk_bus=bus), volumes(LINUX), HOST).xml)
    assert {target.get("bus") for target in root.findall("devices/disk/target")} == {bus}


def test_a_bus_that_libvirt_lacks_becomes_one_that_boots() -> None:
    domain = build(fixed(LINUX, disk_bus="nvme"), volumes(LINUX), HOST)
    root = ET.fromstring(domain.xml)
    assert {target.get("bus") for target in root.findall("devices/disk/target")} == {"virtio"}
    assert any("target.disk_bus" in one.why for one in domain.differences)


@pytest.mark.parametrize("secure", [True, False])
def test_uefi_without_firmware_on_the_host_names_the_package(secure: bool) -> None:
    manifest = LINUX.model_copy(update={"firmware": "uefi", "secure_boot": secure})
    with pytest.raises(DomainDefineFailed) as caught:
        build(fixed(manifest), [], Host("tcg", "/log/{uuid}"))
    assert "ovmf" in str(caught.value.hint)


def test_a_volume_of_no_disk_is_our_own_mistake() -> None:
    with pytest.raises(Internal):
        build(fixed(LINUX), [Volume("nothing", "/x", "file")], HOST)


def test_a_job_without_a_manifest_has_no_domain_yet() -> None:
    with pytest.raises(Internal):
        build(job().model_copy(update={"manifest": None}), [], HOST)


def test_a_skipped_disk_is_left_out() -> None:
    root = ET.fromstring(build(fixed(LINUX), volumes(LINUX)[1:], HOST).xml)
    assert [source.get("file") for source in root.findall("devices/disk/source")] == ["/volumes/system"]


def test_twenty_seven_disks_have_the_names_that_linux_gives() -> None:
    manifest = LINUX.model_copy(update={"disks": tuple(disk(str(number)) for number in range(28))})
    root = ET.fromstring(build(fixed(manifest), volumes(manifest), HOST).xml)
    names = [target.get("dev") for target in root.findall("devices/disk/target")]
    assert (names[0], names[25], names[26], names[27]) == ("vda", "vdz", "vdaa", "vdab")


@pytest.mark.parametrize("mac", [None, "", "01:00:5e:00:00:01", "00:50:56:ab:cd", "x" * 17])
def test_a_mac_that_no_card_can_have_is_replaced_by_one_that_stays(mac: str | None) -> None:
    manifest = OTHER.model_copy(update={"nics": (Nic(key="a", mac=mac), Nic(key="b", mac=mac))})
    root = ET.fromstring(build(fixed(manifest), volumes(manifest), HOST).xml)
    first, second = (one.get("address", "") for one in root.findall("devices/interface/mac"))
    assert first.startswith("52:54:00:")
    assert first != second


@pytest.mark.parametrize(
    ("target", "host", "kind", "name"),
    [
        ("user", HOST, "user", None),
        ("bridge:br1", HOST, "bridge", "br1"),
        ("network:lan", HOST, "network", "lan"),
        ("br1", HOST, "bridge", "br1"),
        ("lan", SYSTEM, "network", "lan"),
        (None, HOST, "user", None),
        (None, SYSTEM, "network", "default"),
    ],
)
def test_networks(target: str | None, host: Host, kind: str, name: str | None) -> None:
    mapped = [] if target is None else [NetworkMap(source="", target=target)]
    root = ET.fromstring(build(fixed(OTHER, network_map=mapped), volumes(OTHER), host).xml)
    interface = root.find("devices/interface")
    assert interface is not None
    source = interface.find("source")
    assert (interface.get("type"), None if source is None else source.get(kind)) == (kind, name)


def test_the_mark_of_a_job_is_read_back() -> None:
    domain = build(fixed(OTHER), volumes(OTHER), HOST)
    facts = identity_of(domain.xml)
    assert (facts.job_id, facts.bus, facts.name, facts.uuid) == (str(JOB_ID), "sata", domain.name, domain.uuid)
    forged = f"<domain><title>synvirt:job id='{JOB_ID}' bus='sata'</title><uuid>{JOB_ID}</uuid></domain>"
    assert identity_of(forged).job_id is None, "what stands in a text is no mark"


@pytest.mark.parametrize(("count", "controllers"), [(1, 1), (7, 1), (8, 2), (15, 3)])
def test_each_controller_of_scsi_disks_is_virtios(count: int, controllers: int) -> None:
    """libvirt adds those that are missing by itself, as LSI Logic's, which most guests have no driver for."""
    manifest = OTHER.model_copy(update={"disks": tuple(disk(f"d{number}") for number in range(count))})
    root = ET.fromstring(build(fixed(manifest, disk_bus="scsi"), volumes(manifest), HOST).xml)
    found = [(one.get("index"), one.get("model")) for one in root.iterfind("devices/controller")]
    assert found == [(str(number), "virtio-scsi") for number in range(controllers)]


def test_the_least_memory_is_what_something_boots_with() -> None:
    manifest = OTHER.model_copy(update={"memory_bytes": 0})
    assert f">{64 * MIB}<" in build(fixed(manifest), volumes(manifest), HOST).xml


# ── the ladder ───────────────────────────────────────────────────────────────────────────────────────────────────────


def guest(family: str, name: str = "", *, bus: DiskBus = "scsi", firmware: str = "bios") -> VmManifest:
    os = GuestOs(family=family, name=name)
    return VmManifest(vm_id="x", name="x", guest_os=os, disks=(disk("a", bus=bus),), firmware=firmware)


@pytest.mark.parametrize(
    ("manifest", "prepared", "rungs"),
    [
        (guest("linux", "Debian GNU/Linux 12 (64-bit)"), False, "virtio scsi sata ide"),
        (guest("linux", firmware="uefi"), False, "virtio scsi sata"),
        (guest("linux", "CentOS 4/5 or later (64-bit)"), False, "virtio scsi sata ide"),
        (guest("linux", "Red Hat Enterprise Linux 4 (32-bit)"), False, "ide sata"),
        (guest("windows", "Microsoft Windows Server 2022 (64-bit)"), True, "virtio scsi sata ide"),
        (guest("windows", "Microsoft Windows Server 2022 (64-bit)"), False, "sata virtio scsi ide"),
        (guest("windows", "Microsoft Windows Server 2003 Standard"), False, "ide sata"),
        (guest("windows", "Microsoft Windows 2000"), False, "ide sata"),
        (guest("other", bus="virtio"), False, "virtio sata scsi ide"),
        (guest("other", bus="ide"), False, "ide sata virtio scsi"),
        (guest("other", bus="nvme"), False, "sata virtio scsi ide"),
        (guest("other", bus="ide", firmware="uefi"), False, "sata virtio scsi"),
        (guest("other", "MS-DOS"), False, "ide sata"),
    ],
)
def test_the_ladder_begins_with_what_the_guest_should_boot_from(manifest: VmManifest, rungs: str, *, prepared: bool) -> None:
    assert " ".join(ladder(fixed(manifest, prepared=prepared))) == rungs


def test_a_bus_that_the_plan_names_is_the_whole_ladder() -> None:
    assert ladder(fixed(LINUX, disk_bus="sata")) == ("sata",)
    assert ladder(fixed(LINUX, disk_bus="nvme")) == ladder(fixed(LINUX)), "a bus that libvirt has not is no choice"
    uefi = LINUX.model_copy(update={"firmware": "uefi"})
    assert ladder(fixed(uefi, disk_bus="ide")) == ("ide",), "by the older chipset"
    secure = uefi.model_copy(update={"secure_boot": True})
    assert ladder(fixed(secure, disk_bus="ide")) == ("sata",), "Secure Boot has no IDE"


def test_each_rung_has_cards_that_go_with_it() -> None:
    migration = fixed(LINUX)
    seen = []
    for rungs in (("virtio",), ("virtio", "scsi"), ("virtio", "scsi", "sata"), ("virtio", "scsi", "sata", "ide")):
        root = ET.fromstring(build(climbed(migration, *rungs), volumes(LINUX), HOST).xml)
        machine = root.find("os/type")
        assert machine is not None
        models = {one.get("type") for one in root.findall("devices/interface/model")}
        buses = {one.get("bus") for one in root.findall("devices/disk/target")}
        seen.append((machine.get("machine"), *buses, *models))
    assert seen == [
        ("q35", "virtio", "virtio"),
        ("q35", "scsi", "virtio"),
        ("q35", "sata", "e1000e"),
        ("pc", "ide", "e1000"),
    ]


# ── differences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def differences(migration: Migration, host: Host = HOST) -> dict[str, tuple[str, str]]:
    assert migration.manifest is not None
    found = build(migration, volumes(migration.manifest), host).differences
    assert all(one.why for one in found)
    return {one.what: (one.source, one.here) for one in found}


def test_what_is_as_it_was_is_no_difference() -> None:
    same = VmManifest(
        vm_id="x",
        name="same",
        guest_os=GuestOs(family="linux"),
        disks=(disk("a", bus="virtio"),),
        nics=(Nic(key="n", mac="52:54:00:00:00:01", model="virtio", network="user"),),
    )
    assert differences(fixed(same)) == {}


def test_every_difference_is_listed_with_its_reason() -> None:
    found = differences(fixed(WINDOWS_XP, name="till 2", cpu_count=2, memory_bytes=2 * GIB), WITH_TPM)
    assert found == {
        "name": ("till", "till-2"),
        "processors": ("1", "2"),
        "memory": ("1024 MiB", "2048 MiB"),
        "tpm": ("a TPM with its secrets", "an empty TPM 2.0"),
        "bus of disk ide4": ("ide", "sata"),
        "model of network card n1": ("vlance", "pcnet"),
        "network of network card n1": ("lan", "user"),
    }
    assert differences(fixed(WINDOWS_XP, memory_bytes=2048 * GIB))["memory"][1] == "2097152 MiB", "as a person writes it"
    assert differences(fixed(WINDOWS))["tpm"] == ("a TPM with its secrets", "none")
    assert "uefi variables" in differences(fixed(WINDOWS))


def test_a_bus_that_was_climbed_to_says_what_it_was_tried_on() -> None:
    found = build(climbed(fixed(LINUX), "virtio", "scsi"), volumes(LINUX), HOST).differences
    assert not any(one.what == "bus of disk data" for one in found), "scsi is what it had"
    sata = build(climbed(fixed(LINUX), "virtio", "scsi", "sata"), volumes(LINUX), HOST).differences
    (why,) = [one.why for one in sata if one.what == "bus of disk data"]
    assert "did not boot from scsi" in why
