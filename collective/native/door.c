/* The type Door: from a communicator's method to a transport's plan, without Python in between.

   It makes calls on plain arrays with plain arguments, and leaves all others to Python: then it has
   done nothing. Whether it makes a call is each rank's own affair, as Python and it run the same
   plan of the same request.

   A communicator has a door, or several: what is open to one operation may be shut to another. In
   front of the methods in Python are methods in C of the same names, of a base class of the
   communicator's: each asks its door, and calls the other one if that does not do. */

#include "python.h"

#include <string.h>
#include <structmember.h>

/* How the shape of a result follows from that of x. */
enum shape { SAME, CUT, JOINED, EXCHANGED, NONE };

/* What a call may be given, by name. */
enum argument { X, OUT, OP, ORDER, ROOT, TIMEOUT, ASYNC, COUNTS, AXIS, ARGUMENTS };
static const char *const argument_names[ARGUMENTS] = {
    "x", "out", "op", "order", "root", "timeout", "async_op", "counts", "axis"};
#define BIT(argument) (1u << (argument))

struct operation {
    const char *name;
    enum shape shape;
    enum { EVERYBODY, AT_ROOT, FROM_ROOT } who; /* gets a result */
    int folds;
    unsigned takes; /* bits of arguments */
    enum { OF_ALL, OF_PIECES, OF_SCATTER, DOORS } door;
};

/* A call is found by what is known here. A Request has its digest from Python, and that takes many
   times as long as a small call: so the plans are remembered, in one table, that of Python's way
   being asked for what is not in it. No array is kept. plain is the method of a plan of Python's that
   takes NumPy's arrays as they are, so that nobody has to make buffers of them, or NULL. */
struct prepared {
    const struct operation *operation;
    PyObject *planned, *request, *plan, *plain, *op, *counts;
    int ordered, root, dtype, ndim;
    int64_t shape[VIEW_DIMENSIONS];
};

#define PREPARED 128 /* a power of two */

typedef struct {
    PyObject_HEAD
    PyObject *ring, *queue;
    int rank, size;
    struct prepared table[PREPARED];
} Door;

/* What each call looks at of a communicator: Python sets these attributes. Here they are read where
   they are; to find one by its name takes as long as a tenth of a small call. */
typedef struct {
    PyObject_HEAD
    PyObject *timeout, *doors[DOORS], *exchange, *lanes; /* NULL before they are set */
    PyObject *functions; /* a tuple: of each method what makes the calls that C does not */
} Methods;

static PyObject *name_run_plan, *name_sum, *name_tag;
static PyObject *zero, *nobody, *any;
static PyObject *argument_objects[ARGUMENTS];
static PyTypeObject *door_type;

/* One call, as its arguments say. */
struct call {
    const struct operation *operation;
    PyObject *comm, *x, *out, *op, *order, *root_object;
    PyObject *result; /* new, or a new reference to the user's */
    PyObject *counts; /* a tuple, if all ranks know how many rows each has */
    int64_t before, total; /* rows of the ranks before this one, and of all, in what is joined */
    struct view views[2];
    struct view *src, *dst; /* into views, or NULL */
    int ordered, root;
};

static int is_apart_or(const struct view *a, const struct view *b, const char *same)
{
    return a->address == same || a->address + a->nbytes <= b->address
           || b->address + b->nbytes <= a->address;
}

/* Sets the shape of the result in call->views[1]; returns 0 if that is for Python to say. */
static int shape_result(const Door *door, struct call *call)
{
    struct view *view = &call->views[1];
    enum shape shape = call->operation->shape;
    *view = call->views[0];
    if (shape == SAME)
        return 1;
    if (view->ndim == 0)
        return 0;
    int64_t rows = view->shape[0], mine = rows / door->size + (door->rank < rows % door->size);
    if (call->counts == NULL)
        call->before = rows * door->rank, call->total = rows * door->size;
    view->shape[0] = shape == JOINED ? call->total : shape == CUT ? mine : mine * door->size;
    return 1;
}

