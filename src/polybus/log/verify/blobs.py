"""The check of blobs: each matches its id, and every reference in a message has its blob.

A blob is kept by its marks: each topic with such a message must have one.
"""

from collections.abc import Iterator
from pathlib import Path

from polybus import references
from polybus.errors import PolybusError
from polybus.log import layout
from polybus.log.blob_references import FoundReferences
from polybus.log.blobs import (
    BlobMark,
    BlobReader,
    FoundBlob,
    accounts_with_blobs,
    blobs_folder,
    find_blobs,
)


class BlobCheck:
    """Compares the references in the rows of a log with the blobs."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.found = FoundReferences()

    @property
    def bytes(self) -> int:
        return sum(blob.size for blob in self._all())

    def missing(self) -> Iterator[tuple[Path, str, str, tuple[int, int]]]:
        """Missing blobs and marks: path, reason, topic and offsets."""
        stored = {blob.path: blob for blob in self._all()}
        for (topic, blob_id), offsets in self.found.offsets.items():
            path = blobs_folder(self._data, layout.owner_of(self._data, topic)) / blob_id
            blob = stored.get(path)
            epoch, last = self.found.epochs.get(topic), offsets[1]
            if not references.is_blob_id(blob_id) or blob is None:
                yield path, "is missing, and messages refer to it", topic, offsets
            elif epoch is not None and not any(mark.keeps(epoch, last) for mark in blob.marks):
                mark = BlobMark(epoch, last)
                text = "is missing, so the bus would remove the blob; create it as an empty file"
                yield path / mark.name, text, topic, offsets

    def damages(self) -> Iterator[tuple[Path, int, str | None]]:
        """Every blob with its size, and what is wrong with it, if anything."""
        for blob in self._all():
            try:
                reason = BlobReader(blob.path).check()
            except PolybusError as error:
                reason = error.text
            yield blob.path, blob.size, reason

    def _all(self) -> Iterator[FoundBlob]:
        for account in accounts_with_blobs(self._data):
            yield from find_blobs(blobs_folder(self._data, account))
