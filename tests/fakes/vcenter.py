"""vCenter, as VMware's own simulator (govmomi's) plays it, with what it lacks: tests/fakes/vcsim.

Built from Debian's packages when it is not there yet (half a minute), and kept outside the repository.
"""

import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from synvirt.live import SourceAccess
from synvirt.programs import end_group
from tests.needs import need, need_folder

GO_FILES = Path(__file__).parent / "vcsim"
SIMULATOR = Path("/usr/share/gocode/src/github.com/vmware/govmomi/simulator")
# Into the simulator's own package.
ADDED = ("tracking.go", "leases.go")
PROGRAM = ("main.go", "hosts.go")
BUILD_TIMEOUT_S = 500
USER, PASSWORD = "administrator@vsphere.local", "s3cret"
DISK_BYTES = 4 << 20


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "synvirt-tests"


def program() -> Path:
    """The simulator's path; built if its sources have changed. One builds, the others wait."""
    go = need("go", "golang-go")
    need_folder(SIMULATOR, "golang-github-vmware-govmomi-dev")
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(GO_FILES.glob("*.go")))).hexdigest()[:16]
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / f"vcsim-{sources}"
    with (cache / "vcsim.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            overlay = cache / "overlay.json"
            laid = {str(SIMULATOR / f"zz_{name}"): str((GO_FILES / name).resolve()) for name in ADDED}
            overlay.write_text(json.dumps({"Replace": laid}))
            new = built.with_suffix(".new")
            environment = {
                "PATH": os.environ["PATH"],
                "GO111MODULE": "off",
                "GOPATH": "/usr/share/gocode",
                "GOCACHE": str(cache / "go"),
                "CGO_ENABLED": "0",
            }
            argv = [go, "build", "-overlay", str(overlay), "-o", str(new), *(str(GO_FILES / name) for name in PROGRAM)]
            subprocess.run(argv, check=True, env=environment, timeout=BUILD_TIMEOUT_S)
            new.rename(built)
    return built


@dataclass(frozen=True)
class VCenter:
    url: str
    fingerprint: str
    _control: str

    def access(self, *, password: str = PASSWORD, **options: Any) -> SourceAccess:
        """By its certificate, pinned, if `options` say nothing else."""
        chosen = options or {"fingerprint_sha256": self.fingerprint}
        return SourceAccess(self.url, {"user": USER, "password": password}, chosen)

    def control(self, path: str, **query: Any) -> Any:
        answer = httpx.get(f"{self._control}/{path}", params=query, timeout=20)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def add_disk(self, vm_id: str, content: bytes, *, place: int = 0) -> Path:
        """The VM's disk at this place holds this, and is made if there is none; the file that its guest would write to."""
        if place > 0:
            self.control("another", vm=vm_id)
        path = Path(self.control("disk", vm=vm_id, place=place, bytes=len(content)))
        path.write_bytes(content)
        return path

    def guest_writes(self, vm_id: str, offset: int, data: bytes) -> bool:
        """False when the VM is off: a guest that does not run writes nothing."""
        answer = httpx.post(f"{self._control}/write", params={"vm": vm_id, "offset": offset}, content=data, timeout=20)
        assert answer.status_code == 200, answer.text
        return bool(answer.json())

    def fault(self, method: str, kind: str, *, times: int = 1, match: str = "") -> None:
        """vcsim/main.go says which kinds there are."""
        self.control("fault", method=method, kind=kind, times=times, match=match)

    def calls(self, method: str) -> int:
        return int(self.control("state")["calls"].get(method, 0))

    def snapshots(self) -> list[str]:
        return list(self.control("state")["snapshots"])

    def tracked(self) -> list[str]:
        """The VMs that are set to be tracked, and the files that their hosts keep for it."""
        return list(self.control("state")["tracked"])

    def sessions(self) -> int:
        return int(self.control("state")["sessions"])

    def leases(self) -> int:
        """Those of exports that are not over."""
        return int(self.control("state")["leases"])

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Of each ESXi host that listens by its id, of a "stranger", and of vCenter itself: what it `served`, which secrets of
        vCenter's it was `shown`, how many transfers it had at once at the `most`, how many it `refused`."""
        return dict(self.control("state")["hosts"])

    def next_leases(self, *, timeout_ms: int = 300_000, stuck: int = 0) -> None:
        """Leases made from now on end when nobody reports their progress for this long; the first `stuck` are never ready."""
        self.control("leases", timeout_ms=timeout_ms, stuck=stuck)


@contextmanager
def vcenter(folder: Path, *, vms: int = 1) -> Iterator[VCenter]:
    """A vCenter with `vms` machines in each of its two resource pools; what it keeps lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [str(program()), "-folder", str(folder), "-vms", str(vms), "-user", USER, "-password", PASSWORD]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            started = json.loads(child.stdout.readline())
            yield VCenter(started["url"], started["fingerprint"], started["control"])
        finally:
            end_group(child)
