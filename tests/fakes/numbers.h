/* Arithmetic of NCCL's data types: sizes, names, and folding one array into another. */
#ifndef FAKE_NUMBERS_H
#define FAKE_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi_nccl.h"

enum { FOLD_PREMUL_SUM = ncclAvg + 1 };

size_t number_size(ncclDataType_t type); /* 0 for a type that this version lacks */
const char *number_name(ncclDataType_t type);
bool number_is_float(ncclDataType_t type);

/* into[i] = into[i] op from[i], rounded to the type (to nearest, ties to even). */
void fold(void *into, const void *from, size_t count, ncclDataType_t type, int op);
/* values[i] *= factor, where factor has the same type. */
void scale(void *values, size_t count, ncclDataType_t type, const void *factor);
/* Steps of an average: floats are multiplied by 1/ranks before the sum, integers divided after. */
void reciprocal(void *factor, ncclDataType_t type, int ranks);
void divide(void *values, size_t count, ncclDataType_t type, int ranks);

#endif
