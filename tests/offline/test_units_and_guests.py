"""Sizes and guest names in every spelling."""

import pytest

from synvirt.errors import MalformedArchive
from synvirt.machines.guest_os import _CIM_NAMES, family, guest_os
from synvirt.offline.units import quantity_bytes, unit_bytes


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("byte", 1),
        ("bytes", 1),
        ("Bytes", 1),
        ("byte * 2^10", 1 << 10),
        ("byte * 2^20", 1 << 20),
        ("byte*2^20", 1 << 20),
        ("byte * 2 ^ 30", 1 << 30),
        ("byte * 2^40", 1 << 40),
        ("byte * 10^9", 10**9),
        ("byte * 1024", 1024),
        ("bytes * 1024 * 1024", 1 << 20),
        ("2^20", 1 << 20),
        ("KiloBytes", 1 << 10),
        ("MegaBytes", 1 << 20),
        ("Megabyte", 1 << 20),
        ("GigaBytes", 1 << 30),
        ("TeraBytes", 1 << 40),
        ("KB", 1 << 10),
        ("MB", 1 << 20),
        ("MiB", 1 << 20),
        ("GB", 1 << 30),
        ("GiB", 1 << 30),
        (" gb ", 1 << 30),
        ("GBytes", 1 << 30),
        ("byte * 2^10 * 2^10", 1 << 20),
        ("Byte(s)", 1),
        ("Tebibytes", 1 << 40),
        ("byte\t*\n2^20", 1 << 20),
    ],
)
def test_units(units: str, expected: int) -> None:
    assert unit_bytes(units) == expected


@pytest.mark.parametrize(
    "units", ["hertz * 10^6", "byte * ", "", "byte * 2^99", "byte ^ 2", "byte * -1", "9999^99", "0", "byte * 2^2000"]
)
def test_what_is_no_unit_of_bytes(units: str) -> None:
    with pytest.raises(ValueError):
        unit_bytes(units)


def test_fractions_of_a_unit() -> None:
    assert quantity_bytes("1.5", "GigaBytes", "disk") == 3 << 29


@pytest.mark.parametrize("quantity", ["", "-1", "1e9", "1_000", "0x10", "1,5", "٣", "9" * 21])
def test_what_is_no_quantity(quantity: str) -> None:
    with pytest.raises(MalformedArchive, match="disk 'a'"):
        quantity_bytes(quantity, "byte", "disk 'a'")


@pytest.mark.parametrize(
    ("cim_id", "vendor_id", "description", "family"),
    [
        ("112", "windows2019srv_64Guest", "Microsoft Windows Server 2016 or later (64-bit)", "windows"),
        ("1", "windows9_64Guest", "", "windows"),
        ("1", "winNetEnterpriseGuest", "", "windows"),
        ("1", "win2000ServGuest", "", "windows"),
        ("1", "winXPProGuest", "", "windows"),
        ("1", "winLonghorn64Guest", "", "windows"),
        ("1", "windows11_64Guest", "", "windows"),
        ("0", "Windows11_64", "", "windows"),
        ("0", "Win2K22", "", "windows"),
        ("0", "", "Windows Server 2022 (64-bit)", "windows"),
        ("103", "", "", "windows"),
        ("67", "", "", "windows"),
        ("0", "windows_2022x64", "", "windows"),
        ("94", "ubuntu64Guest", "Ubuntu Linux (64-bit)", "linux"),
        ("101", "otherLinux64Guest", "", "linux"),
        ("101", "", "", "linux"),
        ("1", "rhel8_64Guest", "", "linux"),
        ("1", "sles15_64Guest", "", "linux"),
        ("1", "oracleLinux8_64Guest", "", "linux"),
        ("1", "vmwarePhoton64Guest", "", "linux"),
        ("1", "amazonlinux2_64Guest", "", "linux"),
        ("1", "other5xLinux64Guest", "", "linux"),
        ("1", "debian11_64Guest", "", "linux"),
        ("96", "Debian_64", "", "linux"),
        ("0", "", "rhel_8x64", "linux"),
        ("1", "freebsd13_64Guest", "", "other"),
        ("1", "darwin19_64Guest", "", "other"),
        ("104", "vmkernel7Guest", "VMware ESXi 7.0 or later", "other"),
        ("42", "", "", "other"),
        ("1", "", "Other", "other"),
        ("", "", "", "other"),
        ("999999999999", "", "", "other"),
    ],
)
def test_guest_families(cim_id: str, vendor_id: str, description: str, family: str) -> None:
    assert guest_os(cim_id=cim_id, vendor_id=vendor_id, description=description).family == family


@pytest.mark.parametrize(
    ("cim_id", "vendor_id", "description", "name"),
    [
        ("94", "", "", "Ubuntu 64-Bit"),
        ("105", "", "", "Microsoft Windows 7"),
        ("94", "ubuntu64Guest", "", "ubuntu64Guest"),
        ("94", "", "Ubuntu 24.04", "Ubuntu 24.04"),
        ("1", "", "", ""),
        ("114", "", "", ""),
    ],
)
def test_a_number_without_a_name_is_named(cim_id: str, vendor_id: str, description: str, name: str) -> None:
    found = guest_os(cim_id=cim_id, vendor_id=vendor_id, description=description)
    assert (found.id, found.name) == (vendor_id or cim_id, name)


def test_a_named_number_has_the_family_of_its_name() -> None:
    for cim_id, name in _CIM_NAMES.items():
        assert family(cim_id) == family(cim_id, name), cim_id


def test_darwin_is_not_windows_for_its_last_three_letters() -> None:
    assert guest_os(vendor_id="darwin64Guest").family == "other"
