"""The parts of a guest besides its disks are found where libvirt has them."""

import base64
from pathlib import Path

import pytest
from defusedxml import ElementTree

from synvirt.backups import domain_parts

CHOSEN = "<domain><name>web</name><os firmware='efi'><type>hvm</type></os></domain>"
NAMED = "<domain><name>web</name><os><nvram>{}</nvram></os></domain>"
BIOS = "<domain><name>web</name><os><type>hvm</type></os></domain>"


def test_variables_of_a_firmware_that_libvirt_chose_are_found_while_the_guest_is_off(tmp_path: Path) -> None:
    """libvirt 9.0 names no file in that definition."""
    folder = tmp_path / "qemu/nvram"
    folder.mkdir(parents=True)
    (folder / "web_VARS.fd").write_bytes(b"boot order")
    found = domain_parts.nvram(ElementTree.fromstring(CHOSEN), tmp_path / "swtpm")
    assert found is not None
    assert base64.b64decode(found) == b"boot order"


@pytest.mark.parametrize("xml", [CHOSEN, BIOS, NAMED.format("/nowhere/web_VARS.fd")])
def test_a_guest_that_was_never_started_or_has_a_bios_has_no_variables(xml: str, tmp_path: Path) -> None:
    assert domain_parts.nvram(ElementTree.fromstring(xml), tmp_path / "swtpm") is None


def test_the_file_that_a_definition_names_is_the_one(tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(b"own")
    root = ElementTree.fromstring(NAMED.format(tmp_path / "own").replace("<os>", "<os firmware='efi'>"))
    assert domain_parts.nvram(root, tmp_path / "swtpm") == base64.b64encode(b"own").decode()
