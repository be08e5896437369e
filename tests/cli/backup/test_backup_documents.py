"""docs/backup.md: each command that it shows is run, in its order, against a service whose guests are files."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.fakes.service import Service

PAGE = Path(__file__).parents[3] / "docs/backup.md"
# What the service of this test has not: a hypervisor, a run under way, the key of a lost host. Each refuses as it says.
REFUSED = {
    "add-repository --existing": "SYNVIRT_RECOVERY_KEY",
    "restore --target new-domain": "E_BAK_",
    "boot-test": "E_BAK_BAD_REQUEST: this service has no hypervisor",
    "cancel": "E_BAK_CONFLICT",
    "seal-key --bound-to tpm2": "E_BAK_",
}


def _shown() -> list[list[str]]:
    text = PAGE.read_text().replace("\\\n", " ")
    lines = re.findall(r"^ {4,}(synvirt backup .*?)(?:\s+#.*)?$", text, re.MULTILINE)
    # A shell would put what is after «>» into a file.
    return [shlex.split(line.partition(" > ")[0])[2:] for line in lines]


def test_the_commands_of_the_page_run(service: Service, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_PASSPHRASE", "a passphrase of some length")
    for guest in ("web", "db"):
        service.guests.image(guest, guest.encode() * 100_000)
    (tmp_path / "repository").mkdir()
    shown = _shown()
    assert {words[0] for words in shown} >= {
        "add-repository", "add-job", "run", "runs", "watch", "show", "points", "verify", "restore", "retention", "protect",
        "unprotect", "verify-repository", "collect", "change-job", "cancel", "boot-test"
    }  # fmt: skip
    for line in shown:
        if "--peer" in line:
            continue  # of another service, whose name nobody knows here
        words = [_filled(run, word, tmp_path) for word in line]
        done = run("backup", *words)
        refusal = next((REFUSED[name] for name in REFUSED if _fits(name, words)), None)
        if refusal is None:
            assert done.exit_code == 0, (words, done.stdout, done.stderr)
        else:
            assert done.exit_code != 0, words
            assert refusal in done.stderr, (words, done.stderr)


def _fits(name: str, words: list[str]) -> bool:
    command, _, rest = name.partition(" ")
    return words[0] == command and rest in " ".join(words)


def _filled(run: Run, word: str, folder: Path) -> str:
    match word:
        case "/srv/backups":
            return str(folder / "repository")
        case "POINT":
            return _newest(run, "points")
        case "RUN":
            return _newest(run, "runs")
        case _:
            return word


def _newest(run: Run, listing: str) -> str:
    return str(json.loads(run("backup", listing, "--json").stdout)["items"][0]["id"])
