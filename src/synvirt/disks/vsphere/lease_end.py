"""A process that ends the export leases of a service that was killed (live/vsphere/lease_guard.py).

    stdin   one line: the platform, and the session that the lease belongs to; then one line per lease; then «over», or the end
            of the input without it: then the leases are aborted, and the session is logged out

`python -m synvirt.disks.vsphere.lease_end`. It runs during the copy of each disk, and mostly has nothing to do: it must be
small. One in `live` takes four times as long to start, as it loads every platform's adapter, and twice the memory. How to
connect is loaded only when there is a lease to end.
"""

import http.client
import json
import signal
import sys
from contextlib import suppress
from typing import Final
from xml.sax.saxutils import escape

from synvirt import outgoing
from synvirt.errors import SynvirtError

ANSWER_TIMEOUT_S: Final = 20.0
# An answer without a fault has a few hundred bytes. The rest of a longer one is not read.
ANSWER_BYTES_MAX: Final = 64 << 10
OVER: Final = "over"
_ENVELOPE: Final = (
    '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/">'
    '<soapenv:Body><{method} xmlns="urn:vim25"><_this type="{type}">{id}</_this></{method}></soapenv:Body></soapenv:Envelope>'
)


def main() -> None:
    """The guard as a process: the order and the leases come on stdin."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who stops the service stops all its processes, and this one has yet to act
    order = json.loads(sys.stdin.readline())
    outgoing.permit(order["permitted"])
    leases: list[str] = []
    for line in sys.stdin:
        if line.strip() == OVER:
            return
        leases.append(line.strip())
    from synvirt.transport import https, tls

    context = tls.context(order["host"], verify=order["verify"], fingerprint_sha256=order["fingerprint_sha256"])
    calls = [("HttpNfcLeaseAbort", "HttpNfcLease", lease) for lease in leases]
    for method, type_, id_ in [*calls, ("Logout", "SessionManager", order["session_manager"])]:
        connection = https.Connection(order["host"], order["port"], timeout=ANSWER_TIMEOUT_S, context=context)
        with suppress(OSError, http.client.HTTPException, SynvirtError):
            body = _ENVELOPE.format(method=method, type=type_, id=escape(id_)).encode()
            action = f"urn:vim25/{order['api_version']}"
            headers = {"Content-Type": "text/xml; charset=utf-8", "SOAPAction": action, "Cookie": order["cookie"]}
            connection.request("POST", "/sdk", body=body, headers=headers)
            connection.getresponse().read(ANSWER_BYTES_MAX)
        connection.close()


if __name__ == "__main__":
    main()
