"""Loaders on EFI system partitions: what mtools wrote, and what is damaged."""

import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.errors import Internal
from synvirt.guests.inside.looking import facts_of, loaders_of
from synvirt.machines import boot_entries
from synvirt.machines.loader import Loader, from_line
from synvirt.machines.ovmf_store import GLOBAL, SECURITY, UefiVariable, added, store
from synvirt.model.machine import GuestOs, VmManifest
from tests.guests.test_inside import ext4
from tests.needs import need
from tests.running.forked_small import by_python

PARTITION = UUID("5ec0ffee-0000-4000-8000-000000000018")
START = 2048
SHIM = "EFI/debian/shimx64.efi"
Image = Callable[..., Path]


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """A disk with an EFI system partition, of so many MiB, with these files."""
    need("mcopy", "mtools")

    def made(*files: str, mib: int = 40, wide: bool = False) -> Path:
        disk, sectors = tmp_path / "disk.raw", mib * 2048
        with disk.open("wb") as file:
            file.truncate((START + sectors + 2048) * 512)
        table = f"label: gpt\nstart={START}, size={sectors}, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B, uuid={PARTITION}\n"
        subprocess.run([need("sfdisk", "fdisk"), "-q", disk], input=table.encode(), check=True)
        on = ["-i", f"{disk}@@{START * 512}"]
        subprocess.run(["mformat", *on, *(["-F"] if wide else []), "-T", str(sectors), "::"], check=True)
        (tmp_path / "loader").write_bytes(b"MZ")
        for folder in sorted({str(parent) for name in files for parent in Path(name).parents} - {"."}):
            subprocess.run(["mmd", *on, f"::{folder}"], check=True)
        for name in files:
            subprocess.run(["mcopy", *on, tmp_path / "loader", f"::{name}"], check=True)
        return disk

    return made


def paths_of(disk: Path) -> list[str]:
    return [loader.path.lower() for loader in loaders_of([str(disk)])]


@pytest.mark.parametrize(("mib", "wide"), [(3, False), (40, False), (120, True)], ids=["FAT12", "FAT16", "FAT32"])
def test_of_each_system_the_loader_that_its_firmware_would_start(image: Image, mib: int, wide: bool) -> None:
    others = ["EFI/almalinux/grubx64.efi", "EFI/Microsoft/Boot/bootmgfw.efi", "EFI/tools/memtest.efi", "EFI/a long name/x.txt"]
    many = [f"EFI/debian/a module with a long name {number}.mod" for number in range(40)]
    disk = image("EFI/debian/grubx64.efi", *many, SHIM, *others, mib=mib, wide=wide)
    found = loaders_of([str(disk)])
    assert {(one.number, one.first, one.sectors, one.partition) for one in found} == {(1, START, mib * 2048, PARTITION)}
    wanted = [r"\efi\almalinux\grubx64.efi", r"\efi\debian\shimx64.efi", r"\efi\microsoft\boot\bootmgfw.efi"]
    assert sorted(one.path.lower() for one in found) == wanted


def test_a_disk_that_every_firmware_starts_needs_none(image: Image) -> None:
    assert paths_of(image(SHIM)) == [r"\efi\debian\shimx64.efi"]
    assert paths_of(image(SHIM, "EFI/BOOT/BOOTX64.EFI")) == []
    assert paths_of(image(SHIM, "EFI/BOOT/fbx64.efi")) == [r"\efi\debian\shimx64.efi"]
    assert paths_of(image("readme.txt")) == []


def test_damaged_file_systems_end_with_less_and_not_later(image: Image, tmp_path: Path) -> None:
    content, drawn, broken = image(SHIM).read_bytes(), random.Random(37), tmp_path / "broken.raw"
    for round_ in range(12):
        damaged = bytearray(content)
        for _ in range(200):
            damaged[START * 512 + drawn.randrange(64 * 1024)] = drawn.randrange(256)
        broken.write_bytes(damaged if round_ % 2 else damaged[: START * 512 + drawn.randrange(64 * 1024)])
        assert set(paths_of(broken)) <= {r"\efi\debian\shimx64.efi"} or len(paths_of(broken)) <= 16


