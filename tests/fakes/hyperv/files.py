"""The files of a VM's disk, as Hyper-V has them: a VHDX that QEMU made and writes, and AVHDX files over it by [MS-VHDX].

What the guest sees is kept as a raw file beside; files are brought up to it before anybody looks at them.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID, uuid4

from synvirt.disks.raw.files import RawReader
from synvirt.disks.vhdx.reader import VhdxReader
from synvirt.programs import run
from tests.disks.vhd.vhdx_images import FULL, MIB, NOT_PRESENT, PARTIAL, Block, Vhdx, write
from tests.fakes.contents import Content, fill

SECTOR = 512
# The arguments of one qemu-io: some 100 bytes for each write.
ORDERS_AT_ONCE = 500


@dataclass
class DiskFiles:
    """`folder` is shared. `chain`: the newest file first. `leaf`: there is a recovery snapshot, and the VM writes there."""

    folder: Path
    name: str
    raw: Path
    chain: list[Path] = field(default_factory=list)
    below: list[Path] = field(default_factory=list)
    dirty: list[tuple[int, int]] = field(default_factory=list)
    frozen: bool = False

    @classmethod
    def made(cls, folder: Path, name: str, content: Content, scratch: Path) -> "DiskFiles":
        raw, base = scratch / f"{name}.raw", folder / f"{name}.vhdx"
        fill(raw, content)
        run(["qemu-img", "convert", "-f", "raw", "-O", "vhdx", str(raw), str(base)], timeout_s=60)
        return cls(folder, name, raw, [base])

    @property
    def size(self) -> int:
        return self.raw.stat().st_size

    def guest_writes(self, offset: int, data: bytes) -> None:
        with self.raw.open("r+b") as file:
            file.seek(offset)
            file.write(data)
        self.dirty.append((offset, len(data)))

    def checkpoint(self) -> None:
        """The VM's next writes go to a new file over what there is."""
        self.settled()
        kept = self.raw.with_name(f"{self.raw.stem}-{len(self.chain)}.below")
        shutil.copyfile(self.raw, kept)
        self.below.insert(0, kept)
        self.chain.insert(0, self.folder / f"{self.name}_{str(uuid4()).upper()}.avhdx")
        self._differ()

    def merged(self) -> None:
        """The newest file's content is put into the one beneath."""
        self.settled()
        gone, lost = self.chain.pop(0), self.below.pop(0)
        changed = _differences(lost, self.raw)
        gone.unlink()
        lost.unlink()
        self.dirty = changed
        self.settled()

    def settled(self) -> None:
        """The newest file holds what the guest has written."""
        dirty, self.dirty = self.dirty, []
        if not dirty:
            return
        if self.below:
            self._differ()
            return
        with tempfile.TemporaryDirectory(dir=self.raw.parent) as folder, self.raw.open("rb") as raw:
            areas = _joined(dirty, self.size)
            for first in range(0, len(areas), ORDERS_AT_ONCE):
                orders: list[str] = []
                for offset, length in areas[first : first + ORDERS_AT_ONCE]:
                    piece = Path(folder, str(offset))
                    raw.seek(offset)
                    piece.write_bytes(raw.read(length))
                    orders += ["-c", f"write -s {piece} {offset} {length}"]
                # One process for all: each takes longer to start than to write.
                run(["qemu-io", "-f", "vhdx", *orders, str(self.chain[0])], timeout_s=60)

    def exported(self, path: Path, grains: list[int] | None = None) -> None:
        """What is under the newest file, written to another: whole, or those pieces of 4 KiB alone, as a differencing VHDX
        over a disk that is not there. A block that changed nearly all over is written whole."""
        beneath = self.below[0]
        if grains is None:
            run(["qemu-img", "convert", "-f", "raw", "-O", "vhdx", str(beneath), str(path)], timeout_s=60)
            return
        size = beneath.stat().st_size
        blocks = []
        for start in range(0, size, MIB):
            inside = [one * 4096 - start for one in grains if start <= one * 4096 < start + MIB]
            sectors = tuple((at // SECTOR, min(4096, size - start - at) // SECTOR) for at in inside)
            whole = len(inside) > 128
            blocks.append(Block(FULL if whole else PARTIAL if inside else NOT_PRESENT, present=() if whole else sectors))
        locator = (("parent_linkage", f"{{{uuid4()}}}"), ("relative_path", ".\\gone.vhdx"))
        image = Vhdx(size, tuple(blocks), locator=locator, identity=uuid4())
        scratch = self.raw.with_suffix(".seen")
        places = write(image, path, raw=scratch, parent_raw=beneath)
        scratch.unlink()
        with path.open("r+b") as file, beneath.open("rb") as content:
            for number, at in places.blocks.items():
                for first, count in blocks[number].present or ((0, MIB // SECTOR),):
                    content.seek(number * MIB + first * SECTOR)
                    file.seek(at + first * SECTOR)
                    file.write(content.read(count * SECTOR))

    def _differ(self) -> None:
        """The newest file, again: what differs from the disk below, and nothing else."""
        blocks: list[Block] = []
        for old, new in zip(_pieces(self.below[0]), _pieces(self.raw), strict=True):
            present = tuple((at // SECTOR, 1) for at in _places(old, new, SECTOR))
            whole = len(present) == MIB // SECTOR
            blocks.append(Block(FULL if whole else PARTIAL if present else NOT_PRESENT, present=() if whole else present))
        parent = self.chain[1]
        identity = _identity(parent, self.folder)
        locator = (
            ("parent_linkage", f"{{{identity}}}"),
            ("relative_path", f".\\{parent.name}"),
            ("absolute_win32_path", f"D:\\elsewhere\\{parent.name}"),
        )
        image = Vhdx(self.size, tuple(blocks), locator=locator, identity=uuid4())
        scratch = self.raw.with_suffix(".seen")
        places = write(image, self.chain[0], raw=scratch, parent_raw=self.below[0])
        scratch.unlink()
        with self.chain[0].open("r+b") as file, self.raw.open("rb") as raw:
            for number, at in places.blocks.items():
                raw.seek(number * MIB)
                file.seek(at)
                file.write(raw.read(MIB))


def _identity(path: Path, folder: Path) -> UUID:
    reader = VhdxReader(RawReader(str(path)), root=str(folder), name=path.name)
    try:
        return UUID(reader.header.data_write_guid)
    finally:
        reader.close()


def _joined(written: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Whole sectors, ascending; what touches is one area."""
    areas: list[tuple[int, int]] = []
    for offset, length in sorted(written):
        start, end = offset // SECTOR * SECTOR, min(-(-(offset + length) // SECTOR) * SECTOR, size)
        if areas and start <= sum(areas[-1]):
            first, long = areas.pop()
            start, end = first, max(end, first + long)
        areas.append((start, end - start))
    return areas


def _differences(old: Path, new: Path, step: int = 4096) -> list[tuple[int, int]]:
    size = new.stat().st_size
    found = (
        number * MIB + at
        for number, both in enumerate(zip(_pieces(old), _pieces(new), strict=True))
        for at in _places(*both, step)
    )
    return [(at, min(step, size - at)) for at in found]


def _places(old: bytes, new: bytes, step: int) -> list[int]:
    """Where two pieces of a disk differ. Most do not: those are looked at as a whole."""
    return [] if old == new else [at for at in range(0, len(new), step) if old[at : at + step] != new[at : at + step]]


def _pieces(disk: Path) -> Iterator[bytes]:
    """A MiB each: a disk of a test may be larger than what a worker of the suite has."""
    with disk.open("rb") as file:
        while piece := file.read(MIB):
            yield piece
