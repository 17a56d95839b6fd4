"""Numbers as commands print them."""

from __future__ import annotations

import pytest

from polybus.cli.common.output import size


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB")),
        *((102_400, "100 KiB"), ((1 << 20) - 1, "1.0 MiB"), (64 << 20, "64.0 MiB")),
        *((512 << 30, "512 GiB"), (5 << 50, "5120 TiB")),
    ],
)
def test_sizes_have_the_units_of_the_settings(number: int, text: str) -> None:
    """A limit of `64 << 20` bytes is 64 MiB, here and in the console."""
    assert size(number) == text
