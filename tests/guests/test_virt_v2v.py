"""How virt-v2v-in-place is started. What it does: tests/real/test_windows.py."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from synvirt.errors import V2vFailed
from synvirt.guests import virt_v2v
from synvirt.guests.virt_v2v import VirtV2vInPlace
from synvirt.machines import disk_drivers
from synvirt.model.machine import Nic
from synvirt.programs import ProgramFailed
from tests.guests import phony_windows
from tests.guests.conversions import LINUX, NAME, manifest

MINE = "LIBGUESTFS_APPEND"


@pytest.mark.parametrize(
    ("kvm", "set_by_administrator", "parameters", "backend"),
    [
        (False, None, "nr_cpus=1 mitigations=off clearcpuid=erms,fsrm,rep_good cryptomgr.notests noreplace-smp", "force_tcg"),
        (False, "nr_cpus=2", "nr_cpus=2", "force_tcg"),
        (True, None, None, None),
        (True, "nr_cpus=2", "nr_cpus=2", None),
    ],
)
def test_an_appliance_without_kvm_has_one_processor_unless_an_administrator_says_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kvm: bool,
    set_by_administrator: str | None,
    parameters: str | None,
    backend: str | None,
) -> None:
    seen: dict[str, str] = {}

    def started(argv: list[str], *, env: Mapping[str, str], **_: Any) -> None:
        seen.update(env)

    monkeypatch.setattr(virt_v2v, "run", started)
    monkeypatch.setattr(VirtV2vInPlace, "check", lambda *_: None)
    monkeypatch.delenv(MINE, raising=False)
    if set_by_administrator is not None:
        monkeypatch.setenv(MINE, set_by_administrator)
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    preparer = VirtV2vInPlace(tmp_path / "conversions", tmp_path / "iso", tmp_path / "none", kvm=lambda: kvm)
    preparer.convert(NAME, manifest(), [str(disk)], lambda *_: None, lambda: False)
    assert (seen.get(MINE), seen.get("LIBGUESTFS_BACKEND_SETTINGS")) == (parameters, backend)


NO_NETWORK_DRIVER = "there is no virtio network driver for this version of Windows (10.0 x86_64)."


@pytest.mark.parametrize(("model", "fails"), [("vmxnet3", True), ("virtio", False), (None, False)])
def test_a_windows_that_would_have_no_network_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, model: str | None, fails: bool
) -> None:
    """Its cards are virtio's after a conversion. One that has such cards at its source has their driver."""

    def started(argv: list[str], *, on_line: Callable[[str], None], **_: Any) -> None:
        for kind, text in (("warning", NO_NETWORK_DRIVER), ("info", "This guest has virtio drivers installed.")):
            on_line(json.dumps({"type": kind, "message": text}))

    monkeypatch.setattr(virt_v2v, "run", started)
    monkeypatch.setattr(VirtV2vInPlace, "check", lambda *_: None)
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    preparer = VirtV2vInPlace(tmp_path / "conversions", tmp_path / "iso", tmp_path / "none", kvm=lambda: True)
    nics = () if model is None else (Nic(key="nic-0", model=model),)
    windows = manifest().model_copy(update={"nics": nics})
    with pytest.raises(V2vFailed, match="no virtio network driver") if fails else nullcontext() as caught:
        preparer.convert(NAME, windows, [str(disk)], lambda *_: None, lambda: False)
    if caught is not None:
        assert "another virtio-win.iso" in (caught.value.hint or "")


def test_a_folder_that_cannot_be_made_is_the_conversions_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has no room for a folder, or is read-only."""
    monkeypatch.setattr(VirtV2vInPlace, "check", lambda *_: None)
    (tmp_path / "file").touch()
    preparer = VirtV2vInPlace(tmp_path / "file" / "conversions", tmp_path / "iso", tmp_path / "none", kvm=lambda: False)
    with pytest.raises(V2vFailed, match="phony was not converted: Not a directory") as caught:
        preparer.convert(NAME, manifest(), [], lambda *_: None, lambda: False)
    assert "the service's folder" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("returncode", "stderr", "cause", "hint"),
    [
        (137, "virt-v2v-in-place: Opening the overlay", "virt-v2v-in-place was ended by SIGKILL", "memory"),
        (-6, "", "virt-v2v-in-place was ended by SIGABRT", "memory"),
        (None, "", "virt-v2v-in-place took too long", "/dev/kvm"),
        (1, "virt-v2v-in-place: error: the disk is Read-Only", "the disk is Read-Only", "shut it down"),
    ],
)
def test_a_tool_that_did_not_end_by_itself_has_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returncode: int | None, stderr: str, cause: str, hint: str
) -> None:
    def failed(*_: object, **__: object) -> None:
        raise ProgramFailed(virt_v2v.PROGRAM, returncode, stderr)

    monkeypatch.setattr(virt_v2v, "run", failed)
    monkeypatch.setattr(VirtV2vInPlace, "check", lambda *_: None)
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    preparer = VirtV2vInPlace(tmp_path / "conversions", tmp_path / "iso", tmp_path / "none", kvm=lambda: True)
    with pytest.raises(V2vFailed, match=cause) as caught:
        preparer.convert(NAME, manifest(), [str(disk)], lambda *_: None, lambda: False)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("setting", ["iso", "virt_tools"])
def test_files_that_cannot_be_looked_at_are_the_conversions_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """As in a folder that the service's user may not enter; here, by a name that no file can have."""
    monkeypatch.setattr(virt_v2v, "find", lambda program: program)
    (tmp_path / "iso" / "guest-agent").mkdir(parents=True)
    places = {"iso": tmp_path / "iso", "virt_tools": tmp_path / "none"} | {setting: tmp_path / ("x" * 300)}
    with pytest.raises(V2vFailed, match="cannot be read, and a conversion needs it: File name too long") as caught:
        VirtV2vInPlace(tmp_path / "conversions", **places, kvm=lambda: True).check(manifest())
    assert "virtio_win_iso" in (caught.value.hint or "")
    assert str(tmp_path) not in caught.value.detail


