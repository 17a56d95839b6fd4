"""Errors of pipeline files, with their place in the file."""

import traceback
from typing import Any

from pyspark.errors import PySparkException

from polybus.errors import PolybusError, UsageError
from polybus.spark.causes import clean_cause


class PipelineError(UsageError):
    """A pipeline cannot run as it is written; the text begins with `file:line`."""

    def __init__(self, code: str, text: str, *, file: str = "", line: int | None = None) -> None:
        super().__init__(code, f"{shown_place(file, line)}: {text}" if file else text)


def shown_place(file: str, line: int | None) -> str:
    return f"{file}:{line}" if line else file


def place_of(element: Any) -> dict[str, Any]:
    """Where an output or a flow was declared, as keyword arguments of PipelineError."""
    location = element.source_code_location
    return {"file": location.filename, "line": location.line_number}


def located(code: str, error: BaseException, *, file: str, line: int | None) -> PipelineError:
    """The error, at the innermost line of `file` in its traceback.

    `line` is where the element begins, for errors without a line of the file.
    """
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, SyntaxError) and error.filename == file:
        return PipelineError(code, str(error.msg), file=file, line=error.lineno)
    frames = traceback.extract_tb(error.__traceback__)
    line = next((one.lineno for one in reversed(frames) if one.filename == file), None) or line
    if isinstance(error, PolybusError):
        return PipelineError(error.code, error.text, file=file, line=line)
    text, name = clean_cause(error), type(error).__name__
    if not isinstance(error, PySparkException) and not text.startswith(name):
        text = f"{name}: {text}"
    return PipelineError(code, text, file=file, line=line)
