/* Fuzzer of the frames that a peer may send: a peer that knows the secret, and has another version, or
   is broken. It sends valid frames, frames with random numbers, and bytes without sense, in parts of
   random lengths, and may end the connection at any byte. The receiver must get each valid message,
   refuse the others, and touch no memory but its own. threads.py builds and runs the program.

   Usage: frames_fuzz RANKS CALLS RING_BYTES SEED START
   RANKS is the number of receives of a call. The last two but SEED are ignored. */

#define _GNU_SOURCE
#include "messages.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

size_t cached_bytes = 1 << 20;

enum { LONGEST = 3 * STREAM_AHEAD, TAGS = 3 };

static uint32_t draw(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static void check(int right, const char *what, unsigned call)
{
    if (!right) {
        fprintf(stderr, "%s: call %u is wrong\n", what, call);
        exit(1);
    }
}

/* One connection: what the peer sends, and what it has sent of it. */
static char sent[16 * LONGEST];
static size_t length, at;

static void append(const void *bytes, size_t nbytes)
{
    if (length + nbytes <= sizeof sent) {
        memcpy(sent + length, bytes, nbytes);
        length += nbytes;
    }
}

/* Appends a frame whose payload is its tag, again and again; wrong frames have wrong numbers. */
static int append_frame(uint32_t *state, int64_t tag, size_t nbytes, int64_t mark)
{
    static const int64_t odd[] = {-1, 1, INT64_MIN, INT64_MAX, (int64_t)1 << 47, 1 << 20, 4096};
    static char payload[LONGEST];
    int kind = (int)(draw(state) % 8);
    int64_t words[PREFIX] = {(int64_t)nbytes, tag, mark};
    if (kind < 2)
        words[draw(state) % PREFIX] = odd[draw(state) % 7];
    append(words, kind == 2 ? draw(state) % sizeof words : sizeof words);
    memset(payload, (int)(tag & 127) + 1, nbytes);
    append(payload, kind == 3 ? draw(state) % (nbytes + 1) : nbytes);
    return kind > 3;
}

/* Passes on some more bytes, or ends the connection after the last one. */
static void feed(int fd, uint32_t *state)
{
    size_t part = draw(state) % 3 ? draw(state) % 64 + 1 : draw(state) % LONGEST + 1;
    ssize_t done = at < length ? send(fd, sent + at, smaller(part, length - at),
                                      MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
    at += done > 0 ? (size_t)done : 0;
    if (at == length)
        shutdown(fd, SHUT_WR);
}

/* Receives until the peer's bytes are at their end, or until they are refused. */
static void receive(struct messages *m, int fd, uint32_t *state, unsigned call, int all_valid,
                    int number)
{
    static char out[LONGEST + 1];
    for (int i = 0; i < number; i++) {
        struct exchange x;
        int64_t words[HEAD_WORDS] = {0};
        int64_t tag = (int64_t)(draw(state) % TAGS);
        size_t nbytes = draw(state) % 4 ? (size_t)tag * 7000 + 100 : draw(state) % LONGEST;
        int headed = draw(state) % 8 == 0, marked = draw(state) % 4 == 0;
        out[nbytes] = 77;
        exchange_begin(&x, m);
        exchange_recv(&x, 1, 1, tag, out, nbytes, headed ? words : NULL);
        if (marked && !headed)
            x.mark = 5;
        for (int idle = 0; x.pending && !x.damage && idle < 10;) {
            feed(fd, state);
            idle = exchange_step(&x) ? 0 : idle + 1;
        }
        check(out[nbytes] == 77, "what is behind", call);
        if (x.pending || x.damage)
            return;
        if (all_valid && !headed && !x.differs)
            for (size_t byte = 0; byte < nbytes; byte++)
                check(out[byte] == (char)((tag & 127) + 1), "a byte", call);
    }
}

int main(int count, char **arguments)
{
    if (count != 6)
        return 2;
    int receives = atoi(arguments[1]);
    unsigned calls = (unsigned)atol(arguments[2]);
    uint32_t state = (uint32_t)atol(arguments[4]) * 2654435761u + 1;
    for (unsigned call = 0; call < calls; call++) {
        int pair[2], valid = 1;
        struct end in[2] = {0}, out[2] = {0};
        struct messages m = {.size = 2, .carrier = &streams, .in = in, .out = out};
        check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "a socket", call);
        in[1].stream.fd = out[1].stream.fd = pair[0];
        in[1].stream.ahead = malloc(STREAM_AHEAD);
        length = at = 0;
        for (uint32_t frames = draw(&state) % 12; frames > 0; frames--) {
            int64_t tag = (int64_t)(draw(&state) % TAGS);
            valid &= append_frame(&state, tag, (size_t)tag * 7000 + 100, draw(&state) % 2 ? 5 : 0);
        }
        receive(&m, pair[1], &state, call, valid, receives);
        messages_clear(&m);
        free(in[1].stream.ahead);
        close(pair[0]);
        close(pair[1]);
    }
    printf("%u calls of %d ranks\n", calls, receives);
    return 0;
}
