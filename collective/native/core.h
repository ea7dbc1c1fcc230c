/* What the files of the native core share. Python's side of it is in module.c. */
#ifndef COLLECTIVE_CORE_H
#define COLLECTIVE_CORE_H

#include <stddef.h>
#include <stdint.h>

/* Grows whenever the two sides of __init__.py, or two ranks that have built the core at different
   times, would no longer understand each other. */
#define PROTOCOL 14

/* The codes of element types are those of collective/memory/dtypes.py, where a position is a
   promise: it travels. The 8-bit floats behind these are folded by nobody on the host. */
enum dtype {
    BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64,
    FLOAT16, FLOAT32, FLOAT64, COMPLEX64, COMPLEX128, BFLOAT16,
    DTYPES
};

enum op { SUM, PROD, MIN, MAX, BAND, BOR, BXOR, LAND, LOR, OPS };

/* Sets out[i] = left[i] op right[i] for count elements. All three are aligned as the element is;
   out may be left or right, and overlaps them in no other way. */
typedef void fold_function(const void *left, const void *right, void *out, size_t count);

typedef fold_function *fold_table[OPS][DTYPES];

/* Divides count elements in place, as the mean of so many ranks wants it. */
typedef void divide_function(void *values, size_t count, int divisor);

/* The loops are compiled for several levels of a processor's instructions: 0 the compiler's own, 1
   AVX2, 2 AVX-512. This many can run here. */
int fold_levels(void);

/* Returns NULL if the operator has no meaning for the type, or NumPy's arithmetic is not ours to
   repeat: the product of complex numbers. */
fold_function *find_fold(int level, enum op op, enum dtype dtype);

/* NULL where a mean is no quotient of the sum in the type's own arithmetic. */
divide_function *find_divide(int level, enum dtype dtype);

extern const size_t item_bytes[DTYPES];

/* Between two looks at a word of another rank's: leaves the core to whom it shares it with, and the
   line to whom it belongs. */
static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

#endif
