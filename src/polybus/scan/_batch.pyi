from polybus.scan.batch_py import (
    Batch as Batch,
    add_places as add_places,
    count_receipts as count_receipts,
    count_taken as count_taken,
    keep_batches as keep_batches,
    merge_runs as merge_runs,
    rows_by_topic as rows_by_topic,
    take_batches as take_batches,
    weigh as weigh,
)
