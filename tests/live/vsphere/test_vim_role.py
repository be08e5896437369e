"""The role that docs/platforms/vsphere.md has an operator give our user: what the code asks for, and no more."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pyVmomi import vim

from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.privileges import EXPORT, PRIVILEGES
from tests.contracts.live import in_session
from tests.fakes.vcenter import VCenter

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)

PLATFORMS = Path(__file__).parents[3] / "docs" / "platforms"
ROLE = json.loads((PLATFORMS / "vsphere-role.json").read_text())
ASKED = {name for name, _ in (*PRIVILEGES, EXPORT)}
# Every method that we call and VMware demands a privilege for, as pyvmomi has it from VMware's own description.
CALLED = (
    (vim.VirtualMachine, "CreateSnapshot"),
    (vim.VirtualMachine, "ConsolidateDisks"),
    (vim.VirtualMachine, "QueryChangedDiskAreas"),
    (vim.VirtualMachine, "ShutdownGuest"),
    (vim.VirtualMachine, "PowerOff"),
    (vim.VirtualMachine, "PowerOn"),
    (vim.vm.Snapshot, "Remove"),
    (vim.vm.Snapshot, "ExportSnapshot"),
    (vim.event.EventManager, "CreateCollector"),
    (vim.AuthorizationManager, "HasPrivilegeOnEntities"),
)


def test_the_role_is_what_the_code_asks_for() -> None:
    """Those of System are in every role."""
    assert ROLE["privileges"] == sorted(name for name in ASKED if not name.startswith("System."))


def test_the_page_says_what_each_is_for() -> None:
    page = (PLATFORMS / "vsphere.md").read_text()
    for name in ASKED:
        *_, last = name.split(".")
        assert last in page, name


@pytest.mark.parametrize(("kind", "method"), CALLED, ids=[method for _, method in CALLED])
def test_what_vmware_demands_for_a_call_is_asked_for(kind: Any, method: str) -> None:
    assert kind._GetMethodInfo(method).privId in ASKED


def test_a_vcenter_takes_the_role(platform: VCenter) -> None:
    """It refuses a name that it does not know."""

    async def make(adapter: VimApi) -> set[str]:
        session = adapter._session

        def made(content: Any) -> set[str]:
            manager = content.authorizationManager
            manager.AddAuthorizationRole(ROLE["name"], ROLE["privileges"])
            return next({*role.privilege} for role in manager.roleList if role.name == ROLE["name"])

        return await asyncio.to_thread(session.call, "make a role", made)

    found = in_session(lambda: VimApi(platform.access()), make)
    assert {name for name in found if not name.startswith("System.")} == {*ROLE["privileges"]}
