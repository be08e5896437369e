"""A backup's socket that cannot be opened: whose fault that is, by who asks and by what libvirt says of the job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from synvirt.disks.specs import NbdSpec
from synvirt.errors import AuthFailed, SnapshotFailed, SourceUnreachable, SynvirtError
from synvirt.kvm.library import load
from synvirt.live import SourceAccess
from synvirt.live.libvirt.adapter import LibvirtRemote
from tests.needs import lacking

JOB = "<domainbackup mode='pull'><disks><disk name='vda' backup='yes' exportname='{}-vda'/></disks></domainbackup>"


@pytest.mark.parametrize(
    ("endpoint", "listed", "expected", "hint"),
    [
        ("qemu+ssh://mover@kvm7/system", "synvirt-job-1", AuthFailed, "root"),
        ("qemu+ssh://mover@kvm7/system", "synvirt-job-2", SnapshotFailed, None),
        ("qemu+ssh://mover@kvm7/system", None, SnapshotFailed, None),
        ("qemu+ssh://root@kvm7/system", "synvirt-job-1", SourceUnreachable, "sshd"),
        ("qemu+ssh://root@kvm7/system", "synvirt-job-2", SnapshotFailed, None),
        ("qemu+tls://kvm7/system", "synvirt-job-1", SourceUnreachable, "firewall"),
        ("qemu+tls://kvm7/system", None, SnapshotFailed, None),
    ],
)
def test_a_closed_socket_is_reported_by_what_is_known(
    tmp_path: Path, endpoint: str, listed: str | None, expected: type[SynvirtError], hint: str | None
) -> None:
    try:
        libvirt = load(SynvirtError)
    except SynvirtError:
        lacking("needs libvirt's Python binding: apt-get install python3-libvirt")

    def job() -> Any:
        if listed is not None:
            return JOB.format(listed)
        error = libvirt.libvirtError("no backup job")
        error.err = (libvirt.VIR_ERR_NO_DOMAIN_BACKUP, 10, "no backup job", 1, None, None, None, 0, 0)
        raise error

    adapter = LibvirtRemote(SourceAccess(endpoint, {}, {}))
    spec = NbdSpec(uri=f"nbd+unix:///x?socket={quote(str(tmp_path / 'nobody'))}", bitmap=None)
    with pytest.raises(expected) as found:
        adapter._knock(SimpleNamespace(name=lambda: "web", backupGetXMLDesc=job), "synvirt-job-1", spec, None)
    assert hint in str(found.value.hint) if hint else found.value.hint is None
