"""msgstream's bytes: payloads, packs, confirmations, event names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.batch import Batch
from polybus.errors import PeerError
from polybus.wire import msgstream

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_a_batch_is_one_pack_of_topic_and_payload() -> None:
    batch = Batch.of("shop.purchase", [b'{"item": "boots"}', b"plain"])

    content = msgstream.encode_messages(batch)

    assert content == b'[["shop.purchase",{"item":"boots"}],["shop.purchase","plain"]]'


def test_contents_join_into_one_pack() -> None:
    assert msgstream.join_contents([b'[["a"]]', b"[]", b'[["b",1],["c"]]']) == (
        b'[["a"],["b",1],["c"]]'
    )


def test_packs_go_out_as_one_compact_object_in_the_order_given() -> None:
    packs = msgstream.encode_packs([(2, b'[["a"]]'), (10, b'[["b",1]]')])

    assert packs == b'{"2":[["a"]],"10":[["b",1]]}'


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1,2,3", [1, 2, 3]),
        ("", []),
        (",,", []),
        ("0", []),
        ("3,3,1", [3, 3, 1]),
        (" 4 , x, -1, 5.0, 0x6, ٣, 7", [4, 7]),
        ("99999999999999999999", []),
    ],
)
def test_confirmations_pass_over_what_is_no_id(text: str, ids: list[int]) -> None:
    assert msgstream.parse_confirm_ids(text) == ids


@given(st.text())
def test_no_text_upsets_a_confirmation(text: str) -> None:
    assert all(number > 0 for number in msgstream.parse_confirm_ids(text))


def test_a_dotted_event_is_emitted_from_most_to_least_relevant() -> None:
    assert msgstream.event_chunks("shop.purchase.boots") == [
        "shop.purchase.boots",
        "shop.purchase",
        "shop",
    ]


def test_a_posted_pack_comes_out_compact() -> None:
    assert msgstream.parse_pack(b'[ ["a"], ["b", {"x": [1, 2]}] ]') == b'[["a"],["b",{"x":[1,2]}]]'


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{}", b"[]", b"[[]]", b"[1]", b"[[1]]", b'[["a",1,2]]', b'[["a"]', b"\xff"),
        *(
            b'[["a",NaN]]',
            b'[["a","\xff"]]',
            b'[["a"]] x',
            b'[["a",' + b"[" * 64 + b"]" * 64 + b"]]",
        ),
        b"[" * 1_000_000,
        *(b'[["a",%s]]' % number for number in (b"1e999", b"-1E+999", b"9" * 400)),
    ],
)
def test_what_is_no_pack_is_refused(body: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        msgstream.parse_pack(body)
    assert caught.value.code == "msgstream.pack-invalid"


def test_small_and_large_numbers_of_a_pack_stay() -> None:
    body = b'[["a",[1e-999,1e308,-0.0,123456789012345678901234567890]]]'
    assert msgstream.parse_pack(body) == body


@given(JSON, st.integers(0, 8))
def test_depth_is_counted_outside_strings_only(value: object, limit: int) -> None:
    def depth(one: object) -> int:
        if isinstance(one, list):
            return 1 + max(map(depth, one), default=0)
        if isinstance(one, dict):
            return 1 + max(map(depth, one.values()), default=0)
        return 0

    assert msgstream.deeper_than(json.dumps(value).encode(), limit) == (depth(value) > limit)
