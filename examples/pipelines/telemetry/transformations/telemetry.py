"""Telemetry of devices: sessions of each device, and alerts to devices that overheat.

A session is a period in which a device reports at least every thirty seconds. A device gets an
alert after three consecutive readings above the limit, and another only after it has cooled down.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

spark = SparkSession.active()

READING = "device STRING, celsius DOUBLE, time TIMESTAMP"
LIMIT_CELSIUS = 80.0
HOT_IN_A_ROW = 3
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def readings() -> DataFrame:
    """Readings of devices. State and watermarks start at the topic: see the orders example."""
    stream = spark.readStream.format("polybus").option("subscribe", "telemetry")
    messages = stream.option("startingOffsets", "earliest").load()
    fields = F.from_json(F.col("value").cast("string"), READING)
    return messages.select(fields.alias("row")).select("row.*").where("device IS NOT NULL")


@dp.table
def sessions() -> DataFrame:
    """One row for each session, added when the session ends."""
    rows = readings().withWatermark("time", "10 seconds")
    session = F.session_window("time", "30 seconds").alias("session")
    found = rows.groupBy("device", session).agg(
        F.count("*").alias("readings"), F.max("celsius").alias("celsius_max")
    )
    return found.select(
        "device",
        F.col("session.start").alias("start"),
        F.col("session.end").alias("end"),
        "readings",
        "celsius_max",
    )


class HotDevices(StatefulProcessor):
    """Counts consecutive hot readings of each device."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._hot = handle.getValueState("hot", "n INT")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        state = self._hot.get()
        count = 0 if state is None else state[0]
        readings = pd.concat(list(rows)).sort_values("time")
        hot = readings["celsius"] > LIMIT_CELSIUS
        # The number of consecutive hot readings up to each reading: counted from the last cool
        # reading, or from the state of the previous batch if this batch has no cool reading.
        cool_before = (~hot).cumsum()
        runs = hot.groupby(cool_before).cumsum() + (cool_before == 0) * count * hot
        alarms = readings[runs == HOT_IN_A_ROW]
        self._hot.update((int(runs.iloc[-1]),))
        yield pd.DataFrame({"device": key[0], "celsius": alarms["celsius"], "time": alarms["time"]})

    def close(self) -> None:
        pass


dp.create_sink("device_alerts", format="polybus", options={"topic": "device.alerts"})


# Spark's own runner accepts a stateful Python function only outside the function of a flow.
alarms = (
    readings()
    .groupBy("device")
    .transformWithStateInPandas(
        statefulProcessor=HotDevices(),
        outputStructType=READING,
        outputMode="Append",
        timeMode="None",
    )
)


@dp.append_flow(
    target="device_alerts",
    spark_conf={"spark.sql.streaming.stateStore.providerClass": ROCKSDB},
)
def hot_devices() -> DataFrame:
    """Alerts as JSON, keyed by the device they are for."""
    text = F.to_json(F.struct("device", "celsius", "time", F.lit("too hot").alias("alert")))
    return alarms.select(F.col("device").cast("binary").alias("key"), text.alias("value"))
