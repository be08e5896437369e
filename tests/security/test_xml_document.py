"""XML from outside: what would fill memory is refused before it is parsed, and what exporters write is read."""

import resource
from collections.abc import Callable

import pytest

from synvirt import xml_document
from synvirt.errors import Internal, MalformedArchive

HALF_MEGABYTE = 500 << 10


def namespace_bomb(between: str = "") -> bytes:
    """Each name of its own, and before each the same long namespace."""
    names = "".join(f"<a:e{number}/>" for number in range(3000))
    return f"<r>{between}<x xmlns:a='{'u' * HALF_MEGABYTE}'>{names}</x></r>".encode()


def attribute_bomb() -> bytes:
    names = " ".join(f"a:e{number}='1'" for number in range(3000))
    return f"<r xmlns:a='{'u' * HALF_MEGABYTE}' {names}/>".encode()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a long namespace": namespace_bomb,
    "hidden behind a comment": lambda: namespace_bomb('<!-- xmlns=" -->'),
    "hidden behind spaces": lambda: namespace_bomb().replace(b"xmlns:a=", b"xmlns:a" + b" " * 400 + b"="),
    "on attributes": attribute_bomb,
    "in UTF-16": lambda: namespace_bomb().decode().encode("utf-16"),
    "in EBCDIC": lambda: b"<?xml version='1.0' encoding='cp037'?>" + "<r/>".encode("cp037"),
    "many namespaces": lambda: b"<r>" + b"<a xmlns='u'/>" * 3000 + b"</r>",
    "many elements": lambda: b"<r>" + b"<a/>" * 150_000 + b"</r>",
    "many attributes": lambda: b"<r " + b" ".join(b"a%d='1'" % number for number in range(150_000)) + b"/>",
    "deep": lambda: b"<a>" * 5000 + b"</a>" * 5000,
    "entities": lambda: b"<!DOCTYPE r [<!ENTITY a 'aaaa'>]><r>&a;</r>",
    "no XML": lambda: b"\x00\x01",
    "a character XML has not": lambda: "<r>\ud800</r>".encode("utf-8", "surrogatepass"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_fill_memory_is_refused_before_it_does(name: str) -> None:
    content = HOSTILE[name]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MalformedArchive, match="hostile"):
        xml_document.parse(content, "hostile.xml")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 256 << 10, "KiB: the same documents took gigabytes"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "windows-1252", "iso-8859-1", "us-ascii", "UTF-8"])
def test_the_encodings_of_exporters_are_read(encoding: str) -> None:
    text = f"<?xml version='1.0' encoding='{encoding}'?>\n<r xmlns='http://schemas.dmtf.org/ovf/envelope/1' a='x'>caf</r>"
    root = xml_document.parse(text.encode(encoding), "good.xml")
    assert (xml_document.local(root.tag), root.text, root.get("a")) == ("r", "caf", "x")


@pytest.mark.parametrize("text", ["xmlns is a word", "<b>xmlns</b>", "see xmlns = here"])
def test_text_may_speak_of_namespaces(text: str) -> None:
    assert xml_document.parse(f"<r>{text}</r>", "good.xml") is not None


def test_the_caller_says_which_error_it_is() -> None:
    with pytest.raises(Internal, match="libvirt's XML is not well-formed"):
        xml_document.parse("<r", "libvirt's XML", wrong=Internal)
