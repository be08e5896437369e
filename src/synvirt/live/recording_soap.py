"""SOAP messages of vSphere in a recording: finds names, removes secrets, keeps the form.

An answer stays XML with the same prefixes, so that pyvmomi can read it again. A request becomes JSON, for people to read and
for a replay to find: {"soap": "RetrievePropertiesEx", "given": {…}}. Form: vSphere Web Services API reference (vim25), and SOAP
1.1.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from xml.sax import SAXException
from xml.sax.handler import ContentHandler
from xml.sax.saxutils import escape, quoteattr
from xml.sax.xmlreader import AttributesImpl

from defusedxml import common, sax

from synvirt.redacting import GONE

# pyvmomi's types nest some 20 deep; a recursive walk has a thousand frames.
_DEPTH_MAX: Final = 100
# Within a recording's limit of bytes there could be elements of gigabytes in memory; a page of 500 VMs has some 20,000.
_ELEMENTS_MAX: Final = 1_000_000
_ENVELOPE: Final = re.compile(rb"\A\s*(?:<\?xml[^>]{0,300}\?>\s*)?<(?:[\w.-]{1,40}:)?Envelope[\s>]")

# Leaves whose whole text is a name from a person.
_NAMES: Final = frozenset(
    {"name", "userName", "fullName", "hostName", "domainName", "searchDomain"}
    | {"deviceName", "networkName", "network", "switchName"}
)
# The last parts of properties that are names.
_NAMED_PROPERTIES: Final = frozenset({"name", "hostName"})
_PROSE: Final = frozenset({"annotation", "description", "faultstring", "localizedMessage", "message", "keyId"})
_SECRET: Final = re.compile(r"passw|secret|ticket|cookie|thumbprint|certificate", re.IGNORECASE)
# An extraConfig may have anything, for example cloud-init's user data and passwords. Entries that we read stay.
_SETTINGS_KEPT: Final = re.compile(r"(?:\A|\.)ctkEnabled\Z|\AHDCS\.agent\Z", re.IGNORECASE)
_SETTINGS: Final = frozenset({"extraConfig", "OptionValue"})
# vSphere's own names of objects in each datacenter, by which our adapter knows them.
_VMWARES: Final = frozenset({"vm", "host", "network", "datastore", "Datacenters", "Resources", "VM Network", "view"})
_IN_DATASTORE: Final = re.compile(r"\A\[([^\]]{1,255})\] ?(.*)\Z", re.DOTALL)
# VMware's suffixes of a disk's name for its parts and snapshots.
_PART: Final = re.compile(r"(?:-(?:flat|ctk|delta|sesparse|rdmp?|[0-9]{6}))*\.\w{1,10}\Z")
# A VMFS volume's own id, which ends with a MAC of the host that made it.
_VOLUME: Final = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)


class Scrub(Protocol):
    """The part of `recording.Scrubbed` that is used here."""

    def text(self, given: str) -> str: ...
    def stand_in(self, kind: str, given: str) -> str: ...


@dataclass(slots=True)
class Element:
    """`name` and `attributes` as written, with their prefixes. The text of an element with children has no meaning."""

    name: str
    attributes: Mapping[str, str]
    children: list["Element"] = field(default_factory=list)
    text: str = ""

    @property
    def tag(self) -> str:
        return self.name.rpartition(":")[2]

    @property
    def kind(self) -> str:
        """Its type from xsi:type, without the prefix."""
        return self.attributes.get("xsi:type", "").rpartition(":")[2]

    def leaf(self, tag: str) -> str:
        return next((one.text for one in self.children if one.tag == tag), "")


class _Builder(ContentHandler):
    def __init__(self) -> None:
        super().__init__()
        self.root: Element | None = None
        self._open: list[Element] = []
        self._count = 0

    def startElement(self, name: str, attrs: AttributesImpl) -> None:  # noqa: N802 - SAX's name
        self._count += 1
        if len(self._open) >= _DEPTH_MAX or self._count > _ELEMENTS_MAX:
            raise SAXException("too deep, or too many elements")
        made = Element(name, dict(attrs.items()))
        if self._open:
            self._open[-1].children.append(made)
        else:
            self.root = made
        self._open.append(made)

    def endElement(self, name: str) -> None:  # noqa: N802
        self._open.pop()

    def characters(self, content: str) -> None:
        if self._open:
            self._open[-1].text += content


def read(message: bytes) -> Element | None:
    """None, where it is no SOAP message, or has a document type."""
    if not _ENVELOPE.match(message):
        return None
    builder = _Builder()
    try:
        sax.parseString(message, builder, forbid_dtd=True)
    except (SAXException, common.DefusedXmlException, ValueError):
        return None
    return builder.root


def written(element: Element) -> str:
    """The element as XML text."""
    attributes = "".join(f" {name}={quoteattr(value)}" for name, value in element.attributes.items())
    inside = "".join(map(written, element.children)) if element.children else escape(element.text)
    return f"<{element.name}{attributes}>{inside}</{element.name}>"


def question(envelope: Element) -> dict[str, Any]:
    """Its operation and arguments, as JSON; repeated ones become a list."""
    body = next((one for one in envelope.children if one.tag == "Body"), envelope)
    asked = next(iter(body.children), body)
    return {"soap": asked.tag, "given": _plain(asked)}


def _plain(element: Element) -> Any:
    if not element.children:
        return element.text
    found: dict[str, Any] = {}
    for one in element.children:
        value = _plain(one)
        if one.tag not in found:
            found[one.tag] = value
        elif isinstance(found[one.tag], list):
            found[one.tag].append(value)
        else:
            found[one.tag] = [found[one.tag], value]
    return found


# ── names and secrets ────────────────────────────────────────────────────────────────────────────────────────────────


def names(element: Element, above: str = "") -> Iterator[str]:
    """The names in it that people gave to their objects."""
    if _is_about(element):
        return
    if element.tag == "propSet":
        # <name>summary.name</name><val>its name</val>; a request has a type and paths instead
        if element.leaf("name").rpartition(".")[2] in _NAMED_PROPERTIES:
            yield from _given(element.leaf("val"))
        for one in element.children:
            if one.tag == "val":
                yield from names(one, "val")
        return
    if element.leaf("loginTime"):  # a UserSession: its key gives all rights of our user
        yield element.leaf("key")
    if not element.children and "type" not in element.attributes:
        if element.tag in _NAMES and above != "selectSet":
            yield from _given(element.text)
        elif element.text.startswith("["):
            yield from _of_path(element.text)
    for one in element.children:
        yield from names(one, element.tag)


def _given(text: str) -> Iterator[str]:
    if text.startswith("["):
        yield from _of_path(text)
    elif text not in _VMWARES:
        yield text


def _of_path(text: str) -> Iterator[str]:
    """«[datastore] folder/disk-000001-delta.vmdk»."""
    found = _IN_DATASTORE.match(text)
    if found is None:
        return
    *folders, file = found[2].split("/")
    yield from (one for one in (found[1], *folders, _PART.sub("", file)) if one not in _VMWARES)


def scrubbed(element: Element, scrub: Scrub, above: str = "") -> Element:
    """The same without names and secrets."""
    if element.children:
        kept = [one for one in element.children if not _is_dropped(one)]
        children = [scrubbed(one, scrub, element.tag) for one in kept]
        return Element(element.name, element.attributes, children)
    return Element(element.name, element.attributes, [], _scrubbed_text(element, scrub, above))


def _scrubbed_text(element: Element, scrub: Scrub, above: str) -> str:
    tag, text = element.tag, element.text
    if not text or tag in ("pathSet", "type", "path") or (tag == "name" and above in ("propSet", "selectSet")):
        return text  # the interface's own words
    if "type" not in element.attributes:
        if _SECRET.search(tag):
            return GONE
        if tag in _PROSE or above == "providerId":  # a key server's
            return scrub.stand_in("text", text)
    return scrub.text(_VOLUME.sub(lambda one: scrub.stand_in("volume", one.group().lower()), text))


def _is_dropped(element: Element) -> bool:
    is_setting = element.tag in _SETTINGS or element.kind == "OptionValue"
    return is_setting and bool(element.leaf("key")) and not _SETTINGS_KEPT.search(element.leaf("key"))


def _is_about(element: Element) -> bool:
    """Whether it is an AboutInfo, whose names are the product's."""
    return bool(element.leaf("apiVersion") or element.leaf("productLineId"))
