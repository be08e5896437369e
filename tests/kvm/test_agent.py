"""What a guest's agent says of the guest, which is whatever the guest likes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import Internal
from synvirt.kvm import agent

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


def told(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> dict[str, str]:
    def ask(_domain: object, command: str, **_: object) -> object:
        if command not in answers:
            raise Internal(f"the agent does not know {command}")
        return answers[command]

    monkeypatch.setattr(agent, "ask", ask)
    return agent.facts(None)


def test_what_a_guest_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, TRUE) == {
        "host name": "web01",
        "system": "Debian GNU/Linux 12",
        "kernel": "6.1.0",
        "time zone": "CET",
        "file system /": "ext4, 5 of 9 bytes",
        "file system /boot": "vfat",
        "addresses of 52:54:00:77:00:05": "10.77.0.5/24",
    }


def test_an_old_agent_says_less_and_none_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, {"guest-ping": {}, "guest-get-host-name": {"host-name": "old"}}) == {"host name": "old"}
    assert told(monkeypatch, {}) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["mountpoint", "ip-addresses", "prefix", "x"]), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*TRUE]), JSON))
def test_nonsense_breaks_nothing_and_is_cut_short(answers: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = told(patch, {"guest-ping": {}, **json.loads(json.dumps(answers))})
    assert len(found) <= agent.FACTS_MAX
    assert all(len(value) < 100 * agent.FACT_CHARS and value.isprintable() for value in found.values())


def test_a_guest_of_a_thousand_cards_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [{"hardware-address": f"52:54:00:00:{number // 256:02x}:{number % 256:02x}"} for number in range(1000)]
    assert len(told(monkeypatch, {"guest-ping": {}, "guest-network-get-interfaces": cards})) == agent.FACTS_MAX
