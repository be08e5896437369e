"""Switches a Hyper-V VM off and on, and adds the note to one that has moved. Blocking code; all of it idempotent."""

import time
from typing import Final

from synvirt.errors import Internal, SourceUnreachable
from synvirt.live import refuse_power_off
from synvirt.live.hyperv import journal, machines
from synvirt.live.hyperv.session import HyperVRefused
from synvirt.live.hyperv.tracking import Runs, passing, put_notes, state_of
from synvirt.model.plan import Shutdown

POLL_S: Final = 2.0
POWER_TIMEOUT_S: Final = 300.0


def shut_down(host: Runs, vm_id: str, timeout_s: float, manner: Shutdown = "polite") -> None:
    """The guest shuts down by itself, where its integration services answer; after `timeout_s` it is forced. Off on return."""
    if _power(host, vm_id) == "off":
        return
    if manner != "force" and _shut_down(host, vm_id) and _comes(host, vm_id, "off", timeout_s):
        return
    # Suspended, for example where its host was restarted meanwhile, which saves its VMs.
    refuse_power_off(vm_id, manner, timeout_s, lambda: _power(host, vm_id) == "suspended")
    _wish(host, vm_id, "off")
    if not _comes(host, vm_id, "off", POWER_TIMEOUT_S):
        raise SourceUnreachable(f"{vm_id} was switched off, and is not off after {POWER_TIMEOUT_S:.0f} s")


def power_on(host: Runs, vm_id: str) -> None:
    """Starts the VM, and waits until it runs. SourceUnreachable where it does not."""
    if _power(host, vm_id) == "on":
        return
    _wish(host, vm_id, "start")
    if not _comes(host, vm_id, "on", POWER_TIMEOUT_S):
        raise SourceUnreachable(f"{vm_id} was started, and does not run after {POWER_TIMEOUT_S:.0f} s")


def last_start(host: Runs, vm_id: str) -> str:
    """The time when the VM's state last changed, as a start changes it. Reading a VM that is off does not change it."""
    return str(state_of(host, vm_id)["changed"])


def mark(host: Runs, vm_id: str, note: str) -> None:
    """Adds a line to the VM's notes, once."""
    notes = str(state_of(host, vm_id)["notes"])
    if journal.noted(notes, note) != notes:
        put_notes(host, vm_id, notes, lambda present: journal.noted(present, note))


def _shut_down(host: Runs, vm_id: str) -> bool:
    """False: the guest has no service that listens. SourceUnreachable: the VM is busy; a guest that could still be asked is not
    powered off."""
    try:
        return bool(host.run("power", VmId=vm_id, Wish="shutdown")["heard"])
    except HyperVRefused as error:
        if (busy := passing(error.value, error.detail)) is not None:
            raise busy from error
        return False


def _wish(host: Runs, vm_id: str, wish: str) -> None:
    wanted = "on" if wish == "start" else "off"
    try:
        host.run("power", VmId=vm_id, Wish=wish)
    except Internal:
        if _power(host, vm_id) != wanted:  # else it got there meanwhile without us
            raise


def _comes(host: Runs, vm_id: str, wanted: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while (power := _power(host, vm_id)) != wanted and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return power == wanted


def _power(host: Runs, vm_id: str) -> str:
    return machines.power_of(state_of(host, vm_id)["state"])
