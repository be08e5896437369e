"""What an OVA and an OVF folder have in common: a description, perhaps a manifest of digests, and files for the disks.

A disk is read in place, as a range of a host file, and never unpacked. Its format is known by its first bytes. The copy checks
its digest in the same pass (`ChecksumSpec`); the description's digest is checked here. `package` says what machine it is.
"""

import posixpath
from collections.abc import Iterable
from typing import Protocol
from urllib.parse import unquote

from synvirt.disks.roots import Root, raw_spec
from synvirt.disks.specs import ChecksumSpec, ImageSpec, RawSpec, ReaderSpec
from synvirt.errors import MalformedArchive, NotFound, UnsupportedFormat
from synvirt.nearest import in_short
from synvirt.offline import OpenedDisk, files
from synvirt.offline.files import FileRange
from synvirt.offline.ovf import disks, manifest_file
from synvirt.offline.ovf.content import Content, content_of, refuse_missing_chunk
from synvirt.offline.ovf.disks import Declared, FileReference
from synvirt.offline.ovf.manifest_file import MANIFEST_MAX_BYTES, Digest
from synvirt.xml_document import DOCUMENT_MAX_BYTES


class Package(Protocol):
    """The files of a package. `label` names it in errors; `root` is the folder of all files that may be opened; `inner_root`
    the folder in which a disk image may name further files, None where it may not."""

    @property
    def label(self) -> str: ...
    @property
    def root(self) -> Root: ...
    @property
    def inner_root(self) -> Root | None: ...
    def names(self) -> Iterable[str]: ...
    def find(self, name: str) -> FileRange | None: ...


def description_name(package: Package) -> str:
    """The package's only .ovf; the one at the top, where folders have more."""
    found = [name for name in package.names() if files.has_suffix(name, ".ovf")]
    shallowest = min((name.count("/") for name in found), default=0)
    top = [name for name in found if name.count("/") == shallowest]
    if not top:
        raise UnsupportedFormat(f"{package.label} has no description (.ovf) in it")
    if len(top) > 1:
        raise MalformedArchive(
            f"{package.label} has {len(top)} descriptions: {in_short(sorted(top))}",
            hint="An appliance has one .ovf. Import a folder's .ovf file by its own path.",
        )
    return top[0]


class Opened:
    """A package with its description and digests, read and verified. `vm`: one machine of several."""

    def __init__(self, package: Package, name: str, vm: str | None) -> None:
        self.package, self.name = package, name
        self.data = files.read_all(require(package, name), package.root, DOCUMENT_MAX_BYTES)
        self.manifest_name, self._digests = _digests(package, name)
        self._verify_description()
        self.parsed = disks.parse(self.data, name, vm)
        # In the order of the machine's disks.
        self.disks = {disk.key: disk for _, disk in self.parsed.attached()}

    def open(self, disk_key: str) -> OpenedDisk:
        """How that disk is read. NotFound, UnsupportedFormat, MalformedArchive."""
        disk = self.disks.get(disk_key)
        if disk is None:
            raise NotFound(f"{self.package.label} has no disk {disk_key!r}")
        content = self.content(disk)
        root = self.package.root
        checksums = (_checksum(part, self._digests[part.name], root) for part in content.parts if part.name in self._digests)
        return OpenedDisk(self.spec(disk, content), tuple(checksums))

    def is_digested(self, file: FileReference) -> bool:
        """Whether the manifest has the file's digest."""
        first = f"{file.href}.{0:09d}" if file.chunk_bytes else file.href
        found = None if "://" in first else _file_of(self.package, self.name, first)
        return found is not None and found.name in self._digests

    def content(self, disk: Declared) -> Content:
        """UnsupportedFormat, MalformedArchive."""

        def find(href: str) -> FileRange | None:
            if "://" in href:
                raise UnsupportedFormat(f"{self.name} needs {href[:200]}, which is not in the package")
            return _file_of(self.package, self.name, href)

        return content_of(disk, find, root=self.package.root, label=self.package.label)

    def spec(self, disk: Declared, content: Content) -> ReaderSpec:
        """How the disk in that content is read. UnsupportedFormat, MalformedArchive."""
        spec = self._spec(disk, content)
        if not isinstance(spec, ImageSpec):
            refuse_missing_chunk(disk, content)
        return spec

    def _spec(self, disk: Declared, content: Content) -> ReaderSpec:
        declared = disk.source.format
        if isinstance(content.spec, RawSpec):
            inner_root = self.package.inner_root
            return files.disk_spec(content.parts[0], self.package.root, declared=declared, inner_root=inner_root)
        if declared == "raw" or not content.parts:
            return content.spec
        name = content.parts[0].name
        head = content.head if content.head is not None else files.head_of(content.parts[0], self.package.root)
        return files.image_over(content.spec, files.format_of(head), name=name, declared=declared)

    def _verify_description(self) -> None:
        digest = self._digests.get(self.name)
        if digest is None:
            return
        import hashlib  # takes 5 ms to load, and many packages have no digests

        if hashlib.new(digest.algorithm, self.data).hexdigest() != digest.hex:
            raise MalformedArchive(
                f"{self.name} does not have the {digest.algorithm.upper()} digest that {self.manifest_name} gives for it",
                hint="The package is damaged, or its description was edited: then remove the manifest (.mf) or its line.",
            )


