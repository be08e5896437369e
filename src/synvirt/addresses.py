"""Addresses and networks as people write them."""

import ipaddress


def is_network(text: str) -> bool:
    """Whether it is an address or a network: `10.0.0.5`, `10.0.0.0/8`."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
