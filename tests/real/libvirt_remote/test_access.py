"""Access to a real libvirt host: keys, certificates, users and addresses that are refused or taken."""

import asyncio
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from synvirt.disks.specs import NbdSpec
from synvirt.errors import (
    AuthFailed,
    BadRequest,
    SnapshotFailed,
    SourceUnreachable,
)
from synvirt.live import LiveAdapter, SourceAccess
from synvirt.live.libvirt.adapter import FORM, libvirt_remote
from synvirt.live.libvirt.host import Host
from synvirt.live.ssh import key_fingerprint
from synvirt.migrations.sources.probing import probe
from synvirt.model.sources import SourceCheck
from synvirt.transport import tls
from tests.contracts.live import read
from tests.real.libvirt_remote.one_job import ask
from tests.running.processes import command_line, is_ssh
from tests.servers.libvirt_lab import LibvirtLab


def connect(access: SourceAccess) -> None:
    async def nothing(_: LiveAdapter) -> None:
        return None

    ask(access, nothing)


def changed(access: SourceAccess, **options: Any) -> SourceAccess:
    return replace(access, options={key: value for key, value in {**access.options, **options}.items() if value is not None})


def test_another_ssh_host_key_is_refused(host: LibvirtLab) -> None:
    line = f"[127.0.0.1]:{host.ssh_port} {(host.folder / 'ssh/client.pub').read_text()}"
    with pytest.raises(SourceUnreachable, match="does not have the expected host key") as refused:
        connect(host.access("ssh", known_hosts=line))
    assert "ssh-keyscan" in str(refused.value.hint)


def test_an_ssh_host_that_nobody_pinned_is_refused(host: LibvirtLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SourceUnreachable, match="does not have the expected host key"):
        connect(changed(host.access("ssh"), known_hosts=None))
    connect(changed(host.access("ssh"), known_hosts=None, verify_tls=False))


def test_an_ssh_host_key_is_pinned_by_its_fingerprint(host: LibvirtLab) -> None:
    public = (host.folder / "ssh/host.pub").read_text().split()
    fingerprint = key_fingerprint(f"host {public[0]} {public[1]}")
    connect(changed(host.access("ssh"), known_hosts=None, fingerprint_sha256=fingerprint))
    with pytest.raises(SourceUnreachable, match="has no SSH host key with the pinned"):
        connect(changed(host.access("ssh"), known_hosts=None, fingerprint_sha256="00" * 32))
    lines: list[str] = []

    async def look(_: LiveAdapter) -> None:
        lines.extend(command_line(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))

    # Also where nothing else is checked: the pin decides, in the connection that is used.
    ask(changed(host.access("ssh"), known_hosts=None, fingerprint_sha256=fingerprint, verify_tls=False), look)
    ours = [line for line in lines if is_ssh(line) and f"-p {host.ssh_port}" in line]
    assert ours
    assert all("StrictHostKeyChecking=yes" in line for line in ours)


def test_a_key_that_the_host_does_not_know_is_refused(host: LibvirtLab, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    with pytest.raises(AuthFailed) as refused:
        connect(host.access("ssh", credentials={"private_key": (tmp_path / "other").read_text()}))
    assert "PRIVATE" not in refused.value.detail
    with pytest.raises(AuthFailed, match=r"not a private key|refused"):
        connect(host.access("ssh", credentials={"private_key": "this is no key"}))


def test_a_passphrase_opens_the_key_and_is_in_no_argument(host: LibvirtLab, tmp_path: Path) -> None:
    key = tmp_path / "sealed"
    key.write_text((host.folder / "ssh/client").read_text())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(key)], check=True)
    seen: list[str] = []

    async def look(_: LiveAdapter) -> None:
        seen.extend(command_line(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))

    ask(host.access("ssh", credentials={"private_key": key.read_text(), "password": "open sesame"}), look)
    assert any(f"-p {host.ssh_port}" in line for line in seen)
    assert not any("sesame" in line or "PRIVATE" in line for line in seen)
    with pytest.raises(AuthFailed):
        connect(host.access("ssh", credentials={"private_key": key.read_text(), "password": "open barley"}))


