"""Volumes as sparse zfs volumes, as the specification (part 1) wants them: lz4, blocks of 64 KiB.

    {pool}/{namespace}/migrations/{job_id}/{sanitized label}
    {the volume}@synvirt-{job_id of its clone}                  the snapshot under a clone

Our datasets have our mark as user properties: `synvirt:job` and, on volumes, `synvirt:disk` and `synvirt:size` (the disk's true
size, as a volume has whole blocks). Nothing without the mark is ever destroyed, and nothing recursively. docs/zfs.md says what
the service's user must be allowed to do.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from uuid import UUID

from synvirt.destinations import DestinationAway
from synvirt.destinations.naming import sanitized_label
from synvirt.destinations.zfs_command import Zfs, ZfsRefused
from synvirt.destinations.zfs_links import DEVICES, LINK_TIMEOUT_S, Links
from synvirt.disks.raw.zvols import zvol_name
from synvirt.disks.specs import BlockWriterSpec, WriterSpec
from synvirt.errors import DiskWriteFailed

BLOCK_BYTES = 64 * 1024
# ZFS_MAX_DATASET_NAME_LEN of include/sys/fs/zfs.h, without its NUL.
NAME_CHARS_MAX = 255
# This part of the free space (1 / n) is not for disks.
HEADROOM = 16
# A pool and its datasets: the names that zpool(8) and zfs(8) take, without spaces.
PARENT = re.compile(r"[A-Za-z][\w.:-]*(/\w[\w.:-]*)*", re.ASCII)
# The last two parts of a volume's name, as volume_name gives them.
VOLUME = re.compile(r"(?P<job>[0-9a-f-]{36})/(?P<disk>\w[\w.-]*)", re.ASCII)


class ZfsDestination:
    """`name_of` asks an open device for the name of its volume, as a link may be left from a volume that is gone."""

    kind: ClassVar[str] = "zfs"
    device_type: ClassVar[str] = "block"

    def __init__(
        self,
        pool: str,
        namespace: str,
        *,
        zfs: Zfs | None = None,
        devices: Path = DEVICES,
        name_of: Callable[[int], str] = zvol_name,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        self._pool = pool
        self._root = f"{pool}/{namespace}/migrations"
        self._zfs = zfs or Zfs()
        self._links = Links(devices, name_of=name_of, timeout_s=link_timeout_s)
        longest = self.volume_name(UUID(int=0), "é" * 200)
        if not PARENT.fullmatch(self._root) or "/" in pool or len(longest) > NAME_CHARS_MAX:
            raise DiskWriteFailed(
                f"the zfs pool {pool!r} and the namespace {namespace!r} do not form the name of a dataset",
                hint="letters, digits and - _ . : are allowed, a pool begins with a letter, and both together stay short",
            )

    def volume_name(self, job_id: UUID, label: str) -> str:
        return f"{self._root}/{job_id}/{sanitized_label(label)}"

    def create(self, name: str, size_bytes: int) -> None:
        job, disk = self._parts(name)
        whole_bytes = max(-(-size_bytes // BLOCK_BYTES), 1) * BLOCK_BYTES
        options = {
            "volblocksize": str(BLOCK_BYTES),
            "compression": "lz4",
            # This host must not look for a guest's partitions and logical volumes.
            "volmode": "dev",
            "synvirt:job": job,
            "synvirt:disk": disk,
            "synvirt:size": str(size_bytes),
        }
        try:
            self._make(name, "create", "-s", "-V", str(whole_bytes), *_as_arguments(options))
        except ZfsRefused as refused:
            if refused.reason != "exists":
                raise
            self._refuse_foreign(name, self._mark(name), job)
            self._refuse_another_size(name, size_bytes)
        self.device(name)

    def is_there(self, name: str) -> bool:
        self._parts(name)
        if self._mark(name) is None:
            self._refuse_no_pool()
            return False
        return True

    def open(self, name: str, size_bytes: int) -> WriterSpec:
        return BlockWriterSpec(path=self.device(name), size_bytes=size_bytes)

    def device(self, name: str) -> str:
        """The volume's link. It waits until the link leads to this volume, as `create` does: udev removes a link while it looks
        at a device again, and on a busy host does not always make it again."""
        self._parts(name)
        return self._links.device(name)

    def destroy(self, name: str) -> None:
        job, _ = self._parts(name)
        if (mark := self._mark(name)) is not None:
            self._refuse_foreign(name, mark, job)
            self._destroy(name)
        folder = f"{self._root}/{job}"
        present = self._mark(folder)
        if present is None:
            self._refuse_no_pool()
        if present == job:
            try:
                self._destroy(folder)
            except ZfsRefused as refused:
                if refused.reason != "in use":  # another disk of the job still exists
                    raise

    def why_no_clones(self) -> str | None:
        return None

    def clone(self, name: str, to: str) -> None:
        self._parts(name)
        job, disk = self._parts(to)
        self.unclone(name, to)
        size = self._zfs.properties(name, "synvirt:size").get("synvirt:size", "")
        self._zfs("snapshot", _snapshot(name, job))
        marks = {"volmode": "dev", "synvirt:job": job, "synvirt:disk": disk, "synvirt:size": size}
        self._make(to, "clone", *_as_arguments(marks), _snapshot(name, job))
        self.device(to)

    def backing_file(self, name: str, to: str) -> str | None:
        return None

    def release(self, name: str) -> None:
        """Clones of it are not changed by what is written to it."""

    def unclone(self, name: str, to: str) -> None:
        self._parts(name)
        job, _ = self._parts(to)
        self.destroy(to)
        # No other program makes such a name.
        self._destroy(_snapshot(name, job))

    def shared_id(self) -> str | None:
        return None

    def free_bytes(self) -> int:
        """How much the namespace can still take. zfs itself subtracts quotas, reservations and its own reserve; here the
        blocks' metadata and the padding of a raidz are subtracted."""
        for dataset in self._upwards():
            try:
                available = int(self._zfs("get", "-Hp", "-o", "value", "available", dataset))
                return available - available // HEADROOM
            except ZfsRefused as refused:
                if refused.reason != "missing":
                    raise
        raise DestinationAway(
            f"this host has no zfs pool {self._pool}", hint="`zpool list` shows its pools, `zpool import` those not imported"
        )

    def _parts(self, name: str) -> tuple[str, str]:
        """The job's id and the disk's label in a volume's name."""
        found = VOLUME.fullmatch(name.removeprefix(f"{self._root}/"))
        # Names come from volume_name by way of the store: this guards against a store that someone edited.
        if found is None or not name.startswith(f"{self._root}/"):
            raise DiskWriteFailed(f"{name!r} is not a name of a volume under {self._root}")
        return found["job"], found["disk"]

    def _upwards(self) -> Iterator[str]:
        """The dataset of all jobs, and those above it, up to the pool."""
        dataset = self._root
        while dataset:
            yield dataset
            dataset = dataset.rpartition("/")[0]

    def _refuse_no_pool(self) -> None:
        """zfs calls a dataset of a pool that is not imported one that does not exist: it would come back with its pool."""
        self.free_bytes()

    def _make(self, dataset: str, *arguments: str) -> None:
        """With its parents, where they are absent: one by one, as `zfs create -p` takes no properties for them."""
        try:
            self._zfs(*arguments, dataset)
        except ZfsRefused as refused:
            if refused.reason == "no pool":
                self.free_bytes()  # says so in other words
            if refused.reason != "missing" or "/" not in dataset:
                raise
            self._make_parent(dataset.rpartition("/")[0])
            self._zfs(*arguments, dataset)

    def _make_parent(self, dataset: str) -> None:
        options = {"canmount": "off"}
        if dataset == self._root:
            # Tools that snapshot everything would keep copied data from being freed.
            options["com.sun:auto-snapshot"] = "false"
        elif dataset.startswith(f"{self._root}/"):
            options["synvirt:job"] = dataset.rpartition("/")[2]
        try:
            self._make(dataset, "create", *_as_arguments(options))
        except ZfsRefused as refused:
            if refused.reason != "exists":  # another job made it at the same moment
                raise

    def _mark(self, dataset: str) -> str | None:
        """The job in the dataset's own mark; empty, where it has no mark; None, where there is no such dataset."""
        try:
            return self._zfs.properties(dataset, "synvirt:job").get("synvirt:job", "")
        except ZfsRefused as refused:
            if refused.reason == "missing":
                return None
            raise

    def _refuse_foreign(self, name: str, mark: str | None, job: str) -> None:
        if mark != job:
            raise DiskWriteFailed(
                f"{name} does not carry the mark of job {job}, so it is left as it is",
                hint="somebody else made it, or took the property synvirt:job from it: `zfs destroy` it if it is of no use",
            )

    def _refuse_another_size(self, name: str, size_bytes: int) -> None:
        present = self._zfs.properties(name, "synvirt:size").get("synvirt:size")
        if present != str(size_bytes):
            raise DiskWriteFailed(
                f"volume {name} already exists for a disk of {present} bytes, not {size_bytes}",
                hint="it was made for another disk: destroy it, or cancel the job that owns it",
            )

    def _destroy(self, dataset: str) -> None:
        try:
            self._zfs("destroy", dataset)
        except ZfsRefused as refused:
            if refused.reason != "missing":
                raise


def _snapshot(name: str, job: str) -> str:
    return f"{name}@synvirt-{job}"


def _as_arguments(options: dict[str, str]) -> list[str]:
    return [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
