"""Repositories and their disks, opened by their specs. A repository that several disks name is opened once."""

import base64
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

from synvirt.repository.disk import PointReader
from synvirt.repository.folder import Folder, HostFolder
from synvirt.repository.repository import Repository
from synvirt.repository.specs import FolderSpec, PeerSpec, PointSpec, RepositorySpec


class OpenRepositories:
    """A context: at its end it closes what it opened."""

    def __init__(self) -> None:
        self._open: dict[RepositorySpec, Repository] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for repository in self._open.values():
            repository.close()
        self._open.clear()

    def repository(self, spec: RepositorySpec) -> Repository:
        """RepositoryUnreachable, RepositoryKeyWrong, RepositoryDamaged."""
        if spec not in self._open:
            cache = None if spec.cache is None else Path(spec.cache)
            self._open[spec] = Repository(_folder(spec.place), base64.b64decode(spec.key), cache=cache)
        return self._open[spec]

    def point(self, spec: PointSpec) -> PointReader:
        """BackupNotFound, RepositoryDamaged, and as above."""
        repository = self.repository(spec.repository)
        return PointReader(repository, repository.manifest(UUID(spec.point_id), spec.sha256).shown.disks[spec.number])


def _folder(place: FolderSpec | PeerSpec) -> Folder:
    if isinstance(place, FolderSpec):
        return HostFolder(Path(place.path), is_nfs=place.nfs)
    from synvirt.repository.peer import PeerFolder, PeerPlace

    return PeerFolder(PeerPlace(**asdict(place)))
