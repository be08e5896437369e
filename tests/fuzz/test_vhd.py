"""Hostile VHD images: every field of the footer, its copy, the header and the BAT, with right checksums, and bitmaps."""

import random
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import DiskReader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.vhd import VhdReader
from tests.cases import cases
from tests.disks.block_images import reads, scratch
from tests.disks.vhd.vhd_images import DIFFERENCING, DYNAMIC, FIXED, Vhd, checksummed, vhds
from tests.fuzz.block_formats import Area, Damage, assert_bounded, damages, outcome

# Footer: features, version, header's place; sizes; geometry and type. Header: places and sizes; locators. Then BAT and blocks.
FOOTER = [Area(8, 4, 2, 4), Area(16, 8), Area(40, 8, 2, 8), Area(56, 4, 2, 4)]
HEADER = [Area(512 + 8, 8, 2, 8), Area(512 + 24, 4, 3, 4), Area(512 + 576, 4, 3, 4), Area(512 + 592, 8), Area(512, 1024)]
FIELDS = [*FOOTER, *HEADER, *HEADER, Area(1536, 4, 10, 4), Area(2048, 4096), Area(0, 512)]
_PATHS = ["base.vhd", ".\\base.vhd", "disk.vhd", "..\\base.vhd", "C:\\base.vhd", "\ufffd", "", "a\0b", "x" * 40_000]


@cases(120)
@given(
    image=vhds(),
    path=st.sampled_from(_PATHS),
    code=st.sampled_from([b"W2ru", b"W2ku", b"MacX", b"Wi2r"]),
    changes=st.lists(damages(FIELDS, "big"), min_size=1, max_size=4),
    footer_too=st.booleans(),
    cut=st.integers(0, 20),
    places=reads,
)
def test_hostile_images(
    image: Vhd,
    path: str,
    code: bytes,
    changes: list[Damage],
    footer_too: bool,
    cut: int,
    places: list[tuple[float, int]],
) -> None:
    text = path.encode("utf-8" if code == b"MacX" else "utf-16-le")
    with scratch() as folder:
        (folder / "base.vhd").write_bytes(Vhd(4096, kind=FIXED).file(1))
        content = bytearray(replace(image, locators=((code, text),), parent=Vhd(0).identity).file(0))
        for change in changes:
            content[change.at : change.at + len(change.content)] = change.content
        if image.kind in (DYNAMIC, DIFFERENCING):
            content[512:1536] = checksummed(bytes(content[512:1536]), 36)
            content[:512] = checksummed(bytes(content[:512]), 64)
            if footer_too:  # else the honest one at the end counts
                content[-image.footer_bytes :] = content[: image.footer_bytes]
        (folder / "disk.vhd").write_bytes(
            content[: len(content) - random.Random(cut).randrange(len(content) if cut < 3 else 1)]
        )

        def open_image() -> DiskReader:
            return opened(folder / "disk.vhd")

        assert_bounded(lambda: outcome(open_image, places))


def opened(path: Path) -> DiskReader:
    return VhdReader(RawReader(str(path)), root=str(path.parent), name=path.name)


@cases(60)
@given(footer=st.lists(damages(FOOTER, "big"), min_size=1, max_size=3), size=st.integers(0, 9))
def test_hostile_fixed_images(footer: list[Damage], size: int) -> None:
    with scratch() as folder:
        image = Vhd(size * 512, kind=FIXED)
        end = bytearray(image.footer())
        for change in footer:
            end[change.at : change.at + len(change.content)] = change.content
        (folder / "disk.vhd").write_bytes(image.file(0)[:-512] + checksummed(bytes(end), 64))
        assert_bounded(lambda: outcome(lambda: opened(folder / "disk.vhd"), [(0, 9 * 512)]))
