"""An image that was cut off: no conversion of it succeeds with other content, and `disk info` does not call it whole.

QEMU reads what is missing as zeros, and says nothing.
"""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from synvirt.cli import app
from tests.drawn import shared_in_a_file
from tests.offline import appliances

# What is cut, and the file of it that is cut (the image, where none is named).
VARIANTS = {
    "qcow2": ("a.qcow2", "qcow2", ""),
    "qcow2 preallocated": ("a.qcow2", "qcow2", "preallocation=full"),
    "qcow2 small clusters": ("a.qcow2", "qcow2", "cluster_size=512"),
    "qcow2 subclusters": ("a.qcow2", "qcow2", "extended_l2=on"),
    "qcow2 compressed": ("a.qcow2", "qcow2", "compress"),
    "qcow2 zstd": ("a.qcow2", "qcow2", "compress,compression_type=zstd"),
    "vmdk": ("a.vmdk", "vmdk", ""),
    "vmdk stream": ("a.vmdk", "vmdk", "subformat=streamOptimized"),
    "vmdk flat": ("a.vmdk a-flat.vmdk", "vmdk", "subformat=monolithicFlat"),
    "vmdk split": ("a.vmdk a-s001.vmdk", "vmdk", "subformat=twoGbMaxExtentSparse"),
    "vhdx": ("a.vhdx", "vhdx", "block_size=1M"),
    "vhdx fixed": ("a.vhdx", "vhdx", "subformat=fixed"),
    "vhd": ("a.vhd", "vpc", ""),
    "vhd fixed": ("a.vhd", "vpc", "subformat=fixed"),
    "vdi": ("a.vdi", "vdi", ""),
    "vdi fixed": ("a.vdi", "vdi", "static=on"),
    "ova": ("a.ova", "ova", ""),
}
# The end of a compressed stream is found only by inflating it: `disk info` reads no data.
COMPRESSED = {"qcow2 compressed", "qcow2 zstd", "vmdk stream", "ova"}

PIECE_BYTES = 64 << 10
ZEROS = bytes(PIECE_BYTES)


@shared_in_a_file
def made(folder: Path, variant: str) -> tuple[Path, Path, bytes]:
    """The image, the file of it that is cut, and that file's content."""
    names, image_format, options = VARIANTS[variant]
    folder = folder / variant
    folder.mkdir()
    name, _, cut = names.partition(" ")
    if image_format == "ova":
        image = appliances.archive(folder / name, appliances.appliance("virtualbox"))
    else:
        wanted = [one for one in options.split(",") if one not in ("", "compress")]
        image = appliances.image(folder, name, image_format, content(variant), *wanted, compressed="compress" in options)
    file = folder / (cut or name)
    return image, file, file.read_bytes()


def content(variant: str) -> bytes:
    return appliances.raw_disk(seed=0 if variant == "ova" else 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cut")


def disk(*arguments: str | Path) -> int:
    return CliRunner().invoke(app, ["disk", *map(str, arguments)]).exit_code


def _restore(file: Path, whole: bytes, kept: int) -> None:
    """The file's end once more, but for its zeros: most of it, which take as long to write as a conversion."""
    with file.open("r+b") as cut:
        cut.truncate(len(whole))
        for at in range(kept, len(whole), PIECE_BYTES):
            piece = whole[at : at + PIECE_BYTES]
            if piece != ZEROS[: len(piece)]:
                cut.seek(at)
                cut.write(piece)


@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
def test_no_conversion_of_a_cut_image_succeeds_with_other_content(folder: Path, variant: str, data: st.DataObject) -> None:
    image, file, whole = made(folder, variant)
    kept = data.draw(st.integers(0, len(whole) - 1) | st.integers(max(0, len(whole) - (200 << 10)), len(whole) - 1))
    target = image.parent / "out.raw"
    target.unlink(missing_ok=True)
    os.truncate(file, kept)
    try:
        info, converted = disk("info", image), disk("convert", image, target)
    finally:
        _restore(file, whole, kept)
    if converted == 0:
        assert target.read_bytes() == content(variant)
    if info == 0 and variant not in COMPRESSED:
        assert converted == 0
