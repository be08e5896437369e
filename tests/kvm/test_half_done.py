"""Records of libvirt's that a killed service left, beside a real QEMU that is further, or not as far, as they say."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from synvirt.kvm import half_done
from synvirt.kvm.qmp import NoQemu, Qmp, rows
from tests.needs import need
from tests.running.processes import until
from tests.servers.halting_rom import halting_rom

SIZE = 4 << 20
TOP, BETWEEN, VOLUME, EXPORT, SCRATCH = "top.qcow2", "between.qcow2", "volume.raw", "export.raw", "vda.scratch"
# As libvirt numbers them, in the order in which they come.
NUMBERS = {TOP: 1, EXPORT: 2, BETWEEN: 3, VOLUME: 4, SCRATCH: 5}
AT_REST, BACKUP = (
    "<job type='none' async='none'/>",
    "<job type='none' async='backup' flags='0x0' asyncStarted='1795955897395'/>",
)
COPY, COMMIT = "copy-vda-libvirt-1-format", "commit-vda-libvirt-3-format"


class Guest:
    """A QEMU with one disk, whose nodes have libvirt's names; and the record and configuration that libvirt has of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (VOLUME, EXPORT):
            (folder / name).write_bytes(bytes(SIZE))
        for name, over in ((TOP, EXPORT), (BETWEEN, VOLUME)):
            argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(folder / over), str(folder / name)]
            subprocess.run([*argv, str(SIZE)], check=True)
        self.record, self.configuration = folder / "run/qemu/web.xml", folder / "etc/qemu/web.xml"
        for path in (self.record, self.configuration):
            path.parent.mkdir(parents=True)
        self.monitor = folder / "monitor.sock"
        argv = [need("qemu-system-x86_64", "qemu-system-x86"), "-nodefaults", "-display", "none", "-m", "16", "-S"]
        argv += ["-machine", "q35,accel=tcg", "-bios", str(halting_rom(folder / "rom"))]
        argv += ["-qmp", f"unix:{self.monitor},server=on,wait=off"]
        for name in (EXPORT, TOP):
            argv += ["-blockdev", self._storage(name), "-blockdev", self._form(name)]
        argv += ["-device", "virtio-blk-pci,id=virtio-disk0,drive=libvirt-1-format"]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        until(self._answers)

    def _answers(self) -> bool:
        """A socket is there before QEMU takes connections."""
        with contextlib.suppress(NoQemu):
            self.ask(concluded)
            return True
        return False

    def ask(self, asked: Callable[[Qmp], Any]) -> Any:
        with Qmp(self.monitor, "web") as qmp:
            return asked(qmp)

    def _storage(self, name: str) -> str:
        return f"driver=file,filename={self.folder / name},node-name=libvirt-{NUMBERS[name]}-storage"

    @staticmethod
    def _form(name: str) -> str:
        number = NUMBERS[name]
        over = ",backing=libvirt-2-format" if name == TOP else ""
        return f"driver={form(name)},file=libvirt-{number}-storage,node-name=libvirt-{number}-format{over}"

    # ── what libvirt asks of QEMU ────────────────────────────────────────────────────────────────────────────────────

    def copy(self, qmp: Qmp, **more: Any) -> None:
        """Until it is ready for a pivot, unless it is slow. Its target's volume is opened late."""
        self._add(qmp, BETWEEN, backing=None)
        arguments = {"device": "libvirt-1-format", "target": "libvirt-3-format", "sync": "top", "auto-dismiss": False}
        qmp.ask("blockdev-mirror", {"job-id": COPY, **arguments, **more})
        if not more:
            ready(qmp)

    def lay_under(self, qmp: Qmp) -> None:
        """The first part of its pivot."""
        self._add(qmp, VOLUME)
        qmp.ask("blockdev-snapshot", {"node": "libvirt-4-format", "overlay": "libvirt-3-format"})

    def commit(self, qmp: Qmp) -> None:
        arguments = {"job-id": COMMIT, "device": "libvirt-3-format", "base-node": "libvirt-4-format", "auto-dismiss": False}
        qmp.ask("block-commit", arguments)
        ready(qmp)

    def _add(self, qmp: Qmp, name: str, **more: Any) -> None:
        number = NUMBERS[name]
        storage = {"driver": "file", "filename": str(self.folder / name), "node-name": f"libvirt-{number}-storage"}
        qmp.ask("blockdev-add", storage)
        own = {"driver": form(name), "file": f"libvirt-{number}-storage", "node-name": f"libvirt-{number}-format"}
        qmp.ask("blockdev-add", own | more)

    def back_up(self, qmp: Qmp) -> None:
        """As it begins: a server, a scratch image and a job."""
        qmp.ask("nbd-server-start", {"addr": {"type": "unix", "data": {"path": str(self.folder / "backup.sock")}}})
        (self.folder / SCRATCH).write_bytes((self.folder / BETWEEN).read_bytes())
        self._add(qmp, SCRATCH, backing=None)
        more = {"device": "libvirt-1-format", "target": "libvirt-5-format", "sync": "none", "auto-dismiss": False}
        qmp.ask("blockdev-backup", {"job-id": "backup-vda-libvirt-1-format", **more})

    # ── what libvirt has written ─────────────────────────────────────────────────────────────────────────────────────

    def write(self, on: str, jobs: str, mirror: str, more: str = "") -> None:
        """`more`: of its domain's job, which libvirt leaves out where there is none."""
        below = {TOP: EXPORT, BETWEEN: VOLUME}[on]
        chain = f"<backingStore type='file'><format type='raw'/>{self.source(below)}<backingStore/></backingStore>"
        disk = f"""<disk type='file' device='disk'><driver name='qemu' type='qcow2' discard='unmap'/>{self.source(on)}{chain}
            {mirror}<target dev='vda' bus='virtio'/><alias name='virtio-disk0'/>
            <privateData><qom name='/machine/peripheral/virtio-disk0/virtio-backend'/></privateData></disk>"""
        self.record.write_text(f"""<domstatus state='paused' reason='user' pid='{self.process.pid}'>
            <monitor path='{self.monitor}' type='unix'/>{more}<blockjobs active='yes'>{jobs}</blockjobs>
            <domain type='qemu' id='1'><name>web</name><metadata><mark xmlns='https://synvirt.org/x'/></metadata>
            <devices>{disk}</devices></domain></domstatus>""")
        self.configuration.write_text(f"""<domain type='qemu'><name>web</name><devices><disk type='file' device='disk'>
            <driver name='qemu' type='qcow2'/><source file='{self.folder / on}'/><target dev='vda' bus='virtio'/></disk>
            <disk type='file' device='cdrom'><source file='/iso'/><target dev='sda' bus='sata'/></disk></devices></domain>""")

    def source(self, name: str) -> str:
        nodes = "".join(f"<nodename type='{kind}' name='libvirt-{NUMBERS[name]}-{kind}'/>" for kind in ("storage", "format"))
        return f"<source file='{self.folder / name}'><privateData><nodenames>{nodes}</nodenames></privateData></source>"

    # ── what is there now ────────────────────────────────────────────────────────────────────────────────────────────

    def mended(self) -> tuple[str, str, set[str], list[Any]]:
        """The file of the disk by the record and by the configuration, and QEMU's nodes and jobs."""
        half_done.mend(self.folder)
        record, configuration = (ET.fromstring(path.read_text()) for path in (self.record, self.configuration))
        (disk,) = record.iterfind("domain/devices/disk")
        assert disk.find("mirror") is None
        assert [(jobs.get("active"), len(jobs)) for jobs in record.iterfind("blockjobs")] == [("no", 0)]
        assert record.find("domain/metadata/{https://synvirt.org/x}mark") is not None
        assert self.record.stat().st_mode & 0o777 == 0o600
        other = configuration.find("devices/disk[@device='cdrom']/source")
        assert other is not None
        assert other.attrib == {"file": "/iso"}
        assert disk_of(disk) == disk_of(configuration.find("devices/disk"))
        nodes, jobs = self.ask(lambda qmp: (qmp.ask("query-named-block-nodes", {"flat": True}), qmp.ask("query-jobs")))
        named = {row["node-name"] for row in rows(nodes)}
        assert {f"libvirt-{number}-storage" for number in NUMBERS.values()} & named == {
            name.replace("format", "storage") for name in named if name.startswith("libvirt-") and name.endswith("format")
        }
        file, kind = disk_of(disk)
        assert kind == form(file)
        return file, self.device(), {name for name in named if name.endswith("format")}, jobs

    def device(self) -> str:
        """The file that QEMU has the disk on."""
        (row,) = rows(self.ask(lambda qmp: qmp.ask("query-block")))
        return Path(row["inserted"]["file"]).name


