"""Starts an outside program in a cage, by `argv_in`: a Python that enters the cage and becomes the program.

For programs that read files of strangers. The cage applies to the program and all that it starts: Landlock, seccomp, limits and
no_new_privs survive execve. So do the capabilities to open other users' files, within Landlock's limits.
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

# Enough for an image tool with a disk of any size, as it reads the disk's tables piece by piece.
MEMORY_BYTES = 2 * GIB
# It needs only Python's modules and ours. So it starts without the environment's and those of installed packages (-I -S): none
# of their code runs before the cage is entered. Our folder comes last: nothing in it is taken for a module of Python's.
_SOURCES = str(Path(__file__).resolve().parents[2])
_START = f"import sys; sys.path.append(sys.argv.pop(1)); from {__name__} import main; main()"


def argv_in(cage: Cage, argv: Sequence[str]) -> list[str]:
    """The command that starts this program in that cage, which must allow programs."""
    fields = {**asdict(replace(cage, programs=True)), "network": cage.network.name}
    return [sys.executable, "-I", "-S", "-c", _START, _SOURCES, json.dumps(fields), *argv]


def image_tool(argv: Sequence[str], *, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> list[str]:
    """qemu-img, for disks that are files or devices of this host, or in a Ceph pool over a network (`rbd:…:conf=PATH`)."""
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
    fields: dict[str, Any] = json.loads(sys.argv[1])
    program = shutil.which(sys.argv[2])
    if program is None:
        sys.exit(f"the program {sys.argv[2]} is not installed")
    fields |= {name: tuple(fields[name]) for name in ("reads", "writes", "exact", "opened")}
    enter(Cage(**{**fields, "network": Network[fields["network"]]}))
    os.execv(program, sys.argv[2:])  # noqa: S606 - an argv list, no shell
