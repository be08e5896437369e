"""Many pieces of a disk, looked at by several threads."""

import pytest

from synvirt.disks.checking import looking
from synvirt.disks.checking.looking import first_found


def test_without_memory_for_its_buffers_nothing_counts_as_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(length: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(looking, "new_buffer", refusing)
    with pytest.raises(MemoryError):
        first_found(iter(range(10)), lambda piece, _, __: piece, threads=2)
