"""The drivers in an initramfs, as cpio(1) and the tools that pack one make it; and what is cut, hostile or of another kind."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from synvirt.guests.inside import initramfs
from synvirt.guests.inside.initramfs import drivers_of
from synvirt.guests.inside.looking import facts_of
from synvirt.sizes import KIB, MIB
from tests.guests.test_inside import ext4
from tests.needs import need
from tests.running.forked_small import by_python

PACKED = [
    ("cat",),
    ("gzip", "-9"),
    ("xz", "--check=crc32"),
    ("lzma",),
    ("bzip2",),
    ("zstd", "-q", "-19"),
    ("lz4", "-q", "-l", "-9"),
]
BUILT_IN = "kernel/drivers/scsi/sd_mod.ko\nkernel/drivers/virtio/virtio_pci.ko\nkernel/fs/ext4/ext4.ko\n"
CONFIG = (
    "#\n# Linux/x86 6.1.0 Kernel Configuration\n#\nCONFIG_VIRTIO_PCI=m\nCONFIG_BLK_DEV_SD=y\n# CONFIG_ATA_PIIX is not set\n"
)


class Content:
    """Bytes as a file of libfsext."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def get_size(self) -> int:
        return len(self.content)

    def read_buffer_at_offset(self, size: int, offset: int) -> bytes:
        return self.content[offset : offset + size]


def drivers(*parts: bytes, config: str | None = None) -> list[str] | None:
    return drivers_of([Content(part) for part in parts], config)


def cpio(folder: Path) -> bytes:
    names = "\n".join(["usr", *sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))])
    command = [need("cpio", "cpio"), "--quiet", "-o", "-H", "newc"]
    return subprocess.run(command, input=names.encode(), cwd=folder, check=True, capture_output=True).stdout


def packed(content: bytes, way: Sequence[str]) -> bytes:
    need(way[0], {"xz": "xz-utils", "lzma": "xz-utils"}.get(way[0], way[0]))
    return subprocess.run(way, input=content, check=True, capture_output=True).stdout


Make = Callable[..., bytes]


@pytest.fixture
def archive(tmp_path: Path) -> Make:
    """An archive with these modules, as the kernel's build calls their files."""

    def made(*modules: str, built_in: str | None = BUILT_IN, ending: str = ".ko", other: str = "") -> bytes:
        folder = tmp_path / "initramfs"
        shutil.rmtree(folder, ignore_errors=True)
        kernel = folder / "usr/lib/modules/6.1.0-28-amd64/kernel/drivers"
        kernel.mkdir(parents=True)
        for module in modules:
            (kernel / f"{module}{ending}").write_bytes(module.encode() * 3001)
        if built_in is not None:
            (kernel.parents[1] / "modules.builtin").write_text(built_in)
        if other:
            (folder / other).write_bytes(b"\x01" * 70_001)
        return cpio(folder)

    return made


