"""XML from strangers, with limits: OVF, VirtualBox and XenServer descriptions are read through this one door.

Names are compared without their namespace: exporters disagree on namespaces (OVF 0.9, 1.x and 2.x have one each, and some
write an element in another's), while no two local names that are asked for here mean different things in one place.
"""

from collections.abc import Iterator
from xml.etree.ElementTree import Element, ParseError

from defusedxml import ElementTree, common

from synvirt.errors import MalformedArchive

# Real descriptions have 10 to 100 KiB; licence texts and inline icons bring some to a few hundred.
DOCUMENT_MAX_BYTES = 4 << 20
# An element costs about 100 bytes of memory for 4 bytes of text; the largest real description seen has about 3,000.
_ELEMENTS_MAX = 200_000


def parse(data: bytes, name: str) -> Element:
    """The root element. MalformedArchive names the document and the line; entities and DTDs are refused unread."""
    if len(data) > DOCUMENT_MAX_BYTES:
        raise MalformedArchive(f"{name} has {len(data)} bytes; a description of a VM has {DOCUMENT_MAX_BYTES} at most")
    # Each element has a "<" of its own, whatever the encoding: expat's are ASCII-compatible or UTF-16.
    if data.count(b"<") > _ELEMENTS_MAX:
        raise MalformedArchive(f"{name} has over {_ELEMENTS_MAX} elements; no real description of a VM has")
    try:
        root: Element = ElementTree.fromstring(data, forbid_dtd=True)
    except ParseError as problem:
        line, column = problem.position
        raise MalformedArchive(f"{name} is not well-formed XML: line {line}, column {column}: {problem.msg}") from problem
    except common.DefusedXmlException as problem:
        raise MalformedArchive(
            f"{name} has a document type definition or entities, which can fill memory or read files: it is not read",
            hint="No exporter writes them. Remove the <!DOCTYPE …> part if you trust the rest.",
        ) from problem
    except (ValueError, LookupError) as problem:  # an encoding that Python does not know, or that expat cannot use
        raise MalformedArchive(f"{name} has an encoding that cannot be read: {problem}") from problem
    return root


def local(tag: object) -> str:
    """`{http://…}Item` is `Item`. Comments and processing instructions, whose tag is a function, have no name."""
    return tag.rpartition("}")[2] if isinstance(tag, str) else ""


def children(element: Element, *names: str) -> Iterator[Element]:
    return (child for child in element if local(child.tag) in names)


def child(element: Element | None, name: str) -> Element | None:
    return None if element is None else next(children(element, name), None)


def text(element: Element | None, name: str) -> str:
    """The stripped text of the first child of that name; empty where there is none."""
    found = child(element, name)
    return "" if found is None else (found.text or "").strip()


def attribute(element: Element | None, name: str) -> str:
    """The stripped value of the attribute of that local name, in whatever namespace; empty where there is none."""
    if element is None:
        return ""
    if name in element.attrib:
        return element.attrib[name].strip()
    return next((value.strip() for key, value in element.attrib.items() if local(key) == name), "")
