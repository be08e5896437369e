"""The devices by which a Linux guest finds its disks, read from files that their own tools wrote."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from synvirt.guests.inside.looking import facts_of
from synvirt.sizes import MIB
from tests.guests.linux_trees import planted
from tests.needs import need, need_root


def ext4(image: Path, tree: Path) -> None:
    subprocess.run([need("mkfs.ext4", "e2fsprogs"), "-q", "-F", "-d", tree, image, "32M"], check=True)


LISTED = "finds /etc/lvm/devices/system.devices"
FILTERS = """
devices {
    # filter = [ "a|/dev/sdz|", "r|.*|" ]
    filter = [ "a|^/dev/sda2$|", "a|/dev/sdb.*|", "a|/dev/cciss/c0d0|", "r|/dev/sr0|",
               "r|.*|" ]
    global_filter = [ "r|/dev/sdq|", "a|/dev/sdr|", "a|.*|" ]
}
"""


def test_the_devices_by_which_a_linux_finds_its_disks_are_read(tmp_path: Path) -> None:
    """The list of LVM's own is written by it. What it lists that is not there counts for nothing."""
    need_root("losetup")
    disk, pv, system = tmp_path / "root.img", tmp_path / "pv.img", tmp_path / "lvm"
    system.mkdir()
    with pv.open("wb") as file:
        file.truncate(16 * MIB)
    loop = subprocess.run(["losetup", "--find", "--show", pv], check=True, capture_output=True, text=True).stdout.strip()
    devices = f'devices {{ use_devicesfile = 1 filter = ["a|{loop}|", "r|.*|"] }}'
    config = ["--config", f"{devices} global {{ use_lvmpolld = 0 }} activation {{ udev_sync = 0 udev_rules = 0 }}"]
    try:
        for command in (["pvcreate", loop], ["vgcreate", f"synvirt{random.randrange(10**9)}", loop]):
            subprocess.run(
                [need("lvm", "lvm2"), command[0], "-q", *config, *command[1:]],
                env={**os.environ, "LVM_SYSTEM_DIR": str(system)},
                check=True,
                capture_output=True,
            )
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)
    listed = (system / "devices/system.devices").read_text()
    tree = planted(tmp_path / "tree")
    (tree / "etc/lvm/devices").mkdir(parents=True)
    (tree / "etc/lvm/lvm.conf").write_text(FILTERS)
    (tree / "etc/crypttab").write_text("# name device key options\ndata /dev/sdb3 none luks\nother UUID=1\n")
    with (tree / "etc/fstab").open("a") as fstab:
        fstab.write("/dev/sda2 none swap sw 0 0\nUUID=2 swap swap defaults\n")
    (tree / "etc/lvm/devices/system.devices").write_text(
        f"{listed.replace('IDTYPE=loop_file', 'IDTYPE=sys_wwid').replace(f'IDNAME={pv}', 'IDNAME=naa.6000c29')}"
        f"IDTYPE=devname IDNAME=/dev/sdz DEVNAME=/dev/sdz PVID={'a' * 32}\n"
    )
    ext4(disk, tree)
    found = {name: value for name, value in facts_of([str(disk), str(pv)]).items() if name.startswith("finds")}
    name = next(iter(one for one in found if one.startswith(LISTED)), "")
    assert name.removeprefix(f"{LISTED} ") in listed
    assert found == {
        name: "sys_wwid naa.6000c29",
        "finds /etc/fstab swap 1": "/dev/sda2",
        "finds /etc/fstab swap 2": "UUID=2",
        "finds /etc/crypttab data": "/dev/sdb3",
        "finds /etc/crypttab other": "UUID=1",
    }
    (tree / "etc/lvm/lvm.conf").write_text(f"{FILTERS}devices {{\n\tuse_devicesfile = 0\n}}\n")
    ext4(disk, tree)
    assert {name: value for name, value in facts_of([str(disk), str(pv)]).items() if name.startswith("finds /etc/lvm")} == {
        "finds /etc/lvm/lvm.conf filter 1": "/dev/sda2",
        "finds /etc/lvm/lvm.conf filter 2": "/dev/sdb*",
        "finds /etc/lvm/lvm.conf filter 3": "/dev/cciss/c0d0",
    }, "beside the list they do not count"
    (tree / "etc/lvm/lvm.conf").write_text(FILTERS)
    (tree / "etc/lvm/devices/system.devices").rename(tree / "etc/lvm/devices/mine.devices")
    (tree / "etc/lvm/lvmlocal.conf").write_text('devices/devicesfile = "mine.devices"\n')
    ext4(disk, tree)
    assert "finds /etc/lvm/devices/mine.devices " in "".join(facts_of([str(disk), str(pv)]))
    assert not [name for name in facts_of([str(disk)]) if name.startswith("finds /etc/lvm")], "LVM has nothing here"


