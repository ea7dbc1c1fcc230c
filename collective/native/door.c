/* The fast path in C from a communicator's method to a transport's plan, with no Python code in
   between.

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

#include "python.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* How the shape of a result follows from that of x. */
enum shape { SAME, CUT, JOINED, EXCHANGED, NONE };

static const char *const argument_names[ARGUMENTS] = {
    "x", "out", "op", "order", "root", "timeout", "async_op", "counts", "axis"};
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
static int has_result(const struct operation *operation)
{
    return operation->shape != NONE;
}

/* Whether C can make the next call of an operation; sets whether its results are compared. C
   compares only those of an all_reduce, which are the same on all ranks. */
static int can_make(const struct operation *operation, PyObject *ring, int *due)
{
    *due = has_result(operation) && is_due(ring);
    return !*due || strcmp(operation->name, "all_reduce") == 0;
}

/* An entry of a Door's table of plans. C finds the plan of a call by its arguments, dtype and
   shape. To make a Request with its digest in Python takes many times as long as a small call, so C
   calls plan_for_c only for calls that are not in the table. An entry keeps no array.

   The field division is the call's order, if that is a division of shards: then the first axis of x
   is this rank's shards. It is compared by identity, as the operator is.

   The field plain is a method of a plan that is written in Python. The method takes NumPy's arrays
   as they are, so that no Buffers are needed. The field is NULL if the plan has no such method. */
struct entry {
    const struct operation *operation;
    PyObject *planned, *request, *plan, *plain, *op, *counts, *division;
    int ordered, root, dtype, ndim;
    int64_t shape[VIEW_DIMENSIONS];
};

/* Number of entries of a table, a power of two; and number of places in a row, from that of its hash
   on, at which an entry may be. A program of a thousand distinct calls finds them all: its table is
   half full. With more calls, some replace others. */
#define ENTRIES 2048
#define PLACES 32

/* Several threads may use a door, so the table is read and changed in critical sections. */
typedef struct {
    CORE_HEAD
    PyObject *ring, *queue;
    int rank, size;
    struct entry *table[ENTRIES]; /* NULL where no call has come yet */
} Door;

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

/* The limited API has these from 3.12 on. They are the same in all versions. */
typedef PyObject *(*vectorcall_function)(PyObject *, PyObject *const *, size_t, PyObject *);
#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif
#define OFFSET_FLAG ((size_t)1 << (8 * sizeof(size_t) - 1))

enum message_kind { SEND, RECV, SENDRECV, MESSAGES };
static const char *const message_names[MESSAGES] = {"send", "recv", "sendrecv"};

