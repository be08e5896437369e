"""Where measured figures are written: the tables of docs/performance.md and of the README, between two marks, with what they
were measured on. Figures of a machine that does other work besides are not written."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bench.measure import processor

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
DOCUMENT, README = ROOT / "docs/performance.md", ROOT / "README.md"
# What the README shows of all rows.
HEADLINES = (
    *("ova", "ova, sha256 checked", "ova, nbdcopy", "raw", "raw, cp", "raw, nbdcopy", "raw on xfs", "qcow2", "qcow2 zlib"),
    *("qcow2 zstd", "vhdx", "vdi", "vhd", "sparse vmdk", "1 TiB raw, nearly empty"),
)
# Of all cores: the kernel's own threads are in it, which write for the rows on xfs.
OTHERS_MAX = 0.15
LOOKED_S = 3.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds of all cores: spent by anybody, and spent by this process and its children that have ended."""

    at: float
    spent: float
    ours: float


def moment(stat: str | None = None) -> Moment:
    """`stat`: what /proc/stat holds."""
    first = (Path("/proc/stat").read_text() if stat is None else stat).splitlines()[0].split()
    # user nice system idle iowait irq softirq steal: a core that waits for a disk is idle, one that is stolen is not ours.
    ticks = [int(one) for one in first[1:9]]
    times = os.times()
    ours = times.user + times.system + times.children_user + times.children_system
    return Moment(time.monotonic(), (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), ours)


def others_share(since: Moment, now: Moment, cores: int) -> float:
    """Of the time of all cores, what others had."""
    others = (now.spent - since.spent) - (now.ours - since.ours)
    return max(0.0, others) / max(1e-9, (now.at - since.at) * cores)


@dataclass
class Watch:
    """Whether others work here. `cores`: those that this process may use; what runs beside it on others disturbs it too."""

    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    since: Moment = field(default_factory=moment)

    def complaint(self) -> str | None:
        share = others_share(self.since, moment(), self.cores)
        return None if share <= OTHERS_MAX else f"others had {share:.0%} of this machine's time"


def complaint_now() -> str | None:
    """After LOOKED_S in which nothing is done here."""
    watch = Watch()
    time.sleep(LOOKED_S)
    return watch.complaint()


def provenance(data_mib: int, rounds: int, others: float) -> str:
    """Machine, date, commit, load: what a figure is of."""
    memory = next(
        int(line.split()[1]) >> 20 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")
    )
    return (
        f"Measured {datetime.now(UTC):%Y-%m-%d} at commit {_commit()} by `make bench` ({data_mib} MiB of real files, medians of"
        f" {rounds}): {processor()}, {os.cpu_count()} cores, {memory} GiB, Linux {platform.release()}, Python"
        f" {platform.python_version()}, {_output('qemu-img', '--version').partition('(')[0].strip()}; others had {others:.0%}."
    )


def write(document: Path, text: str) -> None:
    """Puts `text` between the marks of a document. ValueError, where it has not both, once."""
    before, begun, rest = document.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended) or BEGIN in after or END in after:
        raise ValueError(f"{document} has not {BEGIN} and {END} once")
    unfinished = document.with_suffix(".new")
    unfinished.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    unfinished.replace(document)


def _commit() -> str:
    """With a `+` where files were changed since."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    return commit + ("+" if _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") else "")


def _output(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip()
