/* The engine that matches messages: each receiver gets the messages of a source and a tag in their
   order. A carrier moves the bytes: rings.c within a host, streams.c between hosts.

   A message is a prefix and its bytes. Several threads of a rank may exchange messages. Only one of
   them at a time sends to a peer, and it keeps the end until it has sent its whole message. Only one
   at a time receives from a peer. It reads its own message to the end. It reads a message that no
   thread has asked for yet only as far as the bytes have arrived, and keeps it for a later receiver.
   So no message blocks another for longer than its sender takes. A rank reads what a peer sends only
   while it waits for something from this peer: meanwhile the carrier stops the sender. */

#include "messages.h"
#include "copying.h"
#include "sleeping.h"

#include <stdlib.h>
#include <string.h>

/* No message is as long as this. A greater length is a sign of damage. */
#define NO_LENGTH ((uint64_t)1 << 47)
/* Sentinel below every valid tag; begin() in messages_type.c accepts no tag as low. A receiver that
   asks for this tag finds no message, and so takes all messages off the ring and keeps them. */
#define NO_TAG INT64_MIN
/* The longest piece in the comparison of a call; see collective/algorithms/schedules.py. */
#define MARKED_BYTES ((size_t)1 << 20)
const char NO_MEMORY[] = "no memory", STREAM_ENDED[] = "the connection has ended";

/* Takes an end for an exchange; returns whether the end was free. */
int end_take(struct end *e)
{
    return !__atomic_exchange_n(&e->taken, 1, __ATOMIC_ACQUIRE);
}

/* Releases an end, and announces the bytes that it has passed. */
void end_leave(struct messages *m, struct end *e)
{
    m->carrier->announce(e);
    if (e->flow.freed >= WINDOW_BYTES / 2)
        flow_return(m, e);
    flow_flush(m, e);
    __atomic_store_n(&e->keeps, e->kept != NULL, __ATOMIC_RELAXED);
    __atomic_store_n(&e->taken, 0, __ATOMIC_RELEASE);
}

/* Whether a head describes an array that this receiver can take. If not, sets misfit, and the head
   is left for another receiver. */
static int fits(struct exchange *x, const char *head)
{
    x->misfit = x->fitting != NULL && memcmp(head, x->fitting, 8 * (4 + x->fitting[3])) != 0;
    return !x->misfit;
}

void kept_add(struct end *e, struct kept *message)
{
    message->next = NULL;
    *(e->kept != NULL ? &e->last->next : &e->kept) = message;
    e->last = message;
}

struct kept *kept_new(int64_t tag, int64_t mark, size_t nbytes, struct posted *owner)
{
    int directly = owner != NULL && owner->bytes != NULL && nbytes <= owner->room;
    struct kept *message = malloc(sizeof *message + (directly ? 0 : nbytes));
    if (message != NULL)
        *message = (struct kept){.tag = tag, .mark = mark, .nbytes = nbytes, .owner = owner,
                                 .bytes = directly ? owner->bytes : (char *)(message + 1)};
    return message;
}

/* Whether the message that has been found is of another call. Such a message has another length, and is
   dropped. */
static int is_foreign(struct exchange *x, int64_t mark)
{
    return x->differs = x->mark != 0 && mark != x->mark;
}

/* Takes the kept message at *at out of the list of an end. */
struct kept *kept_unlink(struct end *e, struct kept **at, struct kept *before)
{
    struct kept *found = *at;
    *at = found->next;
    e->last = e->last == found ? before : e->last;
    e->flow.freed += found->weight;
    return found;
}

/* Has the bytes of an announced message sent to this exchange, which expects so many. */
static void ask(struct exchange *x, int64_t number, size_t nbytes)
{
    if (nbytes != (x->fitting != NULL ? HEAD_BYTES : x->nbytes))
        x->damage = "a message of another length than the receiver expects";
    else if (!flow_grant(x->messages, x->from, number))
        x->damage = NO_MEMORY;
    x->messages->in[x->from].flow.asking++;
    x->asked = number;
    x->first = x->last = x->from;
    x->moved++;
}

