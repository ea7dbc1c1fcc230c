/* Messages: a ring of bytes for each ordered pair of ranks.

   A message is three words, its length, tag and address, and its bytes, up to a multiple of 8. Both
   ends count the bytes that they have gone through. The sender announces what it has written, and
   writes where the receiver has announced that it has read; each writes its own count alone. So a
   message of any length goes through: one end writes a part while the other reads the part before.

   Of a rank's threads one at a time sends to a peer, until it has sent all of its message. One at a
   time receives: of a message that nobody has asked for yet as much as there is, of its own all.
   So no message is in the way of another for longer than its sender takes.

   A ring holds little of a long message. Where the sender has no processor, the receiver claims the
   message, has the kernel copy the rest of it, whose address it knows, and announces that it has
   read all of it; the sender goes on from there. A sender may return only if the message has not
   been claimed: it announces all of it, then looks for a claim, while the receiver claims, then
   looks for what has been announced. One of them sees the other.

   tests/native/test_ring_model.py tries all interleavings of an end and the other. */

#include "messages.h"
#include "sleeping.h"

#include "copying.h"

#include <stdlib.h>
#include <string.h>

/* After so much the other end is let know: it copies at the same time, from cache to cache. Least of
   what is short, so that it begins soon and has soon done; most where that makes no difference. */
#ifndef CHUNK_BYTES
#define CHUNK_BYTES ((size_t)8 << 10)
#endif
#define CHUNK_BYTES_MOST (8 * CHUNK_BYTES)
/* No message is as long: what says so is damaged. */
#define NO_LENGTH ((uint64_t)1 << 47)
/* No message has it, as begin() takes none as low: who asks for it takes all that there is off a
   ring. */
#define NO_TAG INT64_MIN
/* Below this a receiver does not fetch. The tests take other sizes. */
#ifndef CLAIMED_BYTES
#define CLAIMED_BYTES ((size_t)64 << 10)
#endif
#define PREFIX 3

struct kept {
    struct kept *next;
    int64_t tag;
    size_t nbytes;
    char bytes[];
};

const char NO_MEMORY[] = "no memory";

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Returns how much of what is left is copied before the other end hears of it: whole lines. */
static size_t chunk_of(size_t left)
{
    size_t share = left / 256 / 64 * 64;
    return share < CHUNK_BYTES ? CHUNK_BYTES : smaller(share, CHUNK_BYTES_MOST);
}

