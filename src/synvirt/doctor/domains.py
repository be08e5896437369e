"""Whether the domains of our guests find their files: those that name a folder which was moved do not."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element

from synvirt.doctor.finding import Missing
from synvirt.kvm.connection import Connection
from synvirt.kvm.identity import JOB_NAMESPACE
from synvirt.kvm.qemu_user import embedded_root
from synvirt.nearest import in_short
from synvirt.settings import Settings
from synvirt.xml_document import parse

# virDomainXMLFlags' VIR_DOMAIN_XML_INACTIVE, known without the library: what the next start uses.
_INACTIVE = 2


def files_of_domains(settings: Settings) -> str:
    """How many domains were looked at. Missing: some name files of a folder that has another path now."""
    folders = [settings.data_dir, *(one.path for one in settings.destinations.values() if one.kind == "directory")]
    count, moved = 0, dict[tuple[Path, Path], list[str]]()
    for document in _documents(settings):
        root = parse(document, "a domain's definition")
        if root.find(f"metadata/{{{JOB_NAMESPACE}}}job") is None:
            continue
        count += 1
        for was_and_is in dict.fromkeys(filter(None, (_moved(path, folders) for path in _paths(root)))):
            moved.setdefault(was_and_is, []).append(root.findtext("name", ""))
    if moved:
        raise Missing("; ".join(_reported(was, new, names) for (was, new), names in moved.items()))
    return f"the files of {count} {'domain' if count == 1 else 'domains'} of ours"


def _documents(settings: Settings) -> Iterator[bytes | str]:
    """The definitions of domains. The embedded driver's are read from its folder, as a second driver may not open it."""
    root = embedded_root(settings.hypervisor_uri)
    if root is not None:
        for path in sorted((root / "etc/qemu").glob("*.xml")):
            with contextlib.suppress(OSError):
                yield path.read_bytes()
        return
    connection = Connection(settings.hypervisor_uri, lambda: None)
    try:
        yield from [domain.XMLDesc(_INACTIVE) for domain in connection.use().listAllDomains()]
    finally:
        connection.close()


def _paths(root: Element) -> Iterator[Path]:
    for element in root.iter():
        values = (element.get("file"), element.get("path"), element.text if element.tag == "nvram" else None)
        yield from (Path(value) for value in values if value is not None and value.startswith("/"))


def _moved(path: Path, folders: list[Path]) -> tuple[Path, Path] | None:
    """The folder that the path was in, and its path now; None: the file is there, or is nowhere."""
    if path.exists():
        return None
    for above in path.parents:
        within = path.relative_to(above)
        if len(within.parts) >= 2:
            for folder in folders:
                if (folder / within).exists():
                    return above, folder
    return None


def _reported(was: Path, new: Path, names: list[str]) -> str:
    what = "the domain" if len(names) == 1 else "the domains"
    return f"{what} {in_short(names)} {'names' if len(names) == 1 else 'name'} files in {was}, which is {new} now"
