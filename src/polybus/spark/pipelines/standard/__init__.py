"""The standard pipeline: decodes, counts and watches every topic, without any set-up."""

from pathlib import Path

from polybus.spark.pipelines.flows import PipelineFlow

PIPELINE = "standard"
LOOK_EVERY_S = 0.2


def flows(data: Path) -> list[PipelineFlow]:
    """The flows of the standard pipeline for the bus of a data folder."""
    from polybus.spark.pipelines.standard.flow import start_decode
    from polybus.spark.pipelines.standard.watch import Watch

    return [
        # A batch over a file that was damaged after its plan runs again until that is restored.
        PipelineFlow(PIPELINE, "decode", start_decode, retried=("log.damaged", "log.frozen")),
        PipelineFlow(PIPELINE, "watch", Watch(data).tick, repeat_s=LOOK_EVERY_S),
    ]
