"""The lab guest of `make lab`: a small Debian with zfs, booted for one command.

    /host    this checkout, read-only, its virtual environment with it
    /result  a folder of the test's: what the command leaves there is there when the guest is off

Its kernel is User Mode Linux, a program of this machine: what runs in the guest is as fast as here, but for system calls and
page faults. It has one processor. The guest has a pool `tank` on a disk of its own, empty at each start; its root is
read-only, and what it writes elsewhere is in its memory. It has no network.
"""

import hashlib
import os
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.needs import lacking, need

CHECKOUT = Path(__file__).resolve().parent.parent
RECIPE = ("build", "kernel.config", "guest-init")
POOL_BYTES = 2 << 30
# Its pages are this machine's only once they are used.
MEMORY_MIB = 2048


@dataclass(frozen=True, slots=True)
class Output:
    """`code`: the command's own, or None where the guest never came so far; `output`: its output; `console`: the guest."""

    code: int | None
    output: str
    console: str


def folder() -> Path:
    """Where `make lab` keeps the guest of this recipe. Skips, or fails on CI, where there is none."""
    cache = os.environ.get("SYNVIRT_LAB") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "synvirt-lab"
    recipe = hashlib.sha256(b"".join((CHECKOUT / "lab" / name).read_bytes() for name in RECIPE)).hexdigest()[:12]
    made = sorted(Path(cache).glob(f"zfs-{recipe}-*"))
    if not made:
        lacking(f"needs the lab guest, a Debian with zfs: run `make lab` (it takes some minutes, once); looked in {cache}")
    return made[-1]


def python() -> str:
    """How the guest calls Python with this environment's packages: both are Debian 12's Python, and the environment lies in the
    checkout."""
    packages = Path(sysconfig.get_path("purelib"))
    if not packages.is_relative_to(CHECKOUT):
        lacking(f"needs the virtual environment to lie in the checkout, where `make test` makes it: it is {packages}")
    inside = Path("/host") / packages.relative_to(CHECKOUT)
    return f"PYTHONPATH={inside}:/host/src:/host PYTHONDONTWRITEBYTECODE=1 python3"


def run(command: str, result: Path, *, timeout_s: float) -> Output:
    """Boot the guest, run the command in bash, and wait until it is off. `result` is /result in the guest."""
    guest = folder()
    pool, console = result / "pool.img", result / "console"
    with pool.open("wb") as file:
        file.truncate(POOL_BYTES)
    (result / "command").write_text(command)
    # As another user than root it takes a user namespace of its own to have one for processes.
    namespaces = ["--pid"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--pid"]
    argv = [
        # A guest never outlives the test that booted it, however that ended: each process of the guest is one here, and all are
        # in a namespace, which ends with its first process.
        *("setpriv", "--pdeathsig", "KILL", need("unshare", "util-linux"), *namespaces, "--fork", "--kill-child"),
        *(str(guest / "linux"), f"mem={MEMORY_MIB}M", f"uml_dir={result}/", "umid=uml", "con=null", "con0=null,fd:1", "quiet"),
        *("root=none", "rootfstype=hostfs", f"rootflags={guest / 'root'}", "ro", "init=/sbin/guest-init"),
        # Those that Linux does not know are variables of the first program.
        *(f"ubd1={pool}", f"lab_host={CHECKOUT}", f"lab_result={result}"),
    ]
    try:
        with console.open("wb") as file:
            subprocess.run(argv, timeout=timeout_s, stdin=subprocess.DEVNULL, check=True, stdout=file, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the guest was not done in {timeout_s} s:\n{_tail(console)}\n{_tail(result / 'output')}", pytrace=False)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the guest ended with {error.returncode}:\n{_tail(console)}\n{_tail(result / 'output')}", pytrace=False)
    finally:
        pool.unlink()
    code = (result / "code").read_text().strip() if (result / "code").exists() else ""
    return Output(int(code) if code else None, _tail(result / "output", 200_000), _tail(console))


def _tail(path: Path, chars: int = 5000) -> str:
    return path.read_text(errors="replace")[-chars:] if path.exists() else ""
