"""The network of rehearsed guests: what is in it is reached by our probes, and reaches nothing."""

import contextlib
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import HostLacks, SourceUnreachable
from synvirt.model.checks import Check
from synvirt.model.machine import Nic
from synvirt.proof.health import Checker
from synvirt.rehearsals import dhcp, network
from synvirt.rehearsals.bubble import FRAME_BYTES_MAX
from synvirt.rehearsals.network import Bubble, GuestInBubble, InBubble, NoNetwork, Place
from tests.fakes.hypervisor import FakeHypervisor
from tests.needs import need, need_root
from tests.running.processes import until

MAC, ME, GATEWAY = bytes.fromhex("525400112233"), socket.inet_aton("10.77.0.5"), socket.inet_aton("10.77.0.1")
ALL = b"\xff" * 6
CARDS = (
    Nic(key="1", mac="52:54:00:11:22:33", network="lan", ip_addresses=("2001:db8::5", "10.77.8.8")),
    Nic(key="2", mac=None, network="lan"),
)


@pytest.fixture
def bubble() -> Iterator[Bubble]:
    need_root("a network namespace")
    with Bubble(CARDS) as made:
        yield made


class Guest:
    """With Linux' own stack, on the first wire."""

    def __init__(self, bubble: Bubble, *words: str, card: int = 0) -> None:
        need("ip", "iproute2")
        argv = [sys.executable, "-m", "tests.rehearsals.guest_child", str(bubble.ports[card]), *words]
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == "ready\n"

    def do(self, line: str) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()
        return self._child.stdout.readline().strip()

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


@pytest.fixture
def guest(bubble: Bubble) -> Iterator[Guest]:
    made = Guest(bubble, "static")
    yield made
    made.close()


class Wire:
    """A card whose frames the test makes itself."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(10)

    def send(self, frame: bytes) -> None:
        self.socket.sendall(len(frame).to_bytes(4, "big") + frame)

    def receive(self) -> bytes:
        length = int.from_bytes(self.socket.recv(4, socket.MSG_WAITALL), "big")
        return self.socket.recv(length, socket.MSG_WAITALL)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def who_has(wanted: bytes, sender: bytes, mac: bytes = MAC) -> bytes:
    return ALL + mac + b"\x08\x06" + bytes.fromhex("0001080006040001") + mac + sender + bytes(6) + wanted


def checker(bubble: Bubble) -> Checker:
    return Checker(GuestInBubble(FakeHypervisor(), bubble), InBubble(bubble=bubble))


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_guest_is_found_and_its_ports_and_pages_are_probed(bubble: Bubble, guest: Guest) -> None:
    guest.do("serve(8080)")
    guest.do("reached('10.77.0.9', 1)")  # it says something: so it is seen where it is
    until(lambda: bubble.addresses() == ["10.77.0.5"])
    checks = checker(bubble)
    assert checks.trouble(Check(kind="port", port=8080), uuid4(), 5) is None
    assert "port 81" in (checks.trouble(Check(kind="port", port=81), uuid4(), 5) or "")
    assert checks.trouble(Check(kind="http", url="http://web01.example:8080/health"), uuid4(), 5) is None
    with bubble.connect(8080, 5) as made:
        assert made.getpeername() == ("10.77.0.5", 8080)


def test_an_answer_that_comes_too_late_is_none(bubble: Bubble, guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a port which swallows what it gets, to the question for another."""
    guest.do("serve(8080)")
    guest.do("reached('10.77.0.9', 1)")
    until(lambda: bubble.addresses() == ["10.77.0.5"])
    guest.do("subprocess.run('ip route add blackhole 10.77.0.9'.split())")
    monkeypatch.setattr(network, "ANSWER_S", -0.9)
    with pytest.raises(SourceUnreachable, match="gives no answer"):
        bubble.connect(81, 1)
    monkeypatch.undo()
    guest.do("subprocess.run('ip route del blackhole 10.77.0.9'.split())")
    bubble.connect(8080, 5).close()
    assert bubble.addresses() == ["10.77.0.5"]


