"""The devices by which a Linux guest finds its disks, read from files that their own tools wrote."""

import os
import random
import subprocess
from pathlib import Path

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
        "finds /etc/lvm/lvm.conf filter 1": "/dev/sda2",
        "finds /etc/lvm/lvm.conf filter 2": "/dev/sdb*",
        "finds /etc/lvm/lvm.conf filter 3": "/dev/cciss/c0d0",
    }
    (tree / "etc/lvm/lvm.conf").write_text("devices {\n\tuse_devicesfile = 0\n}\n")
    ext4(disk, tree)
    assert not [name for name in facts_of([str(disk), str(pv)]) if name.startswith("finds /etc/lvm")]
    (tree / "etc/lvm/lvm.conf").write_text(FILTERS)
    (tree / "etc/lvm/devices/system.devices").rename(tree / "etc/lvm/devices/mine.devices")
    (tree / "etc/lvm/lvmlocal.conf").write_text('devices/devicesfile = "mine.devices"\n')
    ext4(disk, tree)
    assert "finds /etc/lvm/devices/mine.devices " in "".join(facts_of([str(disk), str(pv)]))
    assert not [name for name in facts_of([str(disk)]) if name.startswith("finds /etc/lvm")], "LVM has nothing here"