/* Finds where the result goes. Returns 1, 0 if that is for Python to say, or -1. */
static int find_output(const Door *door, struct call *call)
{
    enum shape shape = call->operation->shape;
    const struct view *x = &call->views[0];
    struct view want, *got = &call->views[1];
    if (!shape_result(door, call))
        return 0;
    want = *got;
    call->result = call->out != Py_None ? Py_NewRef(call->out) : new_array(call->x, &want);
    if (call->result == NULL)
        return -1;
    if (!view_array(call->result, got) || !got->writable || got->dtype != want.dtype
        || got->ndim != want.ndim
        || memcmp(got->shape, want.shape, sizeof *want.shape * (size_t)want.ndim) != 0)
        return 0;
    /* Where x may be that is not apart: in place, or this rank's piece of what is joined. */
    size_t row = shape == JOINED && x->shape[0] ? x->nbytes / (size_t)x->shape[0] : 0;
    const char *same = shape == SAME || shape == JOINED
                           ? got->address + (size_t)call->before * row : NULL;
    call->dst = got;
    return (call->operation->who == FROM_ROOT && shape == SAME) || is_apart_or(x, got, same);
}

/* Reads how many rows each rank has; returns whether that is all for C. */
static int read_counts(const Door *door, struct call *call, PyObject *counts)
{
    const struct view *x = &call->views[0];
    if (!PyList_CheckExact(counts) && !PyTuple_CheckExact(counts))
        return 0;
    /* Of one moment: a list may change while others run. */
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

/* Reads the arguments. Returns 1, 0 if the call is not for C, or -1 with an exception. */
static int read_call(const Door *door, struct call *call, PyObject *const *given)
{
    int counted = given[COUNTS] != Py_None;
    if (given[TIMEOUT] != Py_None || given[ASYNC] != Py_False || given[AXIS] != zero
        || (counted && call->operation->shape != JOINED) || PyList_Size(door->queue) != 0)
        return 0;
    call->x = given[X], call->out = given[OUT], call->op = given[OP];
    call->order = given[ORDER], call->root_object = given[ROOT];
    if (call->order != Py_None) {
        if (!PyUnicode_CheckExact(call->order)
            || PyUnicode_CompareWithASCIIString(call->order, "rank") != 0)
            return 0;
        call->ordered = 1;
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
    if (!view_array(call->x, &call->views[0])
        || (counted && !read_counts(door, call, given[COUNTS])))
        return 0;
    call->src = &call->views[0];
    if (scatters && !is_root) { /* x is the output, by which Python knows the whole */
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
        return call->out == Py_None || call->src->writable;
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

/* By the operator's object: names in a program are interned, and the table has a reference, so that
   no other text can come to be at its address. One that is made anew each time is found by Python. */
static int is_prepared(const struct prepared *p, const struct call *call)
{
    const struct view *x = &call->views[0];
    return p->operation == call->operation && p->op == call->op && p->ordered == call->ordered
           && p->root == call->root && p->dtype == x->dtype && p->ndim == x->ndim
           && (p->counts == NULL) == (call->counts == NULL)
           && (p->counts == NULL || PyObject_RichCompareBool(p->counts, call->counts, Py_EQ) == 1)
           && memcmp(p->shape, x->shape, sizeof *x->shape * (size_t)x->ndim) == 0;
}

static PyObject *counts_of(const struct call *call)
{
    return call->counts ? call->counts : Py_None;
}

/* Emptied before anything is let go of, as that may run code which makes a call by this table. */
static void forget(struct prepared *p)
{
    struct prepared old = *p;
    memset(p, 0, sizeof *p);
    Py_XDECREF(old.planned);
    Py_XDECREF(old.request);
    Py_XDECREF(old.plan);
    Py_XDECREF(old.plain);
    Py_XDECREF(old.op);
    Py_XDECREF(old.counts);
}

/* Finds the plan of a call, or has Python make it. Returns NULL with an exception, or without one
   if there is no plan for C. */
static struct prepared *prepare(Door *door, const struct call *call)
{
    const struct view *x = &call->views[0];
    uint64_t hash = (uint64_t)(uintptr_t)call->operation + (uintptr_t)call->op
                    + 31 * (unsigned)x->dtype + (unsigned)call->root
                    + (call->counts ? 127 * (uint64_t)call->total + 1 : 0);
    for (int i = 0; i < x->ndim; i++)
        hash = (hash ^ (uint64_t)x->shape[i]) * UINT64_C(0x9E3779B97F4A7C15);
    struct prepared *p = &door->table[(hash ^ hash >> 32) % PREPARED];
    if (is_prepared(p, call))
        return p;
    PyObject *planned = PyObject_CallMethod(call->comm, "_find_plan", "sOOOOO",
                                            call->operation->name, call->x, call->op, call->order,
                                            call->root_object, counts_of(call));
    if (planned == NULL || planned == Py_None) {
        Py_XDECREF(planned);
        return NULL;
    }
    forget(p);
    *p = (struct prepared){
        call->operation, planned, PyObject_GetAttrString(planned, "request"),
        PyObject_GetAttrString(planned, "plan"), NULL, Py_NewRef(call->op),
        Py_XNewRef(call->counts), call->ordered, call->root, x->dtype, x->ndim, {0}};
    memcpy(p->shape, x->shape, sizeof p->shape);
    if (p->request == NULL || p->plan == NULL) {
        forget(p);
    } else if ((call->src != NULL && !is_there(call->src))
               || (call->dst != NULL && !is_there(call->dst))) {
        forget(p); /* other threads have run meanwhile: Python's way looks at the arrays anew */
    } else if (!is_plan(p->plan)) {
        p->plain = PyObject_GetAttrString(p->plan, "plain");
        if (p->plain == NULL) /* it has none */
            PyErr_Clear();
    }
    return p->planned ? p : NULL;
}

/* Takes the exception that was raised, with its traceback. */
static PyObject *take_error(void)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

/* Has the Work that an asynchronous call returned hold the arrays' memory until it is over. */
static void hold_until_over(PyObject *work, PyObject *held)
{
    PyObject *done = held ? PyObject_CallMethod(work, "_hold", "O", held) : NULL;
    if (done == NULL) /* it is no Work, but a call to be made later, which holds them then */
        PyErr_Clear();
    Py_XDECREF(done);
}

/* Has Python say what a failure means, and go on where ranks may differ: what that returns. */
static PyObject *recover(const struct call *call)
{
    PyObject *error = take_error(), *held = NULL;
    hold_all(call->x, &held);
    hold_all(call->out, &held);
    PyObject *done = PyObject_CallMethod(call->comm, "_recover", "sOOOOO", call->operation->name,
                                         call->x, call->out, call->root_object, counts_of(call),
                                         error);
    Py_XDECREF(held);
    Py_XDECREF(error);
    return done;
}

static PyObject *make(Door *door, struct call *call)
{
    struct prepared *p = prepare(door, call);
    PyObject *seconds = p ? Py_XNewRef(((Methods *)call->comm)->timeout) : NULL;
    if (seconds == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    /* A signal's handler may make calls, too. */
    PyObject *plan = Py_NewRef(p->plan), *done = NULL;
    int state;
    if (is_plan(plan)) {
        state = run_plan(plan, call->src, call->dst, seconds, door->ring);
    } else {
        PyObject *x = call->src == NULL ? Py_None : call->src == call->dst ? call->result : call->x;
        PyObject *out = call->dst ? call->result : Py_None;
        int numpy = (x == Py_None || is_numpy(x)) && (out == Py_None || is_numpy(out));
        PyObject *plain = numpy ? Py_XNewRef(p->plain) : NULL, *ran, *held = NULL;
        hold_all(x, &held);
        if (out != x)
            hold_all(out, &held);
        record_begin(door->ring, p->request, 0);
        if (plain != NULL)
            ran = PyObject_CallFunctionObjArgs(plain, x, out, seconds, NULL);
        else
            ran = PyObject_CallMethodObjArgs(call->comm, name_run_plan, plan, x, out, seconds, NULL);
        state = ran == NULL ? -1 : 0;
        Py_XDECREF(ran);
        Py_XDECREF(held);
        Py_XDECREF(plain);
    }
    if (state == 0) {
        record_end(door->ring);
        done = Py_NewRef(call->result);
    } else {
        done = state < 0 ? recover(call) : Py_NewRef(Py_NotImplemented);
    }
    Py_DECREF(seconds);
    Py_DECREF(plan);
    return done;
}

/* -- the methods ---------------------------------------------------------------------------- */

/* Puts arguments by name where they belong; returns whether C knows all of them. */
static int sort_arguments(const struct operation *operation, PyObject *const *args,
                          Py_ssize_t count, PyObject *names, PyObject **given)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    if (count > (operation->takes & BIT(X) ? 1 : 0))
        return 0;
    if (count)
        given[X] = args[0];
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        int which = 0;
        /* Names that are written in a program are interned, and so the same objects. */
        while (which < ARGUMENTS && name != argument_objects[which])
            which++;
        if (which == ARGUMENTS || !(operation->takes & BIT(which)) || (which == X && count))
            return 0;
        given[which] = args[count + i];
    }
    return 1;
}

/* The methods by their numbers: first the operations. */
enum { SEND = 10, RECV, SENDRECV, METHODS };
static const char *const message_names[] = {"send", "recv", "sendrecv"};
static const struct operation operations[SEND];

/* Has Python say what was meant by a keyword that the function does not have. */
static void explain(PyObject *comm, PyObject *function)
{
    PyObject *error = take_error();
    PyObject *better = PyObject_CallMethod(comm, "_explain", "OO", function, error);
    if (better != NULL)
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(better)), Py_NewRef(better),
                      PyException_GetTraceback(better));
    Py_XDECREF(better);
    Py_XDECREF(error);
}

/* Whether arguments by name ask for a Work. */
static int is_asynchronous(PyObject *const *args, PyObject *names)
{
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_Size(names); i++)
        if (PyTuple_GetItem(names, i) == argument_objects[ASYNC])
            return args[i] != Py_False;
    return 0;
}

