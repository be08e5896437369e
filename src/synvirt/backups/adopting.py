"""Registers restore points that are in a repository and not in the store."""

from collections.abc import Set
from uuid import UUID

import structlog

from synvirt.backups.model import BackupRepository, BackupRun, RestorePoint
from synvirt.backups.points import Points, point_of
from synvirt.backups.repositories import Repositories
from synvirt.errors import SynvirtError

_log = structlog.get_logger("synvirt.backups")


class Adopting:
    """Registers points as of the repository in which it finds them."""

    def __init__(self, repositories: Repositories, points: Points) -> None:
        self._repositories, self._points = repositories, points

    def adopt(self, known: BackupRepository, run: BackupRun | None = None) -> None:
        """Registers points in the repository that are not registered: all, or those of that run."""
        repository = self._repositories.opened(known.id)
        kept, unknown = repository.kept_ids(), set(repository.point_ids()) - self._points.ids()
        new: list[RestorePoint] = []
        for point_id, found in repository.read_all(unknown):
            try:
                if isinstance(found, SynvirtError):
                    raise found
                unread, manifest = found
                signed_by = self._repositories.authors.signer(unread)
            except SynvirtError as error:
                _log.warning("a restore point cannot be read", point=str(point_id), detail=error.detail)
                continue
            point = point_of(manifest, known, stored_bytes=0, signed_by=signed_by)
            if run is None or point.run_id == run.id:
                new.append(point.model_copy(update={"protected": point_id in kept}))
        for point in sorted(new, key=lambda point: point.created_at):  # points are listed in the order of their registration
            self._points.put(point)

    def forgotten(self, points: Set[UUID]) -> None:
        """Registers points of a repository that was forgotten, where they are in another one too: an earlier version registered
        a repository under two names, and each point under one of them. One that is away is left out, as in a list of all."""
        for known in self._repositories.known() if points else ():
            try:
                if points & self._repositories.points_in(known.id):
                    self.adopt(known)
            except SynvirtError as error:
                _log.warning("a repository is not searched for points", repository=known.name, detail=error.detail)
