"""Small work on bytes that the scanners' loops do for every message: no calls, few branches."""

from libc.stdint cimport uint8_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    #if defined(__GNUC__)
    #define POLYBUS_PREFETCH(at) __builtin_prefetch(at)
    #else
    #define POLYBUS_PREFETCH(at) ((void)(at))
    #endif

    static inline uint64_t polybus_load(const uint8_t *at) {
        uint64_t word;
        memcpy(&word, at, 8);
        return word;
    }

    static inline uint64_t polybus_mix(uint64_t word) {
        word ^= word >> 32;
        word *= 0xd6e8feb86659fd93ULL;
        word ^= word >> 32;
        word *= 0xd6e8feb86659fd93ULL;
        return word ^ (word >> 32);
    }

    /* The last word of a long name may overlap the one before. */
    static inline uint64_t polybus_hash(const uint8_t *at, size_t size, uint64_t seed) {
        uint64_t hash = seed ^ size, word = 0;
        size_t done;
        if (size < 8) {
            memcpy(&word, at, size);
            return polybus_mix(hash ^ word);
        }
        for (done = 0; done + 8 < size; done += 8)
            hash = polybus_mix(hash ^ polybus_load(at + done));
        return polybus_mix(hash ^ polybus_load(at + size - 8));
    }

    /* Names mostly differ at their ends, so those come first. */
    static inline int polybus_same(const uint8_t *one, const uint8_t *other, size_t size) {
        if (size < 8 || size > 16)
            return memcmp(one, other, size) == 0;
        return polybus_load(one + size - 8) == polybus_load(other + size - 8)
            && polybus_load(one) == polybus_load(other);
    }

    /* What is copied lies far apart, and the memory is told what comes next. */
    static inline void polybus_prefetch(const char *at, size_t size) {
        POLYBUS_PREFETCH(at);
        if (size > 64)
            POLYBUS_PREFETCH(at + 64);
    }
    """
    uint64_t hash_bytes "polybus_hash"(const uint8_t* at, size_t size, uint64_t seed) noexcept nogil
    bint same_bytes "polybus_same"(
        const uint8_t* one, const uint8_t* other, size_t size
    ) noexcept nogil
    void prefetch "polybus_prefetch"(const char* at, size_t size) noexcept nogil
