/* Posted operations: sends and receives in flight while their caller does other things, without a thread
   for each.

   A receive that waits is in one list, in posted order. Whoever reads the beginning of a message, for any
   exchange of this rank, first looks in this list: the first receive that matches gets the message,
   straight into its memory. A message for which there is none is kept. Each end remembers up to which
   receive its kept messages have been offered, so a new receive looks at them once, before it can get a
   later message.

   A send that cannot leave at once waits in the queue of its rank. A short one leaves a copy there and is
   over. Every other send to this rank waits until the queue is empty.

   Nothing moves by itself: messages_progress does all that is possible, whenever this rank posts, tests or
   waits. The lock is held for a walk through the list at most. An end is taken before the lock. */

#include "messages.h"
#include "copying.h"

#include <stdlib.h>
#include <string.h>

static const char CLOSED[] = "this rank has closed the communicator";

/* Adds an operation to the finished ones. From then on its owner may free it. */
static void finish(struct messages *m, struct posted *p, enum state state)
{
    spin_lock(&m->lock);
    p->next = m->finished;
    m->finished = p;
    __atomic_store_n(&p->state, state, __ATOMIC_RELEASE);
    spin_unlock(&m->lock);
}

void post_end(struct messages *m, struct posted *p, const char *damage)
{
    if (p->state == MATCHED)
        __atomic_sub_fetch(&m->in[p->source].wanted, 1, __ATOMIC_RELAXED);
    p->damage = damage;
    finish(m, p, damage ? FAILED_STATE : OVER);
}

struct posted *messages_finished(struct messages *m)
{
    if (__atomic_load_n(&m->finished, __ATOMIC_RELAXED) == NULL)
        return NULL;
    spin_lock(&m->lock);
    struct posted *first = m->finished;
    __atomic_store_n(&m->finished, NULL, __ATOMIC_RELAXED);
    spin_unlock(&m->lock);
    return first;
}

/* Takes a receive out of the list. The caller has the lock. */
static void unlink_posted(struct messages *m, struct posted *p, struct posted *before)
{
    __atomic_store_n(before != NULL ? &before->next : &m->posted, p->next, __ATOMIC_RELAXED);
    m->last = m->last == p ? before : m->last;
    __atomic_sub_fetch(p->source < 0 ? &m->wild : &m->in[p->source].wanted, 1, __ATOMIC_RELAXED);
}

/* Takes the first receive for a message, of those with a number above `after` and up to `last`. */
static struct posted *take_posted(struct messages *m, int rank, int64_t tag, uint64_t after, uint64_t last)
{
    if (__atomic_load_n(&m->posted, __ATOMIC_ACQUIRE) == NULL)
        return NULL;
    spin_lock(&m->lock);
    struct posted *p = m->posted, *before = NULL;
    while (p != NULL
           && (p->number <= after || (p->source >= 0 && p->source != rank) || (tag & p->mask) != p->tag)) {
        before = p;
        p = p->next;
    }
    p = p != NULL && p->number <= last ? p : NULL; /* those behind it have higher numbers */
    if (p != NULL) {
        unlink_posted(m, p, before);
        if (p->source < 0) /* the sources take turns */
            __atomic_store_n(&m->turn, (rank + 1) % m->size, __ATOMIC_RELAXED);
        p->source = rank;
        __atomic_add_fetch(&m->in[rank].wanted, 1, __ATOMIC_RELAXED);
        __atomic_store_n(&p->state, MATCHED, __ATOMIC_RELEASE);
    }
    spin_unlock(&m->lock);
    return p;
}

/* Has the bytes of an announced message sent to its receive. */
static void ask(struct messages *m, int rank, struct posted *p, const struct kept *announced)
{
    struct kept *message = kept_new(announced->tag, 0, announced->nbytes, p);
    if (message == NULL || !flow_grant(m, rank, announced->number)) {
        free(message);
        post_end(m, p, NO_MEMORY);
        return;
    }
    message->number = announced->number;
    flow_expect(&m->in[rank], message);
}

/* Ends the receive of a complete message. */
static void give(struct messages *m, struct kept *message)
{
    struct posted *p = message->owner;
    p->nbytes = message->nbytes;
    p->tag = message->tag;
    if (p->bytes == NULL) {
        p->message = message;
    } else {
        if (message->bytes != p->bytes)
            copy(p->bytes, message->bytes, smaller(p->room, p->nbytes));
        free(message);
    }
    post_end(m, p, NULL);
}

