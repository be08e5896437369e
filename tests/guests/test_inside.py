"""What disks say of a guest that does not run: file systems as their own tools make them, read in a cage, and damaged ones."""

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from synvirt.guests.inside import looking
from synvirt.guests.inside.looking import facts_of
from synvirt.guests.inside.mirrors import AWAY
from synvirt.proof.sameness import compared
from synvirt.sizes import MIB
from tests.devices import unmount
from tests.guests import btrfs_images, lvm_disks, phony_windows
from tests.guests.linux_trees import FILES, LINUX, planted
from tests.needs import need, need_root
from tests.running.forked_small import by_python
from tests.running.processes import until

# Of all that are made here: a move keeps it.
UUID = "11111111-2222-3333-4444-555555555555"

# Of parts of a software RAID: roles, and a feature.
IN, SPARE, FAULTY, REBUILT = 0, 0xFFFF, 0xFFFE, 2


@pytest.fixture
def started_by_python() -> Iterator[None]:
    """For a test of each kind of reader: it loads all that it needs before its cage closes."""
    with by_python():
        yield


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("root"))


def ext4(image: Path, tree: Path) -> None:
    subprocess.run([need("mkfs.ext4", "e2fsprogs"), "-q", "-F", "-U", UUID, "-L", "root", "-d", tree, image, "32M"], check=True)


def xfs(image: Path, tree: Path) -> None:
    need_root("mount")
    with image.open("wb") as file:
        file.truncate(320 * MIB)
    subprocess.run([need("mkfs.xfs", "xfsprogs"), "-q", image], check=True)
    at = image.with_suffix(".mount")
    at.mkdir()
    subprocess.run(["mount", "-o", "loop", image, at], check=True)
    try:
        subprocess.run(["cp", "-a", f"{tree}/.", at], check=True)
    finally:
        unmount(at)


def partitioned(disk: Path, part: Path, table: str) -> None:
    """A boot partition, and the root behind it."""
    with disk.open("wb") as file:
        file.truncate(part.stat().st_size + 20 * MIB)
    # Of an extended partition, which holds the root.
    label, extended = ("dos", "start=9MiB, type=5\n") if table == "extended" else (table, "")
    script = f"label: {label}\nstart=1MiB, size=8MiB\n{extended}start=10MiB, size={part.stat().st_size // 512}\n"
    subprocess.run([need("sfdisk", "fdisk"), "-q", disk], input=script, text=True, check=True)
    with disk.open("r+b") as file, part.open("rb") as content:
        for at, block in phony_windows.blocks(content):
            os.pwrite(file.fileno(), block, 10 * MIB + at)


def btrfs(image: Path, tree: Path) -> None:
    btrfs_images.made(image, tree)


Make = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def made_once(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], Path]:
    """A file system of that kind with the tree, which nobody writes to."""
    folder = tmp_path_factory.mktemp("made")

    @functools.cache
    def image(kind: Make) -> Path:
        kind(folder / f"{kind.__name__}.img", tree)
        return folder / f"{kind.__name__}.img"

    return image


@pytest.mark.parametrize("kind", [ext4, xfs, btrfs])
@pytest.mark.parametrize("table", [None, "gpt", "dos", "extended"])
def test_a_linux_is_read_from_its_disks(
    made_once: Callable[[Make], Path], tmp_path: Path, kind: Make, table: str | None
) -> None:
    root = made_once(kind)
    disk, other = root, tmp_path / "other.img"
    if table is not None:
        disk = tmp_path / "disk.img"
        partitioned(disk, root, table)
    other.write_bytes(bytes(MIB))
    with by_python() if table is None else nullcontext():
        found = facts_of([str(other), str(disk)])
    start = 0 if table is None else 10 * MIB
    of_itself = found.pop(f"volume disk 2 from byte {start} on")
    assert of_itself.split()[0] == kind.__name__
    network = {name: found.pop(name) for name in list(found) if name.startswith("network file")}
    assert found == LINUX
    assert {name.rpartition("/")[2]: value.partition(";")[0] for name, value in network.items()} == {
        "50.yaml": "10.77.0.5/24, fd00::5/64",
        "interfaces": "10.0.0.9",
    }


