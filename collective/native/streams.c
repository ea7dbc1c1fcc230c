/* Streams: what carries messages between ranks of several hosts. Each pair of ranks has one connected
   socket, which does not block.

   A message is its prefix and its bytes. A sender passes both to the kernel with one call. A receiver
   reads what has come into a small buffer, so that a short message takes one call as well. Only the
   beginning of a long message goes through that buffer; the kernel copies the rest to the receiver's
   array.

   A peer that has closed its end may have left in peace. So the end of a stream is an error only for a
   receiver that waits for this peer alone, or if it comes in the middle of a message. */

#include "messages.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* Bytes of the array that one system call moves at most: in an exchange of both directions, the other of
   which stands still meanwhile; and in one direction. A longer call leaves more bytes to the kernel, which
   sends them when acknowledgements come. Between two network namespaces these packets overtake others and
   are sent again: 200 exchanges of 4 MiB sent 1,071 packets twice with 128 KiB a call, 2,512 with 256,
   6,268 with 512 and 12,924 with 1 MiB, and took 1.2, 0.9, 1.7 and 2.0 ms each. One direction of 16 MiB
   took 3.0 ms with 256 KiB, 2.4 with 512 and 6.5 with 1 MiB. */
#ifndef BOTH_BYTES
#define BOTH_BYTES ((size_t)256 << 10)
#define ONE_BYTES ((size_t)512 << 10)
#endif

static size_t call_bytes(const struct exchange *x)
{
    return x->pending == (SENDING | RECEIVING) ? BOTH_BYTES : ONE_BYTES;
}

static int may_have(const struct end *e)
{
    (void)e;
    return 1; /* only the kernel knows */
}

