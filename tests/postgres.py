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


def _programs() -> Path:
    """Debian keeps the server's programs off PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if not versions:
        need("postgres", "postgresql")
    return versions[0]


@contextmanager
def server() -> Iterator[str]:
    """The server's URL, without a database name at its end: append one that `create` made."""
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="synvirt-pg-"))
    # PostgreSQL refuses to run as root.
    account = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    as_account = ["runuser", "-u", account, "--"] if os.geteuid() == 0 else []
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
    # fsync off: this server's crashes are not what is tested, and a test machine's disk is slow.
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    run(programs / "pg_ctl", "-w", "-D", data, "-l", folder / "log", "-o", options, "start")
    try:
        yield f"postgresql://{account}@/%s?host={folder}"
    finally:
        run(programs / "pg_ctl", "-w", "-m", "immediate", "-D", data, "stop")
        shutil.rmtree(folder)
