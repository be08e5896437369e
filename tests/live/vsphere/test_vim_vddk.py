"""vim_api by VMware's own transport: nbdkit with its real vddk plugin, over a stand-in for VMware's library (tests/fakes/vddk).

What this proves: the command line, the order of things, what each refusal comes to. What it cannot: VMware's library.
"""

import hashlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from synvirt.disks import open_reader
from synvirt.disks.specs import VddkSpec
from synvirt.errors import AuthFailed, DiskReadFailed, SourceUnreachable, SynvirtError, UnsupportedFormat
from synvirt.live import LiveAdapter
from synvirt.live.vsphere.adapter import VimApi
from synvirt.model.kinds import LiveKind, Mode, State
from tests.contracts.live import read
from tests.drawn import drawn
from tests.fakes import vddk as stand_in
from tests.fakes.vcenter import PASSWORD, USER, VCenter
from tests.fakes.vddk import Vddk
from tests.live.vsphere.test_vim_jobs import VM, VimHouse, plan, same
from tests.servers.certificates import Certificate, self_signed, tls_server

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20


def disk_content() -> bytes:
    return drawn(MIB, zeros=MIB, end=MIB)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Vddk:
    return stand_in.made(tmp_path_factory.mktemp("vddk"))


@pytest.fixture
def vddk(installed: Vddk, monkeypatch: pytest.MonkeyPatch) -> Vddk:
    """As new; our nbdkit goes before all others."""
    monkeypatch.setenv("PATH", f"{installed.libdir}:{os.environ['PATH']}")
    installed.forget()
    installed.set(user=USER, password=PASSWORD, vm=f"moref={VM}", snapshot="*", transports="nbdssl:nbd")
    return installed


# ── one disk: nothing of a platform but its certificate ──────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Certificate]]:
    """Where a platform would listen, and its certificate."""
    certificate = self_signed(tmp_path_factory.mktemp("door"))
    server = tls_server(ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler), certificate)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_address[1], certificate
    server.shutdown()
    server.server_close()


@pytest.fixture
def spec(vddk: Vddk, door: tuple[int, Certificate], tmp_path: Path) -> VddkSpec:
    port, certificate = door
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "disk-flat.vmdk").write_bytes(disk_content())
    vddk.set(server="127.0.0.1", port=port, thumbprint=thumbprint("127.0.0.1", port), snapshot="snapshot-7", datastore=tmp_path)
    return VddkSpec(
        host="127.0.0.1",
        port=port,
        fingerprint_sha256=certificate.fingerprint,
        user=USER,
        password=PASSWORD,
        vm_id=VM,
        snapshot_id="snapshot-7",
        file="[fast store] web/disk.vmdk",
        libdir=str(vddk.libdir),
        transports="nbdssl",
    )


def thumbprint(host: str, port: int) -> str:
    """By SHA-1, as VDDK knows certificates."""
    der = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, port), timeout=20))
    return hashlib.sha1(der).digest().hex(":").upper()


def test_the_disk_of_a_snapshot_is_read_by_what_the_host_says_is_allocated(spec: VddkSpec, vddk: Vddk) -> None:
    copy, data_bytes = read(replace(spec, transports="san:nbd"))
    assert copy == disk_content()
    assert data_bytes == 2 * MIB
    assert PASSWORD not in vddk.command_lines()
    calls = vddk.calls()
    assert f"open {spec.file} flags=4 mode=nbd" in calls
    assert [call for call in calls if call.startswith("connect")] == [
        f"connect vm=moref={VM} snapshot={spec.snapshot_id} port={spec.port} read_only=1 modes=san:nbd"
    ]
    assert calls[-2:] == ["disconnect", "exit"]  # a session of VDDK's that is left open counts against the host's limit


