/* The sending half of an exchange: the pieces of a message, and when they may leave. A message that
   does not fit into the window of flow.c is only announced, and leaves once it has been granted. */

#include "messages.h"
#include "copying.h"
#include "fetching.h"

#include <string.h>

/* Bytes of the shortest message that a receiver may fetch. The tests set other sizes. */
#ifndef CLAIMED_BYTES
#define CLAIMED_BYTES ((size_t)64 << 10)
#endif

/* Whether a message is left to its receiver, which has the kernel copy it once. If it is beyond the caches,
   and both ends have nothing else to do, two copies at the same time are quicker. */
static int is_left(const struct messages *m, const void *bytes, size_t nbytes, enum sender sender)
{
    return m->pids != NULL && nbytes >= LEAST_LEFT
           && !(sender == SENDS && beyond_caches(2 * nbytes, 0))
           && lies_in_huge_pages(m->page_map, bytes, nbytes);
}

static void add(struct exchange *x, const void *bytes, size_t nbytes)
{
    if (nbytes > 0)
        x->pieces[x->count++] = (struct piece){bytes, nbytes};
}

void exchange_send(struct exchange *x, int to, int64_t tag, const void *bytes, size_t nbytes,
                   const int64_t *words, enum sender sender)
{
    int inlined = words != NULL && nbytes <= HEAD_ROOM;
    int64_t *w = x->words;
    x->weight = flow_weight(x->messages, tag, inlined ? HEAD_BYTES : nbytes);
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
        int left = is_left(x->messages, bytes, nbytes, sender);
        x->claimable = left || (sender != POSTS && x->messages->claims && nbytes >= CLAIMED_BYTES);
        if (left)
            x->ahead = smaller(x->ahead, CLAIMED_BYTES);
        w[0] = (int64_t)nbytes;
        w[1] = tag + (words != NULL ? PAYLOAD_TAG : 0);
        w[2] = x->claimable ? (int64_t)(intptr_t)bytes | (left ? LEFT_TO_RECEIVER : 0) : 0;
        x->lead = x->count;
        add(x, w, 8 * PREFIX);
    }
    add(x, bytes, nbytes);
    add(x, NULL, inlined ? HEAD_ROOM - nbytes : -nbytes % x->messages->carrier->unit);
    x->total = x->count;
    for (int i = 0; i < x->count; i++)
        x->stop += x->pieces[i].nbytes;
}

/* Returns the prefix of the message; a long array's head, which has another one, comes before it. */
static int64_t *last_prefix(struct exchange *x)
{
    return x->words + (x->lead > 0 ? PREFIX + HEAD_WORDS : 0);
}

/* Begins to send a message, or only its announcement if it does not fit into the window. */
static void begin_to_send(struct exchange *x, struct end *e)
{
    x->stop += e->position;
    if (x->weight == 0)
        return;
    if (x->weight <= WINDOW_BYTES && flow_is_full(e, x->weight))
        messages_drain(x->messages, x->to, 1); /* there may be a credit */
    if ((x->number = flow_begin(x->messages, e, x->weight, x->lead > 0)) == 0)
        return;
    last_prefix(x)[2] = x->number;
    x->lead_bytes = x->pieces[x->lead].nbytes;
    x->pieces[x->lead].nbytes = 8 * PREFIX;
    x->count = x->lead + 1;
}

/* Prepares the bytes of a message that has been announced. */
static void send_announced(struct exchange *x)
{
    int64_t *w = last_prefix(x);
    w[1] = CONTROL_TAG;
    w[2] = -x->number;
    x->pieces[x->lead] = (struct piece){(const char *)w, x->lead_bytes};
    x->at = x->lead;
    x->count = x->total;
}

/* Whether the exchange has the end to a peer, or gets it. */
static int take_to_send(struct exchange *x, struct end *e)
{
    if (x->holds)
        return 1;
    if (x->number != 0) {
        if (!x->granted && !(x->granted = flow_granted(e, x->number))) {
            if (__atomic_load_n(&x->messages->in[x->to].stream.over, __ATOMIC_RELAXED))
                x->damage = STREAM_ENDED;
            return 0;
        }
    } else if (!x->queued && __atomic_load_n(&e->queue, __ATOMIC_RELAXED) != NULL) {
        /* What was posted before goes first. */
        post_flush(x->messages, x->to);
        if (__atomic_load_n(&e->queue, __ATOMIC_RELAXED) != NULL)
            return 0;
    }
    if (!(x->holds = end_take(e)))
        return 0;
    x->begun = 0;
    if (x->number == 0)
        begin_to_send(x, e);
    return 1;
}

void exchange_send_step(struct exchange *x)
{
    struct messages *m = x->messages;
    struct end *e = &m->out[x->to];
    if (take_to_send(x, e) && (x->begun || (x->begun = flow_flush(m, e))) && m->carrier->send(x, e)) {
        if (x->number != 0 && !x->granted) {
            send_announced(x);
            x->holds = 0;
        } else {
            x->pending &= ~SENDING;
        }
        end_leave(m, e);
    }
    x->from = x->damage ? x->to : x->from;
}
