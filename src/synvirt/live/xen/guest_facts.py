"""Facts of a guest from its Xen tools: the record VM_guest_metrics of the XenAPI, with the common names of all platforms' facts
(ReportsGuestFacts). Pure.

`os_version` has `name` (for Linux from /etc/os-release; for Windows its name and its folder, with bars between), `distro` and
`uname`; `networks` has `0/ip`, and with newer tools `0/ipv4/0`, `0/ipv6/0`; the first number is the card's device number.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any

from synvirt.model.facts import FACTS_MAX, bounded, several, short


def guest_facts(metrics: Mapping[str, Any], macs: Mapping[str, str]) -> dict[str, str]:
    """None, while no tools run. `macs`: by device number. Prefixes are not known: addresses have none."""
    facts: dict[str, str] = {}
    version, other = _table(metrics, "os_version"), _table(metrics, "other")
    if name := short(version.get("name", "")).partition("|")[0].strip():
        facts["system"] = name
    if kernel := short(version.get("uname", "")):
        facts["kernel"] = kernel
    # XenServer's tools for Windows write it to the guest's part of the xenstore, as `data/host_name`.
    if host := short(other.get("host_name", "")):
        facts["host name"] = host
    addresses: dict[str, set[str]] = {}
    for key, value in list(_table(metrics, "networks").items())[:FACTS_MAX]:
        device, _, kind = str(key).partition("/")
        if device in macs and kind.split("/")[0] in ("ip", "ipv4", "ipv6") and (address := _address(value)):
            addresses.setdefault(macs[device].lower(), set()).add(address)
    return bounded(facts | {f"addresses of {mac}": several(found) for mac, found in addresses.items()})


def _table(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = record.get(key)
    return found if isinstance(found, dict) else {}


def _address(text: object) -> str | None:
    try:
        address = ipaddress.ip_address(str(text))
    except ValueError:
        return None
    return None if address.is_link_local else str(address)
