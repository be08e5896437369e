"""What an attack on an earlier version found, each with the tests that make it again and fail without its mending.

`TESTS` is the table; the rest of this file are those that had no other place. `python -m bench.findings` runs all of them.
"""

import json
import os
import socket
import ssl
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from synvirt.cli.client import _events
from synvirt.disks import detect, open_reader
from synvirt.disks.vsphere.vddk import _check_libdir
from synvirt.errors import MalformedArchive, RepositoryDamaged, UnsupportedFormat
from synvirt.repository import manifest as manifests
from tests.backups.peers import PASSWORD, USER, Peer
from tests.fakes.service import Service
from tests.regressions.named_tests import FOLDER, Tests, missing

TESTS: Tests = {
    "S1 a restore point names a program": {
        "kvm/test_foreign_domain.py": ("test_what_reaches_into_the_host_is_left_out_and_listed", "test_no_path_gets_in"),
        "backups/restores/test_restoring_domain.py": ("test_a_boot_test_reaches_nothing", "test_firmware_is_this_hosts_own"),
        "security/test_hostile_domains.py": ("test_a_restore_points_domain",),
    },
    "S2 names of XML that fill memory": {
        "security/test_xml_document.py": ("test_what_would_fill_memory_is_refused_before_it_does",)
    },
    "S3 every account of the host is an admin": {
        "api/callers/test_auth.py": ("test_without_a_group_the_hosts_accounts_are_not_asked",),
        "api/callers/test_roles.py": ("test_an_account_without_a_group_is_nobody",),
    },
    "S4 hostile input meets root": {
        "cage/test_cage.py": ("test_misbehaviour_fails", "test_a_loop_without_end_is_ended", "test_root_becomes_nobody"),
        "jobs/test_looking.py": (
            "test_what_misbehaves_fails_and_the_next_look_is_served",
            "test_what_is_no_answer_is_not_believed",
        ),
        "real/test_misbehaving.py": ("test_its_job_fails_by_a_code_and_the_next_one_works",),
        "backups/test_stalled_workers.py": ("test_one_that_loops_ends_and_the_next_works",),
        "cage/test_converter.py": ("test_a_converter_that_misbehaves_fails_and_its_failure_is_ours",),
    },
    "S5 decoys make a point unrestorable": {
        "repository/test_decoys.py": ("test_decoys_hide_nothing", "test_where_only_decoys_are_left_verifying_says_so"),
    },
    "S6 global headers of a tar": {"disks/test_tar.py": ("test_global_headers_that_only_cost_time_are_refused",)},
    "S7 a peer's account takes the service down": {
        "backups/test_peer_offer.py": (
            "test_a_pack_is_sent_in_pieces",
            "test_a_quota_holds_for_what_is_there_and_on_its_way",
            "test_a_million_empty_files_are_more_than_a_quota",
        ),
        "backups/test_peer.py": ("test_so_many_files_at_once_and_no_more",),
        "regressions/test_findings.py": ("test_a_manifest_of_more_disks_than_a_guest_has_is_none",),
    },
    "S8 guessing is neither limited nor seen": {
        "api/callers/test_auth.py": ("test_an_address_that_was_wrong_too_often_must_wait_and_others_need_not",),
        "api/callers/test_roles.py": (
            "test_a_refused_login_is_counted",
            "test_an_ipv6_caller_is_its_64_and_an_account_is_watched_too",
        ),
        "api/callers/test_coming.py": ("test_who_is_refused_is_an_entry_each_account_a_metric_and_a_count",),
        "regressions/test_findings.py": (
            "test_behind_a_proxy_the_caller_is_who_the_proxy_says",
            "test_behind_a_proxy_that_adds_a_field_of_its_own_a_caller_chooses_no_address",
        ),
    },
    "S9 connections without a password stay": {
        "api/test_server.py": ("test_who_says_nothing_more_is_let_go", "test_one_address_does_not_have_all_connections"),
    },
    "S10 a GET connects elsewhere": {
        "api/callers/test_roles.py": (
            "test_the_gets_that_connect_elsewhere_are_those_that_are_named",
            "test_another_sites_page_makes_us_connect_nowhere",
        ),
    },
    "S11 a file is swapped between check and open": {"disks/test_swapped.py": ("test_a_file_that_was_swapped_is_not_copied",)},
    "S12 secrets in the support bundle": {
        "security/test_redacting.py": (
            "test_more_than_51_shapes_of_secrets_go",
            "test_the_password_of_the_first_start_and_tokens_go",
        ),
        "cli/test_support_bundle.py": ("test_nothing_secret_is_in_it",),
    },
    "S13 smaller ones": {
        "disks/remote/test_remote_guard.py": ("test_by_default_nobody_gets_at_this_host_or_its_cloud",),
        "security/test_outgoing.py": ("test_nothing_opens_a_connection_past_the_guard",),
        "api/callers/test_roles.py": ("test_no_answer_is_kept_by_others",),
        "api/test_server.py": ("test_no_cipher_without_aead",),
        "regressions/test_findings.py": (
            "test_a_line_of_the_stream_ends_at_line_feeds_alone",
            "test_a_worker_takes_no_module_of_the_folder_it_was_started_in",
            "test_the_store_is_for_its_user_alone_whatever_the_folder_is",
            "test_junk_headers_of_a_peer_are_its_own_fault",
            "test_one_file_is_not_opened_4096_times",
            "test_a_library_that_others_may_change_is_not_loaded",
        ),
    },
}


