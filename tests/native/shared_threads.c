/* Stress test of collectives: each rank is a thread. The lengths of the calls are random, around
   those at which a call changes its method. At the end one rank gives up in the middle of a call.
   test_shared.py builds and runs the program, and so does `make sanitize`, both under sanitizers.
   With FOLDS the program has all folds of folds.c, at each level of the processor's instructions.
   Without, it has sums of one dtype, as folds.c takes long to compile.

   Usage: shared_threads RANKS CALLS AREA_BYTES SEED START
   START is the number at which the counters begin. */

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
static uint64_t start;
static struct stage stages[MOST_RANKS];
/* The counter says that a rank naps, so that the flags of all ranks are checked. */
static uint32_t sleepers = 1;
static char *heaps[MOST_RANKS];
static uint64_t broken; /* set by the rank that gives up */
static uint64_t pids[MOST_RANKS]; /* odd: no copy fails */

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

/* Sets bytes to elements of the input of a rank in a call, from an index on. Sums of inputs wrap. */
static void fill(char *bytes, const struct plan *p, int call, int rank, size_t index, size_t count)
{
    for (size_t at = 0; at < count * p->item; at++) {
        size_t place = index * p->item + at;
        uint32_t word = (uint32_t)(place / 4 * 2654435761u)
                        ^ (uint32_t)(call * 40503u + (unsigned)rank * 2246822519u);
        bytes[at] = (char)(word >> place % 4 * 8);
    }
}

#ifndef FOLDS
const size_t item_bytes[DTYPES] = {[UINT32] = 4}, item_alignment[DTYPES] = {[UINT32] = 4};

/* As if the processor had the baseline's instructions only. */
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

fold_function *find_fold(int level, enum op op, enum dtype dtype)
{
    return level == 0 && op == SUM && dtype == UINT32 ? sum : NULL;
}

divide_function *find_divide(int level, enum dtype dtype)
{
    (void)level, (void)dtype;
    return NULL;
}
#endif

/* What a call folds: the same on all ranks. Each rank folds at its own level of instructions. */
struct kind {
    enum op op;
    enum dtype dtype;
    int mean;
};

/* Sets bytes to the fold of the inputs of the first ranks, by the baseline's instructions. */
static void fill_folded(char *bytes, const struct plan *p, const struct kind *kind, int call,
                        int number, size_t index, size_t count)
{
    char *input = malloc(count * p->item + 1);
    fill(bytes, p, call, 0, index, count);
    for (int rank = 1; rank < number; rank++) {
        fill(input, p, call, rank, index, count);
        find_fold(0, kind->op, kind->dtype)(bytes, input, bytes, count);
    }
    if (kind->mean)
        find_divide(0, kind->dtype)(bytes, count, ranks);
    free(input);
}

