"""Lists of packs that nothing needed when a collection looked (`garbage.py`). Who writes does not rely on them.

Each is a file with one pack name per line; its name is the BLAKE3 of its bytes.
"""

from dataclasses import dataclass

from blake3 import blake3

from synvirt.errors import RepositoryDamaged
from synvirt.repository.folder import Folder
from synvirt.sizes import MIB

FOLDER = "condemned"
# 70 for each pack of 64 MiB: this is for packs of 12 TiB.
BYTES_MAX = 16 * MIB
_LISTED_AGAIN = "remove it: what is not needed is listed again"


def packs_of(folder: Folder) -> frozenset[str]:
    """The packs in any list of condemned ones (`garbage.py`). RepositoryDamaged."""
    return frozenset(name for listed in lists_of(folder) for name in listed.packs)


@dataclass(frozen=True, slots=True)
class Condemned:
    """A list of packs that nothing needed at that time, in seconds since 1970 by the repository's own clock."""

    name: str
    at: float
    packs: tuple[str, ...]


def lists_of(folder: Folder) -> list[Condemned]:
    """Each is a file with one pack name per line; its name is the BLAKE3 of its bytes. RepositoryDamaged."""
    found = []
    for entry in folder.entries(FOLDER):
        name = f"{FOLDER}/{entry.name}"
        if entry.size_bytes > BYTES_MAX:
            raise RepositoryDamaged(f"the list {name} has {entry.size_bytes} bytes", hint=_LISTED_AGAIN)
        try:
            content = folder.read(name, 0, entry.size_bytes)
        except RepositoryDamaged:
            if entry.name in {one.name for one in folder.entries(FOLDER)}:
                raise
            continue  # another collection has finished with this list
        if blake3(content).hexdigest() != entry.name:
            raise RepositoryDamaged(f"the list {name} has changed", hint=_LISTED_AGAIN)
        found.append(Condemned(name, entry.modified_at, tuple(content.decode("latin-1").split())))
    return found
