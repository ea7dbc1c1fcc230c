/* The Python functions that exchange messages by messages.c: how a thread waits, and how the functions
   are made over rings. streams_type.c makes those over streams. */

#include "messages_type.h"
#include "shared_type.h"
#include "sleeping.h"

#include <stdlib.h>
#include <string.h>

/* Time without progress after which Python waits for a ring instead of C. */
#define RING_IDLE_NS INT64_C(50000)
/* Time after which Python is called even if there is progress, since it handles deadlines and
   signals. */
#define LONGEST_NS INT64_C(50000000)
/* If sched_yield takes longer than this, another thread has run on this processor. */
#define TURN_NS INT64_C(2000)
/* Over streams: if sched_yield takes longer than this, another program's thread has had a whole turn of the
   scheduler, and not a peer its short one. Then a rank yields no more for a while. It sleeps at its sockets
   instead, from where the kernel wakes it in the middle of such a turn. On two cores with ten busy programs
   an all_reduce of three ranks took 0.9 to 2.9 ms on average with yields, and 0.1 to 0.4 ms without. */
#define LONG_TURN_NS INT64_C(500000)
#define CONTENDED_NS INT64_C(100000000)
/* Time without progress after which it sleeps meanwhile. */
#define CONTENDED_IDLE_NS INT64_C(5000)
/* A message of at least this many bytes takes longer than releasing the interpreter lock. */
#define LONG_BYTES (32 << 10)

/* Drops the result of a Python callback; returns -1 if the callback raised, otherwise 0. */
static int done(PyObject *result)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int call_raise_moved(const Call *call)
{
    return done(PyObject_CallMethod(call->over->python, "moved", "iiO", call->to, call->source,
                                    call->what));
}

/* Checks, when other code has run, that the arrays have the memory that they had at the beginning.
   Returns -1 with an exception if not. */
static int check_arrays(const Call *call)
{
    return are_kept(call->over->core, call->views, call->held) ? 0 : call_raise_moved(call);
}

/* Exchanges bytes for as long as there is progress. If another thread has run on this processor
   meanwhile, that may be the sender: then each part of its message would cost a turn of the
   scheduler. In this case, or if nothing has moved for long, the receiver fetches the message. */
static void go_on(Call *call)
{
    struct exchange *x = &call->exchange;
    int64_t start = now_ns(), moved = start, now;
    int looks = call->over->looks, shared = 0;
    if (call->began == 0)
        call->began = start;
    for (int idle = 0;;) {
        int steps = exchange_step(x);
        if (!x->pending || x->damage)
            break;
        idle = steps ? 0 : idle + 1;
        if (idle && idle < looks)
            continue;
        now = now_ns();
        if (steps || (idle && messages_progress(x->messages)))
            moved = now;
        int streamed = x->messages->carrier == &streams;
        int contended = streamed && now < __atomic_load_n(&call->over->contended, __ATOMIC_RELAXED);
        int64_t idle_ns = contended ? CONTENDED_IDLE_NS : call->over->idle_ns;
        if (streamed && now - moved > idle_ns && now - start < LONGEST_NS) {
            /* The kernel wakes this thread, also if the communicator breaks: Python is needed only
               in a long wait. */
            exchange_sleep(x, 1e-9 * (double)(start + LONGEST_NS - now));
            moved = now_ns();
            continue;
        }
        int is_late = now - moved > idle_ns;
        if ((is_late || (shared && idle >= looks)) && exchange_hurry(x))
            continue;
        if (is_late || now - start > LONGEST_NS)
            break;
        if (idle && !contended) {
            int64_t turn = now_ns();
            sched_yield();
            now = now_ns();
            shared |= now - turn > TURN_NS;
            if (streamed && now - turn > LONG_TURN_NS)
                __atomic_store_n(&call->over->contended, now + CONTENDED_NS, __ATOMIC_RELAXED);
        }
    }
}

static void go_on_unlocked(Call *call)
{
    PyThreadState *unlocked = PyEval_SaveThread();
    go_on(call);
    PyEval_RestoreThread(unlocked);
}

/* Raises the exception for wrong data, or for memory that is lacking; returns 0 for neither. */
static int raise_damage(const Call *call)
{
    const struct exchange *x = &call->exchange;
    if (x->damage == NO_MEMORY)
        PyErr_NoMemory();
    else if (x->damage)
        return done(PyObject_CallMethod(call->over->python, x->damage == STREAM_ENDED ? "ended" : "refuse",
                                        "isiiO", x->from, x->damage, call->to, call->source,
                                        call->what));
    return x->damage ? -1 : 0;
}