/* Takes note of an announced message: a receive asks for its bytes at once, or it is kept. */
static void read_announced(struct exchange *x, struct end *e, int64_t tag, const int64_t *words)
{
    struct posted *owner = post_match(x->messages, x->from, words[1]);
    if (owner == NULL && words[1] == tag) {
        ask(x, words[2], (size_t)words[0]);
        return;
    }
    struct kept *message = kept_new(words[1], 0, owner != NULL ? (size_t)words[0] : 0, owner);
    if (message != NULL) {
        message->number = words[2];
        message->nbytes = (size_t)words[0];
    }
    if (message == NULL || (owner != NULL && !flow_grant(x->messages, x->from, words[2]))) {
        free(message);
        x->damage = NO_MEMORY;
        if (owner != NULL)
            post_end(x->messages, owner, NO_MEMORY);
    } else if (owner != NULL) {
        flow_expect(e, message);
    } else {
        kept_add(e, message);
    }
}

/* Reads a control frame: a credit, a grant, or the prefix of a message that has been asked for. */
static void read_control(struct exchange *x, struct end *e, const int64_t *words)
{
    if (words[2] >= 0) {
        x->damage = flow_note(x->messages, x->from, words);
        x->moved++;
    } else if (x->asked != 0 && words[2] == -x->asked) {
        x->matched = 1;
        e->flow.asking--;
    } else {
        struct kept *message = flow_asked(e, words[2], 1);
        e->unfinished = message;
        e->done = 0;
        if (message == NULL || message->nbytes != (size_t)words[0])
            x->damage = "the bytes of a message that nobody has asked for";
    }
}

/* Whether the next prefix begins the bytes of a message that another thread of this rank has asked for.
   That thread reads them, since they go to its array. */
static int is_of_another(const struct exchange *x, struct end *e)
{
    int64_t words[PREFIX];
    if (e->flow.asking == (x->asked != 0))
        return 0;
    memcpy(words, e->stream.ahead + e->stream.begin, sizeof words);
    return words[1] == CONTROL_TAG && words[2] < 0 && words[2] != -x->asked
           && flow_asked(e, words[2], 0) == NULL;
}

/* Reads the prefix that is next, and begins to keep its message if it has another tag. */
static void read_prefix(struct exchange *x, struct end *e, int64_t tag, size_t *length)
{
    const struct carrier *carrier = x->messages->carrier;
    int64_t words[PREFIX];
    size_t read = 0;
    carrier->read(x, e, (char *)words, sizeof words, &read);
    *length = (size_t)words[0];
    struct posted *owner = NULL;
    size_t weight = flow_weight(x->messages, words[1], *length);
    if (*length >= NO_LENGTH) {
        x->damage = "a message of an impossible length";
    } else if (words[1] == CONTROL_TAG && carrier->has_window) {
        read_control(x, e, words);
    } else if (weight > 0 && words[2] > 0) {
        read_announced(x, e, tag, words);
    } else if ((owner = post_match(x->messages, x->from, words[1])) == NULL && words[1] == tag
               && !is_foreign(x, words[2])) {
        x->matched = 1;
        e->flow.freed += weight;
    } else if (x->differs && *length > MARKED_BYTES) {
        x->damage = "a call with a piece of an impossible length";
    } else if ((e->unfinished = kept_new(words[1], words[2], *length, owner)) != NULL) {
        x->differs = 0; /* once it is there, it is found among the kept messages, and dropped */
        e->done = 0;
        e->unfinished->weight = owner == NULL ? weight : 0;
        e->flow.freed += owner == NULL ? 0 : weight;
    } else {
        x->damage = NO_MEMORY;
        if (owner != NULL)
            post_end(x->messages, owner, NO_MEMORY);
    }
}

/* Has an announced message sent that the caller receives once its own message has left. Otherwise two
   ranks that do so would wait for each other. */
static void fetch_for_later(const struct exchange *x, struct end *e)
{
    for (int payload = 0; payload < 2; payload++) {
        struct kept **at = &e->kept;
        while (*at != NULL && (*at)->tag != x->tag + payload * PAYLOAD_TAG)
            at = &(*at)->next;
        if (*at != NULL)
            flow_fetch(x->messages, x->from, at);
    }
}

