from polybus.scan.batch_py import (
    Batch as Batch,
    Flow as Flow,
    count_receipts as count_receipts,
    count_taken as count_taken,
    find_topics as find_topics,
    listen_alike as listen_alike,
    weigh as weigh,
)
