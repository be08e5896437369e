"""Outside programs are run here and nowhere else: argv lists, never a shell; a time limit; stderr in the error.

Each runs in a process group of its own, so that ending it ends its children too. Blocking code.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from synvirt.errors import Cancelled, Internal, SynvirtError

# Enough to say what went wrong, not enough to fill a log.
STDERR_KEPT_CHARS = 2000
# Debian keeps administrators' tools (zfs, blkdiscard, libvirtd) here; a service's PATH often lacks them.
ADMIN_PATHS = ("/usr/local/sbin", "/usr/sbin", "/sbin")


@dataclass(frozen=True, slots=True)
class Output:
    stdout: str
    stderr: str


class ProgramFailed(Internal):
    """An outside program failed."""

    def __init__(self, program: str, returncode: int | None, stderr: str) -> None:
        self.program, self.returncode, self.stderr = program, returncode, stderr.strip()[-STDERR_KEPT_CHARS:]
        how = "took too long" if returncode is None else f"ended with {returncode}"
        super().__init__(f"{program} {how}: {self.stderr or 'it said nothing'}")


def find(program: str) -> str | None:
    """The program's path, or None. Looks where administrators' tools lie too."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *ADMIN_PATHS])
    return shutil.which(program, path=path)


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stop: Callable[[], bool] | None = None,
    missing: type[SynvirtError] = Internal,
) -> Output:
    """Run to the end. ProgramFailed on a bad exit or after `timeout_s`; Cancelled once `stop()` is true.

    `env` is added to a small clean environment: the service's own may hold secrets.
    """
    name = Path(argv[0]).name
    with subprocess.Popen(
        [_found(argv[0], missing), *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(env),
        cwd=cwd,
        start_new_session=True,
    ) as child:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                stdout, stderr = child.communicate(timeout=0.2 if stop else timeout_s)
                break
            except subprocess.TimeoutExpired:
                cancelled = stop is not None and stop()
                if cancelled or time.monotonic() >= deadline:
                    end_group(child)
                    _, stderr = child.communicate()
                    if cancelled:
                        raise Cancelled from None
                    raise ProgramFailed(name, None, stderr) from None
            except BaseException:
                end_group(child)
                raise
    if child.returncode != 0:
        raise ProgramFailed(name, child.returncode, stderr)
    return Output(stdout, stderr)


def start(
    argv: Sequence[str],
    *,
    stderr: Path,
    descriptors: Sequence[int] = (),
    missing: type[SynvirtError] = Internal,
) -> "subprocess.Popen[bytes]":
    """Start a program that serves until `end_group` ends it. What it says goes to `stderr`; `descriptors` are its too."""
    with stderr.open("wb") as said:
        return subprocess.Popen(
            [_found(argv[0], missing), *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=_environment(None),
            pass_fds=descriptors,
            start_new_session=True,
        )


def _found(program: str, missing: type[SynvirtError]) -> str:
    path = find(program)
    if path is None:
        raise missing(f"the program {program} is not installed", hint="run `synvirt doctor`: it says which package has it")
    return path


def _environment(added: Mapping[str, str] | None) -> dict[str, str]:
    """Small and clean: the service's own may hold secrets."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR") if key in os.environ}
    return {**kept, "LC_ALL": "C.UTF-8", **(added or {})}


def end_group(child: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """End a child started with start_new_session, and all its children. SIGKILL: readers have nothing to tidy up."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