/* Makes a call by the function in Python that the class was made with. */
static PyObject *call_python(PyObject *comm, Py_ssize_t which, PyObject *const *args,
                             Py_ssize_t count, PyObject *names)
{
    PyObject *function = PyTuple_GetItem(((Methods *)comm)->functions, which);
    size_t given = (size_t)(count + (names ? PyTuple_Size(names) : 0));
    PyObject *few[16], **all = given < 16 ? few : PyMem_Malloc((given + 1) * sizeof *all);
    if (all == NULL)
        return PyErr_NoMemory();
    all[0] = comm;
    memcpy(all + 1, args, given * sizeof *all);
    PyObject *held = NULL;
    for (size_t i = 0; i < given; i++)
        hold_all(args[i], &held);
    PyObject *done = call_with(function, all, count + 1, names);
    if (done != NULL && is_asynchronous(args + count, names))
        hold_until_over(done, held);
    Py_XDECREF(held);
    if (all != few)
        PyMem_Free(all);
    if (done == NULL && names != NULL && PyErr_ExceptionMatches(PyExc_TypeError))
        explain(comm, function);
    return done;
}

/* Makes a call: through the door if that is open and it does, else in Python. */
static PyObject *method(PyObject *comm, const struct operation *operation, PyObject *const *args,
                        Py_ssize_t count, PyObject *names)
{
    PyObject *given[ARGUMENTS] = {
        Py_None, Py_None, operation->folds ? name_sum : Py_None, Py_None,
        operation->who == EVERYBODY ? Py_None : zero, Py_None, Py_False, Py_None, zero};
    int sorted = sort_arguments(operation, args, count, names, given);
    /* With counts there is nothing that ranks have to find out from each other. */
    int which = given[COUNTS] == Py_None ? (int)operation->door : OF_ALL;
    /* Kept: what the call waits for may close the communicator. */
    PyObject *door = Py_XNewRef(((Methods *)comm)->doors[which]), *done = NULL;
    struct call call = {.operation = operation, .comm = comm};
    int plain = 0;
    if (sorted && door != NULL && Py_TYPE(door) == door_type)
        plain = read_call((Door *)door, &call, given);
    if (plain > 0)
        done = make((Door *)door, &call);
    Py_XDECREF(door);
    Py_XDECREF(call.result);
    Py_XDECREF(call.counts);
    if (plain == 0 || done == Py_NotImplemented) {
        Py_XDECREF(done);
        done = call_python(comm, operation - operations, args, count, names);
    }
    return done;
}