static void announce(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static int take(struct ring *r)
{
    return !__atomic_exchange_n(&r->taken, 1, __ATOMIC_ACQUIRE);
}

static void let_go(struct ring *r)
{
    announce(r->mine, r->position);
    __atomic_store_n(&r->keeps, r->kept != NULL, __ATOMIC_RELAXED);
    __atomic_store_n(&r->taken, 0, __ATOMIC_RELEASE);
}

/* Returns how many bytes an end may go on by, of which the sender's may be by a whole ring more
   than the receiver has read; looks at what the other one has announced if they are too few. */
static size_t ready(struct exchange *x, struct ring *r, size_t ahead, int64_t enough)
{
    int64_t count = (int64_t)(r->seen + ahead - r->position);
    if (count < enough) {
        r->seen = __atomic_load_n(r->theirs, __ATOMIC_ACQUIRE);
        count = (int64_t)(r->seen + ahead - r->position);
        if (r->seen % 8) { /* messages end, and chunks are announced, at whole words */
            x->damage = "bytes that are no whole words";
            return 0;
        }
    }
    if (count <= (int64_t)x->messages->capacity)
        return count > 0 ? (size_t)count : 0; /* a claim takes the receiver past the sender */
    if (ahead && x->claimable && r->seen == x->stop)
        return 0;
    x->damage = "more bytes in a ring than it has";
    return 0;
}

/* Whether the receiver has claimed what is sent; then it is over when it has all of it. */
static int claimed(struct exchange *x, struct ring *r)
{
    if (!x->claimable || __atomic_load_n(r->claim, __ATOMIC_SEQ_CST) != x->stop)
        return 0;
    r->seen = __atomic_load_n(r->theirs, __ATOMIC_ACQUIRE);
    if (r->seen == x->stop) {
        r->position = x->stop;
        x->at = x->count;
        x->moved++;
    }
    return 1;
}

/* Sends as much as there is room for. */
static void send_step(struct exchange *x)
{
    struct ring *r = &x->messages->out[x->to];
    size_t capacity = x->messages->capacity, room;
    if (!x->holds) {
        if (!(x->holds = take(r)))
            return;
        x->stop += r->position;
    }
    /* Whole words are announced: the receiver rounds up to these what it has read. */
    uint64_t announced = r->position;
    while (x->at < x->count && !claimed(x, r) && (room = ready(x, r, x->ahead, 1)) > 0) {
        struct piece *p = &x->pieces[x->at];
        size_t chunk = chunk_of(p->nbytes), count = smaller(smaller(p->nbytes, room), chunk);
        size_t at = r->position % capacity, first = smaller(count, capacity - at);
        if (p->bytes != NULL) {
            memcpy(r->data + at, p->bytes, first);
            memcpy(r->data, p->bytes + first, count - first);
            p->bytes += count;
        }
        r->position += count;
        x->moved += count;
        if ((p->nbytes -= count) == 0)
            x->at++;
        if (r->position - announced >= chunk)
            announce(r->mine, announced = r->position & ~UINT64_C(7));
    }
    /* Not while it waits, or the line of this word would keep going to the receiver and back. Before
       it looks for a claim, in one order with that. */
    if (x->at == x->count)
        __atomic_store_n(r->mine, r->position, x->claimable ? __ATOMIC_SEQ_CST : __ATOMIC_RELEASE);
    else if (r->position != announced)
        announce(r->mine, r->position & ~UINT64_C(7));
    x->from = x->damage ? x->to : x->from;
    if (x->at == x->count && (!claimed(x, r) || r->seen == x->stop)) {
        x->pending &= ~SENDING;
        let_go(r);
    }
}

/* Reads as much as there is of nbytes, of which done are read; returns whether that is all. */
static int read_bytes(struct exchange *x, struct ring *r, char *to, size_t nbytes, size_t *done)
{
    size_t capacity = x->messages->capacity, there;
    int around = beyond_caches(2 * nbytes, 0); /* the sender's array, and this one */
    while (*done < nbytes && (there = ready(x, r, 0, 1)) > 0) {
        size_t left = nbytes - *done, count = smaller(smaller(left, there), chunk_of(left));
        size_t at = r->position % capacity, first = smaller(count, capacity - at);
        copy_to_result(to + *done, (char *)r->data + at, first, around);
        copy_to_result(to + *done + first, (char *)r->data, count - first, around);
        *done += count;
        x->moved += count;
        r->position += (count + 7) / 8 * 8;
        announce(r->mine, r->position);
    }
    return *done == nbytes;
}

/* Whether a head is the one that a receiver can do with; if not, it is left to another. */
static int fits(struct exchange *x, const char *head)
{
    x->misfit = x->fitting != NULL && memcmp(head, x->fitting, 8 * (4 + x->fitting[3])) != 0;
    return !x->misfit;
}

static void keep(struct ring *r, struct kept *message)
{
    *(r->kept != NULL ? &r->last->next : &r->kept) = message;
    r->last = message;
}

static struct kept *new_kept(struct exchange *x, int64_t tag, size_t nbytes)
{
    struct kept *message = malloc(sizeof *message + nbytes);
    if (message == NULL) {
        x->damage = NO_MEMORY;
        return NULL;
    }
    *message = (struct kept){NULL, tag, nbytes};
    return message;
}

/* Finds a rank's next message with a tag, and takes those before it off the ring. Sets misfit, or
   matched: then it is in found, or the ring is the caller's until it has read it. */
static void match(struct exchange *x, int rank, int64_t tag)
{
    struct ring *r = &x->messages->in[rank];
    size_t wanted = x->fitting != NULL ? HEAD_BYTES : x->nbytes, length = 0;
    if ((__atomic_load_n(r->theirs, __ATOMIC_ACQUIRE) == __atomic_load_n(r->mine, __ATOMIC_RELAXED)
         && !__atomic_load_n(&r->keeps, __ATOMIC_RELAXED)) || !take(r))
        return;
    x->from = rank;
    while (!x->matched && !x->misfit && !x->damage) {
        if (r->unfinished != NULL) {
            if (!read_bytes(x, r, r->unfinished->bytes, r->unfinished->nbytes, &r->done))
                break;
            keep(r, r->unfinished);
            r->unfinished = NULL;
        }
        struct kept **at = &r->kept, *before = NULL;
        for (; *at != NULL && (*at)->tag != tag; at = &before->next)
            before = *at;
        int64_t words[PREFIX];
        if (*at != NULL) {
            length = (*at)->nbytes;
            if (length == wanted && fits(x, (*at)->bytes)) {
                x->found = *at;
                *at = x->found->next;
                r->last = r->last == x->found ? before : r->last;
            }
            x->matched = !x->misfit;
        } else if (ready(x, r, 0, sizeof words) < sizeof words) {
            break;
        } else {
            size_t read = 0;
            read_bytes(x, r, (char *)words, sizeof words, &read);
            length = (size_t)words[0];
            x->address = (const char *)(intptr_t)words[2];
            x->end = r->position + (length + 7) / 8 * 8;
            if (length >= NO_LENGTH)
                x->damage = "a length that no message has";
            else if (words[1] == tag)
                x->matched = 1;
            else if ((r->unfinished = new_kept(x, words[1], length)) != NULL)
                r->done = 0;
        }
    }
    if (x->matched && length != wanted)
        x->damage = "a message of another length than what is asked for";
    if (!x->matched || x->found != NULL)
        let_go(r);
}

/* Goes on with the message that is matched; returns whether all of it is there. */
static int receive_matched(struct exchange *x)
{
    struct ring *r = &x->messages->in[x->from];
    char *to = x->fitting != NULL ? x->head : x->bytes;
    size_t nbytes = x->fitting != NULL ? HEAD_BYTES : x->nbytes;
    if (x->found != NULL) {
        memcpy(to, x->found->bytes, nbytes);
        free(x->found);
        x->found = NULL;
    } else {
        if (!read_bytes(x, r, to, nbytes, &x->done))
            return 0;
        struct kept *left;
        if (!fits(x, to) && (left = new_kept(x, x->tag, nbytes)) != NULL) {
            memcpy(left->bytes, to, nbytes);
            left->next = r->kept;
            r->last = r->kept != NULL ? r->last : left;
            r->kept = left;
        }
        let_go(r);
    }
    x->matched = 0;
    return 1;
}

static void receive_step(struct exchange *x)
{
    while (x->pending & RECEIVING && !x->damage) {
        for (int rank = x->first; rank <= x->last && !x->matched && !x->misfit; rank++)
            if (rank != x->messages->rank)
                match(x, rank, x->tag);
        if (x->damage || (!x->misfit && (!x->matched || !receive_matched(x))))
            return;
        x->moved++;
        if (x->fitting != NULL && !x->misfit && x->nbytes > HEAD_ROOM) {
            /* The array comes behind its head. */
            x->fitting = NULL;
            x->done = 0;
            x->first = x->last = x->from;
            continue;
        }
        if (x->fitting != NULL && !x->misfit)
            memcpy(x->bytes, x->head + HEAD_BYTES - HEAD_ROOM, x->nbytes);
        x->pending &= ~RECEIVING;
    }
}

size_t exchange_claim(struct exchange *x)
{
    if (!(x->pending & RECEIVING) || !x->matched || x->found != NULL || x->address == NULL
        || x->fitting != NULL || x->damage)
        return 0;
    struct ring *r = &x->messages->in[x->from];
    __atomic_store_n(r->claim, x->end, __ATOMIC_SEQ_CST);
    r->seen = __atomic_load_n(r->theirs, __ATOMIC_SEQ_CST);
    return (int64_t)(r->seen - x->end) >= 0 ? 0 : x->nbytes - x->done;
}

void exchange_fetched(struct exchange *x)
{
    x->done = x->nbytes;
    x->messages->in[x->from].position = x->end;
}

/* Wakes the peers of an exchange in which something has moved, if they nap. */
static void wake_peers(const struct exchange *x, int pending)
{
    const struct messages *m = x->messages;
    if (m->sleepers == NULL || __atomic_load_n(m->sleepers, __ATOMIC_RELAXED) == 0)
        return;
    if (pending & SENDING)
        wake((uint32_t *)(m->asleep + (size_t)x->to * m->apart));
    wake((uint32_t *)(m->asleep + (size_t)x->from * m->apart));
}

int exchange_step(struct exchange *x)
{
    uint64_t before = x->moved;
    int pending = x->pending;
    if (x->damage)
        return 0;
    if (x->pending & SENDING)
        send_step(x);
    if (x->pending & RECEIVING)
        receive_step(x);
    else if (x->pending && x->misfit && !x->damage) {
        x->misfit = 0;
        match(x, x->first, NO_TAG);
        x->misfit = 1;
    }
    if (x->moved != before)
        wake_peers(x, pending);
    return x->moved != before;
}

void exchange_begin(struct exchange *x, struct messages *messages)
{
    memset(x, 0, offsetof(struct exchange, head));
    x->messages = messages;
}

static void add(struct exchange *x, const void *bytes, size_t nbytes)
{
    if (nbytes > 0)
        x->pieces[x->count++] = (struct piece){bytes, nbytes};
}

void exchange_send(struct exchange *x, int to, int64_t tag, const void *bytes, size_t nbytes,
                   const int64_t *words, int claimable)
{
    int inlined = words != NULL && nbytes <= HEAD_ROOM;
    int64_t *w = x->words;
    x->pending |= SENDING;
    x->to = to;
    x->ahead = x->messages->capacity;
    if (words != NULL) {
        w[0] = HEAD_BYTES;
        w[1] = tag;
        w[2] = 0;
        memcpy(w + PREFIX, words, 8 * HEAD_WORDS);
        add(x, w, 8 * (PREFIX + HEAD_WORDS));
        add(x, NULL, inlined ? 0 : HEAD_ROOM);
        w += PREFIX + HEAD_WORDS;
    }
    if (!inlined) {
        x->claimable = claimable && nbytes >= CLAIMED_BYTES;
        if (x->claimable && nbytes > x->messages->streamed)
            x->ahead = smaller(x->ahead, CLAIMED_BYTES); /* the receiver fetches it, see go_on() */
        w[0] = (int64_t)nbytes;
        w[1] = tag;
        w[2] = x->claimable ? (int64_t)(intptr_t)bytes : 0;
        add(x, w, 8 * PREFIX);
    }
    add(x, bytes, nbytes);
    add(x, NULL, inlined ? HEAD_ROOM - nbytes : -nbytes % 8);
    for (int i = 0; i < x->count; i++)
        x->stop += x->pieces[i].nbytes;
}

void exchange_recv(struct exchange *x, int first, int last, int64_t tag, void *bytes,
                   size_t nbytes, const int64_t *words)
{
    x->pending |= RECEIVING;
    x->first = first;
    x->last = last;
    x->tag = tag;
    x->bytes = bytes;
    x->nbytes = nbytes;
    x->fitting = words;
}

void exchange_drain(struct exchange *x, int source)
{
    x->first = x->last = source;
    x->misfit = 1;
}

void messages_clear(struct messages *messages)
{
    for (int rank = 0; rank < messages->size; rank++) {
        struct ring *r = &messages->in[rank];
        for (struct kept *each = r->kept, *next; each != NULL; each = next) {
            next = each->next;
            free(each);
        }
        free(r->unfinished);
    }
}
