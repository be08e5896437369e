"""Why a guest is held up, and what has no room, with domains that the test plays. tests/real/hypervisor has a real one."""

from pathlib import Path

import pytest

from synvirt.hypervisor import Paused, eyes, held_up
from synvirt.hypervisor.boot import Lost, Watch
from synvirt.kvm.connection import load


class Domain:
    """Of two disks, the second of which has this source and this trouble."""

    def __init__(self, source: str, trouble: str = "NO_SPACE") -> None:
        self._source, self._trouble = source, getattr(load(), f"VIR_DOMAIN_DISK_ERROR_{trouble}")

    def state(self) -> list[int]:
        libvirt = load()
        return [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR]

    def diskErrors(self) -> dict[str, int]:  # noqa: N802 - libvirt's own
        return {"vdb": self._trouble}

    def XMLDesc(self) -> str:  # noqa: N802 - libvirt's own
        disks = (("vda", "file='/elsewhere/first.raw'"), ("vdb", self._source))
        shown = "".join(f"<disk><source {source}/><target dev='{target}'/></disk>" for target, source in disks)
        return f"<domain><devices>{shown}</devices></domain>"


@pytest.mark.parametrize(
    ("source", "full"),
    [
        ("file='/proc/nowhere/0-top.qcow2'", "the file system at /proc (0-top.qcow2)"),
        ("dev='/dev/zvol/tank/synvirt/disk'", "/dev/zvol/tank/synvirt/disk"),
        ("protocol='rbd' name='pool/disk'", "pool/disk"),
        ("", "vdb"),
    ],
)
def test_what_has_no_room_is_named(source: str, full: str, tmp_path: Path) -> None:
    domain = Domain(source)
    assert held_up.why(domain) == Paused(full)
    seen = eyes.look(domain, tmp_path / "console.log", at_s=3, resets=0)
    lost = Watch("any", 600, 60).judge(seen)
    assert isinstance(lost, Lost)
    assert (lost.full, lost.other_bus_may_help) == (True, False)
    assert lost.trouble == f"was paused: what it writes has no room in {full}"


def test_another_trouble_is_no_lack_of_room(tmp_path: Path) -> None:
    domain = Domain("file='/proc/nowhere/0-top.qcow2'", "UNSPEC")
    assert held_up.why(domain) == Paused()
    seen = eyes.look(domain, tmp_path / "console.log", at_s=3, resets=0)
    assert (seen.full, seen.trouble) == (False, "was paused, since a volume could not be read or written")
