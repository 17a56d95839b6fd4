"""Decoding into types from several threads, for the first time."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from polybus.structs import convert, decode

PROGRAM = """
from __future__ import annotations
import sys, threading, types
from polybus import structs

FIELD = "    a{0}: Inner | None = None\\n    b{0}: dict[str, list[int]] = {{}}\\n"
SOURCE = '''
from __future__ import annotations
import msgspec

class Inner(msgspec.Struct):
    texts: list[str] = []

class Outer(msgspec.Struct):
''' + "".join(map(FIELD.format, range(9)))
sys.setswitchinterval(1e-6)
for number in range(100):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec(SOURCE, module.__dict__)
    start = threading.Barrier(4)

    def work():
        start.wait()
        one = structs.decode(b'{"a0": {"texts": ["x"]}, "b8": {"y": [1]}}', module.Outer)
        two = structs.convert({"a8": {"texts": ["x"]}}, module.Outer)
        assert one.a0 == two.a8

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("done")
"""


def test_threads_decode_new_types_at_the_same_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_values_of_another_type_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(b"[1]", list[str])
    with pytest.raises(msgspec.DecodeError):
        decode(b"[", list[str])
    with pytest.raises(msgspec.ValidationError):
        convert(["1"], list[int])
    assert convert(["1"], list[int], strict=False) == [1]
