"""A VmManifest as lines for people."""

from typing import Any

from synvirt.cli.program import print_sheet


def describe(kind: str, manifest: Any) -> None:
    """Prints a manifest as a table: hardware, disks, cards, concerns."""
    from synvirt.cli.migrating.dry_runs import as_options
    from synvirt.sizes import counted, sized

    rows = [
        ("kind", kind),
        ("name", manifest.name),
        ("guest", f"{manifest.guest_os.name or manifest.guest_os.id or '-'} ({manifest.guest_os.family})"),
        ("firmware", manifest.firmware + (", secure boot" if manifest.secure_boot else "") + (", TPM" if manifest.tpm else "")),
        ("hardware", f"{counted(manifest.cpu_count, 'CPU')}, {sized(manifest.memory_bytes)} of memory"),
        *(
            ("disk", f"{disk.key} {disk.label}: {sized(disk.capacity_bytes)}, {disk.format}, {disk.bus}")
            for disk in manifest.disks
        ),
        *(("network", f"{nic.key} {nic.mac or '-'} in {nic.network or '-'}") for nic in manifest.nics),
        *(
            (concern.category.lower(), f"{concern.id}: {concern.label}. {concern.assessment} {as_options(concern.remedy)}")
            for concern in manifest.concerns
        ),
    ]
    print_sheet(rows)
