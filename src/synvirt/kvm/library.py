"""libvirt's Python binding, quiet, and with its event loop running: for this host's hypervisor and for other hosts alike.

libvirt has one event loop per process. It must run before the first connection: keep-alive and streams need it.
"""

import contextlib
import os
import threading
from typing import Any

from synvirt.errors import SynvirtError

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


def _run_for_ever(libvirt: Any) -> None:
    while True:
        with contextlib.suppress(libvirt.libvirtError):
            libvirt.virEventRunDefaultImpl()
