"""How the settings become the house."""

from pathlib import Path

import pytest

from synvirt.errors import DiskWriteFailed
from synvirt.main.destinations import make_destinations
from synvirt.settings import DirectorySetting, Settings, ZfsSetting


def test_the_settings_destinations_are_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zfs by default; where its pool is away the service starts all the same, and plans are refused for it."""
    monkeypatch.setenv("PATH", str(tmp_path))  # whatever this host has of zfs
    monkeypatch.setattr("synvirt.programs.ADMIN_PATHS", ())
    settings = Settings(
        data_dir=tmp_path,
        zfs_pool="tank",
        destinations={
            "fast": ZfsSetting(kind="zfs", pool="nvme", namespace="vms"),
            "archive": DirectorySetting(kind="directory", path=tmp_path / "archive"),
        },
    )
    made = make_destinations(settings)
    assert {name: one.kind for name, one in made.items()} == {
        "zfs": "zfs",
        "directory": "directory",
        "fast": "zfs",
        "archive": "directory",
    }
    assert next(iter(made)) == "zfs"
    with pytest.raises(DiskWriteFailed, match="zfs is not installed"):
        made["zfs"].free_bytes()
    assert made["archive"].free_bytes() > 0
