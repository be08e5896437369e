"""Whole processes, measured from outside: wall time, and the most memory that any one of them held."""

import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.rows import Row
from synvirt.disks.raw.files import RawReader

COMPARED_BYTES = 4 << 20
# How often a row is measured at most, in units of its rounds, to find as many rounds without a disturbance.
TRIES = 2
# Memory is taken back after less than this.
LONG_S = 3
# Of some kernels of virtual machines: how much memory they have reported to their host as free, since they began.
REPORTED = Path("/sys/module/page_reporting/parameters/reported_kib")
OURS = [str(Path(sys.executable).parent / "synvirt"), "disk", "convert"]


@dataclass(frozen=True, slots=True)
class Run:
    """`cpu_seconds` is the work done; it tells what a busy machine's wall time hides. `disturbed`: the machine's host took
    back memory meanwhile, which must be got again."""

    seconds: float
    cpu_seconds: float
    memory_mib: float
    disturbed: bool = False


def processor() -> str:
    """Its name, as the kernel tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


class RunFailed(Exception):
    """A command ended badly: its row has no figures."""


@dataclass(frozen=True, slots=True)
class Result:
    row: Row
    ours: list[Run]
    peers: list[Run]
    equal: bool

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.ours)

    @property
    def peer_seconds(self) -> float:
        return statistics.median(run.seconds for run in self.peers)

    @property
    def cpu_seconds(self) -> float:
        return statistics.median(run.cpu_seconds for run in self.ours)

    @property
    def peer_cpu_seconds(self) -> float:
        return statistics.median(run.cpu_seconds for run in self.peers)

    @property
    def ratio(self) -> float:
        return self.peer_seconds / self.seconds

    @property
    def memory_mib(self) -> float:
        return max(run.memory_mib for run in self.ours)

    @property
    def reached(self) -> bool:
        return (
            self.equal
            and self.ratio >= self.row.reach
            and self.memory_mib <= self.row.memory_mib_max
            and (self.row.seconds_max is None or self.seconds <= self.row.seconds_max)
        )


def measure(row: Row, get: Callable[[str], Path], target: Path, original: Path, rounds: int) -> Result:
    """Ours and the peer in turn, so that whatever else the machine does falls on both; a first round is not counted.

    A target stays until the next command begins, which is given its memory. The host of a virtual machine takes back what has
    been free for two seconds, and to get it again costs as much as the copy: that was measured, and not the tools. So runs in
    which this happened do not count, where others of the same command are without it.
    """
    ours_argv, peer_argv = commands(row, get, target)
    ours, peers, equal = [], [], True
    for turn in range(TRIES * rounds + 1):
        target.unlink(missing_ok=True)
        run = timed(ours_argv)
        if turn == 0:
            equal = same_content(original, target)
        else:
            ours.append(run)
        target.unlink()
        run = timed(peer_argv)
        if turn > 0:
            peers.append(run)
        if turn >= rounds and not any(_lacks(runs, rounds) for runs in (ours, peers)):
            break
    target.unlink()
    return Result(row, counted(ours, rounds), counted(peers, rounds), equal)


def _lacks(runs: list[Run], rounds: int) -> bool:
    """Whether more runs would help: too few were without a disturbance. A command that takes long is never without one."""
    return min(run.seconds for run in runs) < LONG_S and sum(not run.disturbed for run in runs) < rounds


def counted(runs: list[Run], rounds: int) -> list[Run]:
    """The runs that count: the first `rounds` without a disturbance, or all where there is none."""
    return [run for run in runs if not run.disturbed][:rounds] or runs


def commands(row: Row, get: Callable[[str], Path], target: Path) -> tuple[list[str], list[str]]:
    """Ours and the peer's, to make `target`."""
    source, peer_source = get(row.source), get(row.peer_source or row.source)
    peer_argv = [part.format(peer_source=peer_source, target=target) for part in shlex.split(row.peer)]
    if peer_argv[0] == "synvirt":
        peer_argv[0] = OURS[0]
    return [*OURS, *row.options, str(source), str(target)], peer_argv


def timed(argv: list[str], extra: Mapping[str, str] = MappingProxyType({})) -> Run:
    """`extra`: of its environment. RunFailed."""
    # As installed: with byte code cached. An environment that forbids caching would have us compile ourselves each time.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | dict(extra)
    reported = _reported_kib()
    began = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True) as child:
        stderr = child.stderr.read() if child.stderr else ""
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise RunFailed(f"{shlex.join(argv)} ended with {child.returncode}: {stderr.strip()[-500:]}")
    disturbed = _reported_kib() > reported
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, disturbed)


def _reported_kib() -> int:
    """0, where the kernel does not count it."""
    return int(REPORTED.read_text()) if REPORTED.exists() else 0


def same_content(one: Path, other: Path) -> bool:
    """Byte for byte, without reading what is a hole in both."""
    first, second = RawReader(str(one)), RawReader(str(other))
    try:
        if first.size != second.size:
            return False
        data = [extent for reader in (first, second) for extent in reader.extents() if not extent.zero]
        mine, theirs = bytearray(COMPARED_BYTES), bytearray(COMPARED_BYTES)
        for extent in data:
            for at in range(extent.start, extent.end, COMPARED_BYTES):
                length = min(COMPARED_BYTES, extent.end - at)
                first.read_into(at, memoryview(mine)[:length])
                second.read_into(at, memoryview(theirs)[:length])
                if mine[:length] != theirs[:length]:
                    return False
        return True
    finally:
        first.close()
        second.close()


def free_memory_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
