"""The scripts that are run on Hyper-V hosts: no PowerShell is to be had here, so their syntax is checked by a grammar, and what
they name (classes, methods, cmdlets, parameters, properties) against Microsoft's pages: tests/fakes/hyperv/schema.json."""

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tree_sitter
import tree_sitter_powershell

from synvirt.live.hyperv import session
from synvirt.live.hyperv.session import SCRIPTS, script

ALL = ("common", *SCRIPTS)
SCHEMA = json.loads((Path(__file__).parents[2] / "fakes" / "hyperv" / "schema.json").read_text())
# What a variable of that name is, in every script.
TYPES = {
    "vm": "VirtualMachine",
    "memory": "VMMemory",
    "processor": "VMProcessor",
    "uefi": "VMFirmware",
    "vmsecurity": "VMSecurity",
    "vmhost": "VMHost",
    "drive": "HardDiskDrive",
    "file": "VirtualHardDisk",
    "vlan": "VMNetworkAdapterVlanSetting",
}
CLASSES = {
    "system": "Msvm_ComputerSystem",
    "job": "Msvm_ConcreteJob",
    "kvp": "Msvm_KvpExchangeComponent",
    "realized": "Msvm_VirtualSystemSettingData",
}
# Cmdlets whose output goes through a pipeline: the type of `$_` in there.
PIPED = {
    "Get-VM": "VirtualMachine",
    "Get-VMNetworkAdapter": "VMNetworkAdapter",
    "Get-VMIntegrationService": "VMIntegrationComponent",
    "Get-VMSnapshot": "VMSnapshot",
    "Get-VMDvdDrive": "DvdDrive",
}
# PowerShell's own, and of the failover cluster's module.
OTHERS = {
    "ConvertTo-Json",
    "ForEach-Object",
    "Get-CimAssociatedInstance",
    "Get-CimClass",
    "Get-CimInstance",
    "Get-ClusterNode",
    "Get-Command",
    "Invoke-CimMethod",
    "New-CimInstance",
    "New-Object",
    "Select-Object",
    "Start-Sleep",
    "Where-Object",
}


def parsed(text: str) -> Any:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_powershell.language())).parse(text.encode()).root_node


def nodes(root: Any, kind: str) -> Iterator[Any]:
    if root.type == kind:
        yield root
    for child in root.children:
        yield from nodes(child, kind)


def text_of(node: Any) -> str:
    return str(node.text.decode())


@pytest.mark.parametrize("name", ALL)
def test_a_script_is_well_formed(name: str) -> None:
    root = parsed(script(name))
    wrong = [text_of(node)[:80] for node in nodes(root, "ERROR")]
    assert (wrong, root.has_error) == ([], False)


def test_the_grammar_refuses_what_is_no_script() -> None:
    assert parsed("if ($true) { Get-VM -Id").has_error


def test_every_file_is_a_script_that_is_run() -> None:
    files = {one.name.removesuffix(".ps1") for one in (resources.files(session.__package__) / "scripts").iterdir()}
    assert files == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_cmdlets_and_their_parameters_are_known(name: str) -> None:
    own = set(re.findall(r"^function ([\w-]+)", script("common"), re.MULTILINE))
    for command in nodes(parsed(script(name)), "command"):
        called = text_of(command.children[0])
        if called in SCHEMA["cmdlets"]:
            used = [text_of(one).lstrip("-") for one in nodes_here(command, "command_parameter")]
            # Of all cmdlets.
            assert set(used) - {"ErrorAction"} <= set(SCHEMA["cmdlets"][called]), called
        else:
            assert called in own | OTHERS, called


def nodes_here(command: Any, kind: str) -> Iterator[Any]:
    """Of this command, and of none in its arguments."""
    for child in command.children:
        if child.type == "command_elements":
            yield from (one for one in child.children if one.type == kind)


@pytest.mark.parametrize("name", ALL)
def test_properties_are_those_of_the_published_types(name: str) -> None:
    text = script(name)
    for variable, type_name in TYPES.items():
        assert set(re.findall(rf"\${variable}\.(\w+)\b(?!\()", text)) <= set(SCHEMA["types"][type_name]), variable
    for variable, class_name in CLASSES.items():
        used = set(re.findall(rf"\${variable}\.(\w+)\b(?!\()", text))
        assert used <= set(SCHEMA["classes"][class_name]["properties"]), variable
    for pipeline in nodes(parsed(text), "pipeline_chain"):
        first = next(nodes(pipeline, "command"), None)
        piped = PIPED.get(text_of(first.children[0])) if first is not None else None
        if piped is not None and pipeline.children[0] == first:
            used = set(re.findall(r"\$_\.(\w+)", text_of(pipeline))) | set(re.findall(r"-Property (\w+)", text_of(pipeline)))
            assert used <= set(SCHEMA["types"][piped]), text_of(pipeline)[:60]


@pytest.mark.parametrize("name", ALL)
def test_classes_methods_and_their_parameters_are_known(name: str) -> None:
    text = script(name)
    assert set(re.findall(r"Msvm_\w+", text)) <= set(SCHEMA["classes"])
    served = {"guest": "Msvm_ShutdownComponent"}
    for found in re.finditer(
        r"\$service = Get-SynVirtService -Class (\w+)|-InputObject \$(\w+) -MethodName (\w+) -Arguments @\{([^}]*)\}", text
    ):
        if found[1]:
            served["service"] = found[1]
            continue
        takes, _ = SCHEMA["classes"][served[found[2]]]["methods"][found[3]]
        assert set(re.findall(r"(\w+) = ", found[4])) <= set(takes), found[3]
        # What a method gives back is read under its own names.
    if name == "changes":
        gives = SCHEMA["classes"]["Msvm_ImageManagementService"]["methods"]["GetVirtualDiskChanges"][1]
        assert set(re.findall(r"\$answer\.(\w+)", text)) <= {"ReturnValue", *gives}


@pytest.mark.parametrize(
    ("name", "class_name", "count"),
    [("take", "Msvm_VirtualSystemSnapshotSettingData", 2), ("export", "Msvm_VirtualSystemExportSettingData", 7)],
)
def test_settings_have_the_properties_of_their_class(name: str, class_name: str, count: int) -> None:
    text = script(name)
    assert f"-ClassName {class_name}" in text
    block = re.search(r"(?:\$wishes =|-Property) @\{(.*?)\}\n", text, re.DOTALL)
    assert block is not None
    used = {*re.findall(r"(\w+) = ", block[1]), *re.findall(r"\$wishes\.(\w+)", text)}
    assert len(used) == count
    assert used <= set(SCHEMA["classes"][class_name]["properties"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_parameters_are_data(name: str) -> None:
    """No script makes code of a text: ids are GUIDs by their type, wishes are of a set, and nothing is evaluated."""
    text = script(name)
    assert not re.search(r"Invoke-Expression|\biex\b|ScriptBlock\]|\.Invoke\(|Add-Type|&\s*\$", text)
    block = re.search(r"^param\((.*)\)\s*$", text, re.MULTILINE)
    assert block is not None
    for parameter in filter(None, block[1].split(", ")):
        assert re.match(r"(\[ValidateSet\(|\[guid\]|\[string\]|\[u?int(64)?\]|'\w+'|2\))", parameter), parameter
    # A text goes into no filter of WMI's.
    assert not re.search(r"-Filter\b", text)
