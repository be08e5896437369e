"""The service, which is killed at its n-th pivot, before QEMU does it or after: the guest is paused then. Or it is told to end
there, by SIGTERM, and the pivot takes long, as on a slow disk that QEMU has much to write to.

`python -m tests.real.killed_at_pivot N before|after|ended ARGUMENTS…`, with synvirt's arguments."""

import os
import signal
import sys
import time
from typing import Any

from synvirt.__main__ import main
from synvirt.kvm.library import module

# Longer than a service with nothing to wait for takes to end.
PIVOTS_FOR_S = 6.0


def killed_at(nth: int, when: str) -> None:
    domains = module().virDomain
    pivot = domains.blockJobAbort
    done: list[None] = []

    def killed(*arguments: Any) -> None:
        done.append(None)
        if len(done) == nth and when == "ended":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PIVOTS_FOR_S)
        if len(done) != nth or when != "before":
            pivot(*arguments)
        if len(done) == nth and when != "ended":
            os.kill(os.getpid(), signal.SIGKILL)

    domains.blockJobAbort = killed


if __name__ == "__main__":
    nth, when, *sys.argv[1:] = sys.argv[1:]
    killed_at(int(nth), when)
    main()
