"""A real PostgreSQL server of the tests' own: a cluster in a temporary folder, on a Unix socket, gone when they end."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import need
from tests.running import in_memory


def _programs() -> Path:
    """Debian keeps the server's programs off PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if not versions:
        need("postgres", "postgresql")
    return versions[0]


def _as_account() -> tuple[str, list[str]]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name, []
    return "postgres", ["runuser", "-u", "postgres", "--"]


def _options(folder: Path) -> str:
    """fsync off: this server's crashes are not what is tested, and a test machine's disk is slow."""
    return f"-k {folder} -c listen_addresses='' -c fsync=off"


def restart(folder: Path) -> None:
    """The server whose socket is in `folder`; who is connected is dropped."""
    _, as_account = _as_account()
    argv = [*as_account, str(_programs() / "pg_ctl"), "-w", "-m", "fast", "-D", str(folder / "data"), "-l", str(folder / "log")]
    subprocess.run([*argv, "-o", _options(folder), "restart"], check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=120)


@contextmanager
def server() -> Iterator[str]:
    """The server's URL, without a database name at its end: append one that `create` made."""
    programs = _programs()
    # A new database is 300 files. On a disk where many were removed a moment ago they take twice the processor's time.
    folder = Path(tempfile.mkdtemp(prefix="synvirt-pg-", dir=in_memory.place()))
    account, as_account = _as_account()
    if as_account:
        shutil.chown(folder, account)
    data = folder / "data"

    def run(*argv: str | Path) -> None:
        subprocess.run([*as_account, *map(str, argv)], check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=250)

    run(
        programs / "initdb",
        "--auth=trust",
        "--no-sync",
        "--encoding=UTF8",
        "--locale=C.UTF-8",
        f"--username={account}",
        "-D",
        data,
    )
    run(programs / "pg_ctl", "-w", "-D", data, "-l", folder / "log", "-o", _options(folder), "start")
    try:
        yield f"postgresql://{account}@/%s?host={folder}"
    finally:
        run(programs / "pg_ctl", "-w", "-m", "immediate", "-D", data, "stop")
        shutil.rmtree(folder)
