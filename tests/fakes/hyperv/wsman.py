"""WinRM with PowerShell remoting, as a server: [MS-WSMV] and [MS-PSRP], written from the specifications.

It shares no code with the client's library, and runs no PowerShell. What is called is known by the script's text, which must be
one of the package's own, and goes to the model.
"""

import base64
import contextlib
import json
import re
import ssl
import struct
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID, uuid4
from xml.sax.saxutils import escape

from synvirt.live.hyperv.session import SCRIPTS, script

S = "http://www.w3.org/2003/05/soap-envelope"
WSA = "http://schemas.xmlsoap.org/ws/2004/08/addressing"
RSP = "http://schemas.microsoft.com/wbem/wsman/1/windows/shell"
WSMAN = "http://schemas.dmtf.org/wbem/wsman/1/wsman.xsd"
FAULT = "http://schemas.microsoft.com/wbem/wsman/1/wsmanfault"
CREATE_PIPELINE, OUTPUT, PIPELINE_STATE, CAPABILITY, POOL_STATE = 0x21006, 0x41004, 0x41006, 0x10002, 0x21005
PROGRESS = 0x41010
COMPLETED, FAILED = 4, 5
# A Windows host cuts messages into fragments of 32 KiB, and puts several into an envelope.
FRAGMENT_BYTES, FRAGMENTS_AN_ANSWER = 32 << 10, 4
TIMED_OUT = 2150858793


class Refusal(Exception):
    """What a script throws: see common.ps1."""

    def __init__(self, call: str, code: int, text: str = "") -> None:
        super().__init__(text)
        self.call, self.code, self.text = call, code, text


@dataclass
class Shell:
    id: str
    waiting: list[bytes] = field(default_factory=list)
    commands: dict[str, list[bytes]] = field(default_factory=dict)
    common: bool = False


Answers = Callable[[str, dict[str, Any]], Any]


