"""The ring buffer: bounded, in order, round the corner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polybus.queues.broker import Ring


def test_a_ring_takes_what_there_is_room_for() -> None:
    ring = Ring(5)
    assert ring.push([b"abc", b"def", b"g"]) == 5
    assert ring.push([b"x"]) == 0
    assert ring.pull(2) == b"ab"
    assert ring.push([b"fgh"]) == 2
    assert ring.pull(10) == b"cdefg"
    assert ring.pull(1) == b""


@given(st.integers(1, 9), st.lists(st.one_of(st.binary(max_size=12), st.integers(0, 12))))
def test_a_ring_gives_back_what_it_took_in_order(size: int, steps: list[bytes | int]) -> None:
    ring, model = Ring(size), b""
    for step in steps:
        if isinstance(step, bytes):
            taken = ring.push([step[:3], step[3:]])
            assert taken == min(len(step), size - len(model))
            model += step[:taken]
        else:
            assert ring.pull(step) == model[:step]
            model = model[step:]
        assert ring.held_bytes == len(model)
