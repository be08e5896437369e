"""A file that has its name only when it is complete."""

import errno
import os
from pathlib import Path

import pytest

from synvirt.disks.raw.new_file import new_file
from synvirt.errors import Conflict, DiskWriteFailed

SIZE = 1 << 20


@pytest.fixture(params=["nameless", "hidden", "without links"], autouse=True)
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has files without a name, one that has not (NFS, some overlays), and one without hard links (FAT, exFAT)."""
    if request.param == "without links":

        def no_link(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "not permitted")

        monkeypatch.setattr(os, "link", no_link)
    if request.param != "nameless":
        really = os.open

        def refusing(path: object, flags: int, mode: int = 0o777, **more: object) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not supported")
            return really(path, flags, mode, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", refusing)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(path: Path, *, replace: bool = False) -> None:
    with new_file(path, SIZE, replace=replace) as writer:
        assert replace or not path.exists()
        writer.write(4096, memoryview(b"content"))


def test_it_appears_complete_with_the_modes_a_person_expects(tmp_path: Path) -> None:
    make(tmp_path / "disk.raw")
    assert names_in(tmp_path) == ["disk.raw"]
    expected = bytearray(SIZE)
    expected[4096:4103] = b"content"
    assert (tmp_path / "disk.raw").read_bytes() == expected
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "disk.raw").stat().st_mode == plain.stat().st_mode


def test_of_one_that_failed_nothing_is_left(tmp_path: Path) -> None:
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), new_file(tmp_path / "disk.raw", SIZE):
            raise error
    assert names_in(tmp_path) == []


def test_one_that_exists_is_replaced_only_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "disk.raw"
    path.write_text("precious")
    with pytest.raises(Conflict, match="already exists"), new_file(path, SIZE):
        pytest.fail("it was opened")
    assert path.read_text() == "precious"
    with pytest.raises(ValueError, match="half way"), new_file(path, SIZE, replace=True):
        raise ValueError("half way")
    assert path.read_text() == "precious"
    make(path, replace=True)
    assert path.stat().st_size == SIZE
    assert names_in(tmp_path) == ["disk.raw"]


def test_one_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "disk.raw"
    with pytest.raises(Conflict, match="already exists"), new_file(path, SIZE):
        path.write_text("somebody else's")
    assert path.read_text() == "somebody else's"
    assert names_in(tmp_path) == ["disk.raw"]


def test_a_folder_that_takes_no_file_is_named_without_its_path(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "disk.raw", Path("/proc/disk.raw")):
        with pytest.raises(DiskWriteFailed, match=r"disk\.raw cannot be made") as caught, new_file(path, SIZE):
            pytest.fail("it was opened")
        assert str(path.parent) not in caught.value.detail


def test_a_size_that_the_file_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(DiskWriteFailed, match="cannot be made"), new_file(tmp_path / "disk.raw", 1 << 62):
        pytest.fail("it was opened")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("replace", [False, True])
def test_its_name_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, replace: bool) -> None:
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append([one.name for one in os.scandir(descriptor)]))
    with new_file(tmp_path / "disk.raw", SIZE, replace=replace):
        pass
    assert synced == [["disk.raw"]]
