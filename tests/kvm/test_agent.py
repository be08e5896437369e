"""What a guest's agent says of the guest, which is whatever the guest likes."""

import contextlib
import json
import socket
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import Internal
from synvirt.kvm import agent, agent_facts
from synvirt.kvm.connection import load
from synvirt.model.facts import FACT_CHARS, FACTS_MAX

TRUE: dict[str, Any] = {
    "guest-ping": {},
    "guest-get-host-name": {"host-name": "web01"},
    "guest-get-osinfo": {"pretty-name": "Debian GNU/Linux 12", "kernel-release": "6.1.0", "id": "debian"},
    "guest-get-timezone": {"zone": "CET", "offset": 3600},
    "guest-get-fsinfo": [
        {"mountpoint": "/", "type": "ext4", "used-bytes": 5, "total-bytes": 9},
        {"mountpoint": "/boot", "type": "vfat"},
    ],
    "guest-network-get-interfaces": [
        {"name": "lo", "hardware-address": "00:00:00:00:00:00", "ip-addresses": [{"ip-address": "127.0.0.1", "prefix": 8}]},
        {
            "name": "eth0",
            "hardware-address": "52:54:00:77:00:05",
            "ip-addresses": [
                {"ip-address": "fe80::5", "prefix": 64},
                {"ip-address": "10.77.0.5", "prefix": 24},
                {"ip-address": "nonsense", "prefix": 24},
            ],
        },
    ],
}


