"""/v1/pipelines: the flows of the pipeline on the bus's data folder; start, stop, refresh."""

import asyncio
from collections.abc import Mapping
from typing import Annotated

import msgspec

from polybus.edges.http.calls import Call, Viewer
from polybus.errors import PolybusError
from polybus.services.pipeline_watch import DriverStatus, PipelineView

ANSWER_S = 5.0


class TableRefresh(msgspec.Struct, forbid_unknown_fields=True):
    """A table of your own pipelines; with `reset` it is filled again from the start."""

    table: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
    reset: bool = False


class PipelineAsked(msgspec.Struct):
    """The accepted request; the state changes later."""

    asked: str


async def show(call: Call) -> PipelineView:
    """The pipeline, its flows and their last batches."""
    call.check_sees_bus()
    return await call.state.pipelines.look()


async def live(viewer: Viewer, _about: Mapping[str, str]) -> PipelineView:
    viewer.check_sees_bus()
    return await viewer.state.pipelines.look()


async def stop(call: Call) -> PipelineAsked:
    """Stop the pipeline until it is started again; batches that are under way are finished.

    One that is starting ends within seconds, and finishes nothing.
    """
    if not await call.state.pipelines.end_unwritten():
        await _stop_on_socket(await call.state.pipelines.running())
    call.changes("pipeline")
    return PipelineAsked("stop")


async def _stop_on_socket(driver: DriverStatus) -> None:
    try:
        await _ask(driver.socket, "/stop")
    except (OSError, TimeoutError) as error:
        text = f"the pipeline (process {driver.pid}) does not answer: {error}"
        raise PolybusError("pipeline.unreachable", text) from error


async def start(call: Call) -> PipelineAsked:
    """Start a pipeline on the bus's data folder; it ends with the bus."""
    await call.state.pipelines.start()
    call.changes("pipeline")
    return PipelineAsked("start")


async def refresh(call: Call, body: TableRefresh) -> PipelineAsked:
    """Run the flows into one table of your own pipelines once, while no pipeline runs."""
    await call.state.pipelines.refresh(body.table, reset=body.reset)
    call.changes("pipeline", {"table": body.table, "reset": body.reset})
    return PipelineAsked("refresh")


async def _ask(path: str, request: str) -> None:
    """POST to the driver's socket. Raises OSError."""
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(f"POST {request} HTTP/1.0\r\ncontent-length: 0\r\n\r\n".encode())
            # Read to its end: a driver that cannot send its whole answer does not execute the
            # request.
            await reader.read()
        finally:
            writer.close()
