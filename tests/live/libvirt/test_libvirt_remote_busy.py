"""A domain whose lock somebody holds, so that libvirt gives up after 30 s, and a connection that is lost during a call: that is
no fault of the VM, which is asked again later."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import Internal, SourceUnreachable
from synvirt.kvm.connection import translated
from synvirt.kvm.library import TAKEN_UP_HINT, UNBORN_HINT
from synvirt.live import SourceAccess
from synvirt.live.libvirt import backup
from synvirt.live.libvirt import domain as domains
from synvirt.live.libvirt.form import FORM
from synvirt.live.libvirt.host import BUSY_HINT, LOST_HINT, Host
from tests.needs import need_libvirt

XML = """
<domain><name>web</name><devices>
  <disk type='file' device='disk'><driver type='qcow2'/><source file='/d.qcow2'/><target dev='vda'/></disk>
</devices></domain>
"""
# As libvirt says it: the holder's name must not be taken for a word about snapshots.
BUSY = "Timed out during operation: cannot acquire state change lock (held by monitor=remoteDispatchDomainSnapshotNum)"
TAKEN_UP = "Timed out during operation: cannot acquire state change lock (held by monitor=init-web)"
UNBORN = "Timed out during operation: cannot acquire state change lock"
ENDLESS = [(TAKEN_UP, TAKEN_UP_HINT), (UNBORN, UNBORN_HINT)]
LOST = "End of file while reading data: Input/output error"


def _domain(libvirt: Any, said: str, deleted: list[int]) -> Any:
    """Questions about it are answered; what needs its lock is not, or the connection is lost."""
    lost = (libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_RPC)
    kind = lost if said == LOST else (libvirt.VIR_ERR_OPERATION_TIMEOUT, libvirt.VIR_FROM_QEMU)

    def refuse(*_: object) -> None:
        error = libvirt.libvirtError(said)
        error.err = (*kind, said, 1, None, None, None, 0, 0)
        raise error

    def delete(flags: int) -> None:
        deleted.append(flags)
        refuse()

    return SimpleNamespace(
        name=lambda: "web",
        XMLDesc=lambda _flags: XML,
        isActive=lambda: False,
        state=lambda: [libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_SHUTDOWN],
        hasManagedSaveImage=lambda: False,
        metadata=lambda *_: "<state reading='synvirt-job-1'/>",
        setMetadata=lambda *_: None,
        listAllCheckpoints=lambda _flags: [],
        checkpointLookupByName=lambda _name: SimpleNamespace(delete=delete),
        **dict.fromkeys(("backupBegin", "checkpointCreateXML", "createWithFlags", "blockInfo"), refuse),
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda domain: backup.begin(domain, "synvirt-job-1", backup.Server("/s"), track=()),
        lambda domain: backup.can_hold_checkpoint(domain, "synvirt-probe", ["vda"]),
        lambda domain: backup.delete(domain, "synvirt-job-1"),
        lambda domain: domains.start_to_read(domain, "synvirt-job-1"),
        lambda domain: domains.capacity_bytes(domain, ["vda"]),
    ],
    ids=["snapshot", "enable_cbt", "cleanup", "start", "inspect"],
)
@pytest.mark.parametrize(("said", "hint"), [(BUSY, BUSY_HINT), (LOST, LOST_HINT), *ENDLESS])
def test_a_domain_of_which_nothing_was_said_is_asked_again_later(use: Callable[[Any], object], said: str, hint: str) -> None:
    libvirt = need_libvirt()
    host = Host(*FORM.read(SourceAccess("qemu:///system", {}, {})))
    deleted: list[int] = []
    with pytest.raises(SourceUnreachable, match=said.split(":", maxsplit=1)[0]) as found, host.asked("domain web", Internal):
        use(_domain(libvirt, said, deleted))
    assert found.value.hint == hint
    assert deleted in ([], [0])  # a checkpoint's bitmap is not given up for that


@pytest.mark.parametrize(("said", "hint"), [(BUSY, None), *ENDLESS])
def test_a_lock_of_this_host_that_may_be_held_without_end_is_explained(said: str, hint: str | None) -> None:
    domain = _domain(need_libvirt(), said, [])
    with pytest.raises(Internal) as found, translated(Internal, "the guest is not read"):
        domain.backupBegin()
    assert found.value.hint == hint
