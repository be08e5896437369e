"""What holds for every kind of job (tests/kinds/laws.py), of a backup of zfs volumes: on real zfs, which a fake cannot promise.

Each moment takes seconds, so each twelfth of a run's moments is tried. What a kill leaves in the middle of reading:
zfs_backups.py.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest

from synvirt.backups.service import Backups
from synvirt.backups.sources.guest import Sources
from synvirt.backups.sources.made import MadeRows
from synvirt.backups.sources.zfs import OfZfs
from synvirt.backups.sources.zfs_moment import Moment
from tests.fakes.backups import backups_of
from tests.guest.zfs_backups import MIB, RUN_TIMEOUT_S, SIZE, Connection, Domain, beside, volume, without_libvirt, write
from tests.guest.zvols import zfs
from tests.kinds.laws import LAWS, Kind, Place, cases, holds
from tests.kinds.runs import HOST, BackupAgain

DATA = Random(41).randbytes(MIB)


class OfZvols(BackupAgain):
    """The mark is a bookmark. A copy of it, which zfs makes with the same guid, is what each moment's run counts from."""

    way = "zfs"
    within_s = RUN_TIMEOUT_S
    content = DATA + bytes(SIZE - len(DATA))

    def __init__(self, place: Place) -> None:
        without_libvirt()
        if "domain" not in place.outside:
            place.outside["domain"] = Domain(volume())
        self.domain: Domain = place.outside["domain"]
        self.volume = self.domain.volumes[0]
        if "prepared" in place.outside:
            self.as_prepared(place.outside.pop("prepared"))
        super().__init__(place)

    def service(self) -> Backups:
        connection: Any = Connection(self.domain)
        ledger = MadeRows(self.store.backups.ledger, host=HOST)
        way = OfZfs("qemu:///system", ledger, tpm_folder=lambda: self.place.folder)
        self.sources = Sources(connection, ledger, (way,))
        self.sources.start()
        return backups_of(self.store, self.sources, self.place.folder)

    def prepare(self) -> None:
        write(self.volume, 0, DATA)
        self.first_run("guest")
        # The same bytes, in blocks that zfs calls changed.
        write(self.volume, 0, DATA[: MIB // 2])
        (mark,) = self.marks()
        zfs("bookmark", mark, f"{self.volume}#kept")
        self.place.outside["prepared"] = mark

    def as_prepared(self, mark: str) -> None:
        """The runs of other moments have changed nothing of the volume but its mark."""
        for other in self.marks():
            zfs("destroy", other)
        zfs("bookmark", f"{self.volume}#kept", mark)

    def steps(self) -> Sequence[tuple[object, str]]:
        return [(Moment, "take"), (Moment, "device"), (Moment, "mark"), (Moment, "end")]

    def marks(self) -> list[str]:
        return self.ours("bookmark")

    def left(self, job_id: UUID | None) -> list[str]:
        return super().left(job_id) + self.ours("volume,snapshot")

    def ours(self, kinds: str) -> list[str]:
        return [name for name in beside(self.domain.volumes, kinds) if "synvirt-" in name]


KIND = Kind("backup", "of zfs volumes", OfZvols, parts=12, taken=(0,), surely=10, late=20, once=True)


@pytest.mark.parametrize(("kind", "law", "part"), cases((KIND,), real=False))
def test_law(kind: Kind, law: str, part: int, tmp_path: Path) -> None:
    holds(LAWS[law], kind, part, lambda name: Place(tmp_path / name))
