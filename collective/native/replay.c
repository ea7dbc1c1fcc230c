/* Replays: collective calls over messages, as collective/algorithms/schedules.py has recorded them.

   A call begins with the comparison, which is the same for all calls: rounds of Bruck's
   all-gather, "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems"
   (1997). Each rank gathers a piece of every rank, and each message is marked with the digest of the
   sender's call, or with 0 if the sender already knows that calls differ. A rank drops a piece whose
   mark is not its own digest. Each of the last messages stands for the ranks whose pieces it carries, so
   after the last round all ranks know alike whether their calls differ, and none has written a result.

   The steps of the call follow: exchanges with other ranks, copies, folds. A short call has its data in
   the pieces, so it may need no more exchanges. */

#include "messages_type.h"

#include <stdlib.h>
#include <string.h>

/* Scratch memory of up to this length is kept for the next call. */
#define KEPT_BYTES ((size_t)4 << 20)

/* The same numbers as in collective/algorithms/schedules.py. */
enum kind { EXCHANGE, COPY, FOLD, DIVIDE, INSIDE };
enum base { SRC, DST, SCRATCH, BASES };

/* Places are a base, in the highest byte, and an offset; lengths are bytes. */
struct step {
    int64_t kind, to, source; /* ranks, or -1 */
    uint64_t left, right, out;
    int64_t left_bytes, right_bytes; /* at DIVIDE the second is the divisor */
};

typedef struct {
    CORE_HEAD
    PyObject *exchange, *request;
    PyObject *exchange_inside; /* of the ranks of this host; NULL in a call on one level */
    PyObject *tag;             /* COLLECTIVE_TAG, which Python gets when a step inside waits */
    PyObject *steps_of;        /* the bytes that the steps are in */
    Messages *over, *inside;   /* of exchange, and of exchange_inside */
    int64_t digest;
    size_t start; /* of this rank's own piece in its input */
    size_t bytes[BASES];
    size_t *limits; /* of the gathered pieces: of this rank's piece, the next rank's, and so on */
    const struct step *steps;
    Py_ssize_t count;
    fold_function *fold;
    divide_function *divide;
    int item, writes; /* bytes of an element; whether any step writes to the result */
} Replay;

static size_t offset_of(uint64_t place)
{
    return place & (UINT64_MAX >> 8);
}

static int is_inside(const Replay *self, uint64_t place, int64_t nbytes)
{
    uint64_t base = place >> 56;
    size_t room = base < BASES ? self->bytes[base] : 0, at = offset_of(place);
    return base < BASES && nbytes >= 0 && at <= room && (size_t)nbytes <= room - at;
}

static int is_rank(const Messages *over, int64_t rank)
{
    const struct messages *m = &over->messages;
    return rank >= -1 && rank < m->size && rank != m->rank;
}

/* Returns the messages that a step exchanges; NULL if the call has no second level. */
static Messages *messages_at(const Replay *self, const struct step *s)
{
    return s->kind == INSIDE ? self->inside : self->over;
}

/* Whether a step uses only memory that the call has. */
static int is_sound(const Replay *self, const struct step *s)
{
    switch (s->kind) {
    case EXCHANGE:
    case INSIDE:
        return messages_at(self, s) != NULL && is_rank(messages_at(self, s), s->to)
               && is_rank(messages_at(self, s), s->source) && (s->to >= 0 || s->source >= 0)
               && (s->to < 0 || is_inside(self, s->left, s->left_bytes))
               && (s->source < 0 || is_inside(self, s->out, s->right_bytes));
    case COPY:
        return is_inside(self, s->left, s->left_bytes) && is_inside(self, s->out, s->left_bytes);
    case FOLD:
        return s->left_bytes % self->item == 0
               && is_inside(self, s->left, s->left_bytes)
               && is_inside(self, s->right, s->left_bytes) && is_inside(self, s->out, s->left_bytes);
    case DIVIDE:
        return s->right_bytes > 0 && s->right_bytes <= INT32_MAX
               && s->left_bytes % self->item == 0 && is_inside(self, s->out, s->left_bytes);
    }
    return 0;
}

/* Exchanges the messages that have begun; returns -1 with an exception. */
static int finish(Call *call)
{
    const struct exchange *x = &call->exchange;
    call->to = x->pending & SENDING ? x->to : NOBODY;
    call->source = x->pending & RECEIVING ? x->first : NOBODY;
    return call_finish(call);
}

/* Compares the ranks' calls, and gathers their pieces in scratch memory; returns -1 with an exception, or
   whether all ranks make the same call. */
