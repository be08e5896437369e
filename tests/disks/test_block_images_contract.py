"""VHDX, VHD and VDI readers keep the laws of every DiskReader, over parents and replayed logs too."""

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.blocks import DiskReader
from synvirt.disks import open_reader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import ImageFormat, ImageSpec, RawSpec
from synvirt.disks.vdi import VdiReader
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.disks import vdi_images
from tests.disks.vhd import vhd_images, vhdx_images
from tests.disks.vhd.vhd_images import Vhd
from tests.disks.vhd.vhdx_images import FULL, MIB, NOT_PRESENT, PARENT_IDENTITY, PARTIAL, ZERO, Vhdx, lose_power


def opened(path: Path, image_format: ImageFormat) -> DiskReader:
    over = RawSpec(path=str(path))
    return open_reader(ImageSpec(format=image_format, over=over, root=str(path.parent), name=path.name))


class TestVhdx(ReaderContract):
    @pytest.fixture(params=["closed", "power lost", "over a parent", "over a parent, power lost"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        full, partial = vhdx_images.Block(FULL, ((0, 900), (1500, 1))), vhdx_images.Block(PARTIAL, ((0, 2000),), ((7, 1000),))
        image = Vhdx(5 * MIB - 3 * 512, (full, vhdx_images.Block(NOT_PRESENT), vhdx_images.Block(ZERO), full, full))
        if "parent" in request.param:
            vhdx_images.write(replace(image, identity=PARENT_IDENTITY), tmp_path / "base.vhdx", seed=1)
            keys = (("parent_linkage", f"{{{PARENT_IDENTITY}}}"), ("relative_path", "base.vhdx"))
            image = replace(image, blocks=(partial, partial, *image.blocks[2:4], partial), locator=keys)
        base = tmp_path / "base.raw" if image.locator else None
        places = vhdx_images.write(image, tmp_path / "disk.vhdx", raw=tmp_path / "raw", parent_raw=base)
        if "power lost" in request.param:
            lose_power(image, tmp_path / "disk.vhdx", places, seed=5)
        return ReaderCase(lambda: opened(tmp_path / "disk.vhdx", "vhdx"), (tmp_path / "raw").read_bytes())


class TestVhd(ReaderContract):
    @pytest.fixture(params=["fixed", "dynamic", "differencing"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        size, block_bytes = 4 * MIB - 512, 65536
        blocks = tuple(vhd_images.Block(n, (1 << 128) - 1 if n % 3 else 0xFFF0F << n) if n % 5 else None for n in range(64))
        parent = Vhd(size - 512, blocks=blocks[::-1], block_bytes=block_bytes, identity=UUID(int=2))
        kind = {"fixed": vhd_images.FIXED, "dynamic": vhd_images.DYNAMIC, "differencing": vhd_images.DIFFERENCING}[
            request.param
        ]
        image = Vhd(
            size,
            kind,
            block_bytes,
            () if kind == vhd_images.FIXED else blocks,
            parent=parent.identity,
            locators=((b"W2ru", "base.vhd".encode("utf-16-le")),),
        )
        (tmp_path / "base.vhd").write_bytes(parent.file(1))
        (tmp_path / "disk.vhd").write_bytes(image.file(0))
        content = image.disk(image.file(0), parent.disk(parent.file(1)))
        return ReaderCase(lambda: opened(tmp_path / "disk.vhd", "vhd"), content)


class TestVdi(ReaderContract):
    @pytest.fixture(params=["dynamic", "differencing"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        entries = (3, vdi_images.FREE, 1, 2, vdi_images.DISCARDED, 0, vdi_images.FREE)
        kind = vdi_images.DIFFERENCING if request.param == "differencing" else vdi_images.DYNAMIC
        image = vdi_images.Vdi(entries, len(entries) * 65536 - 512, kind)
        parent = bytes(range(256)) * 900
        (tmp_path / "disk.vdi").write_bytes(image.file(0))
        (tmp_path / "parent").write_bytes(parent)

        def open_differencing() -> DiskReader:
            return VdiReader(RawReader(str(tmp_path / "disk.vdi")), parent=RawReader(str(tmp_path / "parent")))

        def open_dynamic() -> DiskReader:
            return opened(tmp_path / "disk.vdi", "vdi")

        return ReaderCase(
            open_differencing if kind == vdi_images.DIFFERENCING else open_dynamic, image.disk(image.file(0), parent)
        )
