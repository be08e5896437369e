"""libvirt's Python binding, quiet, and with its event loop running: for this host's hypervisor and for other hosts alike.

libvirt has one event loop per process. It must run before the first connection: keep-alive and streams need it.
"""

import contextlib
import os
import re
import threading
from typing import Any

from synvirt.errors import SynvirtError

# Locks that libvirt (9.0) may hold without end, as a libvirtd before was killed in the middle of a call, by its words.
TAKEN_UP_HINT = (
    "its libvirtd ended in the middle of an operation on this domain, and the new one may hold the lock without end: if that "
    "lasts for minutes, shut the guest down on its host, restart libvirtd, and start the guest"
)
UNBORN_HINT = (
    "its libvirtd may have ended as it started this domain, and the new one waits for a guest that was never there: if that "
    "lasts for minutes, stop libvirtd on its host, remove the domain's file in /run/libvirt/qemu, and start libvirtd"
)
_ENDLESS = {
    # A backup that began: noted is the job, and not the rest of it. init-NAME is the thread that takes a domain up.
    re.compile(r"held by monitor=init-"): TAKEN_UP_HINT,
    # A guest that was started: noted is no process, and nobody holds the lock by name.
    re.compile(r"cannot acquire state change lock$"): UNBORN_HINT,
}

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


def endless_lock_hint(message: str) -> str | None:
    """For an error of that text: what to do about a lock that may be held without end; None, where it is another error."""
    return next((hint for said, hint in _ENDLESS.items() if said.search(message)), None)


def _run_for_ever(libvirt: Any) -> None:
    while True:
        with contextlib.suppress(libvirt.libvirtError):
            libvirt.virEventRunDefaultImpl()
