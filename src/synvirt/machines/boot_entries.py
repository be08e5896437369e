"""Boot entries for loaders, where a source's own entries cannot be taken over. Pure.

UEFI 2.10, sections 3.1.3 (EFI_LOAD_OPTION), 3.3 (BootOrder, Boot####), 10.3.5.1 (hard drive) and 10.3.5.4 (file path).
"""

import struct
from collections.abc import Sequence
from typing import Final

from synvirt.machines.loader import Loader
from synvirt.machines.ovmf_store import GLOBAL, UefiVariable
from synvirt.model.machine import Concern, VmManifest
from synvirt.nearest import in_short

MADE_ANEW: Final = "boot-entries"
# NON_VOLATILE, BOOTSERVICE_ACCESS, RUNTIME_ACCESS; and LOAD_OPTION_ACTIVE.
_ATTRIBUTES: Final = 0x07
_ACTIVE: Final = 1


def entries(loaders: Sequence[Loader]) -> list[UefiVariable]:
    """An entry for each loader, and their order."""
    named = [UefiVariable(GLOBAL, f"Boot{number:04X}", _ATTRIBUTES, _option(one)) for number, one in enumerate(loaders)]
    order = struct.pack(f"<{len(loaders)}H", *range(len(loaders)))
    return [*named, UefiVariable(GLOBAL, "BootOrder", _ATTRIBUTES, order)]


def noted(manifest: VmManifest, loaders: Sequence[Loader]) -> VmManifest:
    """The manifest with what was done, in place of the concern that the entries are lost."""
    paths = in_short([one.path for one in loaders])
    concern = Concern(
        id=MADE_ANEW,
        category="Information",
        label="Boot entries made anew",
        assessment="The VM's boot entries stay behind, and its disk has no loader where every firmware looks "
        f"(/EFI/BOOT/BOOTX64.EFI). Here these got an entry: {paths}.",
        remedy="Nothing, if the VM had no keys of its own. Such keys must be enrolled again.",
    )
    return manifest.with_concerns([concern], in_place_of=lambda id_: id_ in (MADE_ANEW, "uefi-state-lost"))


def are_made_anew(manifest: VmManifest) -> bool:
    return any(concern.id == MADE_ANEW for concern in manifest.concerns)


def _option(loader: Loader) -> bytes:
    drive = struct.pack("<BBHIQQ16sBB", 4, 1, 42, loader.number, loader.first, loader.sectors, loader.partition.bytes_le, 2, 2)
    file = loader.path.encode("utf-16-le") + b"\0\0"
    path = drive + struct.pack("<BBH", 4, 4, 4 + len(file)) + file + b"\x7f\xff\x04\0"
    title = loader.path.split("\\")[2]
    return struct.pack("<IH", _ACTIVE, len(path)) + title.encode("utf-16-le") + b"\0\0" + path
