"""What may go wrong with a VM, known before anything is copied: one constructor per concern, so that ids stay the same.

`Critical` refuses the plan unless the plan waives the concern by id; so only what cannot come out right is Critical.
"""

from collections.abc import Iterable, Sequence

from synvirt.machines.partitions import Layout
from synvirt.model.machine import Concern, Disk, GuestOs, VmManifest
from synvirt.nearest import in_short
from synvirt.sizes import KIB, SECTOR_BYTES, counted, sized

UNKNOWN_GUEST = "guest-unknown"
TARGET_TOO_SMALL = "target-too-small"
# The least that a file system or a pool gives to a volume with any data in it.
_BLOCK_BYTES = 4 * KIB


def of_machine(*, uefi: bool, secure_boot: bool, tpm: bool, guest: GuestOs, snapshots: int = 0) -> list[Concern]:
    """The concerns of the machine's own traits, whichever source they come from."""
    known = ((uefi, uefi_state_lost), (secure_boot, secure_boot_keys), (tpm, tpm_state))
    found = [constructor() for applies, constructor in known if applies]
    if guest.family == "other":
        found.append(unknown_guest(guest.name))
    if snapshots:
        found.append(snapshots_present(snapshots))
    return found


def of_layout(key: str, layout: Layout) -> list[Concern]:
    """The concerns of the partition table of the disk `key`."""
    known = ((layout.dynamic, dynamic_disk), (layout.bitlocker, bitlocker), (layout.luks, luks))
    return [constructor(key) for applies, constructor in known if applies]


def with_room(manifest: VmManifest, free_bytes: int) -> VmManifest:
    """The manifest with the concerns of a destination that has `free_bytes` free."""
    least = least_bytes(manifest.disks)
    capacity = sum(disk.capacity_bytes for disk in manifest.disks)
    if least > free_bytes:
        found = target_too_small(least, free_bytes)
    elif capacity > free_bytes:
        found = target_may_fill(capacity, free_bytes)
    else:
        return manifest
    return manifest.model_copy(update={"concerns": (*manifest.concerns, found)})


def least_bytes(disks: Iterable[Disk]) -> int:
    """What is written for these disks at least: what they are known to hold, and one block where that is not known."""
    found = list(disks)
    known = sum(disk.used_bytes or 0 for disk in found)
    return max(known, min(_BLOCK_BYTES, sum(disk.capacity_bytes for disk in found if disk.used_bytes is None)))


def target_too_small(least_bytes: int, free_bytes: int) -> Concern:
    return Concern(
        id=TARGET_TOO_SMALL,
        category="Critical",
        label="Disks do not fit",
        assessment=f"The VM's disks hold at least {sized(least_bytes)}, and the destination has {sized(free_bytes)} free.",
        remedy="Free space on the destination, choose another, or skip disks in the plan. Waive this where the destination "
        "compresses, or shares the bytes of the file itself (XFS, Btrfs).",
    )


def target_may_fill(capacity_bytes: int, free_bytes: int) -> Concern:
    return Concern(
        id="target-may-fill",
        category="Warning",
        label="Disks may outgrow the destination",
        assessment=f"The VM's disks have {sized(capacity_bytes)}, and the destination has {sized(free_bytes)} free. Volumes "
        "are sparse: they fit as long as they are not written full.",
        remedy="Watch the destination's free space, or make more before the guest needs it.",
    )


def runs_cold(why: str) -> Concern:
    return Concern(
        id="runs-cold",
        category="Warning",
        label="Runs cold",
        assessment=f"The plan's mode is Warm, but the job will run cold: {why}.",
        remedy="Choose mode Cold. Warm is for a VM on its platform, where that tracks the changes of its disks.",
    )


def no_disks() -> Concern:
    return Concern(
        id="no-disks",
        category="Critical",
        label="No disk",
        assessment="The VM has no hard disk: nothing would be copied, and the imported VM could not boot from a disk.",
        remedy="Export the VM with its disks; media in CD-ROM or floppy drives are not imported.",
    )


def unreadable_disk(key: str, why: str, remedy: str) -> Concern:
    return Concern(
        id=f"disk-unreadable:{key}",
        category="Critical",
        label="Disk cannot be read",
        assessment=f"Disk {key}: {why.rstrip('.')}.",
        remedy=remedy,
    )


def raw_device(key: str, kind: str) -> Concern:
    return Concern(
        id=f"disk-raw-device:{key}",
        category="Critical",
        label="Raw device mapping",
        assessment=f"Disk {key} stands for a device of its host ({kind}): its content is in no file here.",
        remedy="Clone it at the source into a disk file of its own (vmkfstools -i; New-VHD -SourceDisk), or skip it and attach "
        "the device afterwards.",
    )


