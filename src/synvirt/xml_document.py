"""XML from outside, with limits: descriptions of VMs, restore points, answers of servers. All of it is parsed here.

Names are compared without their namespace: exporters disagree on namespaces (OVF 0.9, 1.x and 2.x have one each, and some write
an element in another's), and no local name that we look for means two different things in one place.
"""

import codecs
import re
from collections.abc import Iterator
from xml.etree.ElementTree import Element, ParseError, TreeBuilder

from defusedxml import common
from defusedxml.ElementTree import DefusedXMLParser

from synvirt.errors import MalformedArchive, SynvirtError

# Real descriptions have 10 to 100 KiB; with licence texts and inline icons, some have a few hundred.
DOCUMENT_MAX_BYTES = 4 << 20
# An element costs about 100 bytes of memory besides its name; the largest real description seen has about 3,000.
_ELEMENTS_MAX, _ATTRIBUTES_MAX = 100_000, 100_000
# expat writes the namespace before each name: 4 MiB of document made 4.2 GiB of names. Real ones have under 100 bytes.
_NAMESPACE_MAX_BYTES, _NAMESPACES_MAX = 256, 2_000
# Real descriptions are 5 to 20 deep, and recursion over one has at most a thousand frames.
_DEPTH_MAX = 100
# The encodings that exporters write. Any other could hide what is counted here: EBCDIC has another byte for "<".
_ENCODINGS = frozenset(
    {"utf-8", "utf-16", "utf-16-le", "utf-16-be", "ascii", "iso8859-1", "iso8859-15", "cp1250", "cp1251", "cp1252", "gb2312"}
    | {"gbk", "gb18030", "big5", "shift_jis", "euc_jp", "euc_kr"}
)
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_UNMARKED = ((b"<\0", "utf-16-le"), (b"\0<", "utf-16-be"))
_DECLARED = re.compile(rb"""\A\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9._-]{1,40})["']""")
_DECLARATION = re.compile(rb"\A\s*<\?xml\s[^>]{0,300}>")
# If `xmlns` is an attribute, its value begins after group 1; without "=" after it, it is text.
_NAMESPACE = re.compile(rb"""xmlns[^=<>"']{0,300}(?:=\s{0,300}(?:(["'])|[^\s"'])|[<>"'])""")


def parse(content: bytes | str, name: str, *, wrong: type[SynvirtError] = MalformedArchive) -> Element:
    """The root element. Else `wrong`, with the document and the line. Entities and DTDs are refused before they are read."""
    data = _as_utf8(content, name, wrong)
    _check_size(data, name, wrong)
    try:
        # The encoding is given, so that no declaration inside can change it.
        parser = DefusedXMLParser(target=TreeBuilder(), encoding="utf-8", forbid_dtd=True)
        parser.feed(_DECLARATION.sub(b"", data, count=1))
        root: Element = parser.close()
    except ParseError as problem:
        line, column = problem.position
        raise wrong(f"{name} is not well-formed XML: line {line}, column {column}: {problem.msg}") from problem
    except common.DefusedXmlException as problem:
        raise wrong(
            f"{name} has a document type definition or entities, which can fill memory or read files: it is not read",
            hint="No exporter writes them. Remove the <!DOCTYPE …> part if you trust the rest.",
        ) from problem
    except ValueError as problem:
        raise wrong(f"{name} is not well-formed XML: {problem}") from problem
    _check_depth(root, name, wrong)
    return root


def _as_utf8(content: bytes | str, name: str, wrong: type[SynvirtError]) -> bytes:
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError as problem:
            raise wrong(f"{name} has an encoding that cannot be read: {problem.reason}") from problem
    if len(content) > DOCUMENT_MAX_BYTES:
        raise wrong(f"{name} has {len(content)} bytes; a description of a VM has {DOCUMENT_MAX_BYTES} at most")
    encoding, _ = _encodings(content)
    try:
        known = encoding == "utf-8-sig" or codecs.lookup(encoding).name in _ENCODINGS
        if known:
            return content.decode(encoding).encode()
    except (ValueError, LookupError) as problem:
        raise wrong(f"{name} has an encoding that cannot be read: {problem}") from problem
    raise wrong(f"{name} has an encoding that cannot be read: {encoding}, which no exporter of VMs writes")


def wrong_encoding(content: bytes) -> str | None:
    """The encoding that a document declares but does not have: XenCenter writes UTF-8 and declares utf-16. The bytes decide.
    None: the declaration may be right."""
    _, declared = _encodings(content)
    is_wide = any(content.startswith(mark) for mark, codec in (*_MARKS, *_UNMARKED) if codec != "utf-8-sig")
    return declared if declared and _is_wide(declared) != is_wide else None


def _encodings(content: bytes) -> tuple[str, str]:
    """The encoding to read the document in, by its first bytes, and the one that it declares (empty: none)."""
    marked = next((codec for mark, codec in (*_MARKS, *_UNMARKED) if content.startswith(mark)), None)
    head = content[:1024] if marked is None else content[:1024].decode(marked, "replace").encode()
    found = _DECLARED.match(head)
    declared = found[1].decode() if found else ""
    # A declaration that can be read byte by byte is not in an encoding with two bytes for a character.
    return marked or ("utf-8" if _is_wide(declared) else declared or "utf-8"), declared


def _is_wide(encoding: str) -> bool:
    return encoding.lower().startswith(("utf-16", "utf16", "ucs-2", "utf-32", "utf32", "ucs-4", "iso-10646-ucs"))


def _check_size(data: bytes, name: str, wrong: type[SynvirtError]) -> None:
    """Checks before expat parses, as afterwards is too late. All counts are rather too high than too low."""
    if len(data) > DOCUMENT_MAX_BYTES:
        raise wrong(f"{name} has {len(data)} bytes; a description of a VM has {DOCUMENT_MAX_BYTES} at most")
    for what, count, most in (
        ("elements", data.count(b"<"), _ELEMENTS_MAX),
        ("attributes", data.count(b"="), _ATTRIBUTES_MAX),
        ("namespaces", data.count(b"xmlns"), _NAMESPACES_MAX),
    ):
        if count > most:
            raise wrong(f"{name} has over {most} {what}; no real description of a VM has")
    at = data.find(b"xmlns")
    while at >= 0:  # each on its own: a comment before a declaration must not hide it
        found = _NAMESPACE.match(data, at)
        length = _NAMESPACE_MAX_BYTES + 1 if found is None else 0
        if found is not None and found[1]:
            length = data.find(found[1], found.end()) - found.end()
        if length > _NAMESPACE_MAX_BYTES:
            raise wrong(f"{name} has a namespace of over {_NAMESPACE_MAX_BYTES} bytes; no real description of a VM has")
        at = data.find(b"xmlns", at + 1)


def _check_depth(root: Element, name: str, wrong: type[SynvirtError]) -> None:
    row, depth = [root], 0
    while row:
        depth += 1
        if depth > _DEPTH_MAX:
            raise wrong(f"{name} has elements nested over {_DEPTH_MAX} deep; no real description of a VM has")
        row = [child for element in row for child in element]


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
    """The stripped value of the attribute of that local name, in any namespace; empty where there is none."""
    if element is None:
        return ""
    if name in element.attrib:
        return element.attrib[name].strip()
    return next((value.strip() for key, value in element.attrib.items() if local(key) == name), "")
