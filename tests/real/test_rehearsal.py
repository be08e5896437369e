"""A guest that keeps writing is rehearsed twice while it is synced, and moved; two are rehearsed together: by the service as it
is run, on XFS with reflinks, and the first on ext4 too, where the passes meanwhile write beside the volume."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.cli.client import Client
from synvirt.kvm import agent
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.model.rehearsal import REHEARSED, Rehearsal, RehearsalPage, RehearsalState
from synvirt.sample import Sample
from synvirt.sizes import MIB
from tests.needs import need, need_root
from tests.real.libvirt_remote.test_libvirt_remote_warm import WRITER, Guest, check_chain, read_guest, register
from tests.real.test_service import _guests, service
from tests.running import forked
from tests.servers.libvirt_lab import LibvirtLab, lab, until

BUSYBOX = "/bin/busybox"
CARD = "<interface type='user'><mac address='52:54:00:77:00:05'/><model type='virtio'/></interface>"
RC_LOCAL = """#!/bin/busybox sh
ip link set eth0 up; ip addr add 10.77.0.5/24 dev eth0; ip route add default via 10.77.0.1
while :; do printf "HTTP/1.0 200 OK\\r\\n\\r\\nok" | nc -l -p 8080; done &
ping -c 1000 10.77.0.1 > /dev/null &
"""

DOCS = Path(__file__).parent.parent.parent / "docs"

# A database that says «ok», and a shop that asks it: each has its address in the rehearsal as at home.
DATABASE, SHOP, PORT = "10.77.0.5", "10.77.0.6", 5432
SERVES = """#!/bin/busybox sh
ip link set eth0 up; ip addr add ADDRESS/24 dev eth0; ip route add default via 10.77.0.1
while :; do echo ok | nc -l -p 5432; done &
ping -c 1000 10.77.0.1 > /dev/null &
"""


@pytest.fixture(scope="module")
def host() -> Iterator[LibvirtLab]:
    with lab(boots=True) as running:
        yield running


MKFS = {"xfs": ("mkfs.xfs", "xfsprogs"), "ext4": ("mkfs.ext4", "e2fsprogs")}


@pytest.fixture
def data_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Its volumes on a new file system: XFS, unless the test names another."""
    need_root("mount")
    kind = getattr(request, "param", "xfs")
    image, data_dir = tmp_path / kind, tmp_path / "data"
    with image.open("wb") as file:
        file.truncate(2048 * MIB)
    subprocess.run([need(*MKFS[kind]), "-q", image], check=True)
    (data_dir / "volumes").mkdir(parents=True)
    subprocess.run(["mount", "-o", "loop", image, data_dir / "volumes"], check=True)
    try:
        yield data_dir
    finally:
        for pid in _guests(data_dir):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        until(lambda: _guests(data_dir) == [])
        subprocess.run(["umount", "--lazy", data_dir / "volumes"], check=True)


def command(words: str) -> dict[str, Any]:
    return {"kind": "command", "argv": [BUSYBOX, "sh", "-c", words], "within_s": 10}


def rehearse(client: Client, job: Migration, *checks: dict[str, Any]) -> Rehearsal:
    request = {"checks": checks}
    return end_of(client, Rehearsal.model_validate_json(client.ask("POST", f"/migrations/{job.id}/rehearsals", json=request)))


def end_of(client: Client, found: Rehearsal) -> Rehearsal:
    def ended() -> Rehearsal | None:
        seen = Rehearsal.model_validate_json(client.ask("GET", f"/migrations/{found.migration_id}/rehearsals/{found.id}"))
        return seen if seen.state in REHEARSED else None

    until(ended, 300)
    seen = ended()
    assert seen is not None
    return seen


def bytes_used(folder: Path) -> int:
    """Of its file system: shared extents count once."""
    found = subprocess.run(["df", "--output=used", "-B1", folder], check=True, capture_output=True, text=True)
    return int(found.stdout.split()[-1])