/* A method of communicators: a descriptor, like a function of Python. */
typedef struct {
    CORE_HEAD
    vectorcall_function vectorcall;
    PyObject *function; /* makes the calls that C does not make */
    PyObject *kind;     /* the class of the calls */
    PyObject *dict;     /* the attributes that functools.update_wrapper sets */
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

static int is_apart_or(const struct view *a, const struct view *b, const char *same)
{
    return a->address == same || a->address + a->nbytes <= b->address
           || b->address + b->nbytes <= a->address;
}

/* Multiplies a number of rows by that of the ranks. Returns 0 if no array can have so many rows, not
   even one without elements. Then Python raises the error, on all ranks. */
static int has_rows(int64_t rows, const Door *door, int64_t *product)
{
    return !__builtin_mul_overflow(rows, (int64_t)door->size, product);
}

/* Sets the shape of the result in call->views[1]; returns 0 if Python must make the call. */
static int shape_result(const Door *door, struct call *call)
{
    struct view *view = &call->views[1];
    enum shape shape = call->operation->shape;
    *view = call->views[0];
    if (call->division != NULL) { /* the result has the shape of one shard, or a piece of it */
        if (view->ndim-- == 0)
            return 0;
        memmove(view->shape, view->shape + 1, sizeof *view->shape * (size_t)view->ndim);
    }
    if (shape == SAME)
        return 1;
    if (view->ndim == 0)
        return 0;
    int64_t rows = view->shape[0], mine = rows / door->size + (door->rank < rows % door->size);
    view->shape[0] = shape == JOINED ? call->total : mine;
    return shape != EXCHANGED || has_rows(mine, door, &view->shape[0]);
}

/* Finds the array for the result, or makes one. Returns 1, 0 if Python must make the call, or -1
   with an exception. */
static int find_output(const Door *door, struct call *call)
{
    enum shape shape = call->operation->shape;
    const struct view *x = &call->views[0];
    struct view want, *got = &call->views[1];
    if (!shape_result(door, call))
        return 0;
    want = *got;
    call->result = call->out != Py_None ? Py_NewRef(call->out)
                   : (call->is_thawed ? aligned_array : new_array)(call->core, call->x, &want);
    if (call->result == NULL)
        return -1;
    if (!view_array(call->core, call->result, got) || !got->writable || got->dtype != want.dtype
        || got->ndim != want.ndim
        || memcmp(got->shape, want.shape, sizeof *want.shape * (size_t)want.ndim) != 0)
        return 0;
    /* The one address where x may overlap the result: its beginning, for a call in place, or this
       rank's piece of a joined result. */
    size_t row = shape == JOINED && x->shape[0] ? x->nbytes / (size_t)x->shape[0] : 0;
    const char *same = (shape == SAME || shape == JOINED) && call->division == NULL
                           ? got->address + (size_t)call->before * row : NULL;
    call->dst = got;
    return (call->operation->who == FROM_ROOT && shape == SAME) || is_apart_or(x, got, same);
}

/* Reads the number of rows of each rank; returns whether C can make a call with these counts. */
static int read_counts(const Door *door, struct call *call, PyObject *counts)
{
    const struct view *x = &call->views[0];
    if (!PyList_CheckExact(counts) && !PyTuple_CheckExact(counts))
        return 0;
    /* A copy: another thread may change a list at any time. */
    call->counts = PySequence_Tuple(counts);
    if (call->counts == NULL)
        PyErr_Clear();
    if (call->counts == NULL || PyTuple_Size(call->counts) != door->size || x->ndim == 0)
        return 0;
    for (int rank = 0; rank < door->size; rank++) {
        PyObject *each = PyTuple_GetItem(call->counts, rank);
        int overflow;
        int64_t rows = PyLong_CheckExact(each) ? PyLong_AsLongLongAndOverflow(each, &overflow) : -1;
        if (rows < 0 || rows > INT32_MAX || (rank == door->rank && rows != x->shape[0]))
            return 0;
        call->before += rank < door->rank ? rows : 0;
        call->total += rows;
    }
    return 1;
}

/* Reads the arguments. Returns 1, 0 if Python must make the call, or -1 with an exception. */
static int read_call(const Door *door, struct call *call, PyObject *const *given)
{
    int counted = given[COUNTS] != Py_None;
    if (given[TIMEOUT] != Py_None || given[ASYNC] != Py_False || given[AXIS] != call->core->zero
        || (counted && call->operation->shape != JOINED) || PyList_Size(door->queue) != 0)
        return 0;
    call->x = given[X], call->out = given[OUT], call->op = given[OP];
    call->order = given[ORDER], call->root_object = given[ROOT];
    if (call->order != Py_None) {
        if (!PyUnicode_Check(call->order))
            call->division = call->order; /* plan_for_c refuses what is no division of shards */
        else if (PyUnicode_CompareWithASCIIString(call->order, "rank") == 0)
            call->ordered = 1;
        else
            return 0;
    }
    if (call->operation->folds && !PyUnicode_CheckExact(call->op))
        return 0;
    call->root = -1;
    if (call->operation->who != EVERYBODY) {
        int overflow;
        if (!PyLong_CheckExact(call->root_object))
            return 0;
        long root = PyLong_AsLongAndOverflow(call->root_object, &overflow);
        if (root < 0 || root >= door->size)
            return 0;
        call->root = (int)root;
    }
    if (call->operation->shape == NONE) {
        call->result = Py_NewRef(Py_None);
        return 1;
    }
    int is_root = call->root == door->rank, scatters = call->operation->shape == CUT
                                                       && call->operation->who == FROM_ROOT;
    if (call->operation->who == FROM_ROOT && !is_root) {
        if (call->x == Py_None)
            call->x = call->out;
        else if (scatters)
            return 0;
    }
    if (!view_array(call->core, call->x, &call->views[0])
        || (counted && !read_counts(door, call, given[COUNTS])))
        return 0;
    if (call->operation->shape == JOINED && !counted && call->views[0].ndim > 0) {
        if (!has_rows(call->views[0].shape[0], door, &call->total))
            return 0;
        call->before = call->total / door->size * door->rank;
    }
    call->src = &call->views[0];
    if (scatters && !is_root) { /* x is the output, from which Python derives the whole shape */
        call->src = NULL;
        call->dst = &call->views[0];
        call->result = Py_NewRef(call->out);
        return call->out != Py_None && call->dst->ndim > 0 && call->dst->writable;
    }
    if (call->operation->who == FROM_ROOT && is_root && !scatters) {
        if (call->out != Py_None && call->out != call->x)
            return 0;
        call->dst = call->src;
        call->result = Py_NewRef(call->x);
        /* Without out, x is the result if it is an array as the other ranks get. */
        return call->src->writable && (call->out != Py_None || is_result(call->core, call->x));
    }
    if (call->operation->who == AT_ROOT && !is_root) {
        call->result = Py_NewRef(Py_None);
        return 1;
    }
    int found = find_output(door, call);
    if (call->operation->who == FROM_ROOT && !scatters)
        call->src = call->dst;
    return found;
}

/* Whether an entry is the plan of a call. The operator is compared by identity. Names in a program
   are interned, so a call in a program always passes the same object. The table holds a reference,
   so no other string can be at that address. A string that the program creates anew for each call
   matches no entry; then Python finds the plan. */
static int is_plan_of(const struct entry *p, const struct call *call)
{
    const struct view *x = &call->views[0];
    return p->operation == call->operation && p->op == call->op && p->ordered == call->ordered
           && p->division == call->division
           && p->root == call->root && p->dtype == x->dtype && p->ndim == x->ndim
           && (p->counts == NULL) == (call->counts == NULL)
           && (p->counts == NULL || PyObject_RichCompareBool(p->counts, call->counts, Py_EQ) == 1)
           && memcmp(p->shape, x->shape, sizeof *x->shape * (size_t)x->ndim) == 0;
}

static uint64_t hash_of(const struct call *call)
{
    const struct view *x = &call->views[0];
    uint64_t hash = (uint64_t)(uintptr_t)call->operation + (uintptr_t)call->op
                    + (uintptr_t)call->division + 31 * (unsigned)x->dtype + (unsigned)call->root
                    + (call->counts ? 127 * (uint64_t)call->total + 1 : 0);
    for (int i = 0; i < x->ndim; i++)
        hash = (hash ^ (uint64_t)x->shape[i]) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ hash >> 32;
}

/* Returns the place of a call's entry, or a place for a new one. */
static struct entry **place_of(Door *door, const struct call *call, uint64_t hash)
{
    for (uint64_t i = hash; i < hash + PLACES; i++) {
        struct entry **place = &door->table[i % ENTRIES];
        if (*place == NULL || is_plan_of(*place, call))
            return place;
    }
    return &door->table[(hash + (hash >> 40) % PLACES) % ENTRIES];
}

static PyObject *counts_of(const struct call *call)
{
    return call->counts ? call->counts : Py_None;
}

/* Frees an entry. It is in no table any more: a finalizer that runs then may make a call. */
static void forget(struct entry *p)
{
    if (p == NULL)
        return;
    Py_XDECREF(p->planned);
    Py_XDECREF(p->request);
    Py_XDECREF(p->plan);
    Py_XDECREF(p->plain);
    Py_XDECREF(p->op);
    Py_XDECREF(p->counts);
    Py_XDECREF(p->division);
    free(p);
}

/* What a call needs of its entry, with references: while the call runs, another thread, a signal
   handler or a finalizer may make calls, too, and replace the entry. */
struct found {
    PyObject *plan;            /* NULL if there is no plan */
    PyObject *request, *plain; /* only for a plan that is not in C */
};

static struct found found_in(const struct core *core, const struct entry *p)
{
    int in_c = Py_TYPE(p->plan) == core->plan_type;
    return (struct found){Py_NewRef(p->plan), in_c ? NULL : Py_NewRef(p->request),
                          in_c ? NULL : Py_XNewRef(p->plain)};
}

/* Makes an entry of what plan_for_c has returned; returns its plan, or none with an exception. */
static struct found fill(Door *door, const struct call *call, PyObject *planned)
{
    const struct view *x = &call->views[0];
    struct found found = {NULL, NULL, NULL};
    struct entry *entry = malloc(sizeof *entry);
    if (entry == NULL) {
        PyErr_NoMemory();
        return found;
    }
    *entry = (struct entry){
        call->operation, Py_NewRef(planned), PyObject_GetAttrString(planned, "request"),
        PyObject_GetAttrString(planned, "plan"), NULL, Py_NewRef(call->op),
        Py_XNewRef(call->counts), Py_XNewRef(call->division), call->ordered, call->root,
        x->dtype, x->ndim, {0}};
    memcpy(entry->shape, x->shape, sizeof *x->shape * (size_t)x->ndim);
    if (entry->request != NULL && entry->plan != NULL) {
        if (Py_TYPE(entry->plan) != call->core->plan_type) {
            entry->plain = PyObject_GetAttrString(entry->plan, "plain");
            if (entry->plain == NULL) /* the plan has no such method */
                PyErr_Clear();
        }
        found = found_in(call->core, entry);
        (void)door;
        Py_BEGIN_CRITICAL_SECTION(door);
        struct entry **place = place_of(door, call, hash_of(call)), *old = *place;
        *place = entry;
        entry = old;
        Py_END_CRITICAL_SECTION();
    }
    forget(entry);
    return found;
}

/* Whether the call's arrays still have the memory that they had when they were viewed. */
static int are_there(const struct call *call)
{
    return (call->src == NULL || is_there(call->core, call->src))
           && (call->dst == NULL || is_there(call->core, call->dst));
}

/* Finds the plan of a call in the table, or has Python make the plan. Returns no plan with an
   exception, or without one if Python must make the call. */
static struct found find_plan(Door *door, const struct call *call)
{
    struct found found = {NULL, NULL, NULL};
    uint64_t hash = hash_of(call);
    Py_BEGIN_CRITICAL_SECTION(door);
    /* Nearly all calls are at their first place, so that is looked at first. */
    const struct entry *entry = door->table[hash % ENTRIES];
    if (entry != NULL && !is_plan_of(entry, call)) {
        entry = *place_of(door, call, hash + 1);
        entry = entry != NULL && is_plan_of(entry, call) ? entry : NULL;
    }
    if (entry != NULL)
        found = found_in(call->core, entry);
    Py_END_CRITICAL_SECTION();
    if (found.plan != NULL)
        return found;
    PyObject *planned = PyObject_CallMethod((PyObject *)call->path, "plan_for_c", "OOOOOO",
                                            call->kind, call->x, call->op, call->order,
                                            call->root_object, counts_of(call));
    /* If another thread has run meanwhile and has changed an array, Python must make the call, since
       it looks at the arrays again. */
    if (planned != NULL && planned != Py_None && are_there(call))
        found = fill(door, call, planned);
    Py_XDECREF(planned);
    return found;
}

/* Returns the number of a view's elements as an int; 0 for no view. */
static PyObject *count_of(const struct view *view)
{
    return PyLong_FromSize_t(view == NULL ? 0 : view->nbytes / item_bytes[view->dtype]);
}

/* Makes the Work of an asynchronous call hold the memory of the arrays until it is over. */
static void hold_until_over(PyObject *work, PyObject *held)
{
    PyObject *done = held ? PyObject_CallMethod(work, "keep", "O", held) : NULL;
    /* The result may be no Work but a call that is made later. Such a call holds the memory
       itself, once it is made. */
    if (done == NULL)
        PyErr_Clear();
    Py_XDECREF(done);
}

/* Has Python handle the current exception of a call. Python raises an error, or goes on with the
   call if the ranks' arguments may differ in it. Returns the result of that. */
static PyObject *recover(const struct call *call)
{
    PyObject *error = take_error(), *held = NULL;
    hold_all(call->core, call->x, &held);
    hold_all(call->core, call->out, &held);
    PyObject *done = PyObject_CallMethod((PyObject *)call->path, "recover_for_c", "OOOOOOOO",
                                         call->kind, call->x, call->out, call->op, call->order,
                                         call->root_object, counts_of(call), error);
    Py_XDECREF(held);
    Py_XDECREF(error);
    return done;
}

/* Runs a plan that is written in Python. Returns 0, -1 with an exception, or 1 if Python must make the
   call. */
static int run_in_python(Door *door, const struct call *call, const struct found *found,
                         PyObject *limit)
{
    const struct core *core = call->core;
    PyObject *x = call->src == NULL ? Py_None : call->src == call->dst ? call->result : call->x;
    PyObject *out = call->dst ? call->result : Py_None;
    int numpy = (x == Py_None || is_numpy(core, x)) && (out == Py_None || is_numpy(core, out));
    PyObject *ran = NULL, *held = NULL, *deadline = NULL, *of_x = NULL, *of_out = NULL;
    int state = 1;
    hold_all(core, x, &held);
    if (out != x)
        hold_all(core, out, &held);
    /* Before the memory was held, another thread may have run and may have changed an array. */
    if (are_there(call)) {
        state = -1;
        record_begin(door->ring, found->request, 0);
        if ((deadline = deadline_of(core, limit, now_ns())) == NULL)
            ; /* the exception stands */
        else if (numpy && found->plain != NULL)
            ran = PyObject_CallFunctionObjArgs(found->plain, x, out, deadline, NULL);
        else if ((of_x = count_of(call->src)) != NULL && (of_out = count_of(call->dst)) != NULL)
            /* A tensor can still get other memory, so the path compares the counts. */
            ran = PyObject_CallMethodObjArgs((PyObject *)call->path, core->name_run_python_plan,
                                             found->request, found->plan, x, of_x, out, of_out,
                                             deadline, NULL);
        state = ran == NULL ? -1 : 0;
    }
    Py_XDECREF(of_x);
    Py_XDECREF(of_out);
    Py_XDECREF(deadline);
    Py_XDECREF(ran);
    Py_XDECREF(held);
    return state;
}

/* Returns the result of a call that has succeeded. If compare is not NULL, has Python compare the
   ranks' results first; see run_compared(). */
static PyObject *result_of(const struct call *call, PyObject *compare)
{
    if (compare != NULL) {
        PyObject *done = PyObject_CallMethod((PyObject *)call->path, "compare_for_c", "OO",
                                             call->result, compare);
        Py_XDECREF(done);
        if (done == NULL)
            return NULL;
    }
    return Py_NewRef(call->result);
}

static PyObject *make(Door *door, struct call *call)
{
    struct found found = find_plan(door, call);
    if (found.plan == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    PyObject *limit = read_field((PyObject *)call->path, &call->path->timeout), *done = NULL;
    PyObject *compare = NULL;
    int state;
    if (limit == NULL || (call->is_due && found.request != NULL))
        state = 1; /* Python raises the error, or compares the results of a plan in Python */
    else if (call->is_due)
        state = run_compared(found.plan, call->src, call->dst, limit, door->ring, &compare);
    else if (found.request == NULL)
        state = run_plan(found.plan, call->src, call->dst, limit, door->ring);
    else
        state = run_in_python(door, call, &found, limit);
    if (state == 0) {
        record_end(door->ring);
        if (has_result(call->operation))
            count_call(door->ring);
        done = result_of(call, compare);
    } else {
        done = state < 0 ? recover(call) : Py_NewRef(Py_NotImplemented);
    }
    Py_XDECREF(compare);
    Py_XDECREF(limit);
    Py_DECREF(found.plan);
    Py_XDECREF(found.request);
    Py_XDECREF(found.plain);
    return done;
}

/* -- the methods ---------------------------------------------------------------------------- */

/* Puts the arguments in their places by name; returns whether C knows all of them. */
static int sort_arguments(const struct core *core, const struct operation *operation,
                          PyObject *const *args, Py_ssize_t count, PyObject *names,
                          PyObject **given)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    if (count > (operation->takes & BIT(X) ? 1 : 0))
        return 0;
    if (count)
        given[X] = args[0];
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        int which = 0;
        /* Keywords in a program's source are interned, so equal keywords are the same object. */
        while (which < ARGUMENTS && name != core->arguments[which])
            which++;
        if (which == ARGUMENTS || !(operation->takes & BIT(which)) || (which == X && count))
            return 0;
        given[which] = args[count + i];
    }
    return 1;
}

