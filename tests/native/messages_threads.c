/* Stress test of messages: each rank is two threads, which send to the next rank and receive from
   the previous rank. The lengths are random, around those at which messages change their method.
   test_shared.py builds and runs the program, and so does `make sanitize`, both under sanitizers.

   Usage: messages_threads RANKS CALLS RING_BYTES SEED START
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

enum { MOST_RANKS = 16, LANES = 2, LOOKS = 20, OFFSETS = 4096 };

static int ranks, calls;
static size_t ring_bytes;
static unsigned seed;
static uint64_t start;
static struct messages all[MOST_RANKS];
/* The flags say that ranks nap, so that senders wake them. No thread really naps here. */
static uint32_t sleepers = 1;
static uint64_t asleep[MOST_RANKS] = {1, 1};

static uint32_t draw(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static void check(int right, const char *what, int call, int rank, size_t nbytes)
{
    if (!right) {
        fprintf(stderr, "%s: call %d of %zu bytes is wrong on rank %d\n", what, call, nbytes, rank);
        exit(1);
    }
}

/* Random bytes that all messages consist of. They are drawn once, because sanitizers check every
   access of a loop over bytes, but check a copy or comparison of many bytes only once. */
static char *drawn;

/* The message of a rank's lane in a call: the drawn bytes from a random offset on. */
static const char *message(int call, int rank, int lane)
{
    uint32_t state = (uint32_t)(call * 40503u + rank * 977u + lane * 77u + 1);
    draw(&state);
    return drawn + draw(&state) % OFFSETS;
}

/* Drive an exchange as messages_type.c does, but read the sender's memory in this process. */
static void run(struct exchange *x, int call)
{
    for (int idle = 0; x->pending;) {
        size_t rest;
        if (exchange_step(x)) {
            idle = 0;
        } else if (++idle > LOOKS) {
            if ((rest = exchange_claim(x)) > 0) {
                memcpy(x->bytes + x->done, x->address + x->done, rest);
                exchange_fetched(x);
            }
            sched_yield();
        }
        check(x->damage == NULL, x->damage, call, x->messages->rank, x->nbytes);
    }
}

static size_t length(uint32_t *state)
{
    static const size_t edges[] = {0, 8, HEAD_ROOM, CLAIMED_BYTES, 4 * CLAIMED_BYTES};
    size_t around = draw(state) % 3 ? edges[draw(state) % 5] : ring_bytes * (draw(state) % 4);
    if (draw(state) % 4 == 0)
        return draw(state) % (3 * ring_bytes);
    around += draw(state) % 3;
    return around > 0 ? around - 1 : 0;
}

/* Receive a head, and the array behind it if the array is long. The caller knows the length. */
static void take_left(struct messages *m, int left, int64_t tag, char *out, size_t nbytes, int call)
{
    struct exchange x;
    char head[HEAD_BYTES];
    exchange_begin(&x, m);
    exchange_recv(&x, left, left, tag, head, HEAD_BYTES, NULL);
    run(&x, call);
    memcpy(out, head + HEAD_BYTES - HEAD_ROOM, nbytes <= HEAD_ROOM ? nbytes : 0);
    if (nbytes > HEAD_ROOM) {
        exchange_begin(&x, m);
        exchange_recv(&x, left, left, tag, out, nbytes, NULL);
        run(&x, call);
    }
}

static void one_call(struct messages *m, int lane, int call, size_t nbytes, int kind)
{
    int right = (m->rank + 1) % ranks, left = (m->rank + ranks - 1) % ranks;
    int64_t words[HEAD_WORDS] = {0, 5, (int64_t)nbytes, 1, (int64_t)nbytes}, other[HEAD_WORDS] = {9};
    int heads = kind > 1, drains = kind == 2, misfits = kind == 3, any = call % 2;
    char *src = malloc(nbytes + 1), *out = malloc(nbytes + 1);
    memcpy(src, message(call, m->rank, lane), nbytes);
    out[nbytes] = 77;
    struct exchange x;
    exchange_begin(&x, m);
    exchange_send(&x, right, lane, src, nbytes, heads ? words : NULL, call % 3);
    if (drains)
        exchange_drain(&x, left);
    else
        exchange_recv(&x, any && !misfits ? 0 : left, any && !misfits ? ranks - 1 : left, lane, out,
                      nbytes, misfits ? other : heads ? words : NULL);
    run(&x, call);
    check(x.misfit == misfits && x.draining == drains, "what was left", call, m->rank, nbytes);
    memset(src, 99, nbytes);
    if (x.misfit || x.draining)
        take_left(m, left, lane, out, nbytes, call);
    else
        check(x.from == left, "the source", call, m->rank, nbytes);
    check(memcmp(out, message(call, left, lane), nbytes) == 0, "a byte", call, m->rank, nbytes);
    check(out[nbytes] == 77, "what is behind", call, m->rank, nbytes);
    free(src);
    free(out);
}

static void *thread_main(void *argument)
{
    int rank = (int)(intptr_t)argument / LANES, lane = (int)(intptr_t)argument % LANES;
    uint32_t state = seed * 2654435761u + 1 + (unsigned)lane;
    for (int call = 0; call < calls; call++) {
        size_t nbytes = length(&state);
        one_call(&all[rank], lane, call, nbytes, (int)(draw(&state) % 6));
    }
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
    char *memory = calloc((size_t)ranks * ranks, 4096 + ring_bytes);
    size_t longest = 3 * ring_bytes + 4 * CLAIMED_BYTES + 8;
    uint32_t state = seed + 1;
    drawn = malloc(longest + OFFSETS);
    for (size_t i = 0; i < longest + OFFSETS; i++)
        drawn[i] = (char)draw(&state);
    for (int rank = 0; rank < ranks; rank++) {
        struct messages *m = &all[rank];
        *m = (struct messages){rank, ranks, ring_bytes, ring_bytes, calloc(ranks, sizeof *m->in),
                               calloc(ranks, sizeof *m->out), &sleepers, asleep, 1, {0}};
        for (int peer = 0; peer < ranks; peer++) {
            char *in = memory + (peer * ranks + rank) * (4096 + ring_bytes);
            char *out = memory + (rank * ranks + peer) * (4096 + ring_bytes);
            for (int word = 0; word < 3; word++)
                ((uint64_t *)in)[64 * word] = ((uint64_t *)out)[64 * word] = start;
            m->in[peer] = (struct ring){.position = start, .seen = start,
                                        .mine = (uint64_t *)(in + 512), .theirs = (uint64_t *)in,
                                        .claim = (uint64_t *)(in + 1024),
                                        .data = (unsigned char *)in + 4096};
            m->out[peer] = (struct ring){.position = start, .seen = start,
                                         .mine = (uint64_t *)out, .theirs = (uint64_t *)(out + 512),
                                         .claim = (uint64_t *)(out + 1024),
                                         .data = (unsigned char *)out + 4096};
        }
    }
    pthread_t threads[MOST_RANKS * LANES];
    for (intptr_t i = 0; i < ranks * LANES; i++)
        pthread_create(&threads[i], NULL, thread_main, (void *)i);
    for (int i = 0; i < ranks * LANES; i++)
        pthread_join(threads[i], NULL);
    for (int rank = 0; rank < ranks; rank++) {
        for (int peer = 0; peer < ranks; peer++)
            check(all[rank].in[peer].kept == NULL, "what is kept", calls, rank, 0);
        messages_clear(&all[rank]);
        free(all[rank].in);
        free(all[rank].out);
    }
    free(memory);
    free(drawn);
    printf("%d calls of %d ranks\n", calls, ranks);
    return 0;
}
