"""The promises of the Log, as tests. An implementation subclasses LogContract and gives `open_log`.

`open_log()` opens the log, and after a `close()` opens the same one again. `keeps_messages` says
whether messages are there again then. Nothing here knows of files, so a log over a network can
pass it too; whatever may take time is waited for with `sync`, and what a log that arrives late
promises differently with `settle`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from polybus.batch import Batch
from polybus.errors import PolybusError, UsageError
from polybus.log.interface import Log, LogCallbacks, TopicSettings

OpenLog = Callable[[], Log]


def values_from(log: Log, topic: str, offset: int, *, bytes_max: int = 1 << 20) -> list[bytes]:
    """All values from an offset to the end, in as many reads as it takes."""
    found: list[bytes] = []
    stop = log.bounds(topic).stop
    while offset < stop:
        batches = log.read(topic, offset, bytes_max=bytes_max)
        assert batches, f"no progress at {offset} of {stop}"
        for batch in batches:
            assert batch.first_offset == offset
            found += batch.values()
            offset += len(batch)
    return found


def settle(log: Log) -> None:
    """Let a log that arrives late bring what was appended; others have it already."""
    if log.arrives_late:
        log.sync()


def numbered(topic: str, first: int, count: int) -> Batch:
    return Batch.of(topic, [b"%s-%d" % (topic.encode(), n) for n in range(first, first + count)])


def timed(topic: str, timestamp_us: int, values: list[bytes]) -> Batch:
    batch = Batch.of(topic, values)
    batch.timestamp_us = timestamp_us
    return batch


class LogContract:
    """Subclass me. Every test is a promise of polybus.log.interface."""

    keeps_messages = True

    @pytest.fixture
    def heard(self) -> list[int]:
        """The tickets that the log announced as durable."""
        return []

    @pytest.fixture
    def callbacks(self, heard: list[int]) -> LogCallbacks:
        return LogCallbacks(on_durable=heard.append)

    @pytest.fixture
    def open_log(self) -> OpenLog:
        raise NotImplementedError

    @pytest.fixture
    def log(self, open_log: OpenLog) -> Iterator[Log]:
        log = open_log()
        log.create_topic("a")
        log.create_topic("b")
        yield log
        log.close()

    @pytest.fixture
    def eager_threads(self) -> Iterator[None]:
        """Threads take turns after a few steps, so that they meet where they seldom would."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(before)

    # Offsets.

    def test_a_new_topic_holds_nothing_and_starts_at_zero(self, log: Log) -> None:
        bounds = log.bounds("a")
        assert (bounds.start, bounds.stop) == (0, 0)
        assert bounds.epoch > 0
        assert log.read("a", 0) == []

    def test_offsets_count_up_without_gaps_in_the_order_of_append(self, log: Log) -> None:
        batches = [numbered("a", 0, count) for count in (3, 1, 2)]
        for batch in batches:
            log.append(batch)
        settle(log)
        assert [batch.first_offset for batch in batches] == [0, 3, 4]
        assert log.bounds("a").stop == 6

    def test_each_topic_counts_for_itself(self, log: Log) -> None:
        for number in range(3):
            log.append(numbered("a", 2 * number, 2))
            log.append(numbered("b", number, 1))
        log.sync()
        assert values_from(log, "a", 0) == [b"a-%d" % n for n in range(6)]
        assert values_from(log, "b", 0) == [b"b-%d" % n for n in range(3)]

    def test_append_sets_epoch_and_first_offset_on_the_batch(self, log: Log) -> None:
        batch = numbered("a", 0, 1)
        log.append(batch)
        settle(log)
        assert (batch.epoch, batch.first_offset) == (log.bounds("a").epoch, 0)

    def test_an_empty_batch_takes_no_offset(self, log: Log) -> None:
        log.append(Batch.of("a", []))
        log.append(numbered("a", 0, 1))
        log.sync()
        assert values_from(log, "a", 0) == [b"a-0"]

    def test_a_read_from_any_offset_gives_every_message_from_there_on_once(self, log: Log) -> None:
        """A transaction leaves an offset without a message in a log that arrives late."""
        log.append(numbered("a", 0, 3))
        log.sync()
        if log.cluster is not None:
            transaction = log.cluster.begin("p")
            transaction.append([numbered("a", 3, 2)])
            transaction.commit()
        else:
            log.append(numbered("a", 3, 2))
        log.append(numbered("a", 5, 2))
        log.sync()
        stop = log.bounds("a").stop
        expected = [(n + (log.cluster is not None and n > 4), b"a-%d" % n) for n in range(7)]
        for start in range(stop + 1):
            found, offset = [], start
            while batches := log.read("a", offset, bytes_max=1) if offset < stop else []:
                for batch in batches:
                    assert batch.first_offset == offset or log.arrives_late
                    found += list(enumerate(batch.values(), batch.first_offset))
                offset = found[-1][0] + 1
            assert found == [one for one in expected if one[0] >= start]

    # Tickets.

    def test_tickets_ascend_over_all_topics(self, log: Log) -> None:
        tickets = [log.append(numbered(topic, 0, 1)) for topic in "abab"]
        assert tickets == sorted(set(tickets))
        assert tickets[0] > 0

    def test_after_sync_every_ticket_is_durable(self, log: Log) -> None:
        ticket = log.append(numbered("a", 0, 10))
        log.sync()
        assert log.durable >= ticket
        assert log.pending_bytes == 0

    @pytest.mark.parametrize("urgent", [False, True])
    def test_on_durable_hears_of_a_ticket_without_anybody_calling_sync(
        self, log: Log, heard: list[int], urgent: bool
    ) -> None:
        ticket = log.append(numbered("a", 0, 1), urgent=urgent)
        # An urgent ticket is announced; for others it is enough that they become durable.
        while ticket not in heard and (urgent or log.durable < ticket):
            time.sleep(0.001)
        assert log.durable >= ticket

    def test_on_durable_never_goes_back(self, log: Log, heard: list[int]) -> None:
        last = 0
        for number in range(50):
            last = log.append(numbered("a", number, 1), urgent=True)
        log.sync()
        assert heard == sorted(heard)
        assert heard[-1] == last

    # Appending together.

    def test_batches_appended_together_get_the_next_offsets_of_their_topics(self, log: Log) -> None:
        log.append(numbered("a", 0, 2))
        batches = [numbered("a", 2, 3), numbered("b", 0, 2), numbered("a", 5, 1)]
        before = log.append(numbered("a", 0, 0))
        ticket = log.append_all(batches, urgent=True)
        settle(log)
        assert [batch.first_offset for batch in batches] == [2, 0, 5]
        assert ticket > before
        assert values_from(log, "a", 0) == [b"a-%d" % n for n in range(6)]
        log.append(numbered("b", 2, 1))
        log.sync()
        assert values_from(log, "a", 0) == [b"a-%d" % n for n in range(6)]
        assert values_from(log, "b", 0) == [b"b-%d" % n for n in range(3)]
        assert log.durable >= ticket
        assert log.pending_bytes == 0

    def test_one_unknown_topic_keeps_out_all_batches_appended_together(self, log: Log) -> None:
        with pytest.raises(UsageError) as caught:
            log.append_all([numbered("a", 0, 1), numbered("nobody", 0, 1), numbered("b", 0, 1)])
        assert caught.value.code == "topic.unknown"
        log.sync()
        assert (log.bounds("a").stop, log.bounds("b").stop) == (0, 0)

    def test_appending_nothing_together_changes_nothing(self, log: Log) -> None:
        ticket = log.append(numbered("a", 0, 1))
        assert log.append_all([]) >= ticket
        log.append_all([Batch.of("b", [])])
        log.sync()
        assert (log.bounds("a").stop, log.bounds("b").stop) == (1, 0)

    def test_on_durable_hears_of_batches_appended_together(
        self, log: Log, heard: list[int]
    ) -> None:
        ticket = log.append_all([numbered("a", 0, 1), numbered("b", 0, 1)], urgent=True)
        while ticket not in heard:
            time.sleep(0.001)
        assert log.durable >= ticket

    # Reading.

    def test_what_was_appended_is_visible_at_once_or_when_it_arrived(self, log: Log) -> None:
        log.append(numbered("a", 0, 3))
        settle(log)
        assert values_from(log, "a", 1) == [b"a-1", b"a-2"]

    def test_durable_and_fresh_messages_read_as_one_sequence(self, log: Log) -> None:
        log.append(numbered("a", 0, 5))
        log.sync()
        log.append(numbered("a", 5, 5))
        settle(log)
        for offset in range(11):
            assert values_from(log, "a", offset) == [b"a-%d" % n for n in range(offset, 10)]

    def test_a_read_begins_at_its_offset_exactly(self, log: Log) -> None:
        log.append(numbered("a", 0, 10))
        log.sync()
        batch = log.read("a", 7)[0]
        assert (batch.first_offset, batch.value(0), batch.epoch) == (
            7,
            b"a-7",
            log.bounds("a").epoch,
        )

    @pytest.mark.parametrize("synced", [False, True])
    def test_a_read_stops_at_about_bytes_max_but_gives_one_message_at_least(
        self, log: Log, synced: bool
    ) -> None:
        log.append(Batch.of("a", [b"x" * 1000 for _ in range(100)]))
        if synced:
            log.sync()
        settle(log)
        some = log.read("a", 0, bytes_max=10_000)
        assert sum(len(batch) for batch in some) == 10
        one = log.read("a", 5, bytes_max=1)
        assert [len(batch) for batch in one] == [1]
        assert len(values_from(log, "a", 0, bytes_max=2500)) == 100

    def test_offsets_outside_the_bounds_are_refused_by_code(self, log: Log) -> None:
        log.append(numbered("a", 0, 2))
        settle(log)
        for offset in (-1, 3):
            with pytest.raises(UsageError) as caught:
                log.read("a", offset)
            assert caught.value.code == "log.offset-unknown"
        assert log.read("a", 2) == []

    def test_read_recent_gives_everything_to_the_end_or_nothing(self, log: Log) -> None:
        log.append(numbered("a", 0, 2))
        log.sync()
        log.append(numbered("a", 2, 2))
        settle(log)
        recent = log.read_recent("a", 1)
        if recent is not None:
            assert [value for batch in recent for value in batch.values()] == [
                b"a-1", b"a-2", b"a-3",
            ]  # fmt: skip
        assert log.read_recent("a", 4) == []

    @pytest.mark.parametrize("synced", [False, True])
    def test_everything_about_a_message_survives(self, log: Log, synced: bool) -> None:
        batch = Batch.of(
            "a",
            [b"", b"\x00\xff\x80", b"plain"],
            keys=[None, b"k", b""],
            headers=[{"h": b"\xfe", "i": b""}, None, {"ü": b"1"}],
        )
        batch.protocol, batch.sender, batch.timestamp_us = "goms", "10.0.0.1:9", 1_234_567
        log.append(batch)
        log.append(numbered("a", 3, 1))
        if synced:
            log.sync()
        settle(log)
        read = log.read("a", 0)[0].slice(0, 3)
        assert list(read.values()) == [b"", b"\x00\xff\x80", b"plain"]
        assert list(read.keys or ()) == [None, b"k", b""]
        assert [dict(one or {}) for one in read.headers or ()] == [
            {"h": b"\xfe", "i": b""}, {}, {"ü": b"1"},
        ]  # fmt: skip
        # A log that arrives late has milliseconds.
        time_us = 1_234_000 if log.arrives_late else 1_234_567
        assert (read.protocol, read.sender, read.timestamp_us) == ("goms", "10.0.0.1:9", time_us)

    def test_a_batch_without_a_time_gets_the_clocks(self, log: Log) -> None:
        log.append(numbered("a", 0, 1))
        settle(log)
        assert log.read("a", 0)[0].timestamp_us > 0

    # Time.

    @pytest.mark.parametrize("synced", [False, True])
    def test_reading_by_time_finds_the_first_message_at_or_after_it(
        self, log: Log, synced: bool
    ) -> None:
        for time_us in (1000, 2000, 3000):
            log.append(timed("a", time_us, [b"x", b"y"]))
            if synced:
                log.sync()
        settle(log)
        found = [log.offset_at("a", time_us) for time_us in (0, 1000, 1001, 2000, 3000, 3001)]
        assert found == [0, 0, 2, 2, 4, 6]

    @pytest.mark.parametrize("synced", [False, True])
    def test_a_clock_set_back_disturbs_neither_offsets_nor_reading_by_time(
        self, log: Log, synced: bool
    ) -> None:
        for time_us in (5000, 1000, 2000, 7000, 6000):
            log.append(timed("a", time_us, [b"%d" % time_us]))
            if synced:
                log.sync()
        settle(log)
        assert values_from(log, "a", 0) == [b"5000", b"1000", b"2000", b"7000", b"6000"]
        assert [log.offset_at("a", time_us) for time_us in (1, 5000, 5001, 6500, 7001)] == [
            0, 0, 3, 3, 5,
        ]  # fmt: skip

    # Topics.

    def test_unknown_topics_are_refused_by_code_everywhere(self, log: Log) -> None:
        calls: list[Callable[[], object]] = [
            lambda: log.append(numbered("nobody", 0, 1)),
            lambda: log.bounds("nobody"),
            lambda: log.read("nobody", 0),
            lambda: log.read_recent("nobody", 0),
            lambda: log.offset_at("nobody", 0),
            lambda: log.settings("nobody"),
            lambda: log.describe("nobody"),
            lambda: log.stored_bytes("nobody"),
            lambda: log.delete_topic("nobody"),
        ]
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.code == "topic.unknown"

    def test_a_description_counts_the_history(self, log: Log) -> None:
        figures = log.describe("a")
        assert figures["history-files"] == figures["history-bytes"] == 0

    def test_a_topic_exists_once(self, log: Log) -> None:
        with pytest.raises(UsageError) as caught:
            log.create_topic("a")
        assert caught.value.code == "topic.exists"
        assert sorted(log.topics()) == ["a", "b"]

    def test_many_topics_are_created_together_or_none_if_one_exists(self, log: Log) -> None:
        settings = TopicSettings(retention_bytes=1000)
        wanted = {f"many {number}": settings for number in range(3)}
        with pytest.raises(UsageError) as caught:
            log.create_topics(wanted | {"a": settings})
        assert caught.value.code == "topic.exists"
        assert sorted(log.topics()) == ["a", "b"]
        log.create_topics(wanted)
        assert sorted(log.topics()) == ["a", "b", *wanted]
        # Epochs of a cluster count for each topic by itself.
        epochs = {log.bounds(topic).epoch for topic in log.topics()}
        assert len(epochs) == 5 or log.arrives_late
        assert all(log.settings(topic) == settings for topic in wanted)

    def test_a_recreated_topic_has_a_larger_epoch_and_shows_nothing_of_the_old(
        self, log: Log
    ) -> None:
        log.append(numbered("a", 0, 3))
        old = log.bounds("a").epoch
        log.delete_topic("a")
        assert "a" not in log.topics()
        bounds = log.create_topic("a")
        log.sync()
        assert bounds.epoch > old
        assert log.bounds("a") == bounds
        log.append(Batch.of("a", [b"new"]))
        log.sync()
        assert values_from(log, "a", 0) == [b"new"]

    def test_topics_and_their_settings_survive_a_restart(self, open_log: OpenLog) -> None:
        log = open_log()
        settings = TopicSettings(retention_age_s=60.0, retention_bytes=1000)
        log.create_topic("kept topic/ü", settings)
        log.create_topic("deleted")
        log.delete_topic("deleted")
        log.close()
        log = open_log()
        assert list(log.topics()) == ["kept topic/ü"]
        assert log.settings("kept topic/ü") == settings
        log.close()

    def test_a_restart_shows_all_messages_in_the_same_epoch_or_none_in_a_new_one(
        self, open_log: OpenLog
    ) -> None:
        log = open_log()
        before = log.create_topic("a")
        log.append(numbered("a", 0, 3))
        log.close()
        log = open_log()
        after = log.bounds("a")
        if self.keeps_messages:
            assert (after.epoch, after.stop) == (before.epoch, 3)
            assert values_from(log, "a", 0) == [b"a-0", b"a-1", b"a-2"]
        else:
            assert after.epoch > before.epoch
            assert (after.start, after.stop) == (0, 0)
        log.append(numbered("a", 3, 1))
        settle(log)
        assert log.bounds("a").stop == after.stop + 1
        log.close()

    def test_an_epoch_is_never_used_twice(self, open_log: OpenLog) -> None:
        epochs = []
        for _ in range(3):
            log = open_log()
            epochs.append(log.create_topic("a").epoch)
            log.delete_topic("a")
            epochs.append(log.create_topic("a").epoch)
            log.delete_topic("a")
            log.close()
        assert epochs == sorted(set(epochs))

    # Threads.

    @pytest.mark.usefixtures("eager_threads")
    def test_readers_on_other_threads_see_a_gapless_sequence_while_it_grows(self, log: Log) -> None:
        total = 3000
        wrong: list[object] = []

        def follow() -> None:
            offset = 0
            try:
                while offset < total:
                    for batch in log.read("a", offset, bytes_max=4096):
                        for value in batch.values():
                            assert value == b"a-%d" % offset
                            offset += 1
                    log.read("a", log.offset_at("a", offset + 1))
            except (AssertionError, PolybusError, RuntimeError) as error:
                wrong.append(error)

        readers = [threading.Thread(target=follow) for _ in range(3)]
        for reader in readers:
            reader.start()
        for first in range(0, total, 3):
            batch = numbered("a", first, 3)
            batch.timestamp_us = first + 1
            log.append(batch, urgent=first % 5 == 0)
        for reader in readers:
            reader.join(30)
        assert not wrong, wrong
        assert not any(reader.is_alive() for reader in readers)