def test_reads_at_odd_places(spec: VddkSpec) -> None:
    reader = open_reader(spec)
    try:
        for offset, length in ((0, 1), (511, 2), (MIB - 1, MIB + 2), (3 * MIB - 7, 7)):
            buffer = bytearray(length)
            reader.read_into(offset, memoryview(buffer))
            assert bytes(buffer) == disk_content()[offset : offset + length]
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        ({"password": "another"}, AuthFailed, "Insufficient permissions in the host operating system"),
        ({"thumbprint": "00:11"}, SourceUnreachable, "Failed to verify SSL certificate"),
        ({"connect": 18000}, SourceUnreachable, "Cannot connect to host"),
        ({"connect": 14009}, SourceUnreachable, "The server refused connection"),
        ({"open": 15}, SourceUnreachable, "The file is already in use"),
        ({"open": 2338}, SourceUnreachable, "NBD_ERR_NETWORK_CONNECT"),
        ({"open": 13}, DiskReadFailed, "You do not have access rights to this file"),
        ({"transports": "hotadd"}, DiskReadFailed, "No transport modes"),
        ({"snapshot": "snapshot-0"}, DiskReadFailed, "One of the parameters was invalid"),
    ],
)
def test_what_vddk_refuses_is_reported_in_its_words(
    spec: VddkSpec, vddk: Vddk, fails: dict[str, object], error: type[SynvirtError], message: str
) -> None:
    """nbdkit serves by then: it closes the connection, and says no more to its client."""
    vddk.set(**fails)
    with pytest.raises(error, match="VDDK cannot open") as caught:
        open_reader(spec)
    assert message in caught.value.detail
    assert type(caught.value) is error
    assert PASSWORD not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(("code", "error"), [(1, DiskReadFailed), (14009, SourceUnreachable)])
def test_a_read_that_fails_says_where_and_why(spec: VddkSpec, vddk: Vddk, code: int, error: type[SynvirtError]) -> None:
    vddk.set(read_fails_at=2 * MIB + 5, read_error=code)
    with pytest.raises(error, match=r"VDDK cannot read at offset 2097152 of \[.*") as caught:
        read(spec)
    assert ("Unknown error" if code == 1 else "The server refused connection") in caught.value.detail


def test_a_folder_without_the_library_is_named_before_anything_is_asked(spec: VddkSpec, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="cannot open shared object") as caught:
        open_reader(replace(spec, libdir=str(tmp_path)))
    assert "options.vddk_libdir" in (caught.value.hint or "")


def test_another_certificate_than_the_pinned_one_gets_no_password(spec: VddkSpec, vddk: Vddk) -> None:
    with pytest.raises(SourceUnreachable, match="is not the pinned one"):
        open_reader(replace(spec, fingerprint_sha256="ab" * 32))
    assert vddk.calls() == []


# ── with a platform ──────────────────────────────────────────────────────────────────────────────────────────────────


class VddkHouse(VimHouse):
    libdir: Path

    async def connect(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        pin = self.vcenter.fingerprint
        return VimApi(self.vcenter.access(fingerprint_sha256=pin, vddk_libdir=str(self.libdir)))


def test_a_guest_is_moved_warm_and_only_what_changed_is_read_again(platform: VCenter, vddk: Vddk, tmp_path: Path) -> None:
    disk = platform.add_disk(VM, disk_content())
    place = urlsplit(platform.url)
    host, port = str(place.hostname), int(place.port or 0)
    vddk.set(server=host, port=port, thumbprint=thumbprint(host, port), datastore=disk.parent.parent)
    (tmp_path / "house").mkdir()
    house = VddkHouse(tmp_path / "house", platform)
    house.libdir = vddk.libdir
    changed = [False]
    job = house.intake.submit(plan(warm={"delta_threshold_bytes": MIB}))

    def committed() -> None:
        """Once the first pass has read the disk."""
        if not changed[0] and house.store.get(job.id).state is State.DELTA_SYNCING:
            changed[0] = platform.guest_writes(VM, 5 * 65536, b"changed")

    house.store.on_commit = committed
    try:
        ended = house.run(job.id)
        assert ended.state is State.COMPLETED, ended.last_error
        assert same(house, ended, disk)
    finally:
        house.close()
    assert changed[0]
    assert disk.read_bytes() != disk_content()
    assert ended.mode_effective is Mode.WARM
    assert [one.kind for one in ended.passes] == ["full", "delta", "final"]
    assert ended.passes[0].bytes == 2 * MIB
    assert ended.passes[1].bytes == 65536
    assert platform.snapshots() == []
    snapshots = [call.split()[2] for call in vddk.calls() if call.startswith("connect")]
    assert len(set(snapshots)) == 3  # each pass has its own
    assert vddk.calls().count("disconnect") == len(snapshots)
    assert PASSWORD not in vddk.command_lines()
