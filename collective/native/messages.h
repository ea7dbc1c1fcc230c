/* Messages between two ranks: the engine that matches them; see messages.c. */
#ifndef COLLECTIVE_MESSAGES_H
#define COLLECTIVE_MESSAGES_H

#include "core.h"

#include <sched.h>

/* The head of a user's array: numbers that describe the array, and room for the elements of a short
   array. The same numbers as WORDS and HEAD_BYTES in collective/communicator/calls/heads.py. */
enum { HEAD_WORDS = 16, HEAD_ROOM = 896, HEAD_BYTES = 8 * HEAD_WORDS + HEAD_ROOM };

/* Words in front of the bytes of a message: its length, its tag, and a word of the carrier: the
   address of the bytes in the sender's memory (rings), or the mark of a call (streams). */
enum { PREFIX = 3 };

/* In the address of a message: the receiver fetches it at once. No address of a process is so high. */
#define LEFT_TO_RECEIVER (INT64_C(1) << 62)

/* Number of tags, modulo this number, whose last sources are remembered for receives from any. */
enum { TURNS = 64 };

/* The tag of all messages of collective calls, as in collective/algorithms/messages.py; and the tag of
   control frames over streams, below every valid tag. */
#define COLLECTIVE_TAG (-1)
#define CONTROL_TAG INT64_MIN

struct exchange;
struct posted;

/* A message that has been read before a receiver asked for it, or that is being read for one that has
   posted its receive. */
struct kept {
    struct kept *next;
    int64_t tag, mark;
    size_t nbytes, weight; /* weight: bytes that the sender gets as a credit when a receive takes it */
    int64_t number;        /* of an announced message, whose bytes are not here; otherwise 0 */
    int coming;            /* whether its bytes have been asked for */
    struct posted *owner;  /* the receive that the message is for, or NULL */
    char *bytes;           /* behind the struct; or the owner's memory */
};

/* What carries the bytes to a peer or from it. rings.c: a ring of bytes in shared memory. */
struct ring {
    uint64_t *mine, *theirs; /* shared: the bytes that this end and the other end have passed */
    uint64_t *claim;         /* shared: the end of the message that the receiver fetches itself; and
                                WITHDRAWN words behind it, whether the sender has given up its messages */
    uint64_t seen;           /* theirs, as last loaded */
    unsigned char *data;
    /* Of a receiver, about the running message: the bytes that it has not read from the ring; of a head,
       the bytes of its words, and of the elements, in the ring; and where the message ends, its address in
       the sender's memory, or NULL, and whether it is fetched from there. */
    size_t left, words, room;
    uint64_t end;
    const char *source;
    int fetches;
};

enum { WITHDRAWN = 64 };

/* Bytes that are read ahead of a stream, and so the longest message that is copied twice. */
enum { STREAM_AHEAD = 16 << 10 };

/* streams.c: a connected socket, which both directions share. */
struct stream {
    int fd, over;      /* over: whether the peer has closed its end */
    char *ahead;       /* bytes that were read before anybody asked for them */
    size_t begin, end; /* of these bytes */
};

/* Bytes of a peer's messages that a rank keeps, besides those of the running collective call; see
   flow.c. It is about as much as the buffers of the two sockets hold. The tests set another number. */
#ifndef WINDOW_BYTES
#define WINDOW_BYTES ((size_t)4 << 20)
#endif

/* streams.c: flow control of one direction; see flow.c. */
struct flow {
    /* Of messages from a peer, for the owner of the end: */
    size_t freed;       /* bytes of taken messages that have not been returned as credits */
    int asking;         /* number of exchanges that wait for the bytes of an announced message */
    struct kept *asked, *asked_last; /* messages whose bytes posted receives wait for, in order */
    /* Of messages to a peer: */
    size_t bytes;       /* bytes that have been sent and not been returned */
    int64_t last;       /* number of the last announced message */
    int lock;           /* of the next two lines */
    int announced, grants, places; /* numbers of messages that are announced; of these granted; room */
    int64_t *numbers;   /* of the granted messages, in order */
    char *frames;       /* control frames */
    size_t begin, due, room; /* the part of these bytes that has not left; their room */
};

/* One direction between this rank and a peer. The exchange that has taken it owns all fields but the
   shared words, and those of the flow that have a lock. */
