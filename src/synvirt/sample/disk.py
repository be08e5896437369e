"""The sample's disk, as a raw image that any PC boots: made of files, without root.

sector 0        MBR: syslinux's boot code and the partition table
1 MiB           FAT: syslinux, the kernel, an initramfs that finds the other partition by its label
33 MiB          ext4: busybox, the guest agent, the sample's id, the payload
"""

import gzip
import hashlib
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from synvirt.errors import Internal
from synvirt.programs import run
from synvirt.sample.pieces import Pieces
from synvirt.sizes import MIB

SECTOR_BYTES = 512
BOOT_START, BOOT_BYTES = MIB, 32 * MIB
# syslinux takes a seventh of an emulated boot to follow the kernel's clusters where they are of one sector, as mformat would
# have them for this size. These are the largest.
CLUSTER_SECTORS = 64
ROOT_START = BOOT_START + BOOT_BYTES
ROOT_LABEL = "synvirt-root"
# Free room in the root file system beyond its content, and the least that mke2fs makes a journal for.
ROOT_SPARE_BYTES = 48 * MIB
# Twice what is written, so that an import has zeros to leave out.
SPARE_FACTOR = 2
BOOT_CODE = Path("/usr/lib/syslinux/mbr/mbr.bin")
BOOT_CODE_BYTES = 440
PROGRAM_TIMEOUT_S = 300
# Real files of the machine, of the sorts that a guest has: programs, libraries, text. The first that are readable are taken.
PAYLOAD_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/bin", "/usr/share/doc")

# The console's last line names what the test and the demo look for; tty0 for a person at the screen. The rest is for emulation:
# cryptomgr.notests: a fifth of the kernel's start is tests of its own ciphers. no_timer_check: on a busy host the timer
# comes too late for the kernel's check of it, which ends in a panic; tsc=reliable: for the same reason, the kernel would take a
# slower clock. norandmaps: an emulator translates a program's code once for each place where it lies. nokaslr: to move itself
# takes the kernel long. noreplace-smp: where there is one processor, the kernel would change 9,000 of its instructions, and
# each change empties the emulator's table of pages. initcall_blacklist: a test of a cipher that runs nevertheless, and
# what only tracing needs, a tenth of the start. The last two guard a machine with secrets, which this one has not.
EMULATED = (
    "cryptomgr.notests no_timer_check tsc=reliable norandmaps nokaslr noreplace-smp "
    "initcall_blacklist=crypto_kdf108_init,trace_eval_init,tracer_init_tracefs mitigations=off init_on_alloc=0"
)
SYSLINUX_CONFIG = f"""\
SERIAL 0 115200
DEFAULT linux
PROMPT 0
TIMEOUT 1
LABEL linux
  KERNEL vmlinuz
  INITRD initrd.gz
  APPEND console=tty0 console=ttyS0,115200 quiet panic=-1 {EMULATED}
"""

# The groups of modules are loaded until the root disk is there.
INITRAMFS_INIT = f"""\
#!/bin/busybox sh
export PATH=/bin
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys
for group in /modules/order.*; do
    while read module; do insmod /modules/$module 2>/dev/null; done < $group
    [ -z "$(findfs LABEL={ROOT_LABEL} 2>/dev/null)" ] || break
done
tries=0
until root=$(findfs LABEL={ROOT_LABEL}) && [ -n "$root" ]; do
    tries=$((tries + 1)); [ $tries -lt 300 ] || {{ echo "SYNVIRT-SAMPLE has no root disk"; poweroff -f; }}
    usleep 100000
done
mount -t ext4 $root /root || {{ echo "SYNVIRT-SAMPLE cannot mount $root"; poweroff -f; }}
for folder in dev proc sys; do mount --move /$folder /root/$folder; done
exec switch_root /root /sbin/init $root
"""

