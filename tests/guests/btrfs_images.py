"""File systems of Btrfs as its own tools, and Linux itself, write them; and trees of files to put into them."""

import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from synvirt.guests.inside.looker import Disk
from synvirt.guests.inside.seekable import Window
from synvirt.sizes import KIB, MIB
from tests.devices import unmount
from tests.needs import lacking, need, need_root


def made(image: Path, tree: Path | None = None, *options: str, size: int = 128 * MIB) -> Path:
    with image.open("wb") as file:
        file.truncate(size)
    root = [] if tree is None else ["-r", str(tree)]
    subprocess.run([need("mkfs.btrfs", "btrfs-progs"), "-q", *options, *root, image], check=True, capture_output=True)
    return image


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def mounted(images: Sequence[Path], at: Path, options: str, *made_with: str) -> Iterator[Path]:
    """A new one on all of these, by Linux."""
    need_root("mount")
    if "btrfs" not in Path("/proc/filesystems").read_text():
        lacking("needs a kernel that has Btrfs: modprobe btrfs")
    at.mkdir()
    with ExitStack() as left:
        loops: list[str] = []
        for image in images:
            with image.open("wb") as file:
                file.truncate(256 * MIB)
            attached = subprocess.run(["losetup", "--find", "--show", image], check=True, capture_output=True, text=True)
            loops.append(attached.stdout.strip())
            left.callback(_run, "losetup", "--detach", loops[-1])
        subprocess.run([need("mkfs.btrfs", "btrfs-progs"), "-q", *made_with, *loops], check=True, capture_output=True)
        devices = "".join(f",device={loop}" for loop in loops[1:])
        subprocess.run(["mount", "-t", "btrfs", "-o", options + devices, loops[0], at], check=True)
        left.callback(unmount, at)
        yield at


@contextmanager
def mounted_alone(image: Path, at: Path) -> Iterator[Path]:
    """One device of a mirror, without the others: they miss what is written meanwhile."""
    attached = subprocess.run(["losetup", "--find", "--show", image], check=True, capture_output=True, text=True)
    with ExitStack() as left:
        left.callback(_run, "losetup", "--detach", attached.stdout.strip())
        # Linux knows the others by loop devices that others may have by now.
        subprocess.run([need("btrfs", "btrfs-progs"), "device", "scan", "--forget"], check=False, capture_output=True)
        subprocess.run(["mount", "-t", "btrfs", "-o", "degraded", attached.stdout.strip(), at], check=True)
        left.callback(unmount, at)
        yield at


def grown(root: Path, seed: int, files: int = 60) -> None:
    """Files of all sizes in folders: empty and inline ones, ones that are packed well and ones that are not, holes, links."""
    chance = random.Random(seed)
    folders = [root]
    for number in range(files):
        if chance.random() < 0.2:
            folders.append(chance.choice(folders) / f"folder{number}")
            folders[-1].mkdir()
        place = chance.choice(folders) / chance.choice((f"file{number}", f"ä €{number}", f"{number}".rjust(200, "n")))
        if chance.random() < 0.15:
            place.symlink_to("x/" * chance.randrange(1, 1000) + "y" if chance.random() < 0.5 else f"../{number}")
            continue
        size = chance.choice((0, 1, 100, 2000, 4096, 5000, 100 * KIB, 300 * KIB))
        content = bytearray()
        while len(content) < size:
            length = chance.randrange(1, 20_000)
            content += chance.choice((bytes(length), chance.randbytes(length), b"synvirt " * (length // 8 + 1)))
        with place.open("wb") as file:
            if size > 10_000 and chance.random() < 0.3:
                file.seek(chance.randrange(200 * KIB))
            file.write(content[:size])


def everything(root: Path) -> dict[str, bytes | str | None]:
    """Files with what they hold, links with where they lead, folders."""
    found: dict[str, bytes | str | None] = {}
    for path in root.rglob("*"):
        name = f"/{path.relative_to(root)}"
        found[name] = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@contextmanager
def windows(*images: Path) -> Iterator[list[Window]]:
    descriptors = [os.open(image, os.O_RDONLY) for image in images]
    try:
        yield [Window(disk, 0) for disk in map(Disk, descriptors)]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
