/* Messages between two of the ranks of one host; see messages.c. */
#ifndef COLLECTIVE_MESSAGES_H
#define COLLECTIVE_MESSAGES_H

#include "core.h"

/* The head of a user's array: numbers that describe the array, and room for the elements of a short
   array. The same numbers as WORDS in collective/communicator/calls/contents.py and HEAD_BYTES in
   collective/communicator/heads.py. */
enum { HEAD_WORDS = 16, HEAD_ROOM = 896, HEAD_BYTES = 8 * HEAD_WORDS + HEAD_ROOM };

/* Number of tags, modulo this number, whose last sources are remembered for receives from any. */
enum { TURNS = 64 };

struct kept;

/* One end of a ring. The exchange that has taken the ring owns all fields but the shared words. */
struct ring {
    uint64_t *mine, *theirs; /* shared: the bytes that this end and the other end have passed */
    uint64_t *claim;         /* shared: the end of the message that the receiver fetches itself */
    uint64_t position, seen; /* mine, with the bytes not announced yet; theirs, as last loaded */
    unsigned char *data;
    int taken, keeps;               /* whether an exchange owns it; whether it has kept messages */
    struct kept *kept, *last;       /* messages that no receiver has asked for yet, in order */
    struct kept *unfinished;        /* such a message, of which a part has not arrived yet */
    size_t done;                    /* bytes of unfinished that have been read */
};

struct messages {
    int rank, size;
    size_t capacity; /* of a ring, a multiple of 8 */
    size_t streamed; /* bytes above which the receiver fetches a message at once */
    struct ring *in, *out; /* by peer */
    uint32_t *sleepers;    /* number of ranks that nap, or NULL if ranks never nap */
    uint64_t *asleep;      /* the word of rank 0 that says whether the rank naps */
    size_t apart;          /* words from there to the same word of the next rank */
    int served[TURNS];     /* by tag: the rank from which a receive from any has received last */
};

struct piece {
    const char *bytes; /* NULL for padding, whose bytes are not written */
    size_t nbytes;
};

enum { SENDING = 1, RECEIVING = 2 };

/* One message to send, one to receive, or both. The owner calls exchange_step until nothing is
   pending. A step never waits and needs no interpreter lock. The struct must stay where it is. */
struct exchange {
    struct messages *messages;
    int pending;        /* SENDING, RECEIVING */
    uint64_t moved;     /* grows whenever bytes have been read or written */
    const char *damage; /* a text about wrong data from the rank `from`, or NO_MEMORY, or NULL */
    int from;           /* the rank of the message that is received; -1 if none is known */

    int to, holds, at, count; /* holds: whether it has taken the ring; at: the current piece */
    struct piece pieces[5];
    int64_t words[6 + HEAD_WORDS];
    int claimable;  /* whether the receiver may fetch the message from this rank's memory */
    size_t ahead;   /* bytes by which the sender may be ahead of the receiver */
    uint64_t stop;  /* position at which the sent message ends in the ring */

    int first, last, matched; /* the ranks that it receives from; whether it has found a message */
    int64_t tag;
    char *bytes;
    size_t nbytes, done;
    const int64_t *fitting; /* the numbers with which the head must begin; NULL without a head */
    int misfit;             /* whether the head was another, and is left for another receiver */
    int draining;           /* whether it receives nothing, and keeps the messages of rank `first` */
    struct kept *found;     /* the message, if it had been kept */
    const char *address;    /* of the message in the sender's memory, or NULL */
    uint64_t end;           /* position at which the received message ends in the ring */
    char head[HEAD_BYTES];
};

extern const char NO_MEMORY[];

/* Make an exchange send to a rank, or receive from one of the ranks first to last. With words
   (HEAD_WORDS of them) a user's array travels: first its head, which contains the elements of a
   short array, and then the elements of a long array as a second message. A receiver that passes
   no words gets the head and these elements as two messages. */
void exchange_begin(struct exchange *x, struct messages *messages);
void exchange_send(struct exchange *x, int to, int64_t tag, const void *bytes, size_t nbytes,
                   const int64_t *words, int claimable);
void exchange_recv(struct exchange *x, int first, int last, int64_t tag, void *bytes,
                   size_t nbytes, const int64_t *words);
/* Makes an exchange drain the ring from a source while it sends: the messages are kept for other
   receivers, so that the source can go on. */
void exchange_drain(struct exchange *x, int source);

/* Does all that is possible without waiting; returns whether any bytes have moved. */
int exchange_step(struct exchange *x);

/* Claims the message that is being received. The caller uses this if nothing moves: perhaps the
   sender has no processor. Returns the number of bytes that the caller must copy from x->address +
   x->done, in the memory of rank x->from, to x->bytes + x->done; then it calls exchange_fetched.
   Returns 0 if there is nothing that may be copied so. */
size_t exchange_claim(struct exchange *x);
void exchange_fetched(struct exchange *x);

/* Frees the messages that have been kept. */
void messages_clear(struct messages *messages);

#endif
