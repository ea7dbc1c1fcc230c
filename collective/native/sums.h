/* Checksums of results, for COLLECTIVE_CHECK=results; communicator/results.py has the same sums in
   NumPy.

   The bytes of an array are words of 64 bits. A word w counts as f(w) = w + (w >> 32), so that its
   upper half changes the lower bits of a sum, too. There are two sums modulo 2**64: that of f(w),
   and that of f(w) times the word's weight, which depends on its place in the array. A flip of one
   bit changes the first sum. An exchange of words or blocks changes the second.

   Both sums are linear in the bytes. So parts of an array may be added in any order, and a part may
   begin or end within a word. */
#ifndef COLLECTIVE_SUMS_H
#define COLLECTIVE_SUMS_H

#include <stddef.h>
#include <stdint.h>

struct sums {
    uint64_t total, placed;
    size_t nbytes; /* that have been added */
};

/* Adds nbytes of an array, which begin at the byte at of the array. */
void add_to_sums(struct sums *sums, size_t at, const char *bytes, size_t nbytes);

/* Does the same, and copies the bytes around the caches, as copy_to_result does. */
void copy_around_summed(struct sums *sums, size_t at, char *to, const char *bytes, size_t nbytes);

#endif
