"""The corpus: small hostile images, one trick each, named after it. Each is refused for what it is, at once, in little memory.

Whatever a fuzzer finds is kept here as a file, which is all that adding one takes; the table says what it must be refused by,
where that is more than «by an error of ours».
"""

import time
import tracemalloc
from pathlib import Path

import pytest

from synvirt.disks import detect, open_reader
from synvirt.errors import HostPathRejected, MalformedArchive, SynvirtError, UnsupportedFormat

CORPUS = Path(__file__).with_name("corpus")
FILES = sorted(path.name for path in CORPUS.iterdir())
TIME_MAX_S = 10
MEMORY_MAX_BYTES = 64 << 20

BY: dict[str, tuple[type[SynvirtError], str]] = {
    "size-2-63.qcow2": (MalformedArchive, "virtual size of 9223372036854775808"),
    "size-2-62.qcow2": (MalformedArchive, "cannot map|over the limit"),
    "l1-of-2-32-entries.qcow2": (MalformedArchive, "4294967295 entries is over the limit"),
    "l1-outside.qcow2": (MalformedArchive, "L1 table"),
    "shared-l2-table.qcow2": (MalformedArchive, "point to one L2 table"),
    "l2-over-l1.qcow2": (MalformedArchive, "over the L1 table"),
    "loop-a.qcow2": (MalformedArchive, "loop"),
    "loop-b.qcow2": (MalformedArchive, "loop"),
    "marked-corrupt.qcow2": (MalformedArchive, "marked corrupt"),
    "unknown-feature.qcow2": (UnsupportedFormat, "bit 40"),
    "clusters-of-2-60.qcow2": (MalformedArchive, r"2\^60"),
    "own-parent.vmdk": (MalformedArchive, "loop|own-parent"),
    "no-extents.vmdk": (MalformedArchive, "names no extents"),
    "header-at-2-62.vhd": (MalformedArchive, "4611686018427387904"),
    **{f"backing-{how}.qcow2": (HostPathRejected, ".") for how in ("dotdot", "absolute", "json", "protocol")},
    **{f"extent-{how}.vmdk": (HostPathRejected, ".") for how in ("dotdot", "absolute", "device")},
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused(name: str) -> None:
    error, message = BY.get(name, (SynvirtError, "."))
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message) as refused:
            open_reader(detect(CORPUS / name))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.type is not SynvirtError
    assert refused.value.code != SynvirtError.code, "it was refused by accident"
    assert str(CORPUS / name) not in refused.value.detail, "a path of this host is told"
    assert peak < MEMORY_MAX_BYTES
    assert time.process_time() - began < TIME_MAX_S


def test_the_table_is_about_files_that_are_there() -> None:
    assert set(BY) <= set(FILES)
