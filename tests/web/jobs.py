"""Jobs as an engine leaves them, for pages to show."""

import math
from datetime import timedelta
from uuid import UUID, uuid4

from synvirt.jobs.course import Course
from synvirt.migrations.memory import CourseMemory
from synvirt.migrations.proof.receipts import facts_of
from synvirt.model.job import (
    BootAttempt,
    Conversion,
    ConversionMessage,
    Difference,
    DiskProgress,
    Domain,
    Forecast,
    Migration,
    Moved,
    OutageForecast,
    OutagePart,
    Pass,
    Progress,
    StateVisit,
)
from synvirt.model.kinds import LiveKind, Mode, State
from synvirt.model.machine import GuestOs, VmManifest
from synvirt.model.plan import LiveVmRef, MigrationPlan, PlanSource, Warm
from synvirt.model.problems import Problem
from synvirt.model.rehearsal import Sameness
from synvirt.model.values import now
from synvirt.proof.keeping import CopiedDisk, MovedJob
from synvirt.sizes import GIB, MIB
from tests.fakes.service import PLAN, Service

WARM_PLAN = MigrationPlan(
    source=PlanSource(Live=LiveKind.VIM_API),
    source_ref=LiveVmRef(kind="live_vm", source_id=uuid4(), vm_id="vm-42"),
    mode=Mode.WARM,
    warm=Warm(cutover="manual"),
)
WINDOWS = VmManifest(
    vm_id="vm-42",
    name="erp-db-01",
    firmware="uefi",
    cpu_count=8,
    memory_bytes=32 * GIB,
    guest_os=GuestOs(family="windows", id="windows2022srv_64Guest", name="Windows Server 2022"),
    cbt_available=True,
)
LINUX = VmManifest(
    vm_id="web", name="web", cpu_count=2, memory_bytes=4 * GIB, guest_os=GuestOs(family="linux", name="Debian 12")
)


def added(service: Service, name: str, *visits: tuple[State, int], plan: MigrationPlan = PLAN, **fields: object) -> UUID:
    """A job that entered each state so many seconds before now; in the last one."""
    history = tuple(StateVisit(state=state, at=now() - timedelta(seconds=ago)) for state, ago in visits)
    first, last = history[0], history[-1]
    values: dict[str, object] = {
        "id": uuid4(),
        "name": name,
        "plan": plan,
        "state": last.state,
        "mode_effective": plan.mode,
        "history": history,
        "created_at": first.at,
        "started_at": first.at,
        "finished_at": last.at if last.state in (State.COMPLETED, State.FAILED, State.CANCELLED) else None,
    }
    job = Migration.model_validate(values | fields)
    service.store.add(job, host=job.host or "local")
    return job.id


def with_course(service: Service, job_id: UUID, *, seconds: int, ago: int) -> UUID:
    """As one copies that is slowed by others now and then, and waits a third of the time."""
    began, done, course = now().timestamp() - ago, 0.0, Course()
    for second in range(seconds):
        if second % 300 < 200:
            done += (220 + 40 * math.sin(second / 17) + 30 * math.sin(second / 5)) * MIB
        course = course.with_sample(began + second, int(done))
    service.store.memory.change(job_id, CourseMemory, lambda _: CourseMemory(course=course))
    return job_id


def problem(code: str, message: str, hint: str, *, fatal: bool, state: State) -> Problem:
    return Problem(code=code, message=message, hint=hint, fatal=fatal, at=now(), state=state)


DOWNGRADED = problem(
    "E_MIG_CBT_UNSUPPORTED",
    "vm-7 has a disk in independent mode, whose changes vSphere does not track: the job runs cold",
    "make the disk dependent, and submit the plan again",
    fatal=False,
    state=State.QUEUED,
)
NO_BOOT = problem(
    "E_MIG_GUEST_BOOT_FAILED",
    "the guest showed no sign of life in 600 s, with its disks on virtio, on sata and on ide",
    "look at its screen below; its copy is kept, and the job can go on with other settings",
    fatal=True,
    state=State.STARTING,
)


def warm(service: Service, name: str = "erp-db-01") -> UUID:
    job_id = added(
        service,
        name,
        (State.QUEUED, 1500),
        (State.COPYING_FULL, 1496),
        (State.DELTA_SYNCING, 410),
        plan=WARM_PLAN,
        manifest=WINDOWS,
        disks=(
            DiskProgress(
                key="2000",
                label="Hard disk 1",
                state="copied",
                bytes_total=60 * GIB,
                bytes_done=60 * GIB,
                bytes_zero=21 * GIB,
                volume="tank/synvirt/migrations/erp/hard_disk_1",
            ),
            DiskProgress(
                key="2001",
                label="Hard disk 2",
                state="copying",
                bytes_total=412 * MIB,
                bytes_done=260 * MIB,
                volume="tank/synvirt/migrations/erp/hard_disk_2",
            ),
        ),
        passes=(
            Pass(number=0, kind="full", bytes=188 * GIB, seconds=1086, finished_at=now() - timedelta(seconds=410)),
            Pass(number=1, kind="delta", bytes=2 * GIB, seconds=12.4, finished_at=now() - timedelta(seconds=390)),
            Pass(number=2, kind="delta", bytes=412 * MIB, seconds=2.6),
        ),
        forecast=Forecast(
            change_rate_bps=3e6,
            throughput_bps=180e6,
            expected_delta_bytes=60 * MIB,
            expected_downtime_s=4.2,
            converges=True,
            at=now(),
        ),
        progress=Progress(bytes_total=412 * MIB, bytes_done=260 * MIB, bytes_zero=8 * MIB, rate_bps=171e6, eta_s=0.9),
        destination="zfs",
    )
    return with_course(service, job_id, seconds=1490, ago=1496)


