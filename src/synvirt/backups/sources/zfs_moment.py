"""Volumes of a zfs pool at one moment, and their changes since an earlier one.

    snapshot  vol@name         all of them at once: zfs makes the snapshots of one command in one transaction
    clone     {parent}/name-N  a device to read the snapshot by; `snapdev` would change the volume itself
    bookmark  vol#name         stays when the run is over: it takes no room, and `zfs send -i` counts from it

The snapshot itself would keep every block that the guest overwrites until the next run. Data is read by the clone's device: the
stream gives only a list of areas. Our things have the property synvirt:made, and nothing else is destroyed.
"""

from synvirt.backups.orders import ZfsChangesSpec
from synvirt.backups.sources.made import Made
from synvirt.backups.sources.zfs_stream import guids_of
from synvirt.destinations.zfs_command import Zfs, ZfsRefused
from synvirt.destinations.zfs_links import Links

PROPERTY = "synvirt:made"


class Moment:
    """`made` is in the ledger already."""

    def __init__(self, made: Made, *, zfs: Zfs | None = None, links: Links | None = None) -> None:
        self._made, self._zfs, self._links = made, zfs or Zfs(), links or Links()

    @property
    def name(self) -> str:
        return self._made.name

    def take(self) -> None:
        """Runs while the guest is frozen, so it does as little as possible. ZfsRefused."""
        names = [f"{volume}@{self._made.name}" for volume in self._made.volumes]
        self._zfs("snapshot", "-o", f"{PROPERTY}={self._made.id}", *names)

    def device(self, volume: str) -> str:
        """The device with the volume's bytes of that moment. ZfsRefused, DiskWriteFailed."""
        clone = self._clone(volume)
        options = {"volmode": "dev", "readonly": "on", "com.sun:auto-snapshot": "false", PROPERTY: str(self._made.id)}
        arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        self._zfs("clone", *arguments, f"{volume}@{self._made.name}", clone)
        return self._links.device(clone)

    def mark(self, volume: str) -> str:
        """A bookmark of that moment, and the guid of its snapshot."""
        snapshot = f"{volume}@{self._made.name}"
        self._zfs("bookmark", snapshot, f"{volume}#{self._made.name}")
        (guid,) = guids_of(self._zfs, snapshot)
        return guid

    def changed(self, volume: str, mark: str, guid: str, size: int) -> ZfsChangesSpec:
        """The changes since that bookmark of the volume."""
        since, until = f"{volume}#{mark}", f"{volume}@{self._made.name}"
        return ZfsChangesSpec(program=self._zfs.program, since=since, guid=guid, until=until, size_bytes=size)

    def end(self) -> None:
        """Removes clones and snapshots; idempotent. ZfsRefused, if their pool is away: they may still exist there."""
        volumes = self._made.volumes
        names = [name for volume in volumes for name in (self._clone(volume), f"{volume}@{self._made.name}")]
        ours = self._ours(names)
        if ours is None:
            self._refuse_no_pool()
            ours = [found for name in names for found in self._ours([name]) or ()]
        for name in ours:
            self._zfs("destroy", name)

    def forget(self) -> None:
        """Removes the bookmarks too. Those of a volume that is gone are gone with it. ZfsRefused as above."""
        if self._made.state != "lasting":  # else they are all there is
            self.end()
        for volume in self._made.volumes:
            try:
                self._zfs("destroy", f"{volume}#{self._made.name}")
            except ZfsRefused as refused:
                if refused.reason != "missing":
                    raise
                self._refuse_no_pool()

    def _refuse_no_pool(self) -> None:
        """zfs calls a dataset of a pool that is away one that does not exist."""
        self._zfs.names("-d", "0", *sorted({volume.partition("/")[0] for volume in self._made.volumes}))

    def _clone(self, volume: str) -> str:
        """A clone next to the volume, where its encryption is the same."""
        return f"{volume.rpartition('/')[0]}/{self._made.name}-{self._made.volumes.index(volume)}"

    def _ours(self, names: list[str]) -> list[str] | None:
        """Those that have our property, in this order. None, where one of them is missing: zfs then refuses all."""
        try:
            lines = self._zfs("get", "-Hp", "-o", "name,value,source", PROPERTY, *names).splitlines()
        except ZfsRefused as refused:
            if refused.reason != "missing":
                raise
            return None
        rows = [line.split("\t") for line in lines]
        ours = {name for name, value, source in rows if value == str(self._made.id) and source in ("local", "received")}
        return [name for name in names if name in ours]