static int compare_and_gather(const Replay *self, Call *call, const char *src, char *scratch)
{
    struct messages *m = &self->over->messages;
    int same = 1;
    if (self->limits[1] > 0)
        memcpy(scratch, src + self->start, self->limits[1]);
    for (int have = 1; have < m->size; have *= 2) {
        int more = have < m->size - have ? have : m->size - have;
        int to = (m->rank + m->size - have) % m->size, source = (m->rank + have) % m->size;
        size_t at = self->limits[have];
        exchange_begin(&call->exchange, m);
        exchange_send(&call->exchange, to, COLLECTIVE_TAG, scratch, self->limits[more], NULL, 0);
        exchange_recv(&call->exchange, source, source, COLLECTIVE_TAG, scratch + at,
                      self->limits[have + more] - at, NULL);
        exchange_mark(&call->exchange, same ? self->digest : 0, self->digest);
        if (finish(call) < 0)
            return -1;
        same &= !call->exchange.differs;
    }
    return same;
}

/* Makes the exchange of a step: with other hosts, or inside this host. */
static int run_exchange(const Replay *self, Call *call, const struct step *s, char *left, char *out)
{
    Messages *over = messages_at(self, s);
    call->over = over;
    call->what = s->kind == INSIDE ? self->tag : self->request;
    exchange_begin(&call->exchange, &over->messages);
    if (s->to >= 0)
        exchange_send(&call->exchange, (int)s->to, COLLECTIVE_TAG, left, (size_t)s->left_bytes, NULL,
                      s->source >= 0 ? EXCHANGES : SENDS);
    if (s->source >= 0)
        exchange_recv(&call->exchange, (int)s->source, (int)s->source, COLLECTIVE_TAG, out,
                      (size_t)s->right_bytes, NULL);
    return finish(call);
}

static int run_step(const Replay *self, Call *call, const struct step *s, char *const *base)
{
    char *left = base[s->left >> 56] + offset_of(s->left);
    char *right = base[s->right >> 56] + offset_of(s->right);
    char *out = base[s->out >> 56] + offset_of(s->out);
    size_t nbytes = (size_t)s->left_bytes;
    switch (s->kind) {
    case EXCHANGE:
    case INSIDE:
        return run_exchange(self, call, s, left, out);
    case COPY:
        memmove(out, left, nbytes);
        break;
    case FOLD:
        self->fold(left, right, out, nbytes / (size_t)self->item);
        break;
    case DIVIDE:
        self->divide(out, nbytes / (size_t)self->item, (int)s->right_bytes);
        break;
    }
    return 0;
}

/* Has Python tell how the calls differ, which raises; returns -1. */
static int raise_difference(const Replay *self, const Call *call)
{
    PyObject *deadline = call_deadline(call);
    PyObject *done = deadline == NULL ? NULL
                     : PyObject_CallMethod(self->over->python, "differ", "OO", self->request, deadline);
    if (done != NULL)
        PyErr_SetString(PyExc_SystemError, "replay: differ() did not raise");
    Py_XDECREF(done);
    Py_XDECREF(deadline);
    return -1;
}

static int run_all(const Replay *self, Call *call, char *const *base)
{
    call->unlocked = PyEval_SaveThread();
    int state = compare_and_gather(self, call, base[SRC], base[SCRATCH]);
    for (Py_ssize_t i = 0; state == 1 && i < self->count; i++)
        if (run_step(self, call, &self->steps[i], base) < 0)
            state = -1;
    if (call->unlocked != NULL)
        PyEval_RestoreThread(call->unlocked);
    call->unlocked = NULL;
    return state == 0 ? raise_difference(self, call) : state;
}

/* Returns scratch memory, or NULL with an exception. The messages keep it for the next call. */
static char *scratch_of(Messages *over, size_t nbytes)
{
    if (nbytes > over->room) {
        free(over->scratch);
        over->scratch = aligned_alloc(64, (nbytes + 63) / 64 * 64);
        over->room = over->scratch != NULL ? nbytes : 0;
        if (over->scratch == NULL)
            PyErr_NoMemory();
    }
    return over->scratch;
}

static void trim_scratch(Messages *over)
{
    if (over->room <= KEPT_BYTES)
        return;
    free(over->scratch);
    over->scratch = NULL;
    over->room = 0;
}

/* Whether an array has the length that the steps need; they may not use it at all. */
static int fits(const Replay *self, enum base base, const struct view *view)
{
    return self->bytes[base] == 0 || (view != NULL && view->nbytes == self->bytes[base]);
}

/* Raises the error of a call on a communicator that is broken or closed; returns -1. */
static int raise_over(const Call *call)
{
    Py_XDECREF(PyObject_CallMethod(call->over->python, "ended", "isiiO", call->over->messages.rank,
                                   "the communicator cannot go on", NOBODY, NOBODY, call->what));
    return -1;
}

