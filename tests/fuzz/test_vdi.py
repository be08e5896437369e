"""Hostile VDI images: every field of the header and the map, with any number in it."""

import dataclasses
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import DiskReader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.vdi import VdiReader
from tests.cases import cases
from tests.disks.block_images import reads, scratch
from tests.disks.vdi_images import Vdi, vdis
from tests.fuzz.block_formats import Area, Damage, assert_bounded, damages, outcome

# The header's fields from the signature on, without the text and the comment; the map; and anything at all.
FIELDS = [Area(64, 4, 5, 4), Area(0x154, 4, 7, 4), Area(0x170, 8), Area(0x178, 4, 4, 4), Area(512, 4, 12, 4), Area(0, 600)]
IMAGES = vdis().map(lambda image: dataclasses.replace(image, map_at=512))


@cases(150)
@given(image=IMAGES, changes=st.lists(damages(FIELDS, "little"), min_size=1, max_size=4), cut=st.integers(0, 20), places=reads)
def test_hostile_images(image: Vdi, changes: list[Damage], cut: int, places: list[tuple[float, int]]) -> None:
    with scratch() as folder:
        content = bytearray(image.file(0))
        for change in changes:
            content[change.at : change.at + len(change.content)] = change.content
        # Most are whole; some lose their end.
        (folder / "disk.vdi").write_bytes(
            content[: len(content) - random.Random(cut).randrange(len(content) if cut < 3 else 1)]
        )
        (folder / "parent").write_bytes(bytes(100_000))

        def open_image() -> DiskReader:
            return VdiReader(opened(folder / "disk.vdi"), parent=opened(folder / "parent"))

        assert_bounded(lambda: outcome(open_image, places))


def opened(path: Path) -> DiskReader:
    return RawReader(str(path))