def test_a_user_who_may_only_look_gets_a_hint(host: LibvirtLab) -> None:
    access = host.access("local")
    about = ask(
        replace(access, endpoint=access.endpoint.replace("libvirt-sock", "libvirt-sock-ro")), lambda adapter: adapter.about()
    )
    refused = [check for check in about.checks if not check.ok]
    assert [check.name for check in refused] == ["privileges"]
    assert "read only access" in refused[0].detail
    assert "read-only socket" in str(refused[0].hint)


def test_a_libvirt_that_is_not_there_is_reported_by_its_socket(host: LibvirtLab) -> None:
    access = host.access("ssh")
    with pytest.raises(SourceUnreachable, match="libvirt does not answer at /nowhere/sock"):
        connect(replace(access, endpoint=access.endpoint.replace(host.socket, "/nowhere/sock")))
    with pytest.raises(SourceUnreachable, match="accepts no connection on port 1"):
        connect(SourceAccess("qemu+tcp://127.0.0.1:1/system"))


def test_a_certificate_of_others_is_refused(host: LibvirtLab, tmp_path: Path) -> None:
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=other"]
    subprocess.run([*argv, "-keyout", tmp_path / "k", "-out", tmp_path / "ca"], check=True, capture_output=True)
    good = host.access("tls")
    with pytest.raises(SourceUnreachable, match=r"not trusted|cannot be reached"):
        connect(replace(good, credentials={**good.credentials, "ca_certificate": (tmp_path / "ca").read_text()}))
    with pytest.raises(SourceUnreachable, match="not the pinned one"):
        connect(changed(good, fingerprint_sha256="00" * 32))


def test_a_pin_is_enough_and_is_the_disks_too(host: LibvirtLab, domain: Any) -> None:
    """No authority is known, and who signed is not asked; but whose certificate it is, of libvirt and of QEMU."""
    good, vm_id = host.access("tls"), domain.UUIDString()
    unsigned = replace(good, credentials={key: pem for key, pem in good.credentials.items() if key != "ca_certificate"})
    with pytest.raises(AuthFailed, match="ca_certificate is missing") as refused:
        connect(unsigned)
    assert "fingerprint_sha256" in str(refused.value.hint)
    pin = tls.look("127.0.0.1", host.tls_port).fingerprint

    async def copied(adapter: LiveAdapter) -> bytes:
        name = f"synvirt-{uuid4()}-1"
        try:
            snapshot = await adapter.snapshot(vm_id, name)
            disk = (await adapter.inspect(vm_id)).disks[0]
            return (await asyncio.to_thread(read, await adapter.open_disk(vm_id, snapshot, disk, None)))[0]
        finally:
            await adapter.cleanup(vm_id, name)

    content = host.content(domain, "vda")
    assert ask(changed(unsigned, verify_tls=False), copied) == content
    pinned = changed(unsigned, verify_tls=False, fingerprint_sha256=pin)
    assert ask(pinned, copied) == content
    assert ask(changed(unsigned, fingerprint_sha256=pin), copied) == content
    with pytest.raises(SourceUnreachable, match="certificate") as refused_name:
        connect(replace(pinned, endpoint=pinned.endpoint.replace("127.0.0.1", "localhost")))
    assert "made out to localhost" in str(refused_name.value.hint)
    host.renew_certificate()  # QEMU reads it for each job, libvirtd has read the one before
    with pytest.raises(SnapshotFailed, match="certificate") as other:
        ask(pinned, copied)
    assert "backup_tls_x509_cert_dir: the certificate must be the pinned one" in str(other.value.hint)
    assert ask(changed(good, fingerprint_sha256=pin), copied) == content, "its disks' was signed by who we trust"
    assert host.snapshots(domain) == []


