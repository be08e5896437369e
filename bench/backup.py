"""Backups against restic and borg, on the same disk and the same changes: a full one, the next one, and the way back.

All three encrypt and compress. The peers read and hash the whole disk each time; we are told what has changed, as zfs and QEMU
tell it. CPU seconds are the measure: they say what a busy machine's wall time hides.
"""

import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.measure import Run, same_content, timed

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
CHANGES, CHANGE_BYTES = 40, 256 << 10
PROGRAMS = {"restic": "restic", "borg": "borgbackup"}
FULL_REACH, ADDED_REACH_MIB, MEMORY_MIB_MAX = 5, 25, 256
# Of restic's seconds.
RESTORE_REACH = 0.6
WORKER = [sys.executable, "-m", "bench.backup_worker"]


class Tool:
    """One of the three, with a repository of its own."""

    def __init__(self, name: str, folder: Path, image: Path) -> None:
        self.name, self.repository, self._image = name, folder / f"{name}-repository", image
        self._target = folder / f"{name}-restored"
        self._environment = {
            "HOME": str(folder),
            "RESTIC_PASSWORD": "bench",
            "RESTIC_CACHE_DIR": str(folder / "restic-cache"),
            "BORG_PASSPHRASE": "bench",
            "BORG_BASE_DIR": str(folder / "borg"),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }

    def prepare(self) -> None:
        shutil.rmtree(self.repository, ignore_errors=True)
        self.repository.with_name(f"{self.repository.name}.footers").unlink(missing_ok=True)
        match self.name:
            case "ours":
                self.repository.mkdir()
            case "restic":
                self._run("restic", "-q", "-r", self.repository, "init")
            case "borg":
                self._run("borg", "init", "-e", "repokey-blake2", self.repository)

    def back_up(self, point: str, areas: Path | None = None) -> Run:
        match self.name:
            case "restic":
                return self._run("restic", "-q", "-r", self.repository, "backup", self._image)
            case "borg":
                # As people set it up for images of disks: pieces of one size, the fastest zstd.
                options = ["--compression", "zstd,1", "--chunker-params", "fixed,4194304"]
                return self._run("borg", "create", *options, f"{self.repository}::{point}", self._image)
            case _:
                what = ["full"] if areas is None else ["changes"]
                return self._run(*WORKER, *what, self.repository, self._image, *([areas] if areas else []))

    def restore(self, point: str) -> tuple[Run, Path]:
        shutil.rmtree(self._target, ignore_errors=True)
        self._target.mkdir()
        inside = self._target / str(self._image).lstrip("/")
        match self.name:
            case "restic":
                run = self._run("restic", "-q", "-r", self.repository, "restore", "latest", "--target", self._target)
            case "borg":
                before = Path.cwd()
                os.chdir(self._target)
                try:
                    run = self._run("borg", "extract", "--sparse", f"{self.repository}::{point}")
                finally:
                    os.chdir(before)
            case _:
                inside = self._target / "restored.raw"
                run = self._run(*WORKER, "restore", self.repository, inside)
        return run, inside

    def drop_restored(self) -> None:
        shutil.rmtree(self._target, ignore_errors=True)

    def stored_mib(self) -> float:
        files = [path for path in self.repository.rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files) / MIB

    def _run(self, *argv: object) -> Run:
        return timed([str(part) for part in argv], self._environment)


@dataclass(frozen=True, slots=True)
class Line:
    """`ours`, and the peers' figures where there are any; `good`: whether ours is what is to be reached."""

    name: str
    ours: float
    peers: dict[str, float]
    reach: str
    good: bool


