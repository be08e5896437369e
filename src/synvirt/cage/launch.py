"""Starts an outside program in a cage: `python -m synvirt.cage.launch CAGE PROGRAM [ARGUMENT...]`, by `argv_in`.

For programs that read what strangers made. The cage holds for the program and all that it starts; Landlock, seccomp, limits and
no_new_privs stay with it over execve, and so do the capabilities to open what belongs to others, within Landlock's bounds.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from synvirt.cage.confining import Cage, Network, enter
from synvirt.sizes import GIB

# What an image tool needs for a disk of any size: its tables are read piece by piece.
MEMORY_BYTES = 2 * GIB


def argv_in(cage: Cage, argv: Sequence[str]) -> list[str]:
    """What starts this program in that cage, as one that may start programs; whatever the working directory holds (-P)."""
    said = {**asdict(replace(cage, programs=True)), "network": cage.network.value}
    return [sys.executable, "-P", "-m", __name__, json.dumps(said), *argv]


def image_tool(argv: Sequence[str], *, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> list[str]:
    """qemu-img, for disks that are files or devices of this host, or in a Ceph pool (`rbd:…:conf=PATH`): by a network."""
    pools = [one for one in (*reads, *writes) if not one.startswith("/")]
    confs = [str(Path(one.rpartition("conf=")[2].replace("\\:", ":")).parent) for one in pools if "conf=" in one]
    cage = Cage(
        reads=(*(one for one in reads if one not in pools), *confs),
        writes=tuple(one for one in writes if one not in pools),
        network=Network.ANY if pools else Network.NONE,
        memory_bytes=MEMORY_BYTES,
    )
    return argv_in(cage, argv)


def main() -> None:
    """Enters the cage, and becomes the program."""
    said: dict[str, Any] = json.loads(sys.argv[1])
    program = shutil.which(sys.argv[2])
    if program is None:
        sys.exit(f"the program {sys.argv[2]} is not installed")
    said |= {name: tuple(said[name]) for name in ("reads", "writes", "exact", "opened")}
    enter(Cage(**{**said, "network": Network(said["network"])}))
    os.execv(program, sys.argv[2:])  # noqa: S606 - an argv list, and no shell


if __name__ == "__main__":
    main()