# As update-grub of Debian writes it where there is GRUB_DISABLE_LINUX_UUID; the second system comes from os-prober.
GRUB_CFG = """
set root='hd0,msdos1'
menuentry 'Debian GNU/Linux' --class debian --class gnu-linux $menuentry_id_option 'gnulinux-simple-/dev/sda1' {
\tload_video
\tinsmod ext2
\techo\t'Loading Linux 6.1.0-28-amd64 ...'
\tlinux\t/boot/vmlinuz-6.1.0-28-amd64 root=/dev/sda1 ro  quiet resume=/dev/sda5
\tinitrd\t/boot/initrd.img-6.1.0-28-amd64
}
menuentry 'Old (on /dev/sdb1)' {
\tlinux /boot/vmlinuz-5.10 root=/dev/sdb1 ro
}
"""
# As RHEL 8 and 9 write them (grubby, kernel-install), and RHEL 6 (anaconda).
ENTRY = "title Red Hat Enterprise Linux ({0})\nversion {0}\nlinux /vmlinuz-{0}\ninitrd /initramfs-{0}.img\noptions {1}\n"
ENVIRONMENT = (
    "# GRUB Environment Block\nsaved_entry=abc-4.18.0\nkernelopts=root=/dev/xvda2 ro crashkernel=auto resume=UUID=5 \n####"
)
GRUB_CONF = """
default=0
splashimage=(hd0,0)/grub/splash.xpm.gz
title Red Hat Enterprise Linux Server (2.6.32-754.el6.x86_64)
\troot (hd0,0)
\tkernel /vmlinuz-2.6.32-754.el6.x86_64 ro root=/dev/vda2 rd_NO_LUKS LANG=en_US.UTF-8
"""


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"boot/grub/grub.cfg": GRUB_CFG},
            {"/boot/grub/grub.cfg root": "/dev/sda1", "/boot/grub/grub.cfg resume": "/dev/sda5"},
        ),
        (
            {
                "loader/entries/abc-0-rescue.conf": ENTRY.format("0-rescue", "root=/dev/sdz ro"),
                "loader/entries/abc-5.14.0-427.el9.x86_64.conf": ENTRY.format("5.14.0", "root=/dev/mapper/rhel-root ro"),
                "grub2/grub.cfg": "blscfg\n",
            },
            {"/boot/loader/entries/abc-5.14.0-427.el9.x86_64.conf root": "/dev/mapper/rhel-root"},
        ),
        (
            {
                "boot/loader/entries/abc-4.18.0-553.el8.x86_64.conf": ENTRY.format("4.18.0", "$kernelopts $tuned_params"),
                "boot/grub2/grubenv": ENVIRONMENT,
            },
            {
                "/boot/loader/entries/abc-4.18.0-553.el8.x86_64.conf root": "/dev/xvda2",
                "/boot/loader/entries/abc-4.18.0-553.el8.x86_64.conf resume": "UUID=5",
            },
        ),
        ({"grub/grub.conf": GRUB_CONF}, {"/boot/grub/grub.conf root": "/dev/vda2"}),
        (
            {"boot/extlinux/extlinux.conf": "LABEL l0\n\tLINUX ../vmlinuz\n\tAPPEND root=UUID=7 ro\n"},
            {"/boot/extlinux/extlinux.conf root": "UUID=7"},
        ),
        ({"boot/grub/grub.cfg": "linux16 /boot/memtest86+.bin console=ttyS0\n"}, {}),
    ],
    ids=["Debian", "RHEL 9", "RHEL 8", "RHEL 6", "extlinux", "none"],
)
def test_the_command_line_of_the_kernel_is_read(files: dict[str, str], found: dict[str, str], tmp_path: Path) -> None:
    """From a file system with /boot, or from the one that is mounted there."""
    boot, root = tmp_path / "boot.img", tmp_path / "root.img"
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    ext4(boot, tmp_path / "tree")
    ext4(root, planted(tmp_path / "root"))
    facts = facts_of([str(boot), str(root)])
    assert {name.removeprefix("finds "): value for name, value in facts.items() if name.startswith("finds ")} == found
    assert facts["host name"] == "web01"