def test_testing_a_host_shows_its_certificate(host: LibvirtLab) -> None:
    def tested(access: SourceAccess) -> dict[str, SourceCheck]:
        place, _, options = FORM.read(access)
        result = asyncio.run(probe(libvirt_remote(access), place.reach, options, deep=False, vm_id=None))
        return {check.name: check for check in result.checks}

    good = host.access("tls")
    shown = tested(good)["certificate"]
    pin = tls.look("127.0.0.1", host.tls_port).fingerprint
    assert f"SHA-256 {pin}, of CN=server, signed by CN=lab, valid until 20" in shown.detail
    assert all(check.ok for check in tested(changed(good, fingerprint_sha256=pin)).values())
    other = tested(changed(good, fingerprint_sha256="00" * 32))
    assert list(other) == ["address", "port", "certificate"]
    assert "not the pinned one" in other["certificate"].detail
    assert "of CN=server" in other["certificate"].detail


def test_disks_come_by_the_address_that_is_meant_for_them(host: LibvirtLab, domain: Any) -> None:
    """Another one of that host's; or all of them, and then by the endpoint's."""

    async def copied(adapter: LiveAdapter) -> bytes:
        snapshot = await adapter.snapshot(domain.UUIDString(), name)
        disk = (await adapter.inspect(domain.UUIDString())).disks[0]
        spec = await adapter.open_disk(domain.UUIDString(), snapshot, disk, None)
        assert isinstance(spec, NbdSpec)
        assert urlsplit(spec.uri).hostname == reached
        return (await asyncio.to_thread(read, spec))[0]

    for address in ("127.0.0.2", "0.0.0.0"):
        name, access = f"synvirt-{uuid4()}-1", host.access("tcp", nbd_address=address)
        reached = "127.0.0.1" if address == "0.0.0.0" else address
        assert ask(access, copied) == host.content(domain, "vda")
        ask(access, lambda adapter: adapter.cleanup(domain.UUIDString(), name))  # noqa: B023
    with pytest.raises(SnapshotFailed, match="Cannot assign requested address") as refused:
        ask(host.access("tcp", nbd_address="192.0.2.1"), copied)
    assert "options.nbd_address" in str(refused.value.hint)
    assert host.snapshots(domain) == []


def test_disks_come_in_the_clear_only_where_the_operator_says_so(host: LibvirtLab, domain: Any) -> None:
    access = host.access("tcp", allow_plain_nbd=False)
    about = ask(access, lambda adapter: adapter.about())
    assert [check.name for check in about.checks if not check.ok] == ["encryption"]
    with pytest.raises(SnapshotFailed, match="in the clear"):
        ask(access, lambda adapter: adapter.snapshot(domain.UUIDString(), f"synvirt-{uuid4()}-1"))
    assert host.snapshots(domain) == []


@pytest.mark.parametrize(
    "endpoint",
    ["qemu:///embed?root=/x", "qemu+ssh://-oProxyCommand=x/system", "qemu+ssh://user:secret@host/system", "qemu+ssh:///system"],
)
def test_endpoints_that_are_none_are_refused(endpoint: str) -> None:
    with pytest.raises(BadRequest) as refused:
        libvirt_remote(SourceAccess(endpoint))
    assert "secret" not in refused.value.detail


def test_a_socket_of_a_tunnel_never_leads_elsewhere(host: LibvirtLab) -> None:
    """One that was lost is made again by another name, and the next one has yet another."""
    place, login, options = FORM.read(host.access("ssh"))
    session = Host(place, login, options)
    session.open()
    try:
        seen = [session._tunnels.to(f"/there/{name}") for name in "ab"]
        session._tunnels._open["/there/a"].close()
        seen += [session._tunnels.to(f"/there/{name}") for name in "ac"]
        assert len(set(seen)) == 4
    finally:
        session.close()
