"""What is being made for the snapshots of VMs (recovery points, volume groups, images), in files of the service. Blocking code.

Prism lists a thing only once it is made, which may take minutes, and hours for an image. A cleanup before that would find
nothing to remove: a recovery point would stay until it expires, all others for good. So the task that makes it is noted, and is
looked at first. Before its request is sent, the request is noted with its id: sent again, it makes no second thing, and its
answer names the task that a killed service has not heard of.

And which Prism each snapshot is on: when the snapshot is to be removed, the source may name that one no more, or it may not
answer as a Prism. Nothing would be found there, and it would stay.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from synvirt.durable import put_private_file
from synvirt.errors import SourceUnreachable
from synvirt.live.nutanix.prism import Refused, pauses, text

# How long a cleanup waits for what is still being made. Its caller tries again later.
MAKING_S: Final = 30.0
# v3 says ABORTED, v4 CANCELED.
_ENDED: Final = frozenset({"SUCCEEDED", "FAILED", "ABORTED", "CANCELED"})

# `points`: the part of Prism Central that has recovery points and volume groups.
Which = Literal["central", "element", "points"]


class Making:
    """`folder` is the service's own; it may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, name: str, task_id: str) -> None:
        """Notes the task that makes something for the snapshot of that name. Durable on return."""
        self._write(name, task_id)

    def note_request(self, name: str, request: Mapping[str, Any]) -> None:
        """Notes a request that makes something, before it is sent. Durable on return."""
        self._write(name, json.dumps(request))

    def await_end(self, name: str, host: str, task_of: Callable[[str], Any], sent_again: Callable[[Any], str]) -> None:
        """Waits until the noted task has ended in any way, if there is one; `task_of` asks for it. Of a request without a task,
        the task comes from `sent_again`; empty, where it makes nothing. SourceUnreachable, where it goes on."""

        def is_over() -> bool:
            try:
                return text(task_of(task_id), "status").upper() in _ENDED
            except Refused:  # Prism forgets old ones; or it is one of another Prism, by which the source was read then
                return True

        try:
            task_id = self._path(name).read_text()
        except FileNotFoundError:
            return
        if task_id.startswith("{"):
            task_id = sent_again(json.loads(task_id))
            if not task_id:
                return
            self.note(name, task_id)
        if not any(is_over() for _ in pauses(MAKING_S)):
            raise SourceUnreachable(f"{host} is still making a part of {name}", hint="it is removed once it is made")

    def forget(self, name: str) -> None:
        """Call it once the thing is made, or can no longer come to be."""
        self._path(name).unlink(missing_ok=True)

    def note_on(self, name: str, which: Which) -> None:
        """Notes that the snapshot of that name is, or will be, there. Durable on return."""
        self._folder.mkdir(parents=True, exist_ok=True)
        put_private_file(self._path(name, f"on-{which}"), b"")

    def is_on(self, name: str, which: Which) -> bool:
        """Whether a part of the snapshot of that name may be there, by the notes."""
        return self._path(name, f"on-{which}").exists()

    def forget_on(self, name: str, which: Which) -> None:
        """Call it once nothing of the snapshot of that name is there."""
        self._path(name, f"on-{which}").unlink(missing_ok=True)

    def _write(self, name: str, content: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        put_private_file(self._path(name), content.encode())

    def _path(self, name: str, what: str = "making") -> Path:
        safe = "".join(char if char.isalnum() or char == "-" else "_" for char in name)[:100]
        return self._folder / f"{what}-{safe}"


class Noted:
    """Notes for the snapshot of one name what is made for it."""

    def __init__(self, making: Making, name: str) -> None:
        self._making, self._name = making, name

    def request(self, request: Mapping[str, Any]) -> None:
        """Call it before the request is sent."""
        self._making.note_request(self._name, request)

    def nothing(self) -> None:
        """Call it where the request is refused."""
        self._making.forget(self._name)

    def task(self, task_id: str) -> None:
        """Call it before the wait for the task."""
        self._making.note(self._name, task_id)