#define ALWAYS (BIT(TIMEOUT) | BIT(ASYNC))
#define ARRAYS (ALWAYS | BIT(X) | BIT(OUT))
#define PIECES (ARRAYS | BIT(COUNTS) | BIT(AXIS))
static const struct operation operations[SEND] = {
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

#define METHOD(number)                                                                            \
    static PyObject *method_##number(PyObject *self, PyObject *const *args, Py_ssize_t count,     \
                                     PyObject *names)                                             \
    {                                                                                             \
        return method(self, operations + number, args, count, names);                             \
    }
METHOD(0) METHOD(1) METHOD(2) METHOD(3) METHOD(4)
METHOD(5) METHOD(6) METHOD(7) METHOD(8) METHOD(9)

/* Has Python note that a message has failed, and raises the exception again. */
static void note_failure(PyObject *comm)
{
    PyObject *error = take_error(), *noted = PyObject_CallMethod(comm, "_note_failure", "O", error);
    if (noted != NULL) /* or what noting it has raised stands */
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), Py_NewRef(error),
                      PyException_GetTraceback(error));
    Py_XDECREF(noted);
    Py_XDECREF(error);
}

/* What a message says: x goes to a rank, out comes from another. */
struct message {
    PyObject *x, *to, *out, *from, *tag;
};

