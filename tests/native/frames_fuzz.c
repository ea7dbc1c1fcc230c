/* Fuzzer of the frames that a peer may send: a peer that knows the secret, and has another version, or
   is broken. It sends valid frames, announcements, control frames, frames with random numbers, and bytes
   without sense, in parts of random lengths, and may end the connection at any byte. Meanwhile the rank
   receives, posts receives, probes and sends. It must get each valid message, refuse the others, and
   touch no memory but its own. threads.py builds and runs the program.

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

enum { LONGEST = 3 * STREAM_AHEAD, TAGS = 4, MOST_POSTED = 16, MOST_ANNOUNCED = 16 };

/* The length of the messages of a tag. The last tag is that of collective calls, -1. */
static size_t length_of(int64_t tag)
{
    return (size_t)(tag & 3) * 7000 + 100;
}

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
/* Tags of the messages that the peer has announced, by number, and how many it has not sent. */
static int64_t announced[MOST_ANNOUNCED + 1];
static int last_announced, ungranted;

static void append(const void *bytes, size_t nbytes)
{
    if (length + nbytes <= sizeof sent) {
        memcpy(sent + length, bytes, nbytes);
        length += nbytes;
    }
}

static void append_payload(int64_t tag, size_t nbytes)
{
    static char payload[LONGEST];
    memset(payload, (int)(tag & 127) + 1, nbytes);
    append(payload, nbytes);
}

/* Appends a frame whose payload is its tag, again and again; wrong frames have wrong numbers. Returns
   whether it is valid. */
static int append_frame(uint32_t *state, int64_t tag, int64_t mark)
{
    static const int64_t odd[] = {-1, 1, 2, INT64_MIN, INT64_MAX, (int64_t)1 << 47, 1 << 20, 4096};
    int kind = (int)(draw(state) % 16);
    size_t nbytes = length_of(tag);
    int64_t words[PREFIX] = {(int64_t)nbytes, tag, mark};
    if (kind >= 12 && tag >= 0 && last_announced < MOST_ANNOUNCED) {
        announced[words[2] = ++last_announced] = tag;
        ungranted++;
        append(words, sizeof words);
        return 1;
    }
    if (kind < 2)
        words[draw(state) % PREFIX] = odd[draw(state) % 8];
    if (kind == 4) { /* a control frame that nobody expects */
        words[0] = odd[draw(state) % 8];
        words[1] = CONTROL_TAG;
        words[2] = draw(state) % 4 ? (int64_t)(draw(state) % 8) - 4 : odd[draw(state) % 8];
    }
    append(words, kind == 2 ? draw(state) % sizeof words : sizeof words);
    append_payload(tag, kind == 3 ? draw(state) % (nbytes + 1) : nbytes);
    return kind > 4;
}

/* Sends the bytes of the messages that the rank has granted. */
static void obey(int fd)
{
    static int64_t words[PREFIX];
    static size_t have;
    ssize_t got;
    if (fd < 0)
        have = 0; /* a new connection */
    while (fd >= 0 && (got = recv(fd, (char *)words + have, sizeof words - have, MSG_DONTWAIT)) > 0) {
        if ((have += (size_t)got) < sizeof words)
            continue;
        have = 0;
        int64_t number = words[0];
        if (words[1] != CONTROL_TAG || words[2] != 2 || number < 1 || number > last_announced)
            continue; /* a credit, or a part of a message of the rank */
        int64_t tag = announced[number], frame[PREFIX] = {(int64_t)length_of(tag), CONTROL_TAG, -number};
        append(frame, sizeof frame);
        append_payload(tag, length_of(tag));
        ungranted--;
    }
}

/* Passes on some more bytes, or ends the connection after the last one. */
static void feed(int fd, uint32_t *state)
{
    obey(fd);
    size_t part = draw(state) % 3 ? draw(state) % 64 + 1 : draw(state) % LONGEST + 1;
    ssize_t done = at < length ? send(fd, sent + at, smaller(part, length - at),
                                      MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
    at += done > 0 ? (size_t)done : 0;
    if (at == length && (ungranted <= 0 || draw(state) % 16 == 0))
        shutdown(fd, SHUT_WR);
}

/* Posts a receive, looks for a message, or begins to send one. */
static void do_other_things(struct messages *m, struct posted *posted, int *count, uint32_t *state)
{
    static char room[MOST_POSTED][LONGEST];
    static char src[LONGEST];
    int kind = (int)(draw(state) % 4), any = draw(state) % 2, into = draw(state) % 2;
    struct posted *p = &posted[*count];
    if (*count == MOST_POSTED || kind == 0)
        return;
    *p = (struct posted){.source = draw(state) % 2 ? 1 : -1, .to = -2, .tag = any ? 0 : draw(state) % 3,
                         .mask = any ? 0 : -1};
    if (kind == 1) {
        p->bytes = into ? room[*count] : NULL;
        p->room = into ? draw(state) % LONGEST : 0;
        ++*count;
        post_receive(m, p);
    } else if (kind == 2) {
        *count += post_find(m, p, into);
    } else {
        *p = (struct posted){.source = -2, .to = 1, .tag = 1, .nbytes = draw(state) % LONGEST};
        ++*count;
        post_send(m, p, src, p->nbytes);
    }
    messages_progress(m);
}

/* Receives until the peer's bytes are at their end, or until they are refused. */
static void receive(struct messages *m, int fd, uint32_t *state, unsigned call, int all_valid,
                    int number, struct posted *posted, int *count)
{
    static char out[LONGEST + 1], src[LONGEST];
    for (int i = 0; i < number; i++) {
        struct exchange x;
        int64_t words[HEAD_WORDS] = {0};
        int64_t tag = (int64_t)(draw(state) % TAGS) - 1;
        size_t nbytes = draw(state) % 4 ? length_of(tag) : draw(state) % LONGEST;
        int headed = tag >= 0 && draw(state) % 8 == 0, marked = tag < 0 && draw(state) % 2;
        out[nbytes] = 77;
        exchange_begin(&x, m);
        if (draw(state) % 8 == 0)
            exchange_send(&x, 1, tag, src, draw(state) % LONGEST, NULL, POSTS);
        exchange_recv(&x, 1, 1, tag, out, nbytes, headed ? words : NULL);
        if (marked)
            x.mark = 5;
        for (int idle = 0; x.pending && !x.damage && idle < 10;) {
            feed(fd, state);
            idle = exchange_step(&x) ? 0 : idle + 1;
            if (posted != NULL && draw(state) % 4 == 0)
                do_other_things(m, posted, count, state);
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
        last_announced = ungranted = 0;
        obey(-1);
        for (uint32_t frames = draw(&state) % 12; frames > 0; frames--) {
            int64_t tag = (int64_t)(draw(&state) % TAGS) - 1;
            valid &= append_frame(&state, tag, tag < 0 && draw(&state) % 2 ? 5 : 0);
        }
        struct posted posted[MOST_POSTED];
        int posts = 0;
        receive(&m, pair[1], &state, call, valid, receives, draw(&state) % 2 ? posted : NULL, &posts);
        post_close(&m);
        for (int i = 0; i < posts; i++)
            free(posted[i].message);
        messages_clear(&m);
        free(in[1].stream.ahead);
        close(pair[0]);
        close(pair[1]);
    }
    printf("%u calls of %d ranks\n", calls, receives);
    return 0;
}