/* Makes the call on arrays, each of which may be NULL; returns -1 with an exception. */
static int run(Replay *self, const struct view *src, const struct view *dst, PyObject *limit)
{
    Messages *over = self->over;
    Call call;
    if (!fits(self, SRC, src) || !fits(self, DST, dst) || (self->writes && !dst->writable)) {
        PyErr_SetString(PyExc_ValueError, "replay: the arrays have other lengths than the call's, or "
                                          "the result is read-only");
        return -1;
    }
    if (__atomic_exchange_n(&over->busy, 1, __ATOMIC_ACQUIRE)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "replay: another thread of this rank is in a call of this communicator. All "
                        "ranks must make their calls in one order. Make all calls in one thread, or "
                        "give each thread a communicator of its own: comm.dup()");
        return -1;
    }
    __atomic_add_fetch(&over->users, 1, __ATOMIC_SEQ_CST);
    call.over = over;
    call.what = self->request;
    call.limit = limit;
    call.began = 0;
    call.views[0] = src;
    call.views[1] = dst != src ? dst : NULL;
    call.held[0] = call.held[1] = NULL;
    call.unlocked = NULL;
    call.to = call.source = NOBODY;
    char *base[BASES] = {src != NULL ? src->address : NULL, dst != NULL ? dst->address : NULL,
                         scratch_of(over, self->bytes[SCRATCH] + 64)};
    int state = base[SCRATCH] == NULL                          ? -1
                : is_over(over)                                ? raise_over(&call)
                : hold_both(self->core, call.views, call.held) ? run_all(self, &call, base)
                                                               : call_raise_moved(&call);
    trim_scratch(over);
    streams_leave(over);
    __atomic_store_n(&over->busy, 0, __ATOMIC_RELEASE);
    references_clear(call.held, 2); /* this may run a finalizer that makes a call */
    return state < 0 ? -1 : 0;
}

/* Views two arrays, each of which may be None, and makes the call. */
static PyObject *run_on(Replay *self, PyObject *x, PyObject *out, PyObject *limit)
{
    struct view views[2], *src = NULL, *dst = NULL;
    if ((x != Py_None && !view_array(self->core, x, src = &views[0]))
        || (out != Py_None && out != x && !view_array(self->core, out, dst = &views[1])))
        return PyErr_Format(PyExc_TypeError, "replay: C cannot access the memory of an array");
    return run(self, src, out == x ? src : dst, limit) < 0 ? NULL : Py_NewRef(Py_None);
}

/* plain(x, out, deadline) */
static PyObject *replay_plain(PyObject *self, PyObject *args)
{
    PyObject *x, *out, *limit;
    return PyArg_ParseTuple(args, "OOO:plain", &x, &out, &limit)
               ? run_on((Replay *)self, x, out, limit) : NULL;
}

/* Returns a new reference to the array of a Buffer, or to None for None. */
static PyObject *array_of(PyObject *buffer)
{
    return buffer == Py_None ? Py_NewRef(buffer) : PyObject_GetAttrString(buffer, "array");
}

/* replay(src, dst, deadline) */
static PyObject *replay_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    PyObject *src, *dst, *limit, *done = NULL;
    if (refuse_keywords("replay", keywords) < 0
        || !PyArg_ParseTuple(args, "OOO:replay", &src, &dst, &limit))
        return NULL;
    PyObject *x = array_of(src), *out = x == NULL ? NULL : array_of(dst);
    if (out != NULL)
        done = run_on((Replay *)self, x, out, limit);
    Py_XDECREF(x);
    Py_XDECREF(out);
    return done;
}

/* Reads the steps and checks them. Returns FALL_BACK if C has no arithmetic for one of them. */
static enum outcome read_steps(Replay *self, PyObject *steps)
{
    char *bytes;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(steps, &bytes, &nbytes) < 0)
        return FAILED;
    self->steps_of = Py_NewRef(steps);
    self->steps = (const struct step *)bytes;
    self->count = nbytes / (Py_ssize_t)sizeof *self->steps;
    int sound = nbytes % (Py_ssize_t)sizeof *self->steps == 0;
    for (Py_ssize_t i = 0; i < self->count && sound; i++) {
        const struct step *s = &self->steps[i];
        if ((s->kind == FOLD && self->fold == NULL) || (s->kind == DIVIDE && self->divide == NULL))
            return FALL_BACK;
        sound = is_sound(self, s);
        self->writes |= s->out >> 56 == DST
                        && (s->kind == EXCHANGE || s->kind == INSIDE ? s->source >= 0 && s->right_bytes
                                                                     : s->left_bytes) > 0;
    }
    if (!sound)
        PyErr_SetString(PyExc_ValueError, "make_replay: a step is not valid");
    return sound ? DONE : FAILED;
}

