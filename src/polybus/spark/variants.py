"""Errors of Spark about paths into JSON, and hints for them."""

from collections.abc import Callable
from typing import TypeVar

from pyspark.errors import AnalysisException

from polybus.lake.sql.json_paths.dialects import CAST_HINT
from polybus.lake.sql.json_paths.rewriting import for_spark
from polybus.spark.internals import java_errors

T = TypeVar("T")
_NOT_VARIANT = "COLUMN_IS_NOT_VARIANT_TYPE"
_NOT_COMPARABLE = (
    "DATATYPE_MISMATCH",
    "GROUP_EXPRESSION_TYPE_IS_NOT_ORDERABLE",
    "UNSUPPORTED_FEATURE.SET_OPERATION_ON_VARIANT_TYPE",
    "INVALID_EXTRACT_BASE_FIELD_TYPE",
)


def with_paths(query: str, run: Callable[[str], T]) -> T:
    """Run a query with its paths in Spark's syntax, also those into text or bytes.

    Only Spark knows the types of columns. So the first attempt assumes that they are VARIANT.
    """
    try:
        return run(for_spark(query))
    except AnalysisException as error:
        if not _is_path_into_text(error):
            raise
    except java_errors() as error:
        # Spark 4.2 has no text for this error, and fails over that.
        if _NOT_VARIANT not in str(error):
            raise
    return run(for_spark(query, is_parsed=True))


def _is_path_into_text(error: AnalysisException) -> bool:
    condition = error.getCondition() or ""
    is_argument = condition == "DATATYPE_MISMATCH.UNEXPECTED_INPUT_TYPE"
    is_get = is_argument and "variant_get" in str(error)
    return condition == _NOT_VARIANT or is_get


def hint_for(error: AnalysisException) -> str:
    """A hint for replacing a comparison of JSON; empty for any other error."""
    condition = error.getCondition() or ""
    is_of_json = condition.startswith(_NOT_COMPARABLE) and '"VARIANT"' in str(error)
    is_of_json |= condition == "UNSUPPORTED_FEATURE.SET_OPERATION_ON_VARIANT_TYPE"
    return CAST_HINT if is_of_json else ""
