"""The order of the tests, which of them are slow, and what the Spark tests share.

With `--shuffle=random` the files run in random order, and so do the tests of each file. The header
of the output says how to repeat it. The longest files come first, then those that start Spark, then
those with slow tests: with several workers none is then left alone with a long file at the end.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import re
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import warm_kit
from argon2 import PasswordHasher

from polybus.services.accounts import passwords

if TYPE_CHECKING:
    from spark_kit import RunningBus

    from polybus.testing.kafka import KafkaBrokers

# What a hook around others is.
Ends = Generator[None, Any, Any]
TESTS = Path(__file__).parent
# They start processes or Java, or wait for disks and slow readers: too long for `make test-fast`.
SLOW = (TESTS / "cli", TESTS / "crash", TESTS / "spark")
SLOW_FILES = (
    "test_access_logins.py",
    "test_access_web.py",
    "test_accounts_abuse.py",
    "test_accounts_apart.py",
    "test_accounts_attacks.py",
    "test_accounts_bytes.py",
    "test_accounts_commits.py",
    "test_accounts_http.py",
    "test_accounts_limits.py",
    "test_accounts_login.py",
    "test_accounts_races.py",
    "test_accounts_sessions.py",
    "test_append_all.py",
    "test_arrow_alone.py",
    "test_backpressure.py",
    "test_backup.py",
    "test_bad_input.py",
    "test_blobs_abuse.py",
    "test_blobs_http.py",
    "test_blobs_huge.py",
    "test_blobs_resume.py",
    "test_blobs_streams.py",
    "test_browser_howto.py",
    "test_checking.py",
    "test_client_events.py",
    "test_client_http_odd.py",
    "test_client_http_reconnect.py",
    "test_client_reconnect.py",
    "test_client_refusals.py",
    "test_commits.py",
    "test_commits_delivery.py",
    "test_commits_refused.py",
    "test_console_figures.py",
    "test_consumers.py",
    "test_cycles.py",
    "test_damaged_topic.py",
    "test_dimension.py",
    "test_duck.py",
    "test_events.py",
    "test_every_pair.py",
    "test_failing_disk.py",
    "test_faults.py",
    "test_handover.py",
    "test_handover_process.py",
    "test_health.py",
    "test_history.py",
    "test_http_bad_frames.py",
    "test_http_bad_input.py",
    "test_http_far_readers.py",
    "test_http_fuzz.py",
    "test_http_msgstream.py",
    "test_http_saving.py",
    "test_http_slow_peers.py",
    "test_idle_connections.py",
    "test_json_paths.py",
    "test_kill.py",
    "test_lake_crash.py",
    "test_live.py",
    "test_memory.py",
    "test_metadata_damage.py",
    "test_queries.py",
    "test_queue_connector.py",
    "test_queue_connector_peers.py",
    "test_reader_moving.py",
    "test_redrives.py",
    "test_replay.py",
    "test_resident_memory.py",
    "test_shutdown.py",
    "test_signals.py",
    "test_state_damage.py",
    "test_tcp_pump_hostile.py",
    "test_tcp_pump_idle.py",
    "test_torture.py",
    "test_torture_disk.py",
    "test_torture_load.py",
    "test_torture_storms.py",
    "test_torture_watch.py",
    "test_undelivered.py",
    "test_undelivered_pages.py",
    "test_uploads.py",
    "test_warm.py",
)
# In a file all of whose tests are.
ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)
# They take the longest, as `pytest --durations` shows.
LONG_FILES = (
    "test_answers_crash.py",
    "test_blobs_crash.py",
    "test_cli_up.py",
    "test_cluster.py",
    "test_cluster_nodes.py",
    "test_console.py",
    "test_console_pages.py",
    "test_console_scale.py",
    "test_cycles.py",
    "test_docs_spark.py",
    "test_driver.py",
    "test_floods.py",
    "test_hostile_messages.py",
    "test_http_fuzz.py",
    "test_kafka.py",
    "test_kills.py",
    "test_lake_crash.py",
    "test_resident_memory.py",
    "test_sessions_crash.py",
    "test_sessions_faults.py",
    "test_standard.py",
    "test_table_streams.py",
    "test_torture.py",
    "test_torture_nodes.py",
)
# By the number of a worker: the folder whose files it takes first.
JAVA_FOLDERS = {0: "spark", 1: "spark", 2: "kafka"}
# What `make test-fast` selects, and how many examples a property gets there instead of 100.
FAST = "not slow"
FAST_EXAMPLES = 10
# A disk in memory, and the room that it must have: a run takes a part of that at a time.
MEMORY_DISK = "/dev/shm"
ROOM_BYTES = 4 << 30
# Variables that are meant for a run of the tests.
OURS = {
    *("POLYBUS_JAVA", "POLYBUS_MODEL_EXAMPLES", "POLYBUS_PURE"),
    *("POLYBUS_SEED", "POLYBUS_SPARK_ARCHIVE"),
}
# What PySpark and the libraries under it warn of; none of it is in our hands. PySpark's own
# sockets and pipes are closed when the process ends.
FOREIGN_WARNINGS = (
    "ignore::DeprecationWarning:pyspark",
    "ignore::FutureWarning:pyspark",
    "ignore::UserWarning:pyspark",
    "ignore::DeprecationWarning:py4j",
    "ignore::DeprecationWarning:google",
    "ignore:unclosed:ResourceWarning",
    "ignore:subprocess .* is still running:ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the tests in the random order of this seed, a number, or of any with `random`"
    parser.addoption("--shuffle", metavar="SEED", help=text)


def clean_environment() -> None:
    """Forget settings of whoever runs the tests, and keep compiled files.

    Without them every process of a test compiles the package again, and every worker all tests.
    """
    for name in set(os.environ) - OURS:
        if name.startswith("POLYBUS_"):
            del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def keep_files_in_memory() -> None:
    """Make temporary folders in memory: a bus that starts and stops takes half of the time there.

    TMPDIR names another place.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY_DISK, os.W_OK):
        return
    disk = os.statvfs(MEMORY_DISK)
    # Java runs libraries that it unpacks into such a folder.
    can_run = not disk.f_flag & os.ST_NOEXEC
    if can_run and disk.f_bavail * disk.f_frsize > ROOM_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY_DISK


