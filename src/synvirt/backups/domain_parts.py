"""The parts of a guest besides its disks: its UEFI variables, and the state of its TPM."""

import base64
from pathlib import Path
from typing import Any

from synvirt.errors import SourceUnsupported

# A UEFI variable store has 64 KiB to 4 MiB.
NVRAM_BYTES_MAX = 16 << 20
# swtpm's files have some 6 KiB each: permanent, volatile, saved.
TPM_FILES_MAX, TPM_FILE_BYTES_MAX = 16, 1 << 20
# libvirt's folder of each version's state (src/qemu/qemu_tpm.c, qemuTPMEmulatorStorageBuildPath).
_TPM_FOLDERS = {"1.2": "tpm1.2", "2.0": "tpm2"}


def variables_path(root: Any, tpm_states: Path) -> Path | None:
    """The file of the guest's UEFI variables; None for a guest without. Where libvirt chose the firmware, older versions name
    the file only while the guest runs: it is in their folder, by the guest's name (src/qemu/qemu_conf.c: nvramDir). That is
    beside `tpm_states`, the folder of the TPMs."""
    if named := root.findtext("os/nvram"):
        return Path(named)
    if root.find("os[@firmware='efi']") is None:
        return None
    return tpm_states.parent / "qemu/nvram" / f"{root.findtext('name')}_VARS.fd"


def nvram(root: Any, tpm_states: Path) -> str | None:
    """The variables in base64. Firmware writes whole blocks, and rarely: a file that changes while it is read is read again."""
    path = variables_path(root, tpm_states)
    if path is None:
        return None
    content = _content(path, NVRAM_BYTES_MAX, "the guest's UEFI variables")
    while content is not None and (again := _content(path, NVRAM_BYTES_MAX, "the guest's UEFI variables")) != content:
        content = again
    return None if content is None else base64.b64encode(content).decode()


def tpm(root: Any, state_folder: Path) -> dict[str, str] | None:
    """The files of the TPM's emulator, in base64, by name; None for a guest without one. swtpm replaces them whole."""
    element = root.find("devices/tpm/backend[@type='emulator']")
    if element is None:
        return None
    folder = state_folder / (root.findtext("uuid") or "") / tpm_folder(root)
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except FileNotFoundError:  # it was never started
        return {}
    except OSError as error:
        raise SourceUnsupported(f"the state of the guest's TPM cannot be read: {error.strerror}") from error
    if len(paths) > TPM_FILES_MAX:
        raise SourceUnsupported(f"the state of the guest's TPM has over {TPM_FILES_MAX} files")
    found = {path.name: _content(path, TPM_FILE_BYTES_MAX, "the state of the guest's TPM") for path in paths}
    return {name: base64.b64encode(content).decode() for name, content in found.items() if content is not None}


def tpm_folder(root: Any) -> str:
    """The name of the folder with its files."""
    element = root.find("devices/tpm/backend[@type='emulator']")
    version = "2.0" if element is None else element.get("version") or "2.0"
    return _TPM_FOLDERS.get(version, "tpm2")


def _content(path: Path, most: int, what: str) -> bytes | None:
    """The file's content. None, if there is no such file: the guest was never started."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SourceUnsupported(f"{what} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise SourceUnsupported(f"{what} has over {most} bytes")
    return content
