"""A process to be measured: `python -m bench.backup_worker full|changes|restore|verify REPOSITORY IMAGE [AREAS]`.

The data path of a run, without the service around it: a disk is taken into a repository as `backups/worker/taking.py` takes it.
AREAS: a file of JSON, [[start, length], …], what has changed since the newest point.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

from synvirt.blocks import Extent
from synvirt.copying import copy
from synvirt.disks.raw.new_file import new_file
from synvirt.repository.disk import PointReader
from synvirt.repository.folder import HostFolder
from synvirt.repository.manifest import Manifest, Named, Sealed, Shown
from synvirt.repository.repository import Repository, create
from synvirt.repository.session import Session

KEY = bytes(range(32))
TARGET = "vda"


def main() -> None:
    what, folder, image, *areas = sys.argv[1:]
    if what == "full":
        create(HostFolder(Path(folder)), KEY)
    repository = Repository(HostFolder(Path(folder)), KEY, cache=Path(f"{folder}.footers"))
    match what:
        case "full":
            _back_up(repository, image, None, None)
        case "changes":
            _back_up(repository, image, _newest(repository), json.loads(Path(areas[0]).read_text()))
        case "restore":
            _restore(repository, Path(image))
        case "verify":
            from synvirt.repository.verify import verify_point

            wrong = verify_point(repository, _newest(repository).shown.id).wrong
            if wrong:
                sys.exit(wrong)
    repository.close()


def _newest(repository: Repository) -> Manifest:
    return max((repository.manifest(point) for point in repository.point_ids()), key=lambda found: found.shown.created_at)


def _back_up(repository: Repository, image: str, base: Manifest | None, areas: list[tuple[int, int]] | None) -> None:
    # Loaded where it is needed: what a restore does not use is no part of its time.
    from synvirt.backups.worker.taking import ToTake, take
    from synvirt.disks import open_reader
    from synvirt.disks.specs import RawSpec
    from synvirt.model.values import now

    def changed() -> Iterator[Extent]:
        return (Extent(start, length) for start, length in areas or [])

    disk = ToTake(TARGET, lambda: open_reader(RawSpec(path=image)), changed=None if areas is None else changed)
    session = Session(repository)
    taken = take(disk, base, repository, session, stop=lambda: False, on_progress=lambda copied: None, doubt=sys.exit)
    named = Named(target=TARGET, path=image, size_bytes=taken.disk.size_bytes, checked_to=taken.checked_to)
    sealed = Sealed(
        vm_id="bench",
        vm_name="bench",
        consistency="offline",
        job_id=UUID(int=0),
        run_id=uuid4(),
        domain_xml="<domain/>",
        disks=(named,),
    )
    session.commit(Manifest(shown=Shown(id=uuid4(), created_at=now(), disks=(taken.disk,)), sealed=sealed))


def _restore(repository: Repository, path: Path) -> None:
    (disk,) = _newest(repository).shown.disks
    with new_file(path, disk.size_bytes) as writer:
        copy(PointReader(repository, disk), writer)


if __name__ == "__main__":
    main()