def of_sectors(key: str, sector_bytes: int) -> list[Concern]:
    """The concern of a disk with those sectors; none, where every bus here gives it them."""
    return [] if sector_bytes == SECTOR_BYTES else [large_sectors(key, sector_bytes)]


def large_sectors(key: str, sector_bytes: int) -> Concern:
    return Concern(
        id=f"disk-sectors:{key}",
        category="Critical",
        label="Sectors of another size",
        assessment=f"Disk {key} has sectors of {sector_bytes} bytes. Here it has them by virtio and SCSI alone, for which the "
        "guest needs virtio drivers. By SATA and IDE it has sectors of 512, by which the guest finds neither its partitions "
        "nor its files; Windows may offer to format it.",
        remedy="Waive this for a guest that has virtio drivers, as Linux has, with no target.disk_bus of sata or ide. Or, at "
        "the source, copy what is on the disk to one with sectors of 512 bytes.",
    )


def no_manifest_file() -> Concern:
    return Concern(
        id="checksums-missing",
        category="Information",
        label="No checksums",
        assessment="The appliance comes without a manifest (.mf), so damage on the way here cannot be noticed.",
        remedy="Compare the file with a checksum from where it came, or export it again with a manifest.",
    )


def files_without_checksum(names: Sequence[str]) -> Concern:
    return Concern(
        id="checksums-incomplete",
        category="Information",
        label="Some files have no checksum",
        assessment=f"The manifest (.mf) does not name {in_short(names)}: damage in there cannot be noticed.",
        remedy="Export the appliance again if its integrity matters.",
    )


def signed(signer: str, issuer: str, valid: str, fingerprint_sha256: str) -> Concern:
    return Concern(
        id="signed",
        category="Information",
        label="Signed appliance",
        assessment=f"The manifest is signed by {signer}, whose certificate was issued by {issuer} and is valid from {valid}. "
        "The signature is right. Whether the signer can be trusted is not known here.",
        remedy=f"Compare the certificate's SHA-256 fingerprint with the publisher's: {fingerprint_sha256}.",
    )


def signature_wrong(signer: str) -> Concern:
    return Concern(
        id="signature-wrong",
        category="Critical",
        label="Wrong signature",
        assessment=f"The appliance should be signed by {signer}, but that is not a signature of its manifest (.mf): one of the "
        "two was changed after the signing.",
        remedy="Get the appliance again from its publisher. Waive this if you changed the manifest yourself.",
    )


def signature_not_checked(why: str) -> Concern:
    return Concern(
        id="signature-not-checked",
        category="Warning",
        label="Signature not checked",
        assessment=f"The appliance has a signature (.cert) that cannot be checked: {why.rstrip('.')}.",
        remedy="Get the appliance again from its publisher, or check the signature with the exporter's tool.",
    )


def uefi_state_lost() -> Concern:
    return Concern(
        id="uefi-state-lost",
        category="Warning",
        label="UEFI variables are not imported",
        assessment="The VM boots by UEFI. Its variables (boot entries, keys) stay behind. It boots the disk's default loader, "
        "/EFI/BOOT/BOOTX64.EFI; where there is none, the loaders on its disks get new entries.",
        remedy="Enrol keys of its own again. A Ceph pool and an instant start need the default loader: they make no entries.",
    )


def secure_boot_keys() -> Concern:
    return Concern(
        id="secure-boot",
        category="Warning",
        label="Secure Boot",
        assessment="The VM uses Secure Boot. The imported VM starts with Microsoft's keys; own keys are not taken along.",
        remedy="Enrol own keys again after the import.",
    )


def tpm_state() -> Concern:
    return Concern(
        id="tpm",
        category="Warning",
        label="Virtual TPM",
        assessment="The VM has a virtual TPM. The imported VM gets an empty one: secrets sealed in the old one are lost.",
        remedy="Have BitLocker or LUKS recovery keys at hand, or suspend BitLocker before exporting.",
    )


def unknown_guest(name: str) -> Concern:
    return Concern(
        id=UNKNOWN_GUEST,
        category="Information",
        label="Unknown guest system",
        assessment=f"What runs in the VM is not known ({name or 'the source does not say'}); no drivers are put into it.",
        remedy="A Windows guest without virtio drivers will not boot from virtio disks: set target.disk_bus to sata or ide.",
    )


def hardware_incomplete(missing: str) -> Concern:
    return Concern(
        id=f"hardware-incomplete:{missing}",
        category="Warning",
        label=f"No {missing} given",
        assessment=f"The description does not say how much {missing} the VM has; a small default is used.",
        remedy="Set processors and memory in the plan: target.cpu_count, target.memory_bytes.",
    )


