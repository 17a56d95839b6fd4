"""/healthz, /readyz and /metrics."""

from __future__ import annotations

from starlette.responses import PlainTextResponse, Response

from polybus.edges.http.calls import Call
from polybus.edges.http.metrics import render

METRICS = "text/plain; version=0.0.4; charset=utf-8"


async def healthz(call: Call) -> Response:
    """Liveness: the bus answers and the log takes writes."""
    error = call.state.context.durability.error
    if error is not None:
        return PlainTextResponse(f"{error.code}: {error.text}\n", 503)
    return PlainTextResponse("ok\n")


async def readyz(call: Call) -> Response:
    """Readiness: the bus accepts connections."""
    if call.state.stopping:
        return PlainTextResponse("stopping\n", 503)
    return await healthz(call)


async def metrics(call: Call) -> Response:
    """Metrics for Prometheus, text format 0.0.4."""
    return Response(render(call.state), headers={"content-type": METRICS})
