"""The service, which is killed at its n-th pivot, before QEMU does it or after: the guest is paused then.

`python -m tests.real.killed_at_pivot N before|after ARGUMENTS…`, with synvirt's arguments."""

import os
import signal
import sys
from typing import Any

from synvirt.__main__ import main
from synvirt.kvm.library import module


def killed_at(nth: int, *, after: bool) -> None:
    domains = module().virDomain
    pivot = domains.blockJobAbort
    done: list[None] = []

    def killed(*arguments: Any) -> None:
        done.append(None)
        if len(done) < nth or after:
            pivot(*arguments)
        if len(done) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    domains.blockJobAbort = killed


if __name__ == "__main__":
    nth, when, *sys.argv[1:] = sys.argv[1:]
    killed_at(int(nth), after=when == "after")
    main()
