"""/v1/consumers: programs that read topics, with their positions, lag and last error."""

import msgspec
from starlette.responses import Response

from polybus.edges.http.calls import Call, answer
from polybus.services.consumers.book import ConsumerView
from polybus.services.consumers.consumers import Report


class ConsumerList(msgspec.Struct):
    consumers: list[ConsumerView]


async def list_consumers(call: Call) -> Response:
    """All consumers, with their lag."""
    return answer(ConsumerList(call.state.consumers.views()))


async def report(call: Call) -> Response:
    """Report a consumer's position; fields that are left out keep their values."""
    call.state.consumers.report(call.path["group"], await call.json(Report))
    return Response(status_code=204)


async def forget(call: Call) -> Response:
    """Forget a consumer; retention no longer waits for it."""
    call.state.consumers.forget(call.path["group"])
    return Response(status_code=204)