def downgraded(service: Service) -> UUID:
    total = 40 * GIB
    return added(
        service,
        "mail-gateway",
        (State.QUEUED, 96),
        (State.COPYING_FULL, 90),
        plan=WARM_PLAN,
        mode_effective=Mode.COLD,
        manifest=LINUX,
        last_error=DOWNGRADED,
        disks=(
            DiskProgress(key="2000", label="Hard disk 1", state="copying", bytes_total=total, bytes_done=total * 62 // 100),
        ),
        progress=Progress(bytes_total=total, bytes_done=total * 62 // 100, bytes_zero=4 * GIB, rate_bps=295e6, eta_s=51),
    )


def unbooted(service: Service) -> UUID:
    return added(
        service,
        "legacy-nt",
        (State.QUEUED, 900),
        (State.COPYING_FULL, 899),
        (State.V2V_PROCESSING, 780),
        (State.STARTING, 660),
        (State.FAILED, 60),
        manifest=WINDOWS,
        last_error=NO_BOOT,
        disks=(
            DiskProgress(
                key="disk-1",
                label="disk-1",
                state="copied",
                bytes_total=8 * GIB,
                bytes_done=8 * GIB,
                bytes_zero=GIB,
                volume="disk-1.raw",
            ),
        ),
        progress=Progress(bytes_total=8 * GIB, bytes_done=8 * GIB, bytes_zero=GIB),
        boot_attempts=(
            BootAttempt(
                disk_bus="virtio",
                began_at=now() - timedelta(seconds=660),
                ended_at=now() - timedelta(seconds=460),
                trouble="the firmware found nothing to boot",
            ),
            BootAttempt(
                disk_bus="sata",
                began_at=now() - timedelta(seconds=460),
                ended_at=now() - timedelta(seconds=60),
                trouble="no sign of life in 400 s",
            ),
        ),
        conversion=Conversion(
            tool="virt-v2v-in-place 2.2",
            started_at=now() - timedelta(seconds=780),
            finished_at=now() - timedelta(seconds=665),
            messages=(
                ConversionMessage(
                    at=now() - timedelta(seconds=700), kind="message", text="Converting Windows Server 2003 to run on KVM"
                ),
                ConversionMessage(
                    at=now() - timedelta(seconds=690),
                    kind="warning",
                    text="there is no virtio-scsi driver for this version of Windows",
                ),
            ),
        ),
    )


def moved(service: Service, name: str = "erp-app-01") -> UUID:
    """A warm job that completed within its forecast, with a receipt."""
    parts = (
        OutagePart(name="shutdown", p50_s=31.0, p95_s=48.0, measured=7),
        OutagePart(name="last copy", p50_s=4.1, p95_s=9.2, measured=3),
        OutagePart(name="boot", p50_s=60.0, p95_s=260.0, measured=0),
    )
    job_id = added(
        service,
        name,
        (State.QUEUED, 900),
        (State.COPYING_FULL, 899),
        (State.DELTA_SYNCING, 400),
        (State.CUTTING_OVER, 120),
        (State.STARTING, 70),
        (State.COMPLETED, 40),
        plan=WARM_PLAN.model_copy(update={"outage_budget_s": 300.0}),
        manifest=LINUX,
        passes=(
            Pass(number=1, kind="full", bytes=16 * GIB, seconds=480, finished_at=now()),
            Pass(
                number=2,
                kind="delta",
                bytes=GIB,
                seconds=9,
                bytes_checked=80 * MIB,
                would_see=0.0123,
                finished_at=now(),
            ),
            Pass(number=3, kind="final", bytes=40 * MIB, seconds=4, finished_at=now()),
        ),
        outage=OutageForecast(p50_s=95.1, p95_s=296.0, budget_s=300.0, parts=parts, at=now() - timedelta(seconds=121)),
        downtime_s=82.4,
        boot_sign="its agent answered after 14 s",
        moved=Moved(
            at=now(),
            same=41,
            differ=(
                Sameness(item="service <nginx>", source="runs", clone=None, grade="wrong", reason="it does not run here"),
                Sameness(item="kernel", source="6.1", clone="5.10", grade="look", reason="it differs"),
            ),
        ),
    )
    job = service.store.get(job_id)
    disks = (CopiedDisk("2000", "Hard disk 1 <b>", "erp-app-01.raw", 16 * GIB, service.receipts.hashes_file(job_id, 0)),)
    receipt = service.receipts.make(MovedJob(job_id, facts_of(job), b"{}\n", disks, None))
    service.store.change(job_id, State.COMPLETED, lambda one: one.model_copy(update={"receipt": receipt}))
    return job_id


def completed(service: Service, name: str = "intranet") -> UUID:
    return added(
        service,
        name,
        (State.QUEUED, 300),
        (State.COPYING_FULL, 299),
        (State.STARTING, 181),
        (State.COMPLETED, 160),
        manifest=LINUX,
        disks=(
            DiskProgress(
                key="disk-1",
                label="disk-1",
                state="copied",
                bytes_total=16 * GIB,
                bytes_done=16 * GIB,
                bytes_zero=9 * GIB,
                volume="intranet.raw",
            ),
        ),
        progress=Progress(bytes_total=16 * GIB, bytes_done=16 * GIB, bytes_zero=9 * GIB),
        boot_sign="its agent answered after 14 s",
        domain=Domain(
            name=name,
            uuid=str(uuid4()),
            xml="<domain/>",
            differences=(
                Difference(what="disk bus", source="lsilogic", here="virtio", why="it has the driver, and is faster with it"),
            ),
        ),
    )
