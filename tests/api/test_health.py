"""/healthz: alive, for anyone; and what this host has and lacks, for those who may know."""

import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import structlog

from synvirt import doctor
from synvirt.doctor import Checkup, Finding
from synvirt.model.values import now
from synvirt.settings import Settings
from tests.fakes.service import PASSWORD, USER, Service
from tests.running.processes import until


def finding(name: str, *, found: bool, needed: bool = True) -> Finding:
    return Finding(name, found, needed, f"{name} at /secret/place", "x", "apt-get install x")


def test_strangers_learn_only_that_it_lives(tmp_path: Path) -> None:
    service = Service(tmp_path, tls=False)
    service.checkup = (now(), [finding("qemu", found=False)])
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as stranger:
        answer = stranger.get("/healthz").json()
        assert set(answer) == {"status", "version"}
        known = stranger.get("/healthz", auth=(USER, PASSWORD)).json()
        assert known["detail"]["ok"] is False
        assert known["detail"]["checks"][0]["detail"] == "qemu at /secret/place"
        with service.local() as client:
            assert client.get("http://synvirt/healthz").json() == known
        service.checkup = (now(), [finding("qemu", found=False, needed=False), finding("zfs", found=True)])
        assert stranger.get("/healthz", auth=(USER, PASSWORD)).json()["detail"]["ok"] is True
        service.checkup = None
        assert set(stranger.get("/healthz", auth=(USER, PASSWORD)).json()) == {"status", "version"}
    service.close()


def test_nobody_waits_for_the_checks(tmp_path: Path) -> None:
    go, done = threading.Event(), threading.Event()

    def slowly(_: Settings) -> list[Finding]:
        go.wait(30)
        done.set()
        return [finding("qemu", found=True)]

    checkup = Checkup(Settings(data_dir=tmp_path), examine=slowly)
    checkup.begin()
    assert checkup.latest() is None
    go.set()
    assert done.wait(30)
    while (latest := checkup.latest()) is None:
        pass
    assert [one.name for one in latest[1]] == ["qemu"]


def test_they_are_made_again_when_they_are_old_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    ready = threading.Semaphore(0)

    def count(_: Settings) -> list[Finding]:
        made.append(1)
        ready.release()
        return []

    checkup = Checkup(Settings(data_dir=tmp_path), examine=count)
    for _ in range(20):
        checkup.latest()
    assert ready.acquire(timeout=30)
    assert len(made) == 1
    monkeypatch.setattr(doctor, "CHECKUP_EVERY_S", 0)
    checkup.latest()
    assert ready.acquire(timeout=30), "the old answer is given, and a new one is made"


def test_a_screenshot_is_a_picture_of_its_job(service: Service, client: httpx.Client) -> None:
    job = service.submit()
    assert client.get(f"/migrations/{job.id}/screenshot").status_code == 404
    assert client.get(f"/migrations/{uuid4()}/screenshot").status_code == 404
    service.screenshots[job.id] = b"\x89PNG picture"
    answer = client.get(f"/migrations/{job.id}/screenshot")
    assert (answer.content, answer.headers["Content-Type"]) == (b"\x89PNG picture", "image/png")


def test_callers_for_whom_there_is_no_descriptor_wait_and_fill_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio asked for them 2,048 times a second, and wrote a traceback each time: a quarter of a megabyte a second."""
    accept, refused, no_more = socket.socket.accept, list[float](), True

    def accepted(sock: socket.socket) -> Any:
        if no_more:
            refused.append(time.monotonic())
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(sock)

    service = Service(tmp_path)
    with structlog.testing.capture_logs() as logs, service.served() as server:
        monkeypatch.setattr(socket.socket, "accept", accepted)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(service.settings.socket_path))
            until(lambda: len(refused) > 2)
            no_more = False
            waiting.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
            assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert len(refused) <= refused[-1] - refused[0] + 2
        assert server.connections() <= 1
    service.close()
    [said] = [one for one in logs if one["log_level"] == "error"]
    assert (said["cause"], "LimitNOFILE" in said["hint"]) == ("Too many open files", True)