def test_each_finding_has_its_tests() -> None:
    assert [name.split()[0] for name in TESTS] == [f"S{number}" for number in range(1, 14)]
    assert missing(TESTS) == []


def test_a_manifest_of_more_disks_than_a_guest_has_is_none() -> None:
    """Each was an object in the service, with its event loop waiting: refused before any is made."""
    disks = ",".join(['{"size_bytes":0,"pages":[]}'] * 20_000)
    line = f'{{"format":1,"id":"00000000-0000-0000-0000-000000000001","created_at":"2026-01-01T00:00:00Z","disks":[{disks}]}}'
    body = line.encode() + b"\nAAAA\n"
    from blake3 import blake3

    with pytest.raises(RepositoryDamaged, match="not made by SynVirt"):
        manifests.read_shown(
            manifests.unread("00000000-0000-0000-0000-000000000001", body + blake3(body).hexdigest().encode() + b"\n")
        )


def test_behind_a_proxy_the_caller_is_who_the_proxy_says(tmp_path: Path) -> None:
    """And of one that is no proxy of ours, nothing that it says of itself."""
    from synvirt.api.callers.auth import FAILURES_ALLOWED, Throttled
    from tests.fakes.service import only_admin

    for proxies, others_wait in (("127.0.0.0/8", False), ("", True)):
        service = Service(tmp_path / f"{others_wait}", check_password=Throttled(only_admin), tls=False, trusted_proxies=proxies)
        with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:

            def ask(password: str, address: str, client: httpx.Client = client) -> httpx.Response:
                auth = httpx.BasicAuth("admin" if password == "correct horse" else "guesser", password)
                # The last one is what the proxy itself has added.
                return client.get("/metrics", auth=auth, headers={"X-Forwarded-For": f"192.0.2.99, {address}"})

            for _ in range(FAILURES_ALLOWED):
                assert ask("wrong", "192.0.2.1").status_code == 401
            assert "too many" in ask("wrong", "192.0.2.1").text
            assert ("too many" in ask("correct horse", "192.0.2.2").text) is others_wait
        service.close()


def test_behind_a_proxy_that_adds_a_field_of_its_own_a_caller_chooses_no_address(tmp_path: Path) -> None:
    """As HAProxy does: the first field is the caller's, who would be another one with each guess."""
    from synvirt.api.callers.auth import FAILURES_ALLOWED, Throttled
    from tests.fakes.service import only_admin

    service = Service(tmp_path, check_password=Throttled(only_admin), tls=False, trusted_proxies="127.0.0.0/8")
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:

        def guess(number: int) -> str:
            fields = [("X-Forwarded-For", f"192.0.2.{number}"), ("X-Forwarded-For", "198.51.100.1")]
            return client.get("/metrics", auth=httpx.BasicAuth(f"guesser-{number}", "wrong"), headers=fields).text

        assert not any("too many" in guess(number) for number in range(FAILURES_ALLOWED))
        assert "too many" in guess(FAILURES_ALLOWED)
    service.close()