/* Sets bytes to the expected result of a rank. */
static void fill_wanted(char *bytes, const struct plan *p, const struct kind *kind, int call,
                        int rank, size_t count)
{
    size_t begin = p->starts[rank], piece = p->starts[rank + 1] - begin;
    switch (p->operation) {
    case BROADCAST:
        fill(bytes, p, call, p->root, 0, count);
        break;
    case SCATTER:
        fill(bytes, p, call, p->root, begin, count);
        break;
    case REDUCE_SCATTER:
        fill_folded(bytes, p, kind, call, ranks, begin, count);
        break;
    case ALL_TO_ALL:
        for (int from = 0; from < ranks; from++)
            fill(bytes + (size_t)from * piece * p->item, p, call, from, begin, piece);
        break;
    case GATHER:
    case ALL_GATHER:
        for (int from = 0; from < ranks; from++)
            fill(bytes + p->starts[from] * p->item, p, call, from, 0,
                 p->starts[from + 1] - p->starts[from]);
        break;
    default:
        fill_folded(bytes, p, kind, call, p->operation == SCAN ? rank + 1 : ranks, 0, count);
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

static void one_call(struct shared *shared, struct plan *p, const struct kind *kind, int call,
                     int symmetric, int in_place)
{
    int rank = shared->rank;
    size_t starts[MOST_RANKS + 1], *given = p->starts, count = p->count;
    size_t inputs = input_bytes(shared, p), outputs = output_bytes(shared, p);
    /* Lengths are in bytes here, and the guards keep arrays aligned for every dtype. */
    size_t at = start_of(shared, p, rank) * p->item, room = ((ranks + 2) * count + 999) * 16;
    char *memory = symmetric ? heaps[rank] : malloc(room);
    char *src = memory + GUARD, *dst = src + (inputs + 15) / 16 * 16 + GUARD;
    if (in_place && p->operation != ALL_TO_ALL && inputs && outputs) {
        dst = splits(p) ? src + at : src;
        src = joins(p) ? dst + at : src;
    }
    char *end = inputs > 0 && src + inputs > dst + outputs ? src + inputs : dst + outputs;
    memset(memory, 0x5A, (size_t)(end + GUARD - memory));
    fill(src, p, call, rank, 0, inputs / p->item);
    shared_locate(shared, p, src, dst);
    /* In every other call the core computes the sums of what it copies to the result. */
    struct sums sums = {0, 0, 0}, whole = {0, 0, 0};
    shared->sums = call % 2 ? &sums : NULL;
    shared->all_announced = 0;
    check(shared_call(shared, p, src, dst) == 0, "arriving", call, rank, count);
    shared->sums = NULL;
    if (p->operation == ALL_REDUCE && sums.nbytes > 0) {
        add_to_sums(&whole, 0, dst, outputs);
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
    char *wanted = malloc(outputs + 1);
    if (outputs > 0)
        fill_wanted(wanted, p, kind, call, rank, outputs / p->item);
    check(memcmp(dst, wanted, outputs) == 0, names[p->operation], call, rank, count);
    free(wanted);
    p->starts = given;
    for (size_t i = 0; i < GUARD; i++)
        check(memory[i] == 0x5A && end[i] == 0x5A, "a guard", call, rank, count);
    /* Overwrite the memory at once, as its owner may do after the call. */
    memset(memory, call, (size_t)(end - memory));
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
        struct plan p = {.operation = ALL_REDUCE, .fold = find_fold(0, SUM, UINT32), .item = 4,
                         .alignment = 4, .folded = 4, .count = count,
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

/* Draws what a call folds, or a dtype to move. */
static struct kind draw_kind(uint32_t *state, int folds)
{
    struct kind kind;
    do {
        kind = (struct kind){draw(state) % OPS, draw(state) % DTYPES, draw(state) % 4 == 0};
    } while (item_bytes[kind.dtype] == 0 || (folds && find_fold(0, kind.op, kind.dtype) == NULL));
    kind.mean = kind.mean && folds && kind.op == SUM && find_divide(0, kind.dtype) != NULL;
    return kind;
}

static void *rank_main(void *argument)
{
    struct shared shared = {.rank = (int)(intptr_t)argument, .size = ranks, .stages = stages,
                            .area_bytes = area_bytes, .least_long = area_bytes / 32 * 3,
                            .crowded = seed % 2, .looks = 20, .wait = wait_for, .arrived = go_on,
                            .broken = &broken, .sleepers = &sleepers, .pids = pids,
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
    uint32_t state = seed * 2654435761u + 1, own = state + (unsigned)shared.rank;
    shared.blocks = start;
    for (int call = 0; call < calls; call++) {
        size_t starts[MOST_RANKS + 1] = {0}, longest = 0;
        struct plan p = {.operation = (int)(draw(&state) % OPERATIONS), .fold = NULL,
                         .root = (int)(draw(&state) % ranks), .digest = 1000 + call,
                         .count = length(&state)};
        int folds = p.operation == ALL_REDUCE || p.operation == REDUCE || p.operation == SCAN
                    || p.operation == REDUCE_SCATTER;
        struct kind kind = draw_kind(&state, folds);
        kind.mean = kind.mean && p.operation != SCAN;
        p.item = item_bytes[kind.dtype];
        p.alignment = item_alignment[kind.dtype];
        p.count = p.count * 4 / p.item;
        if (folds) {
            int level = (int)(draw(&own) % fold_levels());
            p.fold = find_fold(level, kind.op, kind.dtype);
            p.folded = p.item;
            p.divide = kind.mean ? find_divide(level, kind.dtype) : NULL;
        }
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
        one_call(&shared, &p, &kind, call, symmetric, (int)in_place);
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
    if (count != 6)
        return 2;
    ranks = atoi(arguments[1]);
    for (int rank = 0; rank < ranks; rank++)
        pids[rank] = 1;
    calls = atoi(arguments[2]);
    area_bytes = (size_t)atol(arguments[3]);
    seed = (unsigned)atol(arguments[4]);
    start = strtoull(arguments[5], NULL, 10);
    heap_bytes = 4 * (GUARD * 3 + area_bytes * 10 * ranks * (ranks + 1));
    pthread_t threads[MOST_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        uint64_t *line = aligned_alloc(64, LINE_WORDS * 8);
        memset(line, 0, LINE_WORDS * 8);
        line[STEP] = line[POSTED] = line[FOLDED] = line[READ] = start;
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
