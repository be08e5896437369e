"""What a test leaves in its worker's memory goes before the next one begins, where it is much.

An exception holds the frames that it went through, and they hold it: only the garbage collector frees what they have, such as a
copy's buffers, and it counts objects, not their bytes. What is free then is kept by the C library until it is asked back."""

import ctypes
import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# More than that since it was last looked for is looked for: it takes a tenth of a second.
GROWTH_BYTES = 32 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class KeptSmall:
    def __init__(self) -> None:
        self._before = resident_bytes()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        done = yield
        if resident_bytes() > self._before + GROWTH_BYTES:
            gc.collect()
            if self._trim is not None:
                self._trim(0)
            self._before = resident_bytes()
        return done
