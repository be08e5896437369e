"""What the menu of a guest's boot loader starts, by files as distributions write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from synvirt.guests.inside import menus
from synvirt.guests.inside.files import FILE_BYTES_MAX


class Planted:
    """The texts of a guest's file system, by their paths."""

    is_ntfs = False

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = {f"/{path}": text for path, text in texts.items()}

    def read(self, path: str) -> str | None:
        text = self.texts.get(path)
        return text and text[:FILE_BYTES_MAX]

    def names(self, path: str) -> list[str]:
        return [Path(each).name for each in self.texts if str(Path(each).parent) == path]

    def target(self, path: str) -> str | None:
        return None

    def entry(self, path: str) -> Any:
        return self if path in self.texts else None

    @property
    def file_mode(self) -> int:
        return 0o100644


# As update-grub of Debian 12 writes it, shortened.
GRUB_CFG = """
if [ -s $prefix/grubenv ]; then
  set have_grubenv=true
  load_env
fi
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
   set next_entry=
   save_env next_entry
   set boot_once=true
else
   set default="DEFAULT"
fi
function savedefault {
  if [ -z "${boot_once}" ]; then
    saved_entry="${chosen}"
    save_env saved_entry
  fi
}
menuentry 'Debian GNU/Linux' --class debian --class gnu-linux $menuentry_id_option 'gnulinux-simple-77' {
\tload_video
\tlinux\t/boot/vmlinuz-6.1.0-28-amd64 root=UUID=77 ro  quiet
\tinitrd\t/boot/initrd.img-6.1.0-28-amd64
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-77' {
\tmenuentry 'Debian GNU/Linux, with Linux 6.1.0-28-amd64' --class debian $menuentry_id_option 'gnulinux-6.1.0-28-advanced-77' {
\t\tlinux\t/boot/vmlinuz-6.1.0-28-amd64 root=UUID=77 ro  quiet
\t\tinitrd\t/boot/initrd.img-6.1.0-28-amd64
\t}
\tmenuentry 'Debian GNU/Linux, with Linux 6.1.0-9-amd64' --class debian $menuentry_id_option 'gnulinux-6.1.0-9-advanced-77' {
\t\tlinux\t/boot/vmlinuz-6.1.0-9-amd64 root=UUID=77 ro  quiet
\t\tinitrd\t/boot/initrd.img-6.1.0-9-amd64
\t}
}
menuentry "Memory test (memtest86+x64.bin)" {
\tlinux /boot/memtest86+x64.bin
}
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
\tfwsetup
}
"""
NEWEST, OLDER = "/boot/initrd.img-6.1.0-28-amd64", "/boot/initrd.img-6.1.0-9-amd64"


@pytest.mark.parametrize(
    ("default", "saved", "initrd"),
    [
        ("0", "", NEWEST),
        ("1>1", "", OLDER),
        ("gnulinux-advanced-77>gnulinux-6.1.0-9-advanced-77", "", OLDER),
        ("Advanced options for Debian GNU/Linux>Debian GNU/Linux, with Linux 6.1.0-9-amd64", "", OLDER),
        ("${saved_entry}", "1>gnulinux-6.1.0-9-advanced-77", OLDER),
        ("${saved_entry}", "", NEWEST),
        ("2", "", NEWEST),
        ("no such entry", "", NEWEST),
    ],
)
def test_of_two_kernels_the_one_that_grub_starts_is_meant(default: str, saved: str, initrd: str) -> None:
    """Where it starts no Linux, or none that is there, the menu's first."""
    texts = {
        "boot/grub/grub.cfg": GRUB_CFG.replace("DEFAULT", default),
        "boot/grub/grubenv": f"# GRUB Environment Block\nsaved_entry={saved}\n#####",
    }
    entry = menus.started(Planted(texts))
    assert entry is not None
    assert entry.initrds == (initrd,)
    assert entry.kernel == initrd.replace("initrd.img", "vmlinuz")


BLS = (
    "title Red Hat Enterprise Linux\nversion {0}\nlinux /vmlinuz-{0}\ninitrd /initramfs-{0}.img $tuned_initrd\n"
    "options root=UUID=7\n"
)
RELEASES = ("0-rescue-ab12", "5.14.0-70.el9", "5.14.0-427.el9", "5.14.0-362.8.1.el9", "5.14.0-9.el9")


@pytest.mark.parametrize(("saved", "release"), [("", "5.14.0-427.el9"), ("ab12-5.14.0-9.el9", "5.14.0-9.el9")])
def test_of_the_entries_in_a_folder_the_chosen_or_the_newest_one_is_meant(saved: str, release: str) -> None:
    """By numbers: 427 is newer than 70. Its /boot is a file system of its own."""
    texts = {f"loader/entries/ab12-{each}.conf": BLS.format(each) for each in RELEASES}
    entry = menus.started(Planted({**texts, "grub2/grubenv": f"saved_entry={saved}\n", "grub2/grub.cfg": "blscfg\n"}))
    assert entry is not None
    assert (entry.initrds, entry.menu) == ((f"/initramfs-{release}.img",), f"/boot/loader/entries/ab12-{release}.conf")


