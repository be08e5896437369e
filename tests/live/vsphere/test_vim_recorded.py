"""`sources record` of a vCenter: what pyvmomi was answered replays without the platform, and holds nothing of its owner's."""

import asyncio
import json
from pathlib import Path

import pytest

from synvirt.live import About, SourceAccess, VmRow, recording_soap
from synvirt.live.recording import Recording, Scrubbed, lines, named
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.session import library
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from tests.contracts.live import in_session
from tests.fakes.vcenter import PASSWORD, USER, VCenter
from tests.servers.replay import replayed

pytestmark = pytest.mark.timeout(600)  # the simulator is built by the first that needs it

VM = "vm-57"
PRIVATE = ("payroll", "DC0", "LocalDS", USER, PASSWORD, "hunter2", "alice", "mac-of-nobody", "00:0c:29")


async def seen(adapter: VimApi) -> tuple[About, list[VmRow], VmManifest, str]:
    """As `sources record` asks it."""
    about, rows = await adapter.about(), await adapter.list_vms()
    return about, rows, await adapter.inspect(VM), await adapter.last_start(VM)


async def made_private(adapter: VimApi) -> None:
    """The VM has a name, a note and settings that are somebody's own, and a snapshot that somebody described."""
    session = adapter._session
    vim = library().vim
    settings = [
        vim.option.OptionValue(key="guestinfo.userdata", value="password: hunter2"),
        vim.option.OptionValue(key="scsi0:0.ctkEnabled", value="FALSE"),
    ]
    spec = vim.vm.ConfigSpec(name="payroll", annotation="ask alice", extraConfig=settings)
    task = await asyncio.to_thread(session.call, "name it", lambda _: session.machine(VM).ReconfigVM_Task(spec))
    await asyncio.to_thread(session.wait, task, what="name it", timeout_s=60)
    task = await asyncio.to_thread(
        session.call,
        "keep it",
        lambda _: session.machine(VM).CreateSnapshot_Task("before alice", "hunter2", memory=False, quiesce=False),
    )
    await asyncio.to_thread(session.wait, task, what="keep it", timeout_s=60)


def test_a_vcenter_replays_as_it_was_and_nothing_private_is_in_its_file(platform: VCenter, tmp_path: Path) -> None:
    in_session(lambda: VimApi(platform.access()), made_private)
    recording = Recording()
    access = platform.access()
    recorded = SourceAccess(access.endpoint, access.credentials, access.options, access.folder, recording)

    about, rows, manifest, start = in_session(lambda: VimApi(recorded), seen)
    text = "".join(lines(recording, LiveKind.VIM_API, about, named(rows, [manifest]), access.credentials.values()))
    for one in PRIVATE:
        assert one.lower() not in text.lower(), one
    # What is read of the settings stays: it says why a disk is not tracked.
    assert "scsi0:0.ctkEnabled" in text
    questions = [json.loads(line)["request"]["body"]["soap"] for line in text.splitlines()[1:]]
    assert questions[:2] == ["RetrieveServiceContent", "Login"]

    with replayed(text, tmp_path) as (endpoint, fingerprint, replay):
        credentials = {"user": "any@where", "password": "any"}
        there = SourceAccess(endpoint, credentials, {"fingerprint_sha256": fingerprint})
        again_about, again_rows, again, again_start = in_session(lambda: VimApi(there), seen)
        assert replay.unknown == []
    assert (again_about.version, again_start) == (about.version, start)
    assert [(check.name, check.ok) for check in again_about.checks] == [(check.name, check.ok) for check in about.checks]
    assert [(row.vm_id, row.power_state, row.cpu_count, row.memory_bytes) for row in again_rows] == [
        (row.vm_id, row.power_state, row.cpu_count, row.memory_bytes) for row in rows
    ]
    # One thing has one name wherever it stands.
    assert again.name == next(row.name for row in again_rows if row.vm_id == VM)
    assert again.name.startswith("name-")
    assert [(disk.key, disk.capacity_bytes, disk.used_bytes) for disk in again.disks] == [
        (disk.key, disk.capacity_bytes, disk.used_bytes) for disk in manifest.disks
    ]
    assert [one.id for one in again.snapshots] == [one.id for one in manifest.snapshots]
    assert len(again.nics) == len(manifest.nics)
    assert {concern.id.partition(":")[0] for concern in again.concerns} == {
        concern.id.partition(":")[0] for concern in manifest.concerns
    }


# ── one message ──────────────────────────────────────────────────────────────────────────────────────────────────────

ENVELOPE = (
    '<?xml version="1.0"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/"'
    ' xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><soapenv:Body>{}</soapenv:Body></soapenv:Envelope>'
)


def scrubbed(inside: str) -> str:
    read = recording_soap.read(ENVELOPE.format(inside).encode())
    assert read is not None
    scrub = Scrubbed(())
    scrub.learn(read)
    text = recording_soap.written(recording_soap.scrubbed(read, scrub))
    return text.partition("Body>")[2].rpartition("</soapenv:Body")[0]


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (
            "<fileName>[Gold] erp/erp_1-000001-sesparse.vmdk</fileName><x>Gold</x>",
            "<fileName>[name-1] name-2/name-3-000001-sesparse.vmdk</fileName><x>name-1</x>",
        ),
        (
            "<propSet><name>summary.name</name><val>Gold</val></propSet><x>Gold</x>",
            "<propSet><name>summary.name</name><val>name-1</val></propSet><x>name-1</x>",
        ),
        ("<about><name>VMware vCenter</name><apiVersion>8.0</apiVersion></about>",) * 2,
        ('<network type="Network">network-7</network><name>vm</name>',) * 2,
        ("<propSet><type>VirtualMachine</type><pathSet>name</pathSet></propSet><name>erp</name>",) * 2,
        ("<url>ds:///vmfs/volumes/5c3d1f2a-1b2c3d4e-5f6a-001122334455/</url>",) * 2,
        ("<sslThumbprint>AA:BB</sslThumbprint>", "<sslThumbprint>(redacted)</sslThumbprint>"),
        ("<faultstring>no erp &amp; such</faultstring>", "<faultstring>text-1</faultstring>"),
        ("<a>&lt;b&gt; &amp;</a>",) * 2,
        ("<extraConfig><key>guestinfo.k</key><value>s</value></extraConfig><a>b</a>", "<a>b</a>"),
    ],
)
def test_of_a_message_the_form_stays_and_names_go(given: str, becomes: str) -> None:
    becomes = becomes.replace("5c3d1f2a-1b2c3d4e-5f6a-001122334455", "00000001-00000000-0000-000000000000")
    becomes = becomes.replace("<name>erp</name>", "<name>name-1</name>")
    assert scrubbed(given) == becomes


def test_what_is_no_soap_stays_text() -> None:
    deep = ENVELOPE.format("<a>" * 200 + "</a>" * 200).encode()
    entities = b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]>' + ENVELOPE.format("<a>&b;</a>")[21:].encode()
    inside = ENVELOPE.format("<a/>")[21:].replace("<soapenv:Body>", '<!DOCTYPE a [<!ENTITY b "c">]><soapenv:Body>').encode()
    for message in (b"<html>", b"", b"{}", ENVELOPE.format("<a>").encode(), deep, entities, inside):
        assert recording_soap.read(message) is None
