"""Facts of a guest, by name: what runs in it, and what it is made of. Every reporter of facts uses these names. Pure.

    host name, system, kernel, time zone, clock                      one of each
    firmware, boot order, processors, memory                         of the machine
    disk KEY, card MAC, addresses of MAC, file system MOUNT, route TO, listens on PROTOCOL PORT, service UNIT, user NAME,
    application NAME                                                 of a running guest
    enabled UNIT, mount PLACE, network file PATH, volume WHERE       of what its disks say
    configures NAME                                                  a network card that files configure by its name: which
    finds FILE WHAT                                                  a device by which it finds a disk, as that file has it
    drivers in FILE                                                  those that its initramfs has for disks here
    not read WHERE                                                   a part of its disks that cannot be read here, and why

The texts come from the guest, and so they are hostile: their length and their number are limited.
"""

from collections.abc import Iterable, Mapping

# A server has some hundred services, users and programs. Where a guest reports more facts than this, the rest is not compared.
FACTS_MAX, FACT_CHARS = 1000, 200
# The system itself gives out ports from here on, another one each time (ip(7), ip_local_port_range; RFC 6335).
PORTS_GIVEN_OUT = 32768
NOT_READ = "not read"


def short(text: object) -> str:
    return "".join(character for character in str(text) if character.isprintable())[:FACT_CHARS]


def bounded(facts: Mapping[str, str]) -> dict[str, str]:
    return dict(list(facts.items())[:FACTS_MAX])


def file_system(kind: object, used: object, total: object) -> str:
    """A file system as a fact: its kind, and the used and total bytes where both are known."""
    room = f", {used} of {total} bytes" if isinstance(used, int) and isinstance(total, int) else ""
    return f"{short(kind)}{room}"


def several(values: Iterable[str]) -> str:
    """The values in one text, sorted, so that their order does not depend on who reports them."""
    return ", ".join(sorted(set(values)))
