"""What the system refuses where this host or the service has no more of it: processes, threads, descriptors, memory, room on a
disk.

It says nothing of what was being done. All but the last may be over in a moment.
"""

import errno

from synvirt.errors import Internal, SynvirtError

HINT = (
    "this host or the service has too many processes or open files, or too little memory: TasksMax, LimitNOFILE and MemoryMax "
    "of its unit"
)
FULL_HINT = "free some space, and look at the quota and at how it is mounted: of data_dir, and of where this was to be written"
_REFUSALS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# Also what a file system says that an error has made read-only.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# What Python says where pthread_create(3) fails; it has no error of its own.
_NO_THREAD = "can't start new thread"
# Deeper than any error of ours has a cause.
_CAUSES_MAX = 8


def lack_of(error: BaseException) -> tuple[str, str] | None:
    """What was refused, and a hint; also the room on a disk. None, where it is another error."""
    if (what := shortage_of(error)) is not None:
        return what, HINT
    if isinstance(error, OSError) and error.errno in _FULL:
        return str(error.strerror), FULL_HINT
    return None


def shortage_of(error: BaseException) -> str | None:
    """What was refused: «Too many open files». None, where it is another error; so is one of ours that has a name for it."""
    found: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if isinstance(found, OSError) and found.errno in _REFUSALS:
            return found.strerror
        if isinstance(found, RuntimeError) and str(found) == _NO_THREAD:
            return _NO_THREAD
        if found is None or (isinstance(found, SynvirtError) and type(found) is not Internal):
            return None
        found = found.__cause__
    return None


def unforeseen(error: Exception, where: str) -> Internal:
    """What a job shows of an error that is not ours. The log has all of it. `where`: the job's state."""
    why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    why, hint = lack_of(error) or (why, "the service's log has the cause")
    return Internal(f"{why} in {where}", hint=hint)
