"""Is a guest that booted here healthy: a port, a page, a command by its agent. Blocking; each is asked once a call.

Where a guest listens its own agent says, and a URL is a caller's: both are connected to through the outgoing guard.
"""

import http.client
import ssl
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit
from uuid import UUID

from synvirt.errors import SynvirtError
from synvirt.fleet.model import Check
from synvirt.outgoing import Guard

ANSWER_TIMEOUT_S = 10.0


class Guests(Protocol):
    """See Hypervisor."""

    def addresses(self, uuid: UUID) -> list[str]: ...
    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int: ...


@dataclass(frozen=True, slots=True)
class Checker:
    guests: Guests
    guard: Guard = field(default_factory=Guard)

    def trouble(self, check: Check, uuid: UUID) -> str | None:
        """What is not as it should be, as the end of a sentence; None: it passed."""
        try:
            match check.kind:
                case "port":
                    return self._port(check.port or 0, uuid)
                case "http":
                    return self._page(check.url or "")
                case "command":
                    code = self.guests.run_in_guest(uuid, check.argv, ANSWER_TIMEOUT_S)
                    return None if code == 0 else f"{check.argv[0]} ended with {code}"
        except SynvirtError as error:
            return f"its {check.kind} check found: {error.detail}"

    def _port(self, port: int, uuid: UUID) -> str | None:
        addresses = self.guests.addresses(uuid)
        trouble = "its agent tells no address of it"
        for address in addresses:
            try:
                self.guard.connect(address, port, timeout_s=ANSWER_TIMEOUT_S).close()
            except SynvirtError as error:
                trouble = f"port {port} does not answer: {error.detail}"
            else:
                return None
        return trouble

    def _page(self, url: str) -> str | None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            return f"{url} is no URL: {error}"
        asked = http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
        asked.auto_open = 0  # it would connect by itself, past the guard
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            asked.sock = self.guard.connect(host, port, timeout_s=ANSWER_TIMEOUT_S)
            if parts.scheme == "https":
                asked.sock = ssl.create_default_context().wrap_socket(asked.sock, server_hostname=host)
            asked.request("GET", path, headers={"User-Agent": "synvirt"})
            status = asked.getresponse().status
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{url} does not answer: {error}"
        finally:
            asked.close()
        return None if 200 <= status < 400 else f"{url} answers {status}"
