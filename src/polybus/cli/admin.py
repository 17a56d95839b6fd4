"""Calls to the bus that runs on a data folder, through its administration socket."""

import socket
from pathlib import Path
from typing import Any

import msgspec

from polybus.client.transport import refusal
from polybus.errors import PolybusError
from polybus.processes import is_alive

ANSWER_TIMEOUT_S = 30.0


class RunningBus(msgspec.Struct):
    """The content of run.json, which a bus writes when it starts."""

    pid: int
    addresses: list[str]
    admin: str


def running(data: Path) -> RunningBus | None:
    """The bus that runs on the folder now; None if there is none, or only its leftover file."""
    try:
        run = msgspec.json.decode((data / "run.json").read_bytes(), type=RunningBus)
    except (OSError, msgspec.DecodeError):
        return None
    return run if is_alive(run.pid) else None


def ask(run: RunningBus, verb: str, **fields: Any) -> Any:
    """Send one request and return its result.

    Raises:
        PolybusError: the refusal of the bus, or `admin.unreachable`.
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
