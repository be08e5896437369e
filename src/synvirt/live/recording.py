"""Records the answers of a platform's control plane at a real site, as a file for replay in tests: `synvirt sources record`.

    HttpClient ─▶ Recording (in memory) ─▶ Scrubbed ─▶ JSON lines: docs/recordings.md

Secrets are removed. Names, addresses, MACs and UUIDs are replaced, each by the same value in the whole file, so that references
still work. Headers are not kept. An adapter takes part by passing `access.recorder` to its HttpClient.
"""

import ipaddress
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote

from synvirt import __version__
from synvirt.live import About, VmRow, recording_soap
from synvirt.live.recording_soap import Element
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from synvirt.redacting import GONE, redacted, redacted_text
from synvirt.transport import Answer

FORMAT: Final = 1
# A site of thousands of VMs answers some hundred MiB in all; people send smaller files.
EXCHANGES_MAX: Final = 20_000
BYTES_MAX: Final = 256 << 20

# Fields with people's own text: names, which are replaced wherever they occur, and prose, which is replaced as a whole.
_NAMES: Final = re.compile(
    r"^(?!pretty-name$|os_name$|product)(?:.*[_-])?"
    r"(?:name|hostname|node|host|pool|storage|user|userid|username|clustername|group|owner|label|folder|fqdn|realm|guest)$"
    r"|(?:^|[a-z])(?:Name|Host|HostName|DomainName)$|^name_label$"
)
_PROSE: Final = re.compile(r"^(description|notes?|comment|comments|tags|annotation|title|name_description|message|subject)$")
# A certificate is public, but contains names.
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# XenServer's export name opens a disk; UEFI variables have keys of a guest's owner.
_SECRETS: Final = re.compile(r"ticket|csrf|session|passw|secret|cookie|jwt|exportname|EFI-variables", re.IGNORECASE)
# XenServer's: the name of a guest system, not of a guest.
_SYSTEM: Final = "os_version"
# The platforms' own words in those fields: without them the file could not be read any more.
_KEPT: Final = frozenset(
    {"root", "pam", "pve", "local", "local-lvm", "vmbr0", "current", "admin", "Administrator", "none", "default"}
    | {"qemu", "lxc", "storage", "node", "cluster", "true", "false"}
)
# Names in a text: a volume's storage, a card's bridge.
_WITHIN: Final = (
    re.compile(r"(?:^|,|file=|volume=)([A-Za-z][\w.-]*):(?:vm-|base-|iso/|import/|backup/|snippets/|[0-9]+/)"),
    re.compile(r"\b(?:bridge|pool|storage)=([\w.-]+)"),
)
_UUID: Final = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_MAC: Final = re.compile(r"\b[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}\b", re.IGNORECASE)
_IPV4: Final = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.]*\w)")
_IPV6: Final = re.compile(r"(?<![\w:.])(?=[0-9a-f:]*:[0-9a-f:]*:)[0-9a-f:]{3,39}(?![\w:])", re.IGNORECASE)
_MAIL: Final = re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+\b")


class Recording:
    """The Recorder of one session. Safe from several threads; what exceeds its limits is left out, and counted."""

    def __init__(self) -> None:
        self.exchanges: list[tuple[str, str, dict[str, str], bytes | None, Answer]] = []
        self.left_out = 0
        self._bytes = 0
        self._lock = threading.Lock()

    def answered(self, method: str, path: str, query: Mapping[str, str], sent: bytes | None, answer: Answer) -> None:
        """Keeps a request and its answer, up to EXCHANGES_MAX and BYTES_MAX; `left_out` counts the rest."""
        with self._lock:
            self._bytes += len(answer.body)
            if len(self.exchanges) >= EXCHANGES_MAX or self._bytes > BYTES_MAX:
                self.left_out += 1
                return
            self.exchanges.append((method, path, dict(query), sent, answer))


def lines(
    recording: Recording,
    kind: LiveKind,
    about: About,
    names: Iterable[str],
    secrets: Iterable[str],
) -> Iterator[str]:
    """The file, line by line. `names`: known names; `secrets`: the source's credentials."""
    scrub = Scrubbed(secrets)
    bodies = [_read(answer.body) for *_, answer in recording.exchanges]
    scrub.learn_names(names)
    for body in bodies:
        scrub.learn(body)
    head = {"recording": FORMAT, "kind": kind.value, "product": about.product, "version": about.version}
    yield json.dumps({**head, "synvirt": __version__, "left_out": recording.left_out}) + "\n"
    for (method, path, query, sent, answer), body in zip(recording.exchanges, bodies, strict=True):
        request = {"method": method, "path": scrub.path(path), "query": scrub.value(query)}
        if sent:
            request["body"] = _question(sent, scrub)
        kept = {"status": answer.status, "type": answer.headers.get("content-type", ""), "body": _kept(body, scrub)}
        if answer.reason and not answer.ok:
            kept["reason"] = scrub.text(answer.reason)
        yield json.dumps({"request": request, "answer": kept}, ensure_ascii=False) + "\n"