/* The function advance(), which Python calls while it waits: advance(seconds=0). Over streams it sleeps
   for the given seconds at most, until something may move. Returns what is pending, which is 0 for a
   call that is over; plus PARTIAL if a message may have moved in part. */
static PyObject *advance(PyObject *capsule, PyObject *args)
{
    Call *call = PyCapsule_GetContext(capsule);
    double seconds = 0;
    if (!PyArg_ParseTuple(args, "|d:advance", &seconds))
        return NULL;
    if (call == NULL)
        return PyErr_Occurred() ? NULL : PyLong_FromLong(0);
    struct exchange *x = &call->exchange;
    if (seconds > 0 && x->messages->carrier == &streams) {
        PyThreadState *unlocked = PyEval_SaveThread();
        exchange_sleep(x, seconds);
        PyEval_RestoreThread(unlocked);
    }
    if (check_arrays(call) < 0)
        return NULL;
    int moved = messages_progress(x->messages);
    if (exchange_step(x) || moved || x->damage) {
        go_on_unlocked(call);
        if (raise_damage(call) < 0)
            return NULL;
    }
    int partial = exchange_is_partial(x) ? PARTIAL : 0;
    return PyLong_FromLong(x->pending | partial);
}

static PyMethodDef advance_method = {"advance", advance, METH_VARARGS, NULL};

PyObject *call_deadline(const Call *call)
{
    return deadline_of(call->over->core, call->limit, call->began ? call->began : now_ns());
}

int call_ask_python(const Call *call, PyMethodDef *advance, void *context)
{
    PyObject *capsule = PyCapsule_New(call->over, NULL, NULL);
    if (capsule != NULL && PyCapsule_SetContext(capsule, context) < 0)
        Py_CLEAR(capsule);
    PyObject *function = capsule ? PyCFunction_New(advance, capsule) : NULL;
    PyObject *deadline = function ? call_deadline(call) : NULL;
    int failed = deadline == NULL ? -1
                 : done(PyObject_CallMethod(call->over->python, "wait", "OiiOO", function, call->to,
                                            call->source, call->what, deadline));
    if (capsule != NULL)
        PyCapsule_SetContext(capsule, NULL);
    Py_XDECREF(deadline);
    Py_XDECREF(function);
    Py_XDECREF(capsule);
    return failed;
}

int call_finish(Call *call)
{
    struct exchange *x = &call->exchange;
    int locked = call->unlocked == NULL;
    if (locked)
        call->unlocked = PyEval_SaveThread();
    go_on(call);
    if (!locked && !x->pending && !x->damage)
        return 0;
    PyEval_RestoreThread(call->unlocked);
    call->unlocked = NULL;
    int failed = raise_damage(call);
    if (failed == 0 && x->pending)
        failed = call_ask_python(call, &advance_method, call);
    if (failed == 0 && !locked)
        call->unlocked = PyEval_SaveThread();
    return failed;
}

static int run(Call *call, size_t nbytes)
{
    struct exchange *x = &call->exchange;
    /* A step over streams takes longer than releasing the interpreter lock, unless there is something
       to move at once. */
    int looks = nbytes >= LONG_BYTES ? 0 : x->messages->carrier == &streams ? 1 : call->over->looks;
    for (int i = 0; i < looks && x->pending && !x->damage; i++)
        exchange_step(x);
    if (!x->pending && !x->damage)
        return 0;
    /* From here on other threads may run, and they may give the arrays other memory. */
    int failed = hold_both(call->over->core, call->views, call->held) ? call_finish(call)
                                                                      : call_raise_moved(call);
    references_clear(call->held, 2);
    return failed;
}

/* Whether an object is an int with a value in this range, such as a SpecialRank, and no bool. */
static int read_int(PyObject *object, int64_t least, int64_t most, int64_t *value)
{
    int overflow = 0;
    if (!PyLong_Check(object) || PyBool_Check(object))
        return 0;
    *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow && *value >= least && *value <= most;
}

/* What a call of exchange() needs beside the call. */
struct arrays {
    struct view src, dst;
    int64_t fitting[HEAD_WORDS];
};

