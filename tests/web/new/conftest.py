"""A platform with six machines, and a service that finds out of a plan what a real one might."""

from collections.abc import Iterator

import pytest

from synvirt.destinations.directory import DirectoryDestination
from synvirt.errors import Conflict
from synvirt.migrations.planning.foreseen import DiskWay, DryRun, PlanForecast, PlanProblem
from synvirt.model.job import Difference
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Concern, VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import Source, SourceRequest
from tests.fakes.live import FakePlatform
from tests.fakes.platforms import with_fake
from tests.fakes.service import Service
from tests.offline import appliances
from tests.web.conftest import serving

TAKEN = "taken"


class Small(DirectoryDestination):
    def free_bytes(self) -> int:
        return 4096


def check(plan: MigrationPlan) -> None:
    """What the engine's own check would say."""
    if plan.target.name == TAKEN:
        raise Conflict(f"domain {TAKEN} has the name of the guest", hint="choose another name")


def foreseen(plan: MigrationPlan) -> DryRun:
    """What the engine would find out, of a machine with one disk."""
    taken = PlanProblem(field="target.name", detail=f"{TAKEN} is the name of a guest here", hint="choose another name")
    key = "boot" if plan.source.Live else "disk-0"
    return DryRun(
        plan=plan,
        manifest=VmManifest(vm_id="vm", name="vm"),
        concerns=(
            Concern(
                id="usb", category="Warning", label="A USB device", assessment="It stays at its source.", remedy="Unplug it."
            ),
            Concern(
                id="target-too-small",
                category="Critical",
                label="Disks do not fit",
                assessment="They are large.",
                remedy="Make room.",
            ),
        ),
        ways=(DiskWay(disk_key=key, way="warm", reason="the source tracks its changes"),),
        forecast=PlanForecast(bytes_to_read=3 << 30, copy_s=75, outage_p50_s=9, outage_p95_s=61, basis="2 jobs of this source"),
        differences=(Difference(what="Display", source="VMware SVGA", here="VGA", why="QEMU has no such card"),),
        problems=(taken,) if plan.target.name == TAKEN else (),
    )


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> FakePlatform:
    platform = FakePlatform(tmp_path_factory.mktemp("platform"))
    platform.add_vm("vm-erp", {"boot": b"e" * 65536, "data": b"d" * 65536}, family="windows")
    platform.add_vm("vm-mail", {"boot": b"m" * 65536}, cbt=False)
    for number in range(4):
        platform.add_vm(f"vm-web-{number}", {"boot": b"w" * 65536})
    return platform


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, platform: FakePlatform) -> Iterator[tuple[Service, str]]:
    folder = tmp_path_factory.mktemp("web")
    made = Service(folder, platforms=with_fake(platform), check=check, dry_run=foreseen, remote_allowed_hosts=("127.0.0.0/8",))
    made.destinations["small"] = Small(made.settings.volumes_dir)
    imports = made.settings.imports_dir
    appliances.image(imports / "exports & more", "gateway.qcow2", "qcow2", appliances.raw_disk())
    (imports / "notes.txt").write_text("no machine")
    appliances.archive(imports / "erp.ova", appliances.appliance())
    two = appliances.description("two_systems")
    appliances.archive(imports / "two.ova", {"two.ovf": two})
    with serving(made) as address:
        yield made, address
    made.close()


@pytest.fixture(scope="module")
def source(service: Service) -> Source:
    request = SourceRequest(name="rack 7", kind=LiveKind.LIBVIRT_REMOTE, endpoint="qemu+ssh://root@10.0.0.7/system")
    return service.sources.add(request)
