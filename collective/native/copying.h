/* Copies that leave the caches to others. */
#ifndef COLLECTIVE_COPYING_H
#define COLLECTIVE_COPYING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* What the last cache holds of all arrays of a call, on all ranks of the host; see module.c. */
extern size_t cached_bytes;

/* Whether a call that reads and writes so many bytes leaves nothing of its results in the caches.
   Lines that it has just read, as it has where it works in place, are written where they are until
   there are far more of them (docs/decisions.md has the figures). */
static inline int beyond_caches(size_t nbytes, int in_place)
{
    size_t few = (size_t)32 << 20;
    return nbytes >= (in_place ? 3 * (cached_bytes < few ? cached_bytes : few) : cached_bytes);
}

/* Copies a part of a result. A store fetches the line that it writes to from memory first; to a
   result that the caches do not hold it is made around them, where a processor can, which saves a
   third of what goes over the bus. C's own memcpy does so by the length of the one copy, and here
   that is a chunk. */
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
        _mm_sfence(); /* before anything that says that it is there */
        return;
    }
#endif
    (void)around;
    memcpy(to, from, nbytes);
}

#endif
