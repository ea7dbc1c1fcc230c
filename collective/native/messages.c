/* Messages: a ring of bytes for each ordered pair of ranks.

   A message is three words (its length, tag and address) and its bytes, padded to a multiple of 8.
   Each end of the ring counts the bytes that it has passed, and writes no count but its own. The
   sender announces the bytes that it has written, and overwrites only bytes that the receiver has
   announced as read. So a message may be longer than the ring: one end writes a part while the
   other end reads the part before.

   Several threads of a rank may exchange messages. Only one of them at a time sends to a peer, and
   it keeps the ring until it has sent its whole message. Only one at a time receives from a peer.
   It reads its own message to the end. It reads a message that no thread has asked for yet only as
   far as the bytes have arrived, and keeps it for a later receiver. So no message blocks another
   for longer than its sender takes.

   A ring holds only a small part of a long message. If the sender has no processor, the receiver
   claims the message: the receiver knows the address of the message and has the kernel copy the
   rest of it. Then the receiver announces that it has read the whole message, and the sender goes
   on from there. While a message is claimed, the sender must not return, since its caller could
   change the array. So the sender announces the whole message and then looks for a claim, while the
   receiver writes its claim and then looks at the sender's count. These four accesses are
   sequentially consistent, so at least one of the two ends sees the other. A sender that sees the
   claim waits until the receiver has read the message. A receiver that sees the whole message
   announced does not fetch it, but reads it from the ring.

   tests/native/test_ring_model.py tries all interleavings of the two ends. */

#include "messages.h"
#include "sleeping.h"

#include "copying.h"

#include <stdlib.h>
#include <string.h>

/* Bytes that an end copies before it announces them. The other end copies them at the same time,
   from cache to cache. A short message has small chunks, so that the other end begins early and
   ends soon after this one. A long message has chunks up to CHUNK_BYTES_MOST: there the delay makes
   no difference. */
#ifndef CHUNK_BYTES
#define CHUNK_BYTES ((size_t)8 << 10)
#endif
#define CHUNK_BYTES_MOST (8 * CHUNK_BYTES)
/* No message is as long as this. A greater length is a sign of damage. */
#define NO_LENGTH ((uint64_t)1 << 47)
/* Sentinel below every valid tag; begin() in messages_type.c accepts no tag as low. A receiver that
   asks for this tag finds no message, and so takes all messages off the ring and keeps them. */
#define NO_TAG INT64_MIN
/* Bytes of the shortest message that a receiver may fetch. The tests set other sizes. */
#ifndef CLAIMED_BYTES
#define CLAIMED_BYTES ((size_t)64 << 10)
#endif
/* Words in front of the bytes of a message: its length, tag and address. */
#define PREFIX 3

/* A message that has been taken off the ring before a receiver asked for it. */
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

/* Returns how many of the bytes that are left are copied before the next announcement: whole cache
   lines. */
static size_t chunk_of(size_t left)
{
    size_t share = left / 256 / 64 * 64;
    return share < CHUNK_BYTES ? CHUNK_BYTES : smaller(share, CHUNK_BYTES_MOST);
}

