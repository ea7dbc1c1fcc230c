/* Copies that do not fill the caches with their results. */
#ifndef COLLECTIVE_COPYING_H
#define COLLECTIVE_COPYING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* Bytes of a call's arrays, of all ranks of the host together, that the last cache holds; see
   module.c. */
extern size_t cached_bytes;

/* Whether a call that reads and writes nbytes writes its results around the caches. A call in place
   has just read the cache lines that it writes, so it writes to the caches up to a larger nbytes
   (docs/decisions/0069-copies-around-the-caches.md has the figures). */
static inline int beyond_caches(size_t nbytes, int in_place)
{
    size_t few = (size_t)32 << 20, cached = __atomic_load_n(&cached_bytes, __ATOMIC_RELAXED);
    return nbytes >= (in_place ? 3 * (cached < few ? cached : few) : cached);
}

/* Copies a part of a result. An ordinary store first fetches the cache line that it writes from
   memory. If the caches do not hold the result (around is true), the copy uses stores around the
   caches, on processors that have them. This saves a third of the bus traffic. C's own memcpy
   decides this by the length of a single copy, which here is only that of a chunk. */
static inline void copy_to_result(char *to, const char *from, size_t nbytes, int around)
{
#if defined(__x86_64__)
    if (around) {
        size_t before = -(uintptr_t)to % 16 < nbytes ? -(uintptr_t)to % 16 : nbytes, at = before;
        memcpy(to, from, before);
        for (; at + 64 <= nbytes; at += 64) {
            __m128i parts[4];
            memcpy(parts, from + at, sizeof parts);
            for (int i = 0; i < 4; i++)
                _mm_stream_si128((__m128i *)(void *)(to + at) + i, parts[i]);
        }
        memcpy(to + at, from + at, nbytes - at);
        /* Stores around the caches are not ordered. The fence puts them before the later store that
           announces the data. */
        _mm_sfence();
        return;
    }
#endif
    (void)around;
    memcpy(to, from, nbytes);
}

#endif