def measured(disk: Path, folder: Path, rounds: int) -> list[Line]:
    """`disk` is left as it is; `folder` is emptied. RunFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    image = folder / "image.raw"
    try:
        return _rounds(disk, image, folder, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rounds(disk: Path, image: Path, folder: Path, rounds: int) -> list[Line]:
    tools = [Tool(name, folder, image) for name in ("ours", *PROGRAMS)]
    fulls: dict[str, list[Run]] = {tool.name: [] for tool in tools}
    nexts: dict[str, list[Run]] = {tool.name: [] for tool in tools}
    backs: dict[str, list[Run]] = {tool.name: [] for tool in tools}
    stored: dict[str, float] = {}
    added: dict[str, float] = {}
    equal = True
    for number in range(rounds):
        shutil.copyfile(disk, image)
        areas = folder / "areas.json"
        for tool in tools:
            tool.prepare()
            fulls[tool.name].append(tool.back_up("one"))
            stored[tool.name] = tool.stored_mib()
        areas.write_text(json.dumps(_changed(image, number)))
        for tool in tools:
            nexts[tool.name].append(tool.back_up("two", areas))
            added[tool.name] = tool.stored_mib() - stored[tool.name]
            _warm(folder / "warm", disk.stat().st_blocks * 512)
            run, path = tool.restore("two")
            backs[tool.name].append(run)
            equal = equal and same_content(image, path)
            tool.drop_restored()
    nothing = folder / "nothing.json"
    nothing.write_text("[]")
    small = tools[0].back_up("three", nothing)
    for tool in tools:
        shutil.rmtree(tool.repository)
    with image.open("r+b") as file:
        file.truncate(TIB)
    tools[0].prepare()
    tools[0].back_up("one")
    huge = tools[0].back_up("two", nothing)
    gib = disk.stat().st_blocks * 512 / GIB
    most = max(run.memory_mib for runs in (fulls["ours"], nexts["ours"], backs["ours"], [small, huge]) for run in runs)
    memory = {
        name: max(run.memory_mib for runs in (fulls[name], nexts[name], backs[name]) for run in runs) for name in PROGRAMS
    }
    return [
        _line("full, CPU seconds a GiB", _each(fulls, lambda run: run.cpu_seconds / gib), FULL_REACH, ahead=True),
        _line("full, MiB stored", stored, None),
        _line("40 changes of 256 KiB, CPU seconds", _each(nexts, lambda run: run.cpu_seconds), None, ahead=True),
        _line("40 changes of 256 KiB, MiB added", added, ADDED_REACH_MIB, ahead=True),
        _line("restore, CPU seconds a GiB", _each(backs, lambda run: run.cpu_seconds / gib), None, ahead=True),
        _restored(_each(backs, lambda run: run.seconds)),
        Line("restored disks are equal", float(equal), {}, "1", equal),
        Line("nothing changed, CPU seconds", small.cpu_seconds, {}, "–", True),
        Line("the same of 1 TiB", huge.cpu_seconds, {}, "≤ 1.5 times", huge.cpu_seconds <= 1.5 * small.cpu_seconds),
        _line("memory, MiB", {"ours": most} | memory, MEMORY_MIB_MAX),
    ]


def _warm(path: Path, size_bytes: int) -> None:
    """Take this much memory, and free it. A virtual machine's host takes free memory back, and to get it again costs seconds of
    processor time a GiB, which would fall on the restores alone."""
    with path.open("wb") as file:
        for at in range(0, size_bytes, MIB):
            file.write(bytes(min(MIB, size_bytes - at)))
    path.unlink()


def _changed(image: Path, seed: int) -> list[tuple[int, int]]:
    """Bytes that do not compress, in places of the disk's data that lie apart."""
    draw = random.Random(seed)
    step = image.stat().st_size // CHANGES
    areas = []
    with image.open("r+b") as file:
        for number in range(CHANGES):
            start = number * step + draw.randrange(step - CHANGE_BYTES)
            file.seek(start)
            file.write(draw.randbytes(CHANGE_BYTES))
            areas.append((start, CHANGE_BYTES))
    return areas


def _each(runs: dict[str, list[Run]], figure: Callable[[Run], float]) -> dict[str, float]:
    return {name: statistics.median(map(figure, of)) for name, of in runs.items()}


def _line(name: str, figures: dict[str, float], reach: float | None, *, ahead: bool = False) -> Line:
    """`reach`: the most that ours may be; `ahead`: it must be less than each peer's."""
    peers = {peer: figure for peer, figure in figures.items() if peer != "ours"}
    ours = figures["ours"]
    good = (reach is None or ours <= reach) and (not ahead or all(ours < figure for figure in peers.values()))
    words = [f"≤ {reach:g}"] if reach is not None else []
    words += ["less than both"] if ahead else []
    return Line(name, ours, peers, ", ".join(words) or "–", good)


def _restored(figures: dict[str, float]) -> Line:
    """Of the clock: less than borg's, and at most RESTORE_REACH of restic's."""
    reach = RESTORE_REACH * figures["restic"]
    return replace(
        _line("restore, seconds", figures, reach, ahead=True), reach=f"≤ {RESTORE_REACH:g} of restic's, less than both"
    )


def table(lines: Iterable[Line]) -> str:
    rows = [f"| backup | ours | {' | '.join(PROGRAMS)} | reach | ok |", f"|---|{'---:|' * (len(PROGRAMS) + 1)}---|---|"]
    for line in lines:
        peers = " | ".join(f"{line.peers[name]:.2f}" if name in line.peers else "" for name in PROGRAMS)
        rows.append(f"| {line.name} | {line.ours:.2f} | {peers} | {line.reach} | {'yes' if line.good else 'no'} |")
    return "\n".join(rows)
