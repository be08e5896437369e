"""Restores: a table of the targets of a restore point.

    export      files in a new folder (here)         new_domain   a guest next to the others (new_domain.py)
    in_place    the guest that it is of (in_place.py)

The request is checked before the run begins. What a run makes is noted before it is made, and removed when the run fails, is
cancelled, or is killed (jobs/ledger.py).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import UUID

import structlog

from synvirt.backups.limits import Limits, Needs, held
from synvirt.backups.memory import Memory
from synvirt.backups.model import BackupRun, RestoredDomain, RestorePoint, RestoreRequest, Status
from synvirt.backups.repositories import Repositories
from synvirt.backups.restores import boot_test, in_place, instant, new_domain
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.restores.new_files import file_name_of, file_writer, remove_folder
from synvirt.backups.runs import Kept, Work
from synvirt.backups.under_way import Sum, UnderWay
from synvirt.backups.working import Copying, Watermarks, Working
from synvirt.disks.beneath import resolve_beneath
from synvirt.durable import put_private_file, sync_folder
from synvirt.errors import BackupBadRequest, BackupConflict, Conflict, DiskWriteFailed, Interrupted, SynvirtError
from synvirt.jobs.instant import is_started
from synvirt.jobs.ledger import Ledger, Undo
from synvirt.jobs.orders import DiskOrder
from synvirt.model.job import Progress
from synvirt.repository.manifest import Manifest
from synvirt.repository.repository import Repository
from synvirt.repository.specs import PointSpec
from synvirt.store.backups import BackupRows

_Restore = Callable[[Copying, Manifest, RestorePoint, RestoreRequest], None]

_log = structlog.get_logger("synvirt.backups")


class Restoring:
    """`roots`: the folders that exports may be written to, the default first. Without `restore_host` only exports are
    possible."""

    def __init__(
        self,
        rows: BackupRows,
        memory: Memory,
        repositories: Repositories,
        working: Working,
        *,
        host: str,
        roots: tuple[Path, ...],
        restore_host: RestoreHost | None,
        limits: Limits | None = None,
    ) -> None:
        self._rows, self._host, self._limits = rows, host, limits
        self._roots, self._repositories, self._working = roots, repositories, working
        self._memory, self._marks = memory, Watermarks(memory)
        self.kept: Kept = {}
        undo: dict[str, Undo] = {"folder": _remove_folder}
        if restore_host is not None:
            undo |= new_domain.undo(restore_host) | boot_test.undo(restore_host)
            undo |= in_place.undo(restore_host, self.kept)
        self.ledger = Ledger(rows.ledger, "run", host=host, undo=undo, order=in_place.ORDER)
        self.restore_host = restore_host

    def asked(self, run: BackupRun, point: RestorePoint, request: RestoreRequest) -> BackupRun:
        """The new run for the request. BackupBadRequest, BackupConflict, SourceRunning, HostLacks."""
        unknown = set(request.disks) - {disk.target for disk in point.disks}
        if unknown:
            raise BackupBadRequest(f"the restore point has no disk {sorted(unknown)[0]}")
        _check_fields(request)
        if request.target != "export":
            self._of_guest(point, request, resumed=False).check(point, request)
            self._claim(self._rows.refuse_claimed, run, point, request)
            return run
        root, folder = self._roots[0], self._folder(request, run.id, resumed=False)
        shown = f"{root.name}/{folder.name}" if folder.parent == root else str(folder)
        return run.model_copy(update={"path": shown})

    def work(self, run: BackupRun, point: RestorePoint) -> Work:
        """Does the work. If an earlier service began the run, what it made exists. Errors as in `asked`."""
        request, resumed = self._memory.asked(run.id, RestoreRequest), run.started_at is not None
        if request.target == "export":
            folder = self._folder(request, run.id, resumed=resumed)
            restore: _Restore = partial(self._export, folder=folder, resumed=resumed)
        else:
            restore = self._of_guest(point, request, resumed=resumed).restore

        def work(under_way: UnderWay) -> None:
            repository = self._repositories.opened(point.repository_id)
            manifest = repository.parsed(self._repositories.authors.checked(under_way, repository, point.id, point.vm_id))
            if not is_started(run.instant):
                self._claim(self._rows.claim, run, point, request)
            restore(self._copying(under_way, request, repository), manifest, point, request)

        return work

    def _claim(self, claim: Callable[..., None], run: BackupRun, point: RestorePoint, request: RestoreRequest) -> None:
        """Claims the name of a new guest, as migrations do: of two that make a guest of one name, one would fail at its end.
        BackupConflict."""
        if request.target == "new_domain":
            try:
                claim(run.id, [f"name {new_domain.name_of(point, request)}"], host=self._host, hint="choose another name")
            except Conflict as error:
                raise BackupConflict(error.detail, hint=error.hint) from error

    def _of_guest(
        self, point: RestorePoint, request: RestoreRequest, *, resumed: bool
    ) -> new_domain.NewDomain | in_place.InPlace:
        if self.restore_host is None:
            raise BackupBadRequest("this service has no hypervisor to restore a guest on")
        return _kind_of(request)(self.restore_host, self.ledger, self._repositories.spec(point.repository_id), resumed=resumed)

    def come_to(self, run: BackupRun) -> RestoredDomain | None:
        """The guest, if a restore in place had begun to replace its disks when the service ended: it has them all now. None, if
        it had not begun. Interrupted, if it had, but cannot have them all: its ledger moves it forward later, or never."""
        domain = self._gone_forward(run.id)
        if domain is None and not in_place.FORWARD.isdisjoint(entry.kind for entry in self.ledger.of(run.id)):
            raise Interrupted("the service ended while the run was under way", hint="start the run again")
        return domain

    def _gone_forward(self, run_id: UUID) -> RestoredDomain | None:
        try:
            return None if self.restore_host is None else in_place.gone_forward(self.restore_host, self.ledger, run_id)
        except SynvirtError as error:
            _log.warning("a restore in place cannot go forward yet", run=str(run_id), detail=error.detail)
            return None

    def _copying(self, under_way: UnderWay, request: RestoreRequest, repository: Repository) -> Copying:
        slot = partial(held, self._limits, under_way, repository, *self._needs(request))
        return Copying(self._working, self._marks, under_way, Sum(under_way, Progress()), request.bandwidth_bps, slot)

    def _needs(self, request: RestoreRequest) -> tuple[Needs, ...]:
        if self.restore_host is None or request.target == "export":
            return ()
        if request.target == "in_place":
            return (Limits.guests,)
        name, destination = self.restore_host.default()
        return (lambda limits: limits.destination(name, destination),)

    # ── exports ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _folder(self, request: RestoreRequest, run_id: UUID, *, resumed: bool) -> Path:
        """The folder of the export: new, in {data_dir}/exports or in the requested folder."""
        parent = self._roots[0]
        if request.path is not None:
            parent = self._allowed(request.path)
        folder = parent / (request.name or str(run_id))
        if not resumed and (folder.exists() or folder.is_symlink()):
            raise BackupConflict(f"{folder.name} already exists", hint="choose another name")
        return folder

    def _allowed(self, path: str) -> Path:
        for root in self._roots:
            if Path(path).is_relative_to(root):
                try:
                    found = resolve_beneath(root, path)
                except SynvirtError as error:
                    raise BackupBadRequest(f"path: {error.detail}") from error
                if found.is_dir():
                    return found
                raise BackupBadRequest(f"path: {path} is not a folder")
        raise BackupBadRequest(
            "path lies in no folder that exports may be written to",
            hint="the setting backup_export_roots names them; without a path, they go to exports in the service's folder",
        )

    def _export(
        self,
        copying: Copying,
        manifest: Manifest,
        point: RestorePoint,
        request: RestoreRequest,
        *,
        folder: Path,
        resumed: bool,
    ) -> None:
        under_way = copying.under_way
        hidden = folder.parent / f".{under_way.run.id}.partial"
        self.ledger.record(under_way.run.id, "folder", str(hidden))
        under_way.move(Status.TRANSFERRING)
        chosen = [
            (number, disk, named.target)
            for number, (disk, named) in enumerate(zip(manifest.shown.disks, manifest.sealed.disks, strict=True))
            if not request.disks or named.target in request.disks
        ]
        if resumed and folder.exists() and not hidden.exists() and copying.have_all(str(number) for number, _, _ in chosen):
            return  # the service ended when all was done; a folder of that name may be another's
        spec = self._repositories.spec(point.repository_id)
        try:
            hidden.mkdir(parents=True, mode=0o750, exist_ok=True)
            put_private_file(hidden / "domain.xml", manifest.sealed.domain_xml.encode())
            for number, disk, target in chosen:
                path = hidden / f"{number}-{file_name_of(target)}.{request.format}"
                reader = PointSpec(repository=spec, point_id=str(point.id), number=number, sha256=manifest.sha256)
                if resumed and not path.exists():
                    copying.forget(str(number))  # what was copied is gone
                writer = file_writer(path, disk.size_bytes, request.format)
                copying.copy(DiskOrder(key=str(number), reader=reader, writer=writer))
            under_way.move(Status.COMMITTING)
            sync_folder(hidden)
            hidden.rename(folder)
            sync_folder(folder.parent)
        except OSError as error:
            raise DiskWriteFailed(f"the export {folder.name} cannot be written: {error.strerror}") from error


def _kind_of(request: RestoreRequest) -> type[new_domain.NewDomain] | type[in_place.InPlace]:
    if request.target == "in_place":
        return in_place.InPlace
    return instant.InstantDomain if request.instant else new_domain.NewDomain


def _remove_folder(run_id: UUID, name: str) -> None:
    path = Path(name)
    assert path.name == f".{run_id}.partial"
    remove_folder(path)


def _check_fields(request: RestoreRequest) -> None:
    """Refuses a field that the target does not use, instead of ignoring it."""
    of_exports = {"path": request.path is not None, "format": request.format != "raw"}
    given = {
        "export": {"start": request.start, "instant": request.instant},
        "new_domain": of_exports,
        "in_place": of_exports | {"name": request.name is not None, "instant": request.instant},
    }
    for field, is_given in given[request.target].items():
        if is_given:
            raise BackupBadRequest(f"{field} has no meaning for a restore with target {request.target}")
