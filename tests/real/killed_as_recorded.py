"""The service, which is killed at the n-th record that libvirt makes of its guest, once that begins to move onto its volume.

`python -m tests.real.killed_as_recorded N ARGUMENTS…`, with synvirt's arguments. Between two records libvirt sends a command to
QEMU, or has its answer. It puts each record in the place of the one before."""

import ctypes
import os
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synvirt.__main__ import main
from synvirt.kvm.library import module

# <linux/inotify.h>: IN_MOVED_TO, and inotify_event up to its name, whose length is the last number.
MOVED_TO, EVENT = 0x80, struct.Struct("iIII")


def kill_at(nth: int, record: Path) -> None:
    """This process, at the n-th record from here on."""
    # The kernel counts: who only looks at the file misses a record on a busy machine, and waits for one that never comes.
    libc = ctypes.CDLL(None, use_errno=True)
    events = libc.inotify_init()
    assert libc.inotify_add_watch(events, os.fsencode(record.parent), MOVED_TO) >= 0, os.strerror(ctypes.get_errno())

    def watch() -> None:
        left = nth
        while left > 0:
            left -= list(_names(os.read(events, 1 << 16))).count(record.name)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _names(events: bytes) -> Iterator[str]:
    at = 0
    while at < len(events):
        length = EVENT.unpack_from(events, at)[3]
        at += EVENT.size + length
        yield os.fsdecode(events[at - length : at].rstrip(b"\0"))


def killed_at(nth: int, folder: Path) -> None:
    domains = module().virDomain
    begin = domains.blockCopy

    def watched(*arguments: Any) -> None:
        domains.blockCopy = begin
        kill_at(nth, folder / f"{arguments[0].name()}.xml")
        begin(*arguments)

    domains.blockCopy = watched


if __name__ == "__main__":
    nth, *sys.argv[1:] = sys.argv[1:]
    killed_at(int(nth), Path(sys.argv[sys.argv.index("--data-dir") + 1]) / "libvirt/run/qemu")
    main()
