"""/v1/consumers: programs that read topics, with their positions, lag and last error."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from polybus.edges.http.calls import Answer, Call, Operation, answer
from polybus.edges.http.problems import Problem
from polybus.edges.http.sessions_api import INVALID, PROBLEM
from polybus.services.consumers.book import ConsumerView
from polybus.services.consumers.consumers import Report


class ConsumerList(msgspec.Struct):
    consumers: list[ConsumerView]


async def list_consumers(call: Call) -> Response:
    return answer(ConsumerList(call.state.consumers.views()))


async def report(call: Call) -> Response:
    call.state.consumers.report(call.path["group"], await call.json(Report))
    return Response(status_code=204)


async def forget(call: Call) -> Response:
    call.state.consumers.forget(call.path["group"])
    return Response(status_code=204)


OPERATIONS = (
    Operation(
        method="GET",
        path="/v1/consumers",
        run=list_consumers,
        summary="All consumers, with their lag",
        answers={200: Answer("The consumers", ConsumerList)},
    ),
    Operation(
        method="PUT",
        path="/v1/consumers/{group}",
        run=report,
        summary="Report a consumer's position; fields that are left out keep their values",
        body=Report,
        answers={
            204: Answer("The report is stored"),
            400: INVALID,
            409: Answer("There are too many consumers", Problem, PROBLEM),
        },
    ),
    Operation(
        method="DELETE",
        path="/v1/consumers/{group}",
        run=forget,
        summary="Forget a consumer; retention no longer waits for it",
        answers={204: Answer("It is forgotten"), 404: Answer("No such consumer", Problem, PROBLEM)},
    ),
)
