from polybus.scan.ends_py import (
    TopicEnd as TopicEnd,
    add_places as add_places,
    drop_oldest as drop_oldest,
    find_ends as find_ends,
    keep_batches as keep_batches,
    merge_runs as merge_runs,
    rows_by_topic as rows_by_topic,
    take_batches as take_batches,
)
