"""The definition of a guest that a restore point keeps."""

from typing import Any

from synvirt.kvm.connection import load
from synvirt.live.libvirt.manifest import data_disks, parse


def definition(domain: Any, root: Any) -> str:
    """The definition for the next start, if it has the disks of the running guest."""
    libvirt = load()
    if domain.isPersistent():
        text = str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE))
        if _targets(parse(text)) == _targets(root):
            return text
    return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_MIGRATABLE))


def _targets(root: Any) -> list[str]:
    return [key for key, _ in data_disks(root)]
