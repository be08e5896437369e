"""The identity of a domain: what no two domains on one host may share, and its job. Read from its XML, which may be foreign."""

from dataclasses import dataclass
from xml.etree import ElementTree as ET  # only for its type: XML is read by xml_document

from synvirt import xml_document
from synvirt.errors import Internal

# Marks a domain as ours: the job's id and the rung of its ladder. A name, not an address to fetch.
JOB_NAMESPACE = "https://synvirt.org/xmlns/job/1"
# The name in libvirt of the driver itself: a guest of this name would have the driver's pid file, and remove it at its end.
DRIVER = "driver"


def not_the_drivers(name: str) -> str:
    """The name for a domain: as it is, if it is not the driver's own."""
    return f"vm-{name}" if name == DRIVER else name


@dataclass(frozen=True, slots=True)
class Identity:
    """`job_id`: the job that made the domain, None where it is not ours; `bus`: the rung that it was made for. `macs`: of the
    cards that others can reach; a card that was made unplugged has none."""

    name: str
    uuid: str = ""
    job_id: str | None = None
    bus: str | None = None
    macs: frozenset[str] = frozenset()

    @property
    def claims(self) -> list[str]:
        """What no two jobs may work on at once."""
        found = [("name", self.name), ("UUID", self.uuid), *(("MAC address", mac) for mac in sorted(self.macs))]
        return [f"{what} {which}" for what, which in found if which]


def identity_of(xml: str) -> Identity:
    """The identity in that XML. Internal, where the XML cannot be parsed."""
    root = xml_document.parse(xml, "the hypervisor's description of a domain", wrong=Internal)
    job = root.find(f"metadata/{{{JOB_NAMESPACE}}}job")
    unplugged = job is not None and job.get("unplugged") == "yes"
    return Identity(
        name=root.findtext("name", ""),
        uuid=root.findtext("uuid", ""),
        job_id=None if job is None else job.get("id"),
        bus=None if job is None else job.get("bus"),
        macs=frozenset() if unplugged else _macs(root),
    )


def _macs(root: ET.Element) -> frozenset[str]:
    return frozenset(mac.get("address", "").lower() for mac in root.iterfind("devices/interface/mac"))


def clash(wanted: Identity, other: Identity) -> str | None:
    """Why these two cannot both be here; None, where they can, or belong to the same job."""
    if other.job_id is not None and other.job_id == wanted.job_id:
        return None
    there = f"domain {other.name} ({other.uuid}), which is not this job's,"
    if other.uuid == wanted.uuid:
        return f"{there} has the UUID of the guest"
    if other.name == wanted.name:
        return f"{there} has the name of the guest"
    if shared := sorted(wanted.macs & other.macs):
        return f"{there} has the MAC address {', '.join(shared)} of the guest's network card"
    return None


# What to do about a clash with a domain, and with a job that has not ended.
_BESIDE = "for a copy next to it, set target.identity to new and give the copy a name in target.name"
CLASH_HINT = f"remove that domain; or, {_BESIDE}"
CLAIMED_HINT = f"wait until it has ended, or cancel it; or, {_BESIDE}"
