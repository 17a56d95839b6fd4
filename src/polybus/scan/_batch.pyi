from polybus.scan.batch_py import (
    Batch as Batch,
    rows_by_topic as rows_by_topic,
    take_batches as take_batches,
    weigh as weigh,
)
