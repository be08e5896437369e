"""synvirt sources and synvirt keyring, against a service on real sockets with a fake platform."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from synvirt.cli import sources
from synvirt.live import VmRow
from synvirt.model.kinds import LiveKind
from synvirt.sizes import MIB
from tests.cli.conftest import Run
from tests.fakes.live import FakeAdapter, FakePlatform
from tests.fakes.platforms import with_fake
from tests.fakes.pve.cluster import Cluster, Paper
from tests.fakes.pve.server import PveServer
from tests.fakes.service import Service
from tests.needs import need_root

SECRET = "correct-horse-battery-staple"


@pytest.fixture
def platform(tmp_path: Path) -> FakePlatform:
    return FakePlatform(tmp_path / "platform")


@pytest.fixture
def service(tmp_path: Path, platform: FakePlatform) -> Iterator[Service]:
    made = Service(tmp_path, has_pages=False, platforms=with_fake(platform))
    with made.served():
        yield made
    made.close()


def test_the_kinds_are_the_models() -> None:
    assert set(sources.KINDS) == {str(kind) for kind in LiveKind}


def test_add_list_show_test_vms_change_remove(service: Service, run: Run, platform: FakePlatform) -> None:
    platform.add_vm("vm-1", {"disk-0": bytes(4096)})
    done = run("sources", "add", "lab", "qemu:///system")
    assert done.exit_code == 0, done.stderr
    assert "Try it: synvirt sources test 'lab'" in done.stdout
    assert "lab" in run("sources", "list").stdout
    shown = run("sources", "show", "lab").stdout
    lines = [line.split(maxsplit=1) for line in shown.splitlines()]
    assert ["option", "verify_tls = true"] in lines
    assert ["option", "nbd_ports = 10809, 10872"] in lines
    assert "None" not in shown
    tried = run("sources", "test", "lab", "--deep")
    assert (tried.exit_code, tried.stdout.splitlines()[-1]) == (0, "The source can be used.")
    assert "vm-1" in run("sources", "vms", "lab").stdout
    assert ["warm", "yes"] in [line.split() for line in run("sources", "inspect", "lab", "vm-1").stdout.splitlines()]
    assert run("sources", "change", "lab", "--name", "prod").exit_code == 0
    assert run("sources", "remove", "prod").exit_code == 0
    assert run("sources", "list").stdout == "There are no sources\n"
    gone = run("sources", "show", "prod")
    assert (gone.exit_code, "E_MIG_NOT_FOUND" in gone.stderr) == (1, True)


def test_a_password_comes_by_standard_input_and_is_never_printed(service: Service, run: Run) -> None:
    arguments = ("sources", "add", "vc", "https://127.0.0.1:1", "--kind", "vim_api", "--source-user", "root", "--json")
    done = run(*arguments, typed=f"{SECRET}\n")
    assert done.exit_code == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    source = json.loads(done.stdout)
    opened, sealed = service.store.sources.opened(source["id"])
    assert service.sources._opened(opened.id, sealed) == {"user": "root", "password": SECRET}


def test_other_credentials_and_files(service: Service, run: Run, tmp_path: Path) -> None:
    (tmp_path / "id").write_text("root@pam!mover")
    done = run(
        "sources", "add", "pve", "https://127.0.0.1:1", "--kind", "pve_api",
        "--credential", f"token_id=@{tmp_path / 'id'}", "--secret", "token_secret", "--fingerprint", "ab" * 32, "--json",
        typed=f"{SECRET}\n",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    source = json.loads(done.stdout)
    assert source["options"]["fingerprint_sha256"] == ":".join(["AB"] * 32)
    opened, sealed = service.store.sources.opened(source["id"])
    assert service.sources._opened(opened.id, sealed) == {"token_id": "root@pam!mover", "token_secret": SECRET}


def test_a_failed_test_exits_1_and_says_what_to_do(service: Service, run: Run, platform: FakePlatform) -> None:
    run("sources", "add", "lab", "qemu:///system")
    platform.fault("wrong_password", 1)
    done = run("sources", "test", "lab")
    assert done.exit_code == 1
    assert "FAILED  login        E_MIG_AUTH_FAILED" in done.stdout


def test_a_vm_is_found_by_its_name(service: Service, run: Run, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows its UUID."""

    async def named(_: FakeAdapter) -> list[VmRow]:
        return [VmRow(f"vm-{number}", name, "on") for number, name in enumerate(("web01", "twin", "twin"), 1)]

    monkeypatch.setattr(FakeAdapter, "list_vms", named)
    platform.add_vm("vm-1", {"disk-0": bytes(4096)})
    run("sources", "add", "lab", "qemu:///system")
    for vm in ("web01", "vm-1"):
        assert ["name", "vm-1"] in [line.split() for line in run("sources", "inspect", "lab", vm).stdout.splitlines()]
        assert "trying on vm-1 (vm-1)" in run("sources", "test", "lab", "--deep", "--vm", vm).stdout
    for vm, code, reported in (("twin", 2, "2 VMs of lab"), ("web", 1, "E_MIG_VM_NOT_FOUND")):
        for command in (("inspect", "lab", vm), ("test", "lab", "--deep", "--vm", vm)):
            done = run("sources", *command)
            assert (done.exit_code, reported in done.stderr) == (code, True), done.stderr
    platform.fault("wrong_password", 2)
    refused = run("sources", "test", "lab", "--deep", "--vm", "web01")
    assert (refused.exit_code, "FAILED  login" in refused.stdout) == (1, True)


