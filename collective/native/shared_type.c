/* The type Shared: the collectives of shared.c and staging.c on Python's buffers. */

#include "python.h"
#include "shared.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    struct shared shared;
    Py_buffer segment; /* keeps the shared memory */
    PyObject *wait;    /* wait(rank, offset, value), which raises if it is in vain */
    PyThreadState *unlocked; /* while a long call runs, without the interpreter lock */
    int busy;                /* while any call runs */
} Shared;

static int ask_python(Shared *self, int rank, const uint64_t *word, uint64_t value)
{
    Py_ssize_t offset = (const char *)word - (const char *)self->segment.buf;
    PyObject *done = PyObject_CallFunction(self->wait, "inK", rank, offset,
                                           (unsigned long long)value);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* For how long the processor is yielded before Python is asked to wait. */
#define YIELD_NS 50000

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Waits for a word, without the interpreter lock. If that takes long, Python does: it knows of
   deadlines, signals and peers that have died. */
static int wait_for(void *context, int rank, const uint64_t *word, uint64_t value)
{
    Shared *self = context;
    PyThreadState *state = self->unlocked ? self->unlocked : PyEval_SaveThread();
    int there = 0, failed = 0;
    int64_t end = now_ns() + YIELD_NS;
    do {
        sched_yield();
        there = __atomic_load_n(word, __ATOMIC_ACQUIRE) >= value;
    } while (!there && now_ns() < end);
    if (there && self->unlocked)
        return 0;
    PyEval_RestoreThread(state);
    if (!there)
        failed = ask_python(self, rank, word, value);
    if (self->unlocked)
        self->unlocked = PyEval_SaveThread();
    return failed;
}

/* -- life ---------------------------------------------------------------------------------- */

/* Reads where a rank's counters and areas are, and looks whether that is in the segment. */
static int read_stage(Shared *self, PyObject *places, Py_ssize_t rank)
{
    struct shared *s = &self->shared;
    Py_ssize_t at[6], counter = sizeof(uint64_t), area = (Py_ssize_t)s->area_bytes;
    PyObject *six = PySequence_Tuple(places);
    if (six == NULL)
        return -1;
    int parsed = PyArg_ParseTuple(six, "nnnnnn:Shared", &at[0], &at[1], &at[2], &at[3],
                                  &at[4], &at[5]);
    Py_DECREF(six);
    if (!parsed)
        return -1;
    for (int i = 0; i < 6; i++) {
        Py_ssize_t nbytes = i == 0 ? 3 * counter : i < 4 ? counter : area;
        if (at[i] < 0 || at[i] % 8 || at[i] > self->segment.len - nbytes) {
            PyErr_Format(PyExc_ValueError, "Shared: place %zd of rank %zd is not in the segment",
                         at[i], rank);
            return -1;
        }
    }
    char *base = self->segment.buf;
    s->stages[rank] = (struct stage){
        (uint64_t *)(base + at[0]), (uint64_t *)(base + at[1]), (uint64_t *)(base + at[2]),
        (uint64_t *)(base + at[3]),
        {(unsigned char *)base + at[4], (unsigned char *)base + at[5]}};
    return 0;
}

static int shared_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"segment", "rank", "places", "area_bytes", "looks", "wait", NULL};
    Shared *self = (Shared *)object;
    struct shared *s = &self->shared;
    PyObject *segment, *places, *wait;
    Py_ssize_t area_bytes;
    if (self->wait != NULL) {
        PyErr_SetString(PyExc_TypeError, "Shared: made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OiOniO:Shared", names, &segment, &s->rank,
                                     &places, &area_bytes, &s->looks, &wait))
        return -1;
    Py_ssize_t size = PySequence_Size(places);
    if (size < 0)
        return -1;
    /* Areas hold two blocks of a piece for each other rank, of any type. */
    if (size < 2 || s->rank < 0 || s->rank >= size || area_bytes < 32 * size || area_bytes % 64) {
        PyErr_SetString(PyExc_ValueError, "Shared: two ranks at least, and 32 bytes for each");
        return -1;
    }
    if (PyObject_GetBuffer(segment, &self->segment, PyBUF_WRITABLE) < 0)
        return -1;
    Py_INCREF(wait);
    self->wait = wait;
    s->size = (int)size;
    s->area_bytes = (size_t)area_bytes;
    s->wait = wait_for;
    s->context = self;
    s->stages = calloc((size_t)size, sizeof *s->stages);
    if (s->stages == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t rank = 0; rank < size; rank++) {
        PyObject *of_rank = PySequence_GetItem(places, rank);
        int failed = of_rank == NULL ? -1 : read_stage(self, of_rank, rank);
        Py_XDECREF(of_rank);
        if (failed)
            return -1;
    }
    return 0;
}

