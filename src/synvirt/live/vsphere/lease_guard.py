"""A separate process aborts an export lease when the service is killed: a lease that was not ended blocks the next one for five
minutes, and locks the VM's files meanwhile.

    stdin   one line: the platform, and the session that the lease belongs to; then one line per lease; then «over», or the end
            of the input without it: then the leases are aborted, and the session is logged out

`python -m synvirt.live.vsphere.lease_guard`. It does not use pyvmomi, as it runs during a disk's copy and must be small.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final
from xml.sax.saxutils import escape

from synvirt import outgoing
from synvirt.errors import SynvirtError
from synvirt.live.vsphere.session import VimSession
from synvirt.transport import https, tls

ANSWER_TIMEOUT_S: Final = 20.0
LEAVE_TIMEOUT_S: Final = 5.0
_OVER: Final = "over"
_ENVELOPE: Final = (
    '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/">'
    '<soapenv:Body><{method} xmlns="urn:vim25"><_this type="{type}">{id}</_this></{method}></soapenv:Body></soapenv:Envelope>'
)


class LeaseGuard:
    """Runs from now until `leave`."""

    def __init__(self, session: VimSession) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
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
        self._write(_OVER)
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


def main() -> None:
    """The guard as a process: the order and the leases come on stdin."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who stops the service stops all its processes, and this one has yet to act
    order = json.loads(sys.stdin.readline())
    outgoing.permit(order["permitted"])
    leases: list[str] = []
    for line in sys.stdin:
        if line.strip() == _OVER:
            return
        leases.append(line.strip())
    context = tls.context(order["host"], verify=order["verify"], fingerprint_sha256=order["fingerprint_sha256"])
    calls = [("HttpNfcLeaseAbort", "HttpNfcLease", lease) for lease in leases]
    for method, type_, id_ in [*calls, ("Logout", "SessionManager", order["session_manager"])]:
        connection = https.Connection(order["host"], order["port"], timeout=ANSWER_TIMEOUT_S, context=context)
        with suppress(OSError, http.client.HTTPException, SynvirtError):
            body = _ENVELOPE.format(method=method, type=type_, id=escape(id_)).encode()
            action = f"urn:vim25/{order['api_version']}"
            headers = {"Content-Type": "text/xml; charset=utf-8", "SOAPAction": action, "Cookie": order["cookie"]}
            connection.request("POST", "/sdk", body=body, headers=headers)
            connection.getresponse().read()
        connection.close()


if __name__ == "__main__":
    main()
