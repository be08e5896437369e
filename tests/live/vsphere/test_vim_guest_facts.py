"""What VMware Tools say of a guest, as facts that those of an agent are compared with."""

from types import SimpleNamespace as Told
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pyVmomi import vim

from synvirt.live.vsphere.guest_facts import DETAILED, guest_facts
from synvirt.model.facts import FACTS_MAX
from synvirt.proof.sameness import compared

DATA = (
    "architecture='X86' bitness='64' distroName='Debian GNU/Linux' prettyName='Debian GNU/Linux 12 (bookworm)' "
    "kernelVersion='6.1.0-30-amd64'"
)


def running(**more: Any) -> dict[str, Any]:
    address = vim.net.IpConfigInfo.IpAddress(ipAddress="10.77.0.5", prefixLength=24)
    local = vim.net.IpConfigInfo.IpAddress(ipAddress="fe80::5", prefixLength=64)
    return {
        "guest.toolsRunningStatus": "guestToolsRunning",
        "guest.hostName": "web01.example",
        "guest.net": [
            vim.vm.GuestInfo.NicInfo(
                macAddress="00:50:56:77:00:05", ipConfig=vim.net.IpConfigInfo(ipAddress=[address, local]), connected=True
            )
        ],
        "guest.disk": [vim.vm.GuestInfo.DiskInfo(diskPath="/", capacity=10_000, freeSpace=4_000)],
        "config.extraConfig": [vim.option.OptionValue(key=DETAILED, value=DATA)],
        **more,
    }


def test_what_tools_say() -> None:
    assert guest_facts(running()) == {
        "host name": "web01.example",
        "system": "Debian GNU/Linux 12 (bookworm)",
        "kernel": "6.1.0-30-amd64",
        "file system /": ", 6000 of 10000 bytes",
        "addresses of 00:50:56:77:00:05": "10.77.0.5/24",
    }


def test_a_guest_without_tools_says_nothing() -> None:
    assert guest_facts(running(**{"guest.toolsRunningStatus": "guestToolsNotRunning"})) == {}
    assert guest_facts({}) == {}


def test_the_agent_of_the_same_guest_says_the_same() -> None:
    """QEMU's agent leaves out what only root may use, and tells the kind of a file system."""
    agent = {
        "host name": "web01",
        "system": "Debian GNU/Linux 12 (bookworm)",
        "kernel": "6.1.0-30-amd64",
        "file system /": "ext4, 6010 of 9500 bytes",
        "addresses of 00:50:56:77:00:05": "10.77.0.5/24",
    }
    assert {one.grade for one in compared(guest_facts(running()), agent, ())} == {"same", "expected"}


WORD = st.text(max_size=300)


@given(WORD, WORD, WORD, st.integers(0, 300))
def test_a_guest_says_what_it_likes(name: str, path: str, detailed: str, count: int) -> None:
    disks = [Told(diskPath=f"{path}{number}", capacity=9, freeSpace=None, filesystemType=detailed) for number in range(count)]
    extra = [Told(key=DETAILED, value=detailed)]
    found = guest_facts(running(**{"guest.hostName": name, "guest.disk": disks, "config.extraConfig": extra}))
    assert len(found) <= FACTS_MAX
    assert all(len(value) < 300 for value in found.values())