struct end {
    int taken, keeps;        /* whether an exchange owns it; whether it has kept messages */
    struct kept *kept, *last; /* messages that no receiver has asked for yet, in order */
    struct kept *unfinished; /* such a message, of which a part has not arrived yet */
    int wanted;              /* number of receives in flight that name this rank or have matched it */
    uint64_t scanned;        /* number of the last posted receive that has looked at those kept */
    struct outgoing *queue, *queue_last; /* posted sends that have not left yet, in order */
    struct outgoing *announced, *announced_last; /* those that are announced, and not granted yet */
    int flushing;            /* whether a thread has taken the queue */
    size_t done;             /* bytes of unfinished that have been read */
    uint64_t position;       /* bytes passed, also those of a ring that are not announced yet */
    struct ring ring;
    struct stream stream;
    struct flow flow;
};

/* How bytes move. No function waits. Those that read return what they could do at once. */
struct carrier {
    size_t unit;    /* messages are padded to a multiple of this many bytes */
    int has_window; /* whether flow.c bounds what is kept; otherwise the other end stops the sender */
    /* Whether there may be something new to read. Runs without ownership of the end. */
    int (*may_have)(const struct end *);
    /* Whether the next nbytes, at most a prefix, are there. */
    int (*has)(struct exchange *, struct end *, size_t nbytes);
    /* Reads bytes of a message of nbytes, of which *done have been read; returns whether the message
       is complete. */
    int (*read)(struct exchange *, struct end *, char *to, size_t nbytes, size_t *done);
    /* Sends bytes of the exchange's pieces; returns whether all are sent. */
    int (*send)(struct exchange *, struct end *);
    /* Tells the other end what this end has passed, before the end is let go. */
    void (*announce)(struct end *);
};

extern const struct carrier rings, streams;

struct messages {
    int rank, size;
    const struct carrier *carrier;
    struct end *in, *out;  /* by peer */
    int served[TURNS];     /* by tag: the rank from which a receive from any has received last */
    int callers;           /* streams: number of threads that wait for messages */
    int lock;              /* of the next three lines */
    struct posted *posted, *last, *finished; /* receives that wait, in order; operations that are over */
    uint64_t posts;        /* number of receives that have been posted */
    int wild;              /* number of receives that wait and name no rank */
    int queued, turn;      /* number of sends in the queues; rank at which the next look begins */
    size_t copied;         /* bytes of the copies in the queues */
    size_t due;            /* bytes of control frames that have not left */
    /* Rings: */
    size_t capacity; /* of a ring, a multiple of 8 */
    const uint64_t *broken; /* not 0 when a rank has failed */
    uint64_t *pids;  /* the ranks' processes, if all ranks may read each other's memory; or NULL */
    int page_map;    /* for lies_in_huge_pages() */
    int claims;      /* whether a receiver fetches the rest of a message if its sender is slow */
    uint32_t *sleepers;    /* number of ranks that nap, or NULL if ranks never nap */
    uint64_t *asleep;      /* the word of rank 0 that says whether the rank naps */
    size_t apart;          /* words from there to the same word of the next rank */
};

struct piece {
    const char *bytes; /* NULL for padding, whose bytes have no meaning */
    size_t nbytes;
};

/* What a second message with the elements of a long array adds to its tag: no receive of a head takes
   it. Users' tags are smaller. */
#define PAYLOAD_TAG (INT64_C(1) << 31)

enum { SENDING = 1, RECEIVING = 2, PARTIAL = 4 };

/* Who sends: a posted operation, a call that only sends, or one that receives, too. */
enum sender { POSTS, SENDS, EXCHANGES };

/* One message to send, one to receive, or both. The owner calls exchange_step until nothing is
   pending. A step never waits and needs no interpreter lock. The struct must stay where it is. */
struct exchange {
    struct messages *messages;
    int pending;        /* SENDING, RECEIVING */
    uint64_t moved;     /* grows whenever bytes have been read or written */
    const char *damage; /* a text about wrong data from the rank `from`, or NO_MEMORY, or NULL */
    int from;           /* the rank of the message that is received; -1 if none is known */

    int queued;         /* whether it is in a queue of posted sends */

    int to, holds, at, count; /* holds: whether it has taken the end; at: the current piece */
    int begun;                /* whether it has begun to send since it took the end */
    struct piece pieces[5];
    int64_t words[2 * PREFIX + HEAD_WORDS];
    size_t weight;      /* that the message takes of the window; 0 if it needs no window */
    int64_t number;     /* of the announced message; 0 if its bytes follow at once */
    int granted;        /* whether the receiver wants its bytes */
    int lead, total;    /* the piece that begins with its prefix; number of all pieces */
    size_t lead_bytes;  /* of that piece */
    int claimable;  /* whether the receiver may fetch the message from this rank's memory */
    size_t ahead;   /* bytes by which the sender may be ahead of the receiver */
    uint64_t stop;  /* position at which the sent message ends */

