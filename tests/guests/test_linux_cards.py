"""The network cards that a Linux guest configures by their names, read from its file system."""

from pathlib import Path

import pytest

from synvirt.guests.inside.looking import facts_of
from synvirt.sizes import MIB
from tests.guests.linux_trees import planted
from tests.guests.test_linux_devices import ext4

DEFAULT = "usr/lib/systemd/network/99-default.link"
INTERFACES = """
# auto eth9
auto lo ens19
allow-hotplug ens20
iface ens18 inet static
    address 10.0.0.1/24
iface ens21.100 inet manual
iface br0 inet dhcp
    bridge_ports ens22
"""
NETPLAN = """
network:
  version: 2
  ethernets:
    ens160:
      dhcp4: true
    "ens161": {dhcp4: true}
    ens192: {match: {macaddress: "00:50:56:00:00:01"}}
    enp0s3:
      match:
        macaddress: "08:00:27:00:00:01"

      set-name: enp0s3
    # ens999:
    lan: {match: {name: "en*"}}
  bonds:
    bond0: {interfaces: [ens224]}
"""


def configured(tmp_path: Path, **files: str) -> dict[str, str]:
    """The cards that a guest with these files configures, by their paths; `-> ` begins a link."""
    tree, image = planted(tmp_path / "tree"), tmp_path / "disk.img"
    for old in ("etc/netplan/50.yaml", "etc/network/interfaces"):
        (tree / old).unlink()
    for path, text in {DEFAULT: "[Link]\n", **files}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            (tree / path).symlink_to(text[3:])
        elif text:
            (tree / path).write_text(text)
    ext4(image, tree)
    found = facts_of([str(image)])
    return {fact.removeprefix("configures "): value for fact, value in found.items() if fact.startswith("configures ")}


@pytest.mark.parametrize(
    ("path", "text", "names"),
    [
        ("etc/netplan/50-cloud-init.yaml", NETPLAN, {"ens160", "ens161"}),
        ("etc/netplan/50.yaml.bak", NETPLAN, set()),
        ("etc/network/interfaces", INTERFACES, {"ens18", "ens19", "ens20", "ens21"}),
        ("etc/network/interfaces.d/50", "iface eth0 inet6 auto\n", {"eth0"}),
        (
            "etc/systemd/network/10.network",
            "[Match]\nName=ens3 enp1s0f1\n# Name=eth1\n[Network]\nDHCP=yes\n",
            {"ens3", "enp1s0f1"},
        ),
        ("etc/systemd/network/10.network", "[Match]\nName=en*\n", set()),
        ("etc/NetworkManager/system-connections/a.nmconnection", "[connection]\ninterface-name=eno16777736\n", {"eno16777736"}),
        ("etc/NetworkManager/system-connections/a.nmconnection", "[ethernet]\nmac-address=00:50:56:00:00:01\n", set()),
        ("etc/sysconfig/network-scripts/ifcfg-x", 'TYPE=Ethernet\nDEVICE="enX0"\n', {"enX0"}),
        ("etc/sysconfig/network-scripts/ifcfg-x", "DEVICE=eth0\nHWADDR=00:50:56:00:00:01\n", set()),
        ("etc/sysconfig/network/ifcfg-eth1", "BOOTPROTO='dhcp'\n", {"eth1"}),
        ("etc/sysconfig/network/ifroute-eth1", "default 10.0.0.1\n", set()),
    ],
)
def test_the_names_in_each_format_are_read(tmp_path: Path, path: str, text: str, names: set[str]) -> None:
    assert configured(tmp_path, **{path: text}) == dict.fromkeys(names, f"/{path}")


ETH0 = {"etc/network/interfaces": "iface eth0 inet dhcp\n"}
RULE = 'SUBSYSTEM=="net", ACTION=="add", ATTR{address}=="00:50:56:00:00:01", NAME="eth0"\n'


@pytest.mark.parametrize(
    "files",
    [
        {DEFAULT: ""},
        {"etc/systemd/network/99-default.link": "-> /dev/null"},
        {"etc/udev/rules.d/80-net-setup-link.rules": "-> /dev/null"},
        {"etc/default/grub": 'GRUB_CMDLINE_LINUX="net.ifnames=0 biosdevname=0"\n'},
        {"etc/udev/rules.d/70-persistent-net.rules": RULE},
        {"etc/systemd/network/10.link": "[Match]\nMACAddress=00:50:56:00:00:01\n[Link]\nName=eth0\n"},
    ],
)
def test_names_that_do_not_come_from_a_place_count_for_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    """The kernel's own, which it counts, and those that are given by a MAC address."""
    assert configured(tmp_path, **ETH0, **files) == {}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"etc/default/grub": '# GRUB_CMDLINE_LINUX="net.ifnames=0"\n'},
        {"etc/udev/rules.d/70-persistent-net.rules": f"# {RULE}"},
        {"etc/udev/rules.d/70-persistent-net.rules": 'SUBSYSTEM=="net", DRIVERS=="hv_netvsc", NAME="eth0"\n'},
        {"etc/systemd/network/10.link": "[Match]\nDriver=hv_netvsc\n[Link]\nName=eth0\n"},
    ],
)
def test_names_that_come_from_a_place_count(tmp_path: Path, files: dict[str, str]) -> None:
    assert configured(tmp_path, **ETH0, **files) == {"eth0": "/etc/network/interfaces"}


def test_files_of_a_megabyte_of_empty_lines_are_read(tmp_path: Path) -> None:
    """A pattern that begins in each of them and goes on to the end would use up the reader's time, and nothing was read."""
    empty = "\n" * MIB
    folders = ("etc/network/interfaces.d/a", "etc/systemd/network/a.network", "etc/systemd/network/a.link")
    cards = {**dict.fromkeys(folders, empty), "etc/sysconfig/network-scripts/ifcfg-a": empty, "etc/lvm/lvm.conf": empty}
    assert configured(tmp_path, **ETH0, **cards) == {"eth0": "/etc/network/interfaces"}
