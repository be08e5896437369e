"""A DHCP server for a rehearsed guest (RFC 2131, 2132): it gives the guest its earlier address. Pure.

A client that had an address asks for it (option 50), whether it renews its lease or starts over, and gets it. One that asks for
none gets its address by its platform; else one of an unused network (RFC 2544), so that programs that wait for the
network can start.
"""

import ipaddress
import socket
import struct
from collections.abc import Mapping
from typing import Final

CLIENT_PORT, SERVER_PORT = 68, 67
REQUEST, REPLY = 1, 2
COOKIE: Final = b"\x63\x82\x53\x63"
DISCOVER, OFFER, ASKS, ACK, INFORM = 1, 2, 3, 5, 8
# The options of RFC 2132 that are read and written.
PAD, MASK, ROUTER, NAMES, WANTED, LEASE, KIND, SERVER, END = 0, 1, 3, 6, 50, 51, 53, 54, 255
LEASE_S = 86400
# The size of the guest's network is not known: its gateway is at the first or the last address of the 256 around it.
PREFIX = 24
STRANGERS = ipaddress.IPv4Network("198.18.0.0/16")
# Fixed fields, then options (RFC 2131, figure 1).
_FIXED = struct.Struct("!BBBB4sHH4s4s4s4s16s64s128s4s")
_IP = struct.Struct("!BBHHHBBH4s4s")
_UDP = struct.Struct("!HHHH")
_HEAD = 14


def answer(frame: bytes, mac: bytes, had: Mapping[bytes, str]) -> bytes | None:
    """The answer of a server with the hardware address `mac` to a client's frame; None, if the frame is not a client's or needs
    no answer. `had`: the earlier addresses, by a card's hardware address."""
    message = _message(frame)
    if message is None or len(message) < _FIXED.size:
        return None
    operation, kind, length, _, number, _, flags, own, _, _, _, hardware, _, _, cookie = _FIXED.unpack_from(message)
    if (operation, kind, length, cookie) != (REQUEST, 1, 6, COOKIE):
        return None
    options = _options(message[_FIXED.size :])
    says = {DISCOVER: OFFER, ASKS: ACK, INFORM: ACK}.get(int.from_bytes(options.get(KIND, b""), "big"))
    if says is None:
        return None
    wanted = options.get(WANTED, b"")
    known = socket.inet_aton(had[hardware[:6]]) if hardware[:6] in had else b""
    address = _usable(wanted) or _usable(own) or _usable(known) or _stranger(hardware[:6])
    server = _gateway(address)
    given = address.packed if own == bytes(4) else bytes(4)
    fixed = _FIXED.pack(
        *(REPLY, 1, 6, 0, number, 0, flags, own, given, server.packed, bytes(4), hardware, bytes(64), bytes(128), COOKIE)
    )
    network = ipaddress.IPv4Network((address, PREFIX), strict=False)
    offered = {
        KIND: bytes([says]),
        SERVER: server.packed,
        LEASE: LEASE_S.to_bytes(4, "big"),
        MASK: network.netmask.packed,
        ROUTER: server.packed,
        NAMES: server.packed,
    }
    content = fixed + b"".join(bytes([option, len(value)]) + value for option, value in offered.items()) + bytes([END])
    to = own if own != bytes(4) else socket.inet_aton("255.255.255.255")
    return frame[6:12] + mac + b"\x08\x00" + _packet(server.packed, to, content)


def _message(frame: bytes) -> bytes | None:
    """The DHCP message in a client's datagram, if it is not fragmented."""
    if (
        len(frame) < _HEAD + _IP.size
        or frame[12:14] != b"\x08\x00"
        or frame[_HEAD] >> 4 != 4
        or frame[_HEAD + 9] != socket.IPPROTO_UDP
    ):
        return None
    at = _HEAD + 4 * (frame[_HEAD] & 15)
    fragment = int.from_bytes(frame[_HEAD + 6 : _HEAD + 8], "big") & 0x3FFF
    if fragment or len(frame) < at + _UDP.size or _UDP.unpack_from(frame, at)[:2] != (CLIENT_PORT, SERVER_PORT):
        return None
    return frame[at + _UDP.size :]


def _options(content: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = 0
    while at + 1 < len(content) and content[at] != END:
        if content[at] == PAD:
            at += 1
            continue
        found.setdefault(content[at], content[at + 2 : at + 2 + content[at + 1]])
        at += 2 + content[at + 1]
    return found


def _usable(packed: bytes) -> ipaddress.IPv4Address | None:
    """Whether a host may have this address."""
    if len(packed) != 4:
        return None
    address = ipaddress.IPv4Address(packed)
    no_host = (
        address.is_multicast or address.is_loopback or address.is_unspecified or address.is_reserved or address.is_link_local
    )
    return None if no_host else address


def _stranger(mac: bytes) -> ipaddress.IPv4Address:
    """An address by the card: two cards get two."""
    network, host = divmod(int.from_bytes(mac, "big") % 60000, 250)
    return STRANGERS[256 * network + host + 2]


def _gateway(address: ipaddress.IPv4Address) -> ipaddress.IPv4Address:
    network = ipaddress.IPv4Network((address, PREFIX), strict=False)
    return network[1] if address != network[1] else network[-2]


def _packet(source: bytes, to: bytes, content: bytes) -> bytes:
    """RFC 791 and 768; a datagram of IPv4 needs no checksum of its own."""
    length = _UDP.size + len(content)
    head = _IP.pack(0x45, 0, _IP.size + length, 0, 0, 64, socket.IPPROTO_UDP, 0, source, to)
    total: int = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    total = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return head[:10] + total.to_bytes(2, "big") + head[12:] + _UDP.pack(SERVER_PORT, CLIENT_PORT, length, 0) + content
