"""Switches a XenServer VM off and on, and adds the note to one that has moved. Blocking code; all of it idempotent."""

import time
from collections.abc import Mapping
from typing import Final

from synvirt.errors import Internal, SourceUnreachable
from synvirt.live import refuse_power_off
from synvirt.live.xen.machines import vm_ref
from synvirt.live.xen.session import OF_ITS_OWN, XapiFailure, XenSession, pauses
from synvirt.machines.xenapi import NULL, Record, table, text
from synvirt.model.plan import Shutdown

POWER_TIMEOUT_S: Final = 300.0
NOTE: Final = "synvirt"
# The guest does not answer, or does not shut down: then it is powered off.
_DEAF: Final = frozenset(
    {
        "VM_LACKS_FEATURE", "VM_LACKS_FEATURE_SHUTDOWN", "VM_MISSING_PV_DRIVERS", "VM_FAILED_SHUTDOWN_ACKNOWLEDGMENT",
        "VM_SHUTDOWN_TIMEOUT", "OPERATION_NOT_ALLOWED", OF_ITS_OWN,
    }
)  # fmt: skip
# How a VM runs again: the call, and its parameters after the VM (start paused, force), by its state.
_STARTS: Final = ("VM.start", (False, False))
_RUNS_AGAIN: Final[Mapping[str, tuple[str, tuple[bool, ...]]]] = {
    "Suspended": ("VM.resume", (False, False)),
    "Paused": ("VM.unpause", ()),
}
_UNDER_WAY: Final = "OTHER_OPERATION_IN_PROGRESS"


def shut_down(session: XenSession, vm_id: str, timeout_s: float, manner: Shutdown = "polite") -> None:
    """The guest shuts down by itself, where its tools answer; after `timeout_s` it is forced. Off on return."""
    reference = vm_ref(session, vm_id)
    if _state(session, reference) == "Halted":
        return
    if manner != "force":
        _asked(session, vm_id, reference, timeout_s)
    if _state(session, reference) == "Halted":
        return
    refuse_power_off(vm_id, manner, timeout_s, lambda: _state(session, reference) in ("Suspended", "Paused"))
    _power(session, reference, f"power {vm_id} off", "VM.hard_shutdown", wanted="Halted")


def _asked(session: XenSession, vm_id: str, reference: str, timeout_s: float) -> None:
    """Asks the guest to shut down; returns once it has, or does not within that time."""
    deadline = time.monotonic() + timeout_s
    what = f"shut {vm_id} down"
    try:
        session.awaited(what, "VM.clean_shutdown", reference, timeout_s=timeout_s)
    except SourceUnreachable:
        if time.monotonic() < deadline and _state(session, reference) != "Halted":
            raise  # the pool is away; the guest is not just slow
    except XapiFailure as failure:
        if failure.code == _UNDER_WAY and (_is_shutting_down(session, reference) or _state(session, reference) == "Halted"):
            _wait_until_off(session, reference, deadline)
        elif failure.code == OF_ITS_OWN and not failure.of_task:
            raise session.as_ours(what, failure) from failure  # the toolstack restarts; the guest could still be asked
        elif failure.code not in _DEAF and failure.code != "VM_BAD_POWER_STATE":
            raise session.as_ours(what, failure) from failure


def _is_shutting_down(session: XenSession, reference: str) -> bool:
    """Whether the guest was asked before: xapi itself waits for it, for up to 20 minutes, and asks it only once meanwhile."""
    doing: Record = session.call("see what is done to a VM", "VM.get_current_operations", reference)
    return "clean_shutdown" in doing.values()


def _wait_until_off(session: XenSession, reference: str, deadline: float) -> None:
    for pause_s in pauses():
        if _state(session, reference) == "Halted" or time.monotonic() > deadline:
            return
        time.sleep(pause_s)


def power_on(session: XenSession, vm_id: str) -> None:
    """Starts the VM, or lets it run on where it was suspended or paused meanwhile, and waits until it runs."""
    reference = vm_ref(session, vm_id)
    state = _state(session, reference)
    if state != "Running":
        method, parameters = _RUNS_AGAIN.get(state, _STARTS)
        _power(session, reference, f"start {vm_id}", method, *parameters, wanted="Running")


def _power(session: XenSession, reference: str, what: str, method: str, *parameters: bool, wanted: str) -> None:
    try:
        session.awaited(what, method, reference, *parameters, timeout_s=POWER_TIMEOUT_S)
    except XapiFailure as failure:
        if _state(session, reference) != wanted:  # else it got there meanwhile without us
            raise session.as_ours(what, failure) from failure
    if (state := _state(session, reference)) != wanted:
        raise Internal(f"{session.host} was to {what}, and says that it is {state}")


def last_start(session: XenSession, vm_id: str) -> str:
    """`VM_metrics.start_time`, which stays when the VM is off; with its `generation_id`, which a revert changes."""
    vm: Record = session.call(f"tell when {vm_id} was started", "VM.get_record", vm_ref(session, vm_id))
    metrics = text(vm, "metrics")
    if not metrics or metrics == NULL:
        return ""
    found: Record = session.call(f"tell when {vm_id} was started", "VM_metrics.get_record", metrics)
    return f"{found.get('start_time')} {text(vm, 'generation_id')}"


def mark(session: XenSession, vm_id: str, note: str) -> None:
    """In `other_config`, which Xen Orchestra and XenCenter show."""
    reference = vm_ref(session, vm_id)
    vm: Record = session.call("look for a note", "VM.get_record", reference)
    if text(table(vm, "other_config"), NOTE) == note:
        return
    session.call("take an older note away", "VM.remove_from_other_config", reference, NOTE)
    session.call("note that it has moved", "VM.add_to_other_config", reference, NOTE, note)


def _state(session: XenSession, reference: str) -> str:
    return str(session.call("look at a VM", "VM.get_power_state", reference))
