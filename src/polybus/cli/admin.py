"""The running bus on a data folder, asked through its administrator's socket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec

from polybus.client.events import refusal
from polybus.errors import PolybusError
from polybus.processes import is_alive

ANSWER_TIMEOUT_S = 30.0


class Run(msgspec.Struct):
    """What run.json says of the bus that runs on the folder."""

    pid: int
    addresses: list[str]
    admin: str


def running(data: Path) -> Run | None:
    """The bus that runs on the folder now; None when there is none, or only its leftovers."""
    try:
        run = msgspec.json.decode((data / "run.json").read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError):
        return None
    return run if is_alive(run.pid) else None


def ask(run: Run, verb: str, **fields: Any) -> Any:
    """Ask the bus one thing and return its result.

    Raises:
        PolybusError: the bus's own refusal, or `admin.unreachable`.
    """
    request = {"verb": verb} | {
        name.replace("_", "-"): value for name, value in fields.items() if value is not None
    }
    try:
        answer = _exchange(run.admin, msgspec.json.encode(request) + b"\n")
    except OSError as error:
        text = f"process {run.pid} does not answer at {run.admin}: {error.strerror or error}"
        raise PolybusError("admin.unreachable", text) from error
    if "error" in answer:
        raise refusal(answer["error"]["code"], answer["error"]["text"])
    return answer["result"]


def _exchange(path: str, request: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(path)
        connection.sendall(request)
        with connection.makefile("rb") as answers:
            line = answers.readline()
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise OSError("the answer is not JSON") from error
