/* Copies that leave the caches to others. */
#ifndef COLLECTIVE_COPYING_H
#define COLLECTIVE_COPYING_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* A result of so many bytes is in no cache any more when somebody reads it. The tests take less. */
#ifndef BEYOND_CACHES_BYTES
#define BEYOND_CACHES_BYTES ((size_t)48 << 20)
#endif

/* Copies a part of a result of whole bytes. A store fetches the line that it writes to from memory
   first; to a result that the caches do not hold it is made around them, where a processor can,
   which saves a third of what goes over the bus. C's own memcpy does so by the length of the one
   copy, and here that is a chunk. */
static inline void copy_to_result(char *to, const char *from, size_t nbytes, size_t whole)
{
#if defined(__x86_64__)
    if (whole >= BEYOND_CACHES_BYTES) {
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
    (void)whole;
    memcpy(to, from, nbytes);
}

#endif
