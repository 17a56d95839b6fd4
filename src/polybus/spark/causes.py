"""The cause of a failure in a streaming query, as one short text without the Java stack trace."""

import contextlib
import re
from collections.abc import Iterator

from polybus.errors import PolybusError
from polybus.spark.internals import java_cause, java_errors

# Transient failures: the bus is restarting, a worker process was killed.
_TRANSIENT = re.compile(
    r"client\.(unreachable|timeout|disconnected)|lake\.(busy|conflict)"
    r"|Connection (refused|reset)|Broken pipe"
    r"|Python worker (exited unexpectedly|failed to connect back)|Python streaming source runner"
    r"|Python daemon failed to launch worker|Failed to find the data source: polybus\b"
    r"|java\.io\.EOFException|java\.net\.Socket(Timeout)?Exception"
)
_PREFIX = re.compile(
    r"^\[STREAM_FAILED\].*?terminated with exception: |^An error occurred while calling [^\n]*\n: "
    r"|^(?:[a-z]\w*\.)+[A-Z]\w*(?:Exception|Error): ",
    re.DOTALL,
)
# Where the message ends and a stack trace, or a rendering of the query, begins.
_REST = re.compile(
    r"\n\s*(?:at |\.\.\. \d+ more|Caused by|== SQL|=== Streaming Query|Driver stacktrace)"
)
_PYTHON_ERROR = re.compile(r"^((?:\w+\.)*[A-Z]\w*)(?:: (.*))?$")
_SQL_STATE = re.compile(r"\s*SQLSTATE: \w+")
_TEXT_MAX = 2000
_STOPPED = re.compile(
    r"java\.(?:lang\.Interrupted|io\.InterruptedIO|nio\.channels\.ClosedByInterrupt)Exception"
)
_NO_SOURCE = "Failed to find the data source: polybus"
_NO_SOURCE_ADVICE = "Set PYSPARK_PYTHON to the Python that has Polybus, before Spark starts."
_NO_CAUSE = "(no cause message)"


def clean_cause(error: BaseException | str) -> str:
    """The Python error if there is one, else the message of Spark's own."""
    if isinstance(error, PolybusError):
        return str(error)
    text = _with_cause(error) or type(error).__name__
    python = _python_error(text)
    if python is not None:
        return python[:_TEXT_MAX]
    text = text.split("JVM stacktrace:")[0]
    before = None
    while before != text:
        before, text = text, _PREFIX.sub("", text.strip())
    text = _REST.split(text)[0]
    text = re.sub(r";\n(?:'|[A-Z+]).*", "", text, flags=re.DOTALL)  # the logical plan
    text = " ".join(_SQL_STATE.sub("", text).split())[:_TEXT_MAX] or "no cause given"
    return f"{text} {_NO_SOURCE_ADVICE}" if _NO_SOURCE in text else text


def _python_error(text: str) -> str | None:
    """The error of the last Python traceback in `text`."""
    _, mark, trace = text.rpartition("Traceback (most recent call last):")
    if not mark:
        return None
    for line in trace.splitlines()[1:]:
        if line.startswith((" ", "\t")) or not line.strip():
            continue
        match = _PYTHON_ERROR.match(line.strip())
        if match is None:
            continue
        name, message = match.group(1), match.group(2) or ""
        if name.startswith("polybus."):  # our messages begin with their code
            return message
        short = name.rpartition(".")[2]
        return f"{short}: {_SQL_STATE.sub('', message)}" if message else short
    return None


class BriefError(Exception):
    """An error of the JVM without its stack trace."""


@contextlib.contextmanager
def brief_errors() -> Iterator[None]:
    """Raise an error of the JVM in a function for `foreachBatch` as one short text.

    Spark searches the text of the function's error with a regular expression that recurses for
    every character of a Java stack trace (StreamExecution.PROXY_ERROR). A long one overflows the
    stack of the query's thread, and the query then ends as if it had not failed.
    """
    try:
        yield
    except java_errors() as error:
        text, passing = clean_cause(error), _TRANSIENT.search(_with_cause(error))
        if passing is not None and not is_transient(text):
            text = f"{text} ({passing[0]})"
        if stopped := _STOPPED.search(str(error)):
            # Spark matches this text to distinguish a stopped query from a failed one.
            text = f"py4j.protocol.Py4JJavaError: An error occurred while calling: {stopped[0]}"
        raise BriefError(text) from None


def is_transient(error: BaseException | str) -> bool:
    """Whether a retry may help without any change."""
    return _TRANSIENT.search(_with_cause(error)) is not None


def _with_cause(error: BaseException | str) -> str:
    """The text; if Spark has none, the class of the Java cause, as for an end of file."""
    text = str(error)
    if _NO_CAUSE not in text:
        return text
    return text.replace(_NO_CAUSE, java_cause(error).partition("\n")[0].strip() or _NO_CAUSE)
