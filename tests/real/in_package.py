"""In a bare Debian that has the package alone: in_package.py KINDS FOLDER, by the package's own Python.

KINDS has a line for each kind of file: it, and what is imported, below FOLDER (`python -m tests.real.wrapped` writes both).
Ends with 1, and says why, where a kind that is served does not work with what the package brings.
"""

import ast
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import synvirt
from synvirt.live.registry import PLATFORMS
from synvirt.model.kinds import LiveKind, OfflineKind

DATA_DIR, LISTEN = Path("/var/lib/synvirt"), "127.0.0.1:8442"
# Of Ceph: for hosts with a pool.
NOT_BROUGHT = {"rados", "rbd"}
# A faster way, which Debian 12 has not.
NOT_NEEDED = {"nbdkit vddk"}
STARTS_WITHIN_S, IMPORTED_WITHIN_S = 120, 600


def modules() -> Iterator[str]:
    """Each module of ours, and each that one of ours imports, be it in the middle of a function."""
    for found in pkgutil.walk_packages(synvirt.__path__, "synvirt."):
        if not found.name.endswith("__main__"):
            yield found.name
    for file in Path(synvirt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (one.name for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                yield node.module


def missing_modules() -> list[str]:
    wrong = []
    for name in sorted(set(modules())):
        if name.partition(".")[0] not in NOT_BROUGHT and ".alembic" not in name:
            try:
                importlib.import_module(name)
            except ImportError as error:
                wrong.append(f"{name}: {error}")
    return wrong


def synvirt_says(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        ["synvirt", "--data-dir", str(DATA_DIR), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=IMPORTED_WITHIN_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr if done.returncode else done.stdout


def not_imported(kinds: Path, folder: Path) -> list[str]:
    """Each kind of file, to a volume with the same content."""
    wrong = []
    lines = [line.split() for line in kinds.read_text().splitlines()]
    if {kind for kind, _ in lines} != set(OfflineKind):
        wrong.append(f"{kinds} has other kinds than those that are served")
    for kind, path in lines:
        machine = ["--name", kind, "--new-identity", "--cpus", "1", "--memory", "256MiB", "--no-start"]
        code, output = synvirt_says("import", str(folder / path), *machine, "--wait", "--json")
        if code:
            wrong.append(f"{kind}: {output}")
            continue
        job = json.loads(output.splitlines()[-1])
        volume = DATA_DIR / "volumes" / job["disks"][0]["volume"]
        code, output = synvirt_says("disk", "compare", str(volume), str(folder / "sample.raw"))
        print(f"{kind}: {job['state']}, {output.strip()}", flush=True)
        wrong += [f"{kind}: {volume}: {output}"] if code else []
    return wrong


def lacking() -> list[str]:
    """What the doctor misses of what the kinds that are served need."""
    _, output = synvirt_says("doctor", "--json")
    return [
        f"{one['name']}: {one['detail']}"
        for one in json.loads(output)["checks"]
        if not one["found"] and (one["needed"] or "live source" in one["what_for"]) and one["name"] not in NOT_NEEDED
    ]


def main(kinds: Path, folder: Path) -> int:
    wrong = missing_modules()
    if {platform.kind for platform in PLATFORMS} != set(LiveKind):
        wrong.append("a kind of live source is not served")
    service = subprocess.Popen(["synvirt", "serve", "--data-dir", str(DATA_DIR), "--listen", LISTEN])
    try:
        until = time.monotonic() + STARTS_WITHIN_S
        while synvirt_says("migrations", "list")[0] and time.monotonic() < until and service.poll() is None:
            time.sleep(1)
        wrong += lacking() + not_imported(kinds, folder)
    finally:
        service.terminate()
        service.wait(30)
    for one in wrong:
        print(f"WRONG  {one}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
