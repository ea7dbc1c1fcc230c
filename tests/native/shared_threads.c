/* Ranks that are threads, in calls of random lengths around those at which staging changes its way:
   built and run by test_shared.py, with the sanitizers by `make sanitize`.

   Usage: shared_threads RANKS CALLS AREA_BYTES SEED */

#define _GNU_SOURCE
#include "shared.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 16, GUARD = 64 };

static int ranks, calls;
static size_t area_bytes;
static unsigned seed;
static struct stage stages[MOST_RANKS];

/* A generator that is the same on all ranks and all machines (Marsaglia's xorshift). */
static uint32_t draw(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static int wait_for(void *context, int rank, const uint64_t *word, uint64_t value)
{
    (void)context, (void)rank;
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < value)
        sched_yield();
    return 0;
}

/* What a rank has at an element of a call. Sums of them wrap. */
static uint32_t element(int call, int rank, size_t index)
{
    return (uint32_t)(index * 2654435761u) ^ (uint32_t)(call * 40503u + rank * 2246822519u);
}

/* A fold as those of folds.c, which takes long to compile. */
static void sum(const void *left, const void *right, void *out, size_t count)
{
    const uint32_t *a = left, *b = right;
    uint32_t *result = out;
    for (size_t i = 0; i < count; i++)
        result[i] = a[i] + b[i];
}

static void check(int right, const char *what, int call, int rank, size_t count)
{
    if (!right) {
        fprintf(stderr, "%s: call %d of %zu elements is wrong on rank %d\n", what, call, count,
                rank);
        exit(1);
    }
}

/* A length near where a piece, a block, or an area of them ends, or any. */
static size_t length(uint32_t *state)
{
    size_t unit = area_bytes / sizeof(uint32_t) / (2u << draw(state) % 4);
    if (draw(state) % 4 == 0)
        return draw(state) % (unit * 8);
    size_t around = unit * (draw(state) % 10) * (draw(state) % 2 ? 1 : ranks) + draw(state) % 3;
    return around > 0 ? around - 1 : 0;
}

static void one_call(struct shared *shared, uint64_t step, int call, size_t count, int kind,
                     int root)
{
    uint64_t digest = (uint64_t)call * 31 + kind;
    int rank = shared->rank, in_place = kind % 2;
    size_t whole = count * ranks;
    uint32_t *memory = malloc((2 * whole + 2 * GUARD) * sizeof *memory);
    uint32_t *dst = memory + GUARD, *src = in_place ? dst : dst + whole;
    memset(memory, 0x5A, (2 * whole + 2 * GUARD) * sizeof *memory);
    for (size_t i = 0; i < count; i++)
        src[i] = element(call, rank, i);
    int is_small = kind < 2 && count * sizeof *src <= area_bytes && call % 3 != 0;
    if (!is_small)
        check(shared_arrive(shared, step, digest) == 0, "arriving", call, rank, count);
    if (kind < 2) {
        if (is_small)
            shared_all_reduce(shared, step, digest, sum, sizeof *src, src, dst, count);
        else
            stage_all_reduce(shared, sum, NULL, sizeof *src, src, dst, count);
        for (size_t i = 0; i < count; i++) {
            uint32_t sum = 0;
            for (int peer = 0; peer < ranks; peer++)
                sum += element(call, peer, i);
            check(dst[i] == sum, "all_reduce", call, rank, count);
        }
    } else if (kind < 4) {
        stage_broadcast(shared, root, src, count * sizeof *src);
        for (size_t i = 0; i < count; i++)
            check(src[i] == element(call, root, i), "broadcast", call, rank, count);
    } else {
        if (in_place)
            memmove(src = dst + rank * count, dst, count * sizeof *src);
        stage_all_gather(shared, src, dst, count * sizeof *src);
        for (size_t i = 0; i < whole; i++)
            check(dst[i] == element(call, (int)(i / count), i % count), "all_gather", call, rank,
                  count);
    }
    for (size_t i = 0; i < GUARD; i++)
        check(memory[i] == 0x5A5A5A5A && memory[2 * whole + GUARD + i] == 0x5A5A5A5A, "a guard",
              call, rank, count);
    free(memory);
    if (!is_small) {
        /* As a call that follows may: areas are this rank's own again. */
        memset(stages[rank].areas[0], call, area_bytes);
        memset(stages[rank].areas[1], call, area_bytes);
    }
}

static void *rank_main(void *argument)
{
    struct shared shared = {.rank = (int)(intptr_t)argument, .size = ranks, .stages = stages,
                              .area_bytes = area_bytes, .looks = 20,
                              .wait = wait_for};
    uint64_t step = 0;
    uint32_t state = seed * 2654435761u + 1;
    for (int call = 0; call < calls; call++) {
        size_t count = length(&state);
        int kind = (int)(draw(&state) % 6), root = (int)(draw(&state) % ranks);
        one_call(&shared, ++step, call, count, kind, root);
        /* Now and then one of them does something else, as all find out. */
        uint64_t other = draw(&state) % ranks;
        if (draw(&state) % 4 == 0)
            check(shared_arrive(&shared, ++step, other == (uint64_t)shared.rank) == DIFFERENT,
                  "a disagreement", call, shared.rank, count);
    }
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
    pthread_t threads[MOST_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        uint64_t *counters = aligned_alloc(64, 4 * 64);
        memset(counters, 0, 4 * 64);
        stages[rank] = (struct stage){counters, counters + 8, counters + 16, counters + 24,
                                      {malloc(area_bytes), malloc(area_bytes)}};
    }
    for (intptr_t rank = 0; rank < ranks; rank++)
        pthread_create(&threads[rank], NULL, rank_main, (void *)rank);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(threads[rank], NULL);
    for (int rank = 0; rank < ranks; rank++) {
        free(stages[rank].line);
        free(stages[rank].areas[0]);
        free(stages[rank].areas[1]);
    }
    printf("%d calls of %d ranks\n", calls, ranks);
    return 0;
}
