"""What an OVA and an OVF folder have in common: a description, perhaps a manifest of digests, and files for the disks.

A disk is read in place, as a range of a host file, and never unpacked. Its format is known by its first bytes. The copy checks
its digest in the same pass (`ChecksumSpec`); the description's digest is checked here.
"""

import hashlib
import posixpath
from collections.abc import Iterable
from typing import Protocol
from urllib.parse import unquote

from synvirt.disks.roots import Root, raw_spec
from synvirt.disks.specs import ChecksumSpec, ImageSpec, RawSpec, ReaderSpec
from synvirt.errors import MalformedArchive, NotFound, UnsupportedFormat
from synvirt.machines import concerns
from synvirt.model.machine import Concern, Disk, VmManifest
from synvirt.nearest import in_short
from synvirt.offline import OpenedDisk, facts_of_disks, files
from synvirt.offline.files import FileRange, Measured
from synvirt.offline.ovf import description as ovf
from synvirt.offline.ovf import manifest_file
from synvirt.offline.ovf.content import Content, content_of
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


def inspect(package: Package, name: str, vm: str | None = None) -> VmManifest:
    """The manifest of the VM in the description `name`, its disks measured by their own headers. `vm`: one of several."""
    opened = _Opened(package, name, vm)
    manifest = opened.description.manifest
    measured = [opened.measured(disk) for disk in manifest.disks]
    completed = facts_of_disks.completed(manifest, measured, opened.integrity_concerns())
    return completed if opened.description.states_firmware else facts_of_disks.with_firmware(completed, measured)


def open_disk(package: Package, name: str, disk_key: str, vm: str | None = None) -> OpenedDisk:
    return _Opened(package, name, vm).open(disk_key)


class _Opened:
    """A package with its description and digests, read and verified."""

    def __init__(self, package: Package, name: str, vm: str | None) -> None:
        self._package = package
        self._name = name
        data = files.read_all(_require(package, name), package.root, DOCUMENT_MAX_BYTES)
        self._manifest_name, self._digests = _digests(package, name)
        self._verify_description(data)
        self.description = ovf.parse(data, name, vm)

    def measured(self, disk: Disk) -> Measured:
        try:
            content = self._content(disk)
            spec = self._spec(disk, content)
        except UnsupportedFormat as problem:
            return files.unreadable(disk, problem)
        if content.measurable:
            return files.measured(disk, lambda _: spec)
        known = disk.model_copy(update={"format": spec.format if isinstance(spec, ImageSpec) else "raw"})
        return Measured(known, concerns=(concerns.compressed(disk.key),))

    def integrity_concerns(self) -> list[Concern]:
        found = []
        if self._manifest_name is None:
            found.append(concerns.no_manifest_file())
        else:
            unnamed = [file.href for file in self.description.files if not self._is_digested(file)]
            if unnamed:
                found.append(concerns.files_without_checksum(unnamed))
        return found + _signature_concerns(self._package, self._name, self._manifest_name)

    def _is_digested(self, file: ovf.FileReference) -> bool:
        first = f"{file.href}.{0:09d}" if file.chunk_bytes else file.href
        return "://" not in first and self._inner_name(first) in self._digests

    def open(self, disk_key: str) -> OpenedDisk:
        disk = next((disk for disk in self.description.manifest.disks if disk.key == disk_key), None)
        if disk is None:
            raise NotFound(f"{self._package.label} has no disk {disk_key!r}")
        content = self._content(disk)
        root = self._package.root
        checksums = (_checksum(part, self._digests[part.name], root) for part in content.parts if part.name in self._digests)
        return OpenedDisk(self._spec(disk, content), tuple(checksums))

    def _content(self, disk: Disk) -> Content:
        def find(href: str) -> FileRange | None:
            return self._package.find(self._inner_name(href))

        source = self.description.sources[disk.key]
        return content_of(disk, source, find, root=self._package.root, label=self._package.label)

    def _spec(self, disk: Disk, content: Content) -> ReaderSpec:
        declared = self.description.sources[disk.key].format
        if isinstance(content.spec, RawSpec):
            inner_root = self._package.inner_root
            return files.disk_spec(content.parts[0], self._package.root, declared=declared, inner_root=inner_root)
        if declared == "raw" or not content.parts:
            return content.spec
        name = content.parts[0].name
        head = content.head if content.head is not None else files.head_of(content.parts[0], self._package.root)
        return files.image_over(content.spec, files.format_of(head), name=name, declared=declared)

    def _inner_name(self, href: str) -> str:
        """A file's path in the package: hrefs are relative to the description, and sometimes URL-encoded."""
        if "://" in href:
            raise UnsupportedFormat(f"{self._name} needs {href[:200]}, which is not in the package")
        folder = posixpath.dirname(self._name)
        names = [posixpath.normpath(posixpath.join(folder, each)) for each in (href, unquote(href))]
        return next((name for name in names if self._package.find(name) is not None), names[0])

    def _verify_description(self, data: bytes) -> None:
        digest = self._digests.get(self._name)
        if digest is not None and hashlib.new(digest.algorithm, data).hexdigest() != digest.hex:
            raise MalformedArchive(
                f"{self._name} does not have the {digest.algorithm.upper()} digest that {self._manifest_name} gives for it",
                hint="The package is damaged, or its description was edited: then remove the manifest (.mf) or its line.",
            )


