/* Flow control of messages over streams: what a rank keeps of a peer's messages has a bound in bytes.

   A sender counts the bytes of its messages that no receive has taken yet. The receiver returns them as
   credits, half a window at a time. A message that does not fit into the window is only announced: its
   prefix has a number in place of the mark, and no bytes follow. Receives match it as any other
   message. Then the receiver grants the number, and the sender sends the bytes behind a control prefix.
   So a rank can look past any number of long messages for the one that it waits for, and no order of
   receives makes two ranks wait for each other.

   Messages of collective calls are never announced. A rank is ahead of its peer by one call at most,
   since the comparison of the next call needs the peer.

   A control frame is a prefix with CONTROL_TAG. Whoever owns an end sends the frames that are due before
   its message and after it. A rank that waits for a grant, or whose message the socket does not take,
   reads what the peer sends: the peer may wait for the same. */

#include "messages.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* What a message costs the receiver besides its bytes. Otherwise empty messages would have no bound. */
#define OVERHEAD 64

/* Meanings of the third word of a control prefix. A negative one is the number of the announced
   message whose bytes follow. */
enum { CREDIT = 1, GRANT = 2 };

size_t flow_weight(const struct messages *m, int64_t tag, size_t nbytes)
{
    return m->carrier->has_window && tag != COLLECTIVE_TAG ? nbytes + OVERHEAD : 0;
}

int flow_is_full(const struct end *e, size_t weight)
{
    return __atomic_load_n(&e->flow.bytes, __ATOMIC_ACQUIRE) + weight > WINDOW_BYTES;
}

int64_t flow_begin(struct messages *m, struct end *e, size_t weight, int headed)
{
    struct flow *f = &e->flow;
    if (headed) /* the head leaves at once, also if the window is full */
        __atomic_add_fetch(&f->bytes, flow_weight(m, 0, HEAD_BYTES), __ATOMIC_RELAXED);
    if (!flow_is_full(e, weight)) {
        __atomic_add_fetch(&f->bytes, weight, __ATOMIC_RELAXED);
        return 0;
    }
    __atomic_add_fetch(&f->announced, 1, __ATOMIC_RELAXED);
    return __atomic_add_fetch(&f->last, 1, __ATOMIC_RELAXED);
}

/* -- control frames ------------------------------------------------------------------------------ */

int flow_flush(struct messages *m, struct end *e)
{
    /* A frame may leave in two parts, so nobody else writes to the socket meanwhile. */
    struct flow *f = &e->flow;
    if (__atomic_load_n(&f->due, __ATOMIC_RELAXED) == 0)
        return 1;
    spin_lock(&f->lock);
    ssize_t sent = send(e->stream.fd, f->frames + f->begin, f->due, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
        f->begin += (size_t)sent;
        __atomic_sub_fetch(&f->due, (size_t)sent, __ATOMIC_RELAXED);
        __atomic_sub_fetch(&m->due, (size_t)sent, __ATOMIC_RELAXED);
    }
    int over = f->due == 0;
    if (over)
        f->begin = 0;
    spin_unlock(&f->lock);
    return over;
}

void flow_flush_all(struct messages *m)
{
    for (int rank = 0; rank < m->size && __atomic_load_n(&m->due, __ATOMIC_RELAXED); rank++) {
        struct end *e = &m->out[rank];
        if (__atomic_load_n(&e->flow.due, __ATOMIC_RELAXED) && end_take(e))
            end_leave(m, e); /* which sends them */
    }
}

/* Sends a control frame as soon as possible; returns whether there is memory for it. */
static int tell(struct messages *m, int rank, int64_t value, int64_t meaning)
{
    struct end *e = &m->out[rank];
    struct flow *f = &e->flow;
    int64_t words[PREFIX] = {value, CONTROL_TAG, meaning};
    spin_lock(&f->lock);
    size_t needed = f->begin + f->due + sizeof words;
    char *frames = f->frames;
    if (needed > f->room && (frames = realloc(frames, 2 * needed)) != NULL) {
        f->frames = frames;
        f->room = 2 * needed;
    }
    if (frames != NULL) {
        memcpy(frames + f->begin + f->due, words, sizeof words);
        __atomic_add_fetch(&f->due, sizeof words, __ATOMIC_RELAXED);
        __atomic_add_fetch(&m->due, sizeof words, __ATOMIC_RELAXED);
    }
    spin_unlock(&f->lock);
    if (end_take(e))
        end_leave(m, e);
    return frames != NULL;
}

