"""The network of a rehearsed guest, a process of its own: python -P -m synvirt.rehearsals.bubble CONTROL UIDS HAD LISTENER...

    cards of guests ── QEMU ══ TCP on loopback ══▶ this process, in a network namespace with nothing in it but ── bubble0
                                                       frames go from card to card, and to bubble0; there is no other way out

The guest keeps its addresses; one that asks for them by DHCP gets its earlier ones (`dhcp.py`). Every ARP request is answered
with the address of bubble0, so the guest's gateways and name servers seem to exist; what it sends to them is dropped. Frames
are forwarded only from one guest to another: guests that are rehearsed together reach each other, directly in one network, or
by their gateways. A guest's addresses are learned from what it sends. A connection to the guest can be opened from bubble0, and
the service gets it as an open socket: so probes come in, and nothing else does.

Frames are hostile: the process that reads them is in a cage. It has no privilege to change the address of bubble0; a second
process has it, and accepts four bytes at a time.

QEMU's framing (net/socket.c): before each frame its length, 4 bytes, big-endian. IPv4 only.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO, TypeVar

from synvirt.cage.confining import Cage, Network, enter
from synvirt.rehearsals import dhcp
from synvirt.sizes import GIB

K = TypeVar("K")

# linux/sched.h, linux/if_tun.h, linux/sockios.h, linux/if.h, linux/route.h, linux/prctl.h
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
SIOCADDRT, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFHWADDR = 0x890B, 0x8914, 0x8916, 0x891C, 0x8927
IFF_UP, RTF_UP, PR_SET_PDEATHSIG = 0x1, 0x1, 1
TAP: Final = "bubble0"
# The most that QEMU sends (net/net.h, NET_BUFSIZE): a segment that the card would cut.
FRAME_BYTES_MAX = 4096 + 65536
READ_BYTES = 256 << 10
# A frame that a guest does not take in time is dropped, as by a switch.
OWED_BYTES_MAX = 1 << 20
# A guest that claims more addresses is not one that is probed.
ADDRESSES_MAX = 64
ARP, IPV4 = 0x0806, 0x0800
# An address outside every guest's network: probes come from it until the guest has asked for a gateway.
NO_GATEWAY = "192.0.2.1"
NOT_POSSIBLE = 3
# Address space; Python's threads reserve most of it and never use it.
MEMORY_BYTES = GIB


class _Route(ctypes.Structure):
    """struct rtentry of linux/route.h."""

    _fields_ = [
        ("pad1", ctypes.c_ulong),
        ("destination", ctypes.c_char * 16),
        ("gateway", ctypes.c_char * 16),
        ("mask", ctypes.c_char * 16),
        ("flags", ctypes.c_ushort),
        ("pad2", ctypes.c_short),
        ("pad3", ctypes.c_ulong),
        ("pad4", ctypes.c_void_p),
        ("metric", ctypes.c_short),
        ("device", ctypes.c_char_p),
        ("mtu", ctypes.c_ulong),
        ("window", ctypes.c_ulong),
        ("irtt", ctypes.c_ushort),
    ]


@dataclass
class Card:
    """One of the guest's cards, once QEMU has connected. `owed`: frames that it has not taken yet."""

    listener: socket.socket
    wire: socket.socket | None = None
    received: bytearray = field(default_factory=bytearray)
    owed: bytearray = field(default_factory=bytearray)


