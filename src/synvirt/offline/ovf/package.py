"""The machine of an OVA or an OVF folder: the description's, with its disks measured by their own headers."""

from synvirt.disks.specs import ImageSpec
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.machines import concerns
from synvirt.model.machine import Concern, Disk, VmManifest
from synvirt.offline import facts_of_disks, files
from synvirt.offline.facts_of_disks import Measured
from synvirt.offline.ovf import description as ovf
from synvirt.offline.ovf.manifest_file import MANIFEST_MAX_BYTES
from synvirt.offline.ovf.opening import Opened, Package, beside, require


def inspect(opened: Opened) -> VmManifest:
    """The manifest of an opened package's VM."""
    description = ovf.described(opened.parsed, opened.data)
    measured = [_measured(opened, disk) for disk in description.manifest.disks]
    completed = facts_of_disks.completed(description.manifest, measured, _integrity_concerns(opened))
    return completed if description.states_firmware else facts_of_disks.with_firmware(completed, measured)


def _measured(opened: Opened, disk: Disk) -> Measured:
    declared = opened.disks[disk.key]
    try:
        content = opened.content(declared)
        spec = opened.spec(declared, content)
    except UnsupportedFormat as problem:
        return facts_of_disks.unreadable(disk, problem)
    if content.measurable:
        return facts_of_disks.measured(disk, lambda _: spec)
    known = disk.model_copy(update={"format": spec.format if isinstance(spec, ImageSpec) else "raw"})
    return Measured(known, concerns=(concerns.compressed(disk.key),))


def _integrity_concerns(opened: Opened) -> list[Concern]:
    found = []
    if opened.manifest_name is None:
        found.append(concerns.no_manifest_file())
    else:
        unnamed = [file.href for file in opened.parsed.files.values() if not opened.is_digested(file)]
        if unnamed:
            found.append(concerns.files_without_checksum(unnamed))
    return found + _signature_concerns(opened.package, opened.name, opened.manifest_name)


def _signature_concerns(package: Package, description: str, manifest_name: str | None) -> list[Concern]:
    """The package's signer, and whether the signature fits the manifest."""
    name = beside(package, description, ".cert")
    if name is None:
        return []
    if manifest_name is None:
        return [concerns.signature_not_checked("there is no manifest (.mf) that it could be the signature of")]
    from synvirt.offline.ovf import signature  # few packages are signed, and certificates take long to load

    manifest = files.read_all(require(package, manifest_name), package.root, MANIFEST_MAX_BYTES)
    try:
        data = files.read_all(require(package, name), package.root, signature.SIGNATURE_MAX_BYTES)
        found = signature.check(data, manifest, name)
    except MalformedArchive as problem:
        return [concerns.signature_not_checked(problem.detail)]
    if not found.fits:
        return [concerns.signature_wrong(found.signer)]
    valid = f"{found.not_before:%Y-%m-%d} to {found.not_after:%Y-%m-%d}"
    return [concerns.signed(found.signer, found.issuer, valid, found.fingerprint_sha256)]