void flow_return(struct messages *m, struct end *e)
{
    struct flow *f = &e->flow;
    if (tell(m, (int)(e - m->in), (int64_t)f->freed, CREDIT))
        f->freed = 0;
}

int flow_grant(struct messages *m, int rank, int64_t number)
{
    return tell(m, rank, number, GRANT);
}

/* -- what the peer tells ------------------------------------------------------------------------- */

static const char *note_credit(struct flow *f, size_t bytes)
{
    /* Only this thread, which owns the peer's end, makes the number smaller. */
    if (bytes > __atomic_load_n(&f->bytes, __ATOMIC_RELAXED))
        return "a credit for more bytes than were sent";
    __atomic_sub_fetch(&f->bytes, bytes, __ATOMIC_RELEASE);
    return NULL;
}

static const char *note_grant(struct flow *f, int64_t number)
{
    const char *damage = NULL;
    spin_lock(&f->lock);
    if (number < 1 || number > __atomic_load_n(&f->last, __ATOMIC_RELAXED)
        || f->grants >= __atomic_load_n(&f->announced, __ATOMIC_RELAXED)) {
        damage = "a grant for no message";
    } else if (f->grants == f->places) {
        size_t places = 2 * (size_t)f->places + 8;
        int64_t *numbers = realloc(f->numbers, places * sizeof *numbers);
        if (numbers == NULL) {
            damage = NO_MEMORY;
        } else {
            f->numbers = numbers;
            f->places = (int)places;
        }
    }
    if (damage == NULL) {
        f->numbers[f->grants] = number;
        __atomic_store_n(&f->grants, f->grants + 1, __ATOMIC_RELEASE);
    }
    spin_unlock(&f->lock);
    return damage;
}

int flow_granted(struct end *e, int64_t number)
{
    struct flow *f = &e->flow;
    if (__atomic_load_n(&f->grants, __ATOMIC_ACQUIRE) == 0)
        return 0;
    spin_lock(&f->lock);
    int i = 0;
    while (i < f->grants && f->numbers[i] != number)
        i++;
    int found = i < f->grants;
    if (found) {
        /* The order stays, in which the messages leave. */
        memmove(f->numbers + i, f->numbers + i + 1, (size_t)(f->grants - i - 1) * sizeof *f->numbers);
        __atomic_store_n(&f->grants, f->grants - 1, __ATOMIC_RELAXED);
        __atomic_sub_fetch(&f->announced, 1, __ATOMIC_RELAXED);
    }
    spin_unlock(&f->lock);
    return found;
}

const char *flow_note(struct messages *m, int rank, const int64_t *words)
{
    struct flow *f = &m->out[rank].flow;
    if (words[2] == CREDIT)
        return note_credit(f, (size_t)words[0]);
    return words[2] == GRANT ? note_grant(f, words[0]) : "a control frame without a meaning";
}

/* -- messages whose bytes have been asked for ---------------------------------------------------- */

void flow_fetch(struct messages *m, int rank, struct kept **at)
{
    struct end *e = &m->in[rank];
    struct kept *announced = *at;
    if (announced->number == 0 || announced->coming)
        return;
    struct kept *message = kept_new(announced->tag, 0, announced->nbytes, NULL);
    if (message == NULL || !flow_grant(m, rank, announced->number)) {
        free(message);
        return; /* the caller looks again */
    }
    message->number = announced->number;
    message->coming = 1;
    message->next = announced->next;
    e->last = e->last == announced ? message : e->last;
    *at = message;
    free(announced);
}

void flow_expect(struct end *e, struct kept *message)
{
    struct flow *f = &e->flow;
    message->next = NULL;
    *(f->asked != NULL ? &f->asked_last->next : &f->asked) = message;
    f->asked_last = message;
}

struct kept *flow_asked(struct end *e, int64_t meaning, int take)
{
    struct flow *f = &e->flow;
    struct kept *before = NULL, *each = f->asked;
    for (; each != NULL && -each->number != meaning; each = each->next)
        before = each;
    if (each != NULL && take) {
        *(before != NULL ? &before->next : &f->asked) = each->next;
        f->asked_last = f->asked_last == each ? before : f->asked_last;
    }
    if (each != NULL)
        return each;
    for (each = e->kept; each != NULL && (-each->number != meaning || !each->coming); each = each->next)
        ;
    return each;
}

void flow_clear(struct flow *f)
{
    for (struct kept *each = f->asked, *next; each != NULL; each = next) {
        next = each->next;
        free(each);
    }
    free(f->numbers);
    free(f->frames);
}
