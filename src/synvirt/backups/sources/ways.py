"""Assembles the ways to read this host's guests, for any hypervisor of this host."""

from functools import partial
from pathlib import Path

from synvirt.backups.sources.bitmap import ByJob
from synvirt.backups.sources.guest import Sources
from synvirt.backups.sources.made import MadeRows
from synvirt.backups.sources.offline import Offline
from synvirt.backups.sources.zfs import OfZfs
from synvirt.kvm.connection import Connection, short_root
from synvirt.store.backups import BackupRows

# As for guests of other hosts (docs/platforms/libvirt.md): QEMU's user and its AppArmor profile must have access.
SYSTEM_FOLDER = Path("/var/lib/libvirt/synvirt")
SYSTEM_TPM_FOLDER = Path("/var/lib/libvirt/swtpm")


def scratch_folder(connection: Connection) -> Path:
    """Called when it is needed: if no short path can be made, most restores are still possible."""
    root = short_root(connection.uri)
    return SYSTEM_FOLDER if root is None else root / "backup"


def job_folder(connection: Connection) -> Path:
    """The folder of QEMU's own backup jobs. With the embedded driver, QEMU has this folder for itself: nothing else of ours is
    in it."""
    root = short_root(connection.uri)
    return SYSTEM_FOLDER if root is None else root / "backup/qemu"


def tpm_folder(connection: Connection) -> Path:
    """The folder in which libvirt keeps the TPMs of this host's guests."""
    root = short_root(connection.uri)
    return SYSTEM_TPM_FOLDER if root is None else root / "lib/swtpm"


def sources_of(connection: Connection, rows: BackupRows, *, host: str) -> Sources:
    """The guests of this host, with the ways to read them in the order in which they are tried."""
    ledger = MadeRows(rows.ledger, host=host)
    scratch, tpm = partial(job_folder, connection), partial(tpm_folder, connection)
    ways = (
        OfZfs(connection.uri, ledger, tpm_folder=tpm),
        Offline(connection, tpm),
        ByJob(connection, ledger, folder=scratch, tpm_folder=tpm),
    )
    return Sources(connection, ledger, ways)
