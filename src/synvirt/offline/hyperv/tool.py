"""The other way to import a Hyper-V export: an outside conversion tool does all of it (specification part 1, «passthrough»).

    command ARGUMENTS      with {source} the export, {driver} the input driver, {folder} an empty folder
       stdout              lines: its progress, if a line has a percentage or «12/100», or is virt-v2v's JSON
       stderr              the error, if the exit code is not 0
       {folder}            a raw file for each disk, if the exit code is 0

Tools name and order the files as they like: the caller finds out which disk each one is. The tool is the operator's own, but a
stranger made the export. So the tool and all that it starts are in a cage, and its output is checked. It ends with the service,
however the service ends.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from synvirt.cage.appliance import CACHE, converter, shown_kernel
from synvirt.cage.scratch import scratch_folder
from synvirt.durable import sync_file, sync_folder
from synvirt.errors import DiskReadFailed, DiskWriteFailed, InvalidPlan, SynvirtError
from synvirt.programs import ENDED_HINT, STDERR_KEPT_CHARS, ProgramFailed, end_users, find, refuse_missing, run
from synvirt.settings import Settings

# A tool lists its drivers at once; one that hangs counts as missing.
LOOK_TIMEOUT_S = 20
_PERCENT, _OF = re.compile(r"([0-9]{1,3}(?:\.[0-9]+)?) ?%"), re.compile(r"^\s*([0-9]+)/([0-9]+)\s*$")
_DISK = re.compile(r"\bdisk ([0-9]+)/([0-9]+)", re.IGNORECASE)
# Files that are not disks: the description that a tool writes beside them, and its messages.
_NO_DISKS = (".xml", ".json", ".log", ".txt", ".ovf")


@dataclass(frozen=True, slots=True)
class VmcxTool:
    """`folder`: holds its output until it is copied, one folder per job. `way`: `tool` uses the tool always, `own` never,
    `auto` where it is installed and lists the input driver, as virt-v2v --machine-readable does. `reads`: the files it needs
    beside the export, its own folder and installed packages."""

    folder: Path
    way: Literal["auto", "tool", "own"] = "auto"
    command: str = "virt-v2v"
    driver: str = "hyperv"
    arguments: str = ""
    timeout_s: float = 86400
    reads: tuple[Path, ...] = ()

    def has_driver(self) -> bool:
        """Whether the tool is installed and lists the input driver."""
        if find(self.command) is None:
            return False
        try:
            printed = run([self.command, "--machine-readable"], timeout_s=LOOK_TIMEOUT_S).stdout
        except SynvirtError:
            return False
        return f"input:{self.driver}" in printed.split()

    def serves(self) -> bool:
        """Whether the tool is used. InvalidPlan, where the settings require it and it is not installed."""
        if self.way == "tool" and find(self.command) is None:
            raise InvalidPlan(
                f"the conversion tool {Path(self.command).name} is not installed",
                hint="install it, or set vmcx_way to own: exports are then read without it",
            )
        return self.way == "tool" or (self.way == "auto" and self.has_driver())

    def import_into(
        self, name: str, source: Path, wanted_bytes: int, moved: Callable[[float], None], stop: Callable[[], bool]
    ) -> None:
        """Imports the whole VM into the folder `name`, which it makes again; calls `moved` with the part that is done, from 0
        to 1. Durable on return, as the tool does not run again.

        DiskReadFailed: the tool failed, with its last messages. DiskWriteFailed: `wanted_bytes` do not fit. Cancelled.
        """
        target = self._empty(name, wanted_bytes)
        output = _Output(moved)
        try:
            with scratch_folder("vmcx") as folder:
                work = str(folder)
                env = {"TMPDIR": work, "XDG_RUNTIME_DIR": work, CACHE: work, **shown_kernel()}
                run(
                    self._caged(source, target, env),
                    timeout_s=self.timeout_s,
                    env=env,
                    cwd=target,
                    stop=stop,
                    on_line=output.line,
                    guarded=True,
                    name=Path(self.command).name,
                    missing=DiskReadFailed,
                )
        except ProgramFailed as problem:
            raise self._failed(problem, output.error, source, target) from problem
        self._keep(name)

    def _keep(self, name: str) -> None:
        """A power cut would leave holes where a file was not written back, and they would be copied as zeros."""
        try:
            for file in self.disks(name):
                sync_file(file)
            for folder in (self.folder / name, self.folder, self.folder.parent):
                sync_folder(folder)
        except OSError as problem:
            raise DiskWriteFailed(f"what the conversion tool wrote cannot be kept: {problem.strerror}") from problem

    def disks(self, name: str) -> list[Path]:
        """The files that may be disks, by name. Links and devices do not count: the target of a link would become a disk."""
        files = [path for path in (self.folder / name).iterdir() if path.is_file() and not path.is_symlink()]
        return sorted(path for path in files if path.suffix.lower() not in _NO_DISKS)

    def discard(self, name: str) -> None:
        """Removes the folder, and ends processes that write in it. Idempotent."""
        end_users(self.folder / name)
        try:
            shutil.rmtree(self.folder / name)
        except FileNotFoundError:
            return
        except OSError as problem:
            raise DiskWriteFailed(f"what the conversion tool left cannot be removed: {problem.strerror}") from problem

    def _empty(self, name: str, wanted_bytes: int) -> Path:
        self.discard(name)
        target = self.folder / name
        try:
            target.mkdir(parents=True, mode=0o700)
            free = shutil.disk_usage(target).free
        except OSError as problem:
            raise DiskWriteFailed(f"no folder for the conversion tool can be made: {problem.strerror}") from problem
        if wanted_bytes > free:
            raise DiskWriteFailed(
                f"the conversion tool writes about {wanted_bytes} bytes beside the volumes, and {free} are free",
                hint="free space in data_dir, or set vmcx_way to own: exports are then read in place",
            )
        return target

    def _caged(self, source: Path, target: Path, env: dict[str, str]) -> list[str]:
        reads = [str(path) for path in self.reads]
        writes = [str(target), env["TMPDIR"]]
        refuse_missing(self.command, DiskReadFailed)
        return converter(self._argv(source, target), reads=reads, writes=writes, exact=[str(source)], environment=env)

    def _argv(self, source: Path, target: Path) -> list[str]:
        known = {"{source}": str(source), "{driver}": self.driver, "{folder}": str(target)}
        # Split first, so that a path with blanks stays one argument.
        words = shlex.split(self.arguments)
        for placeholder, value in known.items():
            words = [word.replace(placeholder, value) for word in words]
        return [self.command, *words]

    def _failed(self, problem: ProgramFailed, error: str, source: Path, target: Path) -> DiskReadFailed:
        """The tool's error, without the paths of this host that it names."""
        message = "; ".join(words for words in (error, problem.stderr) if words) or "it printed no message"
        for path, shown in ((source, source.name), (target, ""), (source.parent, ""), (self.folder, "")):
            message = message.replace(str(path), shown)
        how, hint = f"ended with {problem.returncode}", "set vmcx_way to own to read the export without the tool"
        if problem.returncode is None:
            how, hint = f"took over {self.timeout_s:g} s", "raise vmcx_tool_timeout_s"
        elif problem.from_outside:
            how, hint = str(problem.cut_off), ENDED_HINT
        return DiskReadFailed(f"the conversion tool {Path(self.command).name} {how}: {message.strip()}", hint=hint)


