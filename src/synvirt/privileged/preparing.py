"""What root does before the service starts: `python -m synvirt.privileged.preparing --config FILE --user synvirt`.

The service's user gets its rights on the datasets that root's settings name, and on those below them: zfs allow. The service
itself asks for nothing, so there is nothing here that it could misuse. It may run twice.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from synvirt.errors import SynvirtError
from synvirt.privileged.helper import Refused, read_settings_file
from synvirt.programs import ProgramFailed, run
from synvirt.settings import Settings, ZfsSetting, load

ZFS_TIMEOUT_S = 60
# What volumes, their clones, and backups and restores of guests on them ask for. Nothing of it reaches a dataset beside these.
ZFS_RIGHTS = (
    *("bookmark", "canmount", "clone", "compression", "create", "destroy", "hold", "mount", "readonly", "release", "rollback"),
    *("send", "snapshot", "userprop", "volmode"),
)


def prepare(settings: Settings, user: str, warn: Callable[[str], None]) -> None:
    """What zfs refuses is logged, and no more: the service starts, and the doctor says what is missing."""
    own = [ZfsSetting(kind="zfs", pool=settings.zfs_pool, namespace=settings.zfs_namespace)] if settings.zfs_pool else []
    for one in (*own, *(found for found in settings.destinations.values() if found.kind == "zfs")):
        dataset = f"{one.pool}/{one.namespace}"
        try:
            if not _is_there(dataset):
                run(["zfs", "create", "-p", "-o", "canmount=off", dataset], timeout_s=ZFS_TIMEOUT_S)
            run(["zfs", "allow", "-u", user, ",".join(ZFS_RIGHTS), dataset], timeout_s=ZFS_TIMEOUT_S)
        except SynvirtError as error:
            warn(f"{user} has no rights on {dataset}: {error.detail}")


def _is_there(dataset: str) -> bool:
    try:
        run(["zfs", "list", "-H", "-o", "name", dataset], timeout_s=ZFS_TIMEOUT_S)
    except ProgramFailed as failed:
        if "does not exist" in failed.stderr:
            return False
        raise
    return True


def main() -> int:
    """The preparation as a process, started by root before the service."""
    parser = argparse.ArgumentParser(prog="synvirt-prepare")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--user", required=True)
    options = parser.parse_args()
    try:
        read_settings_file(options.config)
        settings = load(config=options.config, environ={})
    except (Refused, SynvirtError) as error:
        sys.stderr.write(f"{options.config}: {error}\n")
        return 0  # the service says the same, and better, when it does not start
    prepare(settings, options.user, lambda line: print(line, file=sys.stderr))  # noqa: T201 - the journal has it
    return 0


if __name__ == "__main__":
    sys.exit(main())
