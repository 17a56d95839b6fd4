"""Marks columns of a Parquet file as VARIANT, which pyarrow cannot do.

pyarrow writes a VARIANT as a struct of two binaries. Spark takes the type from the table's schema,
but DuckDB takes it from the file. Only one field of the footer is missing: the logical type in the
column's schema element. The footer is a Thrift struct in the compact protocol; we walk it to the
end of these elements and insert the field.

    FileMetaData { 1: version, 2: list<SchemaElement>, … }
    SchemaElement { …, 4: name, 5: num_children, …, 10: LogicalType }, the tree in pre-order
    LogicalType { 16: VariantType { 1: specification_version } }
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"PAR1"
_TAIL_BYTES = 8  # The size of the footer, and the magic.
_BINARY, _LIST, _SET, _MAP, _STRUCT = 8, 9, 10, 11, 12
_LOGICAL_TYPE = 10
# Field 16 in the long form, a struct; in it field 1, a byte with value 1; two struct ends.
_VARIANT = bytes([_STRUCT, 16 << 1, 1 << 4 | 3, 1, 0, 0])


class _Element(NamedTuple):
    """A schema element: where it ends, and the number of its last field."""

    name: bytes
    children: int
    last_field: int
    end: int


def mark_variants(path: Path, columns: Collection[str]) -> None:
    """Mark these columns as VARIANT in the file's footer. No reader may use the file yet."""
    if not columns:
        return
    with path.open("r+b") as file:
        file.seek(-_TAIL_BYTES, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        start = file.seek(-_TAIL_BYTES - size, os.SEEK_END)
        footer = marked(file.read(size), {name.encode() for name in columns})
        file.seek(start)
        file.write(footer + len(footer).to_bytes(4, "little") + _MAGIC)


def marked(footer: bytes, columns: Collection[bytes]) -> bytes:
    """The footer with the logical type added to these top-level columns that have none."""
    pieces = []
    copied = 0
    # For each open group the number of its children that are still to come.
    open_groups: list[int] = []
    for element in _elements(_Walk(footer)):
        is_column = len(open_groups) == 1 and element.name in columns
        if is_column and element.last_field < _LOGICAL_TYPE:
            header = (_LOGICAL_TYPE - element.last_field) << 4 | _STRUCT
            pieces += [footer[copied : element.end], bytes([header]), _VARIANT]
            copied = element.end
        if open_groups:
            open_groups[-1] -= 1
        if element.children:
            open_groups.append(element.children)
        while open_groups and open_groups[-1] == 0:
            open_groups.pop()
    return b"".join([*pieces, footer[copied:]])


def _elements(walk: "_Walk") -> list[_Element]:
    """The schema elements of a footer, in order."""
    field = 0
    while True:
        field, kind = walk.field(field)
        assert kind, "a Parquet footer has a schema"
        if field == 2 and kind == _LIST:
            return [_element(walk) for _ in range(walk.list_header()[0])]
        walk.skip(kind)


def _element(walk: "_Walk") -> _Element:
    name, children, last = b"", 0, 0
    while True:
        end = walk.at
        field, kind = walk.field(last)
        if not kind:
            return _Element(name, children, last, end)
        last = field
        if field == 4:
            name = walk.binary()
        elif field == 5:
            zigzag = walk.varint()
            children = zigzag >> 1 ^ -(zigzag & 1)
        else:
            walk.skip(kind)


class _Walk:
    """A position in a Thrift compact struct."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def binary(self) -> bytes:
        size = self.varint()
        self.at += size
        return self.data[self.at - size : self.at]

    def field(self, last: int) -> tuple[int, int]:
        """The next field's number and type; type 0 is the struct's end."""
        header = self.byte()
        if header == 0:
            return 0, 0
        step, kind = header >> 4, header & 15
        return (last + step if step else self.varint() >> 1), kind

    def list_header(self) -> tuple[int, int]:
        header = self.byte()
        count = header >> 4
        return (self.varint() if count == 15 else count), header & 15

    def skip(self, kind: int) -> None:
        if kind in (4, 5, 6):
            self.varint()
        elif kind == 3:
            self.at += 1
        elif kind == 7:
            self.at += 8
        elif kind == _BINARY:
            self.binary()
        elif kind in (_LIST, _SET):
            count, inner = self.list_header()
            for _ in range(count):
                self._skip_item(inner)
        elif kind == _MAP:
            self._skip_map()
        elif kind == _STRUCT:
            field = 0
            while True:
                field, inner = self.field(field)
                if not inner:
                    return
                self.skip(inner)

    def _skip_item(self, kind: int) -> None:
        if kind in (1, 2):
            self.at += 1  # A boolean takes a byte in a list; as a field it is in the header.
        else:
            self.skip(kind)

    def _skip_map(self) -> None:
        count = self.varint()
        if count:
            kinds = self.byte()
            for _ in range(count):
                self._skip_item(kinds >> 4)
                self._skip_item(kinds & 15)
