/* The Python functions for messages: one that exchanges messages by messages.c, and others that
   write and read the heads of arrays, for transports that send messages themselves. */

#include "python.h"
#include "messages.h"
#include "shared.h"
#include "sleeping.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* Time without progress after which Python waits instead of C. */
#define IDLE_NS INT64_C(50000)
/* Time after which Python is called even if there is progress, since it handles deadlines and
   signals. */
#define LONGEST_NS INT64_C(50000000)
/* If sched_yield takes longer than this, another thread has run on this processor. */
#define TURN_NS INT64_C(2000)
/* A message of at least this many bytes takes longer than releasing the interpreter lock. */
#define LONG_BYTES (32 << 10)

/* The messages of one rank; `self` of a function exchange(). */
typedef struct {
    CORE_HEAD
    struct messages messages;
    Py_buffer segment; /* the shared memory; its first word is not 0 when a rank has failed */
    int looks, single_copy;
    PyObject *python; /* an object of Python with the methods wait, fetch and refuse */
} Messages;

typedef struct {
    struct exchange exchange;
    Messages *over;
    PyObject *const *args;
    struct view src, dst; /* their arrays are NULL for a half that the call does not have */
    PyObject *held[2];    /* from hold_memory() */
    int64_t began; /* when the call waited first, from where its deadline counts; 0 before that */
    int64_t fitting[HEAD_WORDS];
} Call;

/* Drops the result of a Python callback; returns -1 if the callback raised, otherwise 0. */
static int done(PyObject *result)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Raises the exception for an array that has got other memory; returns -1. */
static int raise_moved(const Call *call)
{
    return done(PyObject_CallMethod(call->over->python, "moved", "OOO", call->args[1],
                                    call->args[3], call->args[4]));
}

/* Checks, when other code has run, that the arrays have the memory that they had at the beginning.
   Returns -1 with an exception if not. */
static int check_arrays(const Call *call)
{
    const struct core *core = call->over->core;
    if ((call->src.array == NULL || is_kept(core, call->held[0], &call->src))
        && (call->dst.array == NULL || is_kept(core, call->held[1], &call->dst)))
        return 0;
    return raise_moved(call);
}

/* Exchanges bytes without the interpreter lock, for as long as there is progress. If another thread
   has run on this processor meanwhile, that may be the sender: then each part of its message would
   cost a turn of the scheduler. In this case, or if the sender is slow for another reason, the
   receiver claims the message. */
static void go_on(Call *call)
{
    struct exchange *x = &call->exchange;
    PyThreadState *unlocked = PyEval_SaveThread();
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
        if (steps)
            moved = now;
        /* A long message is claimed at once: one copy by the kernel takes less time than two copies
           that drive each other's lines out of the caches. */
        if (x->matched && x->nbytes > x->messages->streamed && exchange_claim(x))
            break;
        if (now - moved > IDLE_NS || now - start > LONGEST_NS
            || ((shared ? idle == looks : idle == 2 * looks) && exchange_claim(x)))
            break;
        if (idle) {
            sched_yield();
            shared |= now_ns() - now > TURN_NS;
        }
    }
    PyEval_RestoreThread(unlocked);
}

/* Exchanges bytes by go_on(), and fetches the rest of a message that has been claimed. Returns -1
   with an exception. */
static int drive(Call *call)
{
    struct exchange *x = &call->exchange;
    size_t rest;
    go_on(call);
    while (!x->damage && (rest = exchange_claim(x)) > 0) {
        PyObject *out = PyMemoryView_FromMemory(x->bytes + x->done, (Py_ssize_t)rest, PyBUF_WRITE);
        if (out == NULL || done(PyObject_CallMethod(call->over->python, "fetch", "iKOO", x->from,
                                (unsigned long long)(uintptr_t)(x->address + x->done), out,
                                call->args[4])) < 0) {
            Py_XDECREF(out);
            return -1;
        }
        Py_DECREF(out);
        exchange_fetched(x);
        go_on(call);
    }
    if (x->damage == NO_MEMORY)
        PyErr_NoMemory();
    else if (x->damage)
        return done(PyObject_CallMethod(call->over->python, "refuse", "is", x->from, x->damage));
    return x->damage ? -1 : 0;
}

/* The function advance(), which Python calls while it waits. Returns what is pending, which is 0
   for a call that is over. */
