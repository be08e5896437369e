"""The parents of differencing VHDX and VHD images: files with Windows names, found under the import root.

Such an image names its parent several times over: relative to itself, by a drive's letter, by a volume's GUID. Only files under
the import root are opened, so of another machine's absolute name only the names of the file and its folder count: the file is
looked for beside the image, and in a folder of that name beside the image's own (an export of Hyper-V may have its checkpoints'
disks in one folder and their parents in another). The reader checks by its identity that the found file is the right parent.
"""

import contextlib
from collections.abc import Hashable, Iterable
from pathlib import PureWindowsPath
from typing import Final, NamedTuple

from synvirt.blocks import DiskReader
from synvirt.disks.roots import open_reference
from synvirt.disks.specs import ImageRoot
from synvirt.errors import HostPathRejected, MalformedArchive

# Hyper-V keeps up to 50 checkpoints of a virtual machine, XenServer up to 30 in a chain; longer chains would be slow anyway.
CHAIN_MAX: Final = 64


class Reference(NamedTuple):
    """A parent's path in its child. `absolute`: it begins at a drive, a volume or a share of its own machine."""

    path: str
    absolute: bool = False


class Chain(NamedTuple):
    """The images above an image in its chain: the files, and their total number of runs."""

    files: frozenset[Hashable] = frozenset()
    depth: int = 0
    runs: int = 0


def open_parent(
    root: ImageRoot | None, image: str, references: Iterable[Reference], chain: Chain
) -> tuple[DiskReader, str, Chain]:
    """The file of an image's parent, its path under `root`, and the chain with it.

    The references are tried in turn. HostPathRejected: one leads out of the root, or all are absolute and there is no file of
    that name beside the image. MalformedArchive: there is no such file, or the chain is a loop or too long.
    """
    if chain.depth >= CHAIN_MAX:
        raise MalformedArchive(f"{image} has more than {CHAIN_MAX} parents, one over the other")
    reader, name, identity = _open_first(root, image, list(references))
    if identity in chain.files:
        reader.close()
        raise MalformedArchive(f"{image} names {name} as its parent, which lies over {image} in turn: the chain is a loop")
    chain = Chain(chain.files | {identity}, chain.depth + 1, chain.runs)
    return reader, name, chain


def _open_first(root: ImageRoot | None, image: str, references: list[Reference]) -> tuple[DiskReader, str, Hashable]:
    missing: MalformedArchive | None = None
    for reference in references:
        try:
            return open_reference(root, image, _beneath(reference))
        except MalformedArchive as problem:
            missing = missing or problem
        # If the image's folder is the import root itself, there is no folder beside it.
        if reference.absolute and root is not None and "/" in image:
            with contextlib.suppress(MalformedArchive):
                return open_reference(root, image, _beside_the_folder(reference))
    if missing is None:
        raise MalformedArchive(f"{image} does not say what its parent is called")
    if all(reference.absolute for reference in references):
        raise HostPathRejected(
            f"{image} names its parent as {references[0].path!r}, outside the import root",
            hint="Copy the parent into the folder of the image: a file of the same name is found there.",
        ) from missing
    raise missing


def _beneath(reference: Reference) -> str:
    """The path in Linux' form; for an absolute one the file name. PureWindowsPath takes both kinds of slash."""
    return PureWindowsPath(reference.path).name if reference.absolute else reference.path.replace("\\", "/")


def _beside_the_folder(reference: Reference) -> str:
    path = PureWindowsPath(reference.path)
    # A drive's top folder has no name, and `..` would lead further up.
    return f"../{path.parent.name}/{path.name}" if path.parent.name not in ("", "..") else path.name