VOLUME = """
logical_volumes { root {
  id = "aaaaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaaaaa"
  status = ["READ", "WRITE", "VISIBLE"]
  flags = []
  segment_count = 1
  segment1 { start_extent = 0 extent_count = 10 type = "striped" stripe_count = 1 stripes = ["pv0", 0] }
} }
"""


@pytest.mark.usefixtures("started_by_python")
def test_a_linux_on_logical_volumes_is_read(tree: Path, tmp_path: Path) -> None:
    """The volume's bytes are put where LVM says that they lie: to activate it would take the host's device mapper."""
    need_root("losetup")
    root, disk = tmp_path / "root.img", tmp_path / "disk.img"
    ext4(root, tree)
    with disk.open("wb") as file:
        file.truncate(64 * MIB)
    loop = subprocess.run(["losetup", "--find", "--show", disk], check=True, capture_output=True, text=True).stdout.strip()
    lvm = [need("lvm", "lvm2")]
    devices = f'devices {{ filter = ["a|{loop}|", "r|.*|"] }}'
    config = ["--config", f"{devices} global {{ use_lvmpolld = 0 }} activation {{ udev_sync = 0 udev_rules = 0 }}"]
    group = f"synvirt{random.randrange(10**9)}"
    try:
        subprocess.run([*lvm, "pvcreate", "-q", *config, loop], check=True, capture_output=True)
        subprocess.run([*lvm, "vgcreate", "-q", *config, group, loop], check=True, capture_output=True)
        # As lvcreate would write it, which wants the host's device mapper.
        text = tmp_path / "group"
        subprocess.run([*lvm, "vgcfgbackup", "-q", *config, "-f", text, group], check=True, capture_output=True)
        written = text.read_text()
        at = written.rindex("}")
        text.write_text(f"{written[:at]}{VOLUME}{written[at:]}")
        subprocess.run([*lvm, "vgcfgrestore", "-q", *config, "-f", text, group], check=True, capture_output=True)
        reported = [*lvm, "pvs", "--noheadings", "--nosuffix", "--units", "b", "-o", "pe_start", *config, loop]
        start = int(subprocess.run(reported, check=True, capture_output=True, text=True).stdout.split()[0])
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)
    with disk.open("r+b") as file:
        file.seek(start)
        file.write(root.read_bytes())
    found = facts_of([str(disk)])
    assert found[f"volume logical volume {group}/root"].startswith("ext4 ")
    assert LINUX.items() <= found.items()


def test_a_linux_is_read_beside_volumes_that_are_not(tree: Path, tmp_path: Path) -> None:
    """Its group, of two disks, is one of two; the other has a thin volume."""
    root, disks = tmp_path / "root.img", [tmp_path / f"disk{number}.img" for number in range(3)]
    btrfs(root, tree)
    first, second, third = "a" * 32, "b" * 32, "c" * 32
    # 128 MiB in extents of 4 MiB, half of them on each disk.
    halves = "".join(lvm_disks.segment(n, 16 * (n - 1), 16, "striped", f'stripes = ["pv{n}", 0]') for n in (1, 2))
    text = lvm_disks.group("system", {"pv1": first, "pv2": second}, {"root": halves}, extent_sectors=8192)
    thin = lvm_disks.segment(1, 0, 1, "thin", 'thin_pool = "pool"')
    other = lvm_disks.group("data", {"pv0": third}, {"srv": thin}, extent_sectors=8192)
    with root.open("rb") as content:
        for disk, name, metadata, size in (
            (disks[0], first, text, 64),
            (disks[1], second, "", 64),
            (disks[2], third, other, 0),
        ):
            with disk.open("wb") as file:
                file.write(lvm_disks.physical(name, metadata, lvm_disks.DATA))
                for _ in range(size):
                    file.write(content.read(MIB))
    found = facts_of([str(disk) for disk in disks])
    assert found["not read logical volume data/srv"] == "volumes of the type thin are not read"
    assert found["volume logical volume system/root"].startswith("btrfs ")
    assert LINUX.items() <= found.items()


