/* Declarations for all files of the native core. module.c has the Python side of it. */
#ifndef COLLECTIVE_CORE_H
#define COLLECTIVE_CORE_H

#include <stddef.h>
#include <stdint.h>

/* Words of 64 bits are shared between ranks, and hold addresses and lengths. On another platform the
   core cannot be built, and the package does without it. */
_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8 && sizeof(ptrdiff_t) == 8,
               "the native core needs a 64-bit platform");
_Static_assert(__atomic_always_lock_free(8, 0) && __atomic_always_lock_free(4, 0),
               "the native core needs lock-free atomics of 4 and 8 bytes");

/* Version of the interface between C and __init__.py, and of the protocol between ranks whose cores
   were built at different times. It grows with each change that makes two versions incompatible. */
#define PROTOCOL 32

/* The codes of element types, as in collective/memory/dtypes.py. Codes travel between ranks, so
   they never change. The 8-bit floats come behind these; no rank folds them on the host. */
enum dtype {
    BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64,
    FLOAT16, FLOAT32, FLOAT64, COMPLEX64, COMPLEX128, BFLOAT16,
    DTYPES
};

enum op { SUM, PROD, MIN, MAX, BAND, BOR, BXOR, LAND, LOR, OPS };

/* Sets out[i] = left[i] op right[i] for count elements. All three arrays are aligned to the
   element. Out may be the same array as left or right, but must not overlap them in another way. */
typedef void fold_function(const void *left, const void *right, void *out, size_t count);

typedef fold_function *fold_table[OPS][DTYPES];

/* Divides count elements in place by the number of ranks, for a mean. */
typedef void divide_function(void *values, size_t count, int divisor);

/* Returns the number of instruction levels that this processor supports. The loops are compiled for
   level 0 (the compiler's default instructions), 1 (AVX2) and 2 (AVX-512). */
int fold_levels(void);

/* Returns NULL if the operator has no meaning for the type, or if C does not repeat NumPy's
   arithmetic: for the product of complex numbers. */
fold_function *find_fold(int level, enum op op, enum dtype dtype);

/* Returns NULL if the mean is not the quotient of the sum in the type's own arithmetic. */
divide_function *find_divide(int level, enum dtype dtype);

/* Bytes of an element, and its alignment: as in NumPy, that of the halves of a complex number. */
extern const size_t item_bytes[DTYPES], item_alignment[DTYPES];

/* Pauses for an instant between two polls of another rank's word. The hardware thread on the same
   core can run meanwhile, and the cache line can stay with the rank that writes it. */
static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static inline size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

#endif
