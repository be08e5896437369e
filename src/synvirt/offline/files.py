"""Files that a VM's description names, read in place: ranges of files under a root (see `roots`).

A file's format is known by its first bytes.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from synvirt.blocks import DiskReader, bytes_of
from synvirt.disks.beneath import spelled
from synvirt.disks.formats import MAGICS, image_format
from synvirt.disks.nbd.fallback import readable
from synvirt.disks.roots import HOST, Root, is_folder, listed, open_file, raw_spec, resolve, size_of
from synvirt.disks.specs import ImageFormat, ImageSpec, ReaderSpec
from synvirt.errors import HostPathRejected, MalformedArchive, NotFound, SynvirtError
from synvirt.nearest import in_short

_HEAD_BYTES = 64 << 10
# A folder of an appliance in chunks has thousands of files; one of millions is something else.
_ENTRIES_MAX = 100_000
# Files that belong to a description. They are looked for by name where folders cannot be listed: digests, and their signature.
_BESIDE = (".mf", ".cert")
# limits.h, NAME_MAX: no file system of Linux has a longer name.
NAME_BYTES_MAX = 255


class FileRange(NamedTuple):
    """`length` bytes at `offset` of a file under a root; `name` is for errors."""

    name: str
    path: Path
    offset: int
    length: int


@contextmanager
def opened(file: FileRange, root: Root) -> Iterator[DiskReader]:
    """HostPathRejected, where the path, or a link on it, leads out of `root`."""
    reader = open_file(root, str(file.path), file.offset, file.length, shown=file.name)
    try:
        yield reader
    finally:
        reader.close()


def read_all(file: FileRange, root: Root, most: int) -> bytes:
    """A text of a VM. A file of more than `most` bytes is refused."""
    if file.length > most:
        raise MalformedArchive(f"{file.name} has {file.length} bytes; a description of a VM has at most {most}")
    with opened(file, root) as reader:
        return bytes_of(reader, 0, file.length)


def head_of(file: FileRange, root: Root) -> bytes:
    """The first 64 KiB, or the whole file if it is shorter."""
    with opened(file, root) as reader:
        return bytes_of(reader, 0, min(_HEAD_BYTES, file.length))


def whole_file(path: Path, root: Root) -> FileRange:
    """NotFound, HostPathRejected. `path` is absolute, or relative to `root`."""
    with closing(open_file(root, str(path))) as reader:
        return FileRange(path.name, path, 0, reader.size)


class Folder:
    """The files of a VM in a folder, or anywhere under the root that a name or a link leads to.

    `path` is the folder, or the path of the description in it (`chosen` is then its name). NotFound, HostPathRejected.
    """

    def __init__(self, path: Path, root: Root) -> None:
        found = resolve(root, str(path))
        self.root = root
        self.chosen = None if is_folder(root, found) else found.name
        self.path = found if self.chosen is None else found.parent
        self.label = self.path.name or _last(root)
        self._names = _listed(root, self.path, self.chosen)

    def names(self, inner: str = "") -> list[str]:
        """The names of the folder's entries, or of those in a subfolder, if it exists: `inner/name`."""
        if not inner:
            return self._names
        try:
            path = resolve(self.root, str(self.path / inner))
            return [f"{inner}/{name}" for name in _listed(self.root, path)]
        except NotFound:
            return []

    def description(self, suffix: str) -> str:
        """The name of the VM's description: the chosen one, or the only file of that suffix."""
        if self.chosen is not None:
            return self.chosen
        found = [name for name in self._names if has_suffix(name, suffix)]
        if len(found) != 1:
            raise MalformedArchive(
                f"{self.label} has {len(found)} files with the suffix {suffix}: {in_short(found)}",
                hint=f"Import the {suffix} file by its own path.",
            )
        return found[0]

    def find(self, name: str) -> FileRange | None:
        """The file of that name; else the one of another spelling (see `beneath.spelled`), under its own name. None, where
        there is none; HostPathRejected, where it leads out of the root."""
        try:
            path = resolve(self.root, str(self.path / name))
        except NotFound:
            alike = self._spelled(name)
            if alike is None:
                return None
            name, path = alike, resolve(self.root, str(self.path / alike))
        if is_folder(self.root, path):
            raise MalformedArchive(f"{name!r} is a folder in {self.label}, not a file")
        size = size_of(self.root, str(path))
        return None if size is None else FileRange(name, path, 0, size)

    def _spelled(self, name: str) -> str | None:
        if not isinstance(self.root, Path):
            return None
        found = spelled(self.root, str(self.path / name))
        # As many parts as before: those of the folder itself are as they were.
        return None if found is None else str(PurePosixPath(*PurePosixPath(found).parts[-len(PurePosixPath(name).parts) :]))

    def find_own(self, written: str, others: Iterable[str]) -> FileRange | None:
        """The file of the disk that a description calls `written`, beside the `others` of its machine: never one that another
        disk names more exactly, as VMware calls the first disk on each datastore alike. None also where two paths of one name
        cannot be told apart.
        """
        own = _as_path(written)
        alike = {each: path for each in (*others, written) if (path := _as_path(each)).name.lower() == own.name.lower()}
        twins = [path for path in alike.values() if path.anchor and path.parts[-2:] == own.parts[-2:]]
        if own.anchor and len(twins) > 1:
            return None
        taken: set[Path] = set()
        for other in sorted(alike, key=lambda each: (bool(alike[each].anchor), len(alike[each].parts))):
            file = self.find_written(other, taken)
            if other == written:
                return file
            taken |= set() if file is None else {file.path}
        return None

    def find_written(self, written: str, taken: Collection[Path] = ()) -> FileRange | None:
        """The file that a description calls `written`: relative to the folder, or absolute on the machine that wrote it. None
        of those in `taken`.

        /vmfs/volumes/DATASTORE/VM/DISK and C:\\VMs\\VM\\DISK are looked for in the folder, in a subfolder and in a neighbour
        folder, if that lies under the root.
        """
        path = _as_path(written)
        inner = f"{path.parent.name}/{path.name}"
        candidates = [path.name, inner] if path.anchor else [path.as_posix(), path.name]
        found = (self.find(candidate) for candidate in candidates if candidate.strip("./"))
        file = next((file for file in found if file is not None and file.path not in taken), None)
        if file is None and path.anchor:
            # This path is ours, not the description's: where it leads out, there is no neighbour.
            with suppress(HostPathRejected):
                file = self.find(f"../{inner}")
        return None if file is None or file.path in taken else file


