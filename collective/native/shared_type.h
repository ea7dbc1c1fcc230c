/* The type Shared: the memory of the ranks of one host. shared_type.c has its waits; plan.c makes calls
   with it. */
#ifndef COLLECTIVE_SHARED_TYPE_H
#define COLLECTIVE_SHARED_TYPE_H

#include "python.h"
#include "shared.h"

typedef struct {
    CORE_HEAD
    PyObject *callbacks; /* see SharedCallbacks in __init__.py */
    struct shared shared;
    Py_buffer memory; /* the control segment, which this buffer keeps mapped */
    char *descriptions; /* of this rank's last calls, in the segment */
    /* The running call, with references that its caller has: */
    PyObject *request;
    PyObject *limit; /* for deadline_of */
    int64_t began;   /* when the call waited first, from where its deadline counts; 0 before that */
    PyObject *ring; /* the Ring in which the call must still be recorded, or NULL */
    PyThreadState *unlocked; /* not NULL while a long call runs without the interpreter lock */
    const struct view *views[2]; /* the arrays, or NULL */
    PyObject *held[2];           /* the holders of their memory, once other threads can run */
    int busy; /* whether a call is running; see begin() */
    const struct unlocked *call; /* not NULL if a thread without a thread state makes the call */
    PyObject *error; /* raised by a wait in such a call, or NULL */
} Shared;

/* The result of a wait, beside 0 and -1, and of a call, if another thread has given an array other
   memory. */
enum { MOVED = -4 };

/* Begins a call; returns whether no other call is running. */
int shared_begin(Shared *self);
/* Ends a call; the second function drops the holders of its arrays' memory first. */
void shared_end(Shared *self);
void shared_let_go(Shared *self);

/* Records the call, if there is a ring and the call has not been recorded yet. */
void shared_record(void *self);

/* Reads one integer for each rank; returns 0, or -1 with an exception. */
int read_words(PyObject *sequence, int size, uint64_t *words);
/* Sets *pids to the ranks' processes, or leaves it if the sequence is None; returns 0, or -1 with an
   exception. */
int read_pids(PyObject *sequence, Py_ssize_t size, uint64_t **pids);

/* The method Shared.plan(), of plan.c. */
PyObject *plan_new(PyObject *shared, PyObject *args);

#endif
