"""A run as its own thread sees it: where it stands, what it warns of, how far its bytes are."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

from synvirt.backups.model import BackupProgress, BackupRun, Status, Trouble
from synvirt.copying import Copied
from synvirt.errors import Cancelled


class UnderWay:
    def __init__(
        self,
        run: BackupRun,
        stop: Callable[[], bool],
        save: Callable[[BackupRun], None],
        figures: dict[UUID, BackupProgress],
    ) -> None:
        self.run, self.stop = run, stop
        self._save, self._figures = save, figures

    def move(self, status: Status, **changes: Any) -> None:
        """Cancelled, where that is asked."""
        if self.stop():
            raise Cancelled
        progress = self._figures.get(self.run.id, self.run.progress)
        self.run = self.run.model_copy(update={"status": status, "progress": progress, **changes})
        self._save(self.run)

    def warn(self, code: str, message: str, vm_id: str) -> None:
        trouble = Trouble(code=code, message=message, vm_id=vm_id)
        self.run = self.run.model_copy(update={"warnings": (*self.run.warnings, trouble)})
        self._save(self.run)

    def figure(self, total: int, done: int) -> None:
        self._figures[self.run.id] = BackupProgress(bytes_total=max(total, done), bytes_done=done)


class Sum:
    """The figures of several copies, one after the other."""

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way
        self._each: list[Copied] = []

    def next_disk(self) -> Callable[[Copied], None]:
        number = len(self._each)
        self._each.append(Copied(0, 0, 0, 0))

        def progressed(copied: Copied) -> None:
            self._each[number] = copied
            self._under_way.figure(sum(one.bytes_total for one in self._each), sum(one.bytes_done for one in self._each))

        return progressed
