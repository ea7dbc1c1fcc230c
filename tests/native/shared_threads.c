/* Stress test of collectives: each rank is a thread. The lengths of the calls are random, around
   those at which a call changes its method. At the end one rank gives up in the middle of a call.
   test_shared.py builds and runs the program, and so does `make sanitize`, both under sanitizers.

   Usage: shared_threads RANKS CALLS AREA_BYTES SEED */

#define _GNU_SOURCE
#include "shared.h"
#include "copying.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t cached_bytes = 512; /* longer copies bypass the caches */

enum { MOST_RANKS = 16, GUARD = 64 };

static const char *const names[OPERATIONS] = {
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
    "gather", "scatter", "scan"};

static int ranks, calls;
static size_t area_bytes, heap_bytes;
static unsigned seed;
static struct stage stages[MOST_RANKS];
/* The counter says that a rank naps, so that the flags of all ranks are checked. */
static uint32_t sleepers = 1;
static char *heaps[MOST_RANKS];
static uint64_t broken; /* set by the rank that gives up */

/* Random generator with the same numbers on all ranks and machines (Marsaglia's xorshift). */
static uint32_t draw(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

/* Wait for a word. The context is the number of waits before this rank gives up; NULL: never. */
static int wait_for(void *context, int rank, const uint64_t *word, uint64_t value, uint64_t most)
{
    int *patience = context;
    (void)rank;
    if (patience != NULL && (*patience)-- == 0) {
        __atomic_store_n(&broken, 1, __ATOMIC_RELAXED);
        return -1;
    }
    while (!reached(word, value, most)) {
        if (__atomic_load_n(&broken, __ATOMIC_RELAXED) && !reached(word, value, most))
            return -1;
        sched_yield();
    }
    return 0;
}

/* Input of a rank at an index in a call. Sums of inputs wrap. */
static uint32_t element(int call, int rank, size_t index)
{
    return (uint32_t)(index * 2654435761u) ^ (uint32_t)(call * 40503u + rank * 2246822519u);
}

/* As if the processor had the baseline's instructions only: folds.c takes long to compile. */
int fold_levels(void)
{
    return 1;
}

/* A fold like those of folds.c. */
static void sum(const void *left, const void *right, void *out, size_t count)
{
    const uint32_t *a = left, *b = right;
    uint32_t *result = out;
    for (size_t i = 0; i < count; i++)
        result[i] = a[i] + b[i];
}

static uint32_t summed(int call, int number, size_t index)
{
    uint32_t total = 0;
    for (int rank = 0; rank < number; rank++)
        total += element(call, rank, index);
    return total;
}

/* Expected result of a rank at an index. */
static uint32_t wanted(const struct plan *p, int call, int rank, size_t i)
{
    size_t start = p->starts[rank], piece = p->starts[rank + 1] - start;
    int from = 0;
    switch (p->operation) {
    case BROADCAST:
        return element(call, p->root, i);
    case SCATTER:
        return element(call, p->root, start + i);
    case REDUCE_SCATTER:
        return summed(call, ranks, start + i);
    case SCAN:
        return summed(call, rank + 1, i);
    case ALL_TO_ALL:
        return element(call, (int)(i / piece), start + i % piece);
    case GATHER:
    case ALL_GATHER:
        while (i >= p->starts[from + 1])
            from++;
        return element(call, from, i - p->starts[from]);
    default:
        return summed(call, ranks, i);
    }
}

static void check(int right, const char *what, int call, int rank, size_t count)
{
    if (!right) {
        fprintf(stderr, "%s: call %d of %zu elements is wrong on rank %d\n", what, call, count,
                rank);
        exit(1);
    }
}

/* A random length: near the end of a piece, block or area, or short enough for a line, or any. */
static size_t length(uint32_t *state)
{
    size_t unit = area_bytes / sizeof(uint32_t) / (2u << draw(state) % 4);
    if (draw(state) % 3 == 0)
        return draw(state) % 20;
    if (draw(state) % 4 == 0)
        return draw(state) % (unit * 8);
    size_t around = unit * (draw(state) % 10) * (draw(state) % 2 ? 1 : ranks) + draw(state) % 3;
    return around > 0 ? around - 1 : 0;
}

static void one_call(struct shared *shared, struct plan *p, int call, int symmetric, int in_place)
{
    int rank = shared->rank;
    size_t starts[MOST_RANKS + 1], *given = p->starts, count = p->count;
    size_t inputs = input_bytes(shared, p) / 4, outputs = output_bytes(shared, p) / 4;
    size_t at = start_of(shared, p, rank), room = (symmetric ? heap_bytes / 4 : 8 * count + 999);
    uint32_t *memory = symmetric ? (uint32_t *)heaps[rank] : malloc(room * sizeof *memory);
    uint32_t *src = memory + GUARD, *dst = src + inputs + GUARD;
    if (in_place && p->operation != ALL_TO_ALL && inputs && outputs) {
        dst = splits(p) ? src + at : src;
        src = joins(p) ? dst + at : src;
    }
    uint32_t *end = inputs > 0 && src + inputs > dst + outputs ? src + inputs : dst + outputs;
    memset(memory, 0x5A, (size_t)((char *)(end + GUARD) - (char *)memory));
    for (size_t i = 0; i < inputs; i++)
        src[i] = element(call, rank, i);
    shared_locate(shared, p, src, dst);
    /* In every other call the core computes the sums of what it copies to the result. */
    struct sums sums = {0, 0, 0}, whole = {0, 0, 0};
    shared->sums = call % 2 ? &sums : NULL;
    shared->all_announced = 0;
    check(shared_call(shared, p, src, dst) == 0, "arriving", call, rank, count);
    shared->sums = NULL;
    if (p->operation == ALL_REDUCE && sums.nbytes > 0) {
        add_to_sums(&whole, 0, (const char *)dst, outputs * 4);
        check(memcmp(&sums, &whole, sizeof sums) == 0, "a checksum", call, rank, count);
        /* All ranks have this result, and have announced its sums. */
        check(shared->all_announced, "an announcement", call, rank, count);
        for (int each = 0; each < ranks; each++)
            check(memcmp(shared->announced + ANNOUNCED * each, &sums, 2 * sizeof(uint64_t)) == 0,
                  "an announced checksum", call, rank, count);
    }
    /* The check needs the starts of the pieces, even if the call does not give them. */
    for (int each = 0; each <= ranks; each++)
        starts[each] = start_of(shared, p, each);
    p->starts = starts;
    for (size_t i = 0; i < outputs; i++)
        check(dst[i] == wanted(p, call, rank, i), names[p->operation], call, rank, count);
    p->starts = given;
    for (size_t i = 0; i < GUARD; i++)
        check(memory[i] == 0x5A5A5A5A && end[i] == 0x5A5A5A5A, "a guard", call, rank, count);
    /* Overwrite the memory at once, as its owner may do after the call. */
    memset(memory, call, (size_t)((char *)end - (char *)memory));
    if (!symmetric)
        free(memory);
}

/* Make calls until a rank has given up. The calls use symmetric memory and stages, because it
   matters where that rank gives up. No rank changes its memory after its call has failed, but peers
   may still read and write as the protocol allows. The sanitizers check these accesses, and those
   to the word that says that a rank has failed. */
static void break_off(struct shared *shared, uint32_t *state)
{
    int patience = (int)(draw(state) % 12), victim = (int)(draw(state) % ranks), failed = 0;
    size_t count = area_bytes / 2, nbytes = count * sizeof(uint32_t);
    char *memory = calloc(2, nbytes);
    for (int call = 0; !failed; call++) {
        struct plan p = {.operation = ALL_REDUCE, .fold = sum, .item = 4, .count = count,
                         .digest = 5 + call};
        char *src = call % 2 ? heaps[shared->rank] : memory, *dst = call % 4 < 2 ? src : src + nbytes;
        shared->context = shared->rank == victim && call > 4 ? &patience : NULL;
        shared_locate(shared, &p, src, dst);
        failed = shared_call(shared, &p, src, dst);
    }
    check(failed == BROKEN || failed == -1, "breaking off", failed, shared->rank, count);
    free(memory);
}

/* Callback while other ranks arrive; there is nothing to do. */
static void go_on(void *context)
{
    (void)context;
}

static void *rank_main(void *argument)
{
    struct shared shared = {.rank = (int)(intptr_t)argument, .size = ranks, .stages = stages,
                            .area_bytes = area_bytes, .least_long = area_bytes / 32 * 3,
                            .looks = 20, .wait = wait_for, .arrived = go_on,
                            .broken = &broken, .sleepers = &sleepers,
                            .sources = calloc(ranks, sizeof(char *)),
                            .results = calloc(ranks, sizeof(char *)),
                            .announced = calloc(ranks, ANNOUNCED * sizeof(uint64_t))};
    /* The segment of all ranks, between two that only this rank knows. */
    struct segment *segments[3];
    for (int i = 0; i < 3; i++) {
        segments[i] = malloc(sizeof **segments + (size_t)ranks * sizeof(char *));
        *segments[i] = (struct segment){i == 1 ? 7 : 100 + 2 * (uint64_t)shared.rank + i, heap_bytes};
        for (int rank = 0; rank < ranks; rank++)
            segments[i]->parts[rank] = heaps[rank] + (ptrdiff_t)(i - 1) * (ptrdiff_t)heap_bytes;
    }
    shared.segments = segments;
    shared.known = shared.room = 3;
    uint32_t state = seed * 2654435761u + 1;
    for (int call = 0; call < calls; call++) {
        size_t starts[MOST_RANKS + 1] = {0}, longest = 0;
        struct plan p = {.operation = (int)(draw(&state) % OPERATIONS), .fold = NULL, .item = 4,
                         .root = (int)(draw(&state) % ranks), .digest = 1000 + call,
                         .count = length(&state)};
        if (p.operation == ALL_REDUCE || p.operation == REDUCE || p.operation == SCAN
            || p.operation == REDUCE_SCATTER)
            p.fold = sum;
        if (splits(&p) || joins(&p)) {
            for (int rank = 0; rank < ranks; rank++) {
                size_t piece = draw(&state) % 3 ? p.count / ranks : draw(&state) % (p.count + 1);
                starts[rank + 1] = starts[rank] + piece;
                longest = piece > longest ? piece : longest;
            }
            p.starts = starts;
            p.count = starts[ranks];
            p.longest = longest;
        }
        if (p.operation == BARRIER)
            p.count = 0;
        /* All ranks, no rank, or some ranks have their arrays in a segment. */
        uint32_t where = draw(&state), way = draw(&state) % 3, in_place = draw(&state) % 2;
        int symmetric = way == 0 || (way == 1 && where >> shared.rank & 1);
        one_call(&shared, &p, call, symmetric, (int)in_place);
        /* Sometimes one rank makes a different call, and all ranks must notice that. */
        uint64_t other = draw(&state) % ranks;
        struct plan odd = {.operation = BARRIER, .item = 1,
                           .digest = other == (uint64_t)shared.rank};
        if (draw(&state) % 4 == 0)
            check(shared_call(&shared, &odd, NULL, NULL) == DIFFERENT, "a disagreement", call,
                  shared.rank, 0);
    }
    break_off(&shared, &state);
    for (int i = 0; i < 3; i++)
        free(segments[i]);
    free(shared.sources);
    free(shared.results);
    free(shared.announced);
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 5)
        return 2;
    ranks = atoi(arguments[1]);
    calls = atoi(arguments[2]);
    area_bytes = (size_t)atol(arguments[3]);
    seed = (unsigned)atol(arguments[4]);
    heap_bytes = 4 * (GUARD * 3 + area_bytes * 10 * ranks * (ranks + 1));
    pthread_t threads[MOST_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        uint64_t *line = aligned_alloc(64, LINE_WORDS * 8);
        memset(line, 0, LINE_WORDS * 8);
        unsigned char *areas = malloc(2 * area_bytes);
        stages[rank] = (struct stage){line, {areas, areas + area_bytes}};
        heaps[rank] = malloc(heap_bytes);
    }
    for (intptr_t rank = 0; rank < ranks; rank++)
        pthread_create(&threads[rank], NULL, rank_main, (void *)rank);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    for (int rank = 0; rank < ranks; rank++) {
        free(stages[rank].line);
        free(stages[rank].areas[0]);
        free(heaps[rank]);
    }
    printf("%d calls of %d ranks\n", calls, ranks);
    return 0;
}