def test_an_option_that_is_not_named_stays(service: Service, run: Run) -> None:
    """Whoever pins a certificate does not mean to forget where the scratch files go."""
    run("sources", "add", "lab", "qemu:///system", "--option", "scratch_dir=/srv/scratch", "--option", "quiesce=require")
    for arguments in (("--fingerprint", "ab" * 32), ("--option", "nbd_ports=10000-10010"), ("--option", "quiesce=")):
        done = run("sources", "change", "lab", *arguments)
        assert done.exit_code == 0, done.stderr
    options = json.loads(run("sources", "show", "lab", "--json").stdout)["options"]
    assert (options["scratch_dir"], options["quiesce"], options["nbd_ports"]) == ("/srv/scratch", "try", [10000, 10010])
    assert options["fingerprint_sha256"] == ":".join(["AB"] * 32)


def test_an_address_that_says_enough_needs_no_kind_and_another_is_asked_for_it(service: Service, run: Run) -> None:
    assert run("sources", "add", "lab", " QEMU:///system ").exit_code == 0
    refused = run("sources", "add", "vc", "https://vcenter.example")
    assert (refused.exit_code, "does not say what answers there" in refused.stderr) == (2, True)


def test_a_password_that_nobody_typed_is_not_sealed(service: Service, run: Run) -> None:
    refused = run("sources", "add", "vc", "https://127.0.0.1:1", "--kind", "vim_api", "--source-user", "root", typed="")
    assert (refused.exit_code, "Password is missing" in refused.stderr) == (2, True)
    empty = run("sources", "add", "vc", "https://127.0.0.1:1", "--kind", "vim_api", "--source-user", "root", typed="\n")
    assert (empty.exit_code, "Password is missing" in empty.stderr) == (2, True)
    no_file = run("sources", "add", "vc", "qemu:///system", "--credential", "private_key=@/nonexistent/key")
    assert (no_file.exit_code, "No such file or directory" in no_file.stderr) == (2, True)
    assert "Errno" not in no_file.stderr


def test_wrong_usage(service: Service, run: Run) -> None:
    assert run("sources", "add", "lab", "https://x").exit_code == 2
    assert run("sources", "add", "lab", "https://x", "--kind", "esx").exit_code == 2
    assert run("sources", "add", "lab", "qemu:///system", "--option", "x").exit_code == 2
    assert run("sources", "add", "lab", "ftp://x", "--kind", "vim_api", "--credential", "user=u").exit_code == 2


@pytest.mark.parametrize(
    ("word", "kind"),
    [("vsphere", "vim_api"), ("VMware", "vim_api"), ("hyperv", "wmi_api"), ("proxmx", "pve_api"), ("kvm", "libvirt_remote"),
     ("xcp-ng", "xen_api"), ("Nutanix", "prism_api"), ("pve", "pve_api"), ("vim_ap", "vim_api")],
)  # fmt: skip
def test_a_platform_by_the_name_that_people_give_it_is_known(run: Run, word: str, kind: str) -> None:
    done = run("sources", "add", "lab", "https://x", "--kind", word)
    assert (done.exit_code, f"did you mean {kind}?" in done.stderr) == (2, True)
    assert done.stderr.count("did you mean") == 1


def test_the_platforms_user_is_not_the_services(run: Run) -> None:
    done = run("sources", "add", "lab", "https://x", "--kind", "vim_api", "--user", "root")
    assert (done.exit_code, "or is --source-user meant?" in done.stderr) == (2, True)
    assert "meant" not in run("sources", "list", "--user", "root").stderr


