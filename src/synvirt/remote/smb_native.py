"""The bytes of an SMB share through Samba's own client, where this host has it: a few processes (smb_helper) per share.

Where it fails (it is not installed, a file does not open), the caller uses smbprotocol. That opens the file in any case: it
knows the version, and keeps others from writing. So a process that dies, for example when its connection breaks, is not simply
started again: the caller connects again, and first checks that the file is the same.
"""

import mmap
import os
import queue
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from synvirt.errors import cause_of
from synvirt.remote.smb_helper import ANSWER, LENGTH, NO_LIBRARY, PATH_BYTES_MAX, QUESTION
from synvirt.sizes import KIB, MIB

log = structlog.get_logger(__name__)

# One process uses a whole core; two hide the network's delay from one another.
LANES: Final = 2
# The size of one request. Larger ones do not fit in the processors' caches, on both sides, and take half as long again.
PART_BYTES: Final = MIB
MEMORY_BYTES: Final = 2 * PART_BYTES
# A smaller read is a header or a table, and not worth a process.
WORTH_BYTES: Final = 256 * KIB
# Time for Python's start, and at worst a login with Kerberos.
BEGIN_TIMEOUT_S: Final = 30.0
ANSWER_TIMEOUT_S: Final = 60.0
# After this many files that it fails to read, Python's SMB reads all.
FAILURES_MAX: Final = 3
_HELPER: Final = Path(__file__).with_name("smb_helper.py")


class _Gone(Exception):
    """The process is of no more use."""


class _Lane:
    """One process, for one reader at a time."""

    def __init__(self, place: list[str]) -> None:
        descriptor = os.memfd_create("synvirt-smb", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, MEMORY_BYTES)
            self._memory = mmap.mmap(descriptor, MEMORY_BYTES)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HELPER), str(descriptor), str(MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8"},
            )
        finally:
            os.close(descriptor)
        try:
            content = b"\0".join(text.encode() for text in place)
            self._send(LENGTH.pack(len(content)) + content)
            self._answer(BEGIN_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def read_into(self, path: str, offset: int, into: memoryview) -> int:
        """The number of bytes: fewer at the file's end, or where it could read no more. OSError: none could be read; _Gone."""
        parts = [(at, min(len(into) - at, PART_BYTES)) for at in range(0, len(into), PART_BYTES)]
        total, failure = 0, 0
        self._ask(path, offset, 0, parts[0][1])
        for number, (at, count) in enumerate(parts):
            # The next part is read while this one is copied from its half of the memory.
            if number + 1 < len(parts):
                self._ask(path, offset + parts[number + 1][0], number + 1, parts[number + 1][1])
            status, got = self._answer(ANSWER_TIMEOUT_S)
            if got > count:
                raise _Gone(f"it answered with {got} bytes of {count}")
            half = number % 2 * PART_BYTES
            into[at : at + got] = memoryview(self._memory)[half : half + got]
            failure = failure or status
            total += got if total == at else 0
        if failure and not total:
            raise OSError(failure, os.strerror(failure))
        return total

    def _ask(self, path: str, offset: int, number: int, count: int) -> None:
        name = path.encode()
        self._send(QUESTION.pack(offset, number % 2 * PART_BYTES, count, len(name)) + name)

    def _send(self, content: bytes) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except OSError as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise _Gone(f"it ended: {cause_of(error)}") from error

    def _answer(self, within_s: float) -> tuple[int, int]:
        assert self._process.stdout is not None
        descriptor, found, deadline = self._process.stdout.fileno(), b"", time.monotonic() + within_s
        while len(found) < ANSWER.size:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise _Gone(f"no answer within {within_s:.0f} s")
            part = os.read(descriptor, ANSWER.size - len(found))
            if not part:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
                raise _Gone(f"it ended with {self._process.returncode}")
            found += part
        status, got = ANSWER.unpack(found)
        return int(status), int(got)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class NativeShare:
    """`read` is for pieces that are large enough. From any thread."""

    # Found once, and true for the process: the library is not installed.
    _no_library = False

    def __init__(
        self, host: str, port: int, share: str, *, user: str, password: str, domain: str, deny_write: bool = True
    ) -> None:
        """`deny_write`: others may not write a file while it is read."""
        self._place = [host, str(port), share, domain, user, password, "deny_write" if deny_write else ""]
        self._lock = threading.Lock()
        self._idle: queue.LifoQueue[_Lane | None] = queue.LifoQueue()
        for _ in range(LANES):
            self._idle.put(None)
        # libsmbclient's URLs allow no colons in a name; a NUL would end a text.
        self._failures = FAILURES_MAX if ":" in host or "\0" in "".join(self._place) else 0
        self._closed = False
        self._lanes: set[_Lane] = set()
        # A process that had already read has died: the file that it had open may have been replaced since.
        self.lost = False
        # How many bytes came this way, for tests.
        self.read_bytes = 0

    def read(self, path: str, offset: int, into: memoryview) -> int | None:
        """The number of bytes, at the start of `into`; None, where Python's SMB must read them, or (`lost`) connect again."""
        if NativeShare._no_library or self._closed or self._failures >= FAILURES_MAX or len(path.encode()) > PATH_BYTES_MAX:
            return None
        lane, got = self._idle.get(), None
        try:
            # A lane that another reader gave up may still answer its old request, so it gets no new one.
            lane = lane if self.lost else lane or self._begun()
            got = None if lane is None or self.lost else lane.read_into(path, offset, into)
        except (OSError, _Gone) as error:
            self.lost |= isinstance(error, _Gone) and not self._closed
            self._failed(str(error))
        finally:
            self._idle.put(lane)
        with self._lock:
            self.read_bytes += got or 0
        return got

    def _begun(self) -> _Lane | None:
        try:
            lane = _Lane(self._place)
        except (_Gone, OSError) as error:
            NativeShare._no_library |= f"with {NO_LIBRARY}" in str(error)
            with self._lock:
                self._failures = FAILURES_MAX
            log.info("libsmbclient cannot be used here: Python's SMB reads", share=self._place[2], cause=str(error))
            return None
        with self._lock:
            self._lanes.add(lane)
            closed = self._closed
        if closed:
            lane.close()
            return None
        return lane

    def _failed(self, cause: str) -> None:
        with self._lock:
            self._failures += 1
        if not self._closed:
            log.info("libsmbclient does not read a file: Python's SMB does", share=self._place[2], cause=cause)

    def close(self) -> None:
        """Ends what is under way in other threads, too."""
        self._closed = True
        with self._lock:
            lanes, self._lanes = self._lanes, set()
        for lane in lanes:
            lane.close()