/* Replaces the current TypeError by a clearer one, if the arguments do not suit the function. */
static void explain(PyObject *path, PyObject *function)
{
    PyObject *error = take_error();
    PyObject *better = PyObject_CallMethod(path, "explain", "OO", function, error);
    if (better != NULL)
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(better)), Py_NewRef(better),
                      PyException_GetTraceback(better));
    Py_XDECREF(better);
    Py_XDECREF(error);
}

/* Whether the keyword arguments ask for a Work. */
static int is_asynchronous(const struct core *core, PyObject *const *args, PyObject *names)
{
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_Size(names); i++)
        if (PyTuple_GetItem(names, i) == core->arguments[ASYNC])
            return args[i] != Py_False;
    return 0;
}

/* Makes a call by the function in Python. The first argument is the communicator. */
static PyObject *call_python(const Method *method, Gate *path, PyObject *const *args,
                             Py_ssize_t count, PyObject *names)
{
    size_t given = (size_t)(count + (names ? PyTuple_Size(names) : 0));
    PyObject *held = NULL;
    for (size_t i = 1; i < given; i++)
        hold_all(method->core, args[i], &held);
    PyObject *done = PyObject_Vectorcall(method->function, args, (size_t)count, names);
    if (done != NULL && is_asynchronous(method->core, args + count, names))
        hold_until_over(done, held);
    Py_XDECREF(held);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_TypeError))
        explain((PyObject *)path, method->function);
    return done;
}

