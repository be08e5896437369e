"""synvirt disk convert: one copy(), and its checks."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from synvirt.blocks import DiskReader, DiskWriter
from synvirt.cli.disk.images import Found
from synvirt.cli.program import shown
from synvirt.copying import Copied, copy
from synvirt.disks import open_reader, open_writer
from synvirt.disks.raw.changes import opening
from synvirt.disks.raw.cloning import clone
from synvirt.disks.raw.files import HINTS, RawReader, RawWriter
from synvirt.disks.specs import BlockWriterSpec
from synvirt.errors import BadRequest, Conflict, DiskWriteFailed
from synvirt.nearest import did_you_mean_file
from synvirt.offline.known_by import promised
from synvirt.sizes import sized

if TYPE_CHECKING:  # loaded only for hashing
    from synvirt.disks.checking.ledger import Ledger

Show = Callable[[int, int], None]  # bytes done, bytes in all


class Wanted(NamedTuple):
    """What a caller wants, besides the disk and the target."""

    force: bool = False
    threads: int | None = None
    verify: bool = False
    ledger: Path | None = None


def convert(image: Path, found: Found, target: Path, wanted: Wanted, *, quiet: bool) -> dict[str, Any]:
    """Copies the disk; returns what was done, in the words of --json."""
    if wanted.ledger is not None and not wanted.force and os.path.lexists(wanted.ledger):
        raise Conflict(f"{wanted.ledger.name} already exists", hint="--force replaces it")
    _refuse_target(image, target)
    if wanted.ledger is not None:
        _refuse_ledger(image, target, wanted.ledger)
    with ExitStack() as stack:
        began = time.monotonic()
        with opening() as files:
            reader = open_reader(found.reader)
        stack.callback(reader.close)
        for path in filter(None, (target, wanted.ledger)):
            if path.exists() and (own := files.name_of(path.stat())) is not None:
                raise BadRequest(f"{path} is {own}, a file that the disk is read from", hint="name another file")
        fresh = not target.is_block_device()  # a device still has its old content; a new file reads as zeros
        writer = stack.enter_context(_writer(target, reader.size, force=wanted.force))
        conversion = _Conversion(found, reader, writer, fresh, target, wanted, quiet, began)
        hashed = wanted.verify or wanted.ledger is not None
        done = conversion.copied_and_hashed() if hashed else conversion.copied()
        files.refuse_changed()  # before the new file has its name
    return {"path": str(image), "disk": found.name, "target": str(target), **done}


def _refuse_target(image: Path, target: Path) -> None:
    """Refuses targets that --force does not allow either. BadRequest."""
    if target.is_dir():
        raise BadRequest(f"{target} is a folder", hint=f"name the file to make: {target / image.with_suffix('.raw').name}")
    if not target.parent.is_dir():
        raise BadRequest(f"there is no folder {target.parent} for {target.name}", hint=did_you_mean_file(target.parent))
    _refuse_image(image, target)
    if (what := promised(target.name)) is not None and not target.is_block_device():
        raise BadRequest(
            f"{target.name} is called {what}, and what is made is a raw disk",
            hint=f"name it {target.with_suffix('.raw').name}; `qemu-img convert` makes an image of another format of that",
        )


def _refuse_ledger(image: Path, target: Path, ledger: Path) -> None:
    """Refuses ledgers that --force does not allow either. BadRequest."""
    if ledger.exists() and not ledger.is_file():
        raise BadRequest(f"{ledger} is no file: a ledger does not replace it", hint="name another file")
    _refuse_image(image, ledger)
    if os.path.realpath(ledger) == os.path.realpath(target):
        raise BadRequest(f"{ledger} is the new disk itself", hint="name another file for its ledger")


def _refuse_image(image: Path, path: Path) -> None:
    if path.exists() and path.samefile(image):
        raise BadRequest(f"{path} is the image itself", hint="name another file")


class _Conversion(NamedTuple):
    found: Found
    reader: DiskReader
    writer: DiskWriter
    fresh: bool
    target: Path
    wanted: Wanted
    quiet: bool
    began: float

    def copied(self) -> dict[str, Any]:
        with _checked(self.found) as stop:
            rest = clone(self.reader, self.writer, stop)
            copied = self._copy(rest, stop)
        return self._figures(copied, rest.bytes_cloned)

    def copied_and_hashed(self) -> dict[str, Any]:
        """Clones nothing: shared data is not read, so it could not be compared."""
        from synvirt.disks.checking.digests import SHA256, for_accidents
        from synvirt.disks.checking.ledger import Hashing

        # Only a ledger that is kept must prove something.
        digest = for_accidents() if self.wanted.ledger is None else SHA256
        hashing = Hashing(self.reader, digest)
        with _checked(self.found) as stop:
            copied = self._copy(hashing, stop)
        ledger = hashing.ledger(self.found.name)
        report = self._figures(copied, 0)
        report["ledger"] = {"algorithm": digest.name, "rows": len(ledger.rows)}
        if self.wanted.verify:
            report["verified"] = self._verified(ledger, copied)
        if self.wanted.ledger is not None:
            _write_lines(self.wanted.ledger, ledger.lines())
            report["ledger"]["path"] = str(self.wanted.ledger)
        return report

    def _copy(self, reader: DiskReader, stop: Callable[[], bool]) -> Copied:
        with _progress(f"{self.found.name} → {self.target.name}", quiet=self.quiet) as show:
            return copy(
                reader,
                self.writer,
                fresh=self.fresh,
                threads=self.wanted.threads,
                stop=stop,
                on_progress=lambda copied: show(copied.bytes_done, copied.bytes_total),
            )

    def _verified(self, ledger: "Ledger", copied: Copied) -> dict[str, Any]:
        from synvirt.disks.checking.ledger import verify

        began = time.monotonic()
        with _reread(self.writer, self.target) as target, _progress(f"verifying {self.target.name}", quiet=self.quiet) as show:
            bytes_read = verify(
                ledger, target, threads=self.wanted.threads, on_progress=lambda done: show(done, copied.bytes_total)
            )
        seconds = time.monotonic() - began
        return {"bytes_read": bytes_read, "seconds": round(seconds, 3), "rate_bps": round(bytes_read / seconds)}

    def _figures(self, copied: Copied, bytes_cloned: int) -> dict[str, Any]:
        seconds = time.monotonic() - self.began
        return {
            "size_bytes": self.reader.size,
            "bytes_read": copied.bytes_done,
            "bytes_written": self.reader.size - bytes_cloned - copied.bytes_zero,
            "bytes_zero": copied.bytes_zero,
            "bytes_cloned": bytes_cloned,
            "seconds": round(seconds, 3),
            "rate_bps": round((copied.bytes_done + bytes_cloned) / seconds),
            "checksums_verified": [checksum.name for checksum in self.found.checksums],
        }


@contextmanager
def _checked(found: Found) -> Iterator[Callable[[], bool]]:
    """Checks the digests of an archive during the copy; all of them must be right at the end."""
    if not found.checksums:
        yield lambda: False
        return
    from synvirt.disks.checking.checksum import Checksums

    with Checksums(found.checksums) as checksums:
        yield checksums.stop
        checksums.verify()


@contextmanager
def _writer(target: Path, size: int, *, force: bool) -> Iterator[DiskWriter]:
    if not target.is_block_device():
        from synvirt.disks.raw.new_file import new_file

        with new_file(target, size, replace=force) as writer:
            yield writer
        return
    if not force:
        raise Conflict(f"{target.name} is a device: what is on it would be lost", hint="--force writes over it")
    device = open_writer(BlockWriterSpec(path=str(target), size_bytes=size))
    try:
        yield device
    finally:
        device.close()


@contextmanager
def _reread(writer: DiskWriter, target: Path) -> Iterator[DiskReader]:
    """Reads what was written, from the storage if possible: clean pages are dropped from memory."""
    # A new file has no name yet.
    flags = os.O_RDONLY | os.O_CLOEXEC
    descriptor = os.dup(writer.descriptor) if isinstance(writer, RawWriter) else os.open(target, flags)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    reader = RawReader(target.name, length=writer.size, descriptor=descriptor)
    try:
        yield reader
    finally:
        reader.close()


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    """Writes the whole file, or none."""
    from synvirt.durable import put_text

    try:
        put_text(path, (f"{line}\n" for line in lines))
    except OSError as error:
        raise DiskWriteFailed(f"{path.name} cannot be written: {error.strerror}", hint=HINTS.get(error.errno or 0)) from error


@contextmanager
def _progress(title: str, *, quiet: bool) -> Iterator[Show]:
    if quiet:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(shown(title), total=None)
        yield lambda done, total: bars.update(bar, total=total, completed=done)


def sentence(report: dict[str, Any]) -> str:
    """The report as a sentence."""
    cloned = f", {sized(report['bytes_cloned'])} cloned" if report["bytes_cloned"] else ""
    checked = f", {', '.join(report['checksums_verified'])} checked" if report["checksums_verified"] else ""
    verified = ""
    if "verified" in report:
        figures = report["verified"]
        verified = (
            f"; verified by {report['ledger']['algorithm'].upper()}: {sized(figures['bytes_read'])} read back"
            f" in {figures['seconds']:.1f} s"
        )
    return shown(
        f"{report['target']}: {sized(report['size_bytes'])}, of which {sized(report['bytes_written'])} written{cloned} and"
        f" {sized(report['bytes_zero'])} zero, in {report['seconds']:.1f} s ({sized(report['rate_bps'])}/s){checked}{verified}"
    )


def is_quiet(json: bool) -> bool:
    return json or not sys.stderr.isatty()
