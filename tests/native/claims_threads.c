/* Stress test of claims: rank 0 sends to each other rank, and the receivers claim each message at a
   random moment, also just when the sender has announced all of it and looks for a claim. Sometimes they
   take the claim back. After each message the sender overwrites its array. threads.py builds and runs the
   program.

   Usage: claims_threads RANKS CALLS RING_BYTES SEED START
   START is the number of bytes at which the counts begin, a multiple of 8. */

#define _GNU_SOURCE
#include "messages.h"
#include "copying.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t cached_bytes = 512; /* longer copies bypass the caches */

enum { MOST_RANKS = 16, NBYTES = CLAIMED_BYTES, LATER = 99, LOOKS = 2000, DELAY = 200 };

static int ranks, calls;
static size_t ring_bytes;
static unsigned seed;
static uint64_t start;
static struct messages sender_end, ends[MOST_RANKS];
static int ready[MOST_RANKS]; /* the call for which the receiver waits */
static uint64_t broken, pids[MOST_RANKS]; /* 0: copies may fail */
static char expected[LATER][NBYTES], later[NBYTES];

static uint32_t draw(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

/* Poll for a while before giving up the processor: the two ends must run at the same time. */
static void idle(int *looks)
{
    if (++*looks > LOOKS) {
        sched_yield();
        *looks = 0;
    }
}

static void check(int right, const char *what, int call, int rank, size_t at)
{
    if (!right) {
        fprintf(stderr, "%s: call %d is wrong on rank %d from byte %zu on\n", what, call, rank, at);
        exit(1);
    }
}

static void finish(struct exchange *x, int call)
{
    for (int looks = 0; x->pending;) {
        if (!exchange_step(x))
            idle(&looks);
        check(x->damage == NULL, x->damage, call, x->messages->rank, 0);
    }
}

static void *send_all(void *argument)
{
    int to = (int)(intptr_t)argument, looks = 0;
    char *array = malloc(NBYTES);
    for (int call = 1; call <= calls; call++) {
        struct exchange x;
        memcpy(array, expected[call % LATER], NBYTES);
        exchange_begin(&x, &sender_end);
        exchange_send(&x, to, 5, array, NBYTES, NULL, SENDS);
        while (__atomic_load_n(&ready[to], __ATOMIC_ACQUIRE) < call)
            idle(&looks);
        finish(&x, call);
        memcpy(array, later, NBYTES);
    }
    free(array);
    return NULL;
}

static void *receive_all(void *argument)
{
    int rank = (int)(intptr_t)argument, looks = 0;
    uint32_t state = seed * 2654435761u + 1 + (unsigned)rank;
    char *out = malloc(NBYTES);
    for (int call = 1; call <= calls; call++) {
        struct exchange x;
        size_t at = 0;
        exchange_begin(&x, &ends[rank]);
        exchange_recv(&x, 0, 0, 5, out, NBYTES, NULL);
        __atomic_store_n(&ready[rank], call, __ATOMIC_RELEASE);
        while (x.pending && !x.matched)
            if (!exchange_step(&x))
                idle(&looks);
        for (int left = (int)(draw(&state) % DELAY); left > 0; left--)
            __asm__ __volatile__("");
        exchange_hurry(&x);
        finish(&x, call);
        if (memcmp(out, expected[call % LATER], NBYTES) != 0) {
            while (out[at] == expected[call % LATER][at])
                at++;
            check(0, "a byte", call, rank, at);
        }
    }
    free(out);
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 6)
        return 2;
    ranks = atoi(arguments[1]);
    calls = atoi(arguments[2]);
    ring_bytes = (size_t)atol(arguments[3]);
    seed = (unsigned)atol(arguments[4]);
    start = strtoull(arguments[5], NULL, 10);
    for (int value = 0; value < LATER; value++)
        memset(expected[value], value, NBYTES);
    memset(later, LATER, NBYTES);
    char *memory = calloc((size_t)ranks, 4096 + ring_bytes);
    sender_end = (struct messages){.size = ranks, .carrier = &rings, .capacity = ring_bytes,
                                   .claims = 1, .pids = pids, .broken = &broken,
                                   .out = calloc((size_t)ranks, sizeof(struct end))};
    for (int rank = 1; rank < ranks; rank++) {
        char *page = memory + (size_t)rank * (4096 + ring_bytes);
        ends[rank] = (struct messages){.rank = rank, .size = ranks, .carrier = &rings,
                                       .capacity = ring_bytes, .pids = pids, .broken = &broken,
                                       .in = calloc(1, sizeof(struct end))};
        for (int word = 0; word < 3; word++)
            ((uint64_t *)page)[64 * word] = start;
        ends[rank].in[0].position = sender_end.out[rank].position = start;
        ends[rank].in[0].ring = (struct ring){.seen = start, .mine = (uint64_t *)(page + 512),
                                              .theirs = (uint64_t *)page,
                                              .claim = (uint64_t *)(page + 1024),
                                              .data = (unsigned char *)page + 4096};
        sender_end.out[rank].ring = (struct ring){.seen = start, .mine = (uint64_t *)page,
                                                  .theirs = (uint64_t *)(page + 512),
                                                  .claim = (uint64_t *)(page + 1024),
                                                  .data = (unsigned char *)page + 4096};
    }
    pthread_t threads[2 * MOST_RANKS];
    for (intptr_t rank = 1; rank < ranks; rank++) {
        pthread_create(&threads[2 * rank], NULL, send_all, (void *)rank);
        pthread_create(&threads[2 * rank + 1], NULL, receive_all, (void *)rank);
    }
    for (int i = 2; i < 2 * ranks; i++)
        pthread_join(threads[i], NULL);
    for (int rank = 1; rank < ranks; rank++)
        free(ends[rank].in);
    free(sender_end.out);
    free(memory);
    printf("%d calls of %d ranks\n", calls, ranks);
    return 0;
}