/* Looks for the next message from a rank with a tag, and keeps the messages that come before it.
   Sets misfit if such a message was kept and its head does not fit, and differs if it had another mark
   than expected. Otherwise sets matched if there is such a message. Then either the message is in
   found, or its bytes are next and the exchange owns the end until it has read them.

   The end is not taken if there is nothing new and no message is kept. This check runs without
   ownership, so it may be out of date: a caller that misses a message finds it at its next step. */
static void match(struct exchange *x, int rank, int64_t tag)
{
    struct end *e = &x->messages->in[rank];
    const struct carrier *carrier = x->messages->carrier;
    size_t wanted = x->fitting != NULL ? HEAD_BYTES : x->nbytes, length = 0;
    if ((!carrier->may_have(e) && !__atomic_load_n(&e->keeps, __ATOMIC_RELAXED)) || !end_take(e))
        return;
    x->from = rank;
    post_deliver(x->messages, rank);
    while (!x->matched && !x->differs && !x->damage && (x->asked == 0 || tag == NO_TAG)) {
        struct kept *complete = e->unfinished;
        if (complete != NULL) {
            if (!carrier->read(x, e, complete->bytes, complete->nbytes, &e->done))
                break;
            e->unfinished = NULL;
            post_keep(x->messages, rank, complete);
        }
        struct kept **at = &e->kept, *before = NULL;
        for (; *at != NULL && (*at)->tag != tag; at = &before->next)
            before = *at;
        int coming = *at != NULL && (*at)->coming; /* then it is the next one, but not complete */
        if (*at != NULL && (*at)->number != 0 && !coming) {
            ask(x, (*at)->number, (*at)->nbytes);
            free(kept_unlink(e, at, before));
        } else if (*at != NULL && !coming) {
            length = (*at)->nbytes;
            if (is_foreign(x, (*at)->mark)) {
                free(kept_unlink(e, at, before));
                break;
            }
            if (length == wanted) {
                if (!fits(x, (*at)->bytes))
                    break;
                x->found = kept_unlink(e, at, before);
            }
            x->matched = 1;
        } else if (x->draining == FOR_POSTED && !post_wants(x->messages, rank)) {
            break;
        } else if (!carrier->has(x, e, 8 * PREFIX)) {
            x->ended = e->stream.over;
            break;
        } else if (is_of_another(x, e)) {
            break;
        } else {
            read_prefix(x, e, coming ? NO_TAG : tag, &length);
        }
    }
    if (x->pending & SENDING && (x->draining || x->misfit))
        fetch_for_later(x, e);
    if (x->matched && length != wanted)
        x->damage = "a message of another length than the receiver expects";
    if (!x->matched || x->found != NULL)
        end_leave(x->messages, e);
}

/* Reads more of the matched message; returns whether the message is complete. A head that does not
   fit is put back in front of the kept messages. */
static int receive_matched(struct exchange *x)
{
    struct end *e = &x->messages->in[x->from];
    char *to = x->fitting != NULL ? x->head : x->bytes;
    size_t nbytes = x->fitting != NULL ? HEAD_BYTES : x->nbytes;
    if (x->found != NULL) {
        copy(to, x->found->bytes, nbytes);
        free(x->found);
        x->found = NULL;
    } else {
        if (!x->messages->carrier->read(x, e, to, nbytes, &x->done))
            return 0;
        struct kept *left = NULL;
        if (!fits(x, to) && (left = kept_new(x->tag, 0, nbytes, NULL)) == NULL)
            x->damage = NO_MEMORY;
        else if (x->misfit) {
            memcpy(left->bytes, to, nbytes);
            left->next = e->kept;
            e->last = e->kept != NULL ? e->last : left;
            e->kept = left;
        }
        end_leave(x->messages, e);
    }
    x->matched = 0;
    x->asked = 0;
    return 1;
}

/* Looks for a message from each of the ranks that the exchange receives from. If these are several,
   they take turns: the search begins after the rank whose message with this tag was received last.
   A search that always began at the same rank would never reach a message of a later rank while the
   earlier ranks keep sending. Several threads may search at once, so the rank is an atomic. */
