"""synvirt disk info IMAGE and synvirt disk convert IMAGE TARGET: the data path by itself, with no service and no job."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from synvirt.cli.options import Options
from synvirt.cli.program import shown

if TYPE_CHECKING:  # imported where they are used: `synvirt --help` is quick without them
    from synvirt.blocks import DiskReader, DiskWriter
    from synvirt.copying import Copied
    from synvirt.offline import OpenedDisk

app = typer.Typer(no_args_is_help=True, help="Look at disk images, and convert them to raw. No service is needed.")

Image = Annotated[
    Path, typer.Argument(exists=True, metavar="IMAGE", help="A disk image, an OVA, or the folder or description of a VM")
]
Disk = Annotated[str | None, typer.Option("--disk", help="Which disk, where there are several: `disk info` lists their names")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object")]


class _Found(NamedTuple):
    """A disk that an image or an appliance has."""

    name: str
    opened: "OpenedDisk"


class _Done(NamedTuple):
    size: int
    bytes_cloned: int
    copied: "Copied"


@app.command()
def info(context: typer.Context, image: Image, json: AsJson = False) -> None:
    """What an image is, and how much of it is data."""
    disks = [_described(found) for found in _disks_in(image)]
    if _wants_json(context, json):
        _print_json({"path": str(image), "disks": disks})
        return
    for disk in disks:
        for name, value in disk.items():
            print(f"{name:16} {shown(str(value))}")
        print()


@app.command()
def convert(
    context: typer.Context,
    image: Image,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The raw file to make, or a block device to write")],
    *,
    disk: Disk = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file, or write over the device")] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=64, help="How many copy at once; by default one a core")] = None,
    json: AsJson = False,
) -> None:
    """Copy a disk into a sparse raw file, which has its name only when it is complete. Digests of an OVA are checked."""
    found = _chosen(_disks_in(image), disk, image)
    quiet = _wants_json(context, json) or not sys.stderr.isatty()
    began = time.monotonic()
    with _ended_by_sigterm(), _progress(f"{found.name} → {target.name}", quiet=quiet) as show:
        done = _copy(found.opened, target, force=force, threads=threads, show=show)
    seconds = time.monotonic() - began
    report = {
        "path": str(image),
        "disk": found.name,
        "target": str(target),
        "size_bytes": done.size,
        "bytes_read": done.copied.bytes_done,
        "bytes_written": done.size - done.bytes_cloned - done.copied.bytes_zero,
        "bytes_zero": done.copied.bytes_zero,
        "bytes_cloned": done.bytes_cloned,
        "seconds": round(seconds, 3),
        "rate_bps": round((done.copied.bytes_done + done.bytes_cloned) / seconds),
        "checksums_verified": [checksum.name for checksum in found.opened.checksums],
    }
    if _wants_json(context, json):
        _print_json(report)
    else:
        print(_sentence(report))


def _copy(opened: "OpenedDisk", target: Path, *, force: bool, threads: int | None, show: "Callable[[Copied], None]") -> "_Done":
    from synvirt.copying import copy
    from synvirt.disks import open_reader
    from synvirt.disks.checksum import Checksums
    from synvirt.disks.cloning import clone

    with ExitStack() as stack:
        reader = open_reader(opened.reader)
        stack.callback(reader.close)
        writer = stack.enter_context(_writer(target, reader.size, force=force))
        checksums = stack.enter_context(Checksums(opened.checksums))
        # A device holds what was on it before; a new file reads as zeros.
        fresh = not target.is_block_device()
        rest = clone(reader, writer, checksums.stop)
        copied = copy(rest, writer, fresh=fresh, threads=threads, stop=checksums.stop, on_progress=show)
        checksums.verify()
        return _Done(reader.size, rest.bytes_cloned, copied)


@contextmanager
def _writer(target: Path, size: int, *, force: bool) -> "Iterator[DiskWriter]":
    from synvirt.disks import open_writer
    from synvirt.disks.new_file import new_file
    from synvirt.disks.specs import BlockWriterSpec
    from synvirt.errors import Conflict

    if not target.is_block_device():
        with new_file(target, size, replace=force) as writer:
            yield writer
        return
    if not force:
        raise Conflict(f"{target.name} is a device: what is on it would be lost", hint="--force writes over it")
    writer = open_writer(BlockWriterSpec(path=str(target), size_bytes=size))
    try:
        yield writer
    finally:
        writer.close()


def _disks_in(image: Path) -> list[_Found]:
    """The disks of an appliance, or the image itself. Files that it names must lie beside it."""
    from synvirt.disks import detect
    from synvirt.disks.specs import RawSpec
    from synvirt.offline import OpenedDisk

    where = image.resolve()
    alone = OpenedDisk(detect(where) if not where.is_dir() else RawSpec(path=str(where)))
    found = None
    if isinstance(alone.reader, RawSpec) and not where.is_block_device() and not _has_boot_sector(where):
        found = _disks_of_appliance(where)
    return [_Found(image.name, alone)] if found is None else found


def _has_boot_sector(where: Path) -> bool:
    """A disk with a partition table (MBR, or GPT's protective one) is no appliance, and the importers need not be loaded."""
    if where.is_dir():
        return False
    with where.open("rb") as file:
        return file.read(512)[510:] == b"\x55\xaa"


def _disks_of_appliance(where: Path) -> list[_Found] | None:
    """None: it is none, so a file is a raw disk."""
    from synvirt.errors import UnsupportedFormat
    from synvirt.offline.registry import detect

    root = where if where.is_dir() else where.parent
    try:
        importer = detect(where, root)
    except UnsupportedFormat as error:
        # A hint says that it is something else, packed perhaps, of which a copy would be no disk.
        if where.is_dir() or error.hint:
            raise
        return None
    disks = importer.inspect(where, root).disks
    return [_Found(disk.key, importer.open_disk(where, root, disk.key)) for disk in disks]


def _chosen(disks: list[_Found], wanted: str | None, image: Path) -> _Found:
    from synvirt.errors import BadRequest

    names = ", ".join(disk.name for disk in disks) or "none"
    if wanted is None and len(disks) == 1:
        return disks[0]
    if wanted is None:
        raise BadRequest(f"{image.name} has {len(disks)} disks: {names}", hint="--disk says which")
    for disk in disks:
        if disk.name == wanted:
            return disk
    raise BadRequest(f"{image.name} has no disk {wanted}; it has {names}")


def _described(found: _Found) -> dict[str, Any]:
    from synvirt.disks import open_reader
    from synvirt.disks.specs import ChangedSpec, ImageSpec, XvaSpec

    formats, spec = [found.opened.reader.format], found.opened.reader
    while isinstance(spec, ImageSpec | ChangedSpec | XvaSpec):
        spec = spec.over
        formats.append(spec.format)
    reader = open_reader(found.opened.reader)
    try:
        data_bytes, zero_bytes, extents = _summed(reader)
        return {
            "name": found.name,
            "format": formats[0],
            "over": formats[1:],
            "size_bytes": reader.size,
            "data_bytes": data_bytes,
            "zero_bytes": zero_bytes,
            "extents": extents,
            **{f"{checksum.algorithm}": checksum.expected for checksum in found.opened.checksums},
        }
    finally:
        reader.close()


def _summed(reader: "DiskReader") -> tuple[int, int, int]:
    from synvirt.blocks import coalesced

    data_bytes = zero_bytes = extents = 0
    for extent in coalesced(reader.extents()):
        extents += 1
        data_bytes += 0 if extent.zero else extent.length
        zero_bytes += extent.length if extent.zero else 0
    return data_bytes, zero_bytes, extents


@contextmanager
def _progress(title: str, *, quiet: bool) -> "Iterator[Callable[[Copied], None]]":
    if quiet:
        yield lambda copied: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(shown(title), total=None)
        yield lambda copied: bars.update(bar, total=copied.bytes_total, completed=copied.bytes_done)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM is Ctrl-C: the threads end, and nothing half-made is left."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wants_json(context: typer.Context, json: bool) -> bool:
    before = context.find_root().obj
    return json or (isinstance(before, Options) and before.json)


def _print_json(value: dict[str, Any]) -> None:
    import json

    print(json.dumps(value))


def _sentence(report: dict[str, Any]) -> str:
    from synvirt.cli.watching import sized

    cloned = f", {sized(report['bytes_cloned'])} cloned" if report["bytes_cloned"] else ""
    checked = f", {', '.join(report['checksums_verified'])} checked" if report["checksums_verified"] else ""
    return shown(
        f"{report['target']}: {sized(report['size_bytes'])}, of which {sized(report['bytes_written'])} written{cloned} and"
        f" {sized(report['bytes_zero'])} zero, in {report['seconds']:.1f} s ({sized(report['rate_bps'])}/s){checked}"
    )
