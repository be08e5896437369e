"""Real block devices for tests: files made devices by losetup, which takes root."""

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
