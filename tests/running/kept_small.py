"""What a test leaves in its worker's memory goes before the next one begins, where it is much.

An exception holds the frames that it went through, and they hold it: only the garbage collector frees what they have, such as a
copy's buffers, and it counts objects, not their bytes. What is free then is kept by the C library until it is asked back.

libnbd never frees the buffers that it has read into (`synvirt.disks.nbd.held`): 4 MiB for each thread of a copy. That is little
in a process that copies once, and hundreds of MiB in one that runs a thousand tests. So their pages go back to the kernel."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis.internal import charmap

from synvirt import blocks
from tests import drawn

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
# The C library keeps what its threads free, in up to eight arenas a core, and ever larger pieces: the largest that a test has
# freed. A piece of more than most disks of tests goes back at once: a smaller one, of which each page is a page fault the next
# time, is kept until a test ends.
ARENAS, GIVEN_BACK_BYTES = 2, 16 << 20
# With GIVEN_BACK_BYTES set, the C library returns all but 128 KiB of the free memory at the end of an arena, and takes it again
# for the next copy: that was half of the page faults of the laws of kinds. So it keeps more, and takes more at a time.
KEPT_FREE_BYTES, TOP_PAD_BYTES = 64 << 20, 1 << 20
# Begun when they are first needed, and end with the process: libvirt's event loop, and what starts programs that serve.
READ_NO_DISK = ("libvirt-events", "programs_0")
# Garbage is collected only after memory has grown by more than this: a collection takes a tenth of a second.
GROWTH_BYTES = 32 << 20


def own(file: str) -> bytes:
    """What the kernel says there of this process. Read some times in each test: a Path takes four times as long."""
    descriptor = os.open(f"/proc/self/{file}", os.O_RDONLY)
    try:
        return os.read(descriptor, PAGE_BYTES)
    finally:
        os.close(descriptor)


def resident_bytes() -> int:
    return int(own("statm").split(maxsplit=2)[1]) * PAGE_BYTES


def more_threads() -> list[threading.Thread]:
    """Those that may read or write a buffer just now."""
    return [one for one in threading.enumerate() if one is not threading.main_thread() and one.name not in READ_NO_DISK]


def make_tables_of_characters() -> None:
    """Hypothesis makes them once in a checkout, and keeps them as files: 200 MiB of memory, here of a process that ends."""
    if not list(charmap.charmap_file().parent.glob("codec-*utf-8*")):
        making = "from hypothesis.internal import charmap; charmap.intervals_from_codec('utf-8')"
        subprocess.run([sys.executable, "-c", making], check=True)


class KeptSmall:
    def __init__(self) -> None:
        self._buffers: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        pytest.MonkeyPatch().setattr(blocks, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": self._new_buffer}))
        self._before = resident_bytes()
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        if hasattr(library, "mallopt"):
            library.mallopt(M_ARENA_MAX, ARENAS)
            library.mallopt(M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)
            library.mallopt(M_TRIM_THRESHOLD, KEPT_FREE_BYTES)
            library.mallopt(M_TOP_PAD, TOP_PAD_BYTES)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        make_tables_of_characters()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        done = yield
        if nextitem is None or nextitem.path != item.path:
            drawn.forget()
        # What it printed: its reports have it, and the test lives as long as the process.
        item._report_sections.clear()
        self._empty_buffers()
        resident = resident_bytes()
        if resident > self._before + GROWTH_BYTES:
            gc.collect()
            if self._trim is not None:
                self._trim(0)
            resident = self._before = resident_bytes()
        self._before = min(self._before, resident)
        return done

    def _new_buffer(self, *arguments: int, **named: int) -> mmap.mmap:
        made = mmap.mmap(*arguments, **named)
        self._buffers.add(made)
        return made

    def _empty_buffers(self) -> None:
        """What outlives a test has no user: a buffer is written before it is read, and no thread is in between."""
        if not more_threads():
            for buffer in self._buffers:
                buffer.madvise(mmap.MADV_DONTNEED)
