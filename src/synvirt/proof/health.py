"""Is a guest that booted here healthy: a port, a page, a command by its agent. Blocking; each is asked once a call.

Where a guest listens its own agent says, and a URL is a caller's: both are connected to through the outgoing guard.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from uuid import UUID

import structlog

from synvirt import __version__
from synvirt.errors import SynvirtError
from synvirt.model.checks import Check
from synvirt.outgoing import Guard
from synvirt.transport.asking import status_of

log = structlog.get_logger(__name__)

ANSWER_TIMEOUT_S = 10.0
# So long at least each of a guest's addresses is tried: most of them may lead nowhere from here.
ADDRESS_LEAST_S = 0.5


class Guests(Protocol):
    """See Hypervisor."""

    def addresses(self, uuid: UUID) -> list[str]: ...
    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int: ...


@dataclass(frozen=True, slots=True)
class Checker:
    """`ca_file`: authorities that pages by https are trusted with, beside this host's own."""

    guests: Guests
    guard: Guard = field(default_factory=Guard)
    ca_file: Path | None = None

    def trouble(self, check: Check, uuid: UUID, within_s: float = ANSWER_TIMEOUT_S) -> str | None:
        """What is not as it should be, as the end of a sentence; None: it passed. Known after `within_s`, ANSWER_TIMEOUT_S at
        the most; a guest of many addresses may take some seconds more."""
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
        except SynvirtError as error:
            return f"its {check.kind} check found: {error.detail}"
        except Exception as error:  # a wave that gets no answer would ask for ever
            log.exception("a check broke", guest=str(uuid), kind=check.kind)
            return f"its {check.kind} check broke: {type(error).__name__}"

    def _port(self, port: int, uuid: UUID, within_s: float) -> str | None:
        addresses = self.guests.addresses(uuid)
        trouble = "its agent tells no address of it"
        deadline = time.monotonic() + within_s
        for number, address in enumerate(addresses):
            # One that swallows what is sent to it leaves time for the others.
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