/* Returns the framework's array for a result of NumPy's, or what is no such result as it is. */
static PyObject *frozen(const struct core *core, PyObject *done)
{
    if (done == NULL || !is_numpy(core, done))
        return done;
    PyObject *wrapped = PyObject_CallFunctionObjArgs(core->wrap_frozen, done, NULL);
    Py_DECREF(done);
    return wrapped;
}

/* Makes a collective call, if the door is open and C can make this call. Otherwise does nothing and
   returns NotImplemented: then Python must make the call. */
static PyObject *call_door(const Method *method, Gate *path, PyObject *const *args,
                           Py_ssize_t count, PyObject *names)
{
    const struct core *core = method->core;
    const struct operation *operation = method->operation;
    PyObject *given[ARGUMENTS] = {
        Py_None, Py_None, operation->folds ? core->name_sum : Py_None, Py_None,
        operation->who == EVERYBODY ? Py_None : core->zero, Py_None, Py_False, Py_None,
        core->zero};
    int sorted = sort_arguments(core, operation, args, count, names, given);
    /* With counts the ranks need not ask each other for lengths, so the general door serves. */
    int which = given[COUNTS] == Py_None ? (int)operation->door : OF_ALL;
    /* Keep the door: while the call waits, other code may close the communicator. */
    PyObject *door = read_field((PyObject *)path, &path->doors[which]), *done = NULL;
    struct call call = {
        .core = core, .operation = operation, .path = path, .kind = method->kind};
    PyObject *thaw = NULL;
    int plain = 0;
    if (sorted && door != NULL && Py_TYPE(door) == core->door_type
        && can_make(operation, ((Door *)door)->ring, &call.is_due)) {
        /* An array that never changes is no output, and is itself the root's result. */
        if (operation->who != FROM_ROOT && given[OUT] == Py_None
            && (thaw = thawed(core, given[X])) != NULL)
            given[X] = thaw;
        call.is_thawed = thaw != NULL;
        plain = read_call((Door *)door, &call, given);
    }
    if (plain > 0)
        done = make((Door *)door, &call);
    else if (plain == 0)
        done = Py_NewRef(Py_NotImplemented);
    if (thaw != NULL)
        done = frozen(core, done);
    Py_XDECREF(thaw);
    Py_XDECREF(door);
    Py_XDECREF(call.result);
    Py_XDECREF(call.counts);
    return done;
}

