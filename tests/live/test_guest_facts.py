"""What each platform says of a guest, in the names that all facts have. VMware's is in test_vim_guest_facts.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.live.hyperv.guest_facts import guest_facts as by_integration_services
from synvirt.live.proxmox.guest_facts import guest_facts as by_proxmox
from synvirt.live.xen.guest_facts import guest_facts as by_xen_tools
from synvirt.proof.sameness import compared

MAC = "52:54:00:77:00:05"
# The same guest by QEMU's agent, once it runs here.
HERE = {
    "host name": "web01",
    "system": "Debian GNU/Linux 12 (bookworm)",
    "kernel": "6.1.0-30-amd64",
    f"addresses of {MAC}": "10.77.0.5/24, fd00::5/64",
    "service nginx.service": "runs",
}
METRICS = {
    "os_version": {"name": "Debian GNU/Linux 12 (bookworm)", "uname": "6.1.0-30-amd64", "distro": "debian", "major": "12"},
    "networks": {
        "0/ip": "10.77.0.5",
        "0/ipv4/0": "10.77.0.5",
        "0/ipv6/0": "fe80::5",
        "0/ipv6/1": "fd00::5",
        "7/ip": "10.0.0.1",
    },
    "other": {"host_name": "web01", "platform-feature-xs_reset_watches": "1"},
}
PAIRS = {
    "FullyQualifiedDomainName": "web01.example",
    "OSName": "Debian GNU/Linux 12 (bookworm)",
    "OSBuildNumber": "6.1.0-30-amd64",
    "OSVersion": "12",
}
DOCUMENTS = {
    "get-host-name": {"host-name": "web01"},
    "get-osinfo": {"pretty-name": "Debian GNU/Linux 12 (bookworm)", "kernel-release": "6.1.0-30-amd64"},
    "network-get-interfaces": [
        {
            "hardware-address": MAC,
            "ip-addresses": [{"ip-address": "10.77.0.5", "prefix": 24}, {"ip-address": "fd00::5", "prefix": 64}],
        }
    ],
}


@pytest.mark.parametrize(
    "reported",
    [
        by_xen_tools(METRICS, {"0": MAC.upper()}),
        by_integration_services(PAIRS, [(MAC, ("10.77.0.5", "fe80::5", "fd00::5"))]),
        by_proxmox(DOCUMENTS.get),
    ],
    ids=["xen", "hyperv", "proxmox"],
)
def test_a_moved_guest_has_the_facts_that_its_platform_gave(reported: dict[str, str]) -> None:
    assert {"host name", "system", "kernel", f"addresses of {MAC}"} == reported.keys()
    rows = compared(reported, HERE, ())
    assert {one.grade for one in rows} <= {"same", "expected"}, rows
    assert len(rows) == 4
    other = {**HERE, "host name": "localhost", f"addresses of {MAC}": "169.254.0.1/16"}
    assert {one.item for one in compared(reported, other, ()) if one.grade == "wrong"} == {"host name", f"addresses of {MAC}"}


def test_windows_by_its_integration_services_and_by_xens_tools() -> None:
    pairs = {"OSName": "Windows Server 2022 Standard", "OSVersion": "10.0.20348", "OSBuildNumber": "20348"}
    assert by_integration_services(pairs, ()) == {"system": "Windows Server 2022 Standard", "kernel": "10.0.20348"}
    name = r"Windows Server 2022 Standard|C:\Windows|\Device\Harddisk0\Partition2"
    assert by_xen_tools({"os_version": {"name": name}}, {}) == {"system": "Windows Server 2022 Standard"}


def test_a_guest_without_tools_says_nothing() -> None:
    assert by_xen_tools({}, {"0": MAC}) == {}
    assert by_integration_services({}, [(MAC, ("10.77.0.5",))]) == {}
    assert by_proxmox(lambda question: None) == {}


TEXT = st.text(max_size=300)
ANYTHING = st.recursive(st.none() | st.integers() | TEXT, lambda inner: st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)


@given(st.dictionaries(st.sampled_from([*METRICS]), ANYTHING), st.dictionaries(st.sampled_from([*PAIRS]), TEXT), TEXT)
def test_a_guest_writes_what_it_likes(metrics: dict[str, object], pairs: dict[str, str], address: str) -> None:
    for found in (by_xen_tools(metrics, {"0": MAC}), by_integration_services(pairs, [(MAC, (address,))])):
        assert all(value.isprintable() and len(value) <= 200 for value in found.values())
