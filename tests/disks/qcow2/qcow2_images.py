"""qcow2 images as data: a Hypothesis strategy draws them, qemu-img and qemu-io make them."""

import itertools
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hypothesis import strategies as st

KIB, MIB = 1 << 10, 1 << 20
Operation = Literal["write", "noise", "compressed", "zero", "zero and unmap", "discard", "snapshot"]
# qemu-io's words. Noise comes from a file beside the images and does not compress.
_COMMANDS: dict[str, str] = {
    "write": "write -P {pattern} {offset} {length}",
    "noise": "write -s noise {offset} {length}",
    "compressed": "write -c -P {pattern} {offset} {length}",
    "zero": "write -z {offset} {length}",
    "zero and unmap": "write -z -u {offset} {length}",
    "discard": "discard {offset} {length}",
}


@dataclass(frozen=True)
class Step:
    """One change of a layer; offset and length are thousandths of its size."""

    operation: Operation
    offset: int
    length: int
    pattern: int


@dataclass(frozen=True)
class Layer:
    """One file of a chain. `size` is what was asked for: qemu-img rounds it up to sectors."""

    format: Literal["qcow2", "raw"]
    size: int
    cluster_bits: int
    options: tuple[str, ...]
    steps: tuple[Step, ...]
    converted: Literal["", "plain", "compressed"]

    @property
    def cluster_size(self) -> int:
        return 1 << self.cluster_bits


_OPERATIONS: tuple[Operation, ...] = (
    "write", "noise", "compressed", "zero", "zero and unmap", "discard", "snapshot",
)  # fmt: skip
_STEPS = st.lists(
    st.builds(Step, st.sampled_from(_OPERATIONS), st.integers(0, 999), st.integers(1, 400), st.integers(1, 255)), max_size=6
)


@st.composite
def layers(draw: st.DrawFn, *, lowest: bool, raw: bool) -> Layer:
    """A layer that qemu-img can make: what it refuses to combine is not drawn."""
    cluster_bits = draw(st.sampled_from([9, 9, 10, 12, 13, 14, 16, 16, 18, 21]))
    # From less than a cluster to more than a window of mapping (8192 clusters), within what a test can compare.
    size = draw(st.integers(1, min(12 * MIB, 10_000 << cluster_bits)))
    if raw:
        return Layer("raw", size, 16, (), tuple(draw(_STEPS)), "")
    options: list[str] = []
    old = draw(st.integers(0, 4)) == 0
    if old:
        options.append("compat=0.10")
    else:
        if draw(st.booleans()):
            options.append("compression_type=zstd")
        if cluster_bits >= 14 and draw(st.booleans()):
            options.append("extended_l2=on")
        if draw(st.integers(0, 3)) == 0:
            options.append("data_file=NAME.data")
            if lowest and draw(st.booleans()):
                options.append("data_file_raw=on")
        elif draw(st.integers(0, 3)) == 0:
            options.append("lazy_refcounts=on")
    if lowest and draw(st.integers(0, 2)) == 0:
        options.append("preallocation=" + draw(st.sampled_from(["metadata", "falloc", "full"])))
    ways: list[Literal["", "plain", "compressed"]] = ["", "", "plain", "compressed"] if lowest else [""]
    converted = draw(st.sampled_from(ways))
    if converted:
        options = [option for option in options if "data_file" not in option and "preallocation" not in option]
    return Layer("qcow2", size, cluster_bits, tuple(options), tuple(draw(_STEPS)), converted)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Layer, ...]:
    """Lowest layer first; sizes grow and shrink from layer to layer."""
    above = draw(st.integers(0, 2))
    raw = above > 0 and draw(st.booleans())
    return (draw(layers(lowest=True, raw=raw)), *(draw(layers(lowest=False, raw=False)) for _ in range(above)))


def make(chain: tuple[Layer, ...], folder: Path) -> Path:
    """The files of a chain in `folder`, as 0, 1, …; the path of the topmost."""
    (folder / "noise").write_bytes(random.Random(len(chain)).randbytes(256 * KIB))
    for number, layer in enumerate(chain):
        below = chain[number - 1].format if number else None
        _make(layer, folder, str(number), below)
    return folder / str(len(chain) - 1)


def _make(layer: Layer, folder: Path, name: str, below: str | None) -> None:
    options = ["-o", ",".join([f"cluster_size={layer.cluster_size}", *layer.options]).replace("NAME", name)]
    backing = [] if below is None else ["-b", str(int(name) - 1), "-F", below]
    if layer.format == "raw":
        options = []
    qemu("qemu-img", "create", "-q", "-f", layer.format, *options, *backing, name, str(layer.size), cwd=folder)
    commands: list[str] = []
    for number, step in enumerate(layer.steps):
        if step.operation == "snapshot":
            _change(layer, folder, name, commands)
            commands = []
            if layer.format == "qcow2" and "data_file=NAME.data" not in layer.options:
                qemu("qemu-img", "snapshot", "-c", f"snapshot {number}", name, cwd=folder)
            continue
        commands += _commands(layer, step)
    _change(layer, folder, name, commands)
    if layer.converted:
        compress = ["-c"] if layer.converted == "compressed" else []
        qemu("qemu-img", "convert", "-f", "qcow2", "-O", "qcow2", *compress, *options, name, "converted", cwd=folder)
        (folder / "converted").rename(folder / name)


def _commands(layer: Layer, step: Step) -> list[str]:
    """A step in qemu-io's words; compressed clusters are written whole, one by one."""
    sectors = -(-layer.size // 512) * 512
    offset = step.offset * sectors // 1000
    length = max(1, min(step.length * sectors // 1000, sectors - offset))
    operation = step.operation
    if operation == "compressed":
        if layer.format == "raw" or "data_file=NAME.data" in layer.options:
            operation = "write"
        else:
            first = offset // layer.cluster_size * layer.cluster_size
            # A few are as telling as many.
            starts = range(first, min(offset + length, first + 12 * layer.cluster_size), layer.cluster_size)
            return [
                _COMMANDS[operation].format(pattern=step.pattern, offset=start, length=min(layer.cluster_size, sectors - start))
                for start in starts
            ]
    if operation in ("zero", "zero and unmap", "discard"):
        offset, length = offset // 512 * 512, max(512, length // 512 * 512)
    return [_COMMANDS[operation].format(pattern=step.pattern, offset=offset, length=length)]


def _change(layer: Layer, folder: Path, name: str, commands: list[str]) -> None:
    """Compressed clusters go where no cluster is yet: QEMU refuses to put one over another, which is no failure here."""
    for compressed, group in itertools.groupby(commands, lambda command: " -c " in command):
        arguments = [word for command in group for word in ("-c", command)]
        qemu("qemu-io", "-f", layer.format, "-d", "unmap", *arguments, name, cwd=folder, refusable=compressed)


def qemu(*argv: str, cwd: Path, refusable: bool = False) -> str:
    """Run one of QEMU's tools. qemu-io says on stdout what it could not do, and may end with 0 all the same."""
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60)
    refused = done.returncode != 0 or "failed" in done.stdout
    assert refusable or not refused, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout
