/* Stress test of messages: each rank is two threads, which send to the next rank and receive from
   the previous rank. The lengths are random, around those at which messages change their method.
   test_shared.py builds and runs the program, and so does `make sanitize`, both under sanitizers.

   Usage: messages_threads RANKS CALLS RING_BYTES SEED START
   START is the number of bytes at which the counts begin, a multiple of 8. Without bytes for a ring
   the messages go over pairs of sockets. */

#define _GNU_SOURCE
#include "messages.h"
#include "copying.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

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
static uint64_t broken, pids[MOST_RANKS]; /* 0: copies may fail */

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

/* Drive an exchange as messages_type.c does. */
static void run(struct exchange *x, int call)
{
    for (int idle = 0; x->pending;) {
        int steps = exchange_step(x);
        if (steps) {
            idle = 0;
        } else if (++idle > LOOKS) {
            exchange_hurry(x);
            messages_progress(x->messages);
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
    const int64_t words[HEAD_WORDS] = {0, 5, (int64_t)nbytes, 1, (int64_t)nbytes};
    exchange_begin(&x, m);
    exchange_recv(&x, left, left, tag, head, HEAD_BYTES, NULL);
    run(&x, call);
    check(memcmp(head, words, sizeof words) == 0, "a head", call, m->rank, nbytes);
    memcpy(out, head + HEAD_BYTES - HEAD_ROOM, nbytes <= HEAD_ROOM ? nbytes : 0);
    if (nbytes > HEAD_ROOM) {
        exchange_begin(&x, m);
        exchange_recv(&x, left, left, tag + PAYLOAD_TAG, out, nbytes, NULL);
        run(&x, call);
    }
}

/* The posted operations of all calls. They stay until the end, since any thread of a rank may take the
   finished ones. */
static struct posted *all_posted;

/* Sends and receives by posted operations: into memory, or of unknown length, and from any rank. */
static void post_both(struct messages *m, int lane, int call, int right, int left, const char *src,
                      char *out, size_t nbytes)
{
    struct posted *receive = &all_posted[2 * ((size_t)(m->rank * LANES + lane) * (size_t)calls + (size_t)call)];
    struct posted *send = receive + 1;
    *send = (struct posted){.source = -2, .to = right, .tag = lane, .nbytes = nbytes};
    *receive = (struct posted){.source = call % 2 ? -1 : left, .to = -2, .tag = lane, .mask = -1,
                               .bytes = call % 3 ? out : NULL, .room = call % 3 ? nbytes : 0};
    if (call % 5)
        post_receive(m, receive);
    check(post_send(m, send, src, nbytes) == 0, "a posted send", call, m->rank, nbytes);
    if (call % 5 == 0)
        post_receive(m, receive);
    while (__atomic_load_n(&send->state, __ATOMIC_ACQUIRE) < OVER
           || __atomic_load_n(&receive->state, __ATOMIC_ACQUIRE) < OVER) {
        if (!messages_progress(m))
            sched_yield();
    }
    check(send->state == OVER && receive->state == OVER, "a state", call, m->rank, nbytes);
    check(receive->source == left && receive->nbytes == nbytes, "a status", call, m->rank, nbytes);
    if (receive->bytes == NULL) {
        memcpy(out, receive->message->bytes, nbytes);
        free(receive->message);
    }
}

static void one_call(struct messages *m, int lane, int call, size_t nbytes, int kind)
{
    int right = (m->rank + 1) % ranks, left = (m->rank + ranks - 1) % ranks;
    int64_t words[HEAD_WORDS] = {0, 5, (int64_t)nbytes, 1, (int64_t)nbytes}, other[HEAD_WORDS] = {9};
    int heads = kind > 1 && kind < 5, drains = kind == 2, misfits = kind == 3, any = call % 2;
    char *src = malloc(nbytes + 1), *out = malloc(nbytes + 1);
    memcpy(src, message(call, m->rank, lane), nbytes);
    out[nbytes] = 77;
    struct exchange x;
    if (kind >= 5) {
        post_both(m, lane, call, right, left, src, out, nbytes);
        goto received;
    }
    exchange_begin(&x, m);
    exchange_send(&x, right, lane, src, nbytes, heads ? words : NULL, call % 3);
    if (drains)
        exchange_drain(&x, left, lane);
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
received:
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
        one_call(&all[rank], lane, call, nbytes, (int)(draw(&state) % 8));
    }
    /* A copied send is over before its bytes have left, so a rank that ends delivers them, as close()
       does. */
    while (__atomic_load_n(&all[rank].queued, __ATOMIC_RELAXED))
        if (!messages_progress(&all[rank]))
            sched_yield();
    return NULL;
}

/* Connects each pair of ranks by sockets. */
static void connect_all(void)
{
    for (int rank = 0; rank < ranks; rank++)
        for (int peer = 0; peer < rank; peer++) {
            int pair[2];
            check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "a socket", 0, rank, 0);
            all[rank].in[peer].stream.fd = all[rank].out[peer].stream.fd = pair[0];
            all[peer].in[rank].stream.fd = all[peer].out[rank].stream.fd = pair[1];
            all[rank].in[peer].stream.ahead = malloc(STREAM_AHEAD);
            all[peer].in[rank].stream.ahead = malloc(STREAM_AHEAD);
        }
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
    int streaming = ring_bytes == 0;
    ring_bytes = streaming ? 2 * STREAM_AHEAD : ring_bytes;
    char *memory = calloc((size_t)ranks * ranks, 4096 + ring_bytes);
    size_t longest = 3 * ring_bytes + 4 * CLAIMED_BYTES + 8;
    uint32_t state = seed + 1;
    drawn = malloc(longest + OFFSETS);
    all_posted = malloc(2 * sizeof *all_posted * (size_t)(ranks * LANES) * (size_t)calls);
    for (size_t i = 0; i < longest + OFFSETS; i++)
        drawn[i] = (char)draw(&state);
    for (int rank = 0; rank < ranks; rank++) {
        struct messages *m = &all[rank];
        *m = (struct messages){.rank = rank, .size = ranks, .carrier = streaming ? &streams : &rings,
                               .capacity = ring_bytes, .broken = &broken,
                               .pids = streaming ? NULL : pids, .claims = !streaming,
                               .in = calloc(ranks, sizeof *m->in),
                               .out = calloc(ranks, sizeof *m->out),
                               .sleepers = streaming ? NULL : &sleepers, .asleep = asleep,
                               .apart = 1};
        for (int peer = 0; peer < ranks; peer++) {
            char *in = memory + (peer * ranks + rank) * (4096 + ring_bytes);
            char *out = memory + (rank * ranks + peer) * (4096 + ring_bytes);
            for (int word = 0; word < 3; word++)
                ((uint64_t *)in)[64 * word] = ((uint64_t *)out)[64 * word] = start;
            m->in[peer].position = m->out[peer].position = start;
            m->in[peer].ring = (struct ring){.seen = start, .mine = (uint64_t *)(in + 512),
                                             .theirs = (uint64_t *)in,
                                             .claim = (uint64_t *)(in + 1024),
                                             .data = (unsigned char *)in + 4096};
            m->out[peer].ring = (struct ring){.seen = start, .mine = (uint64_t *)out,
                                              .theirs = (uint64_t *)(out + 512),
                                              .claim = (uint64_t *)(out + 1024),
                                              .data = (unsigned char *)out + 4096};
        }
    }
    if (streaming)
        connect_all();
    pthread_t threads[MOST_RANKS * LANES];
    for (intptr_t i = 0; i < ranks * LANES; i++)
        pthread_create(&threads[i], NULL, thread_main, (void *)i);
    for (int i = 0; i < ranks * LANES; i++)
        pthread_join(threads[i], NULL);
    for (int rank = 0; rank < ranks; rank++) {
        for (int peer = 0; peer < ranks; peer++)
            check(all[rank].in[peer].kept == NULL, "what is kept", calls, rank, 0);
        messages_clear(&all[rank]);
        for (int peer = 0; peer < ranks && streaming; peer++)
            if (peer != rank) {
                free(all[rank].in[peer].stream.ahead);
                close(all[rank].in[peer].stream.fd);
            }
        free(all[rank].in);
        free(all[rank].out);
    }
    free(memory);
    free(drawn);
    free(all_posted);
    printf("%d calls of %d ranks\n", calls, ranks);
    return 0;
}
