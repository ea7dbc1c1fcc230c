/* Arithmetic of NCCL's data types. Floats of 8 and 16 bits are computed as float, and rounded
 * after each step, as on the GPU. */
#include "numbers.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Format of a small float. Without infinity the largest pattern is NaN, and too large values
 * saturate. */
typedef struct {
    int exponent_bits, mantissa_bits, bias;
    bool infinite, saturates;
} format;

static const format half = {5, 10, 15, true, false};
static const format brain = {8, 7, 127, true, false};
static const format e4m3 = {4, 3, 7, false, true};
static const format e5m2 = {5, 2, 15, true, true}; /* as in CUDA's conversions: __NV_SATFINITE */

static float decode(unsigned bits, const format *f) {
    int top = (1 << f->exponent_bits) - 1;
    int exponent = (int)(bits >> f->mantissa_bits) & top;
    unsigned mantissa = bits & ((1u << f->mantissa_bits) - 1);
    float sign = bits >> (f->exponent_bits + f->mantissa_bits) & 1 ? -1.0f : 1.0f;
    if (exponent == top && f->infinite)
        return mantissa ? NAN : sign * INFINITY;
    if (exponent == top && mantissa == (1u << f->mantissa_bits) - 1)
        return NAN;
    if (!exponent)
        return sign * ldexpf((float)mantissa, 1 - f->bias - f->mantissa_bits);
    return sign * ldexpf((float)(mantissa | 1u << f->mantissa_bits),
                         exponent - f->bias - f->mantissa_bits);
}

static unsigned encode(float value, const format *f) {
    int m = f->mantissa_bits;
    unsigned top = (1u << f->exponent_bits) - 1;
    unsigned largest = f->infinite ? (top << m) - 1 : (top << m | ((1u << m) - 1)) - 1;
    unsigned sign = signbit(value) ? 1u << (f->exponent_bits + m) : 0;
    if (isnan(value))
        return sign | top << m | (f->infinite ? 1u << (m - 1) : (1u << m) - 1);
    value = fabsf(value);
    unsigned bits;
    if (isinf(value)) {
        bits = largest + 1;
    } else {
        int exponent = 0;
        frexpf(value, &exponent);
        exponent -= 1; /* value = 1.xxx * 2 ** exponent */
        if (value == 0 || exponent < 1 - f->bias)
            exponent = 1 - f->bias; /* subnormal: use the step of the smallest exponent */
        /* In last-place units. nearbyint rounds half to even; a carry raises the exponent. */
        double units = nearbyint(ldexp((double)value, m - exponent));
        bits = ((unsigned)(exponent + f->bias - 1) << m) + (unsigned)units;
    }
    if (bits > largest)
        bits = f->saturates ? largest : largest + 1;
    return sign | bits;
}

/* Tables for decoding. */
static float halves[1 << 16], brains[1 << 16], e4m3s[1 << 8], e5m2s[1 << 8];
static pthread_once_t filled = PTHREAD_ONCE_INIT;
static void fill_tables(void) {
    for (unsigned i = 0; i < 1 << 16; i++) {
        halves[i] = decode(i, &half);
        brains[i] = decode(i, &brain);
    }
    for (unsigned i = 0; i < 1 << 8; i++) {
        e4m3s[i] = decode(i, &e4m3);
        e5m2s[i] = decode(i, &e5m2);
    }
}

static const struct {
    const char *name;
    size_t size;
} types[ncclNumTypes] = {
    [ncclInt8] = {"int8", 1},       [ncclUint8] = {"uint8", 1},
    [ncclInt32] = {"int32", 4},     [ncclUint32] = {"uint32", 4},
    [ncclInt64] = {"int64", 8},     [ncclUint64] = {"uint64", 8},
    [ncclFloat16] = {"float16", 2}, [ncclFloat32] = {"float32", 4},
    [ncclFloat64] = {"float64", 8}, [ncclBfloat16] = {"bfloat16", 2},
    [ncclFloat8e4m3] = {"float8e4m3", 1}, [ncclFloat8e5m2] = {"float8e5m2", 1},
};

static int types_there(void) {
    return VERSION_SINCE(2, 24, 3) ? 12 : VERSION_SINCE(2, 10, 3) ? 10 : 9;
}

size_t number_size(ncclDataType_t type) {
    return (int)type < 0 || (int)type >= types_there() ? 0 : types[type].size;
}

const char *number_name(ncclDataType_t type) {
    return (int)type < 0 || (int)type >= ncclNumTypes ? "?" : types[type].name;
}

bool number_is_float(ncclDataType_t type) { return type >= ncclFloat16; }

/* IN converts a stored value into one for arithmetic, and OUT converts back. */
#define PLAIN(x) (x)
#define HALF_OUT(x) ((uint16_t)encode(x, &half))
#define BRAIN_OUT(x) ((uint16_t)encode(x, &brain))
#define E4M3_OUT(x) ((uint8_t)encode(x, &e4m3))
#define E5M2_OUT(x) ((uint8_t)encode(x, &e5m2))
#define HALF_IN(x) halves[x]
#define BRAIN_IN(x) brains[x]
#define E4M3_IN(x) e4m3s[x]
#define E5M2_IN(x) e5m2s[x]

/* max and min return NaN for a NaN operand. For integers a != a is always false. */
#define EACH(STORED, WIDE, IN, OUT, RESULT)                 \
    for (size_t i = 0; i < count; i++) {                    \
        WIDE a = IN(((STORED *)into)[i]);                   \
        WIDE b = IN(((const STORED *)from)[i]);             \
        (void)b;                                            \
        ((STORED *)into)[i] = (STORED)OUT((WIDE)(RESULT));  \
    }

