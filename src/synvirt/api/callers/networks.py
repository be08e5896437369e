"""The addresses that belong to one caller."""

import ipaddress

# A caller with one IPv6 address has its whole /64.
IPV6_PREFIX_BITS = 64


def network_of(address: str) -> str:
    """The addresses that belong to one caller: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, IPV6_PREFIX_BITS), strict=False))
    return str(found)
