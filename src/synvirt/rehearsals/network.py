"""A rehearsed guest's network, seen from the service: ports that its cards connect to, and connections into it. Blocking.

What the guest sends is hostile. A process of its own reads it (`bubble.py`) and gives back numeric addresses and sockets.
"""

import contextlib
import ipaddress
import json
import os
import pwd
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol
from uuid import UUID

from synvirt.errors import HostLacks, SourceUnreachable
from synvirt.kvm import qemu_user
from synvirt.model.machine import Nic
from synvirt.outgoing import Guard
from synvirt.programs import inherited
from synvirt.proof.health import Guests

# To start a process, a namespace and a tap takes tens of milliseconds on an idle host.
BEGIN_TIMEOUT_S = 20.0
# The wait for the answer, in addition to the probe's own time.
ANSWER_S = 5.0
# A message has at most a few dozen addresses.
MESSAGE_BYTES = 16 << 10
# The users that QEMU may run as: they may connect cards.
QEMU_USERS = ("libvirt-qemu", "qemu")
ENVIRONMENT = ("PATH", "PYTHONPATH")
_NONE = "this host gives a rehearsed guest no network"


class Bubble:
    """A network for these cards, of one guest or several. HostLacks, if this host gives no network namespace or no tap device.
    `ports`: of 127.0.0.1, one for each card, in order."""

    def __init__(self, cards: Sequence[Nic]) -> None:
        self._questions = 0
        # Each guest has its own thread that asks; any thread may receive another's answer.
        self._asking = threading.Lock()
        try:
            self._begin(cards)
        except OSError as error:  # of a port, a descriptor or a process
            raise HostLacks(f"{_NONE}: {error.strerror}") from error
        self._control.settimeout(BEGIN_TIMEOUT_S)
        with contextlib.suppress(OSError):
            if self._control.recv(MESSAGE_BYTES):
                return
        self._control.close()
        self._child.kill()
        assert self._child.stderr is not None
        with self._child.stderr as stderr:
            words = stderr.read(MESSAGE_BYTES).decode(errors="replace").strip().splitlines()
        self._child.wait()
        raise HostLacks(f"{_NONE}: {words[-1] if words else 'it did not begin in time'}")

    def _begin(self, cards: Sequence[Nic]) -> None:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as failing:
            listeners = [theirs.enter_context(socket.socket()) for _ in cards]
            for one in listeners:
                one.bind(("127.0.0.1", 0))
                one.listen(4)
            self.ports = tuple(one.getsockname()[1] for one in listeners)
            self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            failing.enter_context(self._control)
            passed = [theirs.enter_context(control).fileno(), *(one.fileno() for one in listeners)]
            argv = [sys.executable, "-P", "-m", "synvirt.rehearsals.bubble", str(passed[0]), _uids()]
            argv += [json.dumps(_addresses_of(cards)), *map(str, passed[1:])]
            environment = inherited(ENVIRONMENT)
            self._child = subprocess.Popen(
                argv, pass_fds=passed, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, start_new_session=True
            )
            failing.pop_all()

    @property
    def ended(self) -> bool:
        """Whether its process has ended by itself: no guest gets into it any more, and nothing to a guest."""
        return self._child.poll() is not None

    def addresses(self, cards: Sequence[int] | None = None) -> list[str]:
        """The addresses of the guest with these cards (None: all), seen in what it sent; numeric, IPv4."""
        reported = self._asked({"cards": self._chosen(cards)}, ANSWER_S)[0].get("addresses")
        found = []
        for one in reported if isinstance(reported, list) else []:
            with contextlib.suppress(ValueError):
                found.append(str(ipaddress.IPv4Address(one)))
        return found

    def connect(self, port: int, timeout_s: float, cards: Sequence[int] | None = None) -> socket.socket:
        """A connection to the guest. SourceUnreachable, with the error of each address."""
        question = {"cards": self._chosen(cards), "port": port, "timeout_s": timeout_s}
        answer, descriptors = self._asked(question, timeout_s + ANSWER_S)
        if not descriptors:
            raise SourceUnreachable(str(answer.get("trouble", "the guest's network gives no answer")))
        made = socket.socket(fileno=descriptors[0])
        made.settimeout(timeout_s)
        return made

    def close(self) -> None:
        """Idempotent; the namespace and all in it end with the process."""
        self._control.close()
        self._child.kill()
        self._child.wait()
        if self._child.stderr is not None:
            self._child.stderr.close()

    def __enter__(self) -> "Bubble":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _chosen(self, cards: Sequence[int] | None) -> list[int]:
        return list(range(len(self.ports)) if cards is None else cards)

    def _asked(self, question: dict[str, object], within_s: float) -> tuple[dict[str, object], list[int]]:
        with self._asking:
            return self._answered(question, within_s)

    def _answered(self, question: dict[str, object], within_s: float) -> tuple[dict[str, object], list[int]]:
        """The answer to this question. A late answer to an earlier one is skipped."""
        self._questions += 1
        try:
            self._control.settimeout(within_s)
            self._control.send(json.dumps({"id": self._questions, **question}).encode())
            while True:
                line, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
                answer = json.loads(line)
                if isinstance(answer, dict) and answer.get("id") == self._questions:
                    return answer, descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
        except (OSError, ValueError) as error:
            raise SourceUnreachable("the guest's network gives no answer") from error