ROOT_INIT = """\
#!/bin/busybox sh
export PATH=/bin:/sbin:/usr/sbin
mount -t tmpfs run /run; mount -t tmpfs tmp /tmp
hostname synvirt-sample; ip link set lo up
mkdir -p /dev/virtio-ports
for port in /sys/class/virtio-ports/*; do
    name=$(cat $port/name 2>/dev/null); [ -n "$name" ] && ln -sf ../${port##*/} /dev/virtio-ports/$name
done
echo "SYNVIRT-SAMPLE $(cat /etc/synvirt-sample) runs from $1"
[ -x /etc/rc.local ] && /etc/rc.local
while :; do
    qemu-ga -m virtio-serial -p /dev/virtio-ports/org.qemu.guest_agent.0 -t /run -l /run/qemu-ga.log
    sleep 1
done
"""

SHUTDOWN = "#!/bin/busybox sh\nsync; /bin/poweroff -f\n"


def make_disk(image: Path, pieces: Pieces, *, sample_id: str, payload_bytes: int, work: Path) -> None:
    """Write the raw disk to `image`; `work` is scratch."""
    if not BOOT_CODE.exists():
        raise Internal("the boot loader syslinux is not installed", hint="apt-get install syslinux syslinux-common mtools")
    root = work / "root.ext4"
    _make_root(root, pieces, sample_id=sample_id, payload_bytes=payload_bytes, tree=work / "tree")
    root_bytes = root.stat().st_size
    with image.open("wb") as disk:
        disk.truncate(ROOT_START + SPARE_FACTOR * root_bytes)
        disk.write(_partition_table(root_bytes))
    run(
        ["dd", f"if={root}", f"of={image}", f"bs={MIB}", f"seek={ROOT_START // MIB}", "conv=notrunc,sparse", "status=none"],
        timeout_s=PROGRAM_TIMEOUT_S,
    )
    root.unlink()
    _make_boot(image, pieces, work)