struct posted *post_match(struct messages *m, int rank, int64_t tag)
{
    /* A receive that has not looked at the kept messages yet may match one of them, which is older. */
    const struct end *e = &m->in[rank];
    return take_posted(m, rank, tag, 0, e->kept != NULL ? e->scanned : UINT64_MAX);
}

void post_deliver(struct messages *m, int rank)
{
    struct end *e = &m->in[rank];
    uint64_t before = e->scanned, posts = __atomic_load_n(&m->posts, __ATOMIC_ACQUIRE);
    if (before == posts)
        return;
    e->scanned = posts;
    struct kept **at = &e->kept, *last = NULL;
    while (*at != NULL) {
        struct posted *p = take_posted(m, rank, (*at)->tag, before, UINT64_MAX);
        if (p == NULL) {
            last = *at;
            at = &last->next;
            continue;
        }
        struct kept *message = kept_unlink(e, at, last);
        message->owner = p;
        if (message->number == 0) {
            give(m, message);
        } else if (!message->coming) {
            ask(m, rank, p, message);
            free(message);
        } else {
            message->coming = 0;
            if (message != e->unfinished) /* otherwise its bytes are being read */
                flow_expect(e, message);
        }
    }
}

void post_keep(struct messages *m, int rank, struct kept *message)
{
    int coming = message->coming;
    message->coming = 0;
    message->number = 0;
    if (message->owner == NULL && !coming)
        message->owner = post_match(m, rank, message->tag);
    if (message->owner != NULL) {
        m->in[rank].flow.freed += message->weight;
        give(m, message);
    } else if (!coming) { /* otherwise it is in the list already */
        kept_add(&m->in[rank], message);
    }
}

int post_wants(struct messages *m, int rank)
{
    return __atomic_load_n(&m->wild, __ATOMIC_RELAXED)
           || __atomic_load_n(&m->in[rank].wanted, __ATOMIC_RELAXED);
}

/* -- sending --------------------------------------------------------------------------------- */

/* Takes the first send out of a queue, or of the announced ones. */
static struct outgoing *unlink_first(struct outgoing **queue)
{
    struct outgoing *first = *queue;
    __atomic_store_n(queue, first->next, __ATOMIC_RELEASE);
    return first;
}

static void end_send(struct messages *m, struct outgoing *o, const char *damage)
{
    __atomic_sub_fetch(&m->queued, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&m->copied, o->copied, __ATOMIC_RELAXED);
    if (o->posted != NULL)
        post_end(m, o->posted, damage);
    free(o->copy);
    free(o);
}

static void append(struct outgoing **queue, struct outgoing **last, struct outgoing *o)
{
    o->next = NULL;
    __atomic_store_n(*queue != NULL ? &(*last)->next : queue, o, __ATOMIC_RELEASE);
    *last = o;
}

/* Ends all sends to a rank. */
static void end_sends(struct messages *m, struct end *e, const char *damage)
{
    while (e->queue != NULL)
        end_send(m, unlink_first(&e->queue), damage);
    while (e->announced != NULL)
        end_send(m, unlink_first(&e->announced), damage);
}

/* Puts the granted sends behind the queue. */
static void queue_granted(struct end *e)
{
    struct outgoing **at = &e->announced, *before = NULL, *o;
    while ((o = *at) != NULL && __atomic_load_n(&e->flow.grants, __ATOMIC_RELAXED)) {
        if (!(o->exchange.granted = flow_granted(e, o->exchange.number))) {
            before = o;
            at = &o->next;
            continue;
        }
        e->announced_last = e->announced_last == o ? before : e->announced_last;
        append(&e->queue, &e->queue_last, unlink_first(at));
    }
}

/* Sends what can be sent of a queue that the caller has taken. */
static int flush(struct messages *m, int to)
{
    struct end *e = &m->out[to];
    int moved = 0;
    if (e->announced != NULL)
        queue_granted(e);
    while (e->queue != NULL) {
        struct exchange *x = &e->queue->exchange;
        moved |= exchange_step(x);
        if (x->damage != NULL) {
            end_sends(m, e, x->damage);
        } else if (exchange_waits(x)) { /* others may go before it: the announcement has its place */
            append(&e->announced, &e->announced_last, unlink_first(&e->queue));
        } else if (x->pending) {
            break;
        } else {
            end_send(m, unlink_first(&e->queue), NULL);
        }
    }
    if (e->announced != NULL && __atomic_load_n(&m->in[to].stream.over, __ATOMIC_RELAXED))
        end_sends(m, e, STREAM_ENDED);
    return moved;
}

