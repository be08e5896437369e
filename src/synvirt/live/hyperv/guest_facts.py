"""Facts of a guest from its integration services: the key-value pairs of Msvm_KvpExchangeComponent
(GuestIntrinsicExchangeItems), with the common names of all platforms' facts (ReportsGuestFacts). Pure.

Windows and Linux (hv_kvp_daemon) write the same names. On Linux `OSName` is the distribution's, `OSBuildNumber` the kernel's
release (hv_kvp_daemon.c, kvp_get_os_info).
"""

import ipaddress
from collections.abc import Mapping, Sequence

from synvirt.model.facts import bounded, several, short

_WINDOWS = "windows"


def guest_facts(pairs: Mapping[str, str], cards: Sequence[tuple[str, Sequence[str]]]) -> dict[str, str]:
    """None, while no integration services run. `cards`: the MAC address of each, and its addresses. Prefixes are not known."""
    facts: dict[str, str] = {}
    names = (("host name", "FullyQualifiedDomainName"), ("system", "OSName"))
    facts |= {fact: short(pairs[key]) for fact, key in names if pairs.get(key)}
    build = pairs.get("OSBuildNumber", "")
    if build and _WINDOWS not in pairs.get("OSName", "").casefold():
        facts["kernel"] = short(build)
    elif version := pairs.get("OSVersion", ""):
        facts["kernel"] = short(version)
    for mac, addresses in cards if facts else ():
        facts[f"addresses of {mac.lower()}"] = several(one for one in map(_address, addresses) if one)
    return bounded(facts)


def _address(text: str) -> str | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return None if address.is_link_local else str(address)