@dataclass(frozen=True, slots=True)
class Place:
    """One guest's part of a Bubble with several: these cards are its. `leave`: called to close it."""

    bubble: Bubble
    cards: range
    leave: Callable[[], None]

    @property
    def ports(self) -> tuple[int, ...]:
        return self.bubble.ports[self.cards.start : self.cards.stop]

    @property
    def ended(self) -> bool:
        return self.bubble.ended

    def addresses(self) -> list[str]:
        return self.bubble.addresses(self.cards)

    def connect(self, port: int, timeout_s: float) -> socket.socket:
        return self.bubble.connect(port, timeout_s, self.cards)

    def close(self) -> None:
        self.leave()


def _addresses_of(cards: Sequence[Nic]) -> list[dict[str, object]]:
    """For each card, its hardware address in hexadecimal and its IPv4 addresses by its platform."""
    found: list[dict[str, object]] = []
    for card in cards:
        mac = "".join(character for character in (card.mac or "").lower() if character in "0123456789abcdef")
        addresses = []
        for text in card.ip_addresses:
            with contextlib.suppress(ValueError):
                addresses.append(str(ipaddress.IPv4Address(text.partition("/")[0])))
        found.append({"mac": mac if len(mac) == 12 else "", "addresses": addresses})
    return found


def _uids() -> str:
    found = {0, os.geteuid(), *qemu_user.in_use()}
    for name in QEMU_USERS:
        with contextlib.suppress(KeyError):
            found.add(pwd.getpwnam(name).pw_uid)
    return ",".join(str(uid) for uid in sorted(found))


class Network(Protocol):
    """The network of a rehearsed guest: its own Bubble, or its Place in one."""

    @property
    def ports(self) -> tuple[int, ...]: ...
    @property
    def ended(self) -> bool: ...
    def addresses(self) -> list[str]: ...
    def connect(self, port: int, timeout_s: float) -> socket.socket: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class InBubble(Guard):
    """The guard of checks: whatever name or address a check has, the connection goes to the guest and nowhere else. None: the
    guest has no network."""

    bubble: Network | None = field(default=None)

    def connect(self, host: str, port: int, *, timeout_s: float = ANSWER_S) -> socket.socket:
        if self.bubble is None:
            raise SourceUnreachable("the rehearsed guest has no network")
        return self.bubble.connect(port, timeout_s)


@dataclass(frozen=True, slots=True)
class NoNetwork:
    """A guest whose cards have no cable: only commands reach it."""

    guests: Guests

    def addresses(self, uuid: UUID) -> list[str]:
        return []

    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
        return self.guests.run_in_guest(uuid, argv, timeout_s)


@dataclass(frozen=True, slots=True)
class GuestInBubble:
    """Runs commands by the guest's agent; finds its addresses by what it sends."""

    guests: Guests
    bubble: Network

    def addresses(self, uuid: UUID) -> list[str]:
        return self.bubble.addresses() or ["0.0.0.0"]  # noqa: S104 - none yet; connecting reports it

    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
        return self.guests.run_in_guest(uuid, argv, timeout_s)
