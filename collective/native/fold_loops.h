/* The loops of all folds, for one level of instructions. folds.c includes this file once for each
   level, and defines two macros before: LEVEL(name) is the name of a function at this level, and
   TARGET the attribute for its instructions. The file has no include guard, since it is included
   repeatedly. C allows a macro to be defined again with the same text.

   min and max compare floats as integers. IEEE 754 orders positive numbers as their bits are
   ordered. A negative number has the bits of its magnitude and the sign as the highest bit.
   Flipping all bits but the sign of negative numbers gives integers in the order of the numbers,
   with -0 just below +0. */

#define FOLD(NAME)                                                                          \
    TARGET static void LEVEL(NAME)(const void *left, const void *right, void *out, size_t count)

#define LOOP(NAME, TYPE, EXPRESSION)                                                        \
    FOLD(NAME)                                                                              \
    {                                                                                       \
        const TYPE *a = left, *b = right;                                                   \
        TYPE *result = out;                                                                 \
        INDEPENDENT                                                                         \
        for (size_t i = 0; i < count; i++) {                                                \
            TYPE x = a[i], y = b[i];                                                        \
            result[i] = (TYPE)(EXPRESSION);                                                 \
        }                                                                                   \
    }

/* Integers wrap, so C computes them as unsigned. Integers of 8 and 16 bits are widened to uint32_t:
   otherwise C would compute them in int, whose overflow is undefined. A signed sum has the same
   bits as the unsigned one. */
