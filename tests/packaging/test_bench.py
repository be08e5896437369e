"""What `make bench` writes, and when it refuses to."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench import backup, hostile, measure, quick, report, sources
from bench.measure import Run
from bench.platforms import folder
from bench.rows import ROWS, Row
from tests.needs import need


def test_a_table_is_written_between_the_marks_alone(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for table in ("| one |", "| two |"):
        report.write(document, table)
        assert document.read_text() == f"before\n{report.BEGIN}\n{table}\n{report.END}\nafter\n"
    assert list(tmp_path.iterdir()) == [document]


@pytest.mark.parametrize(
    "text", ["none", f"{report.BEGIN} alone", f"{report.END}{report.BEGIN}", f"{report.BEGIN}{report.END}" * 2]
)
def test_a_document_without_its_marks_stays_as_it_is(tmp_path: Path, text: str) -> None:
    document = tmp_path / "page.md"
    document.write_text(text)
    with pytest.raises(ValueError, match=re.escape(report.BEGIN)):
        report.write(document, "| one |")
    assert document.read_text() == text


@pytest.mark.parametrize("document", [report.DOCUMENT, report.README])
def test_the_documents_have_their_marks(document: Path) -> None:
    text = document.read_text()
    assert (text.count(report.BEGIN), text.count(report.END)) == (1, 1)
    assert text.index(report.BEGIN) < text.index(report.END)


def test_the_headlines_are_rows() -> None:
    assert set(report.HEADLINES) <= {row.name for row in ROWS}


def test_what_others_do_is_reported_from_what_we_do() -> None:
    before = report.moment("cpu  100 0 50 1000 40 0 0 0 0 0\n")
    ticks = os.sysconf("SC_CLK_TCK")
    busy = report.moment(f"cpu  {100 + 8 * ticks} 0 50 2000 90 0 0 0 0 0\n")
    # Ten seconds of two cores, of which eight were busy: three by us, five by others.
    since = report.Moment(0.0, before.spent, 0.0)
    share = report.others_share(since, report.Moment(10.0, busy.spent, 3.0), 2)
    assert share == pytest.approx(0.25)
    assert share > report.OTHERS_MAX
    assert report.others_share(since, report.Moment(10.0, busy.spent, 8.0), 2) == pytest.approx(0.0)


def test_figures_say_what_they_are_of() -> None:
    sentence = report.provenance(1000, 3, 0.02)
    assert re.search(
        r"^Measured \d{4}-\d\d-\d\d at commit \S+ by .*1000 MiB.*medians of 3.*\d+ cores.*others had 2%\.$", sentence
    )


def test_a_copy_that_costs_a_fifth_more_ends_badly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A noisy round does not: the least counts, and rounds go on until the row holds."""
    assert set(quick._recorded()[1]) == set(quick.NAMES) <= {row.name for row in ROWS}
    (tmp_path / "target.raw").touch()
    monkeypatch.setattr(quick, "same_content", lambda *_: True)
    seconds: Iterator[float] = iter(())

    peers = []

    def timed(argv: list[str]) -> Run:
        (tmp_path / "target.raw").touch()
        if argv[0] == measure.OURS[0]:
            return Run(0, next(seconds), 0)
        peers.append(argv[2])
        return Run(0, 1.0, 0)

    monkeypatch.setattr(quick, "timed", timed)
    images = sources.Sources(tmp_path, 1)
    monkeypatch.setattr(images, "get", lambda name: tmp_path / name)
    row = next(row for row in ROWS if row.name == "raw")
    seconds = iter([9.0, 8.0, 7.0, 2.1, 6.0])
    assert quick._cost(row, images, tmp_path / "target.raw", 2.2).ratio == pytest.approx(2.1)
    assert list(seconds) == [6.0], "no more rounds than it takes"
    seconds = iter([2.3] * quick.ROUNDS_MAX)
    assert quick._cost(row, images, tmp_path / "target.raw", 2.2).ratio > 2.2
    assert list(seconds) == []
    assert set(peers) == {str(quick.YARDSTICK)}, "moving memory is held against what is made of the same"


