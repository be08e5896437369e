"""synvirt disk verify: compares a volume with the hashes of what was copied to it, and repairs it from the source."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from synvirt.blocks import Extent
from synvirt.cli.disk.images import Found
from synvirt.cli.program import FAILED, shown
from synvirt.disks import open_reader
from synvirt.disks.checking.ledger import LINE_BYTES_MAX, Ledger, Row
from synvirt.disks.checking.repairing import Repaired, differing_rows, refuse_in_use, refuse_written, repair
from synvirt.disks.raw.files import RawReader, RawWriter, open_block_writer, open_file_writer
from synvirt.disks.specs import RawSpec
from synvirt.errors import BadRequest, MalformedArchive, NotFound, cause_of, text_of

# The most extents that are listed, for people and in JSON.
NAMED_MOST: Final = 20
LISTED_MOST: Final = 10_000
_LEDGER_HINT: Final = "name the file that `synvirt disk convert --ledger` wrote"


@dataclass(frozen=True, slots=True)
class Verified:
    """`size_bytes`: the volume's. `repaired`: None, if no repair was requested."""

    volume: str
    size_bytes: int
    ledger: Ledger
    differing: tuple[Row, ...]
    repaired: Repaired | None

    @property
    def exit_code(self) -> int:
        """0, if nothing differs any more; else FAILED."""
        left = self.differing if self.repaired is None else self.repaired.left
        return FAILED if left else 0

    @property
    def compared_bytes(self) -> int:
        """What the ledger has rows for: of a whole pass, all of the disk."""
        return sum(row.length for row in self.ledger.rows)

    def as_json(self) -> dict[str, Any]:
        """The result for --json; extents as offset and length in bytes."""
        repaired = self.repaired
        return {
            "volume": self.volume,
            "disk": self.ledger.disk,
            "size_bytes": self.size_bytes,
            "compared_bytes": self.compared_bytes,
            "good": not self.exit_code,
            "differing": _listed(self.differing),
            "differing_count": len(self.differing),
            "repaired": None if repaired is None else _listed(repaired.written),
            "not_repaired": None if repaired is None else _listed(repaired.left),
        }

    def lines(self) -> Iterator[str]:
        """The result for people, a line for each extent."""
        if not self.differing:
            yield shown(f"{self.volume} holds what the ledger of {self.ledger.disk} says")
        if left := self.size_bytes - self.compared_bytes:
            yield f"{left} bytes of the volume are not in the ledger, and were not compared"
        yield from _named(self.differing, "differs from the ledger")
        if self.repaired is not None and self.differing:
            yield from _named(self.repaired.written, "was repaired from the source")
            yield from _named(self.repaired.left, "was not repaired: the source does not hold what the ledger says")


def verified(volume: Path, ledger: Ledger, source: Found | None, *, threads: int | None) -> Verified:
    """`source`: for repairs; None: nothing is written."""
    if source is None:
        with closing(RawReader(str(volume.absolute()))) as reader:
            refuse_written(reader.descriptor, volume.name)
            return Verified(str(volume), reader.size, ledger, tuple(differing_rows(ledger, reader, threads=threads)), None)
    with _opened(volume, ledger.size) as writer, closing(open_reader(RawSpec(path=str(volume.absolute())))) as reader:
        refuse_in_use(writer.descriptor, volume.name)
        rows = tuple(differing_rows(ledger, reader, threads=threads))
        if not rows:
            return Verified(str(volume), reader.size, ledger, rows, Repaired((), ()))
        with closing(open_reader(source.reader)) as good:
            return Verified(str(volume), reader.size, ledger, rows, repair(rows, good, reader, writer))


def ledger_of(ledger: Path | None, receipt: Path | None, disk: str | None, key: Path | None) -> Ledger:
    """The ledger in a file written by `disk convert --ledger`, or of a disk of a receipt that is as it was signed."""
    if (ledger is None) == (receipt is None):
        raise BadRequest("give either --ledger or --receipt")
    try:
        if ledger is not None:
            with ledger.open(encoding="utf-8") as file:
                # By pieces: a file without line ends, such as /dev/zero, must not fill the memory.
                return Ledger.from_lines(iter(lambda: file.readline(LINE_BYTES_MAX + 1), ""), ledger.name)
        assert receipt is not None
        return _of_receipt(receipt, disk, None if key is None else text_of(key, what="key file "))
    except UnicodeDecodeError as error:
        name = ledger.name if ledger is not None else "what the receipt has of the disk"
        raise MalformedArchive(f"{name} is not a ledger: it is not a text in UTF-8", hint=_LEDGER_HINT) from error
    except OSError as error:
        raise NotFound(f"the ledger cannot be read: {cause_of(error)}") from error


def _of_receipt(folder: Path, disk: str | None, key: str | None) -> Ledger:
    from synvirt.proof.signing import PublicKey
    from synvirt.proof.verifying import checked, ledger_of_volume, volumes

    found = checked(folder, None if key is None else PublicKey.from_signers(key))
    if found.problems or found.statement is None:
        raise MalformedArchive(f"the receipt is not as it was signed: {'; '.join(found.problems[:3])}")
    disks = {str(one.get("key")): one for one in volumes(found.statement)}
    if disk is None and len(disks) == 1:
        disk = next(iter(disks))
    if disk not in disks:
        raise BadRequest(f"the receipt has no disk {disk}", hint=f"--volume is one of {', '.join(disks) or 'none'}")
    return ledger_of_volume(folder, disks[disk])


@contextmanager
def _opened(volume: Path, size: int) -> Iterator[RawWriter]:
    path = str(volume.absolute())
    device = volume.is_block_device()
    with closing(open_block_writer(path, size) if device else open_file_writer(path, volume.stat().st_size)) as writer:
        yield writer


def _listed(extents: tuple[Row, ...] | tuple[Extent, ...]) -> list[dict[str, int]]:
    return [{"start": one.start, "length": one.length} for one in extents[:LISTED_MOST]]


def _named(extents: tuple[Row, ...] | tuple[Extent, ...], what: str) -> Iterator[str]:
    for one in extents[:NAMED_MOST]:
        yield f"{one.length} bytes at {one.start}: {what}"
    if len(extents) > NAMED_MOST:
        yield f"{len(extents) - NAMED_MOST} more: {what}"
