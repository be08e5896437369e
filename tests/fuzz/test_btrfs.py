"""Hostile file systems of Btrfs: any bytes in any block of a tree, with their checksums put right."""

import mmap
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import SynvirtError
from synvirt.guests.inside import linux_facts
from synvirt.guests.inside.btrfs.subvolumes import Btrfs
from synvirt.guests.inside.btrfs.trees import CHECKSUMS, SUPERBLOCK_AT
from synvirt.guests.inside.files import UnixFiles
from synvirt.guests.inside.seekable import Seekable
from tests.cases import cases
from tests.fuzz.block_formats import TIME_MAX_S, numbers
from tests.guests.btrfs_images import grown, made
from tests.guests.linux_trees import planted

NODE_BYTES = 4096


class Mapped(Seekable):
    def __init__(self, content: mmap.mmap) -> None:
        super().__init__(len(content))
        self._content = content

    def _bytes(self, offset: int, length: int) -> bytes:
        return self._content[offset : offset + length]


class Image(NamedTuple):
    """`blocks`: where blocks of trees lie."""

    content: mmap.mmap
    blocks: list[int]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("btrfs")
    tree = planted(folder / "tree")
    grown(tree, seed=1, files=100)
    path = made(folder / "image", tree, "-n", str(NODE_BYTES))
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = os.SEEK_DATA
        fsid, blocks, at = content[SUPERBLOCK_AT + 32 : SUPERBLOCK_AT + 48], [], 0
        while True:
            try:
                at = os.lseek(file.fileno(), at, data) // NODE_BYTES * NODE_BYTES
            except OSError:  # nothing but a hole follows
                break
            if at != SUPERBLOCK_AT and content[at + 32 : at + 48] == fsid:
                blocks.append(at)
            at += NODE_BYTES
    yield Image(content, blocks)
    content.close()


# In which block, where in it, and what. Headers, keys and the beginnings of items are hit as often as their contents.
damage = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.one_of(st.integers(32, 150), st.integers(101, 1000), st.integers(101, NODE_BYTES - 9)),
    st.one_of(st.binary(min_size=1, max_size=8), numbers.map(lambda number: number.to_bytes(8, "little"))),
)


@cases(150)
@given(damages=st.lists(damage, min_size=1, max_size=6), of_superblock=st.booleans())
def test_hostile_file_systems(image: Image, damages: list[tuple[float, int, bytes]], of_superblock: bool) -> None:
    content, clean = image.content, dict[int, bytes]()
    for where, at, written in damages:
        block = SUPERBLOCK_AT if of_superblock and where < 0.5 else image.blocks[int(where * len(image.blocks))]
        clean.setdefault(block, content[block : block + NODE_BYTES])
        content[block + at : block + at + len(written)] = written
    for block in clean:
        digest = CHECKSUMS[0](content[block + 32 : block + NODE_BYTES])
        content[block : block + len(digest)] = digest
    begun = time.process_time()
    try:
        opened = Btrfs([Mapped(content)])
        for place in opened.subvolumes():
            files = UnixFiles(place)
            linux_facts.facts_of(files)
            for name in files.names("/"):
                files.read(name)
    except SynvirtError:
        pass
    finally:
        for block, written in clean.items():
            content[block : block + NODE_BYTES] = written
    assert time.process_time() - begun < TIME_MAX_S
