"""The processor of a guest whose code QEMU translates (TCG), as KVM does not work (libvirt.org/formatdomain.html)."""

from xml.etree import ElementTree as ET  # only written here: what is read goes through xml_document

# With these a guest copies memory by string instructions, as a real processor is fast at them. QEMU translates them byte by
# byte: a Linux guest's boot takes a tenth longer.
SLOW_TRANSLATED = ("erms", "fsrm")


def translated(cpu: ET.Element) -> None:
    """Makes it all that QEMU can emulate, but for what is slow. Its topology stays.

    Emulation cannot use a host's model, and QEMU's default lacks what today's distributions are compiled for (x86-64-v2).
    """
    topology = cpu.find("topology")
    cpu.clear()
    cpu.set("mode", "maximum")
    if topology is not None:
        cpu.append(topology)
    for name in SLOW_TRANSLATED:
        ET.SubElement(cpu, "feature", policy="disable", name=name)
