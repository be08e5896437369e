"""Volumes as RBD images in a Ceph pool, for hosts that share their storage.

    {pool}/synvirt.{job_id}.{sanitized label}             the volume
    {pool}/synvirt.{job_id}.{sanitized label}.unmarked    one that is being made: it has no mark yet, and no bytes
    {the volume}@synvirt-{job_id of its clone}            the snapshot under a clone

Our images have our mark in their metadata: `synvirt.job`, `synvirt.disk`, and `synvirt.size` (the disk's true size). Nothing
without the mark is ever removed. Namespaces of the pool are not used: libvirt 9 cannot name them. QEMU itself opens an image by
librbd, so `device` is in QEMU's syntax.
"""

import contextlib
import re
from typing import Any, ClassVar
from uuid import UUID

from synvirt.destinations.naming import sanitized_label
from synvirt.disks.rbd import RbdPool, device_of, failing
from synvirt.disks.specs import RbdPlace, RbdWriterSpec, WriterSpec
from synvirt.errors import DiskWriteFailed

# An image may have any number of bytes; a disk has whole sectors.
SECTOR_BYTES = 512
# This part of the free space (1 / n) is not for disks: a full cluster stops all its clients.
HEADROOM = 16
VOLUME = re.compile(r"synvirt\.(?P<job>[0-9a-f-]{36})\.(?P<disk>\w[\w.-]*)", re.ASCII)
# Names of pools and clients that need no quoting for QEMU and libvirt.
NAME = re.compile(r"[\w.-]+", re.ASCII)
JOB, DISK, SIZE = "synvirt.job", "synvirt.disk", "synvirt.size"


