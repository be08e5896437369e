"""A driver image is unpacked once, for all conversions that read it."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import Cancelled
from synvirt.guests import driver_folder
from synvirt.guests.driver_folder import unpacked
from synvirt.guests.driver_image import Unreadable
from synvirt.programs import run
from tests.guests import phony_windows


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return phony_windows.driver_image(tmp_path / "virtio-win.iso", tmp_path / "work")


def never() -> bool:
    return False


def after(first: Callable[[Any], None], then: Callable[..., None]) -> Callable[..., None]:
    def both(one: Any, *rest: Any) -> None:
        first(one)
        then(one, *rest)

    return both


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_is_unpacked_once_and_again_where_it_has_changed(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(driver_folder, "_unpack", after(read.append, driver_folder._unpack))
    kept = tmp_path / "drivers"

    def use(_: int) -> dict[str, bytes]:
        with unpacked(image, kept, 0, never) as folder:
            return content(folder)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(use, range(8)))
    tree = content(tmp_path / "work" / "iso-virtio-win")
    assert tree
    assert found == [tree] * 8
    assert read == [image]
    (tmp_path / "work" / "iso-virtio-win" / "Balloon" / "2k22" / "amd64" / "balloon.sys").write_text("a newer driver")
    shutil.copytree(tmp_path / "work" / "iso-virtio-win", tmp_path / "work" / "again")
    with unpacked(image, kept, 0, never) as older:
        image.unlink()
        run(["genisoimage", "-quiet", "-J", "-r", "-o", str(image), str(tmp_path / "work" / "again")], timeout_s=60)
        with unpacked(image, kept, 0, never) as newer:
            assert content(newer) == content(tmp_path / "work" / "again") != tree
            assert content(older) == tree, "somebody reads it still"
    with unpacked(image, kept, 0, never):
        assert [path.name for path in kept.iterdir()] == [newer.name], "nobody reads the older one any more"
    assert read == [image] * 2


def test_what_a_killed_service_left_half_is_removed(tmp_path: Path, image: Path) -> None:
    kept = tmp_path / "drivers"
    (kept / ".unpacking-1234" / "viostor").mkdir(parents=True)
    with unpacked(image, kept, 0, never) as folder:
        assert list(kept.iterdir()) == [folder]


def test_an_image_whose_removal_was_cut_off_is_unpacked_again(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting names another image for a while, and the service is killed while the files of the first one go."""
    kept, other = tmp_path / "drivers", tmp_path / "other.iso"
    shutil.copy(image, other)
    with unpacked(image, kept, 0, never) as folder:
        tree = content(folder)

    def killed(folder: Path, **_: object) -> None:
        next(path for path in folder.rglob("*") if path.is_file()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt), unpacked(other, kept, 0, never):
            pass
    with unpacked(image, kept, 0, never) as folder:
        assert content(folder) == tree
        assert list(kept.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ("room", Unreadable, "MiB free"),
        ("size", Unreadable, "its files take"),
        ("no image", Unreadable, "no ISO 9660 image"),
        ("changed", Unreadable, "changed while it was read"),
        ("full", OSError, "No space left"),
        ("stop", Cancelled, None),
    ],
)
def test_what_cannot_be_unpacked_leaves_nothing(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, error: type[Exception], words: str | None
) -> None:
    if trouble == "size":
        monkeypatch.setattr(driver_folder, "BYTES_MAX", 100)
    elif trouble == "no image":
        image.write_bytes(b"<html>404 Not Found</html>")
    elif trouble == "changed":
        monkeypatch.setattr(driver_folder, "_copy", after(lambda _: image.touch(), driver_folder._copy))
    elif trouble == "full":
        monkeypatch.setattr(os, "sendfile", full)
    spare = 1 << 60 if trouble == "room" else 0
    with (
        pytest.raises(error, match=words),
        unpacked(image, tmp_path / "drivers", spare, lambda: trouble == "stop"),
    ):
        pass
    assert not list((tmp_path / "drivers").iterdir())


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_files_of_the_same_bytes_are_kept_once(tmp_path: Path) -> None:
    tree = tmp_path / "work" / "tree"
    tree.mkdir(parents=True)
    (tree / "one.sys").write_bytes(bytes(100_000))
    (tree / "two.sys").hardlink_to(tree / "one.sys")
    image = tmp_path / "x.iso"
    run(["genisoimage", "-quiet", "-r", "-cache-inodes", "-o", str(image), str(tree)], timeout_s=60)
    with unpacked(image, tmp_path / "drivers", 0, never) as folder:
        assert (folder / "one.sys").samefile(folder / "two.sys")
        assert (folder / "one.sys").read_bytes() == bytes(100_000)
