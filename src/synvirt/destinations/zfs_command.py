"""Runs the program zfs: arguments in, columns of `-Hp` out; a refusal becomes an error with its reason.

zfs(8) has one exit code for every refusal, so the reason is read from its message. The messages are those of OpenZFS'
lib/libzfs/libzfs_util.c (libzfs_error_description, zfs_common_error), the same since 0.6; LC_ALL keeps them untranslated.
"""

import time
from collections.abc import Callable
from typing import Literal

from synvirt.destinations import DestinationAway
from synvirt.errors import DiskWriteFailed
from synvirt.programs import ENDED_HINT, ProgramFailed, run

Reason = Literal["missing", "no pool", "exists", "no space", "busy", "permission", "in use", "newer", "away", "other"]

# A pool under heavy load answers in seconds. A pool that does not answer in two minutes has lost its disks.
TIMEOUT_S = 120
# udev, blkid and a worker that was just ended hold a volume for moments after its last use.
BUSY_PAUSES_S = (0.1, 0.2, 0.5, 1, 2, 4, 8)

# (message, reason, hint). The first match counts.
REFUSALS: tuple[tuple[str, Reason, str | None], ...] = (
    ("no such pool", "no pool", "`zpool list` shows the pools of this host; the setting zfs_pool names one"),
    ("does not exist", "missing", None),
    ("could not find any snapshots", "missing", None),
    ("already exists", "exists", None),
    ("out of space", "no space", "free space in the pool: `zfs list -o space` says what takes it"),
    ("quota exceeded", "no space", "raise the quota: `zfs get quota` shows it"),
    ("is busy", "busy", "a program has the volume open, or it is being sent or received: `fuser -v` on its device names it"),
    ("ermission denied", "permission", "`synvirt doctor` says which `zfs allow` the service's user lacks"),
    ("has children", "in use", "it has snapshots or volumes that SynVirt did not make: `zfs list -rt all` shows them"),
    ("dependent clones", "in use", "somebody cloned it: `zfs promote` the clone, or destroy it"),
    ("more recent snapshots", "newer", "`zfs rollback -r` destroys those, too"),
    ("currently suspended", "away", "the pool has lost its disks: `zpool status`, then `zpool clear`"),
    ("modules are not loaded", "away", "`modprobe zfs`; `synvirt doctor` says which package has it"),
    ("/dev/zfs", "away", "`modprobe zfs`; `synvirt doctor` says which package has it"),
)


class ZfsRefused(DiskWriteFailed):
    """zfs refused a command."""

    def __init__(self, detail: str, reason: Reason, hint: str | None) -> None:
        self.reason = reason
        super().__init__(detail, hint=hint)


class Zfs:
    """`program`: its name or path."""

    def __init__(self, program: str = "zfs", sleep: Callable[[float], None] = time.sleep) -> None:
        self.program, self._sleep = program, sleep

    def __call__(self, *arguments: str) -> str:
        """Its standard output. DestinationAway, where its pool is suspended or does not answer, or zfs is not loaded: all that
        is in it comes back. Else ZfsRefused; where a dataset is busy, it is first tried again for a while."""
        for pause in (*BUSY_PAUSES_S, None):
            try:
                return run([self.program, *arguments], timeout_s=TIMEOUT_S, missing=DiskWriteFailed).stdout
            except ProgramFailed as failed:
                refused = _refused(failed)
                if refused.reason == "away":
                    raise DestinationAway(refused.detail, hint=refused.hint) from failed
                if refused.reason != "busy" or pause is None:
                    raise refused from failed
                self._sleep(pause)
        raise RuntimeError("the last pause is None")

    def properties(self, dataset: str, *names: str) -> dict[str, str]:
        """The properties that the dataset itself has, or that zfs computes. Inherited ones are left out, as a mark on a parent
        is no mark on the child. ZfsRefused `missing`."""
        lines = self("get", "-Hp", "-o", "property,value,source", ",".join(names), dataset).splitlines()
        rows = [line.split("\t") for line in lines]
        return {row[0]: row[1] for row in rows if len(row) == 3 and row[2] in ("local", "received", "-") and row[1] != "-"}

    def names(self, *arguments: str) -> list[str]:
        """Names of datasets: `zfs list` of these arguments."""
        return self("list", "-Hp", "-o", "name", *arguments).split("\n")[:-1]


def _refused(failed: ProgramFailed) -> ZfsRefused:
    # The first line is the error; advice to use -r and the whole usage follow.
    message = next(iter(failed.stderr.splitlines()), "")
    if failed.returncode is None:
        return ZfsRefused(f"zfs did not answer in {TIMEOUT_S} s", "away", "`zpool status` shows the state of the pool")
    if failed.from_outside:
        return ZfsRefused(f"zfs {failed.cut_off}", "other", ENDED_HINT)
    for words, reason, hint in REFUSALS:
        if words in message:
            return ZfsRefused(f"zfs: {message}", reason, hint)
    return ZfsRefused(f"zfs: {message or f'it ended with {failed.returncode} and printed no message'}", "other", None)