#define ALWAYS (BIT(TIMEOUT) | BIT(ASYNC))
#define ARRAYS (ALWAYS | BIT(X) | BIT(OUT))
#define PIECES (ARRAYS | BIT(COUNTS) | BIT(AXIS))
static const struct operation operations[] = {
    {"all_reduce", SAME, EVERYBODY, 1, ARRAYS | BIT(OP) | BIT(ORDER), OF_ALL},
    {"reduce", SAME, AT_ROOT, 1, ARRAYS | BIT(ROOT) | BIT(OP) | BIT(ORDER), OF_ALL},
    {"scan", SAME, EVERYBODY, 1, ARRAYS | BIT(OP), OF_ALL},
    {"reduce_scatter", CUT, EVERYBODY, 1, PIECES | BIT(OP) | BIT(ORDER), OF_ALL},
    {"broadcast", SAME, FROM_ROOT, 0, ARRAYS | BIT(ROOT), OF_PIECES},
    {"scatter", CUT, FROM_ROOT, 0, PIECES | BIT(ROOT), OF_SCATTER},
    {"all_gather", JOINED, EVERYBODY, 0, PIECES, OF_PIECES},
    {"gather", JOINED, AT_ROOT, 0, PIECES | BIT(ROOT), OF_PIECES},
    {"all_to_all", EXCHANGED, EVERYBODY, 0, PIECES, OF_PIECES},
    {"barrier", NONE, EVERYBODY, 0, ALWAYS, OF_ALL}};

