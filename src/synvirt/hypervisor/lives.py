"""Was a domain ever started? libvirt keeps no count; so what a start leaves behind is looked for.

runs, or its memory was saved     it does
the reason why it is off          of this libvirtd's own time: shut down, destroyed, crashed
its console's log                 QEMU makes it at each start; a definition without it was changed by somebody
"""

from pathlib import Path
from typing import Any, Final

from synvirt import xml_document
from synvirt.errors import Internal
from synvirt.hypervisor import Lived
from synvirt.kvm.connection import load

# The values of virDomainShutoffReason for a domain that was on before. (UNKNOWN says nothing, FAILED that it never started.)
_WAS_ON: Final = {
    "SHUTDOWN": "it was shut down",
    "DESTROYED": "it was stopped",
    "CRASHED": "it crashed",
    "MIGRATED": "it went to another host",
    "SAVED": "its memory was saved",
    "FROM_SNAPSHOT": "a snapshot was restored",
}


def lived(domain: Any, log: Path) -> Lived:
    """`log`: where a domain of ours has its console. libvirtError, Internal."""
    libvirt = load()
    if domain.isActive() or domain.hasManagedSaveImage():
        return Lived(runs=True, trace="it runs, or its memory is saved")
    _, reason = domain.state()
    for name, words in _WAS_ON.items():
        if reason == getattr(libvirt, f"VIR_DOMAIN_SHUTOFF_{name}"):
            return Lived(runs=False, trace=words)
    xml = xml_document.parse(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE), "a domain", wrong=Internal)
    if str(log) not in {one.get("file") for one in xml.iterfind("devices/*/log")}:
        return Lived(runs=False, trace="its definition was changed, and has no log of its console any more", is_sure=False)
    try:
        log.stat()
    except FileNotFoundError:
        return Lived(runs=False, trace=None)
    except OSError:
        return Lived(runs=False, trace="the log of its console cannot be inspected", is_sure=False)
    return Lived(runs=False, trace="its console has a log")
