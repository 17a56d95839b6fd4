"""Sales: a streaming table with typed columns."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()

SALE = "product STRING, pieces INT, price DECIMAL(10, 2), time TIMESTAMP"


@dp.table(partition_cols=["day"])
def sales() -> DataFrame:
    stream = spark.readStream.format("polybus").option("subscribe", "sales")
    messages = stream.option("startingOffsets", "earliest").load()
    fields = F.from_json(F.col("value").cast("string"), SALE)
    rows = messages.select(fields.alias("row")).select("row.*").where("product IS NOT NULL")
    return rows.withColumn("day", F.to_date("time"))