/* Tells Python that a message has failed, and raises the exception again. */
static void note_failure(PyObject *path)
{
    PyObject *error = take_error(), *noted = PyObject_CallMethod(path, "note_failure", "O", error);
    if (noted != NULL) /* otherwise the exception of note_failure stands */
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), Py_NewRef(error),
                      PyException_GetTraceback(error));
    Py_XDECREF(noted);
    Py_XDECREF(error);
}

/* The arguments of a message: x goes to a rank, out comes from another rank. */
struct message {
    PyObject *x, *to, *out, *from, *tag;
};

/* Reads the arguments of a message; returns whether C can exchange it. */
static int read_message(const struct core *core, struct message *m, enum message_kind which,
                        PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    *m = (struct message){Py_None, core->nobody, Py_None, core->nobody, core->zero};
    if (count != (which == SENDRECV ? 3 : 2))
        return 0;
    if (which != RECV)
        m->x = args[0], m->to = args[1];
    if (which != SEND)
        m->from = args[count - 1];
    if (which == RECV)
        m->out = args[0];
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_Size(names); i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        if (name == core->name_tag)
            m->tag = args[count + i];
        else if (name == core->arguments[OUT] && which == SENDRECV)
            m->out = args[count + i];
        else
            return 0;
    }
    return (which == RECV || m->x != Py_None) && (which == SEND || m->out != Py_None)
           && (which != SENDRECV || PyObject_RichCompareBool(m->from, core->any, Py_EQ) == 0);
}

/* Sends, receives or does both by the transport's own function, if no message is in flight in the
   background; see Path.open_doors. Returns NotImplemented if Python must exchange the message. */
static PyObject *call_exchange(const Method *method, Gate *path, PyObject *const *args,
                               Py_ssize_t count, PyObject *names)
{
    const struct core *core = method->core;
    struct message m;
    int plain = read_message(core, &m, method->message, args, count, names);
    PyErr_Clear(); /* a comparison in read_message may have raised */
    PyObject *owner = (PyObject *)path, *done = NULL, *lanes = read_field(owner, &path->lanes);
    PyObject *exchange = read_field(owner, &path->exchange);
    PyObject *timeout = read_field(owner, &path->timeout);
    if (!plain || exchange == NULL || exchange == Py_None || lanes == NULL
        || !PyDict_Check(lanes) || PyDict_Size(lanes) != 0 || timeout == NULL) {
        done = Py_NewRef(Py_NotImplemented);
    } else {
        /* If exchange is C's own, it holds the arrays and makes a deadline when it has to wait. */
        int in_c = PyCFunction_CheckExact(exchange);
        PyObject *limit = in_c ? Py_NewRef(timeout) : deadline_of(core, timeout, now_ns());
        PyObject *held = NULL;
        if (!in_c) {
            hold_all(core, m.x, &held);
            hold_all(core, m.out, &held);
        }
        if (limit != NULL)
            done = PyObject_CallFunctionObjArgs(exchange, m.x, m.to, m.out, m.from, m.tag, limit,
                                                Py_True, NULL);
        Py_XDECREF(held);
        if (done == NULL) {
            note_failure(owner);
        } else if (Py_TYPE(done) == core->deadline_type) { /* nothing has been received */
            PyObject *deadline = done;
            done = PyObject_CallMethod(owner, "receive_rest", "OOOOOO", method->kind, m.x, m.out,
                                       m.from, m.tag, deadline);
            Py_DECREF(deadline);
        }
        Py_XDECREF(limit);
    }
    Py_XDECREF(lanes);
    Py_XDECREF(exchange);
    Py_XDECREF(timeout);
    if (done == NULL || done == Py_NotImplemented)
        return done;
    Py_DECREF(done);
    return Py_NewRef(m.out);
}

/* Makes a call: in C if the call is plain, otherwise in Python. */
static PyObject *method_vectorcall(PyObject *self, PyObject *const *args, size_t flagged,
                                   PyObject *names)
{
    const Method *method = (Method *)self;
    Py_ssize_t count = (Py_ssize_t)(flagged & ~OFFSET_FLAG);
    PyObject *path = NULL, *done;
    /* Keep the path: while the call waits, other code may drop the communicator. */
    if (count > 0 && PyObject_TypeCheck(args[0], method->core->handle_type))
        path = read_field(args[0], &((Handle *)args[0])->path);
    if (path == NULL || !PyObject_TypeCheck(path, method->core->gate_type)) {
        Py_XDECREF(path);
        return PyObject_Vectorcall(method->function, args, (size_t)count, names); /* raises */
    }
    done = (method->operation ? call_door : call_exchange)(method, (Gate *)path, args + 1,
                                                           count - 1, names);
    if (done == Py_NotImplemented) {
        Py_DECREF(done);
        done = call_python(method, (Gate *)path, args, count, names);
    }
    Py_DECREF(path);
    return done;
}

