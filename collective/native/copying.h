/* Copies of long arrays: quick on every processor, and around the caches where these are too small. */
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
   (docs/measurements/native.md has the figures). */
static inline int beyond_caches(size_t nbytes, int in_place)
{
    size_t few = (size_t)32 << 20, cached = __atomic_load_n(&cached_bytes, __ATOMIC_RELAXED);
    return nbytes >= (in_place ? 3 * (cached < few ? cached : few) : cached);
}

/* Copies nbytes between arrays that do not overlap.

   C's memcpy copies more than 2 KiB by the string instruction (rep movsb) of x86. AMD's processors
   from Zen 3 on take 20 times as long for it if the destination lies 1 to 31 bytes behind the
   source, as places within their pages (glibc's bug 30994). This is a usual case: segments begin at
   a page, and NumPy's long arrays begin 16 bytes behind one. Parts of 2 KiB are copied with vectors.
   At other distances they would gain nothing, and lose up to a tenth (docs/measurements/native.md). */
static inline void copy(void *to, const void *from, size_t nbytes)
{
    enum { PAGE = 4096, SLOW = 32, LONGEST_WITH_VECTORS = 2048 };
    size_t behind = ((uintptr_t)to - (uintptr_t)from) % PAGE, at = 0;
    if (behind > 0 && behind < SLOW)
        for (; nbytes - at > LONGEST_WITH_VECTORS; at += LONGEST_WITH_VECTORS)
            memcpy((char *)to + at, (const char *)from + at, LONGEST_WITH_VECTORS);
    memcpy((char *)to + at, (const char *)from + at, nbytes - at);
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
    copy(to, from, nbytes);
}

#endif
