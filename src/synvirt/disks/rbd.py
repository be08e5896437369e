"""Images in a Ceph pool, read and written by librbd (python3-rbd): no kernel module, no device on this host.

    conf, client ─▶ cluster ─▶ pool ─▶ image, in objects of 4 MiB

https://docs.ceph.com/en/pacific/rbd/api/librbdpy/ has the calls. If a cluster is away or full, a request does not fail but
waits. So requests have a time limit, and the error lists the possible causes.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from synvirt.blocks import Extent
from synvirt.disks.specs import RbdPlace, RbdSpec, RbdWriterSpec
from synvirt.errors import DiskReadFailed, DiskWriteFailed, SynvirtError

CONNECT_TIMEOUT_S = 30
# After a disk of the cluster fails, requests wait 20 s until its peers report it; then others answer.
REQUEST_TIMEOUT_S = 90
# A killed client counts as alive for 30 s.
LOCK_TIMEOUT_S, LOCK_LOOK_S = 60, 0.2
# Requests of several threads go to several disks of the cluster.
THREADS = 4
# How much one query about existing objects covers: 256 objects, so that a large image needs no memory.
WINDOW_BYTES = 1 << 30

HINTS = {
    errno.ETIMEDOUT: "`ceph -s` says how the cluster is: one that is full does not answer writes either",
    errno.ENOSPC: "`ceph df` says what is free; the pool may have a quota",
    errno.EDQUOT: "the pool has a quota: `ceph osd pool get-quota` shows it",
    errno.EPERM: "the client's key must allow `profile rbd` on the pool",
    errno.EACCES: "the client's key must allow `profile rbd` on the pool",
    errno.EROFS: "somebody else writes to this image",
    errno.EBUSY: "somebody has the image open: a domain that runs, or an import",
}


class RbdPool:
    """A connection to a pool. Every failure is DiskWriteFailed; use it in a `with`."""

    def __init__(self, place: RbdPlace) -> None:
        self.place = place
        with failing(f"the Ceph cluster of {place.conf} cannot be reached"):
            self._cluster = _cluster(place)
        try:
            with failing(f"the Ceph pool {place.pool} cannot be opened"):
                self.ioctx = self._cluster.open_ioctx(place.pool)
        except BaseException:
            self._cluster.shutdown()
            raise

    def cluster_id(self) -> str:
        """The cluster's `fsid`."""
        with failing(f"the Ceph cluster of {self.place.conf} does not say its id"):
            return str(self._cluster.get_fsid())

    def free_bytes(self) -> int:
        """How much the pool can still take, with its copies and by its fullest disk."""
        with failing(f"the Ceph pool {self.place.pool} cannot be inspected"):
            code, answer, words = self._cluster.mon_command(json.dumps({"prefix": "df", "format": "json"}), b"")
        pools = json.loads(answer)["pools"] if code == 0 else []
        for pool in pools:
            if pool["name"] == self.place.pool:
                return int(pool["stats"]["max_avail"])
        if code == 0:
            raise DiskWriteFailed(
                f"`ceph df` does not list the pool {self.place.pool}, so its free space is not known",
                hint="a new pool is listed once Ceph's manager has its figures: `ceph -s` says whether a manager is active",
            )
        raise DiskWriteFailed(f"the Ceph pool {self.place.pool} cannot be inspected: {words or os.strerror(-code)}")

    def __enter__(self) -> "RbdPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the pool and the connection to the cluster."""
        try:
            self.ioctx.close()
        finally:
            self._cluster.shutdown()


class RbdWriter:
    """Writes one image as its only writer: it holds the image's lock, and waits for the lock of a killed worker."""

    max_writers = THREADS

    def __init__(self, spec: RbdWriterSpec) -> None:
        self.size = spec.size_bytes
        self._name = spec.image
        self._closed = False
        self._pool = RbdPool(spec.place)
        try:
            with failing(f"volume {spec.image} cannot be opened"):
                self._image = _rbd().Image(self._pool.ioctx, spec.image)
            try:
                _lock(self._image, spec.image)
            except BaseException:
                self._image.close()
                raise
        except BaseException:
            self._pool.close()
            raise

    def write(self, offset: int, buffer: memoryview) -> None:
        if not buffer:
            return
        self._within(offset, len(buffer))
        with failing(f"{self._name}: {len(buffer)} bytes at offset {offset} cannot be written"):
            # The binding takes only `bytes`; the copy costs a tenth of the network's time.
            self._image.write(bytes(buffer), offset)

    def zero(self, offset: int, length: int) -> None:
        if not length:
            return
        self._within(offset, length)
        with failing(f"{self._name}: {length} bytes at offset {offset} cannot be made zero"):
            # Frees whole objects, and writes zeros into parts of them; `discard` would leave those parts unchanged.
            self._image.write_zeroes(offset, length)

    def flush(self) -> None:
        with failing(f"{self._name} cannot be flushed"):
            self._image.flush()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                with failing(f"{self._name} cannot be closed"):
                    self._image.close()
            finally:
                self._pool.close()

    def _within(self, offset: int, length: int) -> None:
        if min(offset, length) < 0 or offset + length > self.size:
            raise DiskWriteFailed(f"{self._name}: {length} bytes at offset {offset} are beyond the disk's {self.size}")