static int read_limits(Replay *self, PyObject *pieces)
{
    const struct messages *m = &self->over->messages;
    if ((self->limits = calloc((size_t)m->size + 1, sizeof *self->limits)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < m->size; i++) {
        PyObject *piece = PySequence_GetItem(pieces, (m->rank + i) % m->size);
        size_t nbytes = piece == NULL ? 0 : PyLong_AsSize_t(piece);
        Py_XDECREF(piece);
        if (PyErr_Occurred())
            return -1;
        self->limits[i + 1] = self->limits[i] + nbytes;
    }
    if (self->limits[m->size] > self->bytes[SCRATCH] || self->start > self->bytes[SRC]
        || self->limits[1] > self->bytes[SRC] - self->start) {
        PyErr_SetString(PyExc_ValueError, "make_replay: a piece is not in the memory");
        return -1;
    }
    return 0;
}

/* make_replay(exchange, request, digest, pieces, start, src, dst, scratch, steps, fold, dtype, inside) */
static PyObject *make_replay(PyObject *module, PyObject *args)
{
    struct core *core = PyModule_GetState(module);
    PyObject *exchange, *request, *pieces, *steps, *inside;
    Py_ssize_t start, src, dst, scratch;
    long long digest;
    const char *fold;
    int dtype;
    if (!PyArg_ParseTuple(args, "OOLOnnnnOziO:make_replay", &exchange, &request, &digest, &pieces, &start,
                          &src, &dst, &scratch, &steps, &fold, &dtype, &inside))
        return NULL;
    Messages *over = messages_of(core, exchange);
    Messages *nested = over == NULL || inside == Py_None ? NULL : messages_of(core, inside);
    Replay *self = over == NULL || (nested == NULL && inside != Py_None) ? NULL : object_new(core->replay_type, REFERENCES(Replay, steps_of));
    if (self == NULL)
        return NULL;
    self->exchange = Py_NewRef(exchange);
    self->request = Py_NewRef(request);
    self->over = over;
    self->inside = nested;
    self->exchange_inside = nested == NULL ? NULL : Py_NewRef(inside);
    self->digest = digest;
    self->start = (size_t)start;
    self->bytes[SRC] = (size_t)src;
    self->bytes[DST] = (size_t)dst;
    self->bytes[SCRATCH] = (size_t)scratch;
    self->item = dtype >= 0 && dtype < DTYPES ? (int)item_bytes[dtype] : 1;
    if (fold != NULL) {
        self->fold = fold_of(fold, dtype, fold_levels() - 1);
        self->divide = find_divide(fold_levels() - 1, dtype);
    }
    enum outcome read = FAILED;
    if ((self->tag = PyLong_FromLong(COLLECTIVE_TAG)) == NULL)
        ; /* no memory */
    else if (start < 0 || src < 0 || dst < 0 || scratch < 0 || digest == 0)
        PyErr_SetString(PyExc_ValueError, "make_replay: a number is out of its range");
    else if (read_limits(self, pieces) == 0)
        read = read_steps(self, steps);
    if (read == DONE)
        return (PyObject *)self;
    Py_DECREF(self);
    return read == FALL_BACK ? Py_NewRef(Py_None) : NULL;
}

static void replay_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    free(((Replay *)object)->limits);
    object_dealloc(object);
}

static PyMethodDef replay_methods[] = {
    {"plain", replay_plain, METH_VARARGS,
     "plain(x, out, deadline, /)\n--\n\nMake the call on arrays, each of which may be None."},
    {NULL, NULL, 0, NULL}};

/* A replay has no tp_clear: a cycle through it also runs through an object of Python. */
static PyType_Slot replay_slots[] = {
    {Py_tp_dealloc, replay_dealloc}, {Py_tp_traverse, object_traverse}, {Py_tp_call, replay_call},
    {Py_tp_methods, replay_methods},
    {Py_tp_doc, "A recorded call, from make_replay(): replay(src, dst, deadline)."}, {0, NULL}};

static PyType_Spec replay_spec = {
    "collective.native._core.Replay", sizeof(Replay), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, replay_slots};

static PyMethodDef replay_functions[] = {
    {"make_replay", make_replay, METH_VARARGS,
     "make_replay(exchange, request, digest, pieces, start, src, dst, scratch, steps, fold, dtype,"
     " inside, /)\n--\n\n"
     "Return a recorded call, or None if C lacks arithmetic for it; see collective.native.replay."},
    {NULL, NULL, 0, NULL}};

int add_replays(PyObject *module, struct core *core)
{
    if (type_add(module, &replay_spec, &core->replay_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, replay_functions);
}