def named(rows: Iterable[VmRow], manifests: Iterable[VmManifest]) -> Iterator[str]:
    """The names that the adapter itself found, for platforms whose answers are no JSON, too."""
    for row in rows:
        yield row.name
        yield from row.folder.split("/")
    for vm in manifests:
        yield from (vm.name, vm.host, *(one.name for one in vm.snapshots), *(nic.network for nic in vm.nics))


class Scrubbed:
    """The replacements in one file."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(sorted((one for one in secrets if one), key=len, reverse=True))
        self._names: dict[str, str] = {}
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._pattern: re.Pattern[str] | None = None

    # ── learning names ───────────────────────────────────────────────────────────────────────────────────────────────

    def learn_names(self, names: Iterable[str]) -> None:
        """Replaces these names in all that follows. Numbers and single letters are kept."""
        for name in names:
            # A number is an id, and one letter would be found everywhere.
            if len(name) > 1 and not name.isdecimal() and name not in _KEPT and name not in self._names:
                self._names[name] = f"name-{len(self._names) + 1}"
                self._pattern = None

    def learn(self, body: Any) -> None:
        """The names in an answer."""
        if isinstance(body, Element):
            self.learn_names(recording_soap.names(body))
        elif isinstance(body, dict):
            for key, value in body.items():
                if key == _SYSTEM:
                    continue
                if isinstance(value, str) and _NAMES.search(str(key)):
                    self.learn_names([value])
                self.learn(value)
        elif isinstance(body, list):
            for one in body:
                self.learn(one)
        elif isinstance(body, str):
            self.learn_names(found for pattern in _WITHIN for found in pattern.findall(body))

    # ── replacing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def value(self, given: Any, field: str = "") -> Any:
        """A JSON value without secrets and names. `field`: the name of its field, which may make it a secret."""
        if isinstance(given, dict):
            return {self.text(str(name)): self.value(held, str(name)) for name, held in given.items()}
        if isinstance(given, list):
            return [self.value(one, field) for one in given]
        if not isinstance(given, str) or not given:
            return given
        if _SECRETS.search(field):
            return GONE
        if _PROSE.search(field):
            return self.stand_in("text", given)
        return self.text(str(redacted({field: given}, known=self._secrets).get(field, GONE)))

    def path(self, path: str) -> str:
        return "/".join(quote(self.text(unquote(part)), safe=":!@=,") for part in path.split("/"))

    def text(self, given: str) -> str:
        """A text without secrets, names and addresses."""
        found = _CERTIFICATE.sub(GONE, redacted_text(given, known=self._secrets))
        found = _UUID.sub(lambda one: self.stand_in("uuid", one.group().lower()), found)
        found = _MAC.sub(lambda one: self.stand_in("mac", one.group().lower().replace("-", ":")), found)
        found = _MAIL.sub(lambda one: self.stand_in("mail", one.group()), found)
        found = _IPV4.sub(lambda one: self._address(one.group()), found)
        found = _IPV6.sub(lambda one: self._address(one.group()), found)
        if self._pattern is None and self._names:
            longest = sorted(self._names, key=len, reverse=True)
            self._pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, longest))})(?![A-Za-z0-9])")
        return found if self._pattern is None else self._pattern.sub(lambda one: self._names[one.group()], found)

    def _address(self, given: str) -> str:
        try:
            address = ipaddress.ip_address(given)
        except ValueError:
            return given  # a version, or a time
        if address.is_loopback or address.is_unspecified:
            return given
        return self.stand_in(f"ipv{address.version}", str(address))

    def stand_in(self, kind: str, given: str) -> str:
        """The replacement for this value in the whole file: the same value has the same one."""
        if (kind, given) not in self._stand_ins:
            number = sum(1 for known, _ in self._stand_ins if known == kind) + 1
            self._stand_ins[kind, given] = {
                "uuid": f"00000000-0000-4000-8000-{number:012x}",
                "mac": ":".join(f"02{number:010x}"[at : at + 2] for at in range(0, 12, 2)),
                "mail": f"person-{number}@example.org",
                # For documentation (RFC 2544, RFC 3849): no host has such an address.
                "ipv4": f"198.{18 + (number >> 16)}.{number >> 8 & 255}.{number & 255}",
                "ipv6": f"2001:db8::{number:x}",
                "volume": f"{number:08x}-00000000-0000-000000000000",
            }.get(kind, f"{kind}-{number}")
        return self._stand_ins[kind, given]


def _kept(body: Any, scrub: Scrubbed) -> Any:
    """An answer's body, scrubbed. SOAP stays XML, as its readers need its types and their order."""
    if isinstance(body, Element):
        return recording_soap.written(recording_soap.scrubbed(body, scrub))
    return scrub.value(body)


def _question(sent: bytes, scrub: Scrubbed) -> Any:
    soap = recording_soap.read(sent)
    return scrub.value(_sent(sent)) if soap is None else recording_soap.question(recording_soap.scrubbed(soap, scrub))


def _read(body: bytes) -> Any:
    soap = recording_soap.read(body)
    if soap is not None:
        return soap
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _sent(sent: bytes) -> Any:
    """JSON, or a form as a mapping, or the text."""
    read = _read(sent)
    if isinstance(read, str) and re.fullmatch(r"[^\s<{]+=[^\s<{]*", read):
        return dict(parse_qsl(read, keep_blank_values=True))
    return read