def test_a_linux_on_a_mirror_of_software_raid_is_read(tree: Path, tmp_path: Path) -> None:
    root, disk = tmp_path / "root.img", tmp_path / "disk.img"
    ext4(root, tree)
    raid(disk, 1, root.read_bytes(), roles=[IN])
    found = facts_of([str(disk)])
    assert found.pop("volume disk 1 from byte 0 on").startswith("ext4 ")
    assert LINUX.items() <= found.items()


@pytest.mark.parametrize(
    "stale",
    [
        {"events": 17, "roles": [IN, 1]},
        {"events": 19, "roles": [IN, 1]},
        {"events": 20, "roles": [SPARE, 1]},
        {"events": 20, "roles": [IN, 1], "flags": REBUILT},
    ],
    ids=["left long ago", "left just now", "spare", "rebuilt now"],
)
def test_a_mirror_that_was_away_is_not_believed(stale: dict[str, Any], tree: Path, tmp_path: Path) -> None:
    """It has a whole file system, as it was when it left its array, or was half rebuilt."""
    roles = stale["roles"] if stale["events"] == 20 else [FAULTY, 1]
    old, before, now = tmp_path / "old", tmp_path / "before.img", tmp_path / "now.img"
    shutil.copytree(tree, old, symlinks=True)
    (old / "etc/hostname").write_text("long-ago\n")
    ext4(before, old)
    ext4(now, tree)
    disks = [tmp_path / "disk0.img", tmp_path / "disk1.img"]
    raid(disks[0], 1, before.read_bytes(), number=0, **stale)
    raid(disks[1], 1, now.read_bytes(), number=1, events=20, roles=roles)
    for order in (1, -1):
        found = facts_of([str(disk) for disk in disks[::order]])
        away, whole = (1, 2)[::order]
        assert found.pop(f"not read disk {away} from byte 0 on") == AWAY
        assert found.pop(f"volume disk {whole} from byte 0 on").startswith("ext4 ")
        assert found.items() >= LINUX.items()


def test_both_halves_of_a_mirror_are_read(tree: Path, tmp_path: Path) -> None:
    """The kernel writes one superblock after the other: a power failure between them leaves both halves whole."""
    root, disks = tmp_path / "root.img", [tmp_path / "disk0.img", tmp_path / "disk1.img"]
    ext4(root, tree)
    for number, disk in enumerate(disks):
        raid(disk, 1, root.read_bytes(), number=number, events=20 + number, roles=[0, 1])
    found = facts_of([str(disk) for disk in disks])
    assert not [name for name in found if name.startswith("not read")]
    assert found.items() >= LINUX.items()


def test_the_half_of_a_mirror_that_is_there_is_read(tree: Path, tmp_path: Path) -> None:
    """Also one that its array has left since: nothing newer is on these disks. It says itself that it was a part of it."""
    root, disk = tmp_path / "root.img", tmp_path / "disk.img"
    ext4(root, tree)
    raid(disk, 1, root.read_bytes(), events=17, roles=[0, 1])
    assert facts_of([str(disk)]).items() >= LINUX.items()


@pytest.mark.usefixtures("started_by_python")
def test_a_windows_is_read_from_its_registry(tmp_path: Path) -> None:
    need("hivexregedit", "libwin-hivex-perl")
    disk = phony_windows.disk(tmp_path / "windows.img", tmp_path)
    found = facts_of([str(disk)])
    assert found["system"] == "Windows Server 2022 Standard"
    assert found["kernel"] == "20348"


