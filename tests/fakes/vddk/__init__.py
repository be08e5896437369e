"""VMware's own transport as far as it can be had: nbdkit's vddk plugin as Debian builds it (`make lab`), and a stand-in for
VMware's library, over a file (library.c)."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.needs import lacking, need

SOURCE = Path(__file__).parent / "library.c"
# Finds the plugin by its path: Debian 12's nbdkit has none by this name.
NBDKIT = """#!/bin/bash
words=()
for word in "$@"; do
  [ "$word" != vddk ] || word={plugin}
  words+=("$word")
done
printf '%s\\n' "$*" >>{command_lines}  # but in a cage
exec {nbdkit} "${{words[@]}}"
"""


def plugin() -> Path:
    cache = os.environ.get("SYNVIRT_LAB") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "synvirt-lab"
    found = Path(cache) / "vddk" / "nbdkit-vddk-plugin.so"
    if not found.exists():
        lacking(f"needs nbdkit's vddk plugin: run `make lab`; looked in {found.parent}")
    return found


@dataclass
class Vddk:
    """`libdir` as an operator unpacks it; it holds our nbdkit too, and goes before all else in PATH."""

    folder: Path
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def libdir(self) -> Path:
        return self.folder / "vddk"

    def set(self, **settings: object) -> None:
        """What it shall know, and how it fails: the keys are library.c's. For readers that are opened from now on."""
        self.settings.update(settings)
        (self.libdir / "stand-in").write_text("".join(f"{key}={value}\n" for key, value in self.settings.items()))

    def forget(self) -> None:
        self.settings = {"log": self.libdir / "log"}
        (self.libdir / "log").unlink(missing_ok=True)
        (self.libdir / "command-lines").unlink(missing_ok=True)

    def calls(self) -> list[str]:
        log = self.libdir / "log"
        return log.read_text().splitlines() if log.exists() else []

    def command_lines(self) -> str:
        return (self.libdir / "command-lines").read_text()


def made(folder: Path) -> Vddk:
    vddk = Vddk(folder)
    library = vddk.libdir / "lib64" / "libvixDiskLib.so.8"
    library.parent.mkdir(parents=True)
    options = ["-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", "-Wl,-soname,libvixDiskLib.so.8"]
    subprocess.run([need("gcc", "gcc"), *options, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    # A copy, since those who read in a cage see this folder and no cache of ours.
    copy = vddk.libdir / "nbdkit-vddk-plugin.so"
    copy.write_bytes(plugin().read_bytes())
    script = vddk.libdir / "nbdkit"
    script.write_text(NBDKIT.format(plugin=copy, nbdkit=need("nbdkit", "nbdkit"), command_lines=vddk.libdir / "command-lines"))
    script.chmod(0o755)
    vddk.forget()
    return vddk