class Tap:
    """bubble0, in this process' namespace."""

    def __init__(self) -> None:
        self.descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(self.descriptor, TUNSETIFF, struct.pack("16sH14x", TAP.encode(), IFF_TAP | IFF_NO_PI))
        self._asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # Before bubble0 is up, as it would announce itself. If the host has no IPv6, or /proc/sys is read-only, nothing
        # changes.
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv6/conf/{TAP}/disable_ipv6").write_text("1")
        self._ask(SIOCSIFFLAGS, struct.pack("H14x", IFF_UP))
        self.mac = self._ask(SIOCGIFHWADDR, bytes(16))[18:24]

    def be(self, address: str) -> None:
        """Gives bubble0 this address, and routes all others by it. OSError."""
        self._ask(SIOCSIFADDR, _sockaddr(address))
        self._ask(SIOCSIFNETMASK, _sockaddr("255.255.255.255"))
        anywhere = _sockaddr(socket.inet_ntoa(bytes(4)))
        route = _Route(flags=RTF_UP, device=TAP.encode())
        for name in ("destination", "gateway", "mask"):
            ctypes.memmove(ctypes.addressof(route) + getattr(_Route, name).offset, anywhere, 16)
        with contextlib.suppress(FileExistsError):
            fcntl.ioctl(self._asking, SIOCADDRT, route)

    def write(self, frame: bytes) -> None:
        """Sends a frame; one that the device does not take is dropped."""
        with contextlib.suppress(OSError):  # it is full, or the frame is invalid
            os.write(self.descriptor, frame)

    def read(self) -> bytes | None:
        """The next frame; None, if there is none now."""
        try:
            return os.read(self.descriptor, FRAME_BYTES_MAX)
        except BlockingIOError:
            return None

    def _ask(self, request: int, content: bytes) -> bytes:
        return fcntl.ioctl(self._asking, request, struct.pack("16s", TAP.encode()) + content.ljust(24, b"\0"))


