/* Rings: what carries messages between two ranks of one host. There is a ring of bytes for each
   ordered pair of ranks.

   A message is its prefix and its bytes, padded to a multiple of 8. Each end of the ring counts the
   bytes that it has passed, and writes no count but its own. The sender announces the bytes that it
   has written, and overwrites only bytes that the receiver has announced as read. So a message may
   be longer than the ring: one end writes a part while the other end reads the part before.

   A head is a message of HEAD_BYTES, but of a short array most of them have no meaning: the last words
   are zero, and what follows the elements is padding. The ring has neither. Where a prefix has an
   address, that of a head has the lengths of its two parts, as a negative number. So a head of one
   number takes 72 bytes of the ring, and not 1,048.

   A ring holds only a small part of a long message. If the sender has no processor, the receiver
   claims the message: the receiver knows the address of the message and has the kernel copy the
   rest of it. Then the receiver announces that it has read the whole message, and the sender goes
   on from there. While a message is claimed, the sender must not return, since its caller could
   change the array. So the sender announces the whole message and then looks for a claim, while the
   receiver writes its claim and then looks at the sender's count. These four accesses are
   sequentially consistent, so at least one of the two ends sees the other. A sender that sees the
   claim waits until the receiver has read the message. A receiver that sees the whole message
   announced does not fetch it, but reads it from the ring.

   A sender whose array the kernel copies quickly leaves the message to the receiver, which claims it at
   once: a bit of the address says so. The sender copies only the first bytes into the ring, until the
   receiver turns out to be slow. A receiver may take its claim back: a message that is not claimed
   arrives all the same.

   tests/native/test_ring_model.py tries all interleavings of the two ends. */

#include "messages.h"

#include "copying.h"
#include "fetching.h"

/* Bytes that an end copies before it announces them. The other end copies them at the same time,
   from cache to cache. A short message has small chunks, so that the other end begins early and
   ends soon after this one. A long message has chunks up to CHUNK_BYTES_MOST: there the delay makes
   no difference. */
#ifndef CHUNK_BYTES
#define CHUNK_BYTES ((size_t)8 << 10)
#endif
#define CHUNK_BYTES_MOST (8 * CHUNK_BYTES)
/* Bytes that the kernel copies at a time. In between, the rank sees whether another one has failed, and
   a thread that holds the interpreter lock lets it go. */
#ifndef FETCHED_AT_ONCE
#define FETCHED_AT_ONCE ((size_t)16 << 20)
#endif

/* Returns how many of the bytes that are left are copied before the next announcement: whole cache
   lines. */
static size_t chunk_of(size_t left)
{
    size_t share = left / 16 / 64 * 64;
    return share < CHUNK_BYTES ? CHUNK_BYTES : smaller(share, CHUNK_BYTES_MOST);
}