/* Reads the arguments of a message; returns whether that is all for C. */
static int read_message(struct message *m, int which, PyObject *const *args, Py_ssize_t count,
                        PyObject *names)
{
    *m = (struct message){Py_None, nobody, Py_None, nobody, zero};
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
        if (name == name_tag)
            m->tag = args[count + i];
        else if (name == argument_objects[OUT] && which == SENDRECV)
            m->out = args[count + i];
        else
            return 0;
    }
    return (which == RECV || m->x != Py_None) && (which == SEND || m->out != Py_None)
           && (which != SENDRECV || PyObject_RichCompareBool(m->from, any, Py_EQ) == 0);
}

/* Sends, receives or does both, by the transport's own function, if nothing is in the background;
   see Calls._open_door. */
static PyObject *message(PyObject *comm, int which, PyObject *const *args, Py_ssize_t count,
                         PyObject *names)
{
    struct message m;
    int plain = read_message(&m, which, args, count, names);
    PyErr_Clear(); /* of a comparison */
    PyObject *lanes = ((Methods *)comm)->lanes, *done = NULL;
    PyObject *exchange = Py_XNewRef(((Methods *)comm)->exchange);
    PyObject *seconds = Py_XNewRef(((Methods *)comm)->timeout);
    int64_t start = which == SENDRECV ? now_ns() : 0;
    if (!plain || exchange == NULL || exchange == Py_None || lanes == NULL
        || !PyDict_Check(lanes) || PyDict_Size(lanes) != 0 || seconds == NULL) {
        done = Py_NewRef(Py_NotImplemented);
    } else {
        PyObject *held = NULL;
        if (!PyCFunction_CheckExact(exchange)) { /* C's holds them by itself, if it has to wait */
            hold_all(m.x, &held);
            hold_all(m.out, &held);
        }
        done = PyObject_CallFunctionObjArgs(exchange, m.x, m.to, m.out, m.from, m.tag, seconds,
                                            Py_True, NULL);
        Py_XDECREF(held);
        if (done == NULL) {
            note_failure(comm);
        } else if (done == Py_None) { /* x is sent */
            double left = PyFloat_AsDouble(seconds) - 1e-9 * (double)(now_ns() - start);
            Py_DECREF(done);
            done = PyObject_CallMethod(comm, "_receive_rest", "OOOOd", m.x, m.out, m.from, m.tag,
                                       left);
        }
    }
    Py_XDECREF(exchange);
    Py_XDECREF(seconds);
    if (done == NULL)
        return NULL;
    Py_DECREF(done);
    if (done == Py_NotImplemented)
        return call_python(comm, which, args, count, names);
    return Py_NewRef(m.out);
}