def hash_quickly() -> None:
    """A password's hash takes 20 ms by design, and many tests have accounts."""
    passwords._hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


def pytest_configure(config: pytest.Config) -> None:
    clean_environment()
    keep_files_in_memory()
    hash_quickly()
    warm_kit.install()
    # No deadline for an example: on a busy machine any may take long. Tests have their timeout.
    examples = FAST_EXAMPLES if config.option.markexpr == FAST else 100
    hypothesis.settings.register_profile("polybus", max_examples=examples, deadline=None)
    hypothesis.settings.load_profile("polybus")
    if hasattr(config, "workerinput"):
        config.option.shuffle = config.workerinput["shuffle"]
    elif config.option.shuffle == "random":
        config.option.shuffle = str(random.randrange(1 << 32))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let few workers start Java: the first two have the files of Spark, the third those of Kafka.

    A worker takes other files when there are none of its own left.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFolder(LoadFileScheduling):  # type: ignore[misc]  # It has no types.
        def _assign_work_unit(self, node: Any) -> None:
            preferred = JAVA_FOLDERS.get(list(self.nodes).index(node))
            scopes = list(self.workqueue)
            found = [one for one in scopes if _java_folder(one) == preferred]
            found += [one for one in scopes if _java_folder(one) is None]
            self.workqueue.move_to_end((found or scopes)[0], last=False)
            super()._assign_work_unit(node)

    return ByFolder(config, log) if config.getvalue("dist") == "loadfile" else None