@pytest.mark.usefixtures("started_by_python")
def test_an_overlay_is_read_over_the_file_that_is_given(tree: Path, tmp_path: Path) -> None:
    """And over no other, whatever a guest has made of its header."""
    changed, before, after, overlay = (tmp_path / name for name in ("changed", "before.img", "after.img", "overlay"))
    shutil.copytree(tree, changed, symlinks=True)
    (changed / "etc/hostname").write_text("after-its-boot\n")
    ext4(before, tree)
    ext4(after, changed)
    shutil.copy(after, tmp_path / "made.img")
    rebase = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(tmp_path / "made.img"), str(overlay)]
    subprocess.run(rebase, check=True)
    subprocess.run(["qemu-img", "rebase", "-f", "qcow2", "-F", "raw", "-b", str(before), str(overlay)], check=True)
    (tmp_path / "made.img").unlink()
    assert facts_of([str(overlay)], backing={str(overlay): str(before)}) == facts_of([str(after)])
    before.rename(tmp_path / "elsewhere")
    assert facts_of([str(overlay)], backing={str(overlay): str(tmp_path / "elsewhere")}) == facts_of([str(after)])
    assert facts_of([str(overlay)], backing={str(overlay): str(tmp_path / "none")}) == {
        "not read disks": "they cannot be opened here"
    }


def test_what_a_conversion_or_a_first_boot_changes_is_seen(tree: Path, tmp_path: Path) -> None:
    changed, before, after = tmp_path / "changed", tmp_path / "before.img", tmp_path / "after.img"
    shutil.copytree(tree, changed, symlinks=True)
    (changed / "etc/hostname").write_text("localhost\n")
    (changed / "etc/fstab").write_text(FILES["etc/fstab"].replace("sdb1", "vdb1"))
    (changed / "etc/systemd/system/multi-user.target.wants/nginx.service").unlink()
    ext4(before, tree)
    ext4(after, changed)
    rows = compared(facts_of([str(before)]), facts_of([str(after)]), ())
    assert {one.item: one.grade for one in rows if one.grade != "same"} == {
        "host name": "wrong",
        "enabled nginx.service": "wrong",
        "mount /srv": "expected",
    }


@pytest.mark.parametrize("kind", [ext4, xfs, btrfs])
def test_damaged_file_systems_break_nobody(made_once: Callable[[Make], Path], tmp_path: Path, kind: Make) -> None:
    image = tmp_path / "root.img"
    subprocess.run(["cp", "--sparse=always", made_once(kind), image], check=True)
    clean = {at: page for at, page in _pages(image) if page.strip(b"\0")}
    used = list(clean)
    for seed in range(8):
        chance = random.Random(seed)
        damaged: dict[int, bytearray] = {}
        for _ in range(200):
            at = chance.choice(used)
            damaged.setdefault(at, bytearray(clean[at]))[chance.randrange(4096)] = chance.randrange(256)
        with image.open("r+b") as file:
            for at, page in damaged.items():
                os.pwrite(file.fileno(), page, at)
            assert all(value.isprintable() for value in facts_of([str(image)]).values())
            for at in damaged:
                os.pwrite(file.fileno(), clean[at], at)


def _pages(image: Path) -> Iterator[tuple[int, bytes]]:
    """By their offset. The image as a whole is hundreds of mebibytes, nearly all of them holes."""
    with image.open("rb") as file:
        for start, block in phony_windows.blocks(file):
            yield from ((start + at, block[at : at + 4096]) for at in range(0, len(block), 4096))


def test_disks_without_a_system_say_that_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blank = tmp_path / "blank.img"
    blank.write_bytes(bytes(MIB))
    assert facts_of([str(blank)]) == {"not read disks": "no system was found on them that is known here"}
    assert facts_of([str(tmp_path / "none.img")]) == {"not read disks": "they cannot be opened here"}
    assert facts_of([]) == {}
    monkeypatch.setattr(sys, "executable", need("false", "coreutils"))
    assert list(facts_of([str(blank)])) == ["not read disks"]