#define MESSAGE(name, which)                                                                      \
    static PyObject *method_##name(PyObject *self, PyObject *const *args, Py_ssize_t count,       \
                                   PyObject *names)                                               \
    {                                                                                             \
        return message(self, which, args, count, names);                                          \
    }
MESSAGE(send, SEND) MESSAGE(recv, RECV) MESSAGE(sendrecv, SENDRECV)

#define ENTRY(number)                                                                             \
    {NULL, (PyCFunction)(void (*)(void))method_##number, METH_FASTCALL | METH_KEYWORDS, NULL}
static const PyMethodDef methods[] = {ENTRY(0), ENTRY(1), ENTRY(2), ENTRY(3), ENTRY(4), ENTRY(5),
                                ENTRY(6), ENTRY(7), ENTRY(8), ENTRY(9), ENTRY(send), ENTRY(recv),
                                ENTRY(sendrecv), {NULL, NULL, 0, NULL}};

#define ATTRIBUTE(name, field) {name, T_OBJECT_EX, offsetof(Methods, field), 0, NULL}
static PyMemberDef attributes[] = {
    ATTRIBUTE("timeout", timeout), ATTRIBUTE("_door", doors[OF_ALL]),
    ATTRIBUTE("_door_of_pieces", doors[OF_PIECES]), ATTRIBUTE("_door_of_scatter", doors[OF_SCATTER]),
    ATTRIBUTE("_door_of_messages", exchange), ATTRIBUTE("_lanes", lanes), {NULL, 0, 0, 0, NULL}};

static int methods_traverse(PyObject *object, visitproc visit, void *arg)
{
    Methods *comm = (Methods *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(comm->timeout);
    for (int i = 0; i < DOORS; i++)
        Py_VISIT(comm->doors[i]);
    Py_VISIT(comm->exchange);
    Py_VISIT(comm->lanes);
    Py_VISIT(comm->functions);
    return 0;
}

static int methods_clear(PyObject *object)
{
    Methods *comm = (Methods *)object;
    Py_CLEAR(comm->timeout);
    for (int i = 0; i < DOORS; i++)
        Py_CLEAR(comm->doors[i]);
    Py_CLEAR(comm->exchange);
    Py_CLEAR(comm->lanes);
    return 0;
}

/* Frees an object of a type of ours that the garbage collector knows. */
static void dealloc(PyObject *object, inquiry clear)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* The functions stay until the end: a finalizer may still make calls. */
static int methods_empty(PyObject *object)
{
    Py_CLEAR(((Methods *)object)->functions);
    return methods_clear(object);
}

static void methods_dealloc(PyObject *object)
{
    dealloc(object, methods_empty);
}

/* Finds the functions by the class, so that each class keeps its own: a module that is reloaded
   makes another class, while communicators of the first one go on. */
static PyObject *methods_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)args, (void)keywords; /* they are for __init__ */
    PyObject *functions = PyObject_GetAttrString((PyObject *)type, "_functions");
    if (functions == NULL)
        return NULL;
    Methods *comm = NULL;
    if (!PyTuple_Check(functions) || PyTuple_Size(functions) != METHODS)
        PyErr_SetString(PyExc_TypeError, "Methods: the class has lost its functions");
    else
        comm = (Methods *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (comm == NULL)
        Py_DECREF(functions);
    else
        comm->functions = functions;
    return (PyObject *)comm;
}

/* Sets the names and docstrings of methods, and returns a tuple of their functions. */
static PyObject *name_methods(PyMethodDef *named, PyObject *functions, PyObject *docs)
{
    PyObject *tuple = PyTuple_New(METHODS);
    for (int i = 0; tuple != NULL && i < METHODS; i++) {
        const char *name = i < SEND ? operations[i].name : message_names[i - SEND];
        PyObject *function = PyDict_GetItemString(functions, name);
        PyObject *doc = PyDict_GetItemString(docs, name);
        named[i].ml_name = name;
        if (function == NULL || doc == NULL || !PyCallable_Check(function)) {
            PyErr_Format(PyExc_ValueError, "make_methods: %s has no function, or no docstring", name);
            Py_CLEAR(tuple);
        } else if ((named[i].ml_doc = PyUnicode_AsUTF8AndSize(Py_NewRef(doc), NULL)) == NULL
                   || PyTuple_SetItem(tuple, i, Py_NewRef(function)) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

/* make_methods(functions, docs): a class with a method in front of each of these functions. */
static PyObject *make_methods(PyObject *module, PyObject *args)
{
    PyObject *functions, *docs, *type = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!:make_methods", &PyDict_Type, &functions, &PyDict_Type, &docs))
        return NULL;
    /* These and the docstrings stay for good, as a class refers to them for as long as it lives. */
    PyMethodDef *named = PyMem_Malloc(sizeof methods);
    if (named == NULL)
        return PyErr_NoMemory();
    memcpy(named, methods, sizeof methods);
    PyType_Slot slots[] = {
        {Py_tp_new, methods_new},         {Py_tp_methods, named},
        {Py_tp_members, attributes},      {Py_tp_traverse, methods_traverse},
        {Py_tp_clear, methods_clear},     {Py_tp_dealloc, methods_dealloc},
        {0, NULL}};
    PyType_Spec spec = {
        "collective.native._core.Methods", sizeof(Methods), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
    PyObject *tuple = name_methods(named, functions, docs);
    if (tuple == NULL) {
        PyMem_Free(named);
        return NULL;
    }
    type = PyType_FromSpec(&spec);
    if (type != NULL && PyObject_SetAttrString(type, "_functions", tuple) < 0)
        Py_CLEAR(type);
    Py_DECREF(tuple);
    return type;
}

static PyObject *door_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *ring, *queue;
    int rank, size;
    if (refuse_keywords("Door", keywords) < 0
        || !PyArg_ParseTuple(args, "OO!ii:Door", &ring, &PyList_Type, &queue, &rank, &size))
        return NULL;
    if (!is_ring(ring))
        return PyErr_Format(PyExc_TypeError, "Door: the first argument is a Ring");
    if (rank < 0 || rank >= size)
        return PyErr_Format(PyExc_ValueError, "Door: rank %d of %d", rank, size);
    Door *door = (Door *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
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
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(door->ring);
    Py_VISIT(door->queue);
    for (int i = 0; i < PREPARED; i++) {
        Py_VISIT(door->table[i].planned);
        Py_VISIT(door->table[i].plan);
        Py_VISIT(door->table[i].plain);
    }
    return 0;
}

static int door_clear(PyObject *object)
{
    for (int i = 0; i < PREPARED; i++)
        forget(&((Door *)object)->table[i]);
    return 0;
}

static int door_empty(PyObject *object)
{
    Py_CLEAR(((Door *)object)->ring);
    Py_CLEAR(((Door *)object)->queue);
    return door_clear(object);
}

static void door_dealloc(PyObject *object)
{
    dealloc(object, door_empty);
}

static PyType_Slot door_slots[] = {
    {Py_tp_new, door_new},           {Py_tp_dealloc, door_dealloc},
    {Py_tp_traverse, door_traverse}, {Py_tp_clear, door_clear},
    {0, NULL}};

static PyType_Spec door_spec = {"collective.native._core.Door", sizeof(Door), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, door_slots};

int add_door(PyObject *module)
{
    static PyMethodDef functions_of_module[] = {
        {"make_methods", make_methods, METH_VARARGS,
         "make_methods(functions, docs, /)\n--\n\n"
         "Return a class with methods in front of these functions."},
        {NULL, NULL, 0, NULL}};
    name_run_plan = PyUnicode_InternFromString("_run_plan");
    name_sum = PyUnicode_InternFromString("sum");
    name_tag = PyUnicode_InternFromString("tag");
    zero = PyLong_FromLong(0);
    nobody = PyLong_FromLong(-2);
    any = PyLong_FromLong(-1);
    for (int i = 0; i < ARGUMENTS; i++)
        argument_objects[i] = PyUnicode_InternFromString(argument_names[i]);
    door_type = (PyTypeObject *)PyType_FromSpec(&door_spec);
    return door_type == NULL || PyModule_AddType(module, door_type) < 0
                   || PyModule_AddFunctions(module, functions_of_module) < 0
               ? -1 : 0;
}
