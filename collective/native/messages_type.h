/* The type Messages: the messages of one rank, and how a thread waits for one; see messages_type.c. */
#ifndef COLLECTIVE_MESSAGES_TYPE_H
#define COLLECTIVE_MESSAGES_TYPE_H

#include "messages.h"
#include "python.h"

/* `self` of a function exchange(). */
typedef struct {
    CORE_HEAD
    PyObject *python; /* an object of Python with the methods wait, moved and refuse */
    struct messages messages;
    Py_buffer segment; /* shared memory or a flag; its first word is not 0 when a rank has failed */
    int looks;
    int users, closing; /* streams: threads in a call; whether the last of them closes the sockets */
    int shut;        /* whether nothing more may be posted */
    int busy;        /* whether a collective call is running */
    char *scratch;   /* of collective calls */
    size_t room;     /* bytes of scratch */
    int64_t idle_ns; /* time without progress after which Python waits instead of C */
    int64_t contended; /* streams: time until which no thread yields, since that takes long */
} Messages;

/* One exchange of a thread. */
typedef struct {
    struct exchange exchange;
    Messages *over;
    int to, source;  /* for Python: the ranks, or NOBODY; -1 for any source */
    PyObject *what;  /* for Python: the tag; or the request, if a collective call exchanges */
    PyObject *limit; /* for deadline_of */
    int64_t began;   /* when the call waited first, from where its deadline counts; 0 before that */
    const struct view *views[2]; /* the arrays, or NULL for a half that the call does not have */
    PyObject *held[2];
    PyThreadState *unlocked; /* not NULL while the interpreter lock is released */
} Call;

enum { NOBODY = -2 };

/* Whether some rank has failed. */
static inline int is_over(const Messages *over)
{
    return __atomic_load_n((uint64_t *)over->segment.buf, __ATOMIC_ACQUIRE) != 0;
}

/* Finishes an exchange that has begun; returns -1 with an exception. The call's arrays are held. If the
   interpreter lock was released, it is released afterwards, too; after an exception it is not. */
int call_finish(Call *call);

/* Raises the exception for an array that has got other memory; returns -1. */
int call_raise_moved(const Call *call);

/* Has Python wait, which calls advance() meanwhile; returns -1 with an exception. The context of the
   capsule that advance() gets is NULL when the wait is over: Python may keep advance() longer. */
int call_ask_python(const Call *call, PyMethodDef *advance, void *context);

/* Returns the deadline of a call, or NULL with an exception. */
PyObject *call_deadline(const Call *call);

/* Returns the messages of a function exchange(), or NULL with an exception. */
Messages *messages_of(const struct core *core, PyObject *exchange);

/* Kinds of heads, as in collective/communicator/calls/heads.py. */
enum { AN_ARRAY = 0, AN_OBJECT = 3 };

/* Sets the numbers with which the head of an array begins: kind, dtype, bytes, number of dimensions and
   shape. The head of an encoded object says only how many bytes it has. Returns the words. */
const int64_t *head_of(const struct view *view, int64_t kind, int64_t *words);

/* Allocates the ends of a rank, which m->size tells; returns -1 with an exception. */
int messages_allocate(struct messages *m, const struct carrier *carrier);

/* Returns the function exchange() of messages, or NULL with an exception. */
PyObject *messages_function(Messages *self);

/* Ends the use of streams by a call, which has counted itself in users before. */
void streams_leave(Messages *self);

/* Frees what streams have, and closes their sockets. */
void streams_free(struct messages *m);

int add_heads(PyObject *module);
int add_streams(PyObject *module);
int add_posted(PyObject *module, struct core *core);
/* The methods of Messages for posted operations. */
extern PyMethodDef posted_methods[];
int add_both(PyObject *module);
int add_replays(PyObject *module, struct core *core);

#endif
