"""What the system refuses where this host or the service has no more of it: processes, threads, descriptors, memory.

It says nothing of what was being done, and may be over in a moment.
"""

import errno

from synvirt.errors import Internal, SynvirtError

HINT = (
    "this host or the service has too many processes or open files, or too little memory: TasksMax, LimitNOFILE and MemoryMax "
    "of its unit"
)
_REFUSALS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# What Python says where pthread_create(3) fails; it has no error of its own.
_NO_THREAD = "can't start new thread"
# Deeper than any error of ours has a cause.
_CAUSES_MAX = 8


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
