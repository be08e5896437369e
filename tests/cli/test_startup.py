"""What a command loads before it begins. Modules are counted, not seconds: a busy machine does not change the answer."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.cli.disk import parsing, plain
from synvirt.offline.known_by import may_be_appliance
from tests.offline import appliances

MIB = 1 << 20

# Each takes between a hundredth and half a second to load.
_HEAVY = [
    "pydantic",
    "synvirt.model",
    "synvirt.offline.registry",
    "synvirt.remote.reading",
    "typer",
    "rich",
    "httpx",
    "sqlalchemy",
]
# Of these an image needs none either: each takes longer to load than a small disk to copy.
_SLOW = [
    "numpy",
    "asyncio",
    "ssl",
    "logging",
    "concurrent.futures",
    "synvirt.outgoing",
    "argparse",
    "dataclasses",
    "inspect",
    "signal",
    "uuid",
]
_PROGRAM = """
import json, os, sys
def leave(code):
    print(json.dumps([code, sorted(sys.modules)]), file=sys.__stderr__)
    sys.__stderr__.flush()
    end(code)
end, os._exit = os._exit, leave
from synvirt.__main__ import main
main()
"""


def _loaded(*arguments: str) -> set[str]:
    """The modules that a command has loaded when it is done."""
    argv = [sys.executable, "-c", _PROGRAM, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0
    return set(modules)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    content = tmp_path / "disk.raw"
    content.write_bytes(b"no boot sector " + bytes(MIB))
    for made, name in (
        ("qcow2", "disk.qcow2"),
        ("vmdk", "disk.vmdk"),
        ("vhdx", "disk.vhdx"),
        ("vpc", "disk.vhd"),
        ("vdi", "disk.vdi"),
    ):
        subprocess.run(["qemu-img", "convert", "-O", made, content, tmp_path / name], check=True)
    stream = ["-o", "subformat=streamOptimized"]
    subprocess.run(["qemu-img", "convert", "-O", "vmdk", *stream, content, tmp_path / "stream.vmdk"], check=True)
    for compression in ("zlib", "zstd"):
        options = ["-c", "-o", f"compression_type={compression}"]
        subprocess.run(["qemu-img", "convert", "-O", "qcow2", *options, content, tmp_path / f"{compression}.qcow2"], check=True)
    description, disk = appliances.description("virtualbox"), (tmp_path / "stream.vmdk").read_bytes()
    appliances.archive(tmp_path / "plain.ova", {"virtualbox.ovf": description, "disk1.vmdk": disk})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "modules_max"),
    [
        ("disk.raw", 150),
        ("disk.qcow2", 164),
        ("zlib.qcow2", 172),
        ("zstd.qcow2", 170),
        ("disk.vmdk", 167),
        ("stream.vmdk", 175),
        ("disk.vhdx", 168),
        ("disk.vhd", 160),
        ("disk.vdi", 157),
        ("plain.ova", 209),
    ],
)
@pytest.mark.parametrize("command", ["info", "convert"])
def test_an_image_waits_for_what_it_needs_alone(images: Path, command: str, name: str, modules_max: int) -> None:
    target = [str(images / "target")] if command == "convert" else []
    loaded = _loaded("disk", command, str(images / name), *target)
    assert loaded & {*_HEAVY, *_SLOW} == set()
    assert len(loaded) <= modules_max, sorted(loaded)
    print("COUNT", command, name, len(loaded))


@pytest.mark.parametrize("command", ["info", "convert", "verify", "map", "compare"])
def test_a_command_is_parsed_alone_as_among_all(command: str) -> None:
    here = str(Path(__file__))
    given = [command, here, *([here] if command in ("convert", "compare") else []), "--key-file", here, "--json"]
    alone, among_all = (parsing.parser_of(arguments) for arguments in (given, []))
    one, other = (vars(parser.parse_args(given)) for parser in (alone, among_all))
    assert one.pop("parser").format_help() == other.pop("parser").format_help()
    assert one == other
    for wrong in ([command], [command, "--no-such"], [command, here, "--key-file"]):
        said = []
        for parser in (alone, among_all):
            with pytest.raises(parsing.WrongUsage) as error:
                parser.parse_known_args(wrong)
            said.append((error.value.usage, error.value.detail))
        assert said[0] == said[1]


_WORDS = [
    "--json",
    "--force",
    "--verify",
    __file__,
    "target",
    "",
    "-",
    "--",
    "-1",
    "--fo",
    "--force=1",
    "--disk",
    "/no such file",
]


@given(st.sampled_from(["info", "convert", "map", "--json"]), st.lists(st.sampled_from(_WORDS), max_size=5))
def test_a_plain_line_is_read_as_by_argparse(command: str, words: list[str]) -> None:
    if (read := plain.plain([command, *words])) is not None:
        expected = vars(parsing.parsed([command, *words]))
        del expected["parser"]
        assert vars(read) == expected


@given(st.permutations(["--force", "--json", "--verify"]))
def test_what_most_people_write_is_plain(flags: list[str]) -> None:
    assert plain.plain(["convert", *flags, __file__, "target"]) is not None
    assert plain.plain(["convert", __file__, *flags, "target"]) is not None
    assert plain.plain(["info", __file__]) is not None


@pytest.mark.parametrize("told", [None, "", "0", "-5", "x", " 70 ", "120"])
def test_help_is_as_wide_as_the_terminal(told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if told is not None:
        monkeypatch.setenv("COLUMNS", told)
    parsing._columns.cache_clear()
    assert parsing._columns() == shutil.get_terminal_size().columns
    parsing._columns.cache_clear()


@pytest.mark.parametrize("command", ["info", "convert"])
def test_an_appliance_waits_for_its_importer(tmp_path: Path, command: str) -> None:
    appliances.archive(tmp_path / "web.ova", appliances.appliance())
    target = [str(tmp_path / "target"), "--disk", "vmdisk1"] if command == "convert" else []
    loaded = _loaded("disk", command, str(tmp_path / "web.ova"), *target)
    assert loaded & {"numpy", "typer", "rich", "httpx", "sqlalchemy", "asyncio", "ssl", "synvirt.outgoing"} == set()


def test_the_program_starts_without_what_other_packages_hook_into_python(images: Path) -> None:
    """By its own list of folders, which is the one that Python's `site` makes."""
    launcher = Path(__file__).parents[2] / "packaging/launcher.py"
    program = images / "synvirt"
    program.write_text(subprocess.run([sys.executable, "-P", launcher], capture_output=True, text=True, check=True).stdout)
    program.chmod(0o755)
    shown = "import sys; print(sys.prefix, sys.path)"
    folders = subprocess.run([sys.executable, "-P", "-c", shown], capture_output=True, text=True, check=True).stdout
    own = program.read_text().replace("from synvirt.__main__ import main\n\nmain()", "print(sys.prefix, sys.path)")
    assert subprocess.run([sys.executable, "-SP", "-c", own], capture_output=True, text=True, check=True).stdout == folders
    environ = {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(
        [program, "disk", "info", images / "disk.raw"], capture_output=True, text=True, check=True, env=environ
    )
    assert "raw" in done.stdout
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "synvirt.blocks" in loaded
    assert loaded & {"site", "sitecustomize", "certifi"} == set()


def test_ctrl_c_before_the_first_module_is_loaded_prints_no_traceback(tmp_path: Path) -> None:
    launcher = Path(__file__).parents[2] / "packaging/launcher.py"
    program = subprocess.run([sys.executable, "-P", launcher], capture_output=True, text=True, check=True).stdout
    first = tmp_path / "synvirt/__init__.py"
    first.parent.mkdir()
    first.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    interrupted = program.replace("sys.path[:] = [", f"sys.path[:] = [{str(tmp_path)!r}, ")
    done = subprocess.run([sys.executable, "-SP", "-c", interrupted], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("module", ["synvirt.worker", "synvirt.exporter"])
def test_what_a_guest_may_wait_for_waits_for_no_importer_and_no_model(module: str) -> None:
    code = f"import sys, json; import {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    forbidden = set(_HEAVY) | {
        "numpy",
        "synvirt.offline",
        "fastapi",
        "dbos",
        "libvirt",
        "nbd",
        "isal",
        "deflate",
    }
    assert loaded & forbidden == set()


def test_what_reads_the_disks_of_a_guest_waits_for_no_model() -> None:
    """A process for each guest that is inspected: pydantic alone was half of its time."""
    code = "import sys, json; import synvirt.guests.inside.looker; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) & {"pydantic", "synvirt.disks", "isal", "deflate"} == set()


def test_the_service_keeps_no_memory_for_what_it_does_not_do() -> None:
    """numpy is 12 MiB: for who opens images, looks into a repository or simulates a wave. rich draws for terminals.
    joserfc is for services with an OpenID provider, alembic for a store of an earlier version."""
    parts = "logs, main, api.app, backups.service, fleet.forecasting, live.registry, migrations.rooms, offline.registry, web"
    imports = "; ".join(f"import synvirt.{part}" for part in parts.split(", "))
    code = f"import sys, json; {imports}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) & {"numpy", "rich", "pygments", "httpx", "dbos", "joserfc", "alembic"} == set()


def test_the_help_of_all_commands_is_quick() -> None:
    loaded = _loaded_by_help()
    assert loaded & (set(_HEAVY) - {"typer"} | {"numpy", "fastapi", "dbos", "asyncio", "ssl", "tomllib", "tarfile"}) == set()
    assert len(loaded) <= 240, sorted(loaded)


def _loaded_by_help() -> set[str]:
    code = "import sys, json; import synvirt.main; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("name", "head", "may_be"),
    [
        ("disk.raw", bytes(512), False),
        ("disk.img", b"\xeb\x3c\x90mkfs.fat", False),
        ("disk.img", b"LUKS\xba\xbe", False),
        ("web.OVF", b"\xff\xfe<", True),
        ("web.ova", b"damaged", True),
        ("disk.raw", b"\x1f\x8b\x08", True),
        ("disk.raw", b"7z\xbc\xaf\x27\x1c", True),
    ],
)
def test_the_quick_look(name: str, head: bytes, may_be: bool) -> None:
    assert may_be_appliance(name, head) is may_be
