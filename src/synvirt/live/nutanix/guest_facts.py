"""Facts of a guest from Nutanix Guest Tools, and from what the hypervisor learns about its cards, with the common names of all
platforms' facts (ReportsGuestFacts). Pure.

The tools report the system (`guest_os_version`, `linux:64:Debian GNU/Linux 12`), and no API has more than that. The hypervisor
learns addresses from the packets of the cards.
"""

import ipaddress
from collections.abc import Iterable

from synvirt.live.nutanix.machines import FoundVm
from synvirt.model.facts import bounded, several, short


def guest_facts(vm: FoundVm) -> dict[str, str]:
    """Prefixes are not known: addresses have none."""
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