def test_the_yardstick_copies(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.write(os.urandom(sources.MIB))
        file.seek(9 * sources.MIB)
        file.write(os.urandom(5 * sources.MIB + 512))
        file.truncate(20 * sources.MIB)
    subprocess.run([sys.executable, "-SP", quick.YARDSTICK, source, target], check=True)
    assert source.read_bytes() == target.read_bytes()
    assert target.stat().st_blocks <= source.stat().st_blocks, "holes stay holes"


@pytest.mark.parametrize("same", [True, False])
def test_a_loss_fails_on_the_processor_that_the_bounds_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, same: bool
) -> None:
    monkeypatch.setattr(quick, "PLACE", tmp_path)
    monkeypatch.setattr(quick, "free_memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(quick, "_cost", lambda *_: quick.Cost(9.0, 1.0))
    monkeypatch.setattr(quick, "_recorded", lambda: ("here" if same else "there", dict.fromkeys(quick.NAMES, 1.0)))
    monkeypatch.setattr(quick, "processor", lambda: "here")
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["bench.quick"])
    with pytest.raises(SystemExit, match="more work") if same else nullcontext():
        quick.main()
    assert ("but on there" in capsys.readouterr().out) is not same


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quick, "free_memory_bytes", lambda: sources.MIB)
    monkeypatch.setattr("sys.argv", ["bench.quick"])
    quick.main()
    assert capsys.readouterr().out.startswith("SKIPPED: ")


@pytest.mark.parametrize("data_mib", [1, 8])
def test_a_small_disk_of_real_files_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_mib: int) -> None:
    """Of small files in many folders: as many inodes as mke2fs would give a disk of its size are too few."""
    tree = tmp_path / "tree"
    for number in range(400):
        folder = tree / str(number % 200) / "in"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).write_bytes(b"content")
    (tree / "large").write_bytes(bytes(64) * 65536)
    monkeypatch.setattr(sources, "REAL_FILES", tree)
    disk = sources.Sources(tmp_path / "made", data_mib).get("disk.raw")
    subprocess.run(["/usr/sbin/e2fsck", "-fn", f"{disk}?offset={sources.PARTITION_AT}"], check=True)


@pytest.mark.parametrize(("ours", "good"), [(2.4, True), (2.5, False)])
def test_a_restore_takes_six_tenths_of_restics_time(ours: float, good: bool) -> None:
    line = backup._restored({"ours": ours, "restic": 4.0, "borg": 5.0})
    assert (line.good, line.reach) == (good, "≤ 0.6 of restic's, less than both")


def test_a_flat_file_is_read_from_a_datastore_by_both(tmp_path: Path) -> None:
    for program, package in folder.PROGRAMS.items():
        need(program, package)
    with folder.datastore(tmp_path) as spec:
        ours, theirs = folder.read(spec, tmp_path, data_mib=1, rounds=1)
    assert (len(ours), len(theirs)) == (1, 1)


@pytest.mark.parametrize("reader", hostile.READERS)
def test_what_is_damaged_is_refused_in_the_cage_quickly_and_in_little_memory(
    reader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m bench.hostile` with fewer inputs than it makes by itself, and others each day."""
    assert hostile.measured(reader, count=150, seed=int(time.time() // 86400)), capsys.readouterr().out


def test_damage_is_of_many_kinds_and_the_same_for_one_seed() -> None:
    good = bytes(range(256)) * 64
    first, again = ([hostile.mutated(good, random.Random(number)) for number in range(300)] for _ in range(2))
    assert first == again
    assert good not in first
    assert len(set(first)) > 290
    assert min(map(len, first)) < len(good) // 2


def test_runs_in_which_the_host_took_memory_back_do_not_count_where_others_are_without_it() -> None:
    disturbed, sound = Run(9, 9, 1, disturbed=True), Run(1, 1, 1)
    assert measure.counted([disturbed, sound, disturbed, sound], 3) == [sound, sound]
    assert measure.counted([sound, disturbed, sound, sound, sound], 3) == [sound, sound, sound]
    assert measure.counted([disturbed] * 3, 3) == [disturbed] * 3


@pytest.mark.parametrize(
    ("disturbed", "seconds", "turns"),
    [((), 1, 3), ((1,), 1, 4), ((1, 2, 3), 1, 6), (range(20), 1, 6), (range(20), 4, 3)],
)
def test_a_row_is_measured_until_it_has_enough_runs_without_a_disturbance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: Sequence[int], seconds: float, turns: int
) -> None:
    """`disturbed`: which of our runs; the first one, 0, is not counted. A command that takes long is not tried again."""
    target, runs = tmp_path / "target", []

    def timed(argv: list[str]) -> Run:
        target.touch()
        runs.append(argv)
        turn, of_peer = divmod(len(runs) - 1, 2)
        return Run(seconds, 1, 1, disturbed=not of_peer and turn in disturbed)

    monkeypatch.setattr(measure, "timed", timed)
    monkeypatch.setattr(measure, "same_content", lambda original, made: True)
    measure.measure(Row(name="x", source="x", peer="cp a b", reach=1), Path, target, tmp_path, 3)
    assert len(runs) == 2 * (turns + 1)