def test_a_linux_guest_needs_no_driver_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virt_v2v, "find", lambda program: program)
    preparer = VirtV2vInPlace(tmp_path / "conversions", tmp_path / "none.iso", tmp_path / "none", kvm=lambda: True)
    preparer.check(manifest(LINUX))
    with pytest.raises(V2vFailed, match=r"none\.iso is missing"):
        preparer.check(manifest())


@pytest.mark.parametrize("installed", [True, False])
def test_a_linux_is_wanted_where_its_initramfs_finds_no_disk_and_the_tool_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, installed: bool
) -> None:
    monkeypatch.setattr(virt_v2v, "find", lambda program: program if installed else None)
    preparer = VirtV2vInPlace(tmp_path / "conversions", tmp_path / "none.iso", tmp_path / "none", kvm=lambda: True)
    linux = manifest(LINUX)
    assert not preparer.wants(linux)
    assert not preparer.wants(disk_drivers.noted(linux, {"drivers in /boot/initrd.img-6.1": "ahci, sd_mod"}))
    assert preparer.wants(disk_drivers.noted(linux, {"drivers in /boot/initrd.img-6.1": "none for disks here"})) is installed
    assert preparer.wants(manifest()), "Windows, whose check says what is missing"


@pytest.mark.parametrize("name", ["one\x01two", "half \ud800", "a\rb", "<&>"])
def test_a_vm_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A disk image's file name, for example, is its VM's."""
    read: list[str] = []

    def started(argv: list[str], *, env: Mapping[str, str], **_: Any) -> None:
        domain = ET.parse(Path(env["TMPDIR"]) / "guest.xml")
        read.extend(disk.get("file", "") for disk in domain.iterfind("devices/disk/source"))

    monkeypatch.setattr(virt_v2v, "run", started)
    monkeypatch.setattr(VirtV2vInPlace, "check", lambda *_: None)
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    preparer = VirtV2vInPlace(tmp_path / "conversions", tmp_path / "iso", tmp_path / "none", kvm=lambda: True)
    named = manifest().model_copy(update={"name": name})
    preparer.convert(NAME, named, [str(disk)], lambda *_: None, lambda: False)
    assert len(read) == 1


def test_a_conversion_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is noted in the store, which is durable. Of overlays that are not there nothing is taken over."""
    synced: list[Path] = []
    monkeypatch.setattr(virt_v2v, "run", lambda *_, **__: None)
    monkeypatch.setattr(VirtV2vInPlace, "check", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    disk, folder = tmp_path / "disk.raw", tmp_path / "conversions" / NAME
    disk.write_bytes(bytes(1 << 20))
    preparer = VirtV2vInPlace(folder.parent, tmp_path / "iso", tmp_path / "none", kvm=lambda: True)
    preparer.convert(NAME, manifest(), [str(disk)], lambda *_: None, lambda: False)
    assert synced == [folder / "0.qcow2", folder, folder.parent]


def test_the_tool_gets_the_files_of_an_image_and_the_image_where_it_cannot_be_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def started(argv: list[str], *, env: Mapping[str, str], **more: Any) -> None:
        drivers = Path(env["VIRTIO_WIN"])
        said.append("a folder" if (drivers / "viostor/2k22/amd64/viostor.sys").exists() else drivers.name)
        more["on_line"](json.dumps({"type": "info", "message": f"looked in {drivers}"}))

    monkeypatch.setattr(virt_v2v, "run", started)
    monkeypatch.setattr(VirtV2vInPlace, "check", lambda *_: None)
    disk = tmp_path / "disk.raw"
    disk.write_bytes(bytes(1 << 20))
    image = phony_windows.driver_image(tmp_path / "virtio-win.iso", tmp_path)
    preparer = VirtV2vInPlace(tmp_path / "conversions", image, tmp_path / "none", kvm=lambda: True)
    preparer.convert(NAME, manifest(), [str(disk)], lambda _, text: said.append(text), lambda: False)
    assert said == ["a folder", "looked in virtio-win.iso"]
    said.clear()
    image.write_bytes(b"no image")
    preparer.convert(NAME, manifest(), [str(disk)], lambda _, text: said.append(text), lambda: False)
    assert "virtio-win.iso was not unpacked, so the conversion takes longer" in said[0]
    assert said[1:] == ["virtio-win.iso", "looked in virtio-win.iso"]