def wrong_encoding(declared: str) -> Concern:
    return Concern(
        id="encoding-wrong",
        category="Information",
        label="The description declares an encoding that it does not have",
        assessment=f"It declares {declared}; its bytes are something else, and were read as what they are.",
        remedy="Nothing, where names look right. XenCenter writes every description so.",
    )


def disk_named_twice(key: str) -> Concern:
    return Concern(
        id=f"disk-named-twice:{key}",
        category="Warning",
        label="Disk is attached twice",
        assessment=f"Two hardware items name disk {key}. The new machine gets it once, where the first of them has it.",
        remedy="Check that the guest's other disks are there; the second item may have meant one of them.",
    )


def independent_disk(key: str, mode: str) -> Concern:
    return Concern(
        id=f"disk-independent:{key}",
        category="Warning",
        label="Independent disk",
        assessment=f"Disk {key} has the mode {mode}: snapshots never held it, so it may be of another moment than the rest.",
        remedy="Check that the VM was powered off when it was exported.",
    )


def shared_disk(key: str) -> Concern:
    return Concern(
        id=f"disk-shared:{key}",
        category="Warning",
        label="Shared disk",
        assessment=f"Disk {key} is shared with other VMs. The copy is this VM's own: writes of the others will not reach it.",
        remedy="Move all VMs of the cluster at once, or skip the disk and attach shared storage after the import.",
    )


def unattached_disk(key: str) -> Concern:
    return Concern(
        id=f"disk-unattached:{key}",
        category="Warning",
        label="Disk is attached to no controller",
        assessment=f"Disk {key} is in the package, but the VM's hardware does not name it. It is imported as the last disk.",
        remedy="Skip it in the plan if the VM does not need it.",
    )


def removable_media_left_out(names: tuple[str, ...]) -> Concern:
    return Concern(
        id="media-left-out",
        category="Information",
        label="Inserted media are not imported",
        assessment=f"The VM has {', '.join(names)} in a CD-ROM or floppy drive; only hard disks are imported.",
        remedy="Insert the medium again after the import if the guest needs it.",
    )


# The id of the concern that lists what a domain made here lacks of the definition; the domain's differences use it too.
LEFT_OUT = "reaches-into-its-host"
SETTINGS_LEFT_OUT = "settings-not-taken-over"
# A definition may have thousands of them; people read some.
LEFT_OUT_SHOWN = 20
# Concerns whose subject is also listed as a difference, by the part of their id before a colon: nothing here replaces it.
REACHING = frozenset(
    (
        *(LEFT_OUT, "passthrough-device", "host-devices", "shared-folders", "qemu-arguments", "hook-script"),
        *("vim.passthrough", "vim.nvdimm", "nutanix.passthrough", "nutanix.gpu"),
    )
)


def left_out(items: Sequence[str]) -> Concern:
    """The settings of the machine that reach into its host; the first LEFT_OUT_SHOWN are named."""
    more = f"; and {len(items) - LEFT_OUT_SHOWN} more" if len(items) > LEFT_OUT_SHOWN else ""
    return Concern(
        id=LEFT_OUT,
        category="Information",
        label="What reaches into its host is not taken over",
        assessment="; ".join(items[:LEFT_OUT_SHOWN]) + more,
        remedy="Add what the guest needs by virsh edit after the import.",
    )


def settings_left_out(items: Sequence[str]) -> Concern:
    return Concern(
        id=SETTINGS_LEFT_OUT,
        category="Information",
        label="Settings that are not taken over",
        assessment=f"The VM has settings that it does not have here: {in_short(items)}.",
        remedy="Set the same by virsh edit after the import, where they matter.",
    )


def passthrough_device(name: str) -> Concern:
    return Concern(
        id=f"passthrough-device:{name}",
        category="Warning",
        label="Passthrough device",
        assessment=f"The VM uses a device of its host, {name}, which the imported VM will not have.",
        remedy="Assign a device of this host after the import if the guest needs one.",
    )


def snapshots_present(count: int) -> Concern:
    return Concern(
        id="snapshots-present",
        category="Information",
        label="Snapshots are not imported",
        assessment=f"The VM has {counted(count, 'snapshot')}. Its current state alone is imported.",
        remedy="Export from a snapshot, or revert to it first, if you need an older state.",
    )


def disk_snapshots(key: str, count: int) -> Concern:
    return Concern(
        id=f"disk-snapshots:{key}",
        category="Information",
        label="Snapshots inside a disk are not imported",
        assessment=f"The image of disk {key} has {counted(count, 'snapshot')}. Its current state alone is imported.",
        remedy="If you need an older state: qemu-img snapshot -a NAME on a copy of the image, and import that.",
    )