def test_a_guest_that_says_nothing_is_said_to(bubble: Bubble) -> None:
    assert bubble.addresses() == []
    with pytest.raises(SourceUnreachable, match="has sent nothing"):
        bubble.connect(80, 1)


def test_without_a_network_no_check_goes_anywhere_else() -> None:
    """Least of all to the guest that runs, whose name the page has."""
    checks = Checker(NoNetwork(FakeHypervisor()), InBubble())
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}/"
        assert "has no network" in (checks.trouble(Check(kind="http", url=url), uuid4(), 1) or "")
    assert checks.trouble(Check(kind="port", port=80), uuid4(), 1) is not None


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_guest_that_scans_and_floods_reaches_nothing(bubble: Bubble, guest: Guest) -> None:
    own = {one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    with socket.create_server(("", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("", 0))
        udp.setblocking(False)
        for address in sorted({*own, "10.77.0.1", "10.77.0.77", "192.0.2.1", "8.8.8.8", "172.17.0.1", "169.254.169.254"}):
            assert guest.do(f"reached('{address}', {tcp.getsockname()[1]})") != "'connected'"
            guest.do(f"flood('{address}', {udp.getsockname()[1]}, 2000)")
        guest.do(f"flood('10.77.0.255', {udp.getsockname()[1]}, 2000)")
        tcp.settimeout(0.2)
        with pytest.raises(TimeoutError):
            tcp.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)
    status = Path(f"/proc/{bubble._child.pid}/status").read_text()
    assert "Seccomp:\t2" in status, "what reads its frames is in a cage"
    assert "Uid:\t0" not in status
    interfaces = {line.split(":")[0].strip() for line in net(bubble, "dev").splitlines()[2:]}
    assert interfaces == {"lo", "bubble0"}
    assert Path(f"/proc/{bubble._child.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    # It is there all the same, and is answered.
    guest.do("serve(8080)")
    bubble.connect(8080, 5).close()


def net(bubble: Bubble, name: str) -> str:
    return Path(f"/proc/{bubble._child.pid}/net/{name}").read_text()


def test_frames_of_all_kinds_are_survived(bubble: Bubble) -> None:
    chance = random.Random(7)
    with Wire(bubble.ports[0]) as wire, Wire(bubble.ports[1]) as other:
        for _ in range(3000):
            kind = chance.choice((b"\x08\x06", b"\x08\x00", b"\x86\xdd", b"\x88\xcc", chance.randbytes(2)))
            head = chance.choice((ALL, MAC, chance.randbytes(6))) + chance.choice((MAC, chance.randbytes(6)))
            wire.send((head + kind + chance.randbytes(chance.randrange(120)))[: chance.choice((3, 13, 14, 41, 42, 200))])
        wire.send(who_has(socket.inet_aton("10.77.0.254"), socket.inet_aton("10.77.0.9")))
        while wire.receive()[28:32] != socket.inet_aton("10.77.0.254"):
            pass  # all before it has been looked at
        other.send(who_has(GATEWAY, ME))
        until(lambda: "10.77.0.5" in bubble.addresses())
        assert len(bubble.addresses()) <= 64
    # One that never reads is no reason for anybody else to wait.
    with Wire(bubble.ports[0]) as deaf, Wire(bubble.ports[1]) as talking:
        deaf.send(who_has(GATEWAY, socket.inet_aton("10.77.0.6"), mac=b"\x52\x54\0\0\0\1"))
        for _ in range(3000):
            talking.send(ALL + MAC + b"\x88\xb5" + bytes(1400))
        talking.send(who_has(GATEWAY, ME))
        while talking.receive()[12:14] != b"\x08\x06":
            pass


def test_a_length_that_no_frame_has_ends_the_wire(bubble: Bubble) -> None:
    with Wire(bubble.ports[0]) as wire:
        wire.socket.sendall((FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
        assert wire.socket.recv(1) == b""
    with Wire(bubble.ports[0]) as again:
        again.send(who_has(GATEWAY, ME))
        assert again.receive()[20:22] == b"\0\2"


# ── several guests ───────────────────────────────────────────────────────────────────────────────────────────────────

DATABASE, SHOP, FAR = "10.77.0.20", "10.77.0.21", "10.99.3.7"


def card_of(number: int, address: str) -> Nic:
    return Nic(key=str(number), mac=f"52:54:00:11:00:0{number}", network="lan", ip_addresses=(address,))


@pytest.fixture
def three() -> Iterator[tuple[Bubble, list[Guest]]]:
    """Two on one network, and one on another, each with Linux' own stack."""
    need_root("a network namespace")
    cards = [card_of(number, address) for number, address in enumerate((DATABASE, SHOP, FAR))]
    with Bubble(cards) as bubble, contextlib.ExitStack() as stack:
        guests = []
        for number, card in enumerate(cards):
            assert card.mac is not None
            guest = Guest(bubble, card.ip_addresses[0], card.mac, card=number)
            stack.callback(guest.close)
            guests.append(guest)
        yield bubble, guests


def place(bubble: Bubble, number: int) -> Place:
    return Place(bubble, range(number, number + 1), lambda: None)


def test_guests_that_are_rehearsed_together_reach_each_other_and_nothing_else(three: tuple[Bubble, list[Guest]]) -> None:
    bubble, (database, shop, far) = three
    database.do("serve(5432)")
    shop.do("serve(80)")
    # The shop is requested before the database has said a word: nobody answers in its place.
    for guest, there in ((shop, (DATABASE, 5432)), (database, (SHOP, 80)), (far, (SHOP, 80)), (far, (DATABASE, 5432))):
        until(lambda: guest.do(f"reached{there}") == "'connected'")  # noqa: B023
    assert shop.do(f"reached('{DATABASE}', 81)") == "'ConnectionRefusedError'"
    # Each is probed where it is, and no other in its place.
    assert [place(bubble, number).addresses() for number in range(3)] == [[DATABASE], [SHOP], [FAR]]
    place(bubble, 0).connect(5432, 5).close()
    with pytest.raises(SourceUnreachable):
        place(bubble, 1).connect(5432, 5)
    own = {one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    with socket.create_server(("", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("", 0))
        udp.setblocking(False)
        for guest in (database, shop, far):
            for address in sorted(
                {*map(str, own), "10.77.0.1", "10.99.3.1", "192.0.2.1", "8.8.8.8", "172.17.0.1", "169.254.169.254"}
            ):
                assert guest.do(f"reached('{address}', {tcp.getsockname()[1]})") != "'connected'"
                guest.do(f"flood('{address}', {udp.getsockname()[1]}, 1000)")
        tcp.settimeout(0.2)
        with pytest.raises(TimeoutError):
            tcp.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)
    until(lambda: shop.do(f"reached('{DATABASE}', 5432)") == "'connected'")


def test_a_guest_cannot_take_anothers_place() -> None:
    """One that says it has the other's address is not probed for it, nor sent what is for it by its gateway."""
    need_root("a network namespace")
    cards = [card_of(0, DATABASE), card_of(1, SHOP)]
    with Bubble(cards) as bubble, Wire(bubble.ports[0]) as victim, Wire(bubble.ports[1]) as thief:
        thief.send(who_has(GATEWAY, socket.inet_aton(DATABASE)))
        thief.send(who_has(GATEWAY, socket.inet_aton(SHOP), mac=b"\x52\x54\0\0\0\1"))
        until(lambda: place(bubble, 1).addresses() == [SHOP])
        assert place(bubble, 0).addresses() == []
        victim.send(who_has(GATEWAY, socket.inet_aton(DATABASE)))
        until(lambda: place(bubble, 0).addresses() == [DATABASE])


def test_what_is_for_one_card_goes_to_no_other_and_what_is_for_all_goes_to_each() -> None:
    need_root("a network namespace")
    cards = [card_of(number, address) for number, address in enumerate((DATABASE, SHOP, FAR))]
    macs = [b"\x52\x54\0\0\0" + bytes([number]) for number in range(3)]
    with Bubble(cards) as bubble, Wire(bubble.ports[0]) as one, Wire(bubble.ports[1]) as two, Wire(bubble.ports[2]) as three:
        for wire, mac in ((one, macs[0]), (two, macs[1]), (three, macs[2])):
            wire.send(ALL + mac + b"\x88\xb5" + b"I am here")
        received_by_two = {two.receive()[6:12], two.receive()[6:12]}  # each frame for all goes to each other card
        assert received_by_two <= set(macs)
        one.send(macs[1] + macs[0] + b"\x88\xb5" + b"for two alone")
        assert two.receive().endswith(b"for two alone")
        one.send(ALL + macs[0] + b"\x88\xb5" + b"for all")
        received_by_three: list[bytes] = []
        while not received_by_three or not received_by_three[-1].endswith(b"for all"):
            received_by_three.append(three.receive())
        assert not [frame for frame in received_by_three if frame.endswith(b"for two alone")]


def test_what_a_guest_does_not_take_is_dropped_and_not_kept() -> None:
    """A guest that hangs, or floods another that hangs, fills no memory of this host."""
    need_root("a network namespace")
    cards = [card_of(0, DATABASE), card_of(1, SHOP)]
    with Bubble(cards) as bubble, Wire(bubble.ports[0]) as flooding, Wire(bubble.ports[1]) as hanging:
        hanging.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        status = Path(f"/proc/{bubble._child.pid}/status")

        def resident_kib() -> int:
            return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS"))

        flooding.send(who_has(GATEWAY, socket.inet_aton(DATABASE)))
        flooding.receive()
        before = resident_kib()
        frame = ALL + MAC + b"\x88\xb5" + bytes(60000)
        for _ in range(1000):  # 57 MiB
            flooding.send(frame)
        flooding.send(who_has(GATEWAY, socket.inet_aton(DATABASE)))
        flooding.receive()  # so all of them were handled
        assert resident_kib() - before < 24 * 1024


def test_a_guest_that_ends_before_it_has_taken_everything_ends_no_network() -> None:
    """The next rung starts another QEMU, and the others of the group run on."""
    need_root("a network namespace")
    with Bubble([card_of(0, DATABASE), card_of(1, SHOP)]) as bubble, Wire(bubble.ports[0]) as flooding:
        for _ in range(5):
            with Wire(bubble.ports[1]) as ending:
                for _ in range(150):
                    flooding.send(ALL + MAC + b"\x88\xb5" + bytes(60000))
                # It ends by a reset, as it has not read all.
                ending.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        flooding.send(who_has(GATEWAY, socket.inet_aton(DATABASE)))
        flooding.receive()


# ── whose addresses ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_its_gateways_are_there_and_its_own_address_is_free(bubble: Bubble) -> None:
    with Wire(bubble.ports[0]) as wire:
        wire.send(who_has(ME, bytes(4)))  # RFC 5227: is it free?
        wire.send(who_has(ME, ME))  # it is mine
        wire.send(who_has(GATEWAY, ME))
        answer = wire.receive()
        assert (answer[28:32], answer[38:42]) == (GATEWAY, ME), "the first answer is that of the gateway"


def test_two_cards_reach_each_other(bubble: Bubble) -> None:
    theirs = bytes.fromhex("525400445566")
    with Wire(bubble.ports[0]) as one, Wire(bubble.ports[1]) as other:
        other.send(who_has(GATEWAY, socket.inet_aton("10.77.0.6"), mac=theirs))
        other.receive()
        until(lambda: "10.77.0.6" in bubble.addresses())
        one.send(who_has(socket.inet_aton("10.77.0.6"), ME))
        while other.receive()[38:42] != socket.inet_aton("10.77.0.6"):
            pass
        one.send(theirs + MAC + b"\x88\xb5hello")
        while other.receive()[14:] != b"hello":
            pass


def test_a_card_of_another_user_is_not_taken(bubble: Bubble) -> None:
    code = (
        f"import os, socket; os.setuid(65534); s = socket.create_connection(('127.0.0.1', {bubble.ports[0]})); print(s.recv(1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "b''", done.stderr
    with Wire(bubble.ports[0]) as wire:
        wire.send(who_has(GATEWAY, ME))
        assert wire.receive()[20:22] == b"\0\2"


# ── addresses by DHCP ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("requested", "given"),
    [
        ("'10.77.3.9'", "10.77.3.9/24 10.77.3.1 10.77.3.1"),
        ("'192.168.7.1'", "192.168.7.1/24 192.168.7.254 192.168.7.254"),
        ("", "10.77.8.8/24 10.77.8.1 10.77.8.1"),
        ("'127.0.0.1'", "10.77.8.8/24"),
    ],
)
def test_a_guest_gets_the_address_that_it_had(bubble: Bubble, requested: str, given: str) -> None:
    """By the client of busybox. One that asks for none, or for one that no host has, gets what its platform said; and is probed
    there."""
    need("busybox", "busybox-static")
    guest = Guest(bubble)
    try:
        leased = guest.do(f"lease({requested})").strip("'")
        assert leased.startswith(given), leased
        guest.do("serve(8080)")
        guest.do("reached('10.99.0.1', 1)")
        until(lambda: leased.partition("/")[0] in bubble.addresses())
        bubble.connect(8080, 10).close()
    finally:
        guest.close()


def test_one_of_whom_nothing_is_known_gets_one_that_nobody_has() -> None:
    question = discover(bytes.fromhex("525400000001"))
    answer = dhcp.answer(question, MAC, {})
    assert answer is not None
    assert socket.inet_ntoa(answer[58:62]).startswith("198.18.")


def discover(mac: bytes) -> bytes:
    head = ALL + mac + b"\x08\x00" + bytes.fromhex("4500014800000000401100000000000000000000")
    fixed = struct.pack("!BBBB", 1, 1, 6, 0) + bytes(24) + mac + bytes(202)
    return head + struct.pack("!HHHH", 68, 67, 308, 0) + fixed + dhcp.COOKIE + bytes([53, 1, 1, 255])


@given(st.binary(max_size=600), st.integers(0, 300))
def test_no_message_breaks_it(noise: bytes, at: int) -> None:
    """Of a whole question some bytes are others, or it ends too soon."""
    question = discover(MAC)
    head = question[:14]
    assert dhcp.answer(question, MAC, {}) is not None
    for frame in (noise, head + noise, question[:at] + noise, question[: at + 42] + noise + question[at + 42 :]):
        answer = dhcp.answer(frame, MAC, {})
        assert answer is None or len(answer) < 400


# ── its end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_goes_with_the_service(tmp_path: Path) -> None:
    need_root("a network namespace")
    code = (
        "import time; from synvirt.rehearsals.network import Bubble; made = Bubble([]);"
        "print(made._child.pid, flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        pid = int(service.stdout.readline())
        service.send_signal(signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}/net/tcp").exists() or is_gone(pid))


def is_gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    return True


def test_one_that_was_killed_is_known_to_have_ended(bubble: Bubble) -> None:
    assert not bubble.ended
    bubble._child.kill()
    until(lambda: bubble.ended)
    assert checker(bubble).trouble(Check(kind="port", port=80), uuid4(), 5) is not None


def test_a_host_without_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(HostLacks, match="did not begin"):
        Bubble(CARDS)
    began = time.monotonic()
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(HostLacks):
        Bubble(CARDS)
    assert time.monotonic() - began < network.BEGIN_TIMEOUT_S


def test_a_host_without_a_free_port_says_why() -> None:
    """In a network of its own, which has two."""
    need_root("a network namespace")
    script = """
from synvirt.errors import HostLacks
from synvirt.model.machine import Nic
from synvirt.rehearsals.network import Bubble
try:
    Bubble([Nic(key=str(number), network="lan") for number in range(5)])
except HostLacks as error:
    print(error.detail)
"""
    has_two = 'ip link set lo up && echo 40000 40001 >/proc/sys/net/ipv4/ip_local_port_range && exec "$@"'
    argv = [need("unshare", "util-linux"), "--net", "sh", "-c", has_two, "sh", sys.executable, "-P", "-c", script]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "this host gives a rehearsed guest no network: Address already in use\n"