static PyObject *advance(PyObject *capsule, PyObject *nothing)
{
    Call *call = PyCapsule_GetContext(capsule);
    (void)nothing;
    if (call == NULL)
        return PyErr_Occurred() ? NULL : PyLong_FromLong(0);
    if (check_arrays(call) < 0)
        return NULL;
    if ((exchange_step(&call->exchange) || call->exchange.damage) && drive(call) < 0)
        return NULL;
    return PyLong_FromLong(call->exchange.pending);
}

static PyMethodDef advance_method = {"advance", advance, METH_NOARGS, NULL};

static PyObject *deadline_of_call(const Call *call)
{
    return deadline_of(call->over->core, call->args[5], call->began ? call->began : now_ns());
}

static int ask_python(Call *call)
{
    /* The context is the call, and NULL when the call is over: Python may keep advance() longer. */
    PyObject *const *args = call->args, *capsule = PyCapsule_New(call->over, NULL, NULL);
    if (capsule != NULL && PyCapsule_SetContext(capsule, call) < 0)
        Py_CLEAR(capsule);
    PyObject *function = capsule ? PyCFunction_New(&advance_method, capsule) : NULL;
    PyObject *deadline = function ? deadline_of_call(call) : NULL;
    int failed = deadline == NULL ? -1
                 : done(PyObject_CallMethod(call->over->python, "wait", "OOOOO", function, args[1],
                                            args[3], args[4], deadline));
    if (capsule != NULL)
        PyCapsule_SetContext(capsule, NULL);
    Py_XDECREF(deadline);
    Py_XDECREF(function);
    Py_XDECREF(capsule);
    return failed;
}

static int run(Call *call, size_t nbytes)
{
    struct exchange *x = &call->exchange;
    for (int i = 0; nbytes < LONG_BYTES && i < call->over->looks && x->pending && !x->damage; i++)
        exchange_step(x);
    if (!x->pending && !x->damage)
        return 0;
    /* From here on other threads may run, and they may give the arrays other memory. */
    const struct core *core = call->over->core;
    const struct view *views[] = {&call->src, &call->dst};
    int there = 1;
    for (int i = 0; i < 2; i++) {
        call->held[i] = views[i]->array != NULL ? hold_memory(core, views[i]->array) : NULL;
        there = there && (views[i]->array == NULL || is_there(core, views[i]));
    }
    int failed = there ? 0 : raise_moved(call);
    if (failed == 0)
        failed = drive(call);
    if (failed == 0 && x->pending)
        failed = ask_python(call);
    Py_XDECREF(call->held[0]);
    Py_XDECREF(call->held[1]);
    return failed;
}

/* Whether an object is exactly an int, with a value in this range. */
static int read_int(PyObject *object, int64_t least, int64_t most, int64_t *value)
{
    int overflow = 0;
    if (!PyLong_CheckExact(object))
        return 0;
    *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow && *value >= least && *value <= most;
}

/* Sets the numbers with which the head of an array begins: kind (0), dtype, bytes, number of
   dimensions and shape. */
static const int64_t *head_of(const struct view *view, int64_t *words)
{
    memset(words, 0, 8 * HEAD_WORDS);
    words[1] = view->dtype;
    words[2] = (int64_t)view->nbytes;
    words[3] = view->ndim;
    memcpy(words + 4, view->shape, sizeof *words * (size_t)view->ndim);
    return words;
}