class RbdDestination:
    """Volumes as images in a Ceph pool."""

    kind: ClassVar[str] = "rbd"
    device_type: ClassVar[str] = "rbd"

    def __init__(self, place: RbdPlace) -> None:
        if not all(NAME.fullmatch(part) for part in (place.pool, place.client)):
            raise DiskWriteFailed(
                f"the Ceph pool {place.pool!r} or the client {place.client!r} is not a name",
                hint="letters, digits and - _ . are allowed",
            )
        self._place = place
        self._shared_id: str | None = None

    def volume_name(self, job_id: UUID, label: str) -> str:
        return f"synvirt.{job_id}.{sanitized_label(label)}"

    def create(self, name: str, size_bytes: int) -> None:
        job, disk = _parts(name)
        unmarked = f"{name}.unmarked"
        with RbdPool(self._place) as pool:
            if self._is_ours(pool, name, job):
                self._refuse_another(pool, name, size_bytes)
                return
            with failing(f"volume {name} cannot be made"):
                import rbd

                images = rbd.RBD()
                if unmarked in images.list(pool.ioctx):  # a service was killed just here; nothing was written to it
                    images.remove(pool.ioctx, unmarked)
                whole_bytes = max(-(-size_bytes // SECTOR_BYTES), 1) * SECTOR_BYTES
                images.create(pool.ioctx, unmarked, whole_bytes)
                with rbd.Image(pool.ioctx, unmarked) as image:
                    set_marks(image, {JOB: job, DISK: disk, SIZE: str(size_bytes)})
                images.rename(pool.ioctx, unmarked, name)

    def is_there(self, name: str) -> bool:
        _parts(name)
        with RbdPool(self._place) as pool:
            return _mark(pool, name, JOB) is not None

    def open(self, name: str, size_bytes: int) -> WriterSpec:
        _parts(name)
        return RbdWriterSpec(place=self._place, image=name, size_bytes=size_bytes)

    def device(self, name: str) -> str:
        _parts(name)
        return device_of(self._place, name)

    def destroy(self, name: str) -> None:
        job, _ = _parts(name)
        with RbdPool(self._place) as pool, failing(f"volume {name} cannot be removed"):
            import rbd

            if f"{name}.unmarked" in rbd.RBD().list(pool.ioctx):
                rbd.RBD().remove(pool.ioctx, f"{name}.unmarked")
            if self._is_ours(pool, name, job):
                rbd.RBD().remove(pool.ioctx, name)

    def why_no_clones(self) -> str | None:
        return None

    def clone(self, name: str, to: str) -> None:
        _parts(name)
        job, disk = _parts(to)
        self.unclone(name, to)
        unmarked = f"{to}.unmarked"
        with RbdPool(self._place) as pool, failing(f"volume {name} cannot be cloned"):
            import rbd

            images = rbd.RBD()
            with rbd.Image(pool.ioctx, name) as image:
                size = str(image.metadata_get(SIZE))
                image.create_snap(_snapshot(job))
            images.clone(pool.ioctx, name, _snapshot(job), pool.ioctx, unmarked)
            with rbd.Image(pool.ioctx, unmarked) as image:
                set_marks(image, {JOB: job, DISK: disk, SIZE: size})
            images.rename(pool.ioctx, unmarked, to)

    def backing_file(self, name: str, to: str) -> str | None:
        return None

    def release(self, name: str) -> None:
        """Clones of it are not changed by what is written to it."""

    def unclone(self, name: str, to: str) -> None:
        _parts(name)
        job, _ = _parts(to)
        self.destroy(to)
        with RbdPool(self._place) as pool, failing(f"what a clone of volume {name} began with cannot be removed"):
            import rbd

            # The volume and the snapshot may not exist.
            with contextlib.suppress(rbd.ImageNotFound), rbd.Image(pool.ioctx, name) as image:
                image.remove_snap(_snapshot(job))

    def shared_id(self) -> str | None:
        """It has the cluster's id, as two clusters may have pools of the same name."""
        if self._shared_id is None:
            with RbdPool(self._place) as pool:
                self._shared_id = f"ceph {pool.cluster_id()} {self._place.pool}"
        return self._shared_id

    def free_bytes(self) -> int:
        with RbdPool(self._place) as pool:
            free = pool.free_bytes()
        return free - free // HEADROOM

    def _is_ours(self, pool: RbdPool, name: str, job: str) -> bool:
        """Whether the image exists, made by us for this job. DiskWriteFailed, where another image has its name."""
        mark = _mark(pool, name, JOB)
        if mark is None:
            return False
        if mark != job:
            raise DiskWriteFailed(
                f"the image {name} does not carry the mark of job {job}, so it is left as it is",
                hint="somebody else made it: `rbd remove` it if it is of no use",
            )
        return True

    def _refuse_another(self, pool: RbdPool, name: str, size_bytes: int) -> None:
        present = _mark(pool, name, SIZE)
        if present != str(size_bytes):
            raise DiskWriteFailed(
                f"volume {name} already exists for a disk of {present} bytes, not {size_bytes}",
                hint="it was made for another disk: remove it, or cancel the job that owns it",
            )


def set_marks(image: Any, marks: dict[str, str]) -> None:
    """Writes our marks into an image's metadata."""
    for key, value in marks.items():
        image.metadata_set(key, value)


def _parts(name: str) -> tuple[str, str]:
    """The job's id and the disk's label in a volume's name."""
    found = VOLUME.fullmatch(name)
    # Names come from volume_name by way of the store: this guards against a store that someone edited.
    if found is None:
        raise DiskWriteFailed(f"{name!r} is not a name of a volume in a Ceph pool")
    return found["job"], found["disk"]


def _snapshot(job: str) -> str:
    return f"synvirt-{job}"


def _mark(pool: RbdPool, name: str, key: str) -> str | None:
    """None: there is no such image. Empty: it has no such mark."""
    import rbd

    with failing(f"volume {name} cannot be inspected"):
        try:
            image: Any = rbd.Image(pool.ioctx, name, read_only=True)
        except rbd.ImageNotFound:
            return None
        with image:
            try:
                return str(image.metadata_get(key))
            except KeyError:
                return ""