    int first, last, matched; /* the ranks that it receives from; whether it has found a message */
    int64_t tag;
    char *bytes;
    size_t nbytes, done;
    const int64_t *fitting; /* the numbers with which the head must begin; NULL without a head */
    int misfit;             /* whether the head was another, and is left for another receiver */
    int draining;           /* whether it receives nothing, and keeps the messages of rank `first`; FOR_POSTED:
                               as long as a posted receive wants one */
    int ended;              /* whether the rank that it has looked at sends nothing any more */
    struct kept *found;     /* the message, if it had been kept */
    int64_t mark;           /* the mark that the received message must have; 0 for any */
    int differs;            /* whether it had another, and has been dropped */
    int64_t asked;          /* number of the announced message whose bytes it waits for, or 0 */
    char head[HEAD_BYTES];
};

extern const char NO_MEMORY[], STREAM_ENDED[];

/* Make an exchange send to a rank, or receive from one of the ranks first to last. With words
   (HEAD_WORDS of them) a user's array travels: first its head, which contains the elements of a
   short array, and then the elements of a long array as a second message. A receiver that passes
   no words gets the head and these elements as two messages. */
void exchange_begin(struct exchange *x, struct messages *messages);
void exchange_send(struct exchange *x, int to, int64_t tag, const void *bytes, size_t nbytes,
                   const int64_t *words, enum sender sender);
void exchange_recv(struct exchange *x, int first, int last, int64_t tag, void *bytes,
                   size_t nbytes, const int64_t *words);
/* Marks the message that is sent, and says which mark the received one must have (streams). */
void exchange_mark(struct exchange *x, int64_t sent, int64_t received);
/* Makes an exchange drain what a source sends while it sends: the messages are kept for other
   receivers, so that the source can go on. The caller receives one of this tag afterwards. */
void exchange_drain(struct exchange *x, int source, int64_t tag);

/* Does all that is possible without waiting; returns whether any bytes have moved. */
int exchange_step(struct exchange *x);
/* Does so for the message that is sent. */
void exchange_send_step(struct exchange *x);

/* Goes other ways if nothing moves; perhaps the other end has no processor. Over rings the next step
   fetches the rest of the message that is received, if its sender permits that; and a message that the
   receiver was to fetch goes through the ring. Returns whether that is new. */
int exchange_hurry(struct exchange *x);

/* Sleeps until the sockets of an exchange over streams have something for it, or for the posted
   operations, for the given seconds at most. */
void exchange_sleep(struct exchange *x, double seconds);

/* -- posted.c: operations that are in flight while the caller does other things ------------------ */

/* Bytes of a message that its sender may copy, so that the send is over at once; and bytes of all
   copies. When they are in use, a send lasts until the message has left. */
enum { EAGER_BYTES = 64 << 10, COPIED_BYTES = 64 << 20 };

enum state { PENDING, MATCHED, OVER, CANCELLED, FAILED_STATE };
enum { FOR_POSTED = 2 };

/* A send or a receive in flight. It must stay where it is until it is among the finished ones. */
struct posted {
    struct posted *next;
    int state;             /* PENDING and MATCHED: in flight */
    int source, to;        /* source: -1 for any, then the sender */
    int64_t tag, mask;     /* a message matches if the bits of its tag in the mask are those of tag */
    char *bytes;           /* NULL: the message stays where it has been kept */
    size_t room, nbytes;   /* bytes of the memory; of the message, once it is there */
    uint64_t number;
    struct kept *message;
    const char *damage;
};

/* A posted send that has not left yet. */
struct outgoing {
    struct outgoing *next;
    struct posted *posted; /* NULL if the bytes are a copy */
    char *copy;
    size_t copied;
    struct exchange exchange;
};

/* Posts a receive, or a send. Each is over when it is among the finished ones, perhaps at once. Returns
   -1 if there is no memory, and then nothing is posted. */
void post_receive(struct messages *m, struct posted *p);
int post_send(struct messages *m, struct posted *p, const void *bytes, size_t nbytes);

