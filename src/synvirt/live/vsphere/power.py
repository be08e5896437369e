"""Switches a vSphere VM off and on, and adds the note to one that has moved. Blocking code; all of it idempotent."""

import time
from contextlib import suppress
from typing import Any, Final

import structlog

from synvirt.errors import AuthFailed, Internal, SourceUnreachable, VmNotFound
from synvirt.live import refuse_power_off
from synvirt.live.vsphere.session import VimSession, library
from synvirt.model.plan import Shutdown
from synvirt.repeating import tried_again

OFF_POLL_S: Final = 2.0
POWER_TIMEOUT_S: Final = 300.0
# The platform's events for a VM's start: by people, by DRS, by HA; and for one that is about to start.
STARTS: Final = ("VmPoweredOnEvent", "DrsVmPoweredOnEvent", "VmRestartedOnAlternateHostEvent", "VmStartingEvent")
# The largest page. The usual one has 10, and the platform chooses which of a busy VM's starts are among them.
STARTS_MAX: Final = 1000
# How often a note is tried, where somebody else changes the configuration at the same time.
MARK_TRIES: Final = 5
NOT_KNOWN: Final = "not told"  # stored with jobs: it stays as it is

log = structlog.get_logger(__name__)


def shut_down(session: VimSession, vm_id: str, timeout_s: float, manner: Shutdown = "polite") -> None:
    """The guest shuts down by itself, where its tools answer; after `timeout_s` it is forced. Off on return."""
    if _state(session, vm_id) == "poweredOff":
        return
    if manner != "force" and _asked_to_shut_down(session, vm_id):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if _state(session, vm_id) == "poweredOff":
                return
            time.sleep(OFF_POLL_S)
    refuse_power_off(vm_id, manner, timeout_s, lambda: _state(session, vm_id) == "suspended")
    _power(session, vm_id, "power it off", "PowerOffVM_Task", wanted="poweredOff")


def power_on(session: VimSession, vm_id: str) -> None:
    _power(session, vm_id, "power it on", "PowerOnVM_Task", wanted="poweredOn")


def last_start(session: VimSession, vm_id: str) -> str:
    """Key and time of the newest event of a start. Where the platform lists none, the answer is always the same.

    By a collector of events, as a host without vCenter offers nothing else; its latest page has no order («vSphere Web Services
    API», EventHistoryCollector). System.View is enough."""
    events, what = library().vim.event, f"tell when {vm_id} was started"
    of_vm = events.EventFilterSpec.ByEntity(entity=session.machine(vm_id), recursion="self")
    wanted = events.EventFilterSpec(entity=of_vm, eventTypeId=list(STARTS), maxCount=STARTS_MAX, disableFullMessage=True)

    def ask(content: Any) -> Any:
        collector = content.eventManager.CreateCollectorForEvents(wanted)
        try:
            return collector.latestPage or ()
        finally:
            with suppress(Exception):  # it ends with the session
                collector.DestroyCollector()

    try:
        found = session.call(what, ask)
    except (AuthFailed, Internal) as error:
        log.warning("nothing would show it if the VM were started in between", vm=vm_id, cause=error.detail)
        return NOT_KNOWN
    newest = max(found, key=lambda event: event.key, default=None)
    return "" if newest is None else f"{newest.key} {newest.createdTime.isoformat()}"


def mark(session: VimSession, vm_id: str, note: str) -> None:
    """Adds a line to the VM's annotation, once. What somebody else writes meanwhile stays: the version is of the configuration
    that the line is added to."""
    what, paths = "note that it has moved", ("name", "config.annotation", "config.changeVersion")

    def change() -> None:
        found = session.properties(session.machine(vm_id), paths, what=f"look at {vm_id}")
        if not found:
            raise _gone(session, vm_id)
        present = str(found.get("config.annotation") or "")
        if note in present:
            return
        spec = library().vim.vm.ConfigSpec(annotation="\n".join(filter(None, (present, note))))
        if version := found.get("config.changeVersion"):
            spec.changeVersion = version
        task = session.call(what, lambda _: session.machine(vm_id).ReconfigVM_Task(spec))
        session.wait(task, what=what, timeout_s=POWER_TIMEOUT_S)

    meanwhile = library().vim.fault.ConcurrentAccess
    tried_again(change, tries=MARK_TRIES, after=lambda error: isinstance(error.__cause__, meanwhile))


def _asked_to_shut_down(session: VimSession, vm_id: str) -> bool:
    """False: the guest has no tools that accept such calls. SourceUnreachable: the VM is in a state that accepts none now; a
    guest that could still be asked is not powered off."""
    fault = library().vim.fault
    deaf = (fault.ToolsUnavailable, library().vmodl.fault.NotSupported)

    def ask(_: Any) -> bool:
        try:
            session.machine(vm_id).ShutdownGuest()
        except deaf:
            return False
        except fault.InvalidPowerState:
            pass  # it went off meanwhile, or is suspended: the caller checks its state
        except fault.InvalidState as error:
            raise SourceUnreachable(
                f"{session.host} cannot shut {vm_id} down in its present state", hint="it is moved or reconfigured: asked again"
            ) from error
        return True

    return session.call(f"shut {vm_id} down", ask)


def _power(session: VimSession, vm_id: str, what: str, task_name: str, *, wanted: str) -> None:
    if _state(session, vm_id) == wanted:
        return
    try:
        task = session.call(what, lambda _: getattr(session.machine(vm_id), task_name)())
        session.wait(task, what=what, timeout_s=POWER_TIMEOUT_S)
    except (Internal, SourceUnreachable):
        if _state(session, vm_id) != wanted:  # else it got there meanwhile without us
            raise


def _state(session: VimSession, vm_id: str) -> str | None:
    state: str | None = _found(session, vm_id, "runtime.powerState")
    return state


def _found(session: VimSession, vm_id: str, path: str) -> Any:
    found = session.properties(session.machine(vm_id), ("name", path), what=f"look at {vm_id}")
    if not found:
        raise _gone(session, vm_id)
    return found.get(path)


def _gone(session: VimSession, vm_id: str) -> VmNotFound:
    return VmNotFound(f"{session.host} has no VM {vm_id}", hint="list its VMs: it may have been registered again")