def form(name: str) -> str:
    return "raw" if name.endswith(".raw") else "qcow2"


def disk_of(disk: ET.Element | None) -> tuple[str, str | None]:
    assert disk is not None
    source, driver = disk.find("source"), disk.find("driver")
    assert source is not None
    assert driver is not None
    return Path(source.attrib["file"]).name, driver.get("type")


def ready(qmp: Qmp) -> None:
    until(lambda: [job["status"] for job in rows(qmp.ask("query-jobs"))] == ["ready"])


def concluded(qmp: Qmp) -> None:
    until(lambda: {job["status"] for job in rows(qmp.ask("query-jobs"))} <= {"concluded"})


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    made = Guest(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def job(name: str, state: str) -> str:
    kind = "copy" if name == COPY else "active-commit"
    return f"<blockjob name='{name}' type='{kind}' state='{state}' jobflags='0x7'><disk dst='vda'/></blockjob>"


def mirror_between(guest: Guest, more: str) -> str:
    below = f"<backingStore type='file'><format type='raw'/>{guest.source(VOLUME)}<backingStore/></backingStore>"
    return f"<mirror type='file' {more}><format type='qcow2'/>{guest.source(BETWEEN)}{below}</mirror>"


def mirror_volume(guest: Guest, more: str) -> str:
    return f"<mirror type='file' {more}><format type='raw'/>{guest.source(VOLUME)}</mirror>"


ON_TOP = {"libvirt-1-format", "libvirt-2-format"}
ON_BETWEEN = {"libvirt-3-format", "libvirt-4-format"}


def test_a_copy_that_libvirt_did_not_note_whole_is_ended(guest: Guest) -> None:
    """9.0 refuses each further one then: «disk 'vda' already in active block job»."""
    guest.ask(guest.copy)
    guest.write(TOP, job(COPY, "ready"), "")
    assert guest.mended() == (TOP, TOP, ON_TOP, [])


def test_a_pivot_that_was_only_prepared_is_ended(guest: Guest) -> None:
    """9.0 prepares it again then: «Duplicate nodes with node-name='libvirt-4-storage'»."""
    guest.ask(guest.copy)
    guest.ask(guest.lay_under)
    guest.write(TOP, job(COPY, "ready"), mirror_between(guest, "job='copy' ready='yes'"))
    assert guest.mended() == (TOP, TOP, ON_TOP, [])


@pytest.mark.parametrize("more", ["job='copy' ready='yes'", "job='copy' ready='pivot'", "job=''"])
@pytest.mark.parametrize("is_dismissed", [False, True])
def test_a_pivot_that_is_done_is_recorded(guest: Guest, more: str, is_dismissed: bool) -> None:
    """9.0 does not read the last record, and takes the guest for one that is off."""

    def pivot(qmp: Qmp) -> None:
        guest.copy(qmp)
        guest.lay_under(qmp)
        qmp.ask("job-complete", {"id": COPY})
        concluded(qmp)
        if is_dismissed:
            qmp.ask("job-dismiss", {"id": COPY})

    guest.ask(pivot)
    guest.write(TOP, job(COPY, "pivoting"), mirror_between(guest, more), AT_REST if is_dismissed else "")
    assert guest.mended() == (BETWEEN, BETWEEN, ON_BETWEEN, [])


@pytest.mark.parametrize("noted", [True, False])
def test_a_copy_that_runs_goes_on_if_libvirt_has_its_mirror(guest: Guest, noted: bool) -> None:
    write = 'qemu-io -d /machine/peripheral/virtio-disk0/virtio-backend "write 0 4M"'
    assert guest.ask(lambda qmp: qmp.ask("human-monitor-command", {"command-line": write})) == ""
    guest.ask(lambda qmp: guest.copy(qmp, speed=1))
    guest.write(TOP, job(COPY, "running"), mirror_between(guest, "job='copy'") if noted else "")
    if not noted:
        assert guest.mended() == (TOP, TOP, ON_TOP, [])
        return
    before = guest.record.read_bytes()
    half_done.mend(guest.folder)
    assert guest.record.read_bytes() == before
    assert [job["status"] for job in rows(guest.ask(lambda qmp: qmp.ask("query-jobs")))] == ["running"]


def on_between(guest: Guest, qmp: Qmp) -> None:
    guest.copy(qmp)
    guest.lay_under(qmp)
    qmp.ask("job-complete", {"id": COPY})
    concluded(qmp)
    qmp.ask("job-dismiss", {"id": COPY})
    for name in ("libvirt-1-format", "libvirt-1-storage", "libvirt-2-format", "libvirt-2-storage"):
        qmp.ask("blockdev-del", {"node-name": name})


def test_a_commit_that_runs_is_ended_and_the_guest_keeps_its_layer(guest: Guest) -> None:
    guest.ask(lambda qmp: on_between(guest, qmp))
    guest.ask(guest.commit)
    guest.write(BETWEEN, job(COMMIT, "ready"), mirror_volume(guest, "job='active-commit' ready='yes'"))
    assert guest.mended() == (BETWEEN, BETWEEN, ON_BETWEEN, [])


@pytest.mark.parametrize(("state", "more"), [("pivoting", "job=''"), (None, "job='active-commit' ready='pivot'")])
def test_a_guest_that_is_on_its_volume_is_recorded_there(guest: Guest, state: str | None, more: str) -> None:
    """9.0 cannot read the first record, and takes the guest for one that is off; the second one stays so for ever."""

    def pivot(qmp: Qmp) -> None:
        on_between(guest, qmp)
        guest.commit(qmp)
        qmp.ask("job-complete", {"id": COMMIT})
        concluded(qmp)

    guest.ask(pivot)
    guest.write(BETWEEN, job(COMMIT, state) if state else "", mirror_volume(guest, more))
    assert guest.mended() == (VOLUME, VOLUME, {"libvirt-4-format"}, [])


BLOCKJOB = "<blockjob name='backup-vda-libvirt-1-format' type='backup' state='new' jobflags='0x0'><disk dst='vda'/></blockjob>"


@pytest.mark.parametrize("jobs", ["", BLOCKJOB])
def test_a_backup_that_libvirt_has_begun_and_not_noted_is_ended(guest: Guest, jobs: str) -> None:
    """9.0 waits for it for ever: «backup job data missing»."""
    guest.ask(guest.back_up)
    guest.write(TOP, jobs, "", BACKUP)
    assert guest.mended() == (TOP, TOP, ON_TOP, [])
    assert AT_REST.replace("'", '"').replace("/", " /") in guest.record.read_text()
    guest.ask(guest.back_up)


def test_a_backup_that_libvirt_has_noted_goes_on(guest: Guest) -> None:
    guest.ask(guest.back_up)
    guest.write(TOP, BLOCKJOB, "", f"{BACKUP}<backups><domainbackup mode='pull'/></backups>")
    before = guest.record.read_bytes()
    half_done.mend(guest.folder)
    assert guest.record.read_bytes() == before
    assert [job["type"] for job in rows(guest.ask(lambda qmp: qmp.ask("query-jobs")))] == ["backup"]


def test_a_kill_before_the_record_is_written_is_made_good_the_next_time(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, root: ET.Element) -> None:
        if path == guest.record:
            raise SystemExit
        write(path, root)

    write = half_done._write
    guest.ask(lambda qmp: on_between(guest, qmp))
    guest.write(TOP, job(COPY, "pivoting"), mirror_between(guest, "job='copy' ready='pivot'"))
    with monkeypatch.context() as patched:
        patched.setattr(half_done, "_write", killed)
        with pytest.raises(SystemExit):
            half_done.mend(guest.folder)
    assert guest.mended() == (BETWEEN, BETWEEN, ON_BETWEEN, [])


def unreadable(guest: Guest) -> None:
    guest.record.write_text("<domstatus><mirror ")


def nowhere(guest: Guest) -> None:
    """QEMU has another node there."""
    guest.write(BETWEEN, job(COMMIT, "ready"), mirror_volume(guest, "job='active-commit'"))


def ended(guest: Guest) -> None:
    nowhere(guest)
    guest.process.kill()
    guest.process.wait()


def at_rest(guest: Guest) -> None:
    guest.write(TOP, "", "")
    guest.process.kill()


@pytest.mark.parametrize("state", [unreadable, nowhere, ended, at_rest])
def test_a_record_that_cannot_be_made_true_stays_as_it_is(guest: Guest, state: Callable[[Guest], None]) -> None:
    state(guest)
    before = guest.record.read_bytes()
    began = time.monotonic()
    half_done.mend(guest.folder)
    assert guest.record.read_bytes() == before
    assert time.monotonic() - began < 20, "it waits for nobody who is not there"
