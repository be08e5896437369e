"""Host files and uploads, and what is in them."""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import StringConstraints

from synvirt.model.access import ChosenVm
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.model.values import Bytes, Model, Received, Time


class HostEntry(Model):
    """An entry of a folder in the import root. A link is shown as what it leads to; a folder has no size."""

    name: str
    path: str
    type: Literal["file", "directory"]
    size_bytes: Bytes | None
    modified_at: Time
    offline_kind: OfflineKind | None


class HostFolder(Model):
    """A page of a folder: folders first, then files, each by name. `parent` of the import root is null."""

    path: str
    parent: str | None
    entries: tuple[HostEntry, ...]
    next_cursor: str | None


class HostFileRequest(Received):
    """Body of POST /host-files/inspect."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    vm: ChosenVm = None


class UploadInspectRequest(Received):
    """Body of POST /uploads/:id/inspect, which may be left out."""

    vm: ChosenVm = None


class Inspection(Model):
    """What a file or folder is, and which VM is in it."""

    offline_kind: OfflineKind
    manifest: VmManifest


class Upload(Model):
    """An uploaded archive. `path` can be used as `offline_host_path`; from `expires_at` on it may be gone."""

    id: UUID
    filename: str
    size_bytes: Bytes
    sha256: str
    path: str
    created_at: Time
    expires_at: Time
