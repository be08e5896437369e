"""How a guest gets onto its volume, with a domain that the test plays. tests/real/hypervisor has a real one."""

import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from synvirt.errors import DiskWriteFailed
from synvirt.hypervisor import Early, Volume
from synvirt.hypervisor.early import onto_volume, overlay
from synvirt.kvm.connection import load
from tests.needs import need_root

VOLUME = Volume("disk-0", "/volume", "file", Early("/top", "/between", "/socket"))


class Lost:
    """A domain of a libvirtd that was restarted: each call fails, and so does the look whether it runs."""

    def isActive(self) -> NoReturn:  # noqa: N802 - libvirt's own
        raise load().libvirtError("client socket is closed")


def test_an_overlay_without_room_says_where_room_is_needed(tmp_path: Path) -> None:
    """The hint of every other failure there is to give up, and so to lose what the guest wrote."""
    need_root("mount")
    small = tmp_path / "small"
    small.mkdir()
    source = tmp_path / "source.raw"
    with source.open("wb") as file:
        file.truncate(64 << 20)
    (tmp_path / "link").symlink_to(small)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=True)
    try:
        (small / "fills").write_bytes(bytes(60 << 10))
        with pytest.raises(DiskWriteFailed, match="No space left") as caught:
            overlay(str(tmp_path / "link/top.qcow2"), str(source), 64 << 20)
        assert caught.value.hint == f"free space in the file system at {small} (top.qcow2)"
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def test_a_connection_that_is_lost_is_an_error_of_ours() -> None:
    with pytest.raises(DiskWriteFailed, match="disk-0 does not get onto its volume") as caught:
        onto_volume(Lost, VOLUME, lambda path: None, lambda: False)
    assert "tried again" in (caught.value.hint or "")
