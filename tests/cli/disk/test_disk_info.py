"""synvirt disk info: what each format's images say of themselves."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from synvirt.cli import app
from tests.disks.block_images import qemu
from tests.disks.vhd import vhdx_images
from tests.disks.vhd.vhdx_images import FULL, PARENT_IDENTITY, Vhdx, lose_power

MIB = 1 << 20


def info(image: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["disk", "info", "--json", str(image)])
    assert result.exit_code == 0, result.output
    [described] = json.loads(result.stdout)["disks"]
    table = CliRunner().invoke(app, ["disk", "info", str(image)])
    assert table.exit_code == 0, table.output
    assert {line.split()[0] for line in table.stdout.splitlines() if line} == set(described)
    found: dict[str, Any] = described
    return found


def test_a_linked_clone_is_read_under_a_root_above_it(tmp_path: Path) -> None:
    """Templates often lie in a folder of their own. Without --root the hint names it."""
    base, clone = tmp_path / "base", tmp_path / "clone"
    base.mkdir()
    clone.mkdir()
    made(base, "qcow2")
    qemu("qemu-img", "create", "-f", "qcow2", "-b", "../base/image", "-F", "qcow2", "web", cwd=clone)
    refused = CliRunner().invoke(app, ["disk", "info", str(clone / "web")])
    assert refused.exit_code == 1
    assert "leads out" in refused.output
    assert "--root FOLDER" in refused.output
    for command in (["info"], ["map"], ["compare", str(base / "disk.raw")], ["convert"]):
        files = [str(clone / "web"), *([str(tmp_path / "out")] if command == ["convert"] else [])]
        result = CliRunner().invoke(app, ["disk", *command[:1], "--root", str(tmp_path), *command[1:], *files])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "out").read_bytes() == (base / "disk.raw").read_bytes()
    for root, said in ((base, "is not under"), (clone, "names a folder above both"), (clone / "web", "is not under")):
        result = CliRunner().invoke(app, ["disk", "info", "--root", str(root), str(clone / "web")])
        assert result.exit_code != 0
        assert said in result.output


def made(folder: Path, image_format: str, options: str = "", name: str = "image") -> Path:
    raw = folder / "disk.raw"
    if not raw.exists():
        raw.write_bytes(os.urandom(MIB) + bytes(9 * MIB))
    option = ["-o", options] if options else []
    qemu("qemu-img", "convert", "-f", "raw", "-O", image_format, *option, raw.name, name, cwd=folder)
    return folder / name


def subset(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {key: found.get(key) for key in expected} == expected


def test_qcow2(tmp_path: Path) -> None:
    image = made(tmp_path, "qcow2", "cluster_size=128K,compression_type=zstd,lazy_refcounts=on")
    qemu("qemu-img", "bitmap", "--add", "-g", "65536", "-f", "qcow2", image.name, "nightly", cwd=tmp_path)
    qemu("qemu-img", "snapshot", "-c", "one", image.name, cwd=tmp_path)
    found = info(image)
    subset(
        found,
        {
            "format": "qcow2",
            "version": 3,
            "size_bytes": 10 * MIB,
            "data_bytes": MIB,
            "cluster_bytes": 128 << 10,
            "compression": "zstd",
            "extended_l2": False,
            "dirty": False,
            "corrupt": False,
            "internal_snapshots": 1,
            "encryption": None,
            "bitmaps": [{"name": "nightly", "granularity_bytes": 65536, "in_use": False}],
            "chain": [],
            "file_bytes": image.stat().st_size,
        },
    )
    with image.open("r+b") as file:  # incompatible features, byte 72: the dirty bit, as after a host's loss of power
        file.seek(72)
        (features,) = struct.unpack(">Q", file.read(8))
        file.seek(72)
        file.write(struct.pack(">Q", features | 1))
    assert info(image)["dirty"] is True


def test_the_chain_of_a_qcow2(tmp_path: Path) -> None:
    made(tmp_path, "vmdk", "subformat=streamOptimized", "base.vmdk")
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.vmdk", "-F", "vmdk", "middle.qcow2", cwd=tmp_path)
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-b", "middle.qcow2", "-F", "qcow2", "top.qcow2", "20M", cwd=tmp_path)
    chain = info(tmp_path / "top.qcow2")["chain"]
    assert [(each["name"], each["format"], each["size_bytes"]) for each in chain] == [
        ("middle.qcow2", "qcow2", 10 * MIB),
        ("base.vmdk", "vmdk", 10 * MIB),
    ]


@pytest.mark.parametrize("subformat", ["monolithicSparse", "streamOptimized", "monolithicFlat", "twoGbMaxExtentSparse"])
def test_vmdk(subformat: str, tmp_path: Path) -> None:
    found = info(made(tmp_path, "vmdk", f"subformat={subformat}", "image.vmdk"))
    subset(found, {"format": "vmdk", "subformat": subformat, "size_bytes": 10 * MIB, "chain": []})
    if subformat in ("monolithicSparse", "streamOptimized"):
        assert found["cluster_bytes"] == 65536
        assert found["compression"] == ("deflate" if subformat == "streamOptimized" else None)
    else:
        assert found["extent_files"]
        assert found["extents"] > 0
    assert len(found["cid"]) == 8


@pytest.mark.parametrize("image_format", ["vpc", "vdi", "vhdx"])
def test_block_images(image_format: str, tmp_path: Path) -> None:
    for subformat in ("dynamic", "fixed"):
        options = "static=on" if subformat == "fixed" else ""
        if image_format != "vdi":
            options = f"subformat={subformat}" + (",force_size=on" if image_format == "vpc" else "")
        found = info(made(tmp_path, image_format, options))
        expected = "static" if (image_format, subformat) == ("vdi", "fixed") else subformat
        subset(found, {"format": "vhd" if image_format == "vpc" else image_format, "subformat": expected})
        assert found["size_bytes"] == 10 * MIB == found["data_bytes"] + found["zero_bytes"]


def test_a_vhdx_that_was_not_closed_and_its_parent(tmp_path: Path) -> None:
    image = Vhdx(5 * MIB, (vhdx_images.Block(FULL),) * 5)
    vhdx_images.write(replace(image, identity=PARENT_IDENTITY), tmp_path / "base.vhdx", seed=1)
    keys = (("parent_linkage", f"{{{PARENT_IDENTITY}}}"), ("relative_path", "base.vhdx"))
    image = replace(image, locator=keys)
    places = vhdx_images.write(image, tmp_path / "disk.vhdx", raw=tmp_path / "raw", parent_raw=tmp_path / "base.raw")
    subset(info(tmp_path / "disk.vhdx"), {"subformat": "differencing", "log": "clean", "sector_bytes": 512})
    lose_power(image, tmp_path / "disk.vhdx", places, seed=5)
    found = info(tmp_path / "disk.vhdx")
    assert found["log"].startswith("dirty: ")
    assert "replayed in memory" in found["log"]
    assert [each["name"] for each in found["chain"]] == ["base.vhdx"]


def test_a_raw_disk(tmp_path: Path) -> None:
    image = tmp_path / "disk.raw"
    image.write_bytes(b"x" * 5000)
    subset(info(image), {"format": "raw", "over": [], "size_bytes": 5000, "data_bytes": 5000, "file_bytes": 5000, "chain": []})
