"""Switches a Nutanix VM off and on, and adds the note to one that has moved, by either Prism. Blocking; idempotent."""

import time
from typing import Protocol

import structlog

from synvirt.errors import Internal, SnapshotFailed, SourceUnreachable
from synvirt.live import refuse_power_off
from synvirt.live.nutanix.central import Central
from synvirt.live.nutanix.element import Element
from synvirt.live.nutanix.machines import FoundVm, of_central, of_element
from synvirt.live.nutanix.prism import Refused
from synvirt.model.plan import Shutdown

# From the platform's answer that it switches a VM until the VM is off or on.
SWITCHED_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.2

log = structlog.get_logger(__name__)


class Control(Protocol):
    """A Prism that shows and switches VMs."""

    def vm(self, vm_id: str) -> FoundVm: ...
    def vms(self) -> list[FoundVm]: ...
    def ask_off(self, vm: FoundVm) -> None: ...
    def force_off(self, vm_id: str) -> None: ...
    def on(self, vm_id: str) -> None: ...
    def describe(self, vm_id: str, note: str) -> None: ...


class ByCentral:
    """VMs by Prism Central."""

    def __init__(self, central: Central) -> None:
        self._central = central
        self._names: tuple[dict[str, str], dict[str, str]] | None = None

    def _known(self) -> tuple[dict[str, str], dict[str, str]]:
        """Names of containers and of subnets, looked up once per session."""
        if self._names is None:
            containers = self._central.names("clustermgmt", "config/storage-containers", "containerExtId")
            self._names = (containers, self._central.names("networking", "config/subnets"))
        return self._names

    def vm(self, vm_id: str) -> FoundVm:
        return of_central(self._central.vm(vm_id)[0], *self._known())

    def vms(self) -> list[FoundVm]:
        return [of_central(vm, {}, {}) for vm in self._central.vms()]

    def ask_off(self, vm: FoundVm) -> None:
        """By the tools in the guest; by its power button, where there are none or they do not answer."""
        if vm.tools:
            try:
                return self._central.power(vm.id, "guest-shutdown")
            except (Internal, SnapshotFailed) as error:
                log.warning("the guest tools do not answer: its power button is pressed", vm=vm.name, cause=error.detail)
        return self._central.power(vm.id, "shutdown")

    def force_off(self, vm_id: str) -> None:
        self._central.power(vm_id, "power-off")

    def on(self, vm_id: str) -> None:
        self._central.power(vm_id, "power-on")

    def describe(self, vm_id: str, note: str) -> None:
        self._central.describe(vm_id, note)


class ByElement:
    """VMs by Prism Element."""

    def __init__(self, element: Element) -> None:
        self._element = element

    def vm(self, vm_id: str) -> FoundVm:
        return of_element(self._element.vm(vm_id))

    def vms(self) -> list[FoundVm]:
        return [of_element(vm) for vm in self._element.vms()]

    def ask_off(self, vm: FoundVm) -> None:
        self._element.set_power(vm.id, "ACPI_SHUTDOWN")

    def force_off(self, vm_id: str) -> None:
        self._element.set_power(vm_id, "OFF")

    def on(self, vm_id: str) -> None:
        self._element.set_power(vm_id, "ON")

    def describe(self, vm_id: str, note: str) -> None:
        """Adds a line to the VM's description. A cluster that forbids it is only logged."""
        try:
            self._element.describe(vm_id, note)
        except Refused as error:
            # 405 on clusters that Prism Central manages: the note is not worth a failed job.
            if error.http != 405:
                raise
            log.warning(
                "the cluster does not allow changes of VM descriptions: the source is not marked", vm=vm_id, cause=error.detail
            )


def shut_down(control: Control, vm_id: str, timeout_s: float, manner: Shutdown = "polite") -> None:
    """Politely, then by force."""
    vm = control.vm(vm_id)
    if vm.power == "off":
        return
    if manner != "force" and _asked(control, vm) and _is(control, vm_id, "off", timeout_s):
        return
    refuse_power_off(vm.name, manner, timeout_s, lambda: control.vm(vm_id).power == "suspended")
    try:
        control.force_off(vm_id)
    except (Internal, SnapshotFailed):
        if control.vm(vm_id).power != "off":
            raise
    if not _is(control, vm_id, "off", SWITCHED_TIMEOUT_S):
        raise SourceUnreachable(f"{vm.name} is not off {SWITCHED_TIMEOUT_S:.0f} s after it was switched off")


def _asked(control: Control, vm: FoundVm) -> bool:
    """False: the guest cannot be asked."""
    try:
        control.ask_off(vm)
    except (Internal, SnapshotFailed) as error:
        log.warning("the guest is not asked to shut down", vm=vm.name, cause=error.detail)
        return False
    return True


def power_on(control: Control, vm_id: str) -> None:
    """Starts the VM, and waits until it runs. SourceUnreachable, where it does not."""
    if control.vm(vm_id).power == "on":
        return
    control.on(vm_id)
    if not _is(control, vm_id, "on", SWITCHED_TIMEOUT_S):
        raise SourceUnreachable(f"{vm_id} is not on {SWITCHED_TIMEOUT_S:.0f} s after it was switched on")


def _is(control: Control, vm_id: str, wanted: str, timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while True:
        if control.vm(vm_id).power == wanted:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_EVERY_S)
