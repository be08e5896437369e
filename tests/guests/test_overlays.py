"""A conversion's overlays, by the real qemu-img."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.guests import AdoptFailed, overlays
from synvirt.sizes import MIB
from tests.needs import need

MARK = b"\xa5" * MIB


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid():
        pytest.skip("needs root, to mount a small tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_destination_is_named_and_takes_the_same_overlay_later(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("qemu-img", "qemu-utils")
    monkeypatch.setattr(overlays, "ROOM_BYTES", 0)
    volume, filling = small / "volume.raw", small / "filling"
    volume.touch()
    os.truncate(volume, 16 * MIB)
    (overlay,) = overlays.lay(tmp_path / "conversion", [str(volume)], {})
    commands = [part for at in (1, 5, 9) for part in ("-c", f"write -q -P 0xa5 {at * MIB} {MIB}")]
    subprocess.run(["qemu-io", "-f", "qcow2", *commands, str(overlay)], check=True)
    filling.write_bytes(bytes(MIB))
    with pytest.raises(AdoptFailed) as caught:
        overlays.take_over(tmp_path / "conversion", [str(volume)], {})
    assert "volume.raw" in caught.value.detail
    assert "No space left" in caught.value.detail
    assert "free space" in (caught.value.hint or "")
    assert str(tmp_path) not in caught.value.detail
    filling.unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", small], check=True)
    overlays.take_over(tmp_path / "conversion", [str(volume)], {})
    assert [at for at in range(16) if volume.read_bytes()[at * MIB : (at + 1) * MIB] == MARK] == [1, 5, 9]
