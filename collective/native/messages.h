/* Messages between two of the ranks of one host; see messages.c. */
#ifndef COLLECTIVE_MESSAGES_H
#define COLLECTIVE_MESSAGES_H

#include "core.h"

/* The head that a user's array has: numbers, and room for a short one. As in point_to_point.py. */
enum { HEAD_WORDS = 16, HEAD_ROOM = 896, HEAD_BYTES = 8 * HEAD_WORDS + HEAD_ROOM };

struct kept;

/* One end of a ring. What is not shared belongs to the exchange that has taken it. */
struct ring {
    uint64_t *mine, *theirs; /* bytes that this end and the other one have gone through */
    uint64_t *claim;         /* where a message ends whose rest the receiver fetches itself */
    uint64_t position, seen; /* mine, with what is not announced yet, and theirs as last seen */
    unsigned char *data;
    int taken, keeps;               /* by an exchange; whether there is anything in kept */
    struct kept *kept, *last;       /* what nobody has asked for yet, in order */
    struct kept *unfinished;        /* one whose rest is still to come */
    size_t done;                    /* bytes of that one which have been read */
};

struct messages {
    int rank, size;
    size_t capacity; /* of a ring, a multiple of 8 */
    size_t streamed; /* bytes of a message from which on the receiver fetches it at once */
    struct ring *in, *out; /* by peer */
    uint32_t *sleepers;    /* how many ranks nap, or NULL if nobody does */
    uint64_t *asleep;      /* whether a rank does, so many words apart */
    size_t apart;
};

struct piece {
    const char *bytes; /* NULL for room that is left as it is */
    size_t nbytes;
};

enum { SENDING = 1, RECEIVING = 2 };

/* A message on its way out, one to come, or both. Whoever has it lets it take its steps, until
   nothing is pending. It does not wait, needs no lock of Python's, and must stay where it is. */
struct exchange {
    struct messages *messages;
    int pending;        /* SENDING, RECEIVING */
    uint64_t moved;     /* grows whenever something has been read or written */
    const char *damage; /* what is wrong with what from sent, or NULL; NO_MEMORY */
    int from;

    int to, holds, at, count;
    struct piece pieces[5];
    int64_t words[6 + HEAD_WORDS];
    int claimable;  /* whether the receiver may fetch what is sent */
    size_t ahead;   /* by how much the sender may be ahead of it */
    uint64_t stop;  /* where the message ends that is sent */

    int first, last, matched; /* the ranks of which it takes a message, and whether it has one */
    int64_t tag;
    char *bytes;
    size_t nbytes, done;
    const int64_t *fitting; /* what the head has to begin with, or NULL if there is none */
    int misfit;             /* it begins with something else, and has been left */
    struct kept *found;
    const char *address; /* of the message in the sender's memory, or NULL */
    uint64_t end;        /* where it ends in the ring */
    char head[HEAD_BYTES];
};

extern const char NO_MEMORY[];

/* Let an exchange send to a rank, or receive from those of first to last. A user's array has words,
   HEAD_WORDS of them: who receives one without them gets its head, and then it if it is long. */
void exchange_begin(struct exchange *x, struct messages *messages);
void exchange_send(struct exchange *x, int to, int64_t tag, const void *bytes, size_t nbytes,
                   const int64_t *words, int claimable);
void exchange_recv(struct exchange *x, int first, int last, int64_t tag, void *bytes,
                   size_t nbytes, const int64_t *words);
/* Leaves it to somebody else to receive, and takes what comes out of the sender's way. */
void exchange_drain(struct exchange *x, int source);

/* Does what can be done at once; returns whether that is anything. */
int exchange_step(struct exchange *x);

/* For when nothing moves: the sender has no processor, maybe. Returns how many bytes are to be
   copied from x->address + x->done of x->from's memory to x->bytes + x->done, 0 if none may be. */
size_t exchange_claim(struct exchange *x);
void exchange_fetched(struct exchange *x);

/* Frees what has been kept. */
void messages_clear(struct messages *messages);

#endif