/* Reads the arguments of exchange and begins it; returns 0 if Python must handle the call. */
static int begin(Call *call, struct arrays *arrays, PyObject *const *args)
{
    Messages *over = call->over;
    struct messages *m = &over->messages;
    struct exchange *x = &call->exchange;
    struct view *src = &arrays->src, *dst = &arrays->dst;
    int64_t to, source, tag, words[HEAD_WORDS];
    int sends = args[0] != Py_None, receives = args[2] != Py_None, heads = args[6] != Py_False;
    int64_t kind = args[6] == Py_True ? AN_ARRAY : AN_OBJECT;
    *src = *dst = (struct view){0};
    if (!read_int(args[1], NOBODY, m->size - 1, &to)
        || !read_int(args[3], NOBODY, m->size - 1, &source)
        || !read_int(args[4], heads ? 0 : -INT64_MAX, heads ? INT32_MAX : INT64_MAX, &tag) || to == m->rank
        || source == m->rank || (sends && to < 0) || (receives && source < -1)
        || (sends && !view_array(over->core, args[0], src))
        || (receives && (!view_array(over->core, args[2], dst) || !dst->writable))
        || is_over(over))
        return 0;
    call->to = (int)to;
    call->source = (int)source;
    call->views[0] = sends ? src : NULL;
    call->views[1] = receives ? dst : NULL;
    exchange_begin(x, m);
    if (sends)
        exchange_send(x, (int)to, tag, src->address, src->nbytes,
                      heads ? head_of(src, kind, words) : NULL, receives ? EXCHANGES : SENDS);
    /* If x and out overlap, nothing is received before x has been sent: a received message would
       overwrite elements that are still to be sent. */
    int overlap = src->address < dst->address + dst->nbytes
                  && dst->address < src->address + src->nbytes;
    if (receives && !overlap)
        exchange_recv(x, source < 0 ? 0 : (int)source, source < 0 ? m->size - 1 : (int)source, tag,
                      dst->address, dst->nbytes, heads ? head_of(dst, kind, arrays->fitting) : NULL);
    else if (source >= 0)
        exchange_drain(x, (int)source, tag);
    return 1;
}

/* exchange(x, to, out, source, tag, limit, heads); limit as for deadline_of */
static PyObject *exchange(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct arrays arrays;
    Call call;
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "exchange: takes seven arguments");
    call.over = (Messages *)self;
    call.what = args[4];
    call.limit = args[5];
    call.began = 0;
    call.held[0] = call.held[1] = NULL;
    call.unlocked = NULL;
    int streamed = call.over->messages.carrier == &streams;
    if (streamed)
        __atomic_add_fetch(&call.over->users, 1, __ATOMIC_SEQ_CST);
    int began = begin(&call, &arrays, args);
    int failed = began && run(&call, arrays.src.nbytes + arrays.dst.nbytes) < 0;
    if (streamed)
        streams_leave(call.over);
    if (!began)
        Py_RETURN_NOTIMPLEMENTED;
    if (failed)
        return NULL;
    if (!call.exchange.misfit && !call.exchange.draining)
        return PyLong_FromLong(call.exchange.from);
    return call_deadline(&call);
}

static PyMethodDef exchange_method = {
    "exchange", (PyCFunction)(void (*)(void))exchange, METH_FASTCALL,
    "exchange(x, to, out, source, tag, limit, heads, /)\n--\n\n"
    "Send x, receive into out, or both; see collective.native.messages."};

/* -- life ---------------------------------------------------------------------------------- */

/* Python breaks a cycle through its object, or through the owner of the memory, there. */
static int messages_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Messages *)object)->segment.obj);
    return object_traverse(object, visit, arg);
}

static void messages_dealloc(PyObject *object)
{
    Messages *self = (Messages *)object;
    PyObject_GC_UnTrack(object);
    struct messages *m = &self->messages;
    if (m->in != NULL && m->carrier == &streams)
        streams_free(m);
    if (m->in != NULL)
        messages_clear(m);
    if (self->segment.obj != NULL)
        PyBuffer_Release(&self->segment);
    free(m->in);
    free(self->scratch);
    free(m->pids);
    object_dealloc(object);
}

static PyType_Slot messages_slots[] = {
    {Py_tp_dealloc, messages_dealloc}, {Py_tp_traverse, messages_traverse}, {Py_tp_methods, posted_methods},
    {Py_tp_doc, "The messages of one rank; see collective.native.messages."}, {0, NULL}};

static PyType_Spec messages_spec = {
    "collective.native._core.Messages", sizeof(Messages), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, messages_slots};

