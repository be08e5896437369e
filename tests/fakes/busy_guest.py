"""A guest that keeps writing while its disks are copied, for every fake of a platform."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def busy_guest(
    write: Callable[[int, bytes], bool], disk_bytes: int, *, seed: int = 3, spared: range = range(0)
) -> Iterator[list[int]]:
    """Calls `write(offset, data)` with small pieces all over a disk, outside of `spared`, until the end of the block.

    The one number of the list is how many of them were written: `write` says False where the guest is off.
    """
    written, over = [0], threading.Event()

    def keep_writing() -> None:
        generator = random.Random(seed)
        while not over.is_set():
            offset, data = generator.randrange(disk_bytes - 4096), generator.randbytes(generator.randrange(1, 4096))
            if offset + len(data) <= spared.start or offset >= spared.stop:
                written[0] += write(offset, data)
                over.wait(0.01)

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        yield written
    finally:
        over.set()
        thread.join()
