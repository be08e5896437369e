"""What the sample is made of: Debian's kernel, a static busybox, the QEMU guest agent; from the machine or its package archive.

A package that the machine lacks is fetched by `apt-get download` and unpacked in a cache folder, never installed: a guest agent
has no business on a host, and a second kernel even less.
"""

import lzma
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from synvirt.errors import BadRequest, Internal
from synvirt.programs import ProgramFailed, find, run

# Fetching 60 MB of kernel on a slow line.
DOWNLOAD_TIMEOUT_S = 600
KERNEL_PACKAGE = "linux-image-cloud-amd64"
# What a disk may hang on, here and on the platforms the sample may visit, and what the agent talks through. The second group is
# for a guest that does not find its root disk with the first one. A module that the kernel has built in, or has not at all (the
# cloud kernel knows little hardware), is left out.
MODULES: tuple[tuple[str, ...], ...] = (
    (
        "virtio_pci",
        "virtio_blk",
        "virtio_scsi",
        "virtio_console",
        "virtio_rng",
        "virtio_net",
        "sd_mod",
        "ext4",
        "crc32c_generic",
        "crc32c_intel",
    ),
    (
        "ahci",
        "ata_piix",
        "nvme",
        "mptspi",
        "vmw_pvscsi",
        "e1000",
    ),
)


@dataclass(frozen=True, slots=True)
class Pieces:
    """`modules`: the groups of MODULES, name and content, in the order in which they must be loaded. `applets`: the names of
    busybox. `libraries`: where the agent finds them."""

    kernel: Path
    kernel_version: str
    modules: tuple[tuple[tuple[str, bytes], ...], ...]
    busybox: Path
    applets: tuple[str, ...]
    agent: Path
    libraries: tuple[Path, ...]


def gather(cache: Path) -> Pieces:
    """Internal, with what to install, when neither the machine nor its package archive has a piece."""
    cache.mkdir(parents=True, exist_ok=True)
    kernel, modules_dir = _kernel(cache)
    busybox = _busybox(cache)
    agent = _program("qemu-ga", "qemu-guest-agent", cache)
    return Pieces(
        kernel=kernel,
        kernel_version=modules_dir.name,
        modules=tuple(_modules(modules_dir)),
        busybox=busybox,
        applets=tuple(run([str(busybox), "--list"], timeout_s=60).stdout.split()),
        agent=agent,
        libraries=tuple(_libraries(agent)),
    )


def cache_dir() -> Path:
    """BadRequest, where the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "synvirt"
    except RuntimeError as error:  # as in `default_data_dir`
        raise BadRequest("this user has no home", hint="XDG_CACHE_HOME names a folder for the sample's parts") from error


# ── kernel ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _kernel(cache: Path) -> tuple[Path, Path]:
    """A kernel and the folder of its modules: the newest of the machine's own, else one from the package archive."""
    for root in (Path("/"), cache / KERNEL_PACKAGE):
        found = _kernel_in(root)
        if found is not None:
            return found
    _fetch(_newest_kernel_package(), cache / KERNEL_PACKAGE)
    found = _kernel_in(cache / KERNEL_PACKAGE)
    if found is None:
        raise Internal(f"the package {KERNEL_PACKAGE} holds no kernel")
    return found


def _kernel_in(root: Path) -> tuple[Path, Path] | None:
    for kernel in sorted((root / "boot").glob("vmlinuz-*"), reverse=True):
        modules_dir = root / "lib/modules" / kernel.name.removeprefix("vmlinuz-")
        # A kernel of a guest we are inside of may have no modules here, and one that we may not read is of no use.
        if modules_dir.is_dir() and os.access(kernel, os.R_OK):
            return kernel, modules_dir
    return None


def _newest_kernel_package() -> str:
    """The meta package names the real one."""
    depends = run(["apt-cache", "depends", "--no-recommends", KERNEL_PACKAGE], timeout_s=60).stdout
    match = re.search(r"Depends: (linux-image-[0-9][\w.+-]*)", depends)
    if match is None:
        raise Internal(f"the package archive has no {KERNEL_PACKAGE}", hint="apt-get update")
    return match[1]


def _modules(folder: Path) -> Iterator[tuple[tuple[str, bytes], ...]]:
    """The wanted modules by group, each after those it depends on. modules.dep names a module's file, then those of its
    dependencies, the last to be loaded first."""
    files = {path.name.partition(".ko")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}
    wanted = _wanted()
    dependencies = _dependencies(wanted, files)
    loaded: set[str] = set()
    for group in wanted:
        names = dict.fromkeys(one for name in group for one in (*dependencies.get(name, ()), name))
        new = [name for name in names if name in files and name not in loaded]
        loaded.update(new)
        yield tuple((name, lean(_unpacked(files[name]))) for name in new)


