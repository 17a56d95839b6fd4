"""The tables of a scan: the position and topic of each message, and a hash table of topics.

Each scanner owns one `Groups` and reuses its memory. The interpreter lock gives a scan exclusive
use of it, as long as no finalizer runs: the garbage collector is off until the batches are made.
`topic` points into the scanned buffer.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from polybus.scan._bytes cimport hash_bytes, same_bytes

cdef extern from "Python.h":
    bint PyGC_Disable()
    bint PyGC_Enable()

cdef struct Found:
    const uint8_t* topic
    int32_t topic_bytes
    int32_t slot
    uint64_t hash
    int32_t count
    int32_t marked  # set by the scanner: a message of the topic needs more than its span
    int64_t value_bytes

cdef struct Entry:
    int32_t group
    int32_t start
    int32_t end
    int32_t extra  # for the scanner's own use

cdef struct Groups:
    Found* found
    Py_ssize_t count
    Py_ssize_t found_max
    int32_t* slots
    Py_ssize_t slots_max
    uint64_t seed  # random, so that a peer cannot choose topics that all hash to one slot
    Entry* entries
    Py_ssize_t entries_count
    Py_ssize_t entries_max


cdef inline int grow_entries(Groups* groups) except -1:
    cdef Py_ssize_t wanted = 4096 if groups.entries_max == 0 else groups.entries_max * 2
    cdef Entry* grown = <Entry*> realloc(groups.entries, wanted * sizeof(Entry))
    if grown == NULL:
        raise MemoryError()
    groups.entries = grown
    groups.entries_max = wanted
    return 0


cdef inline Entry* new_entry(Groups* groups, Py_ssize_t count, int32_t group) except NULL:
    """The entry of the next message, of this group, after `count` others.

    The caller keeps the count in a register and sets `entries_count` at the end.
    """
    if count == groups.entries_max:
        grow_entries(groups)
    cdef Entry* entry = &groups.entries[count]
    groups.found[group].count += 1
    entry.group = group
    return entry


cdef inline void begin_scan(Groups* groups) noexcept:
    """Forget the groups of the last scan: empty its slots, and not the whole table."""
    cdef Py_ssize_t group
    if groups.slots != NULL:
        for group in range(groups.count):
            groups.slots[groups.found[group].slot] = -1
    groups.count = 0


cdef inline int rehash(Groups* groups) except -1:
    """Make the slots at least four times the groups, and enter all groups again."""
    cdef Py_ssize_t wanted = 64 if groups.slots_max == 0 else groups.slots_max
    cdef Py_ssize_t group
    cdef Py_ssize_t slot
    while wanted < 4 * groups.count:
        wanted *= 2
    if wanted != groups.slots_max:
        free(groups.slots)
        groups.slots_max = 0
        groups.slots = <int32_t*> malloc(wanted * sizeof(int32_t))
        if groups.slots == NULL:
            raise MemoryError()
        groups.slots_max = wanted
    memset(groups.slots, 0xFF, wanted * sizeof(int32_t))
    for group in range(groups.count):
        slot = groups.found[group].hash & (wanted - 1)
        while groups.slots[slot] >= 0:
            slot = (slot + 1) & (wanted - 1)
        groups.slots[slot] = <int32_t> group
        groups.found[group].slot = <int32_t> slot
    return 0


cdef inline int32_t new_group(
    Groups* groups, const uint8_t* topic, int32_t topic_bytes, uint64_t hashed, int32_t slot
) except -1:
    cdef Found* one
    cdef Py_ssize_t wanted
    if groups.count == groups.found_max:
        wanted = 32 if groups.found_max == 0 else groups.found_max * 2
        one = <Found*> realloc(groups.found, wanted * sizeof(Found))
        if one == NULL:
            raise MemoryError()
        groups.found = one
        groups.found_max = wanted
    one = &groups.found[groups.count]
    memset(one, 0, sizeof(Found))
    one.topic = topic
    one.topic_bytes = topic_bytes
    one.hash = hashed
    one.slot = slot
    groups.count += 1
    return <int32_t> (groups.count - 1)


cdef inline int32_t group_of(
    Groups* groups, const uint8_t* topic, int32_t topic_bytes
) except -1:
    """The number of the topic's group; a topic that is new to the scan gets a new one."""
    cdef uint64_t hashed = hash_bytes(topic, topic_bytes, groups.seed)
    cdef Py_ssize_t slot
    cdef Found* one
    if 2 * groups.count >= groups.slots_max:
        rehash(groups)
    slot = hashed & (groups.slots_max - 1)
    while groups.slots[slot] >= 0:
        one = &groups.found[groups.slots[slot]]
        if (
            one.hash == hashed
            and one.topic_bytes == topic_bytes
            and same_bytes(one.topic, topic, topic_bytes)
        ):
            return groups.slots[slot]
        slot = (slot + 1) & (groups.slots_max - 1)
    # First the group: a slot must not refer to one that could not be made.
    groups.slots[slot] = new_group(groups, topic, topic_bytes, hashed, <int32_t> slot)
    return groups.slots[slot]