/* Finds this rank's ends of the two rings: to a peer, and from that peer. */
static void find_rings(Messages *self, Py_ssize_t rings, int peer)
{
    struct messages *m = &self->messages;
    for (int out = 0; out < 2; out++) {
        int src = out ? m->rank : peer, dst = out ? peer : m->rank;
        size_t index = (size_t)src * (m->size - 1) + dst - (dst > src);
        char *page = (char *)self->segment.buf + rings + index * (4096 + m->capacity);
        uint64_t *words = (uint64_t *)page;
        struct end *e = out ? &m->out[peer] : &m->in[peer];
        struct ring *r = &e->ring;
        r->mine = out ? words : words + 64;
        r->theirs = out ? words + 64 : words;
        r->claim = words + 128;
        e->position = *r->mine;
        r->seen = *r->theirs;
        r->data = (unsigned char *)page + 4096;
    }
}

int messages_allocate(struct messages *m, const struct carrier *carrier)
{
    m->carrier = carrier;
    m->in = calloc(2 * (size_t)m->size, sizeof *m->in);
    m->out = m->in + m->size;
    return m->in != NULL ? 0 : done(PyErr_NoMemory());
}

PyObject *messages_function(Messages *self)
{
    return PyCFunction_New(&exchange_method, (PyObject *)self);
}

static PyObject *make_messages(PyObject *module, PyObject *args)
{
    PyObject *segment, *python, *function = NULL, *pids = Py_None;
    Py_ssize_t rings_at, ring_bytes, lines = 0;
    Messages *self = object_new(((struct core *)PyModule_GetState(module))->messages_type,
                                REFERENCES(Messages, python));
    if (self == NULL)
        return NULL;
    struct messages *m = &self->messages;
    if (!PyArg_ParseTuple(args, "OiinnipO|nOi:make_messages", &segment, &m->rank, &m->size, &rings_at,
                          &ring_bytes, &self->looks, &m->claims, &python, &lines, &pids,
                          &m->page_map)
        || PyObject_GetBuffer(segment, &self->segment, PyBUF_WRITABLE) < 0)
        goto finished;
    self->python = Py_NewRef(python);
    self->idle_ns = RING_IDLE_NS;
    m->capacity = (size_t)ring_bytes;
    if (m->size < 2 || m->size > 1 << 15 || m->rank < 0 || m->rank >= m->size || ring_bytes < 4096
        || ring_bytes % 4096 || rings_at < 8 || rings_at % 8 || lines < 0 || lines % 8
        || (lines && (rings_at - lines) / (8 * LINE_WORDS) < m->size)
        || ring_bytes > self->segment.len
        || (self->segment.len - rings_at) / (4096 + ring_bytes) < m->size * (m->size - 1)) {
        PyErr_SetString(PyExc_ValueError, "make_messages: a number is out of its range, or the "
                                          "rings are not in the segment");
    } else if (read_pids(pids, m->size, &m->pids) == 0 && messages_allocate(m, &rings) == 0) {
        m->broken = self->segment.buf;
        m->claims &= m->pids != NULL;
        if (lines > SLEEPERS_AT) {
            m->sleepers = (uint32_t *)((char *)self->segment.buf + SLEEPERS_AT);
            m->asleep = (uint64_t *)((char *)self->segment.buf + lines) + ASLEEP;
            m->apart = LINE_WORDS;
        }
        for (int peer = 0; peer < m->size; peer++)
            if (peer != m->rank)
                find_rings(self, rings_at, peer);
        function = messages_function(self);
    }
finished:
    Py_DECREF((PyObject *)self);
    return function;
}

Messages *messages_of(const struct core *core, PyObject *exchange)
{
    PyObject *self = PyCFunction_CheckExact(exchange) ? PyCFunction_GetSelf(exchange) : NULL;
    if (self == NULL || Py_TYPE(self) != core->messages_type) {
        PyErr_SetString(PyExc_TypeError, "exchange: must be a function of the core");
        return NULL;
    }
    return (Messages *)self;
}

static PyMethodDef messages_functions[] = {
    {"make_messages", make_messages, METH_VARARGS,
     "make_messages(segment, rank, size, rings, ring_bytes, looks, claims, python, lines=0,"
     " pids=None, page_map=-1, /)"
     "\n--\n\n"
     "Return a function that exchanges messages; see collective.native.messages."},
    {NULL, NULL, 0, NULL}};

int add_messages(PyObject *module, struct core *core)
{
    if (type_add(module, &messages_spec, &core->messages_type) < 0)
        return -1;
    if (add_heads(module) < 0 || add_streams(module) < 0 || add_both(module) < 0
        || add_posted(module, core) < 0 || add_replays(module, core) < 0)
        return -1;
    return PyModule_AddFunctions(module, messages_functions);
}
