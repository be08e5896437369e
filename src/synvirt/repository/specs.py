"""A repository, and a disk of a restore point, as data for a worker that opens them. Never stored, as the key is in it."""

from typing import Literal

from synvirt.disks.specs import Spec
from synvirt.records import field


class FolderSpec(Spec):
    """A folder of this host; with `nfs` refused while no NFS export is mounted there."""

    path: str
    nfs: bool = False


class PeerSpec(Spec):
    """A folder that another SynVirt offers: see `repository.peer.PeerPlace`."""

    url: str
    fingerprint_sha256: str
    username: str
    password: str = field(repr=False)
    allowed_hosts: tuple[str, ...] = ()


class RepositorySpec(Spec):
    """`key`: its master key, in base64. `cache`: a file of this host for copies of the packs' footers."""

    place: FolderSpec | PeerSpec
    key: str = field(repr=False)
    cache: str | None = None


class PointSpec(Spec):
    """Disk `number` of a restore point, counted from 0 in its manifest's order. `sha256`: the hash of the manifest whose author
    was checked; a replaced one has another. None: any is read."""

    format: Literal["point"] = "point"
    repository: RepositorySpec
    point_id: str
    number: int
    sha256: str | None = None
