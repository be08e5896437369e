"""A domain whose lock somebody holds: libvirt waits 30 s and gives up. That is no fault of the VM, and is asked again later."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import Internal, SourceUnreachable
from synvirt.live import SourceAccess
from synvirt.live.libvirt import backup
from synvirt.live.libvirt import domain as domains
from synvirt.live.libvirt.form import FORM
from synvirt.live.libvirt.host import BUSY_HINT, Host
from tests.needs import need_libvirt

XML = """
<domain><name>web</name><devices>
  <disk type='file' device='disk'><driver type='qcow2'/><source file='/d.qcow2'/><target dev='vda'/></disk>
</devices></domain>
"""
# As libvirt says it: the holder's name must not be taken for a word about snapshots.
SAID = "Timed out during operation: cannot acquire state change lock (held by monitor=remoteDispatchDomainSnapshotNum)"


def _busy_domain(libvirt: Any, deleted: list[int]) -> Any:
    """Questions about it are answered; what needs its lock is not."""

    def refuse(*_: object) -> None:
        error = libvirt.libvirtError(SAID)
        error.err = (libvirt.VIR_ERR_OPERATION_TIMEOUT, 10, SAID, 1, None, None, None, 0, 0)
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
def test_a_domain_that_is_busy_is_asked_again_later(use: Callable[[Any], object]) -> None:
    libvirt = need_libvirt()
    host = Host(*FORM.read(SourceAccess("qemu:///system", {}, {})))
    deleted: list[int] = []
    domain = _busy_domain(libvirt, deleted)
    with pytest.raises(SourceUnreachable, match="state change lock") as found, host.asked("domain web", Internal):
        use(domain)
    assert found.value.hint == BUSY_HINT
    assert deleted in ([], [0])  # a checkpoint's bitmap is not given up for that