def test_the_menu_of_an_older_red_hat_is_read_where_its_loader_is(image: Image, tmp_path: Path) -> None:
    """Its /boot has only a link to the variables there, by which GRUB chooses the older kernel."""
    disk = image("EFI/redhat/grub.cfg", SHIM, wide=True, mib=120)
    (grubenv := tmp_path / "grubenv").write_text(
        "saved_entry=ab12-4.18.0-80.el8\nkernelopts=root=UUID=7 ro\n".ljust(70_000, "#")
    )
    subprocess.run(["mcopy", "-i", f"{disk}@@{START * 512}", grubenv, "::EFI/redhat/grubenv"], check=True)
    (entries := tmp_path / "boot/loader/entries").mkdir(parents=True)
    for version in ("4.18.0-80.el8", "4.18.0-553.el8"):
        (entries / f"ab12-{version}.conf").write_text(f"linux /vmlinuz-{version}\noptions $kernelopts\n")
    (tmp_path / "boot/grub2").mkdir()
    (tmp_path / "boot/grub2/grubenv").symlink_to("../efi/EFI/redhat/grubenv")
    ext4(boot := tmp_path / "boot.raw", tmp_path / "boot")
    with by_python():
        found = facts_of([str(disk), str(boot)])
    assert found.get("finds /boot/loader/entries/ab12-4.18.0-80.el8.conf root") == "UUID=7"


@pytest.mark.parametrize(
    "line",
    [
        "",
        rf"1 2048 6144 {PARTITION} EFI\debian\shimx64.efi",
        rf"1 2048 6144 {PARTITION} \EFI",
        rf"1 2048 6144 {PARTITION} \EFI\a{chr(0)}b\shimx64.efi",
        rf"1 {10**19} 6144 {PARTITION} \EFI\debian\shimx64.efi",
        r"1 2048 6144 5ec0ffee-0000-4000-8000-00000000001- \EFI\debian\shimx64.efi",
    ],
)
def test_what_is_no_loader_is_not_believed(line: str) -> None:
    assert from_line(line) is None


def test_entries_take_the_place_of_those_of_the_same_names_and_keys_stay() -> None:
    loader = Loader(1, START, 6144, PARTITION, r"\EFI\debian\shimx64.efi")
    assert from_line(loader.line()) == loader
    before = [
        UefiVariable(GLOBAL, "PK", 0x27, b"a key"),
        UefiVariable(SECURITY, "db", 0x27, b"another"),
        UefiVariable(GLOBAL, "BootOrder", 0x07, b"\x05\x00"),
    ]
    made = added(store(before, secure_boot=True), boot_entries.entries([loader]))
    assert added(made, []) == made
    twice = added(made, boot_entries.entries([loader]))
    for one, count in ((b"a key", 1), ("BootOrder".encode("utf-16-le"), 2), ("Boot0000".encode("utf-16-le"), 1)):
        assert made.count(one) == count
    assert twice.count(struct.pack("<HB", 0x55AA, 0x3F)) == made.count(struct.pack("<HB", 0x55AA, 0x3F))
    with pytest.raises(Internal):
        added(b"\xff" * 4096, boot_entries.entries([loader]))
    with pytest.raises(Internal, match="are free"):
        added(made, [UefiVariable(GLOBAL, "large", 0x07, bytes(300_000))])


def test_the_concern_says_what_was_done_in_place_of_what_is_lost() -> None:
    manifest = VmManifest(vm_id="x", name="x", firmware="uefi", guest_os=GuestOs(family="linux"))
    loader = Loader(1, START, 6144, PARTITION, r"\EFI\debian\shimx64.efi")
    noted = boot_entries.noted(manifest, [loader])
    assert boot_entries.are_made_anew(noted)
    assert boot_entries.noted(noted, [loader]) == noted
    assert not boot_entries.are_made_anew(manifest)
