"""A driver to be killed: publishes the lines of a folder's files, and ends when all are out."""

from __future__ import annotations

import sys

from polybus.spark.session import session


def main(folder: str, checkpoint: str, url: str, topic: str) -> None:
    spark = session(app="killed")
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(folder)
    writer = lines.writeStream.format("polybus").options(url=url, topic=topic, producer=topic)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