@pytest.mark.parametrize("way", PACKED, ids=lambda way: way[0])
def test_an_initramfs_is_read_however_it_is_packed(archive: Make, way: tuple[str, ...]) -> None:
    """Before it lies microcode, as the kernel wants it: plain. It may be in several parts, and end in zeros."""
    microcode, main = archive(built_in=None, other="usr/ucode.bin"), archive("ahci", "e1000e")
    expected = ["ahci", "sd_mod", "virtio_pci"]
    for parts in (
        [packed(main, way)],
        [microcode + packed(main, way) + bytes(600)],
        [microcode, packed(main, way)],
        [microcode + packed(main[:5_000], way) + packed(main[5_000:], way)],
    ):
        assert drivers(*parts) == expected
    whole = packed(main, way)
    assert drivers(whole[: len(whole) // 2]) is None, "an incomplete list would be wrong"


@pytest.mark.parametrize("ending", [".ko", ".ko.xz", ".ko.zst", ".ko.gz"])
def test_modules_may_be_packed_themselves_and_in_an_archive_of_their_own(archive: Make, ending: str) -> None:
    """As Ubuntu 24.04 has it: microcode, modules in a plain archive, and the rest."""
    rest = packed(archive("dm-mod", other="usr/init"), ("zstd", "-q"))
    modules = archive("virtio_blk", "virtio-net", built_in=None, ending=ending)
    assert drivers(archive(built_in=None) + modules + rest) == ["sd_mod", "virtio_blk", "virtio_pci"]


def test_what_is_built_in_is_known_by_the_initramfs_or_by_the_kernels_configuration(archive: Make) -> None:
    main = archive("ahci", built_in=None)
    assert drivers(main) is None, "virtio may be built in"
    assert drivers(main, config=CONFIG) == ["ahci", "sd_mod"]
    assert drivers(main, config=f"{CONFIG}CONFIG_VIRTIO_BLK=y\nCONFIG_VIRTIO_PCI=y\n") == ["sd_mod", "virtio_blk", "virtio_pci"]
    assert drivers(archive("virtio_pci", "virtio_blk", built_in=None)) == ["virtio_blk", "virtio_pci"]


def test_nothing_is_read_behind_the_drivers_of_virtio(archive: Make) -> None:
    assert drivers(archive("virtio_pci", "virtio_blk") + b"of another kind") == ["virtio_blk", "virtio_pci"]


def test_an_initramfs_of_another_kind_says_nothing(archive: Make) -> None:
    """dracut's module «squash» puts the modules into an image; a damaged one, or one packed by lzop, says nothing either."""
    main = archive("ahci")
    assert drivers(archive("ahci", other="squashfs-root.img")) is None
    assert drivers(archive(built_in="")) is None, "there is nothing to start with"
    for other in (
        b"",
        b"\x89LZO\0\r\n\x1a\n" + main,
        b"\xff" * 4096,
        main + b"070701zz",
        main.replace(b"TRAILER!!!", b"TRAILER???"),
    ):
        assert drivers(other) is None
    for way in PACKED[1:]:
        whole = bytearray(packed(main, way))
        whole[100:400] = b"\xa5" * 300
        assert drivers(bytes(whole)) is None


def member(name: bytes, size: int, length: int | None = None) -> bytes:
    """A header of cpio, with its name."""
    numbers = [0, 0o100644, 0, 0, 1, 0, size, 0, 0, 0, 0, len(name) + 1 if length is None else length, 0]
    header = b"070701" + b"".join(b"%08X" % number for number in numbers) + name + b"\0"
    return header + bytes(-len(header) % 4)


def test_a_hostile_initramfs_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initramfs, "UNPACKED_BYTES_MAX", 4 * MIB)
    monkeypatch.setattr(initramfs, "MEMBERS_MAX", 100)
    head = member(b"usr/lib/modules/1/modules.builtin", 0xFFFF_FFF0)
    for way in PACKED[1:]:
        assert drivers(packed(head + bytes(64 * MIB), way)) is None
    assert drivers(head) is None
    assert drivers(member(b"a", 0, 0xFFFF_FFFF)) is None
    assert drivers(member(b"a", 0) * 101) is None
    assert drivers(packed(packed(head, ("gzip",)), ("gzip",))) is None
    assert drivers(b"\x02\x21\x4c\x18" + (8 * KIB).to_bytes(4, "little") + b"\xf0" + b"\xff" * 8 * KIB) is None
    monkeypatch.setattr(initramfs, "WITHIN_S", -1.0)
    assert drivers(member(b"a", 0) + member(b"TRAILER!!!", 0), config=CONFIG) is None


def test_a_guests_disk_says_what_its_chosen_kernel_has_drivers_for(archive: Make, tmp_path: Path) -> None:
    """On a file system of its own for /boot, with two kernels; the menu names the older one."""
    boot = tmp_path / "boot"
    (boot / "grub").mkdir(parents=True)
    menu = "set default=1\n" + "".join(
        f"menuentry '{version}' {{\n linux /vmlinuz-{version} root=UUID=1 ro\n initrd /initrd.img-{version}\n}}\n"
        for version in ("6.12", "6.1")
    )
    (boot / "grub/grub.cfg").write_text(menu)
    (boot / "initrd.img-6.12").write_bytes(packed(archive("virtio_pci", "virtio_blk"), ("zstd", "-q")))
    (boot / "initrd.img-6.1").write_bytes(
        archive(built_in=None, other="usr/ucode.bin") + packed(archive("ahci"), ("zstd", "-q"))
    )
    image = tmp_path / "boot.img"
    ext4(image, boot)
    with by_python():
        found = facts_of([str(image)])
    assert {name: value for name, value in found.items() if name.startswith("drivers in")} == {
        "drivers in /boot/initrd.img-6.1": "ahci, sd_mod, virtio_pci"
    }