#define FOLD(NAME, STORED, WIDE, IN, OUT)                                                      \
    static void fold_##NAME(void *into, const void *from, size_t count, int op) {              \
        switch (op) {                                                                          \
        case ncclProd: EACH(STORED, WIDE, IN, OUT, a * b) break;                               \
        case ncclMax: EACH(STORED, WIDE, IN, OUT, a != a || a > b ? a : b) break;              \
        case ncclMin: EACH(STORED, WIDE, IN, OUT, a != a || a < b ? a : b) break;              \
        default: EACH(STORED, WIDE, IN, OUT, a + b)                                            \
        }                                                                                      \
    }                                                                                          \
    static void scale_##NAME(void *into, size_t count, const void *factor) {                   \
        const STORED by = *(const STORED *)factor;                                             \
        const void *from = into;                                                               \
        EACH(STORED, WIDE, IN, OUT, a * IN(by))                                                \
    }                                                                                          \
    static void divide_##NAME(void *into, size_t count, int ranks) {                           \
        const void *from = into;                                                               \
        EACH(STORED, WIDE, IN, OUT, a / (WIDE)ranks)                                           \
    }

/* Signed sums and products are computed as unsigned, so that they wrap as on the GPU. Division
 * and comparison need the sign, so they have separate code. */
#define FOLD_SIGNED(NAME, SIGNED, UNSIGNED)                                                    \
    FOLD(NAME##_bits, UNSIGNED, UNSIGNED, PLAIN, PLAIN)                                        \
    static void fold_##NAME(void *into, const void *from, size_t count, int op) {              \
        if (op == ncclMax) {                                                                   \
            EACH(SIGNED, SIGNED, PLAIN, PLAIN, a > b ? a : b)                                  \
        } else if (op == ncclMin) {                                                            \
            EACH(SIGNED, SIGNED, PLAIN, PLAIN, a < b ? a : b)                                  \
        } else {                                                                               \
            fold_##NAME##_bits(into, from, count, op);                                         \
        }                                                                                      \
    }                                                                                          \
    static void scale_##NAME(void *into, size_t count, const void *factor) {                   \
        scale_##NAME##_bits(into, count, factor);                                              \
    }                                                                                          \
    static void divide_##NAME(void *into, size_t count, int ranks) {                           \
        const void *from = into;                                                               \
        EACH(SIGNED, SIGNED, PLAIN, PLAIN, a / (SIGNED)ranks)                                  \
    }

#pragma GCC diagnostic ignored "-Wunused-function"
FOLD_SIGNED(int8, int8_t, uint8_t)
FOLD_SIGNED(int32, int32_t, uint32_t)
FOLD_SIGNED(int64, int64_t, uint64_t)
FOLD(uint8, uint8_t, uint8_t, PLAIN, PLAIN)
FOLD(uint32, uint32_t, uint32_t, PLAIN, PLAIN)
FOLD(uint64, uint64_t, uint64_t, PLAIN, PLAIN)
FOLD(float16, uint16_t, float, HALF_IN, HALF_OUT)
FOLD(float32, float, float, PLAIN, PLAIN)
FOLD(float64, double, double, PLAIN, PLAIN)
FOLD(bfloat16, uint16_t, float, BRAIN_IN, BRAIN_OUT)
FOLD(e4m3, uint8_t, float, E4M3_IN, E4M3_OUT)
FOLD(e5m2, uint8_t, float, E5M2_IN, E5M2_OUT)

static const struct {
    void (*fold)(void *, const void *, size_t, int);
    void (*scale)(void *, size_t, const void *);
    void (*divide)(void *, size_t, int);
} work[ncclNumTypes] = {
#define WORK(NAME) {fold_##NAME, scale_##NAME, divide_##NAME}
    [ncclInt8] = WORK(int8),        [ncclUint8] = WORK(uint8),
    [ncclInt32] = WORK(int32),      [ncclUint32] = WORK(uint32),
    [ncclInt64] = WORK(int64),      [ncclUint64] = WORK(uint64),
    [ncclFloat16] = WORK(float16),  [ncclFloat32] = WORK(float32),
    [ncclFloat64] = WORK(float64),  [ncclBfloat16] = WORK(bfloat16),
    [ncclFloat8e4m3] = WORK(e4m3),  [ncclFloat8e5m2] = WORK(e5m2),
};

void fold(void *into, const void *from, size_t count, ncclDataType_t type, int op) {
    pthread_once(&filled, fill_tables);
    work[type].fold(into, from, count, op);
}

void scale(void *values, size_t count, ncclDataType_t type, const void *factor) {
    pthread_once(&filled, fill_tables);
    work[type].scale(values, count, factor);
}

void divide(void *values, size_t count, ncclDataType_t type, int ranks) {
    work[type].divide(values, count, ranks);
}

void reciprocal(void *factor, ncclDataType_t type, int ranks) {
    double value = 1.0 / ranks;
    float narrow = (float)value;
    uint16_t half_bits = HALF_OUT(narrow), brain_bits = BRAIN_OUT(narrow);
    uint8_t e4m3_bits = E4M3_OUT(narrow), e5m2_bits = E5M2_OUT(narrow);
    switch (type) {
    case ncclFloat64: memcpy(factor, &value, sizeof value); break;
    case ncclFloat32: memcpy(factor, &narrow, sizeof narrow); break;
    case ncclFloat16: memcpy(factor, &half_bits, sizeof half_bits); break;
    case ncclBfloat16: memcpy(factor, &brain_bits, sizeof brain_bits); break;
    case ncclFloat8e4m3: memcpy(factor, &e4m3_bits, sizeof e4m3_bits); break;
    default: memcpy(factor, &e5m2_bits, sizeof e5m2_bits);
    }
}