#define INTEGERS(BITS, WIDE)                                                                \
    LOOP(sum##BITS, uint##BITS##_t, (WIDE)x + (WIDE)y)                                      \
    LOOP(prod##BITS, uint##BITS##_t, (WIDE)x *(WIDE)y)                                      \
    LOOP(band##BITS, uint##BITS##_t, x & y)                                                 \
    LOOP(bor##BITS, uint##BITS##_t, x | y)                                                  \
    LOOP(bxor##BITS, uint##BITS##_t, x ^ y)                                                 \
    LOOP(land##BITS, uint##BITS##_t, (x != 0) & (y != 0))                                   \
    LOOP(lor##BITS, uint##BITS##_t, (x | y) != 0)                                           \
    LOOP(min_signed##BITS, int##BITS##_t, x < y ? x : y)                                    \
    LOOP(max_signed##BITS, int##BITS##_t, x > y ? x : y)                                    \
    LOOP(min_unsigned##BITS, uint##BITS##_t, x < y ? x : y)                                 \
    LOOP(max_unsigned##BITS, uint##BITS##_t, x > y ? x : y)

INTEGERS(8, uint32_t)
INTEGERS(16, uint32_t)
INTEGERS(32, uint32_t)
INTEGERS(64, uint64_t)

/* A boolean is a byte. Any value but 0 is true, as in NumPy. */
LOOP(and_bool, uint8_t, (x != 0) & (y != 0))
LOOP(or_bool, uint8_t, (x | y) != 0)
LOOP(xor_bool, uint8_t, (x != 0) ^ (y != 0))

/* If both operands are NaN, the result is the left one, made quiet. Without this macro the compiler
   would decide which NaN an addition returns, since it may swap the operands. A NaN added to
   itself, or multiplied by itself, is itself. */
#define LEFT_NAN(x, y) ((x) != (x) ? (x) : (y))

/* A fold of floats by arithmetic: a loop in the default floating-point mode. */
#define ARITHMETIC(NAME, TYPE, EXPRESSION)                                                  \
    LOOP(NAME##_loop, TYPE, EXPRESSION)                                                     \
    FOLD(NAME)                                                                              \
    {                                                                                       \
        mode_word mode = enter_default_mode();                                              \
        LEVEL(NAME##_loop)(left, right, out, count);                                        \
        leave_default_mode(mode);                                                           \
    }

ARITHMETIC(sum_float32, float, x + LEFT_NAN(x, y))
ARITHMETIC(prod_float32, float, x *LEFT_NAN(x, y))
ARITHMETIC(sum_float64, double, x + LEFT_NAN(x, y))
ARITHMETIC(prod_float64, double, x *LEFT_NAN(x, y))

/* bfloat16 is folded two at a time, as the two halves of a word. A mask or a shift turns each half
   into a float. Elements by themselves would have to be unpacked and packed, at half the speed. */
#define LOOP_BFLOAT16(NAME, OPERATOR)                                                       \
    TARGET static inline uint32_t LEVEL(NAME##_one)(uint32_t left, uint32_t right)          \
    {                                                                                       \
        float x = float_of(left), y = float_of(right);                                      \
        return rounded_to_bfloat16(x OPERATOR LEFT_NAN(x, y));                              \
    }                                                                                       \
    TARGET static inline uint32_t LEVEL(NAME##_two)(uint32_t x, uint32_t y)                 \
    {                                                                                       \
        uint32_t upper = LEVEL(NAME##_one)(x & 0xFFFF0000, y & 0xFFFF0000);                 \
        return (upper & 0xFFFF0000) | LEVEL(NAME##_one)(x << 16, y << 16) >> 16;            \
    }                                                                                       \
    LOOP(NAME##_pairs, two_bfloat16, LEVEL(NAME##_two)(x, y))                               \
    FOLD(NAME)                                                                              \
    {                                                                                       \
        const uint16_t *a = left, *b = right;                                               \
        mode_word mode = enter_default_mode();                                              \
        LEVEL(NAME##_pairs)(a, b, out, count / 2);                                          \
        if (count-- % 2)                                                                    \
            ((uint16_t *)out)[count] = (uint16_t)LEVEL(NAME##_two)(a[count], b[count]);     \
        leave_default_mode(mode);                                                           \
    }

LOOP_BFLOAT16(sum_bfloat16, +)
LOOP_BFLOAT16(prod_bfloat16, *)

/* With F16C the processor converts eight float16 at a time, with the same results as widen_float16
   and narrow_float16. */
#undef EIGHT_FLOAT16
#ifdef HAS_F16C
#define EIGHT_FLOAT16(OPERATOR)                                                             \
    for (; i + 8 <= count; i += 8) {                                                        \
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(a + i)));                 \
        __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(b + i)));                 \
        y = _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));                      \
        __m128i rounded = _mm256_cvtps_ph(x OPERATOR y, _MM_FROUND_TO_NEAREST_INT);         \
        _mm_storeu_si128((void *)(result + i), rounded);                                    \
    }
#else
#define EIGHT_FLOAT16(OPERATOR)
#endif

#define LOOP_FLOAT16(NAME, OPERATOR)                                                        \
    TARGET static inline uint16_t LEVEL(NAME##_one)(uint16_t left, uint16_t right)          \
    {                                                                                       \
        float x = widen_float16(left), y = widen_float16(right);                            \
        return narrow_float16(x OPERATOR LEFT_NAN(x, y));                                   \
    }                                                                                       \
    FOLD(NAME)                                                                              \
    {                                                                                       \
        const uint16_t *a = left, *b = right;                                               \
        uint16_t *result = out;                                                             \
        size_t i = 0;                                                                       \
        mode_word mode = enter_default_mode();                                              \
        EIGHT_FLOAT16(OPERATOR)                                                             \
        INDEPENDENT                                                                         \
        for (; i < count; i++)                                                              \
            result[i] = LEVEL(NAME##_one)(a[i], b[i]);                                      \
        leave_default_mode(mode);                                                           \
    }

LOOP_FLOAT16(sum_float16, +)
LOOP_FLOAT16(prod_float16, *)

/* minimum and maximum of IEEE 754-2019: -0 is less than +0. If either operand is NaN, the result is
   the quiet NaN without sign and payload. */
#define FLOATS(NAME, BITS, INFINITE, QUIET_NAN, ONE)                                        \
    TARGET static inline int##BITS##_t LEVEL(ordered_##NAME)(int##BITS##_t x)               \
    {                                                                                       \
        return x ^ ((x >> (BITS - 1)) & INT##BITS##_MAX);                                   \
    }                                                                                       \
    TARGET static inline int##BITS##_t LEVEL(pick_##NAME)(int##BITS##_t x, int##BITS##_t y, \
                                                          int##BITS##_t picked)             \
    {                                                                                       \
        int is_nan = ((x & INT##BITS##_MAX) > INFINITE) | ((y & INT##BITS##_MAX) > INFINITE); \
        return is_nan ? QUIET_NAN : picked;                                                 \
    }                                                                                       \
    LOOP(min_##NAME, int##BITS##_t,                                                         \
         LEVEL(pick_##NAME)(x, y,                                                           \
             LEVEL(ordered_##NAME)(x) < LEVEL(ordered_##NAME)(y) ? x : y))                  \
    LOOP(max_##NAME, int##BITS##_t,                                                         \
         LEVEL(pick_##NAME)(x, y,                                                           \
             LEVEL(ordered_##NAME)(x) > LEVEL(ordered_##NAME)(y) ? x : y))                  \
    /* Every value but +0 and -0 is true, also NaN; a true result is the number 1. */       \
    LOOP(land_##NAME, int##BITS##_t,                                                        \
         (x & INT##BITS##_MAX) != 0 && (y & INT##BITS##_MAX) != 0 ? ONE : 0)                \
    LOOP(lor_##NAME, int##BITS##_t, ((x | y) & INT##BITS##_MAX) != 0 ? ONE : 0)

FLOATS(float16, 16, 0x7C00, 0x7E00, 0x3C00)
FLOATS(bfloat16, 16, 0x7F80, 0x7FC0, 0x3F80)
FLOATS(float32, 32, 0x7F800000, 0x7FC00000, 0x3F800000)
FLOATS(float64, 64, 0x7FF0000000000000, 0x7FF8000000000000, 0x3FF0000000000000)

/* The divisor is first rounded to the type, as in NumPy; for bfloat16 it is rounded to float32. */
#define LOOP_DIVIDE(NAME, TYPE, REAL, QUOTIENT)                                             \
    TARGET static void LEVEL(NAME)(void *values, size_t count, int divisor)                 \
    {                                                                                       \
        TYPE *each = values;                                                                \
        mode_word mode = enter_default_mode();                                              \
        REAL by = (REAL)divisor;                                                            \
        for (size_t i = 0; i < count; i++) {                                                \
            TYPE x = each[i];                                                               \
            each[i] = (TYPE)(QUOTIENT);                                                     \
        }                                                                                   \
        leave_default_mode(mode);                                                           \
    }

LOOP_DIVIDE(divide_float32, float, float, x / by)
LOOP_DIVIDE(divide_float64, double, double, x / by)
LOOP_DIVIDE(divide_bfloat16, uint16_t, float,
            rounded_to_bfloat16(float_of((uint32_t)x << 16) / by) >> 16)

/* Complex numbers are added, and divided by a real number, as twice as many real numbers. */
#define COMPLEX(NAME, REAL)                                                                 \
    FOLD(sum_##NAME)                                                                        \
    {                                                                                       \
        LEVEL(sum_##REAL)(left, right, out, 2 * count);                                     \
    }                                                                                       \
    static void LEVEL(divide_##NAME)(void *values, size_t count, int divisor)               \
    {                                                                                       \
        LEVEL(divide_##REAL)(values, 2 * count, divisor);                                   \
    }

COMPLEX(complex64, float32)
COMPLEX(complex128, float64)

static divide_function *const LEVEL(divisions)[DTYPES] = {
    [FLOAT32] = LEVEL(divide_float32),     [FLOAT64] = LEVEL(divide_float64),
    [COMPLEX64] = LEVEL(divide_complex64), [COMPLEX128] = LEVEL(divide_complex128),
    [BFLOAT16] = LEVEL(divide_bfloat16),
};

#define BY_BITS(NAME)                                                                       \
    [INT8] = LEVEL(NAME##8), [UINT8] = LEVEL(NAME##8), [INT16] = LEVEL(NAME##16),           \
    [UINT16] = LEVEL(NAME##16), [INT32] = LEVEL(NAME##32), [UINT32] = LEVEL(NAME##32),      \
    [INT64] = LEVEL(NAME##64), [UINT64] = LEVEL(NAME##64)
#define BY_SIGN(NAME)                                                                       \
    [INT8] = LEVEL(NAME##_signed8), [UINT8] = LEVEL(NAME##_unsigned8),                      \
    [INT16] = LEVEL(NAME##_signed16), [UINT16] = LEVEL(NAME##_unsigned16),                  \
    [INT32] = LEVEL(NAME##_signed32), [UINT32] = LEVEL(NAME##_unsigned32),                  \
    [INT64] = LEVEL(NAME##_signed64), [UINT64] = LEVEL(NAME##_unsigned64)
#define BY_FLOAT(NAME)                                                                      \
    [FLOAT16] = LEVEL(NAME##_float16), [BFLOAT16] = LEVEL(NAME##_bfloat16),                 \
    [FLOAT32] = LEVEL(NAME##_float32), [FLOAT64] = LEVEL(NAME##_float64)

static const fold_table LEVEL(folds) = {
    [SUM] = {BY_BITS(sum), BY_FLOAT(sum), [COMPLEX64] = LEVEL(sum_complex64),
             [COMPLEX128] = LEVEL(sum_complex128)},
    [PROD] = {BY_BITS(prod), BY_FLOAT(prod)},
    [MIN] = {BY_SIGN(min), BY_FLOAT(min), [BOOL] = LEVEL(and_bool)},
    [MAX] = {BY_SIGN(max), BY_FLOAT(max), [BOOL] = LEVEL(or_bool)},
    [BAND] = {BY_BITS(band), [BOOL] = LEVEL(and_bool)},
    [BOR] = {BY_BITS(bor), [BOOL] = LEVEL(or_bool)},
    [BXOR] = {BY_BITS(bxor), [BOOL] = LEVEL(xor_bool)},
    [LAND] = {BY_BITS(land), BY_FLOAT(land), [BOOL] = LEVEL(and_bool)},
    [LOR] = {BY_BITS(lor), BY_FLOAT(lor), [BOOL] = LEVEL(or_bool)},
};

#undef LEVEL
#undef TARGET
