/* The type Plan: a prepared call over shared memory, and how it runs; see shared.c. */

#include "shared_type.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    CORE_HEAD
    PyObject *over; /* the Shared */
    PyObject *request;
    PyObject *otherwise; /* otherwise(plan, src, dst, deadline) for arrays that C cannot take */
    struct plan plan;
    char description[CALL_BYTES]; /* for the peers, padded with zeros */
    uint64_t described;           /* the number of this description in the segment, or 0 */
} Plan;

/* A call on at least this many bytes takes longer than releasing the interpreter lock. */
#define LONG_CALL_BYTES (64 << 10)
/* A thread without the interpreter lock takes it when it has waited as long as Python's waits go
   without a look at the peers' processes, or a quarter of the timeout if that is less. */
#define NEED_PYTHON_NS 50000000

static int read_starts(struct plan *p, int size, PyObject *elements)
{
    if (elements == Py_None)
        return 0;
    uint64_t *starts = calloc((size_t)size + 1, sizeof *starts);
    if (starts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    p->starts = starts;
    if (read_words(elements, size, starts + 1) < 0)
        return -1;
    for (int rank = 0; rank < size; rank++) {
        p->longest = starts[rank + 1] > p->longest ? starts[rank + 1] : p->longest;
        if (__builtin_add_overflow(starts[rank + 1], starts[rank], &starts[rank + 1])
            || starts[rank + 1] > (uint64_t)PTRDIFF_MAX / 16) { /* 16: bytes of the longest type */
            PyErr_SetString(PyExc_ValueError, "plan: more elements than fit into memory");
            return -1;
        }
    }
    p->count = starts[size];
    return 0;
}

static int read_fold(struct plan *p, const char *op, int dtype, int mean)
{
    int folds = p->operation == ALL_REDUCE || p->operation == REDUCE
                || p->operation == REDUCE_SCATTER || p->operation == SCAN;
    if (folds != (op != NULL)) {
        PyErr_SetString(PyExc_ValueError, "plan: a call that folds needs an operator, and no other "
                                          "call takes one");
        return -1;
    }
    if (op == NULL)
        return 0;
    p->fold = fold_of(op, dtype, fold_levels() - 1);
    if (p->fold != NULL) {
        p->folded = item_bytes[dtype];
        p->divide = mean ? find_divide(fold_levels() - 1, dtype) : NULL;
    }
    if (p->fold == NULL || (mean && p->divide == NULL)) {
        PyErr_SetString(PyExc_ValueError, "plan: C has no fold for this operator and dtype");
        return -1;
    }
    return 0;
}

/* plan(operation, digest, root, elements, op, dtype, mean, request, description, otherwise) */
PyObject *plan_new(PyObject *over, PyObject *args)
{
    PyObject *elements, *request, *otherwise;
    Py_ssize_t described;
    const char *op, *description;
    int operation, root, dtype, mean, size = ((Shared *)over)->shared.size;
    unsigned long long digest;
    if (!PyArg_ParseTuple(args, "iKiOzipOy#O:plan", &operation, &digest, &root, &elements, &op,
                          &dtype, &mean, &request, &description, &described, &otherwise))
        return NULL;
    Plan *self = object_new(((Shared *)over)->core->plan_type, REFERENCES(Plan, otherwise));
    if (self == NULL)
        return NULL;
    self->over = Py_NewRef(over);
    self->request = Py_NewRef(request);
    self->otherwise = Py_NewRef(otherwise);
    struct plan *p = &self->plan;
    p->operation = (enum operation)operation;
    p->root = root;
    p->digest = digest;
    if (described <= CALL_BYTES)
        memcpy(self->description, description, (size_t)described);
    if ((unsigned)p->operation >= OPERATIONS || p->root < 0 || p->root >= size
        || (splits(p) || joins(p)) != (elements != Py_None) || described > CALL_BYTES) {
        PyErr_SetString(PyExc_ValueError, "plan: the operation, root, elements or description are "
                                          "not valid");
    } else if (read_starts(p, size, elements) == 0 && read_fold(p, op, dtype, mean) == 0) {
        return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static void plan_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    free(((Plan *)object)->plan.starts);
    object_dealloc(object);
}

static Shared *shared_of(const Plan *self)
{
    return (Shared *)self->over;
}

/* Sets the numbers of a call that depend on its arrays. Returns FALL_BACK if C cannot make the call on
   these arrays: they overlap, and this rank's own piece is not at the same address in both. Returns
   FAILED, without an exception, if the arrays have other lengths or types than the call. */
static enum outcome measure(const struct shared *s, struct plan *p, const struct view *src,
                            const struct view *dst)
{
    const struct view *one = src != NULL ? src : dst;
    p->item = one != NULL ? item_bytes[one->dtype] : 1;
    p->alignment = one != NULL ? item_alignment[one->dtype] : 1;
    /* All items are powers of two. A division takes longer than the rest of this function. */
    if (p->starts == NULL)
        p->count = one != NULL ? one->nbytes >> __builtin_ctzll(p->item) : 0;
    src = sends(s, p) ? src : NULL;
    dst = takes(s, p) ? dst : NULL;
    size_t nbytes = input_bytes(s, p), room = output_bytes(s, p);
    if ((p->fold != NULL && p->item != p->folded) || nbytes != (src ? src->nbytes : 0)
        || room != (dst ? dst->nbytes : 0))
        return FAILED;
    /* An output may be read-only if nothing is written to it: at the root of a broadcast in place,
       and if the output has no elements. */
    int in_place = nbytes && room && p->operation == BROADCAST && src->address == dst->address;
    if (room && !dst->writable && !in_place)
        return FALL_BACK;
    if (!nbytes || !room)
        return DONE;
    size_t at = splits(p) || joins(p) ? start_of(s, p, s->rank) * p->item : 0;
    const char *from = src->address + (splits(p) ? at : 0);
    const char *to = dst->address + (joins(p) ? at : 0);
    int apart = (from == to && p->operation != ALL_TO_ALL) || src->address + nbytes <= dst->address
                || dst->address + room <= src->address;
    return apart ? DONE : FALL_BACK;
}

/* Raises the exception for a failed call; the wait callback has already raised its own. */
static void give_up(const Plan *self, int failed, PyObject *limit)
{
    const Shared *over = shared_of(self);
    PyObject *callbacks = over->callbacks, *done = NULL, *deadline = NULL;
    const struct shared *s = &over->shared;
    int64_t began = over->began != 0 ? over->began : now_ns();
    if (failed == DIFFERENT && (deadline = deadline_of(self->core, limit, began)) != NULL)
        done = PyObject_CallMethod(callbacks, "differ", "OO", self->request, deadline);
    else if (failed == BROKEN || failed == MOVED)
        done = PyObject_CallMethod(callbacks, failed == BROKEN ? "fail" : "moved", "O",
                                   self->request);
    else if (failed == UNREADABLE)
        done = PyObject_CallMethod(callbacks, "unreadable", "Oi", self->request, s->damaging);
    else if (failed == DAMAGED)
        done = PyObject_CallMethod(callbacks, "refuse", "Ois", self->request, s->damaging,
                                   s->damage);
    if (done != NULL)
        PyErr_SetString(PyExc_SystemError, "a call in C has failed, but its callback in Python did "
                                           "not raise");
    Py_XDECREF(deadline);
    Py_XDECREF(done);
}

/* Begins a call on arrays that suit it: sets what its waits need, and tells the peers which call this
   rank makes. The segment keeps the last CALLS_KEPT descriptions, so newer ones may have replaced that
   of this plan. */
static void start(Plan *self, PyObject *limit, PyObject *ring)
{
    Shared *over = shared_of(self);
    uint64_t *line = over->shared.stages[over->shared.rank].line;
    assert(over->busy);
    over->request = self->request;
    over->limit = limit;
    over->began = 0;
    over->ring = ring;
    if (self->described == 0 || line[DESCRIBED] - self->described >= CALLS_KEPT) {
        self->described = line[DESCRIBED] + 1;
        memcpy(over->descriptions + self->described % CALLS_KEPT * CALL_BYTES, self->description,
               CALL_BYTES);
        __atomic_store_n(&line[DESCRIBED], self->described, __ATOMIC_RELEASE);
    }
    line[LAST_CALL] = self->described;
}

/* Whether all ranks have announced the same sums in this call, undamaged. */
static int are_alike(const struct shared *s)
{
    const uint64_t *first = s->announced;
    int alike = s->all_announced && first[2] == ~(first[0] ^ first[1]);
    for (int rank = 1; rank < s->size && alike; rank++)
        alike = memcmp(first, first + ANNOUNCED * rank, ANNOUNCED * sizeof *first) == 0;
    return alike;
}

/* Returns what a plan's method summed() returns, or NULL with an exception. */
static PyObject *report_sums(const struct shared *s, const struct sums *sums)
{
    Py_ssize_t nbytes = s->size * ANNOUNCED * (Py_ssize_t)sizeof *s->announced;
    return Py_BuildValue("KKny#", (unsigned long long)sums->total,
                         (unsigned long long)sums->placed, (Py_ssize_t)sums->nbytes,
                         s->all_announced ? (const char *)s->announced : NULL, nbytes);
}

/* Does the work of plan_run. If summed is not NULL, sets *summed to the report of the sums of what
   the call copies to the result. If only_unlike is true and all ranks have announced the same sums,
   leaves *summed as it is. */
static enum outcome run_summed(PyObject *object, const struct view *src, const struct view *dst,
                               PyObject *limit, PyObject *ring, PyObject **summed,
                               int only_unlike)
{
    struct sums sums = {0, 0, 0};
    Plan *self = (Plan *)object;
    Shared *over = shared_of(self);
    struct shared *s = &over->shared;
    struct plan *p = &self->plan;
    if (!shared_begin(over)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "plan: another thread of this rank is in a call of this communicator. All "
                        "ranks must make their calls in one order. Make all calls in one thread, or "
                        "give each thread a communicator of its own: comm.dup()");
        return FAILED;
    }
    enum outcome fit = measure(s, p, src, dst);
    int is_long = p->count * p->item >= LONG_CALL_BYTES;
    over->views[0] = src;
    over->views[1] = dst != src ? dst : NULL;
    /* Another thread may have run since the arrays were viewed, while PyTorch made the result. It may
       have changed an array. */
    if (fit == DONE && is_long && !hold_both(over->core, over->views, over->held))
        fit = FALL_BACK;
    if (fit != DONE) {
        shared_let_go(over);
        if (fit == FAILED)
            PyErr_SetString(PyExc_ValueError, "plan: the arrays have other lengths or types than "
                                              "the plan's");
        return fit;
    }
    start(self, limit, ring);
    s->sums = summed != NULL ? &sums : NULL;
    s->all_announced = 0;
    const void *from = src != NULL ? src->address : NULL, *to = dst != NULL ? dst->address : NULL;
    Py_BEGIN_CRITICAL_SECTION(over);
    shared_locate(s, p, from, to);
    Py_END_CRITICAL_SECTION();
    if (is_long)
        shared_record(over);
    over->unlocked = is_long ? PyEval_SaveThread() : NULL;
    int failed = shared_call(s, p, from, (void *)to);
    if (over->unlocked != NULL)
        PyEval_RestoreThread(over->unlocked);
    over->unlocked = NULL;
    s->sums = NULL;
    shared_record(over); /* a call that has failed before it arrived is not recorded yet */
    int reports = !failed && summed != NULL && !(only_unlike && are_alike(s));
    if (reports)
        *summed = report_sums(s, &sums);
    /* The ranks share their calls in steps of the same counters if the calls differ. So no other call
       may begin before that. */
    if (failed)
        give_up(self, failed, limit);
    shared_let_go(over);
    return failed || (reports && *summed == NULL) ? FAILED : DONE;
}

enum outcome plan_run(PyObject *object, const struct view *src, const struct view *dst,
                      PyObject *limit, PyObject *ring)
{
    return run_summed(object, src, dst, limit, ring, NULL, 0);
}

enum outcome plan_run_compared(PyObject *object, const struct view *src, const struct view *dst,
                               PyObject *limit, PyObject *ring, PyObject **compare)
{
    PyObject *report = NULL;
    enum outcome state = run_summed(object, src, dst, limit, ring, &report, 1);
    if (report != NULL && (*compare = PyTuple_Pack(2, ((Plan *)object)->request, report)) == NULL)
        state = FAILED;
    Py_XDECREF(report);
    return state;
}

/* -- calls without the interpreter lock ------------------------------------------------------- */

enum outcome plan_check_unlocked(struct unlocked *call, PyObject *request)
{
    double seconds = PyFloat_AsDouble(call->limit);
    if (seconds == -1.0 && PyErr_Occurred())
        return FAILED;
    call->patience = seconds < 4e-9 * NEED_PYTHON_NS ? (int64_t)(seconds * 1e9 / 4)
                                                     : NEED_PYTHON_NS;
    call->most = seconds < 9e9 ? (int64_t)(seconds * 1e9) : INT64_MAX;
    return (call->source = record_source(call->ring, request, call->site)) < 0 ? FAILED : DONE;
}

static struct view *view_unlocked(const struct unlocked *call, int which, const void *in, void *out,
                                  struct view *view)
{
    if (which == NEITHER)
        return NULL;
    *view = (struct view){.address = which == IN ? (char *)in : out, .dtype = call->dtype,
                          .nbytes = call->nbytes[which], .writable = which == GIVEN_OUT};
    return view;
}

static int is_aligned(const struct view *view)
{
    return view == NULL || (uintptr_t)view->address % item_alignment[view->dtype] == 0;
}

enum outcome plan_run_unlocked(const struct unlocked *call, const void *in, void *out,
                               PyObject **error)
{
    Plan *self = (Plan *)call->plan;
    Shared *over = shared_of(self);
    struct shared *s = &over->shared;
    struct plan *p = &self->plan;
    struct view views[2], *src = view_unlocked(call, call->src, in, out, &views[0]);
    struct view *dst = view_unlocked(call, call->dst, in, out, &views[1]);
    /* The queue's length is read as a word: another thread may change it. A program's order of an
       asynchronous call and this one makes the length visible here. */
    if (__atomic_load_n(&((PyVarObject *)call->queue)->ob_size, __ATOMIC_ACQUIRE) != 0
        || !shared_begin(over))
        return FALL_BACK;
    if (__atomic_load_n(&call->removed, __ATOMIC_ACQUIRE)
        || (p->operation != BARRIER && record_is_due(call->ring)) || !is_aligned(src)
        || !is_aligned(dst) || measure(s, p, src, dst) != DONE) {
        shared_end(over);
        return FALL_BACK;
    }
    start(self, call->limit, call->ring);
    over->call = call;
    /* These arrays are never in symmetric memory. */
    s->inside[0] = s->inside[1] = NULL;
    int failed = shared_call(s, p, src != NULL ? src->address : NULL,
                             dst != NULL ? dst->address : NULL);
    shared_record(over); /* a call that has failed before it arrived is not recorded yet */
    *error = over->error;
    over->error = NULL;
    over->call = NULL;
    if (!failed)
        record_unlocked_end(call->ring);
    if (!failed && p->operation != BARRIER)
        record_count(call->ring);
    if (failed && *error == NULL) { /* before other calls can begin, as in run_summed() */
        PyGILState_STATE state = PyGILState_Ensure();
        PyObject *site = record_exchange_site(self->core, call->site);
        give_up(self, failed, call->limit);
        *error = error_take();
        record_exchange_site(self->core, site);
        PyGILState_Release(state);
    }
    shared_end(over);
    if (!failed && call->copies)
        memcpy(out, in, call->nbytes[IN]);
    if (!failed && call->clears)
        memset(out, 0, call->nbytes[GIVEN_OUT]);
    return failed ? FAILED : DONE;
}

/* -- plans as functions of Python ------------------------------------------------------------- */

/* Views the array of a Buffer, or sets *view to NULL for None. Sets *array to a new reference, which
   the view needs. */
static enum outcome view_buffer(const struct core *core, PyObject *buffer, PyObject **array,
                                struct view **view)
{
    if (buffer == Py_None) {
        *view = NULL;
        return DONE;
    }
    *array = PyObject_GetAttrString(buffer, "array");
    return *array == NULL ? FAILED : view_array(core, *array, *view) ? DONE : FALL_BACK;
}

/* Makes a call on Buffers; returns None or the sums, or NULL with an exception. */
static PyObject *call_plan(PyObject *self, PyObject *args, int is_summed)
{
    PyObject *buffers[2], *arrays[2] = {NULL, NULL}, *deadline, *sums = NULL;
    struct view views[2], *src = views, *dst = views + 1;
    const struct core *core = ((Plan *)self)->core;
    if (!PyArg_ParseTuple(args, "OOO:plan", buffers, buffers + 1, &deadline))
        return NULL;
    enum outcome state = view_buffer(core, buffers[0], &arrays[0], &src);
    if (state == DONE)
        state = view_buffer(core, buffers[1], &arrays[1], &dst);
    if (state == DONE)
        state = run_summed(self, src, dst, deadline, NULL, is_summed ? &sums : NULL, 0);
    references_clear(arrays, 2);
    if (state == DONE)
        return is_summed ? sums : Py_NewRef(Py_None);
    if (state == FAILED)
        return NULL;
    PyObject *plan = is_summed ? PyObject_GetAttrString(self, "summed") : Py_NewRef(self);
    PyObject *done = plan == NULL ? NULL
                     : PyObject_CallFunctionObjArgs(((Plan *)self)->otherwise, plan, buffers[0],
                                                    buffers[1], deadline, NULL);
    Py_XDECREF(plan);
    return done;
}

/* plan(src, dst, deadline) */
static PyObject *plan_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    return refuse_keywords("plan", keywords) < 0 ? NULL : call_plan(self, args, 0);
}

/* summed(src, dst, deadline) */
static PyObject *plan_summed(PyObject *self, PyObject *args)
{
    return call_plan(self, args, 1);
}

static PyMethodDef plan_methods[] = {
    {"summed", plan_summed, METH_VARARGS,
     "summed(src, dst, deadline, /)\n--\n\n"
     "Make the call; return the sums of the result, the number of bytes that they are of, and the\n"
     "sums that all ranks have announced, or None."},
    {NULL, NULL, 0, NULL}};

/* A plan has no tp_clear: a cycle through it also runs through an object of Python. */
static PyType_Slot plan_slots[] = {
    {Py_tp_dealloc, plan_dealloc}, {Py_tp_traverse, object_traverse}, {Py_tp_call, plan_call},
    {Py_tp_methods, plan_methods},
    {Py_tp_doc, "A prepared call, from Shared.plan(): plan(src, dst, deadline)."}, {0, NULL}};

static PyType_Spec plan_spec = {
    "collective.native._core.Plan", sizeof(Plan), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, plan_slots};

int add_plans(PyObject *module, struct core *core)
{
    return type_add(module, &plan_spec, &core->plan_type);
}
