/* See sums.h. */

#include "sums.h"

#include "copying.h"
#include "core.h"

#include <string.h>

/* Bytes of a block. Weights grow by one from word to word of a block, and have no pattern from block
   to block. */
#define BLOCK_BYTES ((size_t)64 << 10)
#define BLOCK_WEIGHT UINT64_C(0x9E3779B97F4A7C15)

/* Adds the words of whole steps: f(w) to *total, and f(w) times the word's index to *placed; returns
   the number of words. Each lane keeps the sum of its words, and the sum of these sums after each
   step. With n steps, the word of step i is part of n - i of them, so the multiplications by the
   index are left to the end. */
#define SUM_STEPS(NAME, ATTRIBUTE, BYTES, STORE)                                                   \
    ATTRIBUTE static size_t NAME(char *to, const char *bytes, size_t words, uint64_t *total,       \
                                 uint64_t *placed)                                                 \
    {                                                                                              \
        typedef uint64_t vector __attribute__((vector_size(BYTES)));                               \
        enum { WIDTH = BYTES / 8, VECTORS = 4, LANES = VECTORS * WIDTH };                          \
        vector sum[VECTORS] = {{0}}, sum_of_sums[VECTORS] = {{0}};                                 \
        size_t steps = words / LANES;                                                              \
        (void)to;                                                                                  \
        for (size_t step = 0; step < steps; step++)                                                \
            for (int i = 0; i < VECTORS; i++) {                                                    \
                size_t at = (step * VECTORS + (size_t)i) * BYTES;                                  \
                vector word;                                                                       \
                memcpy(&word, bytes + at, BYTES);                                                  \
                STORE(to + at, word);                                                              \
                sum[i] += word + (word >> 32);                                                     \
                sum_of_sums[i] += sum[i];                                                          \
            }                                                                                      \
        for (int lane = 0; lane < LANES; lane++) {                                                 \
            uint64_t of_lane = sum[lane / WIDTH][lane % WIDTH];                                    \
            *total += of_lane;                                                                     \
            *placed += (uint64_t)lane * of_lane                                                    \
                       + LANES * (steps * of_lane - sum_of_sums[lane / WIDTH][lane % WIDTH]);      \
        }                                                                                          \
        return steps * LANES;                                                                      \
    }

#define NO_STORE(to, word) (void)0
SUM_STEPS(sum_steps, , 16, NO_STORE)
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
/* Two stores of 16 bytes, for an address that is a multiple of 16. */
#define STORE_AROUND(to, word)                                                                     \
    do {                                                                                           \
        __m128i halves[2];                                                                         \
        memcpy(halves, &word, sizeof halves);                                                      \
        _mm_stream_si128((__m128i *)(void *)(to), halves[0]);                                      \
        _mm_stream_si128((__m128i *)(void *)(to) + 1, halves[1]);                                  \
    } while (0)
SUM_STEPS(sum_steps_avx2, AVX2, 32, NO_STORE)
SUM_STEPS(store_steps_avx2, AVX2, 32, STORE_AROUND)
#endif

/* Adds one word, or a part of it, whose other bytes are 0. */
static void add_word(struct sums *sums, uint64_t word, uint64_t weight)
{
    word += word >> 32;
    sums->total += word;
    sums->placed += weight * word;
}

/* Adds whole words; weight is that of the first. */
static void add_words(struct sums *sums, const char *bytes, size_t words, uint64_t weight)
{
    uint64_t total = 0, placed = 0, word;
    size_t done;
#if defined(__x86_64__)
    if (fold_levels() > 1)
        done = sum_steps_avx2(NULL, bytes, words, &total, &placed);
    else
#endif
        done = sum_steps(NULL, bytes, words, &total, &placed);
    sums->total += total;
    sums->placed += weight * total + placed;
    for (; done < words; done++) {
        memcpy(&word, bytes + 8 * done, sizeof word);
        add_word(sums, word, weight + done);
    }
}

void add_to_sums(struct sums *sums, size_t at, const char *bytes, size_t nbytes)
{
    sums->nbytes += nbytes;
    while (nbytes > 0) {
        size_t before = at % 8, left = BLOCK_BYTES - at % BLOCK_BYTES, length;
        uint64_t weight = (at / BLOCK_BYTES + 1) * BLOCK_WEIGHT + at % BLOCK_BYTES / 8;
        left = nbytes < left ? nbytes : left;
        if (before == 0 && left >= 8) {
            length = left / 8 * 8;
            add_words(sums, bytes, left / 8, weight);
        } else {
            uint64_t word = 0;
            length = left < 8 - before ? left : 8 - before;
            memcpy((char *)&word + before, bytes, length);
            add_word(sums, word, weight);
        }
        at += length, bytes += length, nbytes -= length;
    }
}

void copy_around_summed(struct sums *sums, size_t at, char *to, const char *bytes, size_t nbytes)
{
#if defined(__x86_64__)
    /* The loop needs whole words at addresses that are multiples of 16. It adds the words while it
       has them in registers. */
    while (fold_levels() > 1 && (uintptr_t)(to - at) % 8 == 0 && nbytes > 0) {
        size_t before = -(uintptr_t)to % 16, left = BLOCK_BYTES - at % BLOCK_BYTES, length;
        left = nbytes < left ? nbytes : left;
        if (before == 0 && left >= 128) {
            uint64_t weight = (at / BLOCK_BYTES + 1) * BLOCK_WEIGHT + at % BLOCK_BYTES / 8;
            uint64_t total = 0, placed = 0;
            length = 8 * store_steps_avx2(to, bytes, left / 8, &total, &placed);
            sums->total += total;
            sums->placed += weight * total + placed;
            sums->nbytes += length;
        } else { /* up to the next multiple of 16, or the few bytes that are left of a block */
            length = before == 0 || left < before ? left : before;
            memcpy(to, bytes, length);
            add_to_sums(sums, at, bytes, length);
        }
        at += length, to += length, bytes += length, nbytes -= length;
    }
    _mm_sfence(); /* as in copy_to_result */
#endif
    copy_to_result(to, bytes, nbytes, 1);
    add_to_sums(sums, at, bytes, nbytes);
}
