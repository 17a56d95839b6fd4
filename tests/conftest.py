"""The order of the tests, which of them are slow, and what the Spark tests share.

With `--shuffle=random` the files run in random order, and so do the tests of each file. The header
of the output says how to repeat it. Files that start Spark come first, then those with slow tests:
with several workers none is then left alone with a long file at the end.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import warm_kit

if TYPE_CHECKING:
    from spark_kit import RunningBus

TESTS = Path(__file__).parent
# They start processes or Java, or wait for disks and slow readers: too long for `make test-fast`.
SLOW = (TESTS / "cli", TESTS / "crash", TESTS / "spark")
SLOW_FILES = (
    "test_accounts_abuse.py",
    "test_accounts_limits.py",
    "test_accounts_login.py",
    "test_accounts_races.py",
    "test_append_all.py",
    "test_backpressure.py",
    "test_bad_input.py",
    "test_client_events.py",
    "test_client_http_odd.py",
    "test_client_http_reconnect.py",
    "test_client_reconnect.py",
    "test_client_refusals.py",
    "test_commits.py",
    "test_commits_delivery.py",
    "test_commits_refused.py",
    "test_consumers.py",
    "test_cycles.py",
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
    "test_http_msgstream.py",
    "test_http_slow_peers.py",
    "test_lake_crash.py",
    "test_metadata_damage.py",
    "test_queue_connector.py",
    "test_queue_connector_peers.py",
    "test_reader_moving.py",
    "test_resident_memory.py",
    "test_state_damage.py",
    "test_torture.py",
    "test_torture_storms.py",
    "test_torture_disk.py",
    "test_warm.py",
)
# What `make test-fast` selects, and how many examples a property gets there instead of 100.
FAST = "not slow"
FAST_EXAMPLES = 25
SPARK_TIMEOUT_S = 300
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


def pytest_configure(config: pytest.Config) -> None:
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
def pytest_configure_node(node: Any) -> None:
    """All workers get the order of the process that starts them."""
    node.workerinput["shuffle"] = node.config.option.shuffle


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.option.shuffle
    return None if seed is None else f"random order: make test SEED={seed} repeats it"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `make test-fast` leaves out: Spark's tests alone take seconds."""
    left_out = collection_path in SLOW or collection_path.name in SLOW_FILES
    return True if config.option.markexpr == FAST and left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        in_slow_folder = any(folder in item.path.parents for folder in SLOW)
        if in_slow_folder or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if TESTS / "spark" in item.path.parents:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
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
        if TESTS / "spark" in path.parents:
            return 0
        return 1 if any(item.get_closest_marker("slow") for item in files[path]) else 2

    for path in paths:
        chance.shuffle(files[path])
    items[:] = [item for path in sorted(paths, key=rank) for item in files[path]]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The run's only embedded session. A test that changes a setting puts it back."""
    from polybus.spark.session import session

    before = os.environ.get("POLYBUS_DATA")
    made = session(app="tests")
    yield made
    made.stop()
    if before is None:
        os.environ.pop("POLYBUS_DATA", None)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[RunningBus]:
    """A bus without topics on a data folder of its own."""
    from spark_kit import running_bus

    with running_bus(tmp_path) as running:
        yield running