class RbdReader:
    """Reads one image; parts without an object are zeros."""

    max_readers = THREADS

    def __init__(self, spec: RbdSpec) -> None:
        self._name = spec.image
        self._closed = False
        self._pool = RbdPool(spec.place)
        try:
            with failing(f"the image {spec.image} cannot be opened", DiskReadFailed):
                self._image = _rbd().Image(self._pool.ioctx, spec.image, read_only=True)
                self.size = int(self._image.size()) if spec.size_bytes is None else spec.size_bytes
        except BaseException:
            self._pool.close()
            raise

    def extents(self) -> Iterator[Extent]:
        for start in range(0, self.size, WINDOW_BYTES):
            end = min(start + WINDOW_BYTES, self.size)
            at = start
            for offset, length in self._there(start, end):
                if offset > at:
                    yield Extent(at, offset - at, zero=True)
                yield Extent(offset, length)
                at = offset + length
            if at < end:
                yield Extent(at, end - at, zero=True)

    def _there(self, start: int, end: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []

        def note(offset: int, length: int, there: bool) -> None:
            if there:
                found.append((offset, length))

        with failing(f"{self._name}: what lies between {start} and {end} cannot be asked", DiskReadFailed):
            self._image.diff_iterate(start, end - start, None, note)
        return sorted(found)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{self._name}: {len(buffer)} bytes at offset {offset} are beyond the disk's {self.size}")
        if buffer:
            with failing(f"{self._name}: {len(buffer)} bytes at offset {offset} cannot be read", DiskReadFailed):
                buffer[:] = self._image.read(offset, len(buffer))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                with failing(f"{self._name} cannot be closed", DiskReadFailed):
                    self._image.close()
            finally:
                self._pool.close()


def device_of(place: RbdPlace, image: str) -> str:
    """QEMU's name of an image (block/rbd.c): rbd:POOL/IMAGE:id=CLIENT:conf=PATH. A colon in the path would begin the next part,
    so it is `\\:`."""
    return f"rbd:{place.pool}/{image}:id={place.client}:conf={place.conf.replace(':', chr(92) + ':')}"


def spec_of(device: str) -> RbdSpec:
    """The reader of an image by its name as of `device_of`. ValueError: it is another name."""
    kind, image, client, conf = device.split(":", 3)
    if kind != "rbd" or not client.startswith("id=") or not conf.startswith("conf="):
        raise ValueError(f"{device!r} is not a name of an image in a Ceph pool")
    pool, _, name = image.partition("/")
    place = RbdPlace(conf=conf.removeprefix("conf=").replace("\\:", ":"), client=client.removeprefix("id="), pool=pool)
    return RbdSpec(place=place, image=name)


@contextlib.contextmanager
def failing(what: str, kind: type[SynvirtError] = DiskWriteFailed) -> Iterator[None]:
    """Translates errors of librados and librbd."""
    import rados
    import rbd

    try:
        yield
    except (rados.Error, rbd.Error) as error:
        number = abs(getattr(error, "errno", 0) or 0)
        reason = os.strerror(number) if number else str(error)
        raise kind(f"{what}: {reason}", hint=HINTS.get(number)) from error


def _cluster(place: RbdPlace) -> Any:
    import rados

    cluster = rados.Rados(conffile=place.conf, rados_id=place.client)
    try:
        for option in ("rados_osd_op_timeout", "rados_mon_op_timeout"):
            cluster.conf_set(option, str(REQUEST_TIMEOUT_S))
        cluster.conf_set("client_mount_timeout", str(CONNECT_TIMEOUT_S))
        # A copy writes each byte once, in large pieces: a client cache gains nothing, and hides errors until a flush.
        cluster.conf_set("rbd_cache", "false")
        # A snapshot of the second format needs no protection while it has clones, and is removed with the last of them.
        cluster.conf_set("rbd_default_clone_format", "2")
        cluster.connect()
    except BaseException:
        cluster.shutdown()
        raise
    return cluster


def _lock(image: Any, name: str) -> None:
    rbd = _rbd()
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            image.lock_acquire(rbd.RBD_LOCK_MODE_EXCLUSIVE)
        except (rbd.ReadOnlyImage, rbd.ImageBusy) as error:
            if time.monotonic() >= deadline:
                raise DiskWriteFailed(f"volume {name} is being written by somebody else", hint=HINTS[errno.EROFS]) from error
            time.sleep(LOCK_LOOK_S)
        else:
            return


def _rbd() -> Any:
    import rbd

    return rbd
