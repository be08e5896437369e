"""After a power cut: what belongs to a guest besides its disks, as libvirt takes an empty file for what it should be; and what
a restore says it has made."""

import base64
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from synvirt.backups.model import RestoreRequest
from synvirt.backups.restores import in_place
from synvirt.backups.restores.new_domain import put_tpm
from synvirt.hypervisor import libvirt_host
from synvirt.hypervisor.domain_xml import Firmware
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.sizes import KIB
from tests.backups.house import House, disk_content
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.restoring import XML, restore_host_of

RUN = UUID(int=7)


@pytest.fixture
def survives(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Whether a file, as it is, or what a folder names, is on the disk."""
    synced: dict[int, bytes | list[str]] = {}
    fsync = os.fsync

    def content(path: Path) -> bytes | list[str]:
        return sorted(one.name for one in path.iterdir()) if path.is_dir() else path.read_bytes()

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = content(Path(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noting)
    return lambda path: synced.get(path.stat().st_ino) == content(path)


def test_variables_that_are_kept_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: Callable[[Path], bool]
) -> None:
    variables = bytes(40) + b"_FVH" + bytes(KIB)
    build = Firmware(str(tmp_path / "CODE.fd"), str(tmp_path / "VARS.fd"))
    for file in (build.code, build.variables):
        Path(file).write_bytes(variables)
    monkeypatch.setattr(libvirt_host, "_UEFI", (build,))
    monkeypatch.setattr(libvirt_host, "_UEFI_SECURE", ())
    host = LibvirtHost("qemu:///embed?root=/nowhere", tmp_path)
    assert host.keep_variables(RUN, variables)
    kept = host.variables_file(RUN)
    assert kept.read_bytes() == variables
    assert (survives(kept), survives(kept.parent)) == (True, True)
    for left in (kept.with_suffix(".partial"), kept.with_name(f".{kept.name}.{'0' * 16}")):
        left.write_bytes(b"half")
    host.forget_variables(RUN)
    host.forget_variables(RUN)
    assert list(kept.parent.iterdir()) == []


def test_the_state_of_a_restored_tpm_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: Callable[[Path], bool]
) -> None:
    monkeypatch.setattr("synvirt.kvm.handing.give", lambda *_: None)
    xml = XML.replace("<devices>", "<devices><tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>")
    state = {"tpm2-00.permall": base64.b64encode(b"state").decode()}
    manifest = cast("Any", SimpleNamespace(sealed=SimpleNamespace(tpm=state, domain_xml=xml)))
    ledger = cast("Any", SimpleNamespace(record=lambda *_: None))
    put_tpm(restore_host_of(tmp_path, FakeHypervisor()), ledger, RUN, manifest)
    file = tmp_path / f"tpm/{RUN}/tpm2/tpm2-00.permall"
    assert file.read_bytes() == b"state"
    assert [survives(one) for one in (file, *list(file.parents)[:3])] == [True] * 4


def test_a_completed_export_survives_with_all_that_is_in_it(tmp_path: Path, survives: Callable[[Path], bool]) -> None:
    with contextlib.closing(House(tmp_path)) as house:
        house.image("web", disk_content())
        (point,) = house.run(house.job("web")).restore_point_ids
        assert house.ended(house.backups.restore(point, RestoreRequest(target="export", name="out"))).error is None
    export = tmp_path / "exports/out"
    assert [survives(one) for one in (export.parent, export, export / "domain.xml")] == [True] * 3


def test_what_a_restore_puts_in_place_survives_before_it_is_said_to_be_there(
    tmp_path: Path, survives: Callable[[Path], bool]
) -> None:
    """A file beside it that a power cut took would be taken for one that has its place already."""
    disk, copying = tmp_path / "disk.raw", cast("Any", SimpleNamespace(under_way=SimpleNamespace(run=SimpleNamespace(id=RUN))))
    disk.write_bytes(b"now")
    ledger, host = cast("Any", SimpleNamespace(record=lambda *_: None)), restore_host_of(tmp_path, FakeHypervisor())
    guest = cast("Any", SimpleNamespace(UUIDString=lambda: str(RUN)))
    restored = in_place._Restored(host, ledger, copying, lambda: guest, resumed=False)
    with restored._staged(disk) as staged:
        staged.write_bytes(b"then")
    assert (survives(staged), survives(tmp_path)) == (True, True)
    (swap,) = restored._swaps
    in_place._swap(swap)
    assert disk.read_bytes() == b"then"
    assert (survives(disk), survives(tmp_path)) == (True, True)
