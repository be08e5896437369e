"""By what a guest is known: its UUID, the serial number of its machine, its MAC addresses."""

from xml.etree import ElementTree as ET

import pytest

from synvirt.kvm.identity import identity_of
from synvirt.model.machine import Family, GuestOs, Nic
from tests.fakes.hypervisor import HOST
from tests.hypervisor.test_domain_xml import JOB_ID, LINUX, OTHER, build, fixed, volumes


@pytest.mark.parametrize(
    ("uuid", "identity", "kept"),
    [
        ("564D4F4E-0000-4000-8000-0123456789AB", "keep", True),
        ("564D4F4E-0000-4000-8000-0123456789AB", "new", False),
        ("00000000-0000-0000-0000-000000000000", "keep", False),
        ("ffffffff-ffff-ffff-ffff-ffffffffffff", "keep", False),
        ("56 4d is no uuid", "keep", False),
        (None, "keep", False),
    ],
)
def test_the_uuid_that_licences_know_the_machine_by_is_kept(uuid: str | None, identity: str, *, kept: bool) -> None:
    manifest = OTHER.model_copy(update={"uuid": uuid})
    domain = build(fixed(manifest, identity=identity), volumes(manifest), HOST)
    assert domain.uuid == ((uuid or "").lower() if kept else str(JOB_ID))


@pytest.mark.parametrize("family", ["windows", "linux", "other"])
@pytest.mark.parametrize("reversed_for", [(), ("windows",), ("linux", "other"), ("windows", "linux", "other")])
def test_a_guest_reads_the_uuid_that_it_read_at_its_source(family: Family, reversed_for: tuple[Family, ...]) -> None:
    """As pyvmomi's issue 688 has it: vCenter names the first, its guest reads the second."""
    named, read = "421f245c-7fa8-60fa-6af6-a46351ced0eb", "5c241f42-a87f-fa60-6af6-a46351ced0eb"
    manifest = OTHER.model_copy(update={"uuid": named, "uuid_reversed_for": reversed_for, "guest_os": GuestOs(family=family)})
    domain = build(fixed(manifest), volumes(manifest), HOST)
    assert domain.uuid == (read if family in reversed_for else named)
    why = [(one.source, one.here, one.why) for one in domain.differences if one.what == "uuid"]
    said = [(named, read, "the guest reads it so there: its firmware has the bytes in another order")]
    assert why == (said if family in reversed_for else [])


def test_the_serial_number_that_inventories_know_the_machine_by_is_kept() -> None:
    serial = "VMware-42 3e fd 65 a7 3d e1 59-a5 6d dd 25 28 9f 8b 0c"
    manifest = OTHER.model_copy(update={"serial": serial})
    domain = build(fixed(manifest), volumes(manifest), HOST)
    root = ET.fromstring(domain.xml)
    assert root.findtext("sysinfo[@type='smbios']/system/entry[@name='serial']") == serial
    assert root.find("os/smbios[@mode='sysinfo']") is not None
    assert "serial number" not in {one.what for one in domain.differences}
    copy = build(fixed(manifest, identity="new"), volumes(manifest), HOST)
    assert "sysinfo" not in copy.xml
    assert [(one.source, one.here) for one in copy.differences if one.what == "serial number"] == [(serial, "none")]
    assert "sysinfo" not in build(fixed(OTHER), volumes(OTHER), HOST).xml


def test_a_mac_that_comes_twice_stays_with_the_first_card() -> None:
    mac = "00:50:56:00:00:01"
    manifest = OTHER.model_copy(update={"nics": (Nic(key="a", mac=mac), Nic(key="b", mac=mac))})
    assert mac in (macs := identity_of(build(fixed(manifest), volumes(manifest), HOST).xml).macs)
    assert len(macs) == 2


def test_an_address_of_zeros_is_no_cards_own() -> None:
    """Descriptions have it for an address that is still to be chosen; here the host's own loopback has it."""
    manifest = OTHER.model_copy(update={"nics": (Nic(key="a", mac="00:00:00:00:00:00"),)})
    [mac] = identity_of(build(fixed(manifest), volumes(manifest), HOST).xml).macs
    assert mac.startswith("52:54:00")


def test_a_new_identity_has_its_own_macs() -> None:
    domain = build(fixed(LINUX, identity="new"), volumes(LINUX), HOST)
    assert all(mac.startswith("52:54:00") for mac in identity_of(domain.xml).macs)
