"""What a real service logs: JSON a line, each job's id with what belongs to it, and no secret that it was ever given."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from synvirt.cli.client import Client
from tests.holding import files_that_hold
from tests.needs import need
from tests.running.processes import until
from tests.servers import remote_servers as servers

SECRET = "Zq8-vexed-otter"


@pytest.mark.timeout(240)
def test_no_secret_is_logged_and_each_line_says_whose_it_is(tmp_path: Path) -> None:
    data_dir, log_file = tmp_path / "data", tmp_path / "serve.log"
    environ = {**os.environ, "SYNVIRT_LOG_LEVEL": "debug", "SYNVIRT_REMOTE_ALLOWED_HOSTS": "127.0.0.1"}
    argv = [sys.executable, "-m", "synvirt", "serve", "--data-dir", str(data_dir), "--listen", "127.0.0.1:0"]
    with log_file.open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)
    try:
        until(lambda: "SynVirt serves at" in log_file.read_text() or process.poll() is not None)
        assert process.poll() is None, log_file.read_text()[-3000:]
        with Client.local(data_dir / "synvirt.sock") as client:
            job_id = _everything_with_a_secret(client, data_dir)
    finally:
        process.terminate()
        process.wait(30)
    lines = log_file.read_text().splitlines()
    assert SECRET not in log_file.read_text()
    assert files_that_hold(data_dir, SECRET) == []
    logged = [json.loads(line) for line in lines if not _is_for_people(line)]
    assert all({"event", "level", "timestamp"} <= line.keys() for line in logged)
    assert any(line.get("job") == job_id for line in logged)
    assert not [line for line in logged if job_id in line["event"]], "an id is a field, not a part of the words"


# virLogFormatString of libvirt's library, which the embedded driver is: it writes to our stderr by itself.
_LIBVIRTS = re.compile(r"\d{4}-\d\d-\d\d [\d:.]+\+0000: \d+: \w+ : ")


def _is_for_people(line: str) -> bool:
    """What `serve` itself says to whoever started it: where it serves, and the first password. And libvirt's."""
    return bool(_LIBVIRTS.match(line)) or (not line.startswith("{") and ("SynVirt serves at" in line or "admin" in line))


def _everything_with_a_secret(client: Client, data_dir: Path) -> str:
    """Each is refused by nobody listening, or fails: that is when things are logged."""
    sources = [
        {"name": "v", "kind": "vim_api", "endpoint": "https://127.0.0.1:9", "credentials": {"user": "u", "password": SECRET}},
        {
            "name": "l",
            "kind": "libvirt_remote",
            "endpoint": "qemu+tcp://127.0.0.1:9/system",
            "credentials": {"user": "u", "password": SECRET},
        },
        {"name": "bad", "kind": "vim_api", "endpoint": f"https://u:{SECRET}@127.0.0.1:9", "credentials": {"nonsense": SECRET}},
    ]
    http = client._http
    for source, status in zip(sources, (201, 201, 400), strict=True):
        answer = http.post("/migrator/sources", json=source, timeout=60)
        assert answer.status_code == status, answer.text
        if answer.status_code == 201:
            http.post(f"/migrator/sources/{answer.json()['id']}/test", timeout=60)
    http.post(
        "/migrator/sources",
        content=f'{{"password": "{SECRET}", '.encode(),
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    http.get("http://synvirt/api/v1/migrator/migrations", params={"token": SECRET}, timeout=60)
    http.get("http://synvirt/nowhere", headers={"Authorization": f"Bearer {SECRET}"})
    refs = [
        {"kind": "remote_url", "url": f"http://u:{SECRET}@127.0.0.1:9/a.qcow2?X-Amz-Signature={SECRET}"},
        {"kind": "remote_url", "url": "s3://bucket/a.qcow2", "options": {"endpoint": "http://127.0.0.1:9"},
         "credentials": {"access_key_id": "a", "secret_access_key": SECRET}},
    ]  # fmt: skip
    for ref in refs:
        plan = {"source": {"Offline": "qcow2"}, "source_ref": ref, "mode": "Cold"}
        http.post("/migrator/migrations", json={"plan": plan}, timeout=60)
    # And one that is carried out, with its secrets: to its end.
    image = data_dir / "a.qcow2"
    subprocess.run([need("qemu-img", "qemu-utils"), "create", "-q", "-f", "qcow2", image, "8M"], check=True, timeout=60)
    content = image.read_bytes()
    with servers.scripted(lambda request: servers.honest(content, request)) as url:
        place = f"{url.replace('http://', f'http://u:{SECRET}@')}/a.qcow2?X-Amz-Signature={SECRET}"
        ref = {"kind": "remote_url", "url": place}
        plan = {"source": {"Offline": "qcow2"}, "source_ref": ref, "mode": "Cold", "target": {"start": False}}
        answer = http.post("/migrator/migrations", json={"plan": plan}, timeout=60)
        assert answer.status_code == 201, answer.text
        job_id = str(answer.json()["id"])
        until(lambda: client.migration(job_id).ended, 120)
    return job_id
