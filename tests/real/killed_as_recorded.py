"""The service, which is killed at the n-th record that libvirt makes of its guest, once that begins to move onto its volume.

`python -m tests.real.killed_as_recorded N ARGUMENTS…`, with synvirt's arguments. Between two records libvirt sends a command to
QEMU, or has its answer. It puts each record in the place of the one before."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from synvirt.__main__ import main
from synvirt.kvm.library import module


def kill_at(nth: int, record: Path) -> None:
    """This process, at the n-th record from here on."""

    def watch() -> None:
        made, left = record.stat().st_ino, nth
        while left:
            if (now := record.stat().st_ino) != made:
                made, left = now, left - 1
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


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
