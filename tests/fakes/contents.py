"""What a stand-in's disk holds at first: its bytes, or a file like it, which may be larger than what a worker may have."""

import shutil
from pathlib import Path

Content = bytes | Path


def size_of(content: Content) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def fill(disk: Path, content: Content) -> None:
    if isinstance(content, Path):
        shutil.copyfile(content, disk)
    else:
        disk.write_bytes(content)