/* Binds the method to the object on which it is looked up, as a function does. */
static PyObject *method_get(PyObject *self, PyObject *object, PyObject *type)
{
    (void)type;
    if (object == NULL || object == Py_None)
        return Py_NewRef(self);
    return PyObject_CallFunctionObjArgs(((Method *)self)->core->bound_method_type, self, object,
                                        NULL);
}

/* Frees an object of one of the base classes below. */
static void dealloc(PyObject *object, inquiry clear)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *method_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *function, *kind, *name;
    if (refuse_keywords("Method", keywords) < 0
        || !PyArg_ParseTuple(args, "OO:Method", &function, &kind))
        return NULL;
    if (!PyCallable_Check(function))
        return PyErr_Format(PyExc_TypeError, "Method: the first argument must be callable");
    name = PyObject_GetAttrString(function, "__name__");
    if (name == NULL || !PyUnicode_Check(name)) {
        Py_XDECREF(name);
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_TypeError, "Method: __name__ must be a str");
    }
    const struct operation *operation = NULL;
    int message = 0;
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (PyUnicode_CompareWithASCIIString(name, operations[i].name) == 0)
            operation = &operations[i];
    while (message < MESSAGES
           && PyUnicode_CompareWithASCIIString(name, message_names[message]) != 0)
        message++;
    Method *method = NULL;
    if (operation == NULL && message == MESSAGES)
        PyErr_Format(PyExc_ValueError, "Method: C has no operation with the name %U", name);
    else
        method = new_object(type);
    Py_DECREF(name);
    if (method == NULL)
        return NULL;
    method->vectorcall = method_vectorcall;
    method->function = Py_NewRef(function);
    method->kind = Py_NewRef(kind);
    method->operation = operation;
    method->message = (enum message_kind)message;
    return (PyObject *)method;
}

static int method_traverse(PyObject *object, visitproc visit, void *arg)
{
    Method *method = (Method *)object;
    Py_VISIT(method->function);
    Py_VISIT(method->kind);
    Py_VISIT(method->dict);
    return visit_object(object, visit, arg);
}

/* Breaks reference cycles, but keeps the function until the end: a finalizer may still make calls
   through this method. The dict, which refers to the function as well, is cleared. */
static int method_clear(PyObject *object)
{
    Method *method = (Method *)object;
    Py_CLEAR(method->dict);
    Py_CLEAR(method->kind);
    return 0;
}

static void method_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    method_clear(object);
    Py_CLEAR(((Method *)object)->function);
    free_object(object);
}

static PyMemberDef method_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Method, dict), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef method_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot method_slots[] = {
    {Py_tp_new, method_new},           {Py_tp_dealloc, method_dealloc},
    {Py_tp_traverse, method_traverse}, {Py_tp_clear, method_clear},
    {Py_tp_call, PyVectorcall_Call},   {Py_tp_descr_get, method_get},
    {Py_tp_members, method_members},   {Py_tp_getset, method_attributes},
    {0, NULL}};

static PyType_Spec method_spec = {
    "collective.native._core.Method", sizeof(Method), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
        | Py_TPFLAGS_METHOD_DESCRIPTOR, method_slots};

/* -- base classes for Python ----------------------------------------------------------------- */

static int gate_traverse(PyObject *object, visitproc visit, void *arg)
{
    Gate *path = (Gate *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(path->timeout);
    for (int i = 0; i < DOORS; i++)
        Py_VISIT(path->doors[i]);
    Py_VISIT(path->exchange);
    Py_VISIT(path->lanes);
    return 0;
}

static int gate_clear(PyObject *object)
{
    Gate *path = (Gate *)object;
    Py_CLEAR(path->timeout);
    for (int i = 0; i < DOORS; i++)
        Py_CLEAR(path->doors[i]);
    Py_CLEAR(path->exchange);
    Py_CLEAR(path->lanes);
    return 0;
}

static void gate_dealloc(PyObject *object)
{
    dealloc(object, gate_clear);
}

#define ATTRIBUTE(name, type, field) {name, T_OBJECT_EX, offsetof(type, field), 0, NULL}
static PyMemberDef gate_members[] = {
    ATTRIBUTE("timeout", Gate, timeout), ATTRIBUTE("door", Gate, doors[OF_ALL]),
    ATTRIBUTE("door_of_pieces", Gate, doors[OF_PIECES]),
    ATTRIBUTE("door_of_scatter", Gate, doors[OF_SCATTER]),
    ATTRIBUTE("exchange", Gate, exchange), ATTRIBUTE("lanes", Gate, lanes),
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot gate_slots[] = {
    {Py_tp_members, gate_members}, {Py_tp_traverse, gate_traverse},
    {Py_tp_clear, gate_clear},     {Py_tp_dealloc, gate_dealloc},
    {0, NULL}};

static int handle_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Handle *)object)->path);
    return 0;
}