EFI = "/boot/efi/EFI/redhat"


@pytest.mark.parametrize(("saved", "release"), [("", "4.18.0-553.el8"), ("ab12-4.18.0-80.el8", "4.18.0-80.el8")])
def test_a_rhel_8_by_uefi_has_the_options_of_its_entries_on_its_efi_system_partition(saved: str, release: str) -> None:
    entries = {
        f"loader/entries/ab12-{each}.conf": BLS.format(each).replace("root=UUID=7", "$kernelopts $tuned_params")
        for each in ("4.18.0-80.el8", "4.18.0-553.el8")
    }
    grubenv = f"# GRUB Environment Block\nsaved_entry={saved}\nkernelopts=root=/dev/mapper/rhel-root ro\n####"
    assert menus.started(Planted(entries)) is None
    entry = menus.started(Planted(entries), {f"{EFI}/grubenv": grubenv, f"{EFI}/grub.cfg": "blscfg\n"})
    assert entry is not None
    assert entry.initrds == (f"/initramfs-{release}.img",)
    assert "root=/dev/mapper/rhel-root" in entry.options


RHEL_7 = """
   set default="${saved_entry}"
menuentry 'Red Hat (3.10.0-1160)' --class red --unrestricted $menuentry_id_option 'gnulinux-3.10.0-1160-advanced-7' {
\tlinuxefi /vmlinuz-3.10.0-1160 root=/dev/mapper/rhel-root ro
\tinitrdefi /initramfs-3.10.0-1160.img
}
menuentry 'Red Hat (3.10.0-957)' --class red --unrestricted $menuentry_id_option 'gnulinux-3.10.0-957-advanced-7' {
\tlinuxefi /vmlinuz-3.10.0-957 root=/dev/mapper/rhel-root ro
\tinitrdefi /initramfs-3.10.0-957.img
}
"""


def test_a_menu_on_an_efi_system_partition_counts_where_its_kernel_is() -> None:
    by_efi = {f"{EFI}/grub.cfg": RHEL_7, f"{EFI}/grubenv": "saved_entry=Red Hat (3.10.0-957)\n"}
    entry = menus.started(Planted({"vmlinuz-3.10.0-957": "", "vmlinuz-3.10.0-1160": ""}), by_efi)
    assert entry is not None
    assert (entry.initrds, entry.menu) == (("/initramfs-3.10.0-957.img",), f"{EFI}/grub.cfg")
    assert menus.started(Planted({"etc/os-release": ""}), by_efi) is None, "its root file system, with an empty /boot"


@pytest.mark.parametrize(
    ("texts", "initrds"),
    [
        (
            {
                "grub/grub.conf": "default=1\ntitle A (2)\n\tkernel /vmlinuz-2 ro root=/dev/sda1\n\tinitrd /initrd-2.img\n"
                "title A (1)\n\tkernel /vmlinuz-1 ro root=/dev/sda1\n\tinitrd (hd0,0)/initrd-1.img\n"
            },
            ("/initrd-1.img",),
        ),
        (
            {
                "boot/extlinux/extlinux.conf": "DEFAULT l1\nLABEL l0\n LINUX ../vmlinuz-2\n"
                " APPEND root=UUID=7 initrd=../initrd-2\n"
                "LABEL l1\n LINUX ../vmlinuz-1\n APPEND initrd=../ucode,../initrd-1 root=UUID=7\n"
            },
            ("../ucode", "../initrd-1"),
        ),
        (
            {
                "boot/grub/grub.cfg": "menuentry 'Arch Linux' {\n"
                "\tlinux /@/boot/vmlinuz-linux root=UUID=7 rootflags=subvol=@ rw\n"
                "\tinitrd /@/boot/amd-ucode.img /@/boot/initramfs-linux.img\n}\n"
            },
            ("/@/boot/amd-ucode.img", "/@/boot/initramfs-linux.img"),
        ),
    ],
    ids=["RHEL 6", "extlinux", "Arch on Btrfs"],
)
def test_menus_of_other_boot_loaders_are_read(texts: dict[str, str], initrds: tuple[str, ...]) -> None:
    entry = menus.started(Planted(texts))
    assert entry is not None
    assert entry.initrds == initrds
    there = Planted({**texts, **{f"{entry.folder}/{Path(path).name}".lstrip("/"): "cpio" for path in initrds}})
    assert all(entry.file(there, path) is not None for path in initrds), "by its name, where its path is from another root"


@pytest.mark.parametrize(
    "text", ["", "}\n}\n}\n", "submenu\nmenuentry\nlinux\ninitrd\n}", "title\ndefault\nset default=\nlabel\n"]
)
def test_a_damaged_menu_starts_nothing(text: str) -> None:
    assert menus.started(Planted({"boot/grub/grub.cfg": text, "boot/loader/entries/a.conf": text})) is None