def _wanted() -> tuple[tuple[str, ...], ...]:
    """virtio devices appear while their modules load: the bus must be there first. modules.dep of Debian 12 does not say so."""
    first, *others = MODULES
    return ("virtio_ring", "virtio", *first), *others


def _dependencies(wanted: tuple[tuple[str, ...], ...], files: dict[str, Path]) -> dict[str, tuple[str, ...]]:
    """From the modules themselves, since a package that was only unpacked has no modules.dep: depmod makes it at install.
    A module says `depends=a,b` in its .modinfo section."""
    known: dict[str, tuple[str, ...]] = {}

    def resolve(name: str, above: tuple[str, ...] = ()) -> tuple[str, ...]:
        if name in known or name in above or name not in files:
            return known.get(name, ())
        match = re.search(rb"(?:^|\0)depends=([^\0]*)\0", _unpacked(files[name]))
        direct = [one.replace("-", "_") for one in (match[1].decode() if match else "").split(",") if one]
        ordered: list[str] = []
        for one in direct:
            ordered += [*resolve(one, (*above, name)), one]
        known[name] = tuple(dict.fromkeys(ordered))
        return known[name]

    for group in wanted:
        for name in group:
            resolve(name)
    return known


def _unpacked(module: Path) -> bytes:
    return lzma.decompress(module.read_bytes()) if module.suffix == ".xz" else module.read_bytes()


# include/linux/module_signature.h: the signature, 12 bytes that end with its length, this line.
SIGNED = b"~Module signature appended~\n"
SIGNATURE_HEAD_BYTES = 12


def lean(module: bytes) -> bytes:
    """The module without what only costs an emulated guest time: the signature, which the kernel would check; and its types get
    another name than the kernel looks for. At the first module with types the kernel reads all of its own too, 5 MiB."""
    if module.endswith(SIGNED):
        head = len(module) - len(SIGNED) - SIGNATURE_HEAD_BYTES
        module = module[: head - int.from_bytes(module[head + SIGNATURE_HEAD_BYTES - 4 : head + SIGNATURE_HEAD_BYTES], "big")]
    return module.replace(b"\0.BTF\0", b"\0.btf\0")


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _busybox(cache: Path) -> Path:
    installed = find("busybox")
    if installed is not None and _is_static(Path(installed)):
        return Path(installed)
    return _from_package("busybox", "busybox-static", cache)


def _program(name: str, package: str, cache: Path) -> Path:
    installed = find(name)
    return Path(installed) if installed is not None else _from_package(name, package, cache)


def _from_package(name: str, package: str, cache: Path) -> Path:
    for attempt in range(2):
        for folder in ("bin", "usr/bin", "sbin", "usr/sbin"):
            path = cache / package / folder / name
            if path.exists():
                return path
        if attempt == 0:
            _fetch(package, cache / package)
    raise Internal(f"the package {package} holds no {name}")


def _fetch(package: str, folder: Path) -> None:
    """Unpack a Debian package into the folder, whole or not at all."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        run(["apt-get", "download", "-q=2", package], timeout_s=DOWNLOAD_TIMEOUT_S, cwd=partial)
        archive = next(partial.glob("*.deb"))
        run(["dpkg-deb", "-x", str(archive), str(partial)], timeout_s=DOWNLOAD_TIMEOUT_S)
        archive.unlink()
        partial.rename(folder)
    except (ProgramFailed, StopIteration) as error:
        raise Internal(f"the Debian package {package} cannot be had: {error}", hint="apt-get update, then try again") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_static(program: Path) -> bool:
    try:
        run(["ldd", str(program)], timeout_s=10)
    except ProgramFailed:
        return True  # «not a dynamic executable»
    return False


def _libraries(program: Path) -> Iterator[Path]:
    """The shared libraries of a program, its loader included, where it looks for them."""
    for line in run(["ldd", str(program)], timeout_s=10).stdout.splitlines():
        if "not found" in line:
            raise Internal(f"{program.name} lacks the library {line.split()[0]}", hint="apt-get install qemu-system-x86")
        match = re.search(r"(/\S+) \(0x", line)
        if match is not None:
            yield Path(match[1])
