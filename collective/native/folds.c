/* The folds: out = left op right, with the same bits as collective/algorithms/arithmetic.py.

   The loops are in fold_loops.h, in plain C. They are compiled once for each level of instructions
   below, and the compiler vectorises them. The highest level that the processor supports is
   determined once, at run time. This needs no ifunc, which not every C library has. */

#include "core.h"

#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_LEVELS 1
#include <cpuid.h>
#include <immintrin.h>
#endif

const size_t item_bytes[DTYPES] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 8, 16, 2};
const size_t item_alignment[DTYPES] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 4, 8, 2};

/* Tells the compiler that no iteration depends on another. That is true, since out is the same
   array as an input, or does not overlap the inputs. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

/* The floating-point mode of this thread may differ from that of other ranks: a library built with
   -ffast-math, or torch.set_flush_denormal, flushes subnormal numbers to zero, and a program may
   change the rounding. Each rank folds short calls itself, so a fold in another mode would give other
   bits on this rank, in silence. So each fold of floats computes in the default mode. To read the
   mode takes a nanosecond or two. It is written only if it differs, which takes longer.

   The mode is the bits of MXCSR or FPCR that change results. Which exceptions trap is left as it is.
   On other processors the folds compute in the mode of the thread. */
#if defined(__x86_64__)
#define MODE 0xE040u /* flush to zero, rounding, denormals are zeros */
typedef uint32_t mode_word;
static inline mode_word read_mode(void)
{
    mode_word mode;
    __asm__ __volatile__("stmxcsr %0" : "=m"(mode) : : "memory");
    return mode;
}
static inline void write_mode(mode_word mode)
{
    __asm__ __volatile__("ldmxcsr %0" : : "m"(mode) : "memory");
}
#elif defined(__aarch64__)
/* AHP, DN, FZ, rounding, FZ16, NEP, AH and FIZ */
#define MODE 0x07C80007u
typedef uint64_t mode_word;
static inline mode_word read_mode(void)
{
    mode_word mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
}
static inline void write_mode(mode_word mode)
{
    __asm__ __volatile__("msr fpcr, %0" : : "r"(mode) : "memory");
}
#else
#define MODE 0u
typedef uint32_t mode_word;
static inline mode_word read_mode(void)
{
    return 0;
}
static inline void write_mode(mode_word mode)
{
    (void)mode;
}
#endif

/* Sets the default mode; returns the mode of the thread, for leave_default_mode(). Both are barriers
   to the compiler for loads and stores, so it moves no fold's arithmetic out from between them. */
static inline mode_word enter_default_mode(void)
{
    mode_word mode = read_mode();
    if (mode & MODE)
        write_mode(mode & ~(mode_word)MODE);
    return mode;
}

static inline void leave_default_mode(mode_word mode)
{
    __asm__ __volatile__("" : : : "memory");
    if (mode & MODE)
        write_mode(mode);
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* bfloat16 is the upper half of a float32. Returns a word whose upper half is the nearest bfloat16;
   a tie goes to the even one. Adding 0x7FFF and the lowest bit of the upper half carries into that
   half exactly when the value must round up. A NaN is only made quiet, since a carry could turn it
   into an infinity. */
static inline uint32_t rounded_to_bfloat16(float value)
{
    uint32_t bits = bits_of(value);
    return value != value ? bits | 0x400000 : bits + 0x7FFF + ((bits >> 16) & 1);
}

/* Two bfloat16 in one word. The type is aligned like a single bfloat16, and may alias other
   types. */
typedef uint32_t two_bfloat16 __attribute__((aligned(2), may_alias));

/* float16 has 5 bits of exponent and 10 bits of fraction. A number that may be too small for a
   normal float is handled as an integer. Otherwise a process that flushes such floats to zero would
   get other results. */
static inline float widen_float16(uint16_t bits)
{
    uint32_t magnitude = bits & 0x7FFF, sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
    uint32_t special = (magnitude << 13) | 0x7F800000; /* an infinity or NaN */
    uint32_t small = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t value = magnitude < 0x400 ? small : magnitude < 0x7C00 ? normal : special;
    return float_of(value | sign);
}

static inline uint16_t narrow_float16(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    /* The last bit of 0.5f is worth the smallest float16, so the addition rounds to a multiple of
       that. */
    uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t nan = 0x7E00 | ((magnitude >> 13) & 0x3FF);
    uint32_t rounded = normal > 0x7C00 ? 0x7C00 : normal;
    uint32_t result = magnitude < (127 - 14) << 23 ? small : rounded;
    result = magnitude > 0x7F800000 ? nan : result;
    return (uint16_t)(result | ((bits >> 16) & 0x8000));
}

#define LEVEL(name) name##_baseline
#define TARGET
#include "fold_loops.h"

#ifdef HAS_LEVELS
#define HAS_F16C 1
#define LEVEL(name) name##_avx2
#define TARGET __attribute__((target("avx2,f16c")))
#include "fold_loops.h"

#define LEVEL(name) name##_avx512
#define AVX512 "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#ifdef __clang__
#define TARGET __attribute__((target(AVX512), min_vector_width(512)))
#else
#define TARGET __attribute__((target(AVX512 ",prefer-vector-width=512")))
#endif
#include "fold_loops.h"
#endif

static const struct level {
    const fold_table *folds;
    divide_function *const *divisions;
} levels[] = {
    {&folds_baseline, divisions_baseline},
#ifdef HAS_LEVELS
    {&folds_avx2, divisions_avx2},
    {&folds_avx512, divisions_avx512},
#endif
};

/* Returns the number of supported levels. Each level needs all levels before it. */
static int supported_levels(void)
{
#ifdef HAS_LEVELS
    /* f16c is looked up by cpuid, since not every compiler's __builtin_cpu_supports knows it. */
    unsigned int a, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C))
        return 1;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")
        || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 2;
    return 3;
#else
    return 1;
#endif
}

int fold_levels(void)
{
    /* Computed once: in a virtual machine cpuid takes microseconds. */
    static int levels_here;
    int found = __atomic_load_n(&levels_here, __ATOMIC_RELAXED);
    if (found == 0) {
        found = supported_levels();
        __atomic_store_n(&levels_here, found, __ATOMIC_RELAXED);
    }
    return found;
}

fold_function *find_fold(int level, enum op op, enum dtype dtype)
{
    return (*levels[level].folds)[op][dtype];
}

divide_function *find_divide(int level, enum dtype dtype)
{
    return levels[level].divisions[dtype];
}
