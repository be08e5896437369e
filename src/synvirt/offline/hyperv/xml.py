"""The configuration of a Hyper-V machine before Windows Server 2016: XML, with the same keys as today's .vmcx.

    <configuration><properties><name type="string">web</name>…<subtype type="integer">0</subtype>…

Every value has its type: string, integer, bool or bytes (base64). Nodes have none. Windows writes it in UTF-16.
"""

import base64
import binascii
import re
from xml.etree.ElementTree import Element

from synvirt.errors import MalformedArchive
from synvirt.offline.hyperv.storage import Tree, Value
from synvirt.xml_document import attribute, local
from synvirt.xml_document import parse as parse_xml


def read(data: bytes, name: str) -> Tree:
    """The tree, in the form of `storage.read`."""
    root = parse_xml(data, name)
    if local(root.tag) != "configuration":
        raise MalformedArchive(f"{name} is not a configuration of Hyper-V: its root element is {local(root.tag)[:60]!r}")
    tree: Tree = {}
    waiting: list[tuple[Element, Tree]] = [(root, tree)]
    while waiting:
        element, inner = waiting.pop()
        for child in element:
            key, kind = local(child.tag), attribute(child, "type")
            if kind:
                inner.setdefault(key, _value(child, kind, f"{name}: {key[:60]}"))
            elif key and key not in inner:
                node: Tree = {}
                inner[key] = node
                waiting.append((child, node))
    return {"configuration": tree}


def _value(element: Element, kind: str, where: str) -> Value:
    written = (element.text or "").strip()
    match kind:
        case "integer":
            # 64 bits, signed or not. int() would also take underscores and foreign digits, and needs long for many digits.
            if not re.fullmatch(r"-?[0-9]{1,20}", written):
                raise MalformedArchive(f"{where} is to be an integer, but is {written[:60]!r}")
            return int(written)
        case "bool":
            return written.lower() == "true"
        case "bytes":
            try:
                return base64.b64decode("".join(written.split()), validate=True)
            except (binascii.Error, ValueError) as problem:
                raise MalformedArchive(f"{where} is not base64") from problem
        case _:
            return element.text or ""
