"""Which hosts this process may connect to. A caller's URL must not reach what only this host can reach.

One guard checks everything: what is read by URL, webhooks, source platforms and the hosts that they name, backup peers, the
time stamp authority and the OpenID provider, and redirects too.

A name is resolved once, each address is checked, and the connection goes to exactly that address: a name server that gives
another answer the second time changes nothing. Nothing else in this package opens a connection (tests/security/test_outgoing.py
reads all of it).

    dial      a connection                     our own transports
    address   the address to connect to        programs and libraries that connect by themselves, and take an address
    check     only whether it is allowed       those that need the name: docs/threat-model.md lists them, and the remaining risk

Two settings name the allowed hosts; if one is set, all others are refused:

    remote_allowed_hosts   URLs and webhooks, by an operator. Empty: all but addresses by which a host reaches itself (loopback,
                           its own, unspecified) and its cloud's metadata (link-local, the addresses in _METADATA), multicast
    source_allowed_hosts   sources, peers and other services of an admin's. Empty: all but link-local, metadata and multicast.
                           This host itself is allowed, for a tunnel that ends here or a nested platform

The second one is global to the process (`permit`, `sources`), not an argument: an adapter that did not pass it on could connect
to any host. An order to a worker includes it (jobs/wire.py).
"""

import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final, Literal

from synvirt.addresses import is_network
from synvirt.errors import BadRequest, SourceUnreachable, cause_of

CONNECT_TIMEOUT_S: Final = 10.0

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Setting = Literal["remote_allowed_hosts", "source_allowed_hosts"]

# Addresses of clouds' metadata in networks that others use for hosts.
_METADATA: Final = frozenset(
    ipaddress.ip_address(text)
    # Alibaba, AWS, Azure, Oracle, Google
    for text in ("100.100.100.200", "fd00:ec2::254", "168.63.129.16", "192.0.0.192", "fd20:ce::254")
)
# RFC 8215 and 4380: a network's own translators, and Teredo. The IPv4 addresses inside these are not known for certain.
_TUNNELS: Final = (ipaddress.IPv6Network("64:ff9b:1::/48"), ipaddress.IPv6Network("2001::/32"))
# RFC 6052: an IPv4 address in these is reached through a translator.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
# «This network» (RFC 1122 section 3.2.1.3): Linux takes 0.0.0.0 for itself.
_THIS_NETWORK: Final = ipaddress.IPv4Network("0.0.0.0/8")


@dataclass(frozen=True, slots=True)
class Guard:
    """`allowed`: host names (`nas.example`, `*.example`), addresses and networks (`10.0.0.0/8`); empty: all but the refused
    ones. `setting`: which of the two settings this is; it decides what is refused if it is empty."""

    allowed: tuple[str, ...] = ()
    setting: Setting = "remote_allowed_hosts"

    def check_name(self, host: str) -> None:
        """BadRequest, if the host is refused without asking a name server: an address, or a name that matches no entry."""
        if self.allowed and not any(_names(entry, host) or is_network(entry) for entry in self.allowed):
            raise self._refused(host)
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return
        if not self._allows(host, host):
            raise self._refused(host)

    def addresses(self, host: str, port: int) -> list[str]:
        """The host's allowed addresses. BadRequest, if none is allowed; SourceUnreachable, if it has none."""
        try:
            return self._judged(host, port)
        except OSError as error:
            raise SourceUnreachable(
                f"the host {host} is not known: {cause_of(error)}", hint="is its name right, and DNS?"
            ) from error

    def check(self, host: str, port: int = 0) -> None:
        """BadRequest, if the host is not allowed. A name that cannot be resolved is left to the caller that connects."""
        try:
            self._judged(host, port)
        except OSError:
            return

    def dial(self, host: str, port: int, *, timeout_s: float = CONNECT_TIMEOUT_S) -> socket.socket:
        """A connection to one of the allowed addresses. `timeout_s` is for each of them, and stays the socket's. BadRequest, if
        none is allowed; else OSError, and socket.gaierror if the name cannot be resolved."""
        return _dialled(self._judged(host, port), port, timeout_s)

    def connect(self, host: str, port: int, *, timeout_s: float = CONNECT_TIMEOUT_S) -> socket.socket:
        """Like `dial`, but failures are SourceUnreachable."""
        addresses = self.addresses(host, port)
        try:
            return _dialled(addresses, port, timeout_s)
        except OSError as error:
            raise SourceUnreachable(
                f"{host}, port {port}, does not answer: {cause_of(error)}",
                hint="does it run, and do firewalls let this host connect to it?",
            ) from error

    def address(self, host: str, port: int, *, timeout_s: float = CONNECT_TIMEOUT_S) -> str:
        """The address for a program that connects by itself: the only one, or the first that accepts a connection. BadRequest,
        OSError."""
        addresses = self._judged(host, port)
        if len(addresses) == 1:
            return addresses[0]
        with _dialled(addresses, port, timeout_s) as reached:
            return str(reached.getpeername()[0])

    def _judged(self, host: str, port: int) -> list[str]:
        self.check_name(host)  # before a name server gets the question
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise socket.gaierror(socket.EAI_NONAME, f"{error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        allowed = [address for address in addresses if self._allows(host, address)]
        if not allowed:
            raise self._refused(host if addresses == [host] else f"{host} ({', '.join(addresses[:4])})")
        return allowed

    def _allows(self, host: str, text: str) -> bool:
        address = _meant(ipaddress.ip_address(text.partition("%")[0]))
        if not self.allowed:
            return not _REFUSED[self.setting](address)
        return any(_names(entry, host) or _holds(entry, address) for entry in self.allowed)

    def _refused(self, host: str) -> BadRequest:
        return BadRequest(
            f"{host} is not among the hosts that may be {_SPOKEN_TO[self.setting]}",
            hint=f"the operator of the service can name it in the setting {self.setting}",
        )


class _Permitted:
    """The last value given to `permit`."""

    hosts: tuple[str, ...] = ()


def permit(hosts: Sequence[str]) -> None:
    """From now on, sources may be only at these hosts, as in the setting source_allowed_hosts; empty: see above."""
    _Permitted.hosts = tuple(hosts)


def permitted() -> tuple[str, ...]:
    """The same list, for another process that must obey it."""
    return _Permitted.hosts


def sources() -> Guard:
    """The guard for source platforms and all hosts that they name, for peers and for the time stamp authority."""
    return Guard(_Permitted.hosts, "source_allowed_hosts")


def hint_of_refused(reason: str, otherwise: str) -> str:
    """What to do about a certificate that was refused, by OpenSSL's reason. One that is not valid yet, or no more, is often
    right where the clock of this host is not: to pin it would only hide that."""
    if "not yet valid" not in reason and "expired" not in reason:
        return otherwise
    return f"this host's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; if that is right, the certificate is to be renewed"


def _dialled(addresses: Sequence[str], port: int, timeout_s: float) -> socket.socket:
    failure = OSError(errno.EADDRNOTAVAIL, "it has no address")
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=timeout_s)
        except OSError as error:
            failure = error
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    raise failure


