"""/healthz, /readyz and /metrics."""

from __future__ import annotations

from starlette.responses import PlainTextResponse, Response

from polybus.edges.http.calls import Answer, Call, Operation
from polybus.edges.http.metrics import render

METRICS = "text/plain; version=0.0.4; charset=utf-8"


async def healthz(call: Call) -> Response:
    """Healthy while the loop answers and the log takes writes."""
    error = call.state.context.durability.error
    if error is not None:
        return PlainTextResponse(f"{error.code}: {error.text}\n", 503)
    return PlainTextResponse("ok\n")


async def readyz(call: Call) -> Response:
    if call.state.stopping:
        return PlainTextResponse("stopping\n", 503)
    return await healthz(call)


async def metrics(call: Call) -> Response:
    return Response(render(call.state), headers={"content-type": METRICS})


RED = Answer("The reason", str, "text/plain")

OPERATIONS = (
    Operation(
        method="GET",
        path="/healthz",
        run=healthz,
        summary="Liveness: the bus answers and the log takes writes",
        answers={200: Answer("Yes", str, "text/plain"), 503: RED},
    ),
    Operation(
        method="GET",
        path="/readyz",
        run=readyz,
        summary="Readiness: the bus accepts connections",
        answers={200: Answer("Yes", str, "text/plain"), 503: RED},
    ),
    Operation(
        method="GET",
        path="/metrics",
        run=metrics,
        summary="Metrics for Prometheus",
        answers={200: Answer("Text format 0.0.4", str, "text/plain")},
    ),
)