int post_flush(struct messages *m, int to)
{
    int *flushing = &m->out[to].flushing;
    if (__atomic_exchange_n(flushing, 1, __ATOMIC_ACQUIRE))
        return 0;
    int moved = flush(m, to);
    __atomic_store_n(flushing, 0, __ATOMIC_RELEASE);
    return moved;
}

/* Takes an end for a moment, however long another thread has it. */
static struct end *take_own(struct messages *m)
{
    while (!end_take(&m->in[m->rank]))
        sched_yield();
    return &m->in[m->rank];
}

static int send_to_self(struct messages *m, struct posted *p, const void *bytes, size_t nbytes)
{
    struct kept *message = kept_new(p->tag, 0, nbytes, NULL);
    if (message == NULL)
        return -1;
    if (nbytes)
        copy(message->bytes, bytes, nbytes);
    struct end *e = take_own(m);
    post_deliver(m, m->rank);
    post_keep(m, m->rank, message);
    end_leave(m, e);
    post_end(m, p, NULL);
    return 0;
}

/* Copies the bytes of a queued send that have not left, so that the send is over; but not if the receiver
   may fetch them from the sender's array. */
static void detach(struct messages *m, struct outgoing *o, const char *bytes, size_t nbytes)
{
    if (o->exchange.claimable || nbytes > EAGER_BYTES
        || __atomic_load_n(&m->copied, __ATOMIC_RELAXED) > COPIED_BYTES
        || (nbytes && (o->copy = malloc(nbytes)) == NULL))
        return;
    if (nbytes)
        copy(o->copy, bytes, nbytes);
    for (int i = o->exchange.at; i < o->exchange.total; i++) {
        struct piece *piece = &o->exchange.pieces[i];
        if (piece->bytes >= bytes && piece->bytes < bytes + nbytes)
            piece->bytes = o->copy + (piece->bytes - bytes);
    }
    o->copied = nbytes;
    __atomic_add_fetch(&m->copied, nbytes, __ATOMIC_RELAXED);
    post_end(m, o->posted, NULL);
    o->posted = NULL;
}

int post_send(struct messages *m, struct posted *p, const void *bytes, size_t nbytes)
{
    if (p->to == m->rank)
        return send_to_self(m, p, bytes, nbytes);
    struct end *e = &m->out[p->to];
    struct outgoing *o = malloc(sizeof *o);
    if (o == NULL)
        return -1;
    o->posted = p;
    o->copy = NULL;
    o->copied = 0;
    exchange_begin(&o->exchange, m);
    exchange_send(&o->exchange, p->to, p->tag, bytes, nbytes, NULL, POSTS);
    o->exchange.queued = 1;
    while (__atomic_exchange_n(&e->flushing, 1, __ATOMIC_ACQUIRE))
        sched_yield();
    __atomic_add_fetch(&m->queued, 1, __ATOMIC_RELAXED);
    append(&e->queue, &e->queue_last, o);
    flush(m, p->to);
    if (__atomic_load_n(&p->state, __ATOMIC_RELAXED) == PENDING)
        detach(m, o, bytes, nbytes);
    __atomic_store_n(&e->flushing, 0, __ATOMIC_RELEASE);
    return 0;
}

/* -- receiving ------------------------------------------------------------------------------- */

/* Reads what a rank has sent, as far as a receive wants it, or (draining = 1) all. */
static int drain(struct messages *m, int rank, int draining)
{
    struct end *e = &m->in[rank];
    if (rank != m->rank)
        return messages_drain(m, rank, draining);
    if (__atomic_load_n(&e->keeps, __ATOMIC_RELAXED)) {
        take_own(m);
        post_deliver(m, rank);
        end_leave(m, e);
    }
    return 0;
}

int messages_progress(struct messages *m)
{
    int moved = 0, queued = __atomic_load_n(&m->queued, __ATOMIC_RELAXED), start = __atomic_load_n(&m->turn, __ATOMIC_RELAXED);
    for (int to = 0; to < m->size && queued; to++)
        if (__atomic_load_n(&m->out[to].announced, __ATOMIC_RELAXED) != NULL)
            moved |= drain(m, to, 1) | post_flush(m, to);
        else if (__atomic_load_n(&m->out[to].queue, __ATOMIC_RELAXED) != NULL)
            moved |= post_flush(m, to);
    for (int i = 0; i < m->size; i++) {
        int rank = (start + i) % m->size;
        if (post_wants(m, rank))
            moved |= drain(m, rank, FOR_POSTED);
    }
    return moved;
}

