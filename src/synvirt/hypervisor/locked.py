"""A domain that is locked for a while: by another thread that starts it, or by libvirt, which has just been opened again."""

import time
from collections.abc import Callable
from typing import Any

from synvirt.kvm.connection import load

POLL_S = 0.2
# libvirt waits 30 s for a domain's lock, and holds it a little longer where a guest's monitor does not answer.
LOCK_PATIENCE_S = 60


def patiently(step: Callable[[], object]) -> None:
    """Repeats a step while a domain is locked. When libvirt is opened again, it connects to each guest's monitor with the
    domain locked, for longer than it lets others wait."""
    libvirt = load()
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            step()
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_OPERATION_TIMEOUT or time.monotonic() >= deadline:
                raise
        else:
            return


def settled(domain: Any) -> None:
    """Waits while the domain starts: in another thread, or for a service that was killed; libvirt soon ends the latter."""
    libvirt = load()
    deadline = time.monotonic() + LOCK_PATIENCE_S
    starting = [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP]
    while domain.state() == starting and time.monotonic() < deadline:
        time.sleep(POLL_S)


def gone_or(step: Callable[[], object]) -> None:
    """Does a step. It is no error if the domain has stopped or is gone by itself."""
    libvirt = load()
    try:
        patiently(step)
    except libvirt.libvirtError as error:
        if error.get_error_code() not in (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_DOMAIN):
            raise
