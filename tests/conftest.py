"""What many tests share."""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from synvirt import outgoing
from synvirt.hypervisor import accel
from synvirt.store import Store
from tests.running.costs import Costs
from tests.running.forked_small import small_forked
from tests.running.kept_small import KeptSmall
from tests.running.logs import logs_to
from tests.running.made_once import made_once
from tests.running.shared import of_all_workers
from tests.running.store_template import stores_from
from tests.running.workers import Workers
from tests.servers import postgres

# A service in the test's own process must not log into what a command prints.
assert sys.__stderr__ is not None
logs_to(sys.__stderr__)

# A shell that starts the tests in the background has Ctrl-C ignored, in all that they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Images of Python set it, and then each of a thousand child processes compiles all of our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# To load this host's 150 authorities takes 45 ms of a core for each connection that asks them. They sign nothing in the tests:
# one that has signed nothing stands for them.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "running" / "authority.pem")

# The same cases in each run, and no judgement by the clock: a test that fails one time in a thousand fails for everybody or for
# nobody. Whoever looks for new cases sets CASES_TIMES.
settings.register_profile(
    "suite",
    derandomize="CASES_TIMES" not in os.environ,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")

# Each of these takes minutes, the longest first (`--durations` says it). They are dealt out to the workers and
# begun first, so that no worker is alone with one at the end, nor with all of them.
LONG = (
    "tests/real/test_zfs.py",
    "tests/real/test_wmi_service.py",
    "tests/real/hypervisor/test_boot_ladder.py",
    "tests/real/test_instant.py",
    "tests/real/test_windows.py",
    "tests/real/test_linux_conversion.py",
    "tests/api/test_document.py",
    "tests/live/nutanix/test_prism_service.py",
    "tests/real/test_rehearsal.py",
    "tests/packaging/test_deb.py",
    "tests/real/pve/test_pve_warm.py",
    "tests/real/libvirt_remote/test_libvirt_remote_warm.py",
    "tests/real/test_prism_service.py",
    "tests/real/hypervisor/test_uefi_variables.py",
    "tests/real/backups/test_backups_running.py",
    "tests/real/backups/test_instant_restore.py",
    "tests/real/pve/test_pve_service.py",
    "tests/real/libvirt_remote/test_libvirt_remote_service.py",
    "tests/offline/hyperv/test_vmcx_jobs.py",
    "tests/live/hyperv/test_wmi_jobs.py",
    "tests/real/test_waves.py",
    "tests/real/test_laws_of_kinds.py",
    "tests/kinds/test_laws.py",
    "tests/real/test_each_kind.py",
    "tests/real/hypervisor/test_boot.py",
    "tests/migrations/test_taking_over.py",
    "tests/fleet/test_seeded_nights.py",
    "tests/real/test_service.py",
    "tests/live/xen/test_xen_service.py",
    "tests/rehearsals/test_together.py",
    "tests/migrations/test_chaos.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
    config.pluginmanager.register(KeptSmall())
    config.pluginmanager.register(Workers())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """At the start each worker has as many neighbours of this list as the others (--dist worksteal)."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = sorted((item for item in items if item.nodeid.startswith(LONG)), key=_place_among_long)
    rest = [item for item in items if not item.nodeid.startswith(LONG)]
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        # As many as its scheduler gives it.
        end = len(dealt) + (len(items) - len(dealt)) // (workers - worker)
        dealt += long[worker::workers]
        missing = max(0, end - len(dealt))
        dealt += rest[:missing]
        del rest[:missing]
    items[:] = [*dealt, *rest]


def _place_among_long(item: pytest.Item) -> int:
    return next(place for place, name in enumerate(LONG) if item.nodeid.startswith(name))


# What is collected lives as long as the process: half a million objects that the garbage collector would walk through again and
# again, for a quarter of the processor's seconds of the collection and a third of those of small tests.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.collect()
    gc.freeze()
    # A request with ten thousand plans leaves 300 MiB, which may not lie there for two million objects more.
    gc.set_threshold(5000, 20, 4)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    with made_once(), small_forked():
        yield


@pytest.fixture(scope="session", autouse=True)
def _store_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ExitStack() as made:
        with of_all_workers(tmp_path_factory, "template.lock") as folder:
            made.enter_context(stores_from(folder / "template.db"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _accelerator_known(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where KVM only pretends to work it takes five seconds of a core to see it: once, and not at each start of a service."""
    with of_all_workers(tmp_path_factory, "accelerator.lock"):
        accel.accelerator()


_UMASK = os.umask(0o022)
os.umask(_UMASK)


@pytest.fixture(autouse=True)
def _left_as_found() -> Iterator[None]:
    """A service in the test's own process says where its sources may be, and closes what it makes to others: for this test
    alone. QEMU's user could not open a later test's disks."""
    yield
    outgoing.permit(())
    os.umask(_UMASK)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with postgres.server() as url:
        yield url


_numbers = itertools.count(1)


@contextmanager
def _new_postgres_database(server: str, template: str = "template1") -> Iterator[str]:
    """Its URL. It goes with the test: each takes 8 MiB of memory."""
    name = f"test{next(_numbers)}"
    with psycopg.connect(server % "postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield server % name
    with psycopg.connect(server % "postgres", autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def _postgres_with_tables(postgres_server: str) -> str:
    """The server, with a database `tables` that Alembic has made once: it takes a second of a core."""
    with psycopg.connect(postgres_server % "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE tables")
    Store(postgres_server % "tables").close()
    return postgres_server


@pytest.fixture
def postgresql_url(_postgres_with_tables: str) -> Iterator[str]:
    """A new database, with the tables of a store, that several processes may write at once."""
    with _new_postgres_database(_postgres_with_tables, "tables") as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new database, of each sort that the service runs on: it has a store's tables, or has them when it is opened."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    url: str = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture
def _empty_postgresql_url(postgres_server: str) -> Iterator[str]:
    with _new_postgres_database(postgres_server) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Without any table."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    url: str = request.getfixturevalue("_empty_postgresql_url")
    return url


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """On each sort of database."""
    made = Store(database_url)
    yield made
    made.close()
