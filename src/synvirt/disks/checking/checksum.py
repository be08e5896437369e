"""Checks an archive's digests of its parts while the same bytes are copied.

    with Checksums(opened.checksums, stop=stop) as checksums:
        copy(reader, writer, stop=checksums.stop)     # a mismatch found early ends the copy early
        checksums.verify()

A separate thread reads the file a second time: hashing must go in order, copying need not, and the second read comes from
memory. hashlib releases the interpreter's lock, so it does not delay the copy's threads.
"""

import hashlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from synvirt.blocks import new_buffer
from synvirt.disks.roots import open_spec
from synvirt.disks.specs import ChecksumSpec, RawSpec
from synvirt.errors import Cancelled, Internal, MalformedArchive, SynvirtError
from synvirt.sizes import MIB

# Fits the processor's second-level cache, and calls `stop` a few hundred times per second.
STEP_BYTES = MIB


def check(checksum: ChecksumSpec, stop: Callable[[], bool] = lambda: False) -> None:
    """Hashes the range and compares: MalformedArchive if it differs, DiskReadFailed, or Cancelled."""
    reader = open_spec(
        RawSpec(
            path=checksum.path,
            offset=checksum.offset,
            length=checksum.length,
            remote=checksum.remote,
            version=checksum.version,
            beneath=checksum.beneath,
        )
    )
    try:
        digest = hashlib.new(checksum.algorithm, usedforsecurity=False)
        view = new_buffer(STEP_BYTES)
        for at in range(0, reader.size, STEP_BYTES):
            if stop():
                raise Cancelled
            step = view[: min(STEP_BYTES, reader.size - at)]
            reader.read_into(at, step)
            digest.update(step)
    finally:
        reader.close()
    found = digest.hexdigest()
    if found != checksum.expected.strip().lower():
        raise MalformedArchive(
            f"{checksum.name}: its {checksum.algorithm.upper()} is {found}, but the manifest says {checksum.expected}",
            hint="it was damaged or changed after it was exported: copy it again from where it came, or export it again",
        )


class Checksums:
    """Checks them one by one, in one thread, from `__enter__` on; that thread has ended after `__exit__`."""

    def __init__(self, checksums: tuple[ChecksumSpec, ...], *, stop: Callable[[], bool] = lambda: False) -> None:
        self._checksums, self._stop = checksums, stop
        self._left = threading.Event()
        self._error: SynvirtError | None = None
        self._thread = threading.Thread(target=self._check_all, name="checksums", daemon=True)

    def stop(self) -> bool:
        """For the copy that runs meanwhile: the caller wants to stop, or a checksum is wrong already."""
        return self._error is not None or self._stop()

    def verify(self) -> None:
        """Waits for the end and raises the error, if any. All checksums are right, if this returns."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _check_all(self) -> None:
        try:
            for checksum in self._checksums:
                check(checksum, lambda: self._left.is_set() or self._stop())
        except SynvirtError as error:
            self._error = error
        except Exception as error:
            self._error = Internal(f"checking a checksum broke: {type(error).__name__}")
            self._error.__cause__ = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()
        if isinstance(error, Cancelled) and self._error is not None and not isinstance(self._error, Cancelled):
            # The copy ended because of this error: report it, and not a cancel.
            raise self._error from None
