"""How the C library keeps what the service's threads free."""

import ctypes

# <malloc.h>
_M_ARENA_MAX = -8
# It has one for each thread, up to eight for each core, and gives back only what is free at an arena's end. The interpreter's
# lock lets one thread allocate at a time, so more than two are of no use.
ARENAS = 2


def keep_few_arenas() -> None:
    """For this process and what it forks. Call it before threads begin: an arena that is there stays. A C library without
    `mallopt` does as it likes."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, ARENAS)
