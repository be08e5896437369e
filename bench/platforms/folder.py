"""python -m bench.platforms.folder [--data-mib N]: a flat file of a vSphere datastore, read from /folder by HTTPS ranges,
against nbdcopy from nbdkit's curl plugin and the same server.

The server is nginx with the log-in that a host would ask for: it costs next to nothing, so what is compared are the two
readers. Neither writes anything. On a machine that others use, too, the processor's seconds say more than the clock's.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.platforms.listed import row
from bench.platforms.xen import Took, timed
from synvirt.copying import copy
from synvirt.disks import open_reader
from synvirt.disks.passed import Nowhere
from synvirt.disks.specs import DatastoreSpec
from synvirt.programs import find
from tests.running.ports import free_port
from tests.servers.remote_servers import certificates, running

REACH = 1.0
PROGRAMS = {"nginx": "nginx-light", "nbdkit": "nbdkit", "nbdcopy": "libnbd-bin"}
_THREADS = 4
_NAME = "web/web-flat.vmdk"
# nbdkit's curl plugin keeps as many connections by itself (nbdkit-curl-plugin(1), connections=).
_CONFIGURATION = """
daemon off; master_process on; worker_processes 2; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; keepalive_requests 1000000; default_type application/octet-stream;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3; uwsgi_temp_path {folder}/t4;
  scgi_temp_path {folder}/t5; ssl_certificate {certificate}; ssl_certificate_key {key};
  server {{
    listen 127.0.0.1:{port} ssl;
    location = /sdk {{ add_header Set-Cookie 'vmware_soap_session="one"; Path=/; HttpOnly'; return 200 ''; }}
    location /folder/ {{ alias {files}/; }}
  }}
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.platforms.folder", description=__doc__)
    parser.add_argument("--data-mib", type=int, default=1024, help="size of the disk that is read, all of it data")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one goes before them")
    options = parser.parse_args()
    if missing := [f"{name} (apt-get install {package})" for name, package in PROGRAMS.items() if find(name) is None]:
        sys.exit(f"needs {', '.join(missing)}")
    print("| row | median | each | reach | ok |\n|---|---:|---|---:|---|")
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/var/tmp") as folder, datastore(Path(folder)) as spec:
        ours, theirs = read(spec, Path(folder), options.data_mib, options.rounds)
    for name, at in (("", 0), (", processor", 1)):
        our, their = [one[at] for one in ours], [one[at] for one in theirs]
        ratio = statistics.median(their) / statistics.median(our)
        row(f"/folder, nbdkit-curl with nbdcopy{name}", their, "", ok=True)
        row(f"/folder, ours{name} ({ratio:.2f}x)", our, f">= {REACH:g}x", ok=ratio >= REACH)


@contextmanager
def datastore(folder: Path) -> Iterator[DatastoreSpec]:
    """A server of what lies in `folder`/files; the spec is of a file that is not there yet."""
    (folder / "files" / _NAME).parent.mkdir(parents=True)
    made, port = certificates(folder), free_port()
    text = _CONFIGURATION.format(folder=folder, files=folder / "files", port=port, certificate=made.certificate, key=made.key)
    configuration = folder / "nginx.conf"
    configuration.write_text(f"user root;\n{text}" if os.geteuid() == 0 else text)
    program = find("nginx")
    argv = [str(program), "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(configuration)]
    with running(argv, (port,), folder / "output.log"):
        yield DatastoreSpec(
            host="127.0.0.1",
            port=port,
            user="reader",
            password="of nobody",
            verify_tls=False,
            datacenter="DC",
            datastore="ds1",
            path=_NAME,
            size_bytes=None,
        )


def read(spec: DatastoreSpec, folder: Path, data_mib: int, rounds: int) -> tuple[list[Took], list[Took]]:
    """Seconds of each round, of the clock and of processors, ours and the peer's by turns."""
    with (folder / "files" / _NAME).open("wb") as disk:
        for _ in range(data_mib):
            disk.write(os.urandom(1 << 20))
    whole = replace(spec, size_bytes=data_mib << 20)
    url = f"https://127.0.0.1:{spec.port}/folder/{_NAME}?dcPath={spec.datacenter}&dsName={spec.datastore}"
    peer = ["nbdcopy", "--", "[", "nbdkit", "-r", "curl", "sslverify=false", f"url={url}", "]", "null:"]

    def ours() -> None:
        reader = open_reader(whole)
        copy(reader, Nowhere(reader.size), threads=_THREADS)
        reader.close()

    def theirs() -> None:
        subprocess.run(peer, check=True)

    pairs = [(timed(ours, resource.RUSAGE_SELF), timed(theirs, resource.RUSAGE_CHILDREN)) for _ in range(rounds + 1)][1:]
    return [one for one, _ in pairs], [one for _, one in pairs]


if __name__ == "__main__":
    main()