def _partition_table(root_bytes: int) -> bytes:
    """The MBR: boot code, entries of 16 bytes from offset 446, the signature. CHS fields at their end: everyone uses LBA."""
    chs = b"\xfe\xff\xff"
    entries = ((0x80, 0x0E, BOOT_START, BOOT_BYTES), (0, 0x83, ROOT_START, root_bytes))
    table = b"".join(
        struct.pack("<B3sB3sII", active, chs, kind, chs, start // SECTOR_BYTES, length // SECTOR_BYTES)
        for active, kind, start, length in entries
    )
    code = BOOT_CODE.read_bytes()[:BOOT_CODE_BYTES].ljust(446, b"\0")
    return (code + table).ljust(510, b"\0") + b"\x55\xaa"


def _make_boot(image: Path, pieces: Pieces, work: Path) -> None:
    (work / "syslinux.cfg").write_text(SYSLINUX_CONFIG)
    (work / "initrd.gz").write_bytes(gzip.compress(_initramfs(pieces), 6, mtime=0))
    partition = f"{image}@@{BOOT_START}"
    sectors, hidden = str(BOOT_BYTES // SECTOR_BYTES), str(BOOT_START // SECTOR_BYTES)
    # mtools asks for a known geometry unless it is asked not to: this is a file, not a floppy.
    env = {"MTOOLS_SKIP_CHECK": "1", "MTOOLSRC": "/dev/null"}
    geometry = ["-T", sectors, "-H", hidden, "-c", str(CLUSTER_SECTORS)]
    run(["mformat", "-i", partition, *geometry, "-v", "SYNVIRT", "::"], timeout_s=60, env=env)
    for source, name in (
        (pieces.kernel, "vmlinuz"),
        (work / "initrd.gz", "initrd.gz"),
        (work / "syslinux.cfg", "syslinux.cfg"),
    ):
        run(["mcopy", "-i", partition, str(source), f"::{name}"], timeout_s=60, env=env)
    run(["syslinux", "--install", "--offset", str(BOOT_START), str(image)], timeout_s=60)


# ── the initramfs ────────────────────────────────────────────────────────────────────────────────────────────────────


def _initramfs(pieces: Pieces) -> bytes:
    """A cpio archive in the "new" format (Linux, Documentation/driver-api/early-userspace/buffer-format.rst)."""
    folder, program = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755
    entries: list[tuple[str, int, bytes]] = [(name, folder, b"") for name in ("bin", "dev", "proc", "sys", "root", "modules")]
    entries += [("init", program, INITRAMFS_INIT.encode()), ("bin/busybox", program, pieces.busybox.read_bytes())]
    entries += [(f"bin/{applet}", stat.S_IFLNK | 0o777, b"busybox") for applet in _linked(pieces)]
    for number, group in enumerate(pieces.modules):
        entries += [(f"modules/{name}.ko", program, content) for name, content in group]
        order = "".join(f"{name}.ko\n" for name, _ in group)
        entries += [(f"modules/order.{number}", program, order.encode())]
    entries += [("TRAILER!!!", 0, b"")]
    return b"".join(_cpio_entry(inode, *entry) for inode, entry in enumerate(entries, 1))


def _linked(pieces: Pieces) -> list[str]:
    """The applets that are links to busybox. `busybox --install` makes them in a guest, which takes an emulated one long."""
    return [applet for applet in pieces.applets if applet != "busybox"]


def _cpio_entry(inode: int, name: str, mode: int, content: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    # inode, mode, uid, gid, links, mtime, size, device (4), name size, checksum
    fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return _padded(header + encoded) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


# ── the root file system ─────────────────────────────────────────────────────────────────────────────────────────────


def _make_root(image: Path, pieces: Pieces, *, sample_id: str, payload_bytes: int, tree: Path) -> None:
    for folder in ("bin", "sbin", "usr/sbin", "etc", "dev", "proc", "sys", "run", "tmp", "payload"):
        (tree / folder).mkdir(parents=True)
    _put(tree / "bin/busybox", pieces.busybox)
    for applet in _linked(pieces):
        (tree / "bin" / applet).symlink_to("busybox")
    _put(tree / "usr/sbin/qemu-ga", pieces.agent)
    for library in pieces.libraries:
        _put(tree / str(library).lstrip("/"), library)
    for name, text in (("sbin/init", ROOT_INIT), ("sbin/shutdown", SHUTDOWN)):
        (tree / name).write_text(text)
        (tree / name).chmod(0o755)
    (tree / "etc/synvirt-sample").write_text(f"{sample_id}\n")
    sums = [f"{digest}  {name}\n" for name, digest in _payload(tree / "payload", payload_bytes)]
    (tree / "payload.sha256").write_text("".join(sums))
    used = sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file())
    size_bytes = (used + used // 10 + ROOT_SPARE_BYTES) // MIB * MIB
    run(
        [
            "mke2fs",
            "-q",
            "-t",
            "ext4",
            "-L",
            ROOT_LABEL,
            "-E",
            "root_owner=0:0",
            "-d",
            str(tree),
            str(image),
            f"{size_bytes // 1024}k",
        ],
        timeout_s=PROGRAM_TIMEOUT_S,
    )
    shutil.rmtree(tree)


def _put(target: Path, source: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)  # follows links: a library is its file
    target.chmod(0o755)


def _payload(folder: Path, size_bytes: int) -> Iterator[tuple[str, str]]:
    """Copies of real files, until there are `size_bytes` of them: name and SHA-256 of each."""
    left = size_bytes
    for number, source in enumerate(_real_files()):
        if left <= 0:
            return
        name = f"payload/{number:05}"
        with source.open("rb") as file:
            content = file.read(left)
        (folder.parent / name).write_bytes(content)
        left -= len(content)
        yield name, hashlib.sha256(content).hexdigest()


def _real_files() -> Iterator[Path]:
    for start in PAYLOAD_FOLDERS:
        for folder, folders, names in os.walk(start):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK):
                    yield path
