"""A restore run: the disks of a restore point as files in a new folder of {data_dir}/exports."""

from pathlib import Path

from synvirt.backups.disk import PointReader
from synvirt.backups.model import RestorePoint, Status
from synvirt.backups.repository import Repository
from synvirt.backups.under_way import Sum, UnderWay
from synvirt.copying import copy
from synvirt.disks.new_file import new_file
from synvirt.errors import BackupBadRequest, BackupConflict, DiskWriteFailed


def new_folder(folder: Path) -> None:
    """The run's own from here on: what fails is swept with it. BackupConflict, BackupBadRequest."""
    try:
        folder.mkdir(parents=True, mode=0o750)
    except FileExistsError as error:
        raise BackupConflict(f"exports/{folder.name} is there already", hint="choose another name") from error
    except OSError as error:
        raise BackupBadRequest(f"exports/{folder.name} cannot be made: {error.strerror}") from error


def export(under_way: UnderWay, repository: Repository, point: RestorePoint, targets: tuple[str, ...], folder: Path) -> None:
    """`targets`: of the disks wanted; all, where there is none."""
    manifest = repository.manifest(point.id)
    try:
        (folder / "domain.xml").write_text(manifest.sealed.domain_xml)
    except OSError as error:
        raise DiskWriteFailed(f"exports/{folder.name} cannot be written: {error.strerror}") from error
    under_way.move(Status.TRANSFERRING)
    done = Sum(under_way)
    for number, (disk, named) in enumerate(zip(manifest.shown.disks, manifest.sealed.disks, strict=True)):
        if targets and named.target not in targets:
            continue
        reader = PointReader(repository, disk)
        # The target comes from a domain's XML: of it only what a file name may have.
        name = f"{number}-{''.join(letter for letter in named.target if letter.isalnum())}.raw"
        with new_file(folder / name, disk.size_bytes) as writer:
            copy(reader, writer, stop=under_way.stop, on_progress=done.next_disk())
