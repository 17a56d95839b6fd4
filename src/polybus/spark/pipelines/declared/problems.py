"""What is wrong with a pipeline, and where in the user's files."""

from __future__ import annotations

import traceback
from typing import Any

from polybus.errors import PolybusError, UsageError
from polybus.spark.causes import clean_cause


class PipelineError(UsageError):
    """A pipeline cannot run as it is written; the text begins with `file:line`."""

    def __init__(self, code: str, text: str, *, file: str = "", line: int | None = None) -> None:
        place = shown_place(file, line)
        super().__init__(code, f"{place}: {text}" if place else text)
        self.file = file
        self.line = line


def shown_place(file: str, line: int | None) -> str:
    return f"{file}:{line}" if line else file


def located(code: str, error: BaseException, *, file: str, line: int | None) -> PipelineError:
    """`error` as an error at the innermost line of `file` that took part in it.

    `line` is where the element begins, for errors that passed through no line of the file.
    """
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, SyntaxError) and error.filename == file:
        return PipelineError(code, f"{error.msg}", file=file, line=error.lineno)
    inner = line_in(error, file)
    if isinstance(error, PolybusError):
        return PipelineError(error.code, error.text, file=file, line=inner or line)
    text = clean_cause(error)
    name = type(error).__name__
    if not _is_sparks(error) and not text.startswith(name):
        text = f"{name}: {text}"
    return PipelineError(code, text, file=file, line=inner or line)


def line_in(error: BaseException, file: str) -> int | None:
    """The innermost line of `file` in the error's traceback."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
    ]
    return lines[-1] if lines else None


def _is_sparks(error: BaseException) -> bool:
    from pyspark.errors import PySparkException

    return isinstance(error, PySparkException)


def place_of(element: Any) -> dict[str, Any]:
    """Where an output or a flow was declared, as keyword arguments of PipelineError."""
    location = element.source_code_location
    return {"file": location.filename, "line": location.line_number}