/* Reads the arguments of exchange and begins it; returns 0 if Python must handle the call. */
static int begin(Call *call, size_t *nbytes)
{
    Messages *over = call->over;
    PyObject *const *args = call->args;
    struct messages *m = &over->messages;
    struct exchange *x = &call->exchange;
    struct view *src = &call->src, *dst = &call->dst;
    int64_t to, source, tag, words[HEAD_WORDS];
    int sends = args[0] != Py_None, receives = args[2] != Py_None, heads = args[6] == Py_True;
    *src = *dst = (struct view){0};
    if (!read_int(args[1], -2, m->size - 1, &to) || !read_int(args[3], -2, m->size - 1, &source)
        || !read_int(args[4], heads ? 0 : -INT64_MAX, heads ? INT32_MAX : INT64_MAX, &tag) || to == m->rank
        || source == m->rank || (sends && to < 0) || (receives && source < -1)
        || (sends && !view_array(over->core, args[0], src))
        || (receives && (!view_array(over->core, args[2], dst) || !dst->writable))
        || __atomic_load_n((uint64_t *)over->segment.buf, __ATOMIC_ACQUIRE))
        return 0;
    exchange_begin(x, m);
    if (sends)
        exchange_send(x, (int)to, tag, src->address, src->nbytes,
                      heads ? head_of(src, words) : NULL, over->single_copy);
    /* If x and out overlap, nothing is received before x has been sent: a received message would
       overwrite elements that are still to be sent. */
    int overlap = src->address < dst->address + dst->nbytes
                  && dst->address < src->address + src->nbytes;
    if (receives && !overlap)
        exchange_recv(x, source < 0 ? 0 : (int)source, source < 0 ? m->size - 1 : (int)source, tag,
                      dst->address, dst->nbytes, heads ? head_of(dst, call->fitting) : NULL);
    else if (source >= 0)
        exchange_drain(x, (int)source);
    *nbytes = src->nbytes + dst->nbytes;
    return 1;
}

/* exchange(x, to, out, source, tag, limit, heads); limit as for deadline_of */
static PyObject *exchange(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Call call;
    size_t nbytes;
    call.over = (Messages *)self;
    call.args = args;
    call.began = 0;
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "exchange: takes seven arguments");
    if (begin(&call, &nbytes)) {
        if (run(&call, nbytes) < 0)
            return NULL;
        if (!call.exchange.misfit && !call.exchange.draining)
            return PyLong_FromLong(call.exchange.from);
        return deadline_of_call(&call);
    }
    Py_RETURN_NOTIMPLEMENTED;
}

static PyMethodDef exchange_method = {
    "exchange", (PyCFunction)(void (*)(void))exchange, METH_FASTCALL,
    "exchange(x, to, out, source, tag, limit, heads, /)\n--\n\n"
    "Send x, receive into out, or both; see collective.native.messages."};

/* -- heads for transports that send messages themselves ----------------------------------- */

/* Views the bytes of a head; returns 0 with an exception if they are no writable array of at least
   128 bytes. */
static int find_head(const struct core *core, PyObject *bytes, struct view *head)
{
    if (view_array(core, bytes, head) && head->writable && head->nbytes >= 8 * HEAD_WORDS)
        return 1;
    PyErr_SetString(PyExc_TypeError, "head: must be a writable array of at least 128 bytes");
    return 0;
}

/* Whether an array of nbytes travels inside its head. */
static int is_inline(size_t nbytes, const struct view *head)
{
    return nbytes <= head->nbytes - 8 * HEAD_WORDS;
}

/* write_head(x, head) */
static PyObject *write_head(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    struct view x, head;
    int64_t words[HEAD_WORDS];
    const struct core *core = PyModule_GetState(module);
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "write_head: takes two arguments");
    if (!find_head(core, args[1], &head))
        return NULL;
    if (!view_array(core, args[0], &x))
        Py_RETURN_NONE;
    memcpy(head.address, head_of(&x, words), sizeof words);
    if (x.nbytes && is_inline(x.nbytes, &head))
        memcpy(head.address + sizeof words, x.address, x.nbytes);
    return PyLong_FromSize_t(x.nbytes);
}

/* read_head(head, out) */
static PyObject *read_head(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    struct view out, head;
    int64_t words[HEAD_WORDS];
    const struct core *core = PyModule_GetState(module);
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "read_head: takes two arguments");
    if (!find_head(core, args[0], &head))
        return NULL;
    if (!view_array(core, args[1], &out) || !out.writable
        || memcmp(head.address, head_of(&out, words), sizeof words) != 0)
        Py_RETURN_FALSE;
    if (out.nbytes && is_inline(out.nbytes, &head))
        memcpy(out.address, head.address + sizeof words, out.nbytes);
    Py_RETURN_TRUE;
}

/* room_in(out) */
static PyObject *room_in(PyObject *module, PyObject *out)
{
    struct view view;
    if (!view_array(PyModule_GetState(module), out, &view) || !view.writable)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(view.nbytes);
}

/* -- life ---------------------------------------------------------------------------------- */

/* Python breaks a cycle through its object, or through the owner of the memory, there. */
static int messages_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Messages *)object)->python);
    Py_VISIT(((Messages *)object)->segment.obj);
    return visit_object(object, visit, arg);
}

