"""python -m bench [ROW …]: measures the rows whose names contain one of the words, or all; prints Markdown tables.

`backup` stands for the rows of backups, which have a table of their own.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench import backup, report
from bench.measure import Result, RunFailed, free_memory_bytes, measure
from bench.reflink import NoReflinks, reflink_folder
from bench.rows import ROWS, Row
from bench.sources import MIB, Sources, needs, original_of
from synvirt.programs import find

# Program: the Debian package that has it.
PROGRAMS = {"qemu-img": "qemu-utils", "qemu-nbd": "qemu-utils", "nbdcopy": "libnbd-bin", "mke2fs": "e2fsprogs"}
# In units of the disk's data: the disk, an image of it, an archive of that, a target, and a margin.
SPACE_NEEDED = 5
FAST_ROUNDS, FAST_DATA_MIB = 1, 200


def main() -> None:
    options = _options()
    rows = [row for row in ROWS if not options.rows or any(word in row.name for word in options.rows)]
    backups = not options.rows or "backup" in options.rows
    wanted = PROGRAMS | (backup.PROGRAMS if backups else {})
    missing = [f"{name} (apt-get install {package})" for name, package in wanted.items() if find(name) is None]
    if not (rows or backups) or missing:
        sys.exit(f"needs {', '.join(missing)}" if missing else f"no row is named so; there are: {[row.name for row in ROWS]}")
    if options.write:
        _refuse_to_write(options)
    # A run that is terminated removes its gibibytes in memory as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    watch = report.Watch()
    folder = _folder(options.folder, options.data_mib, keep=options.keep)
    target = folder / f"target-{os.getpid()}.raw"
    results: list[Result] = []
    lines: list[backup.Line] = []
    failures: list[str] = []
    try:
        sources = Sources(folder / f"data-{options.data_mib}", options.data_mib)
        # Rows of one source after the other: an image is dropped when nobody needs it any more.
        ordered = sorted(rows, key=lambda row: [each.source for each in rows].index(row.source))
        for number, row in enumerate(ordered):
            print(f"measuring {row.name} …", file=sys.stderr, flush=True)
            try:
                results.append(_measured(row, sources, target, options.rounds))
                print(_line(results[-1]), file=sys.stderr, flush=True)
            except (RunFailed, NoReflinks) as failure:
                failures.append(f"{row.name}: {failure}")
            if not options.keep:
                _drop_unneeded(sources, ordered[number + 1 :])
        if backups:
            print("measuring backups …", file=sys.stderr, flush=True)
            try:
                lines = backup.measured(sources.get("disk.raw"), folder / f"backup-{os.getpid()}", options.rounds)
            except RunFailed as failure:
                failures.append(f"backup: {failure}")
    finally:
        target.unlink(missing_ok=True)
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    results.sort(key=lambda result: ROWS.index(result.row))
    if options.json:
        print(json.dumps([*map(_as_json, results), *map(asdict, lines)]))
    else:
        print("\n\n".join([*([_table(results)] if results else []), *([backup.table(lines)] if lines else [])]))
    if failures:
        sys.exit("\n".join(["not measured:", *failures]))
    if options.write:
        _write(results, lines, options, watch)


def _refuse_to_write(options: argparse.Namespace) -> None:
    if options.rows or options.fast:
        sys.exit("--write is of all rows, measured in full")
    if complaint := report.complaint_now():
        sys.exit(f"{complaint}: figures of a busy machine are not written. Measure without --write, or when it is idle")


def _write(results: list[Result], lines: list[backup.Line], options: argparse.Namespace, watch: report.Watch) -> None:
    if complaint := watch.complaint():
        sys.exit(f"{complaint} meanwhile: nothing is written")
    others = report.others_share(watch.since, report.moment(), watch.cores)
    about = report.provenance(options.data_mib, options.rounds, others)
    report.write(report.DOCUMENT, "\n\n".join([about, _table(results), backup.table(lines)]))
    shown = [result for result in results if result.row.name in report.HEADLINES]
    report.write(report.README, f"{about}\n\n{_table(shown)}")


def _measured(row: Row, sources: Sources, target: Path, rounds: int) -> Result:
    original = sources.get(original_of(row.source))
    if not row.reflink:
        return measure(row, sources.get, target, original, rounds)
    with reflink_folder(target.parent, 4 * original.stat().st_size) as place:

        def get(name: str) -> Path:
            if not (place / name).exists():
                subprocess.run(["cp", sources.get(name), place / name], check=True)
                os.sync()  # what is not on the file system yet cannot be shared
            return place / name

        return measure(row, get, place / "target.raw", original, rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="words of row names; by default all rows")
    parser.add_argument("--fast", action="store_true", help="200 MiB and one round: whether all rows run, not how fast")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side that count; their median is printed")
    parser.add_argument("--data-mib", type=int, default=2300, help="real files on the disk")
    parser.add_argument("--folder", type=Path, help="where to work: by default in memory, if there is room")
    parser.add_argument("--keep", action="store_true", help="leave the images for the next run")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/performance.md and README.md")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.fast:
        options.rounds, options.data_mib = FAST_ROUNDS, FAST_DATA_MIB
    return options


def _folder(wanted: Path | None, data_mib: int, *, keep: bool) -> Path:
    """Of this run alone, unless its images shall be found by the next one."""
    place, needed = Path("/dev/shm"), data_mib * MIB * SPACE_NEEDED
    if wanted is not None:
        place = wanted
    elif not place.is_dir() or min(shutil.disk_usage(place).free, free_memory_bytes()) < needed:
        place = Path(tempfile.gettempdir())
        print(f"no {needed // MIB} MiB free in memory: measuring on {place}, where the disk is the limit", file=sys.stderr)
    place.mkdir(parents=True, exist_ok=True)
    return place / f"synvirt-bench-{os.getuid()}" if keep else Path(tempfile.mkdtemp(prefix="synvirt-bench-", dir=place))


def _drop_unneeded(sources: Sources, rows: list[Row]) -> None:
    """Memory is short: what no later row reads goes."""
    wanted = set().union(*(needs(row.source) | needs(row.peer_source or row.source) for row in rows)) if rows else set()
    if any(row.source.endswith(".ova") for row in rows):
        wanted.add("stream.vmdk")
    wanted.add("disk.raw")
    for path in sources.folder.iterdir():
        if path.name not in wanted:
            sources.drop(path.name)


def _table(results: list[Result]) -> str:
    lines = [
        "| row | ours s (cpu) | peer s (cpu) | ratio | reach | peak MiB | ok |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    return "\n".join([*lines, *map(_line, results)])


def _line(result: Result) -> str:
    verdict = "yes" if result.reached else "wrong content" if not result.equal else "no"
    return (
        f"| {result.row.name} | {result.seconds:.2f} ({result.cpu_seconds:.2f})"
        f" | {result.peer_seconds:.2f} ({result.peer_cpu_seconds:.2f})"
        f" | {result.ratio:.2f} | {_reach(result.row)} | {result.memory_mib:.0f} | {verdict} |"
    )


def _reach(row: Row) -> str:
    return f"≥ {row.reach:g}" if row.reach else "–"


def _as_json(result: Result) -> dict[str, object]:
    return {
        "row": result.row.name,
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
        "peer_seconds": result.peer_seconds,
        "peer_cpu_seconds": result.peer_cpu_seconds,
        "ratio": result.ratio,
        "reach": result.row.reach,
        "memory_mib": result.memory_mib,
        "equal": result.equal,
        "reached": result.reached,
    }


if __name__ == "__main__":
    main()