def _as_path(written: str) -> PurePosixPath | PureWindowsPath:
    """A path in the spelling of the system that wrote it."""
    windows = "\\" in written or written[1:2] == ":"
    return PureWindowsPath(written) if windows else PurePosixPath(written)


def has_suffix(name: str, suffix: str) -> bool:
    """macOS puts a `._name` beside each file, which is not of the type that its name says."""
    return name.lower().endswith(suffix) and not name.rpartition("/")[2].startswith("._")


def holds(path: Path, suffix: str, root: Root = HOST) -> bool:
    """Whether the folder has a file of that suffix. Never raises, as it is for probing."""
    try:
        return is_folder(root, path) and any(has_suffix(name, suffix) for name in listed(root, path) or ())
    except (OSError, SynvirtError):
        return False


def _listed(root: Root, folder: Path, chosen: str | None = None) -> list[str]:
    """The folder's entries; where its place cannot list them, the chosen file and what belongs to it."""
    try:
        names = listed(root, folder)
    except NotADirectoryError:
        return []
    except OSError as problem:
        raise MalformedArchive(f"the folder {folder.name} cannot be listed: {problem.strerror}") from problem
    if names is None:
        stem = PurePosixPath(chosen or "").stem
        beside = [f"{stem}{suffix}" for suffix in _BESIDE] if chosen else []
        names = [*([chosen] if chosen else []), *(name for name in beside if size_of(root, str(folder / name)) is not None)]
    if len(names) > _ENTRIES_MAX:
        raise MalformedArchive(f"the folder {folder.name} has over {_ENTRIES_MAX} entries; no VM has")
    return sorted(names)


def _last(root: Root) -> str:
    """The last part of a root's own path."""
    return root.name if isinstance(root, Path) else root.url.rstrip("/").rpartition("/")[2]


def disk_spec(file: FileRange, root: Root, *, declared: str = "", inner_root: Root | None = None) -> ReaderSpec:
    """How to read the disk in `file`. `declared` is the format in its description: `raw` is binding, as a guest can write any
    magic into its raw disk. Any other is a hint, but then the file must have some magic. The image may name further files under
    `inner_root`; None refuses them."""
    raw = raw_spec(root, file.path, file.offset, file.length)
    if declared == "raw":
        return raw
    with opened(file, root) as reader:
        found = image_format(reader)
    spec = image_over(raw, found, name=_image_name(file, inner_root), declared=declared, inner_root=inner_root)
    return readable(spec, key_file=_key_beside(file, root))


def _key_beside(file: FileRange, root: Root) -> str | None:
    """The file with the passphrase of an encrypted image, if it exists: the image's or its archive's name, and `.key`."""
    beside = f"{file.path}.key"
    # An image may itself have the longest name: then no file can be beside it.
    if not isinstance(root, Path) or len(os.fsencode(Path(beside).name)) > NAME_BYTES_MAX:
        return None
    if not os.path.lexists(root / beside):  # as nearly always; an error would look for names that are like it
        return None
    try:
        return str(resolve(root, beside))
    except NotFound:
        return None


def _image_name(file: FileRange, inner_root: Root | None) -> str:
    """If an image may name files beside it, its name says where it lies (see `ImageSpec`)."""
    if inner_root is None:
        return file.name
    return str(file.path.relative_to(inner_root.resolve()) if isinstance(inner_root, Path) else file.path)


def image_over(
    content: ReaderSpec, found: ImageFormat | None, *, name: str, declared: str, inner_root: Root | None = None
) -> ReaderSpec:
    """The image of the format `found` in `content`; `content` itself, raw, where no format was found or declared."""
    if found is not None:
        inner = str(inner_root) if isinstance(inner_root, Path) else inner_root
        return ImageSpec(format=found, over=content, root=inner, name=name)
    if declared:
        raise MalformedArchive(
            f"{name} is to be a {declared} image, but does not begin like one",
            hint="The file is damaged, encrypted or of another format. Export the VM again.",
        )
    return content


def format_of(head: bytes) -> ImageFormat | None:
    """The format by a file's first bytes alone."""
    return next((name for name, at, magic in MAGICS if at >= 0 and head[at : at + len(magic)] == magic), None)