static void announce(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static void announce_end(struct end *e)
{
    if (e->ring.mine != NULL) /* which the end of this rank's messages to itself lacks */
        announce(e->ring.mine, e->position);
}

static int may_have(const struct end *e)
{
    return __atomic_load_n(e->ring.theirs, __ATOMIC_ACQUIRE)
           != __atomic_load_n(e->ring.mine, __ATOMIC_RELAXED);
}

/* Returns how many bytes this end may advance. A receiver passes ahead = 0 and may advance to the
   sender's count. A sender may be ahead of the receiver's count by up to a whole ring. The count of
   the other end is loaded again only if the last known one allows fewer bytes than enough. */
static size_t ready(struct exchange *x, struct end *e, size_t ahead, int64_t enough)
{
    struct ring *r = &e->ring;
    int64_t count = (int64_t)(r->seen + ahead - e->position);
    if (count < enough) {
        r->seen = __atomic_load_n(r->theirs, __ATOMIC_ACQUIRE);
        count = (int64_t)(r->seen + ahead - e->position);
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

static int has(struct exchange *x, struct end *e, size_t nbytes)
{
    return ready(x, e, 0, (int64_t)nbytes) >= nbytes;
}

/* Returns whether the receiver has claimed the message that is being sent. Ends the sending if the
   receiver has the whole message. */
static int claimed(struct exchange *x, struct end *e)
{
    if (!x->claimable || __atomic_load_n(e->ring.claim, __ATOMIC_SEQ_CST) != x->stop)
        return 0;
    e->ring.seen = __atomic_load_n(e->ring.theirs, __ATOMIC_ACQUIRE);
    if (e->ring.seen == x->stop) {
        e->position = x->stop;
        x->at = x->count;
        x->moved++;
    }
    return 1;
}

/* The word of a prefix that tells the two lengths of a head. */
static int64_t lengths_word(size_t words, size_t room)
{
    return -(int64_t)(room * HEAD_BYTES + words);
}

/* Leaves out of a message's head what has no meaning; once, before the message is sent. */
static void shorten_head(struct exchange *x)
{
    struct piece *head = x->pieces, *pad = head + 1;
    const int64_t *words = x->words + PREFIX;
    if (head->bytes != (const char *)x->words || head->nbytes != 8 * (PREFIX + HEAD_WORDS)
        || x->words[2] != 0)
        return;
    size_t used = HEAD_WORDS, room = pad->bytes != NULL ? pad->nbytes : 0;
    while (used > 1 && words[used - 1] == 0)
        used--;
    pad += room > 0;
    head->nbytes = 8 * (PREFIX + used);
    x->words[2] = lengths_word(8 * used, room);
    x->stop -= 8 * (HEAD_WORDS - used);
    if (room < HEAD_ROOM) { /* otherwise there is no padding */
        x->stop -= pad->nbytes - -room % 8;
        pad->nbytes = -room % 8;
        x->count -= pad->nbytes == 0 && pad == &x->pieces[x->count - 1];
    }
}

/* Takes note of the prefix of the next message. */
static void note_prefix(struct exchange *x, struct end *e, int64_t *words)
{
    struct ring *r = &e->ring;
    int64_t lengths = words[2];
    r->left = (size_t)words[0];
    r->words = r->room = 0;
    r->end = e->position + (r->left + 7) / 8 * 8;
    r->source = NULL;
    if (lengths >= 0) {
        r->fetches = (lengths & LEFT_TO_RECEIVER) != 0;
        if (x->messages->pids != NULL)
            r->source = (const char *)(intptr_t)(lengths & ~LEFT_TO_RECEIVER);
        return;
    }
    r->room = (0 - (size_t)lengths) / HEAD_BYTES;
    r->words = (0 - (size_t)lengths) % HEAD_BYTES;
    words[2] = 0;
    if (r->left != HEAD_BYTES || r->room > HEAD_ROOM || r->words == 0 || r->words > 8 * HEAD_WORDS
        || r->words % 8)
        x->damage = "a head of impossible lengths";
}

/* Sets how many bytes at one place of a message are in the ring; or returns how many are not. */
static size_t missing(const struct ring *r, size_t nbytes, size_t done, size_t *count)
{
    *count = nbytes - done;
    if (r->words == 0)
        return 0;
    size_t end = 8 * HEAD_WORDS + r->room;
    if (done < r->words || (done >= 8 * HEAD_WORDS && done < end)) {
        *count = (done < r->words ? r->words : end) - done;
        return 0;
    }
    return done < 8 * HEAD_WORDS ? 8 * HEAD_WORDS - done : nbytes - done;
}

static int send_pieces(struct exchange *x, struct end *e)
{
    struct ring *r = &e->ring;
    size_t capacity = x->messages->capacity, room;
    if (x->at == 0)
        shorten_head(x);
    /* Only whole words are announced, since the receiver rounds its count up to whole words. */
    uint64_t announced = e->position;
    while (x->at < x->count && !claimed(x, e) && (room = ready(x, e, x->ahead, 1)) > 0) {
        struct piece *p = &x->pieces[x->at];
        size_t chunk = chunk_of(p->nbytes), count = smaller(smaller(p->nbytes, room), chunk);
        size_t at = e->position % capacity, first = smaller(count, capacity - at);
        if (p->bytes != NULL) {
            copy(r->data + at, p->bytes, first);
            copy(r->data, p->bytes + first, count - first);
            p->bytes += count;
        }
        e->position += count;
        x->moved += count;
        if ((p->nbytes -= count) == 0)
            x->at++;
        if (e->position - announced >= chunk)
            announce(r->mine, announced = e->position & ~UINT64_C(7));
    }
    /* A sender that waits for room stores nothing here. Otherwise the cache line of this word would
       keep moving to the receiver and back. At the end of the message the store comes before the
       look for a claim, and both are sequentially consistent: see the top of this file. */
    if (x->at == x->count)
        __atomic_store_n(r->mine, e->position, x->claimable ? __ATOMIC_SEQ_CST : __ATOMIC_RELEASE);
    else if (e->position != announced)
        announce(r->mine, e->position & ~UINT64_C(7));
    return x->at == x->count && (!claimed(x, e) || r->seen == x->stop);
}

/* Claims the running message, and has the kernel copy what is left of it, or the next part, from the
   sender's memory. The sender changes that memory only when the receiver has read it, or when the sender has
   given up. Then it has broken the communicator or withdrawn its messages before, so the copy is valid if
   neither is the case afterwards. If it is not valid, or if the sender has announced the whole message before
   the claim, the receiver takes its claim back and reads from the ring. */
static void fetch_part(struct exchange *x, struct end *e, char *to, size_t nbytes, size_t *done)
{
    struct ring *r = &e->ring;
    const struct messages *m = x->messages;
    size_t count = smaller(nbytes - *done, FETCHED_AT_ONCE);
    __atomic_store_n(r->claim, r->end, __ATOMIC_SEQ_CST);
    r->seen = __atomic_load_n(r->theirs, __ATOMIC_SEQ_CST);
    int valid = (int64_t)(r->seen - r->end) < 0
                && fetch_memory((long)m->pids[e - m->in], to + *done, r->source + *done, count);
#ifndef __SANITIZE_THREAD__
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the copy comes before the look at the flags */
#endif
    if (!valid || __atomic_load_n(m->broken, __ATOMIC_RELAXED)
        || __atomic_load_n(r->claim + WITHDRAWN, __ATOMIC_RELAXED)) {
        r->source = NULL;
        *done = nbytes - r->left;
        __atomic_store_n(r->claim, r->end - 1, __ATOMIC_SEQ_CST); /* no message ends there */
        return;
    }
    *done += count;
    x->moved += count;
    if (*done < nbytes)
        return;
    e->position = r->end;
    r->left = 0;
    r->source = NULL;
    announce(r->mine, e->position);
}

static int read_bytes(struct exchange *x, struct end *e, char *to, size_t nbytes, size_t *done)
{
    struct ring *r = &e->ring;
    size_t capacity = x->messages->capacity, there;
    int around = beyond_caches(2 * nbytes, 0); /* the sender's array and the receiver's */
    int is_prefix = r->left == 0 && *done < nbytes;
    if (!is_prefix && r->source != NULL && r->fetches) {
        fetch_part(x, e, to, nbytes, done);
        if (r->source != NULL)
            return 0;
    }
    while (*done < nbytes) {
        size_t left = nbytes - *done, count, gap = is_prefix ? 0 : missing(r, nbytes, *done, &left);
        if (gap > 0) {
            memset(to + *done, 0, gap);
            *done += gap;
            r->left -= gap;
            continue;
        }
        if ((there = ready(x, e, 0, 1)) == 0)
            break;
        count = smaller(smaller(left, there), chunk_of(left));
        size_t at = e->position % capacity, first = smaller(count, capacity - at);
        copy_to_result(to + *done, (char *)r->data + at, first, around);
        copy_to_result(to + *done + first, (char *)r->data, count - first, around);
        *done += count;
        x->moved += count;
        e->position += (count + 7) / 8 * 8;
        announce(r->mine, e->position);
        r->left -= is_prefix ? 0 : count;
    }
    if (is_prefix && *done == nbytes)
        note_prefix(x, e, (int64_t *)(void *)to);
    return *done == nbytes;
}

int exchange_hurry(struct exchange *x)
{
    int was_limited = x->pending & SENDING && x->ahead < x->messages->capacity, claims = 0;
    if (x->messages->carrier != &rings)
        return 0;
    x->ahead = x->messages->capacity;
    if (x->pending & RECEIVING && x->matched && x->found == NULL) {
        struct ring *r = &x->messages->in[x->from].ring;
        claims = r->source != NULL && !r->fetches;
        r->fetches |= claims;
    }
    return was_limited || claims;
}

const struct carrier rings = {8, 0, may_have, has, read_bytes, send_pieces, announce_end};