class Wsman:
    """`faults`: how often each is still to happen: unauthorized, quota, envelope, hang_up, timed_out, status, silent.
    `progress_chars`: of a record of progress that comes before each answer."""

    def __init__(self, answers: Answers, user: str, password: str) -> None:
        self.answers, self.user, self.password = answers, user, password
        self.shells: dict[str, Shell] = {}
        self.faults: dict[str, int] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.shells_max = 25
        self.progress_chars = 0
        self.lock = threading.Lock()
        self.objects = iter(range(1, 1 << 40))

    def strikes(self, name: str) -> bool:
        with self.lock:
            left = self.faults.get(name, 0)
            self.faults[name] = max(0, left - 1)
            return left > 0

    # ── envelopes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, body: bytes) -> tuple[int, str]:
        root = ET.fromstring(body)
        message = root.findtext(f"{{{S}}}Header/{{{WSA}}}MessageID") or ""
        action = (root.findtext(f"{{{S}}}Header/{{{WSA}}}Action") or "").rpartition("/")[2]
        selector = root.find(f"{{{S}}}Header/{{{WSMAN}}}SelectorSet/{{{WSMAN}}}Selector[@Name='ShellId']")
        try:
            if action == "Create":
                return 200, self._envelope(message, action, self._create(root))
            shell = self.shells.get(("" if selector is None else selector.text or "").upper())
            if shell is None:
                raise _Fault(0x8033805B, "the shell was not found on the server")
            found = {"Command": self._command, "Receive": self._receive, "Delete": self._delete, "Signal": self._signal}
            return 200, self._envelope(message, action, found[action](shell, root))
        except _Fault as fault:
            return 500, self._envelope(message, "fault", fault.body)

    def _envelope(self, message: str, action: str, body: str) -> str:
        return (
            f'<s:Envelope xml:lang="en-US" xmlns:s="{S}" xmlns:a="{WSA}" xmlns:w="{WSMAN}" xmlns:rsp="{RSP}"><s:Header>'
            f"<a:Action>{action}Response</a:Action><a:MessageID>uuid:{uuid4()}</a:MessageID>"
            f"<a:RelatesTo>{message}</a:RelatesTo></s:Header><s:Body>{body}</s:Body></s:Envelope>"
        )

    def _create(self, root: Any) -> str:
        if self.strikes("quota") or len(self.shells) >= self.shells_max:
            raise _Fault(0x803381A5, f"This user is allowed a maximum number of {self.shells_max} concurrent shells")
        element = root.find(f".//{{{RSP}}}Shell")
        creation = next(one for one in element if one.tag.endswith("creationXml"))
        messages = list(_messages(base64.b64decode(creation.text or "")))
        assert [kind for kind, *_ in messages] == [CAPABILITY, 0x10004], messages
        shell = Shell(str(element.get("ShellId")).upper())
        pool = messages[0][1]
        version = '<Version N="{}">{}</Version>'
        versions = (("protocolversion", "2.3"), ("PSVersion", "2.0"), ("SerializationVersion", "1.1.0.1"))
        reported = "".join(version.format(*one) for one in versions)
        shell.waiting += self._fragments(CAPABILITY, pool, None, f'<Obj RefId="0"><MS>{reported}</MS></Obj>')
        shell.waiting += self._fragments(POOL_STATE, pool, None, '<Obj RefId="0"><MS><I32 N="RunspaceState">2</I32></MS></Obj>')
        with self.lock:
            self.shells[shell.id] = shell
        return (
            f"<rsp:Shell><rsp:ShellId>{shell.id}</rsp:ShellId></rsp:Shell>"
            '<x:ResourceCreated xmlns:x="http://schemas.xmlsoap.org/ws/2004/09/transfer"><a:ReferenceParameters><w:SelectorSet>'
            f'<w:Selector Name="ShellId">{shell.id}</w:Selector></w:SelectorSet></a:ReferenceParameters></x:ResourceCreated>'
        )

    def _command(self, shell: Shell, root: Any) -> str:
        line = root.find(f".//{{{RSP}}}CommandLine")
        content = b"".join(base64.b64decode(one.text or "") for one in line.findall(f"{{{RSP}}}Arguments"))
        kind, pool, pipeline, clixml = next(iter(_messages(content)))
        assert kind == CREATE_PIPELINE, kind
        command = (line.get("CommandId") or str(uuid4())).upper()
        text, parameters = _command_of(clixml)
        try:
            output = self._called(shell, text, parameters)
            parts = [] if output is None else self._fragments(OUTPUT, pool, pipeline, f"<S>{_clixml(output)}</S>")
            if self.progress_chars:
                parts = [*self._fragments(PROGRESS, pool, pipeline, _progress("p" * self.progress_chars)), *parts]
            state = f'<Obj RefId="0"><MS><I32 N="PipelineState">{COMPLETED}</I32></MS></Obj>'
        except Refusal as error:
            parts, state = [], _failed(error)
        shell.commands[command] = [*parts, *self._fragments(PIPELINE_STATE, pool, pipeline, state)]
        return f"<rsp:CommandResponse><rsp:CommandId>{command}</rsp:CommandId></rsp:CommandResponse>"

    def _called(self, shell: Shell, text: str, parameters: dict[str, Any]) -> str | None:
        if text == script("common"):
            shell.common = True
            return None
        name = next((one for one in SCRIPTS if script(one) == text), None)
        assert name is not None, f"a script that is none of the package's own: {text[:200]}"
        assert shell.common, "common.ps1 was not run in this runspace"
        assert set(parameters) <= _parameters(text), (name, parameters)
        with self.lock:
            self.calls.append((name, parameters))
        return json.dumps(self.answers(name, parameters), separators=(",", ":"))

    def _receive(self, shell: Shell, root: Any) -> str:
        command = root.find(f".//{{{RSP}}}DesiredStream").get("CommandId")
        if command is None and self.strikes("silent"):
            return "<rsp:ReceiveResponse></rsp:ReceiveResponse>"
        if command is not None and self.strikes("timed_out"):
            raise _Fault(TIMED_OUT, "The WS-Management service cannot complete the operation within the time specified")
        if command is not None and self.strikes("envelope"):
            raise _Fault(0x80338104, "The response is larger than MaxEnvelopeSizekb allows")
        waiting = shell.waiting if command is None else shell.commands[command.upper()]
        now, waiting[:] = waiting[:FRAGMENTS_AN_ANSWER], waiting[FRAGMENTS_AN_ANSWER:]
        named = "" if command is None else f' CommandId="{command}"'
        streams = "".join(f'<rsp:Stream Name="stdout"{named}>{base64.b64encode(one).decode()}</rsp:Stream>' for one in now)
        done = f'<rsp:CommandState{named} State="{RSP}/CommandState/{"Running" if waiting else "Done"}"/>' if command else ""
        return f"<rsp:ReceiveResponse>{streams}{done}</rsp:ReceiveResponse>"

    def _delete(self, shell: Shell, _: Any) -> str:
        with self.lock:
            self.shells.pop(shell.id, None)
        return ""

    def _signal(self, shell: Shell, root: Any) -> str:
        shell.commands.pop((root.find(f".//{{{RSP}}}Signal").get("CommandId") or "").upper(), None)
        return "<rsp:SignalResponse/>"

    def _fragments(self, kind: int, pool: UUID, pipeline: UUID | None, clixml: str) -> list[bytes]:
        """Section 2.2.4: object id, fragment id, flags (1 first, 2 last), length; numbers in network order."""
        message = struct.pack("<II", 1, kind) + pool.bytes_le + (pipeline or UUID(int=0)).bytes_le + clixml.encode()
        number, pieces = next(self.objects), range(0, len(message), FRAGMENT_BYTES)
        return [
            struct.pack(
                ">QQBI",
                number,
                place,
                (1 if at == 0 else 0) | (2 if at + FRAGMENT_BYTES >= len(message) else 0),
                len(message[at : at + FRAGMENT_BYTES]),
            )
            + message[at : at + FRAGMENT_BYTES]
            for place, at in enumerate(pieces)
        ]