def _digests(package: Package, description: str) -> tuple[str | None, dict[str, Digest]]:
    """The manifest's name, None where there is none, and its digests by path in the package."""
    chosen = beside(package, description, ".mf")
    if chosen is None:
        return None, {}
    digests: dict[str, Digest] = {}
    entries = manifest_file.parse(files.read_all(require(package, chosen), package.root, MANIFEST_MAX_BYTES), chosen)
    for written, digest in entries.items():
        file = _file_of(package, description, written)
        if file is None:
            raise MalformedArchive(
                f"{chosen} names the file {written!r}, which {package.label} does not have",
                hint="The package is incomplete: copy all of its files.",
            )
        if digests.setdefault(file.name, digest) != digest:
            raise MalformedArchive(f"{chosen} has two digests of {file.name}, by two spellings of its name")
    return chosen, digests


def _file_of(package: Package, description: str, written: str) -> FileRange | None:
    """The file of the package that is written so: relative to the description, and sometimes URL-encoded."""
    folder = posixpath.dirname(description)
    names = [posixpath.normpath(posixpath.join(folder, each)) for each in (written, unquote(written))]
    found = (package.find(name) for name in names)
    return next((file for file in found if file is not None), None)


def beside(package: Package, description: str, suffix: str) -> str | None:
    """The description's file of that suffix: the one of the same name, or the only one."""
    folder, stem = posixpath.dirname(description), posixpath.splitext(posixpath.basename(description))[0].lower()
    beside = sorted(name for name in package.names() if files.has_suffix(name, suffix) and posixpath.dirname(name) == folder)
    same = [name for name in beside if posixpath.splitext(posixpath.basename(name))[0].lower() == stem]
    return next(iter(same), beside[0] if len(beside) == 1 else None)


def _checksum(file: FileRange, digest: Digest, root: Root) -> ChecksumSpec:
    where = raw_spec(root, file.path, file.offset, file.length)
    return ChecksumSpec(
        path=where.path,
        offset=file.offset,
        length=file.length,
        algorithm=digest.algorithm,
        expected=digest.hex,
        name=file.name,
        remote=where.remote,
        version=where.version,
        beneath=where.beneath,
    )


def require(package: Package, name: str) -> FileRange:
    """The package's file of that name. MalformedArchive, where it is missing."""
    file = package.find(name)
    if file is None:
        raise MalformedArchive(
            f"{package.label} has no file {name!r}, which its description needs",
            hint="The package is incomplete, or a file was renamed: copy all of its files under their own names.",
        )
    return file
