"""What runs in a guest, by the word of its VMware Tools, in the names that every platform's facts have (TellsOfGuest). Pure.

`guest.*` is GuestInfo of the vSphere API; `guestInfo.detailed.data` is a line that Tools from 10.3.25 on write, words of the
form name='value'. The name that VMware itself has for a system is no fact of the guest, and is left out.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

WANTED: Final = ("name", "guest.toolsRunningStatus", "guest.hostName", "guest.net", "guest.disk", "config.extraConfig")
DETAILED = "guestInfo.detailed.data"
_WORD = re.compile(r"(\w+)='([^']{0,200})'")
# A guest chooses what its tools report.
FACTS_MAX, FACT_CHARS = 100, 200


def guest_facts(found: Mapping[str, Any]) -> dict[str, str]:
    """None, while no tools run."""
    if found.get("guest.toolsRunningStatus") != "guestToolsRunning":
        return {}
    facts: dict[str, str] = {}
    if name := found.get("guest.hostName"):
        facts["host name"] = _short(name)
    detailed = next((one.value for one in found.get("config.extraConfig") or () if one.key == DETAILED), "")
    words = dict(_WORD.findall(str(detailed)[: 50 * FACT_CHARS]))
    facts |= {fact: words[word] for fact, word in (("system", "prettyName"), ("kernel", "kernelVersion")) if words.get(word)}
    for disk in (found.get("guest.disk") or ())[:FACTS_MAX]:
        if disk.diskPath and disk.capacity is not None:
            kind = _short(getattr(disk, "filesystemType", None) or "").lower()
            used = int(disk.capacity) - int(disk.freeSpace or 0)
            facts[f"file system {_short(disk.diskPath)}"] = f"{kind}, {used} of {int(disk.capacity)} bytes"
    for nic in (found.get("guest.net") or ())[:FACTS_MAX]:
        if nic.macAddress:
            facts[f"addresses of {_short(nic.macAddress).lower()}"] = ", ".join(sorted(_addresses(nic)))
    return dict(list(facts.items())[:FACTS_MAX])


def _addresses(nic: Any) -> Iterator[str]:
    """With their prefixes; those that others reach it by."""
    config = getattr(nic, "ipConfig", None)
    for one in (config.ipAddress if config is not None else None) or ():
        try:
            address = ipaddress.ip_address(str(one.ipAddress).partition("%")[0])
        except ValueError:
            continue
        if not address.is_link_local:
            yield f"{address}/{int(one.prefixLength)}"


def _short(text: object) -> str:
    return "".join(character for character in str(text) if character.isprintable())[:FACT_CHARS]
