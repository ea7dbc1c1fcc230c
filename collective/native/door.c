/* The type Door: from a communicator's method to a transport's plan, without Python in between.

   It makes calls on plain arrays with plain arguments, and leaves all others to Python: then its
   methods return NotImplemented, and nothing has been done. Whether it makes a call is each rank's
   own affair, as Python and it run the same plan of the same request. */

#include "python.h"

#include <string.h>

/* How the shape of a result follows from that of x. */
enum shape { SAME, CUT, JOINED, EXCHANGED, NONE };

struct operation {
    const char *name;
    enum shape shape;
    enum { EVERYBODY, AT_ROOT, FROM_ROOT } who; /* gets a result */
    int folds;
};

/* A call is found by what is known here. A Request has its digest from Python, and that takes many
   times as long as a small call: so the plans are remembered, in one table, that of Python's way
   being asked for what is not in it. No array is kept. */
struct prepared {
    const struct operation *operation;
    PyObject *planned, *request, *plan, *op;
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

static PyObject *name_timeout, *name_run_plan;

/* One call, as its arguments say. */
struct call {
    const struct operation *operation;
    PyObject *comm, *x, *out, *op, *order, *root_object;
    PyObject *result; /* new, or a new reference to the user's */
    struct view views[2];
    struct view *src, *dst; /* into views, or NULL */
    int ordered, root;
};

static int is_apart_or(const struct view *a, const struct view *b, const char *same)
{
    return a->address == same || a->address + a->nbytes <= b->address
           || b->address + b->nbytes <= a->address;
}

/* Sets the shape of the result in call->views[1]; returns its rows, or -1 where it is as that of x,
   or -2 if it is for Python to say. */
static int64_t shape_result(const Door *door, struct call *call)
{
    struct view *view = &call->views[1];
    enum shape shape = call->operation->shape;
    *view = call->views[0];
    if (shape == SAME)
        return -1;
    if (view->ndim == 0)
        return -2;
    int64_t rows = view->shape[0], mine = rows / door->size + (door->rank < rows % door->size);
    view->shape[0] = shape == JOINED ? rows * door->size : shape == CUT ? mine : mine * door->size;
    return view->shape[0];
}

/* Finds where the result goes. Returns 1, 0 if that is for Python to say, or -1. */
static int find_output(const Door *door, struct call *call)
{
    enum shape shape = call->operation->shape;
    const struct view *x = &call->views[0];
    struct view want, *got = &call->views[1];
    int64_t rows = shape_result(door, call);
    want = *got;
    if (rows < -1)
        return 0;
    call->result = call->out != Py_None ? Py_NewRef(call->out)
                   : PyObject_CallMethod(call->comm, "_fresh", "OL", call->x, rows);
    if (call->result == NULL)
        return -1;
    if (!view_array(call->result, got) || !got->writable || got->dtype != want.dtype
        || got->ndim != want.ndim
        || memcmp(got->shape, want.shape, sizeof *want.shape * (size_t)want.ndim) != 0)
        return 0;
    /* Where x may be that is not apart: in place, or this rank's piece of what is joined. */
    const char *same = shape == SAME ? got->address
                       : shape == JOINED ? got->address + (size_t)door->rank * x->nbytes : NULL;
    call->dst = got;
    return (call->operation->who == FROM_ROOT && shape == SAME) || is_apart_or(x, got, same);
}

/* Reads the arguments. Returns 1, 0 if the call is not for C, or -1 with an exception. */
static int read_call(const Door *door, struct call *call, PyObject *const *args, Py_ssize_t count)
{
    if (count != 8 || args[6] != Py_None || args[7] != Py_False || PyList_Size(door->queue) != 0)
        return 0;
    call->comm = args[0], call->x = args[1], call->out = args[2], call->op = args[3];
    call->order = args[4], call->root_object = args[5];
    if (call->order != Py_None) {
        if (!PyUnicode_CheckExact(call->order)
            || PyUnicode_CompareWithASCIIString(call->order, "rank") != 0)
            return 0;
        call->ordered = 1;
    }
    if (call->operation->folds ? !PyUnicode_CheckExact(call->op) : call->op != Py_None)
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
    if (call->operation->who == FROM_ROOT && call->x == Py_None && !is_root)
        call->x = call->out;
    if (!view_array(call->x, &call->views[0]))
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

static int is_prepared(const struct prepared *p, const struct call *call)
{
    const struct view *x = &call->views[0];
    return p->operation == call->operation && p->op == call->op && p->ordered == call->ordered
           && p->root == call->root && p->dtype == x->dtype && p->ndim == x->ndim
           && memcmp(p->shape, x->shape, sizeof *x->shape * (size_t)x->ndim) == 0;
}

static void forget(struct prepared *p)
{
    struct prepared old = *p;
    memset(p, 0, sizeof *p);
    Py_XDECREF(old.planned);
    Py_XDECREF(old.request);
    Py_XDECREF(old.plan);
    Py_XDECREF(old.op);
}

/* Finds the plan of a call, or has Python make it. Returns NULL with an exception, or without one
   if there is no plan for C. */
static struct prepared *prepare(Door *door, const struct call *call)
{
    const struct view *x = &call->views[0];
    uint64_t hash = (uint64_t)(uintptr_t)call->operation + (uintptr_t)call->op
                    + 31 * (unsigned)x->dtype + (unsigned)call->root;
    for (int i = 0; i < x->ndim; i++)
        hash = (hash ^ (uint64_t)x->shape[i]) * UINT64_C(0x9E3779B97F4A7C15);
    struct prepared *p = &door->table[(hash ^ hash >> 32) % PREPARED];
    if (is_prepared(p, call))
        return p;
    PyObject *planned = PyObject_CallMethod(call->comm, "_find_plan", "sOOOO",
                                            call->operation->name, call->x, call->op, call->order,
                                            call->root_object);
    if (planned == NULL || planned == Py_None) {
        Py_XDECREF(planned);
        return NULL;
    }
    forget(p);
    *p = (struct prepared){
        call->operation, planned, PyObject_GetAttrString(planned, "request"),
        PyObject_GetAttrString(planned, "plan"), Py_NewRef(call->op), call->ordered, call->root,
        x->dtype, x->ndim, {0}};
    memcpy(p->shape, x->shape, sizeof p->shape);
    if (p->request == NULL || p->plan == NULL)
        forget(p);
    return p->planned ? p : NULL;
}

/* Has Python say what a failure means, and go on where ranks may differ: what that returns. */
static PyObject *recover(const struct call *call)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *done = PyObject_CallMethod(call->comm, "_recover", "sOOOO", call->operation->name,
                                         call->x, call->out, call->root_object, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return done;
}

static PyObject *make(Door *door, struct call *call)
{
    struct prepared *p = prepare(door, call);
    PyObject *seconds = p ? PyObject_GetAttr(call->comm, name_timeout) : NULL;
    if (seconds == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    /* A signal's handler may make calls, too. */
    PyObject *plan = Py_NewRef(p->plan), *done = NULL;
    record_begin(door->ring, p->request, 0);
    int state;
    if (is_plan(plan)) {
        state = run_plan(plan, call->src, call->dst, seconds);
    } else {
        PyObject *ran = PyObject_CallMethodObjArgs(
            call->comm, name_run_plan, plan,
            call->src == NULL ? Py_None : call->src == call->dst ? call->result : call->x,
            call->dst ? call->result : Py_None, seconds, NULL);
        state = ran == NULL ? -1 : 0;
        Py_XDECREF(ran);
    }
    if (state < 0) {
        done = recover(call);
    } else {
        record_end(door->ring, state == 0);
        done = Py_NewRef(state ? Py_NotImplemented : call->result);
    }
    Py_DECREF(seconds);
    Py_DECREF(plan);
    return done;
}

static PyObject *enter(PyObject *self, const struct operation *operation, PyObject *const *args,
                       Py_ssize_t count)
{
    struct call call = {.operation = operation};
    int plain = read_call((Door *)self, &call, args, count);
    PyObject *done = plain > 0 ? make((Door *)self, &call)
                     : plain < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    Py_XDECREF(call.result);
    return done;
}

#define OPERATION(name, shape, who, folds)                                                        \
    static PyObject *door_##name(PyObject *self, PyObject *const *args, Py_ssize_t count)         \
    {                                                                                             \
        static const struct operation operation = {#name, shape, who, folds};                     \
        return enter(self, &operation, args, count);                                              \
    }
OPERATION(all_reduce, SAME, EVERYBODY, 1)
OPERATION(reduce, SAME, AT_ROOT, 1)
OPERATION(scan, SAME, EVERYBODY, 1)
OPERATION(reduce_scatter, CUT, EVERYBODY, 1)
OPERATION(broadcast, SAME, FROM_ROOT, 0)
OPERATION(scatter, CUT, FROM_ROOT, 0)
OPERATION(all_gather, JOINED, EVERYBODY, 0)
OPERATION(gather, JOINED, AT_ROOT, 0)
OPERATION(all_to_all, EXCHANGED, EVERYBODY, 0)
OPERATION(barrier, NONE, EVERYBODY, 0)

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))door_##name, METH_FASTCALL, NULL}
static PyMethodDef door_methods[] = {
    METHOD(all_reduce), METHOD(reduce), METHOD(scan), METHOD(reduce_scatter), METHOD(broadcast), METHOD(scatter),
    METHOD(all_gather), METHOD(gather), METHOD(all_to_all), METHOD(barrier), {NULL, NULL, 0, NULL}};

static int door_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    Door *door = (Door *)object;
    (void)keywords;
    if (door->ring != NULL || !PyArg_ParseTuple(args, "OO!ii:Door", &door->ring, &PyList_Type,
                                                &door->queue, &door->rank, &door->size))
        return -1;
    Py_INCREF(door->ring);
    Py_INCREF(door->queue);
    return 0;
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
    }
    return 0;
}

static int door_clear(PyObject *object)
{
    for (int i = 0; i < PREPARED; i++)
        forget(&((Door *)object)->table[i]);
    return 0;
}

static void door_dealloc(PyObject *object)
{
    Door *door = (Door *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    door_clear(object);
    Py_XDECREF(door->ring);
    Py_XDECREF(door->queue);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyType_Slot door_slots[] = {
    {Py_tp_init, door_init},         {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, door_dealloc},   {Py_tp_methods, door_methods},
    {Py_tp_traverse, door_traverse}, {Py_tp_clear, door_clear},
    {0, NULL}};

static PyType_Spec door_spec = {"collective.native._core.Door", sizeof(Door), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, door_slots};

int add_door(PyObject *module)
{
    name_timeout = PyUnicode_InternFromString("timeout");
    name_run_plan = PyUnicode_InternFromString("_run_plan");
    PyObject *type = PyType_FromSpec(&door_spec);
    int failed = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed;
}
