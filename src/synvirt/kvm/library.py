"""libvirt's Python binding, quiet, and with its event loop running: for this host's hypervisor and for other hosts alike.

libvirt has one event loop per process. It must run before the first connection: keep-alive and streams need it.
"""

import contextlib
import os
import re
import threading
from typing import Any

from synvirt.errors import SynvirtError

# libvirt's name for the thread in which a new libvirtd takes up a domain. One that ended as it began a backup has noted the
# job, and not the rest of it (9.0): the next one holds the lock for that job, and neither goes on with it nor ends it.
_TAKEN_UP = re.compile(r"held by monitor=init-")
TAKEN_UP_HINT = (
    "its libvirtd ended in the middle of an operation on this domain, and the new one may hold the lock without end: if that "
    "lasts for minutes, shut the guest down on its host, restart libvirtd, and start the guest"
)

_lock = threading.Lock()
_loop: threading.Thread | None = None


def load(missing: type[SynvirtError]) -> Any:
    """The module; `missing`, where it is not installed. Its event loop is a thread of this process that is started once."""
    global _loop  # noqa: PLW0603 - libvirt has one event loop per process
    with _lock:
        try:
            libvirt = module()
        except ImportError as error:
            raise missing("libvirt's Python binding is missing", hint="apt-get install python3-libvirt") from error
        if _loop is None:
            libvirt.registerErrorHandler(lambda _context, _error: None, None)  # else it would print what we raise
            libvirt.virEventRegisterDefaultImpl()
            _loop = threading.Thread(target=_run_for_ever, args=(libvirt,), name="libvirt-events", daemon=True)
            _loop.start()
        return libvirt


def module() -> Any:
    """Only the module, without event loop and handler. ImportError. A process loads it only by this, as libvirt reads just
    once, at loading, where its log goes."""
    # Its warnings (that we run as root, that we confine nothing) are not news, and its errors are raised. Without this it
    # writes both to our stderr. To look for a fault, set a file here.
    os.environ.setdefault("LIBVIRT_LOG_OUTPUTS", "4:file:/dev/null")
    import libvirt

    return libvirt


def is_lost(error: Any) -> bool:
    """Whether the connection was lost during the call: the libvirtError is of libvirt's own transport, for example «End of file
    while reading data». What was asked may have been done."""
    return bool(error.get_error_domain() == module().VIR_FROM_RPC)


def taken_up_hint(message: str) -> str | None:
    """For an error of that text: what to do about a lock that may be held without end; None, where it is another error."""
    return TAKEN_UP_HINT if _TAKEN_UP.search(message) else None


def _run_for_ever(libvirt: Any) -> None:
    while True:
        with contextlib.suppress(libvirt.libvirtError):
            libvirt.virEventRunDefaultImpl()
