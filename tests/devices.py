"""Real block devices for tests: files made devices by losetup, and what was mounted on them. Both take root."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import need, need_root


@contextmanager
def loop_device(backing: Path) -> Iterator[str]:
    """The path of a loop device over `backing`, gone at the end."""
    need_root("losetup")
    losetup = need("losetup", "mount")
    device = subprocess.run([losetup, "--find", "--show", backing], check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield device
    finally:
        subprocess.run([losetup, "--detach", device], check=True)


def unmount(at: Path) -> None:
    """All that was written is in its image, complete, on return. Where a process that began meanwhile has the mount in a
    namespace of its own, umount writes nothing; and a sync leaves what XFS has only in its log."""
    subprocess.run(["mount", "-o", "remount,ro", at], check=True)
    subprocess.run(["umount", at], check=True)
