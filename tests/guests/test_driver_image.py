"""What a driver image has: at its top, and all its files."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import V2vFailed
from synvirt.guests.driver_image import Extent, Unreadable, extents, top_names
from synvirt.programs import run
from tests.cases import cases


@pytest.mark.parametrize("names", [[], ["-J"], ["-r"], ["-J", "-r"]])
def test_the_names_at_the_top_are_found_however_they_are_written(tmp_path: Path, names: list[str]) -> None:
    tree = tmp_path / "tree"
    for folder in ("viostor", "guest-agent", *(f"folder{number}" for number in range(200))):
        (tree / folder / "2k22").mkdir(parents=True)
    run(["genisoimage", "-quiet", *names, "-l", "-o", str(tmp_path / "x.iso"), str(tree)], timeout_s=60)
    found = top_names(tmp_path / "x.iso")
    assert {"viostor", "folder0", "folder199"} <= found
    # Without Joliet the format knows no hyphen.
    assert ("guest-agent" if "-J" in names else "guest_agent") in found
    assert top_names(tree) == {path.name for path in tree.iterdir()}


def test_what_is_no_image_is_refused_before_a_conversion(tmp_path: Path) -> None:
    page = tmp_path / "virtio-win.iso"
    page.write_bytes(b"<html>404 Not Found</html>")
    with pytest.raises(V2vFailed, match=r"virtio-win\.iso is not an ISO 9660 image"):
        top_names(page)


@cases(200)
@given(st.binary(max_size=4096), st.integers(0, 4096))
def test_garbage_is_names_or_our_error(tmp_path_factory: pytest.TempPathFactory, garbage: bytes, at: int) -> None:
    image = tmp_path_factory.mktemp("iso") / "x.iso"
    descriptor = bytearray(b"\x01CD001".ljust(2048, b"\0") + bytes(4096))
    descriptor[156 : 156 + len(garbage)] = garbage
    image.write_bytes(bytes(16 * 2048) + descriptor + garbage[at:])
    with contextlib.suppress(V2vFailed):
        top_names(image)
    with contextlib.suppress(Unreadable), image.open("rb") as file:
        list(extents(file))


def files_of(image: Path) -> dict[str, bytes]:
    with image.open("rb") as file:
        found = list(extents(file))
        assert len({one.path for one in found}) == len(found)
        return {one.path: os.pread(file.fileno(), one.length, one.at) for one in found}


def tree_of_drivers(folder: Path) -> dict[str, bytes]:
    """Its files. Names that the format can have alone, and a link that is no file."""
    for number in range(120):  # more than a sector of records
        path = folder / f"folder{number % 7}" / "2k22" / "amd64" / f"driver{number}.sys"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * number * 50)
    (folder / "link").symlink_to("folder0")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.sys")}


@pytest.mark.parametrize("names", [[], ["-J"], ["-r"], ["-J", "-r"]])
def test_the_files_of_an_image_are_those_of_its_tree(tmp_path: Path, names: list[str]) -> None:
    there = tree_of_drivers(tmp_path / "tree")
    if "-r" in names:
        # Longer than a record, so that its name goes on elsewhere; of letters that only Rock Ridge keeps apart.
        for name in ("Long" * 60, "long" * 60):
            (tmp_path / "tree" / name).write_bytes(name.encode())
            there[name] = name.encode()
    run(["genisoimage", "-quiet", *names, "-l", "-o", str(tmp_path / "x.iso"), str(tmp_path / "tree")], timeout_s=60)
    assert files_of(tmp_path / "x.iso") == there


@cases(200)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=20))
def test_a_damaged_image_has_only_files_that_lie_within_it_and_that_a_folder_may_have(
    small_image: bytes, tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[float, int]]
) -> None:
    content = bytearray(small_image)
    for place, byte in damage:
        # Behind the first 16 sectors, which nobody reads.
        content[32768 + int(place * (len(content) - 32769))] = byte
    image = tmp_path_factory.mktemp("iso") / "x.iso"
    image.write_bytes(content)
    with contextlib.suppress(Unreadable), image.open("rb") as file:
        for one in extents(file):
            assert 0 <= one.at <= one.at + one.length <= len(content)
            assert not {"", ".", ".."} & set(one.path.split("/"))
            assert "\0" not in one.path


@pytest.fixture(scope="module")
def small_image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("small")
    for name in ("viostor/2k22/viostor.sys", "NetKVM/netkvm.sys", "L" * 240):
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    run(["genisoimage", "-quiet", "-J", "-r", "-o", str(folder / "x.iso"), str(folder / "tree")], timeout_s=60)
    content = (folder / "x.iso").read_bytes()
    return content[: max(one.at + 2048 for one in _extents_of(folder / "x.iso"))]


def _extents_of(image: Path) -> list[Extent]:
    with image.open("rb") as file:
        return list(extents(file))


def test_folders_in_a_circle_are_refused(tmp_path: Path, small_image: bytes) -> None:
    """The folder viostor/2k22 lies where viostor does."""
    content = bytearray(small_image)
    inner, outer = (content.index(bytes([len(name)]) + name) - 32 for name in (b"2K22", b"VIOSTOR"))
    content[inner + 2 : inner + 10] = content[outer + 2 : outer + 10]
    (tmp_path / "x.iso").write_bytes(content)
    with pytest.raises(Unreadable, match="circle"):
        files_of(tmp_path / "x.iso")
