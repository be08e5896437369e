"""A session with a Hyper-V host ends, whatever its scripts do."""

import importlib
import threading

import pytest

from synvirt.errors import SynvirtError
from synvirt.live.hyperv import session as hyperv_session
from synvirt.live.hyperv.session import Address, Credentials, Session
from tests.fakes.hyperv.wsman import Wsman, served
from tests.running.processes import until


def test_a_session_closes_though_a_script_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperv_session, "CLOSE_WAIT_S", 0.1)
    control, failed = Wsman(lambda name, _: {}, "u", "p"), list[SynvirtError]()
    with served(control, None) as port:
        session = Session(Address("127.0.0.1", port, tls=False), Credentials("ntlm", "u", "p"))
        wsman = importlib.import_module("pypsrp.wsman").WSMan
        login = {"auth": "basic", "encryption": "never", "username": "u", "password": "p"}
        session._connection = lambda: wsman("127.0.0.1", port=port, ssl=False, **login)  # type: ignore[method-assign]
        session.open()
        control.faults["timed_out"] = 1 << 40

        def run() -> None:
            try:
                session.run("list")
            except SynvirtError as error:
                failed.append(error)

        running = threading.Thread(target=run)
        running.start()
        until(lambda: control.calls)
        session.close()
        running.join()
        assert "was closed while a script ran" in failed[0].detail
        assert control.shells == {}
        control.faults.clear()
        session.open()
        assert session.run("list") == {}
        session.close()