def luks(image: Path) -> None:
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    quick = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"]
    words = [need("cryptsetup", "cryptsetup-bin"), "-q", *quick, "--key-file", "-", "luksFormat", str(image)]
    subprocess.run(words, input=b"secret", check=True)


def bitlocker(image: Path) -> None:
    image.write_bytes(b"\xeb\x58\x90-FVE-FS-".ljust(MIB, b"\0"))


def raid(
    image: Path,
    level: int = 5,
    content: bytes = b"",
    *,
    number: int = 0,
    events: int = 0,
    roles: Sequence[int] = (),
    flags: int = 0,
) -> None:
    """A part of a software RAID, version 1.2, whose data begins behind its first MiB (md_p.h). `number`: its own; `roles`:
    those of all parts, as it knows them."""
    head = bytearray(256)
    head[:12] = b"\xfc\x4e\x2b\xa9\1\0\0\0" + flags.to_bytes(4, "little")
    head[0x48:0x4C], head[0x80:0x88] = level.to_bytes(4, "little"), (2048).to_bytes(8, "little")
    head[0xA0:0xA4], head[0xC8:0xD0] = number.to_bytes(4, "little"), events.to_bytes(8, "little")
    head[0xDC:0xE0] = len(roles).to_bytes(4, "little")
    head += b"".join(role.to_bytes(2, "little") for role in roles)
    image.write_bytes((bytes(4096) + head).ljust(MIB, b"\0") + content)


RAID = "it is a part of a software RAID, which is not put together"


UNREAD = [(luks, "it is encrypted (LUKS)"), (raid, RAID), (bitlocker, "it is encrypted (BitLocker)")]


@pytest.mark.parametrize(("made", "why"), UNREAD)
def test_a_volume_that_is_not_read_is_a_row_that_says_why(
    made: Callable[[Path], None], why: str, tree: Path, tmp_path: Path
) -> None:
    """Behind a system that is read, too."""
    root, unread, disk = tmp_path / "root.img", tmp_path / "unread.img", tmp_path / "disk.img"
    made(unread)
    partitioned(disk, unread, "gpt")
    assert facts_of([str(disk)]) == {f"not read disk 1 from byte {10 * MIB} on": why}
    ext4(root, tree)
    found = facts_of([str(root), str(disk)])
    assert found.items() >= {**LINUX, f"not read disk 2 from byte {10 * MIB} on": why}.items()
    for here in (found, facts_of([str(root)]), {}):
        rows = [one for one in compared(found, here, ()) if one.item.startswith("not read")]
        assert [(one.item, one.source, one.grade) for one in rows] == [
            (f"not read disk 2 from byte {10 * MIB} on", why, "look")
        ]


def test_logical_volumes_that_cannot_be_read_are_a_row_too(tmp_path: Path) -> None:
    disk = tmp_path / "disk.img"
    disk.write_bytes((bytes(512) + b"LABELONE").ljust(2 * MIB, b"\0"))
    [(item, why)] = facts_of([str(disk)]).items()
    assert item.startswith("not read ")
    assert why.startswith("LVM is not read as it is there")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_was_taken_over_does_not_fill_our_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """It writes as much as its cage lets it, and is ended when its time is over."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom synvirt.cage import Cage, enter\nfrom synvirt.guests.inside.looker import Disk\n"
        f"enter(Cage(written_bytes=4 << 20))\nwhile True:\n    sys.{stream}.write('[' * (1 << 20))\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(looking, "WITHIN_S", 5.0)
    tracemalloc.start()
    try:
        found = facts_of([])
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
    assert list(found) == ["not read disks"]


def test_a_reader_that_cannot_be_ended_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a disk that does not answer; it ends some day."""
    script, pid = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 300\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    for name in ("WITHIN_S", "GONE_WITHIN_S"):
        monkeypatch.setattr(looking, name, 0.5, raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda child: None)
        found = facts_of([])
    assert list(found) == ["not read disks"]
    until(lambda: pid.exists() and pid.read_text().endswith("\n"))
    os.kill(int(pid.read_text()), signal.SIGKILL)