def test_import_from_a_source_finds_the_vm_by_its_name_or_id(service: Service, run: Run, platform: FakePlatform) -> None:
    platform.add_vm("vm-1", {"disk-0": bytes(4096)})
    run("sources", "add", "lab", "qemu:///system")
    done = run("import", "vm-1", "--source", "lab", "--mode", "warm", "--cutover", "manual", "--json")
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert plan["source"] == {"Live": "libvirt_remote"}
    assert (plan["source_ref"]["kind"], plan["source_ref"]["vm_id"]) == ("live_vm", "vm-1")
    assert (plan["mode"], plan["warm"]["cutover"]) == ("Warm", "manual")
    exact = ("--max-passes", "3", "--delta-threshold", "8MiB", "--interval", "0.5", "--bandwidth", "50MiB", "--verify", "full")
    plan = json.loads(run("import", "vm-1", "--source", "lab", "--mode", "warm", *exact, "--json").stdout)["plan"]
    warm = {
        "max_passes": 3,
        "delta_threshold_bytes": 8 * MIB,
        "interval_s": 0.5,
        "cutover": "auto",
        "verify": "full",
        "confidence": 0.95,
    }
    warm |= {"untracked": "cold", "schedule": None, "window_id": None}
    assert (plan["warm"], plan["limits"]) == (warm, {"bandwidth_bps": 50 * MIB})
    ruled = ("--cutover", "manual", "--sync-rule", "FREQ=DAILY", "--sync-start", "2030-11-28T22:00:00")
    timed = (*ruled, "--sync-zone", "Europe/Berlin", "--start-at", "2030-11-28T12:00:00Z", "--json")
    plan = json.loads(run("import", "vm-1", "--source", "lab", "--mode", "warm", *timed).stdout)["plan"]
    schedule = {"timezone": "Europe/Berlin", "rrule": "FREQ=DAILY", "start": "2030-11-28T22:00:00"}
    assert plan["warm"]["schedule"] == schedule
    assert plan["schedule"]["start_at"].startswith("2030-11-28T12:00:00")
    assert run("import", "vm-1", "--source", "lab", "--bandwidth", "fast").exit_code == 2
    missing = run("import", "vm-2", "--source", "lab")
    assert (missing.exit_code, "E_MIG_VM_NOT_FOUND" in missing.stderr) == (1, True)


def test_the_key_is_rotated(service: Service, run: Run) -> None:
    run("sources", "add", "lab", "qemu:///system")
    assert run("keyring", "rotate").stdout == "The key is new; the credentials of 1 sources are sealed with it\n"


@contextmanager
def _small(folder: Path) -> Iterator[Path]:
    """A file system with room for one page."""
    need_root("mount")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_site_is_recorded_into_a_file(service: Service, run: Run, tmp_path: Path) -> None:
    (folder := tmp_path / "site").mkdir()
    cluster = Cluster(Paper())
    cluster.add(100, name="payroll", scsi0="local-lvm:vm-100-disk-0,size=8G")
    cluster.add(101)
    with PveServer(cluster, folder) as site:
        arguments = ("--kind", "pve_api", "--credential", "token_id=mover@pve!synvirt", "--secret", "token_secret")
        done = run("sources", "add", "site", site.endpoint, *arguments, "--fingerprint", site.fingerprint, typed="t0ken\n")
        assert done.exit_code == 0, done.stderr
        written = tmp_path / "site.jsonl"
        reported = run("sources", "record", "site", "--vm", "payroll", "--output", written)
        assert (reported.exit_code, "Check it before" in reported.stdout) == (0, True)
        assert json.loads(written.read_text().splitlines()[0])["kind"] == "pve_api"
        assert "/qemu/100/config" in written.read_text()
        assert "/qemu/101/config" not in written.read_text()
        assert "payroll" not in written.read_text()
        assert run("sources", "record", "site").stdout.startswith('{"recording": 1')
        with _small(tmp_path / "small") as small:
            (small / "site.jsonl").write_text("the one before")
            full = run("sources", "record", "site", "--output", small / "site.jsonl")
            assert (full.exit_code, f"{small / 'site.jsonl'} cannot be written: No space left" in full.stderr) == (1, True)
            assert [(one.name, one.read_text()) for one in small.iterdir()] == [("site.jsonl", "the one before")]
            assert run("sources", "record", "site", "--output", "/dev/null").exit_code == 0
    failed = run("sources", "record", "site")
    assert (failed.exit_code, "E_MIG_SOURCE_UNREACHABLE" in failed.stderr) == (1, True)
