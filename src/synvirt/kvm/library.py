"""libvirt's Python binding, quiet, and with its event loop running: for this host's hypervisor and for other hosts alike.

libvirt has one event loop a process, which must be there before the first connection: keep-alive and streams need it.
"""

import contextlib
import os
import threading
from typing import Any

from synvirt.errors import SynvirtError

_lock = threading.Lock()
_loop: threading.Thread | None = None


def load(missing: type[SynvirtError]) -> Any:
    """The module; `missing`, where it is not installed. Its event loop is a thread of this process, started once."""
    global _loop  # noqa: PLW0603 - libvirt has one event loop a process
    with _lock:
        try:
            libvirt = module()
        except ImportError as error:
            raise missing("libvirt's Python binding is missing", hint="apt-get install python3-libvirt") from error
        if _loop is None:
            libvirt.registerErrorHandler(lambda _context, _error: None, None)  # it would print what we raise
            libvirt.virEventRegisterDefaultImpl()
            _loop = threading.Thread(target=_run_for_ever, args=(libvirt,), name="libvirt-events", daemon=True)
            _loop.start()
        return libvirt


def module() -> Any:
    """The module alone, for a caller that only asks it something: no event loop, no handler. ImportError. A process
    loads it by this alone, for libvirt reads where its log goes once, when it is loaded."""
    # Its warnings (that we run as root, that we confine nothing) are no news to anybody, and its errors are raised: without
    # this it writes both to our stderr. Who hunts a fault sets a file here.
    os.environ.setdefault("LIBVIRT_LOG_OUTPUTS", "4:file:/dev/null")
    import libvirt

    return libvirt


def _run_for_ever(libvirt: Any) -> None:
    while True:
        with contextlib.suppress(libvirt.libvirtError):
            libvirt.virEventRunDefaultImpl()