def _meant(address: Address) -> Address:
    """The IPv4 address inside an IPv6 address; else the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def _is_metadata(address: Address) -> bool:
    """Whether this is a metadata address: no source or peer has one, and the service there gives out keys."""
    return address.is_link_local or address.is_multicast or address in _METADATA


def _is_own(address: Address) -> bool:
    return (
        _is_metadata(address)
        or address.is_loopback
        or address.is_unspecified
        or any(address in tunnel for tunnel in _TUNNELS if address.version == 6)
        or _is_of_this_host(address)
        or (address.version == 4 and address in _THIS_NETWORK)
    )


def _is_of_this_host(address: Address) -> bool:
    """Whether the address is this host's own. A socket can be bound only to such an address; with net.ipv4.ip_nonlocal_bind, as
    where a virtual address moves between hosts, to any: then the kernel's routes decide."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return _route_kind(address) not in (_RTN_UNSPEC, _RTN_UNICAST)


# rtnetlink(7), linux/rtnetlink.h. A kernel that knows no route answers with an error: _RTN_UNSPEC here.
_RTM_NEWROUTE, _RTM_GETROUTE, _NLM_F_REQUEST, _RTA_DST = 24, 26, 1, 1
_RTN_UNSPEC, _RTN_UNICAST = 0, 1
_HEADER: Final = struct.Struct("=IHHII")
_ROUTE: Final = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")


def _route_kind(address: Address) -> int | None:
    """The kind of the kernel's route to an address: one of _RTN_…. None, if the kernel cannot be asked."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    wanted = _ROUTE.pack(family, address.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
    wanted += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(address.packed), _RTA_DST) + address.packed
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(CONNECT_TIMEOUT_S)
            kernel.sendto(_HEADER.pack(_HEADER.size + len(wanted), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + wanted, (0, 0))
            answer = kernel.recv(8192)
        if _HEADER.unpack_from(answer)[1] != _RTM_NEWROUTE:
            return _RTN_UNSPEC
        return int(_ROUTE.unpack_from(answer, _HEADER.size)[7])
    except (OSError, struct.error):
        return None


def _names(entry: str, host: str) -> bool:
    entry, host = entry.lower(), host.lower().rstrip(".")
    return host.endswith(entry[1:]) if entry.startswith("*.") else host == entry


def _holds(entry: str, address: Address) -> bool:
    return is_network(entry) and address in ipaddress.ip_network(entry, strict=False)


_REFUSED: Final[Mapping[Setting, Callable[[Address], bool]]] = MappingProxyType(
    {"remote_allowed_hosts": _is_own, "source_allowed_hosts": _is_metadata}
)
_SPOKEN_TO: Final[Mapping[Setting, str]] = MappingProxyType(
    {"remote_allowed_hosts": "read from", "source_allowed_hosts": "a source or a backup peer"}
)
