"""The recovery points that are being made, in files of the service. Blocking code.

Prism lists a recovery point only once it is made, which may take minutes. A cleanup before that would find nothing to remove,
and the recovery point would stay until it expires. So the task that makes it is noted, and is looked at first.
"""

from pathlib import Path

from synvirt.durable import put_private_file


class Making:
    """`folder` is the service's own; it may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, name: str, task_id: str) -> None:
        """Notes the task that makes the recovery point of that name. Durable on return."""
        self._folder.mkdir(parents=True, exist_ok=True)
        put_private_file(self._path(name), task_id.encode())

    def task_of(self, name: str) -> str | None:
        """The id of the noted task; None: nothing of that name is being made."""
        try:
            return self._path(name).read_text()
        except FileNotFoundError:
            return None

    def forget(self, name: str) -> None:
        """Call it once the recovery point is made, or can no longer come to be."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        safe = "".join(char if char.isalnum() or char == "-" else "_" for char in name)[:100]
        return self._folder / f"making-{safe}"