def newer_files(key: str, names: Sequence[str]) -> Concern:
    return Concern(
        id=f"disk-newer-files:{key}",
        category="Warning",
        label="Newer files of the disk are not imported",
        assessment=f"The file of disk {key} is the parent of {in_short(names)}. What was written since that snapshot or "
        "checkpoint was made is not imported.",
        remedy="Import the newest file of the chain by its own path, unless you want this older state.",
    )


def suspended() -> Concern:
    return Concern(
        id="suspended",
        category="Warning",
        label="Suspended VM",
        assessment="The VM was suspended, not shut down: its memory is lost, and its disks are as after a power failure.",
        remedy="Resume the VM at the source, shut it down and export it again; above all a hibernated or busy Windows.",
    )


def assumed_hardware() -> Concern:
    return Concern(
        id="hardware-assumed",
        category="Information",
        label="Hardware is assumed",
        assessment="A disk image does not say what machine it belongs to: processors, memory and network are defaults.",
        remedy="Set processors, memory and network in the plan: target.cpu_count, target.memory_bytes, target.network_map.",
    )


def capacity_differs(key: str, described_bytes: int, real_bytes: int) -> Concern:
    return Concern(
        id=f"disk-capacity-differs:{key}",
        category="Warning",
        label="Disk size differs from the description",
        assessment=f"Disk {key} is described with {described_bytes} bytes, but its image has {real_bytes}; the image counts.",
        remedy="Check that the right image lies under the disk's name.",
    )


def dynamic_disk(key: str) -> Concern:
    return Concern(
        id=f"disk-dynamic:{key}",
        category="Warning",
        label="Windows dynamic disk",
        assessment=f"Disk {key} is a Windows dynamic disk (LDM). It is copied whole, but virtio drivers cannot be put into it.",
        remedy="Convert it to a basic disk at the source, or boot from sata or ide (target.disk_bus).",
    )


def bitlocker(key: str) -> Concern:
    return Concern(
        id=f"disk-bitlocker:{key}",
        category="Warning",
        label="BitLocker",
        assessment=f"A volume of disk {key} is encrypted by BitLocker: Windows will ask for its recovery key here, "
        "and virtio drivers cannot be put into it.",
        remedy="Suspend or remove BitLocker at the source, or have the recovery key at hand and boot from sata.",
    )


def luks(key: str) -> Concern:
    return Concern(
        id=f"disk-luks:{key}",
        category="Information",
        label="LUKS",
        assessment=f"A volume of disk {key} is encrypted by LUKS. It is copied as it is; a key sealed in a TPM stays behind.",
        remedy="Have a passphrase at hand if the guest unlocks it by a TPM.",
    )


def paravirtualised() -> Concern:
    return Concern(
        id="paravirtualised",
        category="Critical",
        label="Paravirtualised guest",
        assessment="The VM is a Xen PV guest: its disk may lack a boot loader, its kernel drivers for any other machine.",
        remedy="Convert it to HVM at the source (a kernel and a boot loader of its own), and export it again.",
    )


def in_use() -> Concern:
    return Concern(
        id="in-use",
        category="Warning",
        label="The VM may be running",
        assessment="The folder has lock files of a running VM: its disks may change while they are copied.",
        remedy="Shut the VM down and copy its files again; remove lock files (.lck) that were left by a crash.",
    )


def unversioned(key: str) -> Concern:
    return Concern(
        id=f"disk-unversioned:{key}",
        category="Warning",
        label="File without a version",
        assessment=f"The server of disk {key} sends neither an ETag nor a Last-Modified: if the file is replaced by "
        "another one of the same size while it is read, the disk is of two halves, and nothing shows it.",
        remedy="Let nobody write the file until the import has ended, or serve it by nginx, Apache or S3.",
    )


def compressed(key: str) -> Concern:
    return Concern(
        id=f"disk-compressed:{key}",
        category="Information",
        label="Compressed disk file",
        assessment=f"The file of disk {key} is a gzip file: it is inflated once to find its end and once to be copied.",
        remedy="Unpack it first where speed matters; the image inside is often compressed already.",
    )


def dynamic_memory(start_mib: int, least_mib: int, most_mib: int) -> Concern:
    return Concern(
        id="dynamic-memory",
        category="Information",
        label="Dynamic memory",
        assessment=f"The VM started with {start_mib} MiB and was given between {least_mib} and {most_mib} MiB as it needed. "
        f"The imported VM has {start_mib} MiB, always.",
        remedy="Set more in the plan, target.memory_bytes, where that is too little.",
    )


def shielded() -> Concern:
    return Concern(
        id="shielded",
        category="Critical",
        label="Shielded VM",
        assessment="The VM is shielded: its disks are encrypted, and their keys are in a virtual TPM that opens on its guarded "
        "hosts alone. The imported VM could not read its own disks.",
        remedy="Turn shielding off on a guarded host, suspend BitLocker in the guest, and export the VM again.",
    )
