"""A platform that is not there is reported in the system's words, whatever library asks it, and by one code."""

import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from synvirt.errors import root_cause_of
from synvirt.model.kinds import LiveKind
from tests.api.test_problems import assert_problem
from tests.fakes.service import Service

LOGIN = {"user": "root", "password": "x"}
SOURCES: dict[LiveKind, tuple[str, dict[str, str]]] = {
    LiveKind.VIM_API: ("https", LOGIN),
    LiveKind.WMI_API: ("https", LOGIN),
    LiveKind.PVE_API: ("https", LOGIN | {"user": "root@pam"}),
    LiveKind.LIBVIRT_REMOTE: ("qemu+tcp", LOGIN),
    LiveKind.XEN_API: ("https", LOGIN),
    LiveKind.PRISM_API: ("https", LOGIN),
}
# Of Python and its libraries: numbers of errors, names of classes and objects, where an error was wrapped.
PROGRAMMERS = re.compile(r"Errno|Error\b|Caused by|object at|_Pool|Connection\(|_ssl\.c")


@pytest.mark.parametrize("kind", LiveKind)
def test_a_platform_that_does_not_answer(tmp_path: Path, kind: LiveKind) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    service = Service(tmp_path)
    scheme, credentials = SOURCES[kind]
    body: dict[str, Any] = {"name": "gone", "kind": kind, "credentials": credentials}
    path = "/system" if kind == LiveKind.LIBVIRT_REMOTE else ""
    with service.served(), service.local() as client:
        added = client.post("/sources", json=body | {"endpoint": f"{scheme}://127.0.0.1:{port}{path}"})
        assert added.status_code == 201, added.text
        problem = assert_problem(client.get(f"/sources/{added.json()['id']}/vms"), 502, "E_MIG_SOURCE_UNREACHABLE")
    service.close()
    assert "Connection refused" in problem["detail"]
    assert not PROGRAMMERS.search(problem["detail"]), problem["detail"]
    assert problem["hint"]


def test_the_innermost_error_is_the_cause() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(httpx.ConnectError) as caught:
        httpx.get(f"http://127.0.0.1:{port}/")
    assert root_cause_of(caught.value) == "Connection refused"
    assert root_cause_of(ValueError("no number")) == "ValueError: no number"
    assert root_cause_of(TimeoutError()) == "TimeoutError"