class _Fault(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.body = (
            "<s:Fault><s:Code><s:Value>s:Receiver</s:Value></s:Code><s:Reason>"
            f'<s:Text xml:lang="en-US">{escape(text)}</s:Text></s:Reason><s:Detail>'
            f'<f:WSManFault xmlns:f="{FAULT}" Code="{code}" Machine="host"><f:Message>{escape(text)}</f:Message></f:WSManFault>'
            "</s:Detail></s:Fault>"
        )


def _messages(content: bytes) -> Iterator[tuple[int, UUID, UUID, str]]:
    at, parts = 0, dict[int, bytes]()
    while at < len(content):
        number, _, flags, length = struct.unpack_from(">QQBI", content, at)
        parts[number] = parts.get(number, b"") + content[at + 21 : at + 21 + length]
        at += 21 + length
        if flags & 2:
            message = parts.pop(number)
            destination, kind = struct.unpack_from("<II", message)
            assert destination == 2, "a client speaks to a server"
            pool, pipeline = UUID(bytes_le=message[8:24]), UUID(bytes_le=message[24:40])
            yield kind, pool, pipeline, message[40:].decode("utf-8-sig")


def _command_of(clixml: str) -> tuple[str, dict[str, Any]]:
    """Of a CREATE_PIPELINE (section 2.2.2.10): the one script of it, and its parameters."""
    root = ET.fromstring(clixml)
    pipeline = next(one for one in root.iter("Obj") if one.get("N") == "PowerShell")
    commands = next(one for one in pipeline.iter("Obj") if one.get("N") == "Cmds").findall("LST/Obj")
    assert len(commands) == 1, "one script at a time"
    properties = {str(one.get("N")): one for one in commands[0].find("MS") or ()}
    assert properties["IsScript"].text == "true"
    parameters: dict[str, Any] = {}
    for one in properties["Args"].findall("LST/Obj"):
        parts = {str(part.get("N")): part for part in one.find("MS") or ()}
        parameters[_plain(parts["N"].text or "").lstrip("-").rstrip(":")] = _value(parts["V"])
    return _plain(properties["Cmd"].text or ""), parameters


def _value(element: Any) -> Any:
    match element.tag:
        case "S" | "G":
            return _plain(element.text or "")
        case "I32" | "I64" | "U32" | "U64" | "By":
            return int(element.text)
        case "B":
            return element.text == "true"
        case "Nil":
            return None
    raise AssertionError(f"a parameter of type {element.tag}")


def _parameters(text: str) -> set[str]:
    block = re.search(r"^param\((.*)\)\s*$", text, re.MULTILINE)
    return set(re.findall(r"\$([A-Za-z]+)", block[1])) if block else set()


def _plain(text: str) -> str:
    return re.sub("_x([0-9A-Fa-f]{4})_", lambda found: chr(int(found[1], 16)), text)


def _clixml(text: str) -> str:
    """Section 2.2.5.3.2: characters that XML cannot hold, and what looks like their escape."""
    guarded = re.sub("_(?=x[0-9A-Fa-f]{4}_)", "_x005F_", text)
    return escape(re.sub("[\x00-\x1f]", lambda found: f"_x{ord(found[0]):04X}_", guarded))


def _progress(activity: str) -> str:
    return (
        f'<Obj RefId="0"><MS><S N="Activity">{activity}</S><I32 N="ActivityId">0</I32><Nil N="StatusDescription" />'
        '<Nil N="CurrentOperation" /><I32 N="ParentActivityId">-1</I32><I32 N="PercentComplete">-1</I32>'
        '<Obj N="Type" RefId="1"><I32>0</I32></Obj><I32 N="SecondsRemaining">-1</I32></MS></Obj>'
    )


def _failed(error: Refusal) -> str:
    failure = json.dumps({"call": error.call, "code": error.code, "text": error.text})
    shown = _clixml(f"SYNVIRT {failure}")
    return (
        f'<Obj RefId="0"><MS><I32 N="PipelineState">{FAILED}</I32><Obj N="ExceptionAsErrorRecord" RefId="1"><TN RefId="0">'
        f"<T>System.Management.Automation.ErrorRecord</T><T>System.Object</T></TN><ToString>{shown}</ToString><MS>"
        '<B N="SerializeExtendedInfo">false</B>'
        f'<S N="FullyQualifiedErrorId">{shown}</S><I32 N="ErrorCategory_Category">14</I32>'
        '<S N="ErrorCategory_Activity"></S><S N="ErrorCategory_Reason">RuntimeException</S>'
        f'<S N="ErrorCategory_Message">OperationStopped</S><S N="ErrorDetails_Message">{shown}</S></MS></Obj></MS></Obj>'
    )


@contextlib.contextmanager
def served(wsman: Wsman, certificate: tuple[str, str] | None) -> Iterator[int]:
    """Its port; TLS with a certificate's and a key's files. Log-in is Basic: other ways are the library's own affair."""
    login = "Basic " + base64.b64encode(f"{wsman.user}:{wsman.password}".encode("latin-1")).decode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body go out apart: the second would wait 40 ms for the first to be acknowledged.
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if wsman.strikes("hang_up"):
                self.close_connection = True
                return
            if self.path != "/wsman" or wsman.strikes("status"):
                self._send(404, "")
            elif self.headers.get("Authorization") != login or wsman.strikes("unauthorized"):
                self._send(401, "")
            else:
                self._send(*wsman.answer(body))

        def _send(self, status: int, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/soap+xml;charset=UTF-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
