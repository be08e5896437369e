"""A separate process aborts an export lease when the service is killed: a lease that was not ended blocks the next one for five
minutes, and locks the VM's files meanwhile.

The process is disks/vsphere/lease_end.py, which describes its input.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Final

from synvirt import outgoing
from synvirt.disks.vsphere import lease_end
from synvirt.live.vsphere.session import VimSession

LEAVE_TIMEOUT_S: Final = 5.0


class LeaseGuard:
    """Runs from now until `leave`."""

    def __init__(self, session: VimSession) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", lease_end.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env={key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH") if key in os.environ},
            start_new_session=True,
        )
        order = {
            "permitted": outgoing.permitted(),
            "host": session.host,
            "port": session.port,
            "verify": session.options.verify_tls,
            "fingerprint_sha256": session.options.fingerprint_sha256,
            "cookie": session.cookie,
            "session_manager": session.session_manager,
            "api_version": session.api_version,
        }
        self._write(json.dumps(order))

    def watch(self, lease_id: str) -> None:
        self._write(lease_id)

    def leave(self) -> None:
        """All leases have ended, and the service goes on. Idempotent."""
        self._write(lease_end.OVER)
        with suppress(OSError, ValueError):
            if self._child.stdin is not None:
                self._child.stdin.close()
        try:
            self._child.wait(LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # the guard is gone: a lease that is left then expires
            if self._child.stdin is not None:
                self._child.stdin.write(line + "\n")
                self._child.stdin.flush()
