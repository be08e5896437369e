"""The folder where a session keeps its secrets: its own while it lasts, and gone after."""

import fcntl
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.cage.scratch import sweep
from synvirt.live import SourceAccess
from synvirt.live import folder as session_folder
from synvirt.live.folder import private_folder
from synvirt.live.libvirt.form import FORM
from synvirt.live.libvirt.host import Host


def test_a_session_keeps_its_folder_and_takes_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_folder, "_folders", lambda: tmp_path)
    with private_folder() as folder:
        sweep(tmp_path)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_service_goes_at_a_start_and_not_at_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session is begun often, and the folder above is the host's own."""
    monkeypatch.setattr(session_folder, "_folders", lambda: tmp_path)
    left = tmp_path / "synvirt-live-abcdefgh.held"
    left.mkdir()
    with private_folder() as folder:
        assert {one.name for one in tmp_path.iterdir()} == {left.name, folder.name}
        session_folder.sweep_folders()
        assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("opened", [False, True], ids=["before it is opened", "before it is locked"])
def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """The sweep of a service that starts finds it unlocked, as a killed service would have left it."""
    monkeypatch.setattr(session_folder, "_folders", lambda: tmp_path)
    made: list[Path] = []
    make, lock = tempfile.mkdtemp, fcntl.flock

    def makes(**options: Any) -> str:
        folder: str = make(**options)
        made.append(Path(folder))
        if len(made) == 1 and not opened:
            made[0].rmdir()
        return folder

    def locks(descriptor: int, operation: int) -> None:
        if len(made) == 1:
            made[0].rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", makes)
    monkeypatch.setattr(fcntl, "flock", locks)
    with private_folder() as folder:
        assert folder == made[1] != made[0]
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_removed_whatever_becomes_of_the_rest_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory for the thread that says goodbye, and a tunnel does not close."""

    def broken(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(session_folder, "_folders", lambda: tmp_path)
    monkeypatch.setattr("synvirt.live.libvirt.host.within", broken)
    host: Any = Host(*FORM.read(SourceAccess("qemu:///system", {}, {})))
    host._folder = host._closing.enter_context(private_folder())
    host._open = object()
    closed: list[str] = []
    host._tunnels._open = {
        "broken": SimpleNamespace(close=broken),
        "whole": SimpleNamespace(close=lambda: closed.append("whole")),
    }
    with pytest.raises(RuntimeError):
        host.close()
    assert (list(tmp_path.iterdir()), closed) == ([], ["whole"])
    host.close()