class Example:
    """The lines of docs/proof.md, run by a shell as they stand there, step by step."""

    def __init__(self, data_dir: Path, folder: Path) -> None:
        self._steps = re.split(r"^\*\*\d\. ", (DOCS / "proof.md").read_text(), flags=re.MULTILINE)
        self._folder, self._data_dir = folder, data_dir

    def run(self, step: int, **instead: str) -> str:
        """What it printed. `instead`: of words of the document, each of which is there."""
        lines = "\n".join(re.findall(r"^    (.*)$", self._steps[step], re.MULTILINE))
        for there, here in instead.items():
            assert there in lines
            lines = lines.replace(there, here)
        done = forked.in_shell(lines, self._folder, timeout=500, SYNVIRT_DATA_DIR=str(self._data_dir))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("data_dir", ["xfs", "ext4"], indirect=True)
def test_a_guest_is_rehearsed_while_it_is_synced_and_moved_as_the_document_says(
    host: LibvirtLab, sample: Sample, data_dir: Path, tmp_path: Path
) -> None:
    example = Example(data_dir, tmp_path)
    guest = Guest(host, sample, CARD)
    # A server, at an address that it has in the rehearsal as at home.
    guest.run(BUSYBOX, "sh", "-c", f"echo '{RC_LOCAL}' > /etc/rc.local; chmod +x /etc/rc.local; sync")
    # What programs in a guest print is asked of the agent of the guest here; a guest that lacks one says less.
    assert agent.output(guest.domain, (BUSYBOX, "hostname"), 10) == "synvirt-sample\n"
    assert agent.output(guest.domain, ("ss", "-H", "-lntup"), 10) is None
    assert agent.output(guest.domain, (BUSYBOX, "sleep", "60"), 1) is None
    guest.run(BUSYBOX, "sh", "-c", WRITER, wait=False)
    until(lambda: guest.lines() > 3)
    with service(data_dir) as (_, client):
        register(client, host, "ssh")
        # The second disk could not be tracked.
        example.run(1, web01=guest.domain.name(), vc1="'the old host by ssh' --skip-disk vdb --interval 3")
        (row,) = json.loads(client.ask("GET", "/migrations"))["items"]
        job = client.migration(row["id"])
        until(lambda: client.migration(job.id).state == State.DELTA_SYNCING, 300)
        volumes = data_dir / "volumes"
        before = bytes_used(volumes)
        first = rehearse(client, job, command("test -s /chain"), command("false"))
        assert first.state is RehearsalState.FAILED, first
        assert first.error is None
        assert [check.ok for check in first.checks] == [True, True, True, False]
        assert [check.name for check in first.checks][:2] == ["boot", "network"]
        passes = client.migration(job.id).passes[-1].number
        until(lambda: client.migration(job.id).passes[-1].number > passes + 1, 120)
        short = str(job.id)[:8]
        assert "s allowed" in example.run(2, **{"1f3a": short})
        example.run(3, **{"1f3a": short})
        second = RehearsalPage.model_validate_json(client.ask("GET", f"/migrations/{job.id}/rehearsals")).items[0]
        assert second.state is RehearsalState.PASSED, second
        assert second.boot_sign == "agent"
        same = {one.item: one for one in second.sameness}
        assert same["host name"].grade == "same"
        assert same["host name"].clone == "synvirt-sample"
        assert same["file system /"].grade in ("same", "expected"), same["file system /"]
        # It is the address that the guest gets at its start, in the rehearsal alone.
        assert same["addresses of 52:54:00:77:00:05"].clone == "10.77.0.5/24"
        assert [one for one in second.sameness if one.grade == "wrong"] == []
        assert {"firmware", "boot order", "processors", "memory", "disk vda"} <= {one.item for one in second.sameness}
        assert same["disk vda"].grade == "same", same["disk vda"]
        # The source is asked, and nothing is run in it: of what only programs tell there is no difference.
        assert [one for one in second.sameness if one.item.startswith(("user", "route", "service"))] == []
        assert [check.detail for check in second.checks if check.name == "network"] == ["one of its own, which is isolated"]
        assert second.boot_s is not None
        assert second.outage_s is not None
        assert first.moment is not None
        assert second.moment is not None
        assert second.moment > first.moment
        # Nothing was copied for it, and nothing stays.
        assert bytes_used(volumes) - before < 64 * MIB
        [volume] = volumes.rglob("*.raw")
        assert (volume.parent.name, volume.stat().st_uid) == (str(job.id), os.geteuid())
        assert len(_guests(data_dir)) == 0
        picture = client.fetch(f"/migrations/{job.id}/rehearsals/{second.id}/screenshot")
        assert picture.startswith(b"\x89PNG")
        assert guest.domain.isActive(), "the source runs on"
        reported = example.run(4, **{"1f3a": short, "9c02": str(second.id)[:8]})
        assert "  wrong" not in reported, reported
        lines = guest.lines()
        example.run(5, **{"1f3a": short})
        ended = client.migration(job.id)
        assert ended.state == State.COMPLETED, ended.last_error
        assert host.snapshots(guest.domain) == []
        assert ended.moved is not None
        assert [one for one in ended.moved.differ if one.grade == "wrong"] == [], ended.moved
        assert ended.moved.same >= 8, ended.moved
        assert "downtime" in example.run(6, **{"1f3a": short})
        of_host = json.loads(client.ask("GET", "/receipts/key"))["allowed_signers"].split()[0].removeprefix("synvirt@")
        checked = example.run(7, **{"receipt-1f3a…": f"receipt-{job.id}", "1f3a": short, "HOST": of_host})
        assert "is as it was signed" in checked
        assert 'Good "synvirt-receipt" signature' in checked
    assert [path.suffix for path in (volumes / str(job.id)).iterdir()] == [".raw"]
    assert ended.domain is not None
    assert check_chain(read_guest(data_dir, ended.domain.uuid, "/chain")) >= lines


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_guests_are_rehearsed_together_and_reach_each_other_and_nothing_else(
    host: LibvirtLab, sample: Sample, data_dir: Path
) -> None:
    guests = []
    for number, address in enumerate((DATABASE, SHOP)):
        card = f"<interface type='user'><mac address='52:54:00:77:01:0{number}'/><model type='virtio'/></interface>"
        guests.append(Guest(host, sample, card))
        words = SERVES.replace("ADDRESS", address)
        guests[-1].run(BUSYBOX, "sh", "-c", f"echo '{words}' > /etc/rc.local; chmod +x /etc/rc.local; sync")
    with service(data_dir) as (_, client), socket.create_server(("", 0)) as outside:
        source = register(client, host, "ssh")
        jobs = []
        for guest in guests:
            plan = {
                "source": {"Live": "libvirt_remote"},
                "source_ref": {"kind": "live_vm", "source_id": str(source.id), "vm_id": guest.domain.UUIDString()},
                "mode": "Warm",
                "skip_disks": ["vdb"],
                "warm": {"cutover": "manual", "interval_s": 30},
            }
            jobs.append(client.submit(MigrationPlan.model_validate(plan)))
        for job in jobs:
            until(lambda: client.migration(job.id).state == State.DELTA_SYNCING, 300)  # noqa: B023
        # Each asks the other; and neither reaches this host, by the address that it has or by its gateway's.
        own = socket.gethostbyname(socket.gethostname())
        away = [
            command(f"! {BUSYBOX} nc -w 3 {address} {outside.getsockname()[1]} < /dev/null") for address in (own, "10.77.0.1")
        ]
        request = {
            "members": [
                {
                    "migration_id": str(job.id),
                    "checks": [
                        {"kind": "role", "role": "postgresql", "within_s": 60},
                        {**command(f"{BUSYBOX} nc -w 5 {other} {PORT} < /dev/null | {BUSYBOX} grep -q ok"), "within_s": 60},
                        *away,
                    ],
                }
                for job, other in zip(jobs, (SHOP, DATABASE), strict=True)
            ]
        }
        begun = RehearsalPage.model_validate_json(client.ask("POST", "/rehearsals", json=request)).items
        found = [end_of(client, one) for one in begun]
        assert [(one.state, one.error) for one in found] == [(RehearsalState.PASSED, None)] * 2, found
        assert {one.checks[1].detail for one in found} == {"that of 2 guests, which is isolated"}
        outside.settimeout(0.2)
        with pytest.raises(TimeoutError):
            outside.accept()
        assert len(_guests(data_dir)) == 0
        assert {path.parent.name for path in (data_dir / "volumes").rglob("*.raw")} == {str(job.id) for job in jobs}
        for guest, job in zip(guests, jobs, strict=True):
            assert guest.domain.isActive(), "the source runs on"
            client.ask("POST", f"/migrations/{job.id}/cancel")
        for job in jobs:
            until(lambda: client.migration(job.id).ended, 120)  # noqa: B023
