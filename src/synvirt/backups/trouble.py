"""What a failure means for a run: the words and the code that it shows, and whether the work is tried again.

A restore that has started its guest at once never fails (`until_it_goes_well`): what the guest wrote is nowhere else. Every run
waits while its destination or this host's libvirtd is away (`while_something_is_away`).
"""

import contextlib
import time
from collections.abc import Callable

import structlog

from synvirt import errors
from synvirt.backups.model import Trouble
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import wait
from synvirt.destinations import AWAY_PAUSES_S, DestinationAway
from synvirt.errors import Cancelled, HypervisorAway, PersistFailed, SynvirtError
from synvirt.jobs.instant import AGAIN_S, is_started
from synvirt.jobs.shortage import lack_of
from synvirt.repeating import pause_after

# How long a run waits for what is away: a restore for its destination, every run for this host's libvirtd, which an update
# restarts in seconds.
AWAY_S = 86_400.0

_log = structlog.get_logger("synvirt.backups")

# The codes of backups begin with E_BAK_: errors of rooms that serve both sides get that name here.
_OF_BACKUPS: dict[type[SynvirtError], type[SynvirtError]] = {
    errors.Cancelled: errors.BackupCancelled,
    errors.DiskReadFailed: errors.SourceReadFailed,
    errors.DiskWriteFailed: errors.BackupDiskWriteFailed,
}


def trouble_of(error: Exception) -> Trouble:
    """What a run shows of its failure. An error that is not ours is logged whole, and shown as an internal one."""
    if not isinstance(error, SynvirtError):
        _log.error("a backup run broke", exc_info=error)
        if (lack := lack_of(error)) is not None:
            what, hint = lack
            error = errors.BackupInternal(f"the run cannot go on: {what}", hint=hint)
        else:
            error = errors.BackupInternal("something unexpected went wrong in the run; the service's log has it")
    # The nearest class that has another name here; an error of backups keeps its name.
    ours = next((_OF_BACKUPS[kind] for kind in type(error).__mro__ if kind in _OF_BACKUPS), errors.BackupInternal)
    code = error.code if error.code.startswith("E_BAK_") else ours.code
    return Trouble(code=code, message=error.detail, hint=error.hint)


def until_it_goes_well(under_way: UnderWay, work: Callable[[], None]) -> None:
    """Does the work. Before the run has started a guest, a failure is raised. After that no failure ends the run: it is
    reported, and the work is tried again, until it succeeds or an operator cancels, which loses what the guest wrote."""
    tries = 0
    while True:
        try:
            return work()
        except Exception as error:
            if not is_started(under_way.run.instant):
                raise
            if under_way.stop():
                raise Cancelled from error
            pause_s = pause_after(tries, AGAIN_S)
            tries += 1
            trouble = trouble_of(error)
            _log.warning("the guest runs on; it is tried again", cause=trouble.message, again_s=pause_s)
            with contextlib.suppress(PersistFailed):
                _say(under_way, trouble)
        wait(pause_s, under_way.stop)


def while_something_is_away(under_way: UnderWay, work: Callable[[], None]) -> None:
    """Does the work, again while its destination or this host's libvirtd is away, for AWAY_S at most. Each try continues the
    run, as after a restart of the service. A run that has started a guest is not waited for here: it never fails."""
    until, tries = None, 0
    while True:
        try:
            return work()
        except (DestinationAway, HypervisorAway) as error:
            until = until or time.monotonic() + AWAY_S
            if is_started(under_way.run.instant) or time.monotonic() >= until:
                raise
            trouble, pause_s = trouble_of(error), pause_after(tries, AWAY_PAUSES_S)
            tries += 1
            _log.warning("what the run needs is away", cause=trouble.message, again_s=pause_s)
            _show(under_way, trouble, "It is tried again")
        wait(pause_s, under_way.stop)
        under_way.note(error=None)


def _say(under_way: UnderWay, trouble: Trouble) -> None:
    hint = trouble.hint or "cancel the run to give up: what the guest wrote is lost then"
    _show(under_way, trouble.model_copy(update={"hint": hint}), "The guest is kept, and it is tried again")


def _show(under_way: UnderWay, trouble: Trouble, meanwhile: str) -> None:
    error = trouble.model_copy(update={"message": f"{trouble.message.rstrip('.')}. {meanwhile}"})
    if under_way.run.error != error:
        under_way.note(error=error)
