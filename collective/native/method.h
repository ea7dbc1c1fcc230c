/* The fast path in C from a communicator's method to a transport's plan, with no Python code in
   between: method.c, then call.c and door.c for a collective call, or message.c.

   A Method stands in front of a method in Python. It makes calls on plain arrays with plain
   arguments itself. It passes all other calls to the function in Python, before it has done
   anything for them. The function could ask for the door itself, but to enter a function in Python
   takes almost half of a small call. Each rank decides for itself whether C or Python makes a call,
   since both run the same plan of the same request.

   Communicators derive from Handle, which holds their path. Paths derive from Gate, which holds a
   Door for each kind of operation. Python opens and shuts the doors. C calls these methods of the
   path:

   - plan_for_c returns the plan of a new call;
   - run_python_plan runs a plan that is not in C;
   - compare_for_c compares the results of an all_reduce;
   - recover_for_c goes on after a collective call has failed;
   - note_failure records that a message has failed;
   - receive_rest receives a message that does not suit C, or whose sendrecv has sent its x;
   - explain makes a clearer error for unsuitable arguments.

   The first argument of plan_for_c, recover_for_c and receive_rest is the class of the call, with
   which the Method was created. */
#ifndef COLLECTIVE_METHOD_H
#define COLLECTIVE_METHOD_H

#include "python.h"

/* How the shape of a result follows from that of x. */
enum shape { SAME, CUT, JOINED, EXCHANGED, NONE };

#define BIT(argument) (1u << (argument))

struct operation {
    const char *name;
    enum shape shape;
    /* AT_ROOT: only the root gets a result. FROM_ROOT: only the root has an input. */
    enum { EVERYBODY, AT_ROOT, FROM_ROOT } who;
    int folds;
    unsigned takes; /* the arguments that the method has, as bits */
    enum { OF_ALL, OF_PIECES, OF_SCATTER, DOORS } door;
};

/* Whether the ranks can compare the results of an operation. */
static inline int has_result(const struct operation *operation)
{
    return operation->shape != NONE;
}

enum message_kind { SEND, RECV, SENDRECV, MESSAGES };

/* Number of entries of a table, a power of two; and number of places in a row, from that of its hash
   on, at which an entry may be. A program of a thousand distinct calls finds them all: its table is
   half full. With more calls, some replace others. */
#define ENTRIES 2048
#define PLACES 32

/* The attributes of a path that every call reads. Python sets them. C reads them from the struct,
   since a look-up by name takes a tenth of the time of a small call. */
typedef struct {
    PyObject_HEAD
    PyObject *timeout, *doors[DOORS], *exchange, *lanes; /* NULL before they are set */
} Gate;

/* The attribute of a communicator that C reads: its path. */
typedef struct {
    PyObject_HEAD
    PyObject *path; /* NULL before it is set */
} Handle;

/* The limited API has this from 3.12 on. It is the same in all versions. */
typedef PyObject *(*vectorcall_function)(PyObject *, PyObject *const *, size_t, PyObject *);

/* A method of communicators: a descriptor, like a function of Python. */
typedef struct {
    CORE_HEAD
    PyObject *function; /* makes the calls that C does not make */
    PyObject *kind;     /* the class of the calls */
    PyObject *dict;     /* the attributes that functools.update_wrapper sets */
    vectorcall_function vectorcall;
    const struct operation *operation; /* NULL for a message */
    enum message_kind message;
} Method;

/* One call, as read from its arguments. */
struct call {
    const struct core *core;
    const struct operation *operation;
    Gate *path;
    PyObject *kind, *x, *out, *op, *order, *root_object;
    PyObject *result; /* a new array, or a new reference to the user's */
    PyObject *division; /* the order, if it is an object and not a word; or NULL */
    PyObject *counts; /* a tuple of the ranks' numbers of rows, if the call passes them */
    int64_t before, total; /* rows of the ranks before this one, and of all, in a joined result */
    struct view views[2];
    struct view *src, *dst; /* pointers into views, or NULL */
    int ordered, root;
    int is_thawed; /* whether x is thawed(), so that the result must be aligned for a framework */
    int is_due;    /* whether the ranks compare the results of this call */
};

/* Number of calls that a door remembers as they were made. */
#define REMEMBERED 8

/* A call on NumPy's arrays that has gone through a plan in C. If a program makes it again, C need not
   read the arguments again. The other arguments are kept, so equal addresses are equal objects. The
   arrays are not kept: another array may be at the address of one, and each array may have changed. So
   is_same() compares what was viewed. */
struct made {
    PyObject *plan, *names, *op, *order, *root; /* plan: NULL before the first call */
    PyObject *args[ARGUMENTS]; /* borrowed: those by position, then those by name */
    Py_ssize_t count;          /* of those by position */
    struct call call;          /* as it was read */
};
enum { MADE_REFERENCES = 5 };

/* Several threads may use a door, so the tables are read and changed in critical sections. */
typedef struct {
    CORE_HEAD
    PyObject *ring, *queue; /* the Ring of the calls, and the list of those in the background */
    int rank, size;
    struct entry *table[ENTRIES]; /* NULL where no call has come yet */
    struct made made[REMEMBERED];
} Door;

/* What a call needs of its entry, with references: while the call runs, another thread, a signal
   handler or a finalizer may make calls, too, and replace the entry. */
struct found {
    PyObject *plan;            /* NULL if there is no plan */
    PyObject *request, *plain; /* only for a plan that is not in C */
};

/* Returns the operation with this name, or NULL. */
const struct operation *call_operation(PyObject *name);

/* Makes a collective call, if the door is open and C can make this call; or exchanges a message by
   the transport's own function, if no message is in flight in the background (see Path.open_doors).
   Otherwise does nothing and returns NotImplemented: then Python must make the call. */
PyObject *call_collective(const Method *method, Gate *path, PyObject *const *args, Py_ssize_t count,
                          PyObject *names);
PyObject *call_message(const Method *method, Gate *path, PyObject *const *args, Py_ssize_t count,
                       PyObject *names);

/* Finds the plan of a call in the table, or has Python make the plan. Returns no plan with an
   exception, or without one if Python must make the call. */
struct found door_find(Door *door, const struct call *call);

/* Sets *call to the same call on the same arrays, made through this door before, but for its result,
   path and class; returns its plan. Returns no plan if the door remembers no such call. */
struct found door_recall(Door *door, const struct operation *operation, PyObject *const *args,
                         Py_ssize_t count, PyObject *names, struct call *call);

/* Remembers a call that has been read and has the plan. */
void door_remember(Door *door, const struct call *call, PyObject *plan, PyObject *const *args,
                   Py_ssize_t count, PyObject *names);

/* Whether a call's result is an array that C makes. */
static inline int makes_result(const struct call *call)
{
    return call->dst == &call->views[1] && call->out == Py_None;
}

/* Whether the call's arrays still have the memory that they had when they were viewed. */
static inline int are_there(const struct call *call)
{
    return (call->src == NULL || is_there(call->core, call->src))
           && (call->dst == NULL || is_there(call->core, call->dst));
}

/* Returns the arguments of a call by name, as a dict: those that the class of the call takes, and that
   are not None. If the dict is only to identify a plan, out is none of them. */
PyObject *call_arguments(const struct call *call, int with_out);

#endif
