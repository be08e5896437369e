"""The parents of differencing VHDX and VHD images: files that Windows named, found beneath the import root.

Such an image names its parent several times over: relative to itself, by a drive's letter, by a volume's GUID. Only what lies
beneath the import root is opened, so an absolute name of another machine says no more than how the file is called: it is looked
for beside the image. Whether what is found is the parent that is meant, the reader finds out by its identity.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Final

from synvirt.disks.beneath import open_reference
from synvirt.disks.raw import RawReader
from synvirt.errors import HostPathRejected, MalformedArchive

# Hyper-V keeps up to 50 checkpoints of a virtual machine, XenServer up to 30 in a chain; deeper chains would be slow anyway.
CHAIN_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Reference:
    """A parent's path as its child has it. `absolute`: it begins at a drive, a volume or a share of its maker's machine."""

    path: str
    absolute: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """What lies above an image in its chain: the files, and how many runs they have together."""

    files: frozenset[tuple[int, int]] = frozenset()
    depth: int = 0
    runs: int = 0


def open_parent(root: str | None, image: str, references: Iterable[Reference], chain: Chain) -> tuple[RawReader, str, Chain]:
    """The file of an image's parent, its path beneath `root`, and the chain with it.

    The references are tried in turn. HostPathRejected: one leads out of the root, or all are absolute and nothing of that name
    lies beside the image. MalformedArchive: there is no such file, or the chain is a loop or too long.
    """
    if chain.depth >= CHAIN_MAX:
        raise MalformedArchive(f"{image} has more than {CHAIN_MAX} parents, one over the other")
    descriptor, name = _open_first(root, image, list(references))
    status = os.fstat(descriptor)
    identity = (status.st_dev, status.st_ino)
    if identity in chain.files:
        os.close(descriptor)
        raise MalformedArchive(f"{image} names {name} as its parent, which lies over {image} in turn: the chain is a loop")
    chain = Chain(chain.files | {identity}, chain.depth + 1, chain.runs)
    return RawReader(name, descriptor=descriptor), name, chain


def _open_first(root: str | None, image: str, references: list[Reference]) -> tuple[int, str]:
    missing: MalformedArchive | None = None
    for reference in references:
        try:
            return open_reference(root, image, _beneath(reference))
        except MalformedArchive as problem:
            missing = missing or problem
    if missing is None:
        raise MalformedArchive(f"{image} does not say what its parent is called")
    if all(reference.absolute for reference in references):
        raise HostPathRejected(
            f"{image} names its parent as {references[0].path!r}, outside the import root",
            hint="Copy the parent into the folder of the image: a file of the same name is found there.",
        ) from missing
    raise missing


def _beneath(reference: Reference) -> str:
    """The path as Linux writes it; of an absolute one the file name. PureWindowsPath takes both sorts of slash."""
    return PureWindowsPath(reference.path).name if reference.absolute else reference.path.replace("\\", "/")