static void search(struct exchange *x)
{
    int *served = &x->messages->served[(uint64_t)x->tag % TURNS], number = x->last - x->first + 1;
    int start = number > 1 ? __atomic_load_n(served, __ATOMIC_RELAXED) + 1 : 0, first = x->first;
    for (int i = 0; i < number && !x->matched && !x->misfit && !x->differs && !x->damage; i++) {
        int rank = first + (start + i) % number;
        if (rank != x->messages->rank)
            match(x, rank, x->tag);
        if (x->asked != 0)
            break;
    }
    if ((x->matched || x->asked != 0) && number > 1)
        __atomic_store_n(served, x->from - first, __ATOMIC_RELAXED);
}

static void receive_step(struct exchange *x)
{
    while (x->pending & RECEIVING && !x->damage) {
        if (!x->matched && x->asked == 0)
            search(x);
        if (!x->matched && x->asked != 0)
            match(x, x->first, NO_TAG);
        if (x->damage
            || (!x->misfit && !x->differs && (!x->matched || !receive_matched(x))))
            return;
        x->moved++;
        if (x->fitting != NULL && !x->misfit && x->nbytes > HEAD_ROOM) {
            /* The elements follow as a second message from the same rank. */
            x->fitting = NULL;
            x->tag += PAYLOAD_TAG;
            x->done = 0;
            x->first = x->last = x->from;
            continue;
        }
        if (x->fitting != NULL && !x->misfit)
            memcpy(x->bytes, x->head + HEAD_BYTES - HEAD_ROOM, x->nbytes);
        x->pending &= ~RECEIVING;
    }
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

/* Whether a send reads what its receiver sends, while it waits: for a grant, or for room in the socket.
   The receiver may wait for the same. Its messages are within its own window. */
static int drains(const struct exchange *x)
{
    int receives = x->pending & RECEIVING
                   && (x->matched ? x->from == x->to : x->first <= x->to && x->to <= x->last);
    return x->pending & SENDING && x->weight > 0 && !x->queued && !receives;
}

/* Does what messages_drain does; sets the exchange's damage if the rank has sent wrong data. */
static int drain(struct messages *m, int rank, int draining, struct exchange *for_send)
{
    struct exchange x;
    exchange_begin(&x, m);
    x.draining = draining;
    x.last = 1; /* unlike first: the end of a stream is no error here, but in the middle of a message */
    match(&x, rank, NO_TAG);
    if (x.moved)
        wake_peers(&x, 0);
    if (x.damage || x.ended)
        post_fail(m, rank, x.damage ? x.damage : STREAM_ENDED);
    if (for_send != NULL && x.damage) {
        for_send->damage = x.damage;
        for_send->from = rank;
    }
    return x.moved != 0;
}

int messages_drain(struct messages *m, int rank, int draining)
{
    return drain(m, rank, draining, NULL);
}

int exchange_step(struct exchange *x)
{
    uint64_t before = x->moved;
    int pending = x->pending;
    if (x->damage)
        return 0;
    if (__atomic_load_n(&x->messages->due, __ATOMIC_RELAXED))
        flow_flush_all(x->messages);
    if (x->pending & SENDING)
        exchange_send_step(x);
    if (drains(x))
        x->moved += (uint64_t)drain(x->messages, x->to, 1, x);
    if (x->pending & RECEIVING && !x->damage)
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

void exchange_mark(struct exchange *x, int64_t sent, int64_t received)
{
    x->words[2] = sent;
    x->mark = received;
}

void exchange_drain(struct exchange *x, int source, int64_t tag)
{
    x->tag = tag;
    x->first = x->last = source;
    x->draining = 1;
}

void messages_clear(struct messages *messages)
{
    for (int rank = 0; rank < messages->size; rank++) {
        struct end *e = &messages->in[rank];
        if (e->unfinished != NULL && !e->unfinished->coming) /* otherwise it is among the kept ones */
            free(e->unfinished);
        flow_clear(&e->flow);
        flow_clear(&messages->out[rank].flow);
        for (struct kept *each = e->kept, *next; each != NULL; each = next) {
            next = each->next;
            free(each);
        }
    }
}