def _java_folder(file: str) -> str | None:
    folder = file.split("/")[1]
    return folder if folder in JAVA_FOLDERS.values() else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers get the order of the process that starts them."""
    node.workerinput["shuffle"] = node.config.option.shuffle


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.option.shuffle
    return None if seed is None else f"random order: make test SEED={seed} repeats it"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `make test-fast` leaves out: Spark's tests alone take seconds."""
    if config.option.markexpr != FAST:
        return None
    if collection_path in SLOW or collection_path.name in SLOW_FILES:
        return True
    if collection_path.match("test_*.py") and ALL_SLOW.search(collection_path.read_text()):
        return True
    return None


@functools.cache
def is_slow(path: Path) -> bool:
    return path.name in SLOW_FILES or any(folder in path.parents for folder in SLOW)


@functools.cache
def needs_spark(path: Path) -> bool:
    return TESTS / "spark" in path.parents


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)
        if needs_spark(item.path):
            for text in FOREIGN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(text))
    if config.option.shuffle is not None:
        shuffle(items, config.option.shuffle)


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Put the files in random order, the long ones first, and the tests of each file too."""
    chance = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    paths = list(files)
    chance.shuffle(paths)

    def rank(path: Path) -> int:
        if path.name in LONG_FILES:
            return 0
        if needs_spark(path):
            return 1
        return 2 if any(item.get_closest_marker("slow") for item in files[path]) else 3

    for path in paths:
        chance.shuffle(files[path])
    items[:] = [item for path in sorted(paths, key=rank) for item in files[path]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Ends:
    """The tests themselves never become garbage: do not look for it among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    # DuckDB complains at the end about objects that were not collected.
    gc.unfreeze()


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The run's only embedded session. A test that changes a setting puts it back."""
    import quick_java  # noqa: F401

    from polybus.spark.session import session

    before = os.environ.get("POLYBUS_DATA")
    made = session(app="tests")
    yield made
    made.stop()
    if before is None:
        os.environ.pop("POLYBUS_DATA", None)


@pytest.fixture(scope="module")
def brokers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> KafkaBrokers:
    """The worker's only Kafka, three brokers, or one for Spark. Who kills one starts it again."""
    from cluster_kit import running, secure_brokers

    count = 1 if needs_spark(request.path) else 3
    if _kafka and _kafka[0][1].count < count:
        _kafka.pop()[0].close()
    if not _kafka:
        stack = contextlib.ExitStack()
        _kafka.append((stack, secure_brokers(tmp_path_factory.mktemp("kafka"), count)))
        stack.enter_context(running(_kafka[0][1]))
    return _kafka[0][1]


# The brokers of this worker, if they run, and what ends them.
_kafka: list[tuple[contextlib.ExitStack, KafkaBrokers]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Ends:
    """Undo what a test leaves to the next.

    A command that runs in this process takes its umask from its data folder. Idle brokers take a
    fifth of a core, so they end before a file that does not need them.
    """
    umask = os.umask(0o022)
    os.umask(umask)
    done = yield
    os.umask(umask)
    if _kafka and not (nextitem and (needs_kafka(nextitem) or nextitem.path == item.path)):
        _kafka.pop()[0].close()
    return done


def pytest_sessionfinish() -> None:
    """End the brokers if the tests end early: `-x`, Ctrl-C."""
    while _kafka:
        _kafka.pop()[0].close()


def needs_kafka(item: pytest.Item) -> bool:
    return TESTS / "kafka" in item.path.parents or "brokers" in getattr(item, "fixturenames", ())


@pytest.fixture
def prefix() -> str:
    """Begins the names of a test's topics in Kafka."""
    from cluster_kit import prefixes

    return f"t{next(prefixes)}."


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[RunningBus]:
    """A bus without topics on a data folder of its own."""
    from spark_kit import running_bus

    with running_bus(tmp_path) as running:
        yield running