class _Output:
    """The tool's standard output, line by line: progress in the known forms of tools, and the error in virt-v2v's form. The
    rest is for people. After «disk 1/2» progress is that of this disk, in virt-v2v's form too. Reported progress never
    decreases."""

    def __init__(self, moved: Callable[[float], None]) -> None:
        self.error = ""
        self._moved = moved
        self._before, self._share, self._done = 0.0, 1.0, 0.0

    def line(self, line: str) -> None:
        kind, text = _record(line)
        if kind == "error":
            self.error = text[-STDERR_KEPT_CHARS:]
        elif found := _DISK.search(text):
            disk, disks = (max(1, int(number[:9])) for number in found.groups())
            self._before, self._share = min(disk - 1, disks) / disks, 1 / disks
        elif kind != "message" and (part := _part(text)) is not None:
            self._done = max(self._done, min(self._before + self._share * part, 1.0))
            self._moved(self._done)


def _part(text: str) -> float | None:
    """The part that is done, from 0 to 1, by a line."""
    if found := _OF.search(text):
        done, whole = (int(number[:18]) for number in found.groups())
        return min(done / whole, 1.0) if whole else None
    found = _PERCENT.search(text)
    return min(float(found[1]) / 100, 1.0) if found else None


def _record(line: str) -> tuple[str, str]:
    """Type and message of a JSON record; with an empty type the line itself, where it is none."""
    try:
        record = json.loads(line)
        return str(record["type"]), str(record["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", line


def vmcx_tool(settings: Settings) -> VmcxTool:
    """The tool of the settings."""
    return VmcxTool(
        settings.data_dir / "passthrough",
        way=settings.vmcx_way,
        command=settings.vmcx_tool,
        driver=settings.vmcx_tool_driver,
        arguments=settings.vmcx_tool_arguments,
        timeout_s=settings.vmcx_tool_timeout_s,
        reads=settings.vmcx_tool_reads,
    )