/* Takes note of the result of a call that read, which was no number of bytes. */
static void note_end(struct exchange *x, struct end *e, ssize_t result)
{
    if (result == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        __atomic_store_n(&e->stream.over, 1, __ATOMIC_RELAXED);
    /* In the middle of a message, or with nobody else to receive from, nothing more can come. */
    if (e->stream.over && (x->first == x->last || x->matched || e->unfinished != NULL))
        x->damage = STREAM_ENDED;
}

/* Reads more bytes ahead; returns whether there were any. */
static int read_ahead(struct exchange *x, struct end *e)
{
    struct stream *s = &e->stream;
    memmove(s->ahead, s->ahead + s->begin, s->end - s->begin);
    s->end -= s->begin;
    s->begin = 0;
    ssize_t got = recv(s->fd, s->ahead + s->end, STREAM_AHEAD - s->end, MSG_DONTWAIT);
    if (got <= 0) {
        note_end(x, e, got);
        return 0;
    }
    s->end += (size_t)got;
    x->moved += (size_t)got;
    return 1;
}

static int has(struct exchange *x, struct end *e, size_t nbytes)
{
    struct stream *s = &e->stream;
    return s->end - s->begin >= nbytes || (read_ahead(x, e) && s->end - s->begin >= nbytes);
}

/* Reads into the array, and what comes behind it into the buffer, which is empty. */
static size_t read_directly(struct exchange *x, struct end *e, char *to, size_t left)
{
    struct stream *s = &e->stream;
    size_t count = smaller(left, call_bytes(x));
    struct iovec parts[2] = {{to, count}, {s->ahead, STREAM_AHEAD}};
    ssize_t got = readv(s->fd, parts, count == left ? 2 : 1);
    if (got <= 0) {
        note_end(x, e, got);
        return 0;
    }
    x->moved += (size_t)got;
    s->begin = 0;
    s->end = (size_t)got > count ? (size_t)got - count : 0;
    return smaller((size_t)got, count);
}

static int read_bytes(struct exchange *x, struct end *e, char *to, size_t nbytes, size_t *done)
{
    struct stream *s = &e->stream;
    size_t count = smaller(nbytes - *done, s->end - s->begin);
    memcpy(to + *done, s->ahead + s->begin, count);
    s->begin += count;
    *done += count;
    if (*done < nbytes)
        *done += read_directly(x, e, to + *done, nbytes - *done);
    if (*done < nbytes && s->over)
        x->damage = STREAM_ENDED;
    return *done == nbytes;
}

static int send_pieces(struct exchange *x, struct end *e)
{
    static const char padding[HEAD_ROOM];
    struct iovec parts[sizeof x->pieces / sizeof *x->pieces];
    int count = 0;
    size_t total = 0, most = call_bytes(x);
    for (int i = x->at; i < x->count && total < most; i++, count++) {
        const struct piece *p = &x->pieces[i];
        /* The prefix does not count. Otherwise an array of several calls' bytes would take a further
           call for its last few. */
        if (i == 0)
            most += p->nbytes;
        parts[count].iov_base = (void *)(p->bytes != NULL ? p->bytes : padding);
        parts[count].iov_len = smaller(p->nbytes, most - total);
        total += parts[count].iov_len;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t sent = sendmsg(e->stream.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        x->damage = STREAM_ENDED;
    for (size_t left = sent > 0 ? (size_t)sent : 0; left > 0;) {
        struct piece *p = &x->pieces[x->at];
        size_t part = smaller(left, p->nbytes);
        p->bytes += p->bytes != NULL ? part : 0;
        if ((p->nbytes -= part) == 0)
            x->at++;
        left -= part;
        e->position += part;
        x->moved += part;
    }
    return x->at == x->count;
}

static void announce(struct end *e)
{
    (void)e; /* the kernel has done it */
}

void exchange_sleep(struct exchange *x, double seconds)
{
    struct messages *m = x->messages;
    struct pollfd *sockets = malloc((size_t)(4 * m->size + 3) * sizeof *sockets);
    nfds_t count = 0;
    /* Another thread may read this message and keep it, or may own an end. Neither wakes this
       thread, so it looks again soon. */
    int alone = __atomic_add_fetch(&m->callers, 1, __ATOMIC_RELAXED) == 1;
    if (x->pending & SENDING) {
        int waits = exchange_waits(x);
        alone &= x->holds || waits;
        if (x->holds && sockets != NULL)
            sockets[count++] = (struct pollfd){m->out[x->to].stream.fd, POLLOUT, 0};
        struct end *in = &m->in[x->to];
        int reads = x->weight > 0 && !in->stream.over, owned = __atomic_load_n(&in->taken, __ATOMIC_RELAXED);
        alone &= !(reads && owned);
        if (reads && !owned && sockets != NULL)
            sockets[count++] = (struct pollfd){in->stream.fd, POLLIN, 0};
    }
    if (x->pending & RECEIVING || x->draining || x->misfit) {
        int first = x->matched ? x->from : x->first, last = x->matched ? x->from : x->last;
        for (int rank = first; rank <= last && sockets != NULL; rank++) {
            if (rank == m->rank || m->in[rank].stream.over)
                continue;
            int owned = __atomic_load_n(&m->in[rank].taken, __ATOMIC_RELAXED);
            if (owned && !x->matched)
                alone = 0;
            else
                sockets[count++] = (struct pollfd){m->in[rank].stream.fd, POLLIN, 0};
        }
    }
    for (int rank = 0; rank < m->size && sockets != NULL; rank++) {
        if (rank == m->rank)
            continue;
        if ((post_wants(m, rank) || __atomic_load_n(&m->out[rank].announced, __ATOMIC_RELAXED) != NULL)
            && !m->in[rank].stream.over)
            sockets[count++] = (struct pollfd){m->in[rank].stream.fd, POLLIN, 0};
        if (__atomic_load_n(&m->out[rank].queue, __ATOMIC_RELAXED) != NULL
            || __atomic_load_n(&m->out[rank].flow.due, __ATOMIC_RELAXED))
            sockets[count++] = (struct pollfd){m->out[rank].stream.fd, POLLOUT, 0};
    }
    double most = alone && sockets != NULL ? seconds : seconds < 1e-3 ? seconds : 1e-3;
    poll(sockets, count, most < 1e-3 && most > 0 ? 1 : (int)(1e3 * most));
    __atomic_sub_fetch(&m->callers, 1, __ATOMIC_RELAXED);
    free(sockets);
}

const struct carrier streams = {1, 1, may_have, has, read_bytes, send_pieces, announce};