/* Withdraws a receive; returns whether no message has been found for it. */
int post_cancel(struct messages *m, struct posted *p);

/* Looks for a message that no receive has got, and sets source, tag and nbytes of p. With take p owns the
   message from now on, and is over. Returns whether there is one. */
int post_find(struct messages *m, struct posted *p, int take);

/* Does all that is possible for the posted operations; returns whether bytes have moved. */
int messages_progress(struct messages *m);

/* Returns the list of the operations that have ended since the last call. */
struct posted *messages_finished(struct messages *m);

/* Ends all operations. */
void post_close(struct messages *m);

/* Ends all operations that wait for a rank, because of damage; for any rank if rank is -1. */
void post_fail(struct messages *m, int rank, const char *damage);

/* For messages.c, which owns the end of the rank. post_deliver gives kept messages to receives that
   were posted since; post_match takes the receive for the message whose tag has come, or returns NULL;
   post_keep gives a complete message to its receive, or keeps it. */
void post_deliver(struct messages *m, int rank);
struct posted *post_match(struct messages *m, int rank, int64_t tag);
void post_keep(struct messages *m, int rank, struct kept *message);
/* Ends an operation. */
void post_end(struct messages *m, struct posted *p, const char *damage);
/* Whether a receive waits for a message from a rank; sends what can be sent to one. */
int post_wants(struct messages *m, int rank);
int post_flush(struct messages *m, int to);

/* For posted.c. Takes an end, if it is free; leaves it. Makes a kept message, or returns NULL; appends
   it to those of an end; takes the one at *at out of them. Reads what a rank has sent. */
int end_take(struct end *e);
void end_leave(struct messages *m, struct end *e);
struct kept *kept_new(int64_t tag, int64_t mark, size_t nbytes, struct posted *owner);
void kept_add(struct end *e, struct kept *message);
struct kept *kept_unlink(struct end *e, struct kept **at, struct kept *before);
int messages_drain(struct messages *m, int rank, int draining);

/* Frees the messages that have been kept. */
void messages_clear(struct messages *messages);

/* Whether a part of a message has moved, or an announced one may come at any time. */
static inline int exchange_is_partial(const struct exchange *x)
{
    return x->pending && (x->holds || x->matched || x->number != 0 || x->asked != 0);
}

/* Whether the send of an exchange waits for a grant. */
static inline int exchange_waits(const struct exchange *x)
{
    return x->pending & SENDING && x->number != 0 && !x->granted && !x->holds;
}

/* -- flow.c: bounds what a rank keeps of a peer's messages, over streams -------------------------- */

/* Returns the bytes that a message takes of the window; 0 if it needs no window. */
size_t flow_weight(const struct messages *m, int64_t tag, size_t nbytes);
/* For the owner of an end to a peer. Takes room in the window for a message, and for the head before
   it; returns 0, or the number under which the message must be announced. Sends the control frames that
   are due; returns whether all have left. */
int64_t flow_begin(struct messages *m, struct end *e, size_t weight, int headed);
int flow_is_full(const struct end *e, size_t weight);
int flow_flush(struct messages *m, struct end *e);
/* Takes a grant; returns whether there was one. Any thread may call it. */
int flow_granted(struct end *e, int64_t number);
/* Sends the control frames to all ranks whose ends are free. */
void flow_flush_all(struct messages *m);
/* For the owner of an end from a peer. Returns what was taken as a credit. Grants a message; returns
   whether there was memory. Has the bytes of the message at *at sent if it is only announced, so that it
   is kept like any other one. Adds a message that has been granted to those that come for posted receives.
   Returns the message whose bytes follow by the third word of their prefix, or NULL; with take it is among
   those no more. */
void flow_return(struct messages *m, struct end *e);
int flow_grant(struct messages *m, int rank, int64_t number);
void flow_fetch(struct messages *m, int rank, struct kept **at);
void flow_expect(struct end *e, struct kept *message);
struct kept *flow_asked(struct end *e, int64_t meaning, int take);
/* Notes a control frame that came; returns a text if it is wrong, else NULL. */
const char *flow_note(struct messages *m, int rank, const int64_t *words);
void flow_clear(struct flow *f);

/* A lock that a thread holds for a few instructions, or for a walk through a list. */
static inline void spin_lock(int *lock)
{
    while (__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE))
        sched_yield();
}

static inline void spin_unlock(int *lock)
{
    __atomic_store_n(lock, 0, __ATOMIC_RELEASE);
}

#endif
