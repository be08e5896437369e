"""Checks whether a guest that booted here is healthy: a port, a page, a command by its agent. Blocking; each check runs once a
call.

The guest's agent reports its addresses, and a URL comes from the caller: connections to both go through the outgoing guard.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from uuid import UUID

import structlog

from synvirt import __version__
from synvirt.errors import HypervisorAway, SynvirtError
from synvirt.model.checks import Check
from synvirt.outgoing import Guard
from synvirt.transport.asking import status_of

log = structlog.get_logger(__name__)

ANSWER_TIMEOUT_S = 10.0
# The least time for each of a guest's addresses: most of them may not be reachable from here.
ADDRESS_LEAST_S = 0.5


class Guests(Protocol):
    """See Hypervisor."""

    def addresses(self, uuid: UUID) -> list[str]: ...
    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int: ...


@dataclass(frozen=True, slots=True)
class Checker:
    """`ca_file`: certificate authorities that are trusted for https pages besides this host's own."""

    guests: Guests
    guard: Guard = field(default_factory=Guard)
    ca_file: Path | None = None

    def trouble(self, check: Check, uuid: UUID, within_s: float = ANSWER_TIMEOUT_S) -> str | None:
        """What is wrong, as the end of a sentence; None, if the check passed. It takes `within_s`, ANSWER_TIMEOUT_S at most;
        for a guest with many addresses some seconds more. HypervisorAway: nothing is known of the guest."""
        within_s = min(within_s, ANSWER_TIMEOUT_S)
        try:
            match check.kind:
                case "port":
                    return self._port(check.port or 0, uuid, within_s)
                case "http":
                    return self._page(check.url or "", within_s)
                case "command":
                    code = self.guests.run_in_guest(uuid, check.argv, within_s)
                    return None if code == 0 else f"{check.argv[0]} ended with {code}"
        except HypervisorAway:
            raise
        except SynvirtError as error:
            return f"its {check.kind} check found: {error.detail}"
        except Exception as error:  # a wave without an answer would ask forever
            log.exception("a check broke", guest=str(uuid), kind=check.kind)
            return f"its {check.kind} check broke: {type(error).__name__}"

    def _port(self, port: int, uuid: UUID, within_s: float) -> str | None:
        addresses = self.guests.addresses(uuid)
        trouble = "its agent reports no address of it"
        deadline = time.monotonic() + within_s
        for number, address in enumerate(addresses):
            # An address that never answers leaves time for the others.
            share_s = max((deadline - time.monotonic()) / (len(addresses) - number), ADDRESS_LEAST_S)
            try:
                self.guard.connect(address, port, timeout_s=share_s).close()
            except SynvirtError as error:
                trouble = f"port {port} does not answer: {error.detail}"
            else:
                return None
        return trouble

    def _page(self, url: str, within_s: float) -> str | None:
        headers = {"User-Agent": f"synvirt/{__version__}"}
        status = status_of(url, guard=self.guard, within_s=within_s, ca_file=self.ca_file, headers=headers)
        return None if 200 <= status < 400 else f"{url} answers {status}"