def facts(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> dict[str, str]:
    def ask(_domain: object, command: str, **_: object) -> object:
        if command not in answers:
            raise Internal(f"the agent does not know {command}")
        return answers[command]

    monkeypatch.setattr(agent, "ask", ask)
    return agent.facts(None)


def test_what_a_guest_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(monkeypatch, TRUE) == {
        "host name": "web01",
        "system": "Debian GNU/Linux 12",
        "kernel": "6.1.0",
        "time zone": "CET",
        "file system /": "ext4, 5 of 9 bytes",
        "file system /boot": "vfat",
        "addresses of 52:54:00:77:00:05": "10.77.0.5/24",
    }


def test_an_old_agent_says_less_and_none_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(monkeypatch, {"guest-ping": {}, "guest-get-host-name": {"host-name": "old"}}) == {"host name": "old"}
    assert facts(monkeypatch, {}) == {}


def test_an_agent_that_is_late_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a guest that has just started on a busy host: a rehearsal would compare less without a word of it."""
    asked: list[str] = []

    def ask(_domain: object, command: str, **_: object) -> object:
        asked.append(command)
        if asked.count(command) <= late:
            error = load().libvirtError("guest agent didn't respond to synchronization within '5' seconds")
            error.err = (load().VIR_ERR_AGENT_UNRESPONSIVE, *[None] * 8)
            raise error
        return TRUE.get(command)

    monkeypatch.setattr(agent, "ask", ask)
    late = 1
    assert agent.facts(None) == facts(monkeypatch, TRUE) != {}
    monkeypatch.setattr(agent, "ask", ask)
    late, asked = 9, []
    assert agent.facts(None) == {}
    assert asked == ["guest-ping"] * 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["mountpoint", "ip-addresses", "prefix", "x"]), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*TRUE, "guest-get-time"]), JSON | st.integers().map(lambda number: number << 1024)))
def test_nonsense_breaks_nothing_and_is_cut_short(answers: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = facts(patch, {"guest-ping": {}, **json.loads(json.dumps(answers))})
        assert all(isinstance(one, str) for one in agent.addresses(None))
    assert len(found) <= FACTS_MAX
    assert all(len(value) < 100 * FACT_CHARS and value.isprintable() for value in found.values())


def test_a_guest_of_a_thousand_cards_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [{"hardware-address": f"52:54:00:00:{number // 256:02x}:{number % 256:02x}"} for number in range(2000)]
    assert len(facts(monkeypatch, {"guest-ping": {}, "guest-network-get-interfaces": cards})) == FACTS_MAX


# ── what programs print ──────────────────────────────────────────────────────────────────────────────────────────────


def run_here(argv: Sequence[str]) -> str | None:
    """This host is a guest like others: its own programs print."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def test_programs_of_a_real_system_are_read() -> None:
    with socket.socket() as listener:
        for port in range(20000, 32000):  # not one that the system gives out: those are no facts
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                break
        listener.listen()
        found = agent_facts.facts_of(TRUE.get, None, run_here)
    assert found["user root"].startswith("number 0, shell /")
    assert "python" in found[f"listens on tcp {port}"] or "pytest" in found[f"listens on tcp {port}"]
    assert any("python" in name or "pytest" in name for name in found if name.startswith("application "))
    assert "application kthreadd" not in found
    assert all(name.rpartition(" ")[2].isdigit() for name in found if name.startswith("listens on "))


PRINTED = {
    "ss": """udp UNCONN 0 0 0.0.0.0:68 0.0.0.0:* users:(("dhclient",pid=410,fd=7))
tcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=700,fd=3))
tcp LISTEN 0 511 *:80 *:* users:(("nginx",pid=801,fd=6),("nginx",pid=800,fd=6))
tcp LISTEN 0 128 [::]:22 [::]:* users:(("sshd",pid=700,fd=4))
tcp LISTEN 0 128 127.0.0.1:41234 0.0.0.0:*
""",
    "systemctl": "cron.service loaded active running cron\nnginx.service loaded active running A server\n",
    "getent": "root:x:0:0:root:/root:/bin/bash\nweb:x:1000:1000:A Person:/home/web:/bin/sh\nnonsense\n",
    "ip": "default via 10.77.0.1 dev eth0 proto dhcp\n10.77.0.0/24 dev eth0 proto kernel scope link src 10.77.0.5\n",
    "ps": "    1     0 systemd\n    2     0 kthreadd\n   11     2 kworker/0:1\n  800     1 nginx\n  801   800 nginx\n",
    "dpkg-query": "nginx\t1.22.1-9\nadduser\t3.134\n",
}


def test_what_programs_of_linux_say() -> None:
    found = agent_facts.facts_of(TRUE.get, None, lambda argv: PRINTED.get(argv[0]))
    assert {name: value for name, value in found.items() if name not in facts_of_documents()} == {
        "listens on udp 68": "dhclient",
        "listens on tcp 22": "sshd",
        "listens on tcp 80": "nginx",
        "service cron.service": "runs",
        "service nginx.service": "runs",
        "user root": "number 0, shell /bin/bash",
        "user web": "number 1000, shell /bin/sh",
        "route default": "via 10.77.0.1",
        "route 10.77.0.0/24": "direct",
        "application systemd": "runs",
        "application nginx": "1.22.1-9",
    }
    assert "A Person" not in str(found)


def facts_of_documents() -> dict[str, str]:
    return agent_facts.facts_of(TRUE.get)


def test_what_powershell_says() -> None:
    address = {
        "services": ["W32Time", "MSSQLSERVER"],
        "users": [{"name": "Administrator", "sid": "S-1-5-21-1-500", "enabled": False}],
        "tcp": [{"port": 1433, "by": "sqlservr"}, {"port": 49664, "by": "lsass"}],
        "routes": [
            {"to": "0.0.0.0/0", "via": "10.77.0.1"},
            {"to": "10.77.0.0/24", "via": "0.0.0.0"},
            {"to": "224.0.0.0/4", "via": "0.0.0.0"},
            {"to": "10.77.0.5/32", "via": "0.0.0.0"},
        ],
        "programs": [{"name": "sqlservr", "version": "16.0.1000.6"}, {"name": "Idle", "version": None}],
    }
    commands: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> str | None:
        commands.append(argv)
        return json.dumps(address)

    answers = {**TRUE, "guest-get-osinfo": {"id": "mswindows", "pretty-name": "Windows Server 2022"}}
    found = agent_facts.facts_of(answers.get, None, run)
    assert [argv[0] for argv in commands] == ["powershell.exe"]
    assert found["service MSSQLSERVER"] == "runs"
    assert found["user Administrator"] == "S-1-5-21-1-500, disabled"
    assert {name for name in found if name.startswith(("listens", "route"))} == {
        "listens on tcp 1433", "route default", "route 10.77.0.0/24",
    }  # fmt: skip
    assert (found["application sqlservr"], found["application Idle"]) == ("16.0.1000.6", "runs")


def _prints(text: str, _argv: Sequence[str]) -> str:
    return text


@given(st.text(max_size=400), JSON)
def test_programs_may_print_what_they_like(printed: str, document: object) -> None:
    for answers, text in ((TRUE, printed), ({"guest-get-osinfo": {"id": "mswindows"}}, json.dumps(document))):
        found = agent_facts.facts_of(answers.get, None, partial(_prints, text))
        assert len(found) <= FACTS_MAX
        assert all(value.isprintable() for value in found.values())


def test_the_clock_is_held_against_this_hosts() -> None:
    answers = {**TRUE, "guest-get-time": 1_003_600_000_000_000}
    assert agent_facts.facts_of(answers.get, lambda: 1_000_000_000_000_000)["clock"] == "+3600.0 s"


@pytest.mark.parametrize("port", ["²", "9" * 5000, "", "x", "-1"])
def test_a_port_that_is_none_is_passed_over(port: str) -> None:
    printed = f"tcp LISTEN 0 128 0.0.0.0:{port} 0.0.0.0:*\ntcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:*\n"
    found = agent_facts.facts_of(TRUE.get, None, lambda argv: printed if argv[0] == "ss" else None)
    assert [name for name in found if name.startswith("listens")] == ["listens on tcp 22"]