static void announce(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Takes a ring for an exchange; returns whether the ring was free. */
static int take(struct ring *r)
{
    return !__atomic_exchange_n(&r->taken, 1, __ATOMIC_ACQUIRE);
}

/* Releases a ring, and announces the bytes that this end has passed. */
static void let_go(struct ring *r)
{
    announce(r->mine, r->position);
    __atomic_store_n(&r->keeps, r->kept != NULL, __ATOMIC_RELAXED);
    __atomic_store_n(&r->taken, 0, __ATOMIC_RELEASE);
}

/* Returns how many bytes this end may advance. A receiver passes ahead = 0 and may advance to the
   sender's count. A sender may be ahead of the receiver's count by up to a whole ring. The count of
   the other end is loaded again only if the last known one allows fewer bytes than enough. */
static size_t ready(struct exchange *x, struct ring *r, size_t ahead, int64_t enough)
{
    int64_t count = (int64_t)(r->seen + ahead - r->position);
    if (count < enough) {
        r->seen = __atomic_load_n(r->theirs, __ATOMIC_ACQUIRE);
        count = (int64_t)(r->seen + ahead - r->position);
        /* Messages end at whole words, and only whole words are announced. */
        if (r->seen % 8) {
            x->damage = "a count of bytes that is no multiple of 8";
            return 0;
        }
    }
    /* The count may be negative, as at a receiver that has fetched a message and so has passed the
       sender. */
    if (count <= (int64_t)x->messages->capacity)
        return count > 0 ? (size_t)count : 0;
    /* At a sender it exceeds the capacity if the receiver has fetched this message. */
    if (ahead && x->claimable && r->seen == x->stop)
        return 0;
    x->damage = "more bytes in a ring than its capacity";
    return 0;
}

/* Returns whether the receiver has claimed the message that is being sent. Ends the sending if the
   receiver has the whole message. */
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

/* Sends as many bytes as the ring has room for. */
static void send_step(struct exchange *x)
{
    struct ring *r = &x->messages->out[x->to];
    size_t capacity = x->messages->capacity, room;
    if (!x->holds) {
        if (!(x->holds = take(r)))
            return;
        x->stop += r->position;
    }
    /* Only whole words are announced, since the receiver rounds its count up to whole words. */
    uint64_t announced = r->position;
    while (x->at < x->count && !claimed(x, r) && (room = ready(x, r, x->ahead, 1)) > 0) {
        struct piece *p = &x->pieces[x->at];
        size_t chunk = chunk_of(p->nbytes), count = smaller(smaller(p->nbytes, room), chunk);
        size_t at = r->position % capacity, first = smaller(count, capacity - at);
        if (p->bytes != NULL) {
            copy(r->data + at, p->bytes, first);
            copy(r->data, p->bytes + first, count - first);
            p->bytes += count;
        }
        r->position += count;
        x->moved += count;
        if ((p->nbytes -= count) == 0)
            x->at++;
        if (r->position - announced >= chunk)
            announce(r->mine, announced = r->position & ~UINT64_C(7));
    }
    /* A sender that waits for room stores nothing here. Otherwise the cache line of this word would
       keep moving to the receiver and back. At the end of the message the store comes before the
       look for a claim, and both are sequentially consistent: see the top of this file. */
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

/* Reads the available bytes of a message of nbytes, of which *done have been read; returns whether
   the message is complete. */
static int read_bytes(struct exchange *x, struct ring *r, char *to, size_t nbytes, size_t *done)
{
    size_t capacity = x->messages->capacity, there;
    int around = beyond_caches(2 * nbytes, 0); /* the sender's array and the receiver's */
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

/* Whether a head describes an array that this receiver can take. If not, sets misfit, and the head
   is left for another receiver. */
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

/* Looks for the next message from a rank with a tag, and keeps the messages that come before it.
   Sets misfit if such a message was kept and its head does not fit. Otherwise sets matched if there
   is such a message. Then either the message is in found, or its bytes are next in the ring and the
   exchange owns the ring until it has read them.

   The ring is not taken if it holds nothing new and no message is kept. This check runs without
   ownership, so it may be out of date: a caller that misses a message finds it at its next step. */
static void match(struct exchange *x, int rank, int64_t tag)
{
    struct ring *r = &x->messages->in[rank];
    size_t wanted = x->fitting != NULL ? HEAD_BYTES : x->nbytes, length = 0;
    if ((__atomic_load_n(r->theirs, __ATOMIC_ACQUIRE) == __atomic_load_n(r->mine, __ATOMIC_RELAXED)
         && !__atomic_load_n(&r->keeps, __ATOMIC_RELAXED)) || !take(r))
        return;
    x->from = rank;
    while (!x->matched && !x->damage) {
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
            if (length == wanted) {
                if (!fits(x, (*at)->bytes))
                    break;
                x->found = *at;
                *at = x->found->next;
                r->last = r->last == x->found ? before : r->last;
            }
            x->matched = 1;
        } else if (ready(x, r, 0, sizeof words) < sizeof words) {
            break;
        } else {
            size_t read = 0;
            read_bytes(x, r, (char *)words, sizeof words, &read);
            length = (size_t)words[0];
            x->address = (const char *)(intptr_t)words[2];
            x->end = r->position + (length + 7) / 8 * 8;
            if (length >= NO_LENGTH)
                x->damage = "a message of an impossible length";
            else if (words[1] == tag)
                x->matched = 1;
            else if ((r->unfinished = new_kept(x, words[1], length)) != NULL)
                r->done = 0;
        }
    }
    if (x->matched && length != wanted)
        x->damage = "a message of another length than the receiver expects";
    if (!x->matched || x->found != NULL)
        let_go(r);
}

/* Reads more of the matched message; returns whether the message is complete. A head that does not
   fit is put back in front of the kept messages. */
static int receive_matched(struct exchange *x)
{
    struct ring *r = &x->messages->in[x->from];
    char *to = x->fitting != NULL ? x->head : x->bytes;
    size_t nbytes = x->fitting != NULL ? HEAD_BYTES : x->nbytes;
    if (x->found != NULL) {
        copy(to, x->found->bytes, nbytes);
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

/* Looks for a message from each of the ranks that the exchange receives from. If these are several,
   they take turns: the search begins after the rank whose message with this tag was received last.
   A search that always began at the same rank would never reach a message of a later rank while the
   earlier ranks keep sending. Several threads may search at once, so the rank is an atomic. */
static void search(struct exchange *x)
{
    int *served = &x->messages->served[(uint64_t)x->tag % TURNS], number = x->last - x->first + 1;
    int start = number > 1 ? __atomic_load_n(served, __ATOMIC_RELAXED) + 1 : 0;
    for (int i = 0; i < number && !x->matched && !x->misfit && !x->damage; i++) {
        int rank = x->first + (start + i) % number;
        if (rank != x->messages->rank)
            match(x, rank, x->tag);
    }
    if (x->matched && number > 1)
        __atomic_store_n(served, x->from - x->first, __ATOMIC_RELAXED);
}

static void receive_step(struct exchange *x)
{
    while (x->pending & RECEIVING && !x->damage) {
        if (!x->matched)
            search(x);
        if (x->damage || (!x->misfit && (!x->matched || !receive_matched(x))))
            return;
        x->moved++;
        if (x->fitting != NULL && !x->misfit && x->nbytes > HEAD_ROOM) {
            /* The elements follow as a second message from the same rank. */
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

/* Wakes the peers of an exchange in which bytes have moved, if the peers nap. */
static void wake_peers(const struct exchange *x, int pending)
{
    const struct messages *m = x->messages;
    if (m->sleepers == NULL || __atomic_load_n(m->sleepers, __ATOMIC_RELAXED) == 0)
        return;
    if (pending & SENDING)
        wake((uint32_t *)(m->asleep + (size_t)x->to * m->apart));
    if (x->from >= 0)
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
    else if (x->pending && (x->draining || x->misfit) && !x->damage)
        match(x, x->first, NO_TAG);
    if (x->moved != before)
        wake_peers(x, pending);
    return x->moved != before;
}

void exchange_begin(struct exchange *x, struct messages *messages)
{
    memset(x, 0, offsetof(struct exchange, head));
    x->messages = messages;
    x->from = -1;
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
            /* The receiver fetches such a message at once; see go_on() in messages_type.c. */
            x->ahead = smaller(x->ahead, CLAIMED_BYTES);
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
    x->draining = 1;
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