static void messages_dealloc(PyObject *object)
{
    Messages *self = (Messages *)object;
    PyObject_GC_UnTrack(object);
    if (self->messages.in != NULL)
        messages_clear(&self->messages);
    if (self->segment.obj != NULL)
        PyBuffer_Release(&self->segment);
    Py_XDECREF(self->python);
    free(self->messages.in);
    free_object(object);
}

static PyType_Slot messages_slots[] = {
    {Py_tp_dealloc, messages_dealloc}, {Py_tp_traverse, messages_traverse},
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
        struct ring *r = out ? &m->out[peer] : &m->in[peer];
        r->mine = out ? words : words + 64;
        r->theirs = out ? words + 64 : words;
        r->claim = words + 128;
        r->position = *r->mine;
        r->seen = *r->theirs;
        r->data = (unsigned char *)page + 4096;
    }
}

static PyObject *make_messages(PyObject *module, PyObject *args)
{
    PyObject *segment, *python, *function = NULL;
    Py_ssize_t rings, ring_bytes, streamed, lines = 0;
    Messages *self = new_object(((struct core *)PyModule_GetState(module))->messages_type);
    if (self == NULL)
        return NULL;
    struct messages *m = &self->messages;
    if (!PyArg_ParseTuple(args, "OiinnnipO|n:make_messages", &segment, &m->rank, &m->size, &rings,
                          &ring_bytes, &streamed, &self->looks, &self->single_copy, &python,
                          &lines)
        || PyObject_GetBuffer(segment, &self->segment, PyBUF_WRITABLE) < 0)
        goto finished;
    self->python = Py_NewRef(python);
    m->capacity = (size_t)ring_bytes;
    m->streamed = (size_t)streamed;
    if (m->size < 2 || m->size > 1 << 15 || m->rank < 0 || m->rank >= m->size || ring_bytes < 4096
        || ring_bytes % 4096 || rings < 8 || rings % 8 || lines < 0 || lines % 8
        || (lines && (rings - lines) / (8 * LINE_WORDS) < m->size)
        || ring_bytes > self->segment.len
        || (self->segment.len - rings) / (4096 + ring_bytes) < m->size * (m->size - 1)) {
        PyErr_SetString(PyExc_ValueError, "make_messages: a number is out of its range, or the "
                                          "rings are not in the segment");
    } else if ((m->in = calloc(2 * (size_t)m->size, sizeof *m->in)) == NULL) {
        PyErr_NoMemory();
    } else {
        m->out = m->in + m->size;
        if (lines > SLEEPERS_AT) {
            m->sleepers = (uint32_t *)((char *)self->segment.buf + SLEEPERS_AT);
            m->asleep = (uint64_t *)((char *)self->segment.buf + lines) + ASLEEP;
            m->apart = LINE_WORDS;
        }
        for (int peer = 0; peer < m->size; peer++)
            if (peer != m->rank)
                find_rings(self, rings, peer);
        function = PyCFunction_New(&exchange_method, (PyObject *)self);
    }
finished:
    Py_DECREF((PyObject *)self);
    return function;
}

static PyMethodDef messages_functions[] = {
    {"make_messages", make_messages, METH_VARARGS,
     "make_messages(segment, rank, size, rings, ring_bytes, streamed, looks, single_copy, python,"
     " lines=0, /)"
     "\n--\n\n"
     "Return a function that exchanges messages; see collective.native.messages."},
    {"write_head", (PyCFunction)(void (*)(void))write_head, METH_FASTCALL,
     "write_head(x, head, /)\n--\n\n"
     "Write the head of an array, and the array if the head has room; return the array's bytes,\n"
     "or None if the array is not plain."},
    {"read_head", (PyCFunction)(void (*)(void))read_head, METH_FASTCALL,
     "read_head(head, out, /)\n--\n\n"
     "Return whether out fits the array that the head describes; copy the array if it is in the\n"
     "head."},
    {"room_in", room_in, METH_O,
     "room_in(out, /)\n--\n\n"
     "Return the bytes of an array; None if it is read-only or not plain."},
    {NULL, NULL, 0, NULL}};

int add_messages(PyObject *module, struct core *core)
{
    if (add_type(module, &messages_spec, &core->messages_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, messages_functions);
}