static int shared_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Shared *)object)->wait);
    return 0;
}

static int shared_clear(PyObject *object)
{
    Py_CLEAR(((Shared *)object)->wait);
    return 0;
}

static void shared_dealloc(PyObject *object)
{
    Shared *self = (Shared *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    shared_clear(object);
    if (self->segment.obj != NULL)
        PyBuffer_Release(&self->segment);
    free(self->shared.stages);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* -- calls --------------------------------------------------------------------------------- */

/* What a call needs besides buffers, and which call it is. */
struct call {
    enum { SMALL, ALL_REDUCE, BROADCAST, ALL_GATHER } operation;
    fold_function *fold;
    divide_function *divide; /* by the number of ranks, or NULL */
    size_t item;
    int root;
    uint64_t step, digest;
};

static int run(struct shared *s, const struct call *call, Py_buffer *src, Py_buffer *dst)
{
    size_t nbytes = (size_t)src->len;
    switch (call->operation) {
    case SMALL:
        return shared_all_reduce(s, call->step, call->digest, call->fold, call->item, src->buf,
                                 dst->buf, nbytes / call->item);
    case ALL_REDUCE:
        return stage_all_reduce(s, call->fold, call->divide, call->item, src->buf, dst->buf,
                                nbytes / call->item);
    case BROADCAST:
        return stage_broadcast(s, call->root, dst->buf, nbytes);
    default:
        return stage_all_gather(s, src->buf, dst->buf, nbytes);
    }
}

/* Raises if a call cannot be made now: a thread of this process is in one, or it never was made. */
static int refuse(Shared *self)
{
    if (self->wait != NULL && self->shared.stages != NULL && !self->busy)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "Shared: one call at a time");
    return -1;
}

/* Whether the buffers are what the call wants: of lengths that fit, aligned, and one or apart,
   but for a small call, which writes when nobody needs src any more. This rank's part of an
   all_gather's dst may be src. */
static int fits(const struct shared *s, const struct call *call, const Py_buffer *src,
                const Py_buffer *dst)
{
    Py_buffer own = *dst;
    if (call->operation == ALL_GATHER) {
        own.buf = (char *)dst->buf + s->rank * src->len;
        own.len = dst->len / s->size;
    }
    size_t alignment = call->item > 8 ? 8 : call->item;
    return own.len == src->len && own.len * (own.len == dst->len ? 1 : s->size) == dst->len
           && src->len % (Py_ssize_t)call->item == 0
           && (call->operation != SMALL || src->len <= (Py_ssize_t)s->area_bytes)
           && (uintptr_t)src->buf % alignment == 0 && (uintptr_t)dst->buf % alignment == 0
           && (own.buf == src->buf || call->operation == SMALL || is_apart(src, dst));
}

/* Runs a call. Returns True, or False where the ranks' digests differ. */
static PyObject *run_on(Shared *self, const struct call *call, PyObject *src, PyObject *dst)
{
    Py_buffer from, to;
    int failed = -1;
    if (refuse(self) < 0 || PyObject_GetBuffer(src, &from, PyBUF_ND) < 0)
        return NULL;
    if (PyObject_GetBuffer(dst, &to, PyBUF_ND | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&from);
        return NULL;
    }
    if (!fits(&self->shared, call, &from, &to)) {
        PyErr_SetString(PyExc_ValueError, "Shared: src and dst do not fit");
    } else {
        /* A small call takes less time than letting go of the lock. */
        self->busy = 1;
        self->unlocked = call->operation == SMALL ? NULL : PyEval_SaveThread();
        failed = run(&self->shared, call, &from, &to);
        if (self->unlocked)
            PyEval_RestoreThread(self->unlocked);
        self->unlocked = NULL;
        self->busy = 0;
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return failed < 0 ? NULL : PyBool_FromLong(failed != DIFFERENT);
}

static int with_fold(struct call *call, const char *op, int dtype)
{
    call->fold = fold_of(op, dtype, fold_levels() - 1);
    if (call->fold == NULL) {
        PyErr_SetString(PyExc_ValueError, "Shared: there is no such fold in C");
        return -1;
    }
    call->item = item_bytes[dtype];
    return 0;
}

static PyObject *shared_type_folds(PyObject *self, PyObject *args)
{
    const char *op;
    int dtype;
    (void)self;
    if (!PyArg_ParseTuple(args, "si:folds", &op, &dtype))
        return NULL;
    return PyBool_FromLong(fold_of(op, dtype, 0) != NULL);
}

static PyObject *shared_type_arrive(PyObject *object, PyObject *args)
{
    Shared *self = (Shared *)object;
    unsigned long long step, digest;
    if (!PyArg_ParseTuple(args, "KK:arrive", &step, &digest) || refuse(self) < 0)
        return NULL;
    self->busy = 1;
    int failed = shared_arrive(&self->shared, step, digest);
    self->busy = 0;
    return failed < 0 ? NULL : PyBool_FromLong(failed != DIFFERENT);
}

static PyObject *shared_type_small_all_reduce(PyObject *self, PyObject *args)
{
    PyObject *src, *dst;
    const char *op;
    int dtype;
    unsigned long long step, digest;
    struct call call = {.operation = SMALL};
    if (!PyArg_ParseTuple(args, "OOsiKK:small_all_reduce", &src, &dst, &op, &dtype, &step, &digest)
        || with_fold(&call, op, dtype) < 0)
        return NULL;
    call.step = step;
    call.digest = digest;
    return run_on((Shared *)self, &call, src, dst);
}

static PyObject *shared_type_all_reduce(PyObject *self, PyObject *args)
{
    PyObject *src, *dst;
    const char *op;
    int dtype, mean;
    struct call call = {.operation = ALL_REDUCE};
    if (!PyArg_ParseTuple(args, "OOsip:all_reduce", &src, &dst, &op, &dtype, &mean)
        || with_fold(&call, op, dtype) < 0)
        return NULL;
    call.divide = mean ? find_divide(fold_levels() - 1, dtype) : NULL;
    if (mean && call.divide == NULL) {
        PyErr_SetString(PyExc_ValueError, "Shared: there is no such mean in C");
        return NULL;
    }
    return run_on((Shared *)self, &call, src, dst);
}

static PyObject *shared_type_broadcast(PyObject *self, PyObject *args)
{
    PyObject *buffer;
    struct call call = {.operation = BROADCAST, .item = 1};
    if (!PyArg_ParseTuple(args, "Oi:broadcast", &buffer, &call.root))
        return NULL;
    if (call.root < 0 || call.root >= ((Shared *)self)->shared.size) {
        PyErr_SetString(PyExc_ValueError, "broadcast: no such root");
        return NULL;
    }
    return run_on((Shared *)self, &call, buffer, buffer);
}

static PyObject *shared_type_all_gather(PyObject *self, PyObject *args)
{
    PyObject *src, *dst;
    struct call call = {.operation = ALL_GATHER, .item = 1};
    if (!PyArg_ParseTuple(args, "OO:all_gather", &src, &dst))
        return NULL;
    return run_on((Shared *)self, &call, src, dst);
}

static PyMethodDef shared_methods[] = {
    {"folds", shared_type_folds, METH_VARARGS,
     "folds(op, dtype, /)\n--\n\nTell whether there is such a fold in C."},
    {"arrive", shared_type_arrive, METH_VARARGS,
     "arrive(step, digest, /)\n--\n\nWait for all ranks; whether their digests are this one."},
    {"small_all_reduce", shared_type_small_all_reduce, METH_VARARGS,
     "small_all_reduce(src, dst, op, dtype, step, digest, /)\n--\n\n"
     "Arrive with an array that fits into an area, and fold all ranks' into dst."},
    {"all_reduce", shared_type_all_reduce, METH_VARARGS,
     "all_reduce(src, dst, op, dtype, mean, /)\n--\n\n"
     "Fold the ranks' src, in rank order, into dst; divide by their number for the mean."},
    {"broadcast", shared_type_broadcast, METH_VARARGS,
     "broadcast(buffer, root, /)\n--\n\nCopy the root's buffer into those of the others."},
    {"all_gather", shared_type_all_gather, METH_VARARGS,
     "all_gather(src, dst, /)\n--\n\nPut the ranks' src, of as many bytes each, into every dst."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot shared_slots[] = {
    {Py_tp_init, shared_init},         {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, shared_dealloc},   {Py_tp_methods, shared_methods},
    {Py_tp_traverse, shared_traverse}, {Py_tp_clear, shared_clear},
    {Py_tp_doc, "Collectives on ordinary memory, staged through memory that ranks share."},
    {0, NULL}};

static PyType_Spec shared_spec = {"collective.native._core.Shared", sizeof(Shared), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, shared_slots};

int add_shared(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&shared_spec);
    int failed = type == NULL ? -1 : PyModule_AddObjectRef(module, "Shared", type);
    Py_XDECREF(type);
    return failed;
}
