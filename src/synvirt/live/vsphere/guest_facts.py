"""Facts of a guest from its VMware Tools, with the common names of all platforms' facts (ReportsGuestFacts). Pure.

`guest.*` is GuestInfo of the vSphere API; Tools from 10.3.25 on write `guestInfo.detailed.data`, a line of words of the form
name='value'. Tools from 11.1 on write `guestinfo.appInfo` every six hours: JSON with running programs and their versions.
VMware's own name for a system is no fact of the guest, and is left out.
"""

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from synvirt.model.facts import FACT_CHARS, FACTS_MAX, bounded, several, short

WANTED: Final = (
    *("name", "guest.toolsRunningStatus", "guest.hostName", "guest.net", "guest.disk", "guest.ipStack"),
    "config.extraConfig",
)
DETAILED, APPLICATIONS = "guestInfo.detailed.data", "guestinfo.appInfo"
_WORD = re.compile(r"(\w+)='([^']{0,200})'")
# Tools keep it under 62 KiB (open-vm-tools, appInfo).
_APPLICATIONS_CHARS = 64 << 10


def guest_facts(found: Mapping[str, Any]) -> dict[str, str]:
    """None, while no tools run."""
    if found.get("guest.toolsRunningStatus") != "guestToolsRunning":
        return {}
    facts: dict[str, str] = {}
    if name := found.get("guest.hostName"):
        facts["host name"] = short(name)
    extra = {str(one.key): str(one.value) for one in found.get("config.extraConfig") or ()}
    words = dict(_WORD.findall(extra.get(DETAILED, "")[: 50 * FACT_CHARS]))
    facts |= {fact: words[word] for fact, word in (("system", "prettyName"), ("kernel", "kernelVersion")) if words.get(word)}
    for disk in (found.get("guest.disk") or ())[:FACTS_MAX]:
        if disk.diskPath and disk.capacity is not None:
            kind = short(getattr(disk, "filesystemType", None) or "").lower()
            used = int(disk.capacity) - int(disk.freeSpace or 0)
            facts[f"file system {short(disk.diskPath)}"] = f"{kind}, {used} of {int(disk.capacity)} bytes"
    for nic in (found.get("guest.net") or ())[:FACTS_MAX]:
        if nic.macAddress:
            facts[f"addresses of {short(nic.macAddress).lower()}"] = several(_addresses(nic))
    facts |= dict(_routes(found.get("guest.ipStack") or ()))
    return bounded(facts | _applications(extra.get(APPLICATIONS, "")))


def _addresses(nic: Any) -> Iterator[str]:
    """The addresses by which others reach the card, with their prefixes."""
    config = getattr(nic, "ipConfig", None)
    for one in (config.ipAddress if config is not None else None) or ():
        try:
            address = ipaddress.ip_address(str(one.ipAddress).partition("%")[0])
        except ValueError:
            continue
        if not address.is_link_local:
            yield f"{address}/{int(one.prefixLength)}"


def _routes(stacks: Any) -> Iterator[tuple[str, str]]:
    """The routes of IPv4, in the form of `ip route`: without those to one host, or to multicast."""
    for stack in stacks:
        for one in getattr(getattr(stack, "ipRouteConfig", None), "ipRoute", None) or ():
            try:
                network = ipaddress.IPv4Network(f"{one.network}/{one.prefixLength}", strict=False)
            except ValueError:
                continue
            if network.is_multicast or network.prefixlen == network.max_prefixlen:
                continue
            via = getattr(one.gateway, "ipAddress", None)
            yield "route default" if not network.prefixlen else f"route {network}", f"via {short(via)}" if via else "direct"


def _applications(document: str) -> dict[str, str]:
    try:
        listed = json.loads(document)["applications"] if len(document) <= _APPLICATIONS_CHARS else []
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    rows = [one for one in listed[:FACTS_MAX] if isinstance(one, dict)] if isinstance(listed, list) else []
    return {f"application {short(one['a'])}": short(one.get("v") or "") or "runs" for one in rows if one.get("a")}
