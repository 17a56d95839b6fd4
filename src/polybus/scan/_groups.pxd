"""A table of topics for a scan: finds the number of a topic's group by hash, without the heap.

Each scanner that includes this owns one `Groups`, kept between scans; the interpreter lock makes it
that scan's for its time. `topic` points into the scanned buffer.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from polybus.scan._bytes cimport hash_bytes, same_bytes

cdef struct Found:
    const uint8_t* topic
    int32_t topic_bytes
    uint64_t hash
    int32_t count
    int32_t escaped
    int64_t value_bytes

cdef struct Groups:
    Found* found
    Py_ssize_t count
    Py_ssize_t found_max
    int32_t* slots
    Py_ssize_t slots_max
    uint64_t seed  # random, so that nobody can choose topics that all land in one slot


cdef inline int rehash(Groups* groups) except -1:
    """Make the slots at least four times the groups, and enter all groups anew."""
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
    return 0


cdef inline int32_t new_group(
    Groups* groups, const uint8_t* topic, int32_t topic_bytes, uint64_t hashed
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
    groups.count += 1
    return <int32_t> (groups.count - 1)


cdef inline int32_t group_of(
    Groups* groups, const uint8_t* topic, int32_t topic_bytes
) except -1:
    """The number of the topic's group, a new one if the scan has not met it."""
    cdef uint64_t hashed = hash_bytes(topic, topic_bytes, groups.seed)
    cdef Py_ssize_t slot
    cdef Found* one
    if groups.count == 0 or 2 * groups.count >= groups.slots_max:
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
    groups.slots[slot] = <int32_t> groups.count
    return new_group(groups, topic, topic_bytes, hashed)
