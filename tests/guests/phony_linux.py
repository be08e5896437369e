"""A disk that virt-v2v takes for a Debian: ext4 with a list of packages, a kernel's module, GRUB's configuration, and programs
that virt-v2v runs in the guest. Those are scripts of busybox; the one that makes an initramfs writes its arguments there.
"""

from pathlib import Path

from synvirt.programs import run
from synvirt.sample.pieces import Pieces

MIB = 1 << 20
PARTITION_BYTES = 120 * MIB
START_BYTES = MIB
DISK_BYTES = PARTITION_BYTES + 2 * MIB
VERSION = "6.1.0-9-phony"
INITRAMFS = f"boot/initrd.img-{VERSION}"

_PACKAGE = f"linux-image-{VERSION}"
_MODULES = f"lib/modules/{VERSION}"
_MODULE = f"{_MODULES}/kernel/drivers/block/virtio_blk.ko"
_INSTALLED = (f"boot/vmlinuz-{VERSION}", f"boot/config-{VERSION}", _MODULES, _MODULE)
_FILES = {
    "etc/debian_version": "12.5\n",
    "etc/os-release": 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "etc/hostname": "phony\n",
    "etc/initramfs-tools/modules": "# all others by hand\n",
    "etc/modprobe.d/aliases.conf": "",
    "etc/fstab": "/dev/sda1 / ext4 defaults 0 1\n",
    "var/lib/dpkg/status": f"Package: {_PACKAGE}\nStatus: install ok installed\nVersion: 6.1.9-1\nArchitecture: amd64\n\n",
    "boot/grub/grub.cfg": f"menuentry 'Debian' {{\n linux /boot/vmlinuz-{VERSION} root=/dev/sda1\n initrd /{INITRAMFS}\n}}\n",
    INITRAMFS: "as at its source\n",
    f"boot/config-{VERSION}": "CONFIG_VIRTIO_BLK=m\n",
    f"{_MODULES}/modules.dep": "kernel/drivers/block/virtio_blk.ko:\n",
}
_PROGRAMS = {
    # `dpkg --listfiles`, by each of its names.
    "usr/bin/dpkg": "#!/bin/sh\n" + "".join(f"echo /{name}\n" for name in _INSTALLED),
    "usr/sbin/grub-mkconfig": "#!/bin/sh\n",
    "usr/sbin/update-initramfs": f'#!/bin/sh\necho "$@" > /{INITRAMFS}\n',
}


def disk(path: Path, work: Path, pieces: Pieces) -> Path:
    """Makes the raw disk at `path`."""
    tree = work / "tree"
    for name, text in (_FILES | _PROGRAMS).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
        (tree / name).chmod(0o755 if name in _PROGRAMS else 0o644)
    for name in ("bin", "dev", "proc", "root", "sbin", "sys", "tmp", "var/tmp", "usr/lib"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    (tree / "bin/busybox").write_bytes(pieces.busybox.read_bytes())
    (tree / "bin/busybox").chmod(0o755)
    for applet in ("sh", "echo", "cat"):
        (tree / "bin" / applet).symlink_to("busybox")
    (tree / f"boot/vmlinuz-{VERSION}").write_bytes(pieces.kernel.read_bytes())
    module = dict(pair for group in pieces.modules for pair in group)["virtio_blk"]
    (tree / _MODULE).parent.mkdir(parents=True)
    (tree / _MODULE).write_bytes(module)
    with path.open("wb") as file:
        file.truncate(DISK_BYTES)
    run(["sh", "-c", f"printf 'label: dos\\n2048,,83,*\\n' | sfdisk -q {path}"], timeout_s=60)
    options = f"offset={START_BYTES}"
    run(
        ["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(tree), "-E", options, str(path), f"{PARTITION_BYTES >> 10}k"],
        timeout_s=60,
    )
    return path


def read(raw: Path, name: str) -> str:
    """A file of the disk's one partition."""
    return run(["debugfs", "-R", f"cat /{name}", f"{raw}?offset={START_BYTES}"], timeout_s=60).stdout