def _sockaddr(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


class Addresser:
    """A process that keeps the privileges of this one and uses them only to change the address of bubble0. `others`:
    descriptors that it does not need."""

    def __init__(self, tap: Tap, others: Collection[socket.socket]) -> None:
        self._asking, answering = socket.socketpair()
        self._address = ""
        if os.fork() == 0:
            for one in (self._asking, *others):
                one.close()
            self._serve(tap, answering)
        answering.close()

    def be(self, address: str) -> None:
        """Changes the address. OSError, if bubble0 cannot have it."""
        if address != self._address:
            self._asking.send(socket.inet_aton(address))
            if self._asking.recv(1) != b"y":
                raise OSError(f"{TAP} cannot be {address}")
            self._address = address

    @staticmethod
    def _serve(tap: Tap, answering: socket.socket) -> None:
        while len(wanted := answering.recv(4, socket.MSG_WAITALL)) == 4:
            try:
                tap.be(socket.inet_ntoa(wanted))
                answering.send(b"y")
            except OSError:
                answering.send(b"n")
        os._exit(0)


class Bubble:
    """`uids`: users whose QEMU may connect. `net`: the TCP connections of the service's own namespace. `had`: see dhcp.py.
    `owners`: addresses that a card has by its platform, by the card's number: no other card may use them, and bubble0 never
    answers for them."""

    def __init__(
        self,
        tap: Tap,
        addresser: Addresser,
        control: socket.socket,
        listeners: list[socket.socket],
        *,
        uids: Collection[int],
        net: TextIO,
        had: Mapping[bytes, str],
        owners: Mapping[str, int],
    ) -> None:
        self._had, self._owners = had, owners
        self._tap, self._addresser, self._control, self._uids, self._net = tap, addresser, control, uids, net
        self._cards = [Card(listener) for listener in listeners]
        self._selector = selectors.DefaultSelector()
        # The card that showed each hardware address, and each IPv4 address; only the newest are kept.
        self._macs: dict[bytes, int] = {}
        self._addresses: dict[str, int] = {}
        self._stations: dict[str, bytes] = {}
        self._gateway = NO_GATEWAY
        self._probing = threading.Lock()

    def serve(self) -> None:
        """Runs until the service has gone."""
        select = self._selector
        select.register(self._control, selectors.EVENT_READ, self._asked)
        select.register(self._tap.descriptor, selectors.EVENT_READ, self._from_tap)
        for number, card in enumerate(self._cards):
            card.listener.setblocking(False)
            select.register(card.listener, selectors.EVENT_READ, lambda number=number: self._connected(number))
        while True:
            for key, _ in select.select():
                if key.data() is False:
                    return

    # ── cards ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _connected(self, number: int) -> None:
        """The newest connection is the card: each rung of the ladder starts QEMU again."""
        card = self._cards[number]
        with contextlib.suppress(OSError):
            wire, (_, port) = card.listener.accept()
            if self._uid_of(port, card.listener.getsockname()[1]) not in self._uids:
                wire.close()
                return
            self._unplug(card)
            wire.setblocking(False)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            card.wire = wire
            self._selector.register(wire, selectors.EVENT_READ, lambda: self._from_card(number))

    def _uid_of(self, port: int, ours: int) -> int | None:
        """The user of the process that connected, in the service's own namespace (proc(5), /proc/net/tcp)."""
        self._net.seek(0)
        for line in self._net.read().splitlines()[1:]:
            words = line.split()
            if (words[1], words[2]) == (f"0100007F:{port:04X}", f"0100007F:{ours:04X}"):
                return int(words[7])
        return None

    def _unplug(self, card: Card) -> None:
        if card.wire is not None:
            self._selector.unregister(card.wire)
            card.wire.close()
        card.wire = None
        card.received.clear()
        card.owed.clear()

    def _from_card(self, number: int) -> None:
        card = self._cards[number]
        self._pay(card)
        if card.wire is None:  # QEMU has ended, perhaps before it took everything
            return
        try:
            came = card.wire.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        if not came:
            self._unplug(card)
            return
        card.received += came
        while len(card.received) >= 4:
            length = int.from_bytes(card.received[:4], "big")
            if length > FRAME_BYTES_MAX:
                self._unplug(card)
                return
            if len(card.received) < 4 + length:
                return
            frame = bytes(card.received[4 : 4 + length])
            del card.received[: 4 + length]
            self._frame(number, frame)

    def _send(self, number: int, frame: bytes) -> None:
        card = self._cards[number]
        if card.wire is None or len(card.owed) + len(frame) > OWED_BYTES_MAX:
            return
        card.owed += len(frame).to_bytes(4, "big") + frame
        self._pay(card)

    def _pay(self, card: Card) -> None:
        """Sends what the card takes now; the rest later, when the card can take more."""
        try:
            while card.owed and card.wire is not None:
                del card.owed[: card.wire.send(card.owed)]
        except BlockingIOError:
            pass
        except OSError:
            self._unplug(card)
            return
        if card.wire is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if card.owed else 0)
            if self._selector.get_key(card.wire).events != events:
                self._selector.modify(card.wire, events, self._selector.get_key(card.wire).data)

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _frame(self, number: int, frame: bytes) -> None:
        if len(frame) < 14:
            return
        to, source, kind = frame[:6], frame[6:12], int.from_bytes(frame[12:14], "big")
        if not source[0] & 1:
            _keep(self._macs, source, number)
        if kind == IPV4 and (lease := dhcp.answer(frame, self._tap.mac, self._had)) is not None:
            self._send(number, lease)
            return
        if kind == IPV4 and len(frame) >= 34:
            self._is_at(socket.inet_ntoa(frame[26:30]), source, number)
            if to == self._tap.mac and self._routed(frame):
                return
        if kind == ARP and len(frame) >= 42 and self._answered(number, frame):
            return
        if to == self._tap.mac or to[0] & 1:
            self._tap.write(frame)
        known = self._macs.get(to)
        for other in range(len(self._cards)):
            if other != number and (to[0] & 1 or other == known):
                self._send(other, frame)

    def _is_at(self, address: str, mac: bytes, number: int) -> None:
        first = int(address.split(".", maxsplit=1)[0])
        if 0 < first < 224 and first != 127 and self._owners.get(address, number) == number:
            _keep(self._addresses, address, number)
            self._stations = {one: self._stations[one] for one in self._addresses if one in self._stations} | {address: mac}

    def _routed(self, frame: bytes) -> bool:
        """Routes a packet by a guest's gateway: it leads to the other guests only."""
        address = socket.inet_ntoa(frame[30:34])
        number, mac = self._addresses.get(address), self._stations.get(address)
        if number is None or mac is None or mac == frame[6:12]:
            return False
        self._send(number, mac + self._tap.mac + frame[12:])
        return True

    def _answered(self, number: int, frame: bytes) -> bool:
        """RFC 826. We answer for every address that is not a guest's, but never when a guest checks whether its own is free."""
        asks, sender, wanted = frame[20:22] == b"\0\1", frame[28:32], frame[38:42]
        if sender != bytes(4):
            self._is_at(socket.inet_ntoa(sender), frame[6:12], number)
        address = socket.inet_ntoa(wanted)
        if not asks or sender in (bytes(4), wanted) or address in self._addresses or address in self._owners:
            return False
        self._gateway = address
        mac, head = self._tap.mac, frame[14:20]
        self._send(number, frame[6:12] + mac + frame[12:14] + head + b"\0\2" + mac + wanted + frame[22:28] + sender)
        return True

    def _from_tap(self) -> None:
        while (frame := self._tap.read()) is not None:
            if len(frame) < 14:
                continue
            known = self._macs.get(frame[:6])
            for number in range(len(self._cards)):
                if frame[0] & 1 or number == known:
                    self._send(number, frame)

    # ── what the service asks ────────────────────────────────────────────────────────────────────────────────────────

    def _asked(self) -> bool:
        """A line of JSON: `{"id", "cards"}` asks for the addresses of the guest with these cards; with `port` and `timeout_s`,
        for a connection to it. The answer has the same id. False: the service has gone."""
        line = self._control.recv(4096)
        if not line:
            return False
        question = json.loads(line)
        found = [address for address, card in list(self._addresses.items()) if card in question["cards"]]
        if "port" in question:
            threading.Thread(
                target=self._connect, args=(question["id"], found, question["port"], question["timeout_s"]), daemon=True
            ).start()
        else:
            self._control.send(json.dumps({"id": question["id"], "addresses": found}).encode())
        return True

    def _connect(self, number: int, found: list[str], port: int, timeout_s: float) -> None:
        """Connects to the first of the guest's addresses that answers there."""
        trouble = "the guest has sent nothing that shows an address of it"
        with self._probing:
            addresses = [address for address in found if address != self._gateway]
            try:
                self._addresser.be(self._gateway)
            except OSError as error:
                addresses, trouble = [], str(error)
            for address in addresses:
                try:
                    with socket.create_connection((address, port), timeout_s / len(addresses)) as made:
                        socket.send_fds(
                            self._control, [json.dumps({"id": number, "address": address}).encode()], [made.fileno()]
                        )
                        return
                except OSError as error:
                    trouble = f"{address} does not answer at port {port}: {error.strerror or error}"
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"id": number, "trouble": trouble}).encode())


