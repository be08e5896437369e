"""How the settings become the house."""

import socket
from pathlib import Path

import pytest

from synvirt.errors import Conflict, DiskWriteFailed
from synvirt.main.destinations import make_destinations
from synvirt.main.running import service
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


def test_who_cannot_listen_has_changed_nothing_and_shown_no_password(tmp_path: Path) -> None:
    """The password of the first start is shown once, and would be lost among the lines of the failure."""
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = Settings(data_dir=tmp_path, listen=f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(Conflict, match="in use by another program"), service(settings, announce=said.append):
            pytest.fail("it serves")
    assert said == []
    assert not (tmp_path / "keyring/users").exists()
    assert list(tmp_path.glob("migrator.db*")) == []
    assert not settings.socket_path.exists()
