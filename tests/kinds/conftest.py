"""Where the laws of kinds have their files."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import in_memory


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is room: the laws make and copy thousands of small files, and a third of what that costs on a disk
    is its file system. No law here asks what a loss of power leaves."""
    memory = in_memory.place()
    if memory is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="synvirt-laws-", dir=memory) as made:
        yield Path(made)