def _keep(seen: dict[K, int], what: K, number: int) -> None:
    """Keeps the newest entries, the newest last, up to a limit."""
    seen.pop(what, None)
    seen[what] = number
    if len(seen) > ADDRESSES_MAX:
        del seen[next(iter(seen))]


def main(argv: list[str]) -> int:
    """The network's process. Exit code NOT_POSSIBLE, if the host gives no network namespace."""
    control, uids, had, *listening = argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with Path(f"/proc/{os.getppid()}/net/tcp").open() as net:
        # Without root, it can have one with all rights in a user namespace, if the host allows that.
        if libc.unshare(CLONE_NEWNET) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            # unshare(2); its own words speak of a disk.
            why = "user.max_user_namespaces or user.max_net_namespaces" if number == errno.ENOSPC else os.strerror(number)
            sys.stderr.write(f"no network namespace: {why}\n")
            return NOT_POSSIBLE
        try:
            tap = Tap()
        except OSError as error:
            sys.stderr.write(f"no tap device: {error.strerror}\n")
            return NOT_POSSIBLE
        asked = socket.socket(fileno=int(control))
        listeners = [socket.socket(fileno=int(one)) for one in listening]
        addresser = Addresser(tap, [asked, *listeners])
        enter(Cage(network=Network.ELSEWHERE, memory_bytes=MEMORY_BYTES, files=64, written_bytes=0))
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # again, as the user has changed since it was first set
        asked.send(b"{}")
        cards = json.loads(had)
        first = {bytes.fromhex(card["mac"]): card["addresses"][0] for card in cards if card["mac"] and card["addresses"]}
        owners = {address: number for number, card in reversed(list(enumerate(cards))) for address in card["addresses"]}
        users = {int(uid) for uid in uids.split(",")}
        Bubble(tap, addresser, asked, listeners, uids=users, net=net, had=first, owners=owners).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
