"""What lies at the top of a driver image."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import V2vFailed
from synvirt.guests.driver_image import top_names
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
