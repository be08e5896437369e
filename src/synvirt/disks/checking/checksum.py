"""What an archive says its parts' digests are, checked while the same bytes are being copied.

    with Checksums(opened.checksums, stop=stop) as checksums:
        copy(reader, writer, stop=checksums.stop)     # a mismatch found early ends the copy early
        checksums.verify()

The file is read a second time, in a thread of its own: hashing must go in order, copying need not, and the second reading
comes from memory. hashlib releases the interpreter's lock while it works, so the threads of the copy are not held up.
"""

import hashlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from synvirt.buffers import new_buffer
from synvirt.disks.roots import open_spec
from synvirt.disks.specs import ChecksumSpec, RawSpec
from synvirt.errors import Cancelled, Internal, MalformedArchive, SynvirtError
from synvirt.sizes import MIB

# Fits the processor's second-level cache, and asks `stop` a few hundred times a second.
STEP_BYTES = MIB


def check(checksum: ChecksumSpec, stop: Callable[[], bool] = lambda: False) -> None:
    """Hash the range and compare: MalformedArchive if it differs, DiskReadFailed, or Cancelled."""
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
    """Checks them one after another, in one thread, from `__enter__` on; that thread is gone after `__exit__`."""

    def __init__(self, checksums: tuple[ChecksumSpec, ...], *, stop: Callable[[], bool] = lambda: False) -> None:
        self._checksums, self._stop = checksums, stop
        self._left = threading.Event()
        self._error: SynvirtError | None = None
        self._thread = threading.Thread(target=self._check_all, name="checksums", daemon=True)

    def stop(self) -> bool:
        """For the copy that runs meanwhile: the caller wants to stop, or a checksum is wrong already."""
        return self._error is not None or self._stop()

    def verify(self) -> None:
        """Wait for the end; raise what was found. All checksums are right, if this returns."""
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
            # The copy was ended because of it: report that, and not a cancel.
            raise self._error from None