void post_receive(struct messages *m, struct posted *p)
{
    spin_lock(&m->lock);
    p->next = NULL;
    p->number = m->posts + 1;
    __atomic_add_fetch(p->source < 0 ? &m->wild : &m->in[p->source].wanted, 1, __ATOMIC_RELAXED);
    __atomic_store_n(m->last != NULL ? &m->last->next : &m->posted, p, __ATOMIC_RELEASE);
    m->last = p;
    __atomic_store_n(&m->posts, p->number, __ATOMIC_RELEASE);
    spin_unlock(&m->lock);
    messages_progress(m);
}

int post_cancel(struct messages *m, struct posted *p)
{
    spin_lock(&m->lock);
    struct posted *at = m->posted, *before = NULL;
    for (; at != NULL && at != p; at = at->next)
        before = at;
    if (at != NULL)
        unlink_posted(m, at, before);
    spin_unlock(&m->lock);
    if (at != NULL)
        finish(m, p, CANCELLED);
    return at != NULL;
}

int post_find(struct messages *m, struct posted *p, int take)
{
    int turn = __atomic_load_n(&m->turn, __ATOMIC_RELAXED);
    int start = p->source < 0 ? turn : p->source, number = p->source < 0 ? m->size : 1;
    for (int i = 0; i < number; i++) {
        int rank = (start + i) % m->size;
        struct end *e = &m->in[rank];
        drain(m, rank, 1);
        if (!end_take(e))
            continue;
        struct kept **at = &e->kept, *before = NULL, *found;
        for (; (found = *at) != NULL && (found->tag & p->mask) != p->tag; at = &before->next)
            before = found;
        if (found != NULL && take && found->number != 0) {
            flow_fetch(m, rank, at);
            found = NULL; /* it may be taken once it is complete */
        }
        if (found != NULL) {
            if (p->source < 0 && take)
                __atomic_store_n(&m->turn, (rank + 1) % m->size, __ATOMIC_RELAXED);
            p->source = rank;
            p->tag = found->tag;
            p->nbytes = found->nbytes;
            if (take) {
                p->message = kept_unlink(e, at, before);
                p->state = OVER;
            }
        }
        end_leave(m, e);
        if (found != NULL)
            return 1;
    }
    return 0;
}

/* Whether damage at a rank, or at all (-1), ends a receive. */
static int is_hit(struct messages *m, const struct posted *p, int rank, const char *damage)
{
    if (rank < 0 || damage != STREAM_ENDED || p->source == rank)
        return 1;
    int over = p->source < 0;
    for (int peer = 0; peer < m->size && over; peer++)
        over = peer == m->rank || __atomic_load_n(&m->in[peer].stream.over, __ATOMIC_RELAXED);
    return over;
}

void post_fail(struct messages *m, int rank, const char *damage)
{
    spin_lock(&m->lock);
    for (struct posted *p = m->posted, *before = NULL, *next; p != NULL; p = next) {
        next = p->next;
        if (!is_hit(m, p, rank, damage)) {
            before = p;
            continue;
        }
        unlink_posted(m, p, before);
        p->damage = damage;
        p->source = rank;
        p->next = m->finished;
        m->finished = p;
        __atomic_store_n(&p->state, FAILED_STATE, __ATOMIC_RELEASE);
    }
    spin_unlock(&m->lock);
}

void post_close(struct messages *m)
{
    post_fail(m, -1, CLOSED);
    for (int rank = 0; rank < m->size; rank++) {
        struct end *in = &m->in[rank], *out = &m->out[rank];
        while (__atomic_exchange_n(&out->flushing, 1, __ATOMIC_ACQUIRE))
            sched_yield();
        /* From now on a receiver that fetches a message would read memory that has other owners. */
        if (m->carrier == &rings && rank != m->rank)
            __atomic_store_n(out->ring.claim + WITHDRAWN, 1, __ATOMIC_SEQ_CST);
        end_sends(m, out, CLOSED);
        __atomic_store_n(&out->flushing, 0, __ATOMIC_RELEASE);
        /* Another thread may own the end until it notices. Then it ends the receive. */
        if (!end_take(in))
            continue;
        if (in->unfinished != NULL && in->unfinished->owner != NULL) {
            post_end(m, in->unfinished->owner, CLOSED);
            free(in->unfinished);
            in->unfinished = NULL;
        }
        for (struct kept *each = in->flow.asked; each != NULL; each = in->flow.asked) {
            post_end(m, each->owner, CLOSED);
            in->flow.asked = each->next;
            free(each);
        }
        end_leave(m, in);
    }
}