static int handle_clear(PyObject *object)
{
    Py_CLEAR(((Handle *)object)->path);
    return 0;
}

static void handle_dealloc(PyObject *object)
{
    dealloc(object, handle_clear);
}

static PyMemberDef handle_members[] = {ATTRIBUTE("_path", Handle, path), {NULL, 0, 0, 0, NULL}};

static PyType_Slot handle_slots[] = {
    {Py_tp_members, handle_members}, {Py_tp_traverse, handle_traverse},
    {Py_tp_clear, handle_clear},     {Py_tp_dealloc, handle_dealloc},
    {0, NULL}};

#define BASE_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC)
static PyType_Spec gate_spec = {
    "collective.native._core.Gate", sizeof(Gate), 0, BASE_FLAGS, gate_slots};
static PyType_Spec handle_spec = {
    "collective.native._core.Handle", sizeof(Handle), 0, BASE_FLAGS, handle_slots};

static PyObject *door_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *ring, *queue;
    int rank, size;
    if (refuse_keywords("Door", keywords) < 0
        || !PyArg_ParseTuple(args, "OO!ii:Door", &ring, &PyList_Type, &queue, &rank, &size))
        return NULL;
    if (Py_TYPE(ring) != ((struct core *)PyType_GetModuleState(type))->ring_type)
        return PyErr_Format(PyExc_TypeError, "Door: the first argument must be a Ring");
    if (rank < 0 || rank >= size)
        return PyErr_Format(PyExc_ValueError, "Door: rank %d is not one of %d ranks", rank, size);
    Door *door = new_object(type);
    if (door == NULL)
        return NULL;
    door->ring = Py_NewRef(ring);
    door->queue = Py_NewRef(queue);
    door->rank = rank;
    door->size = size;
    return (PyObject *)door;
}

static int door_traverse(PyObject *object, visitproc visit, void *arg)
{
    Door *door = (Door *)object;
    Py_VISIT(door->ring);
    Py_VISIT(door->queue);
    for (int i = 0; i < ENTRIES; i++) {
        const struct entry *entry = door->table[i];
        if (entry == NULL)
            continue;
        Py_VISIT(entry->planned);
        Py_VISIT(entry->request);
        Py_VISIT(entry->plan);
        Py_VISIT(entry->plain);
        Py_VISIT(entry->op);
        Py_VISIT(entry->counts);
        Py_VISIT(entry->division);
    }
    return visit_object(object, visit, arg);
}

static int door_clear(PyObject *object)
{
    for (int i = 0; i < ENTRIES; i++) {
        struct entry *entry = ((Door *)object)->table[i];
        ((Door *)object)->table[i] = NULL;
        forget(entry);
    }
    return 0;
}

static void door_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    lock_calls(object);
    door_clear(object);
    Py_CLEAR(((Door *)object)->ring);
    Py_CLEAR(((Door *)object)->queue);
    free_object(object);
}

static PyObject *door_unlock(PyObject *object, PyObject *args)
{
    Door *door = (Door *)object;
    return unlock_call(door->core, door, door->ring, door->queue, args);
}

static PyObject *door_lock(PyObject *object, PyObject *none)
{
    (void)none;
    lock_calls(object);
    Py_RETURN_NONE;
}

static PyMethodDef door_methods[] = {
    {"unlock", door_unlock, METH_VARARGS,
     "unlock(first, second, plan, request, arrays, site, seconds, turn, /)\n--\n\n"
     "Let threads without the interpreter lock make a call; return whether they can."},
    {"lock", door_lock, METH_NOARGS,
     "lock()\n--\n\nLet Python make all calls from now on that have been unlocked."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot door_slots[] = {
    {Py_tp_new, door_new},           {Py_tp_dealloc, door_dealloc},
    {Py_tp_traverse, door_traverse}, {Py_tp_clear, door_clear},
    {Py_tp_methods, door_methods},   {0, NULL}};

static PyType_Spec door_spec = {"collective.native._core.Door", sizeof(Door), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, door_slots};

int add_door(PyObject *module, struct core *core)
{
    PyObject *types = PyImport_ImportModule("types");
    core->bound_method_type = types ? PyObject_GetAttrString(types, "MethodType") : NULL;
    Py_XDECREF(types);
    for (int i = 0; i < ARGUMENTS; i++)
        if ((core->arguments[i] = PyUnicode_InternFromString(argument_names[i])) == NULL)
            return -1;
    if (core->bound_method_type == NULL
        || (core->name_run_python_plan = PyUnicode_InternFromString("run_python_plan")) == NULL
        || (core->name_sum = PyUnicode_InternFromString("sum")) == NULL
        || (core->name_tag = PyUnicode_InternFromString("tag")) == NULL
        || (core->zero = PyLong_FromLong(0)) == NULL
        || (core->nobody = PyLong_FromLong(-2)) == NULL
        || (core->any = PyLong_FromLong(-1)) == NULL
        || add_type(module, &door_spec, &core->door_type) < 0
        || add_type(module, &gate_spec, &core->gate_type) < 0
        || add_type(module, &handle_spec, &core->handle_type) < 0)
        return -1;
    return add_type(module, &method_spec, NULL);
}