def _digests(package: Package, description: str) -> tuple[str | None, dict[str, Digest]]:
    """The manifest's name, None where there is none, and its digests by path in the package."""
    folder, chosen = posixpath.dirname(description), _beside(package, description, ".mf")
    if chosen is None:
        return None, {}
    digests: dict[str, Digest] = {}
    entries = manifest_file.parse(files.read_all(_require(package, chosen), package.root, MANIFEST_MAX_BYTES), chosen)
    for written, digest in entries.items():
        names = [posixpath.normpath(posixpath.join(folder, each)) for each in (written, unquote(written))]
        name = next((name for name in names if package.find(name) is not None), None)
        if name is None:
            raise MalformedArchive(
                f"{chosen} names the file {written!r}, which {package.label} does not have",
                hint="The package is incomplete: copy all of its files.",
            )
        digests[name] = digest
    return chosen, digests


def _beside(package: Package, description: str, suffix: str) -> str | None:
    """The description's file of that suffix: the one of the same name, or the only one."""
    folder, stem = posixpath.dirname(description), posixpath.splitext(posixpath.basename(description))[0].lower()
    beside = sorted(name for name in package.names() if files.has_suffix(name, suffix) and posixpath.dirname(name) == folder)
    same = [name for name in beside if posixpath.splitext(posixpath.basename(name))[0].lower() == stem]
    return next(iter(same), beside[0] if len(beside) == 1 else None)


def _signature_concerns(package: Package, description: str, manifest_name: str | None) -> list[Concern]:
    """The package's signer, and whether the signature fits the manifest."""
    name = _beside(package, description, ".cert")
    if name is None:
        return []
    if manifest_name is None:
        return [concerns.signature_not_checked("there is no manifest (.mf) that it could be the signature of")]
    from synvirt.offline.ovf import signature  # few packages are signed, and certificates take long to load

    manifest = files.read_all(_require(package, manifest_name), package.root, MANIFEST_MAX_BYTES)
    try:
        data = files.read_all(_require(package, name), package.root, signature.SIGNATURE_MAX_BYTES)
        found = signature.check(data, manifest, name)
    except MalformedArchive as problem:
        return [concerns.signature_not_checked(problem.detail)]
    if not found.fits:
        return [concerns.signature_wrong(found.signer)]
    valid = f"{found.not_before:%Y-%m-%d} to {found.not_after:%Y-%m-%d}"
    return [concerns.signed(found.signer, found.issuer, valid, found.fingerprint_sha256)]


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


def _require(package: Package, name: str) -> FileRange:
    file = package.find(name)
    if file is None:
        raise MalformedArchive(
            f"{package.label} has no file {name!r}, which its description needs",
            hint="The package is incomplete, or a file was renamed: copy all of its files under their own names.",
        )
    return file
