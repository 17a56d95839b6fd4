"""Orders joined with their customers, and revenue per hour and country.

Orders can be late: a till that was offline sends its orders when it is online again. An order that
is up to ten minutes late still counts for its hour. A later order is in `enriched`, but does not
change revenue that was already published.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()

CUSTOMER = "customer STRING, name STRING, country STRING"
ORDER = "id BIGINT, customer STRING, amount DECIMAL(10, 2), time TIMESTAMP"


def json_topic(topic: str, schema: str) -> DataFrame:
    """A topic of JSON objects as typed columns, with the offset of each message."""
    stream = spark.readStream.format("polybus").option("subscribe", topic)
    messages = stream.option("startingOffsets", "earliest").load()
    fields = F.from_json(F.col("value").cast("string"), schema)
    return messages.select("offset", fields.alias("row")).select("offset", "row.*")


@dp.table
def customer_changes() -> DataFrame:
    """Every version of every customer."""
    return json_topic("shop.customers", CUSTOMER)


@dp.materialized_view
def customers() -> DataFrame:
    """The newest version of every customer."""
    newest = F.max_by(F.struct("name", "country"), "offset").alias("newest")
    changes = spark.read.table("customer_changes")
    return changes.groupBy("customer").agg(newest).select("customer", "newest.*")


def enriched_orders() -> DataFrame:
    """Orders with name and country; orders of unknown customers are kept.

    The watermark is set on the topic, because Spark's own runner accepts it only there.
    """
    orders = json_topic("shop.orders", ORDER).drop("offset").where("id IS NOT NULL")
    known = spark.read.table("customers")
    return orders.withWatermark("time", "10 minutes").join(known, "customer", "left")


@dp.table
def enriched() -> DataFrame:
    return enriched_orders()


@dp.table
def revenue() -> DataFrame:
    """Revenue per hour and country, published once the watermark has passed the hour."""
    hour = F.window("time", "1 hour").alias("hour")
    sums = (
        enriched_orders()
        .groupBy(hour, "country")
        .agg(F.count("*").alias("orders"), F.sum("amount").alias("revenue"))
    )
    return sums.select(F.col("hour.start").alias("hour"), "country", "orders", "revenue")