def test_a_line_of_the_stream_ends_at_line_feeds_alone() -> None:
    data = '{"name": "web\u2028data: x\x85\u2029"}'
    stream = f"event: migration\ndata: {data}\n\n".encode()
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
    [event] = _events(answer, "the service")
    assert json.loads(event.data) == json.loads(data)


def test_a_worker_takes_no_module_of_the_folder_it_was_started_in(tmp_path: Path) -> None:
    """As the workers, the looker and the guards are started; without -P the first import would be the folder's."""
    for name in ("json", "struct", "blake3", "synvirt"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(66)")
    for module in ("synvirt.worker", "synvirt.jobs.inspecting.looker"):
        argv = [sys.executable, "-P", "-m", module, "5"]
        done = subprocess.run(argv, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
        assert done.returncode != 66, module
    source = FOLDER.parent / "src/synvirt"
    starts = [path for path in source.rglob("*.py") if "sys.executable," in path.read_text()]
    assert len(starts) > 3
    for path in starts:
        text = path.read_text()
        assert '"-P"' in text or '"-I"' in text or "LOOKER" in text, path


def test_the_store_is_for_its_user_alone_whatever_the_folder_is(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        (tmp_path / "data").mkdir(mode=0o755)
        service = Service(tmp_path / "data")
        service.submit()
        with service.served():
            modes = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "data").glob("migrator.db*")}
        service.close()
    finally:
        os.umask(before)
    assert modes
    assert set(modes.values()) == {0}, modes


def test_junk_headers_of_a_peer_are_its_own_fault(tmp_path: Path) -> None:
    home = Peer(tmp_path / "home")
    with home.served():
        parts = urlsplit(home.place.url)
        basic = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for junk in (
            "Content-Length: \xb2",
            "Content-Length: 1_0",
            "Content-Length: -1",
            "Content-Length: " + "9" * 5000,
            "Content-Length: 99999999999999999999",
            "Transfer-Encoding: chunked",
            "Content-Length: 5\r\nContent-Length: 6",
            "Content-Length: 0x10",
        ):
            for name in ("repository", "packs/x", f"packs/{'0' * 64}.pack", "points/%2e%2e/x"):
                with context.wrap_socket(socket.create_connection((parts.hostname, parts.port), 10)) as sock:
                    head = (
                        f"PUT {parts.path}/files/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Basic {basic}\r\n{junk}\r\n\r\n"
                    )
                    sock.sendall(head.encode("latin-1") + b"0\r\n\r\n")
                    status = sock.recv(12)
                assert status[:9] == b"HTTP/1.1 ", (junk[:40], name, status)
                assert 400 <= int(status[9:]) < 500, (junk[:40], name, status)


def test_one_file_is_not_opened_4096_times(tmp_path: Path) -> None:
    lines = "".join(f'RW 1 FLAT "disk.vmdk" {number}\n' for number in range(4096))
    text = f'# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType="twoGbMaxExtentFlat"\n{lines}'
    (tmp_path / "disk.vmdk").write_text(text)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(MalformedArchive, match="4096 of its extents are in one file"):
        open_reader(detect(tmp_path / "disk.vmdk"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_library_that_others_may_change_is_not_loaded(tmp_path: Path) -> None:
    library = tmp_path / "vddk/lib64/libvixDiskLib.so.8"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    _check_libdir(tmp_path / "vddk")
    for path in (library, library.parent, tmp_path / "vddk"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        with pytest.raises(UnsupportedFormat, match="changed by others"):
            _check_libdir(tmp_path / "vddk")
        path.chmod(mode)
    (tmp_path / "link").symlink_to(tmp_path / "vddk")
    _check_libdir(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(library, 12345, 12345)
        with pytest.raises(UnsupportedFormat, match="changed by others"):
            _check_libdir(tmp_path / "link")
