"""What is known of a guest by Nutanix Guest Tools and by what the hypervisor learns of its cards, in the names that every
platform's facts have (TellsOfGuest). Pure.

The tools say which system it is (`guest_os_version`, `linux:64:Debian GNU/Linux 12`), and no more than that is in any API;
addresses are learned from what the cards send.
"""

import ipaddress
from collections.abc import Iterable

from synvirt.live.nutanix.machines import FoundVm
from synvirt.model.facts import bounded, several, short


def guest_facts(vm: FoundVm) -> dict[str, str]:
    """Prefixes are not known: addresses stand alone."""
    facts: dict[str, str] = {}
    if vm.tools and (system := short(vm.guest).rpartition(":")[2].strip()):
        facts["system"] = system
    for nic in vm.nics:
        if nic.mac and (found := list(_usable(nic.ip_addresses))):
            facts[f"addresses of {nic.mac.lower()}"] = several(found)
    return bounded(facts)


def _usable(addresses: Iterable[str]) -> Iterable[str]:
    for one in addresses:
        try:
            address = ipaddress.ip_address(one)
        except ValueError:
            continue
        if not address.is_link_local:
            yield str(address)
