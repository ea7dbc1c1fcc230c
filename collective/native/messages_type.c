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

#define NAME "collective.native.messages"

typedef struct {
    struct messages messages;
    Py_buffer segment; /* the shared memory; its first word is not 0 when a rank has failed */
    int looks, single_copy;
    PyObject *python; /* an object of Python with the methods wait, fetch and refuse */
} State;

typedef struct {
    struct exchange exchange;
    State *state;
    PyObject *const *args;
    int64_t fitting[HEAD_WORDS];
} Call;

/* Drops the result of a Python callback; returns -1 if the callback raised, otherwise 0. */
static int done(PyObject *result)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
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
    int looks = call->state->looks, shared = 0;
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
        if (out == NULL || done(PyObject_CallMethod(call->state->python, "fetch", "iKOO", x->from,
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
        return done(PyObject_CallMethod(call->state->python, "refuse", "is", x->from, x->damage));
    return x->damage ? -1 : 0;
}

/* The function advance(), which Python calls while it waits. Returns what is pending, which is 0
   for a call that is over. */
static PyObject *advance(PyObject *capsule, PyObject *nothing)
{
    Call *call = PyCapsule_GetPointer(capsule, NULL);
    (void)nothing;
    if (call == NULL)
        return NULL;
    if ((exchange_step(&call->exchange) || call->exchange.damage) && drive(call) < 0)
        return NULL;
    return PyLong_FromLong(call->exchange.pending);
}

static PyMethodDef advance_method = {"advance", advance, METH_NOARGS, NULL};
static Call over;

static int ask_python(Call *call)
{
    PyObject *const *args = call->args, *capsule = PyCapsule_New(call, NULL, NULL);
    PyObject *function = capsule ? PyCFunction_New(&advance_method, capsule) : NULL;
    PyObject *deadline = function ? deadline_of(args[5], now_ns()) : NULL;
    int failed = deadline == NULL ? -1
                 : done(PyObject_CallMethod(call->state->python, "wait", "OOOOO", function, args[1],
                                            args[3], args[4], deadline));
    if (capsule != NULL)
        PyCapsule_SetPointer(capsule, &over); /* Python may keep advance() longer than the call */
    Py_XDECREF(deadline);
    Py_XDECREF(function);
    Py_XDECREF(capsule);
    return failed;
}

static int run(Call *call, size_t nbytes)
{
    struct exchange *x = &call->exchange;
    for (int i = 0; nbytes < LONG_BYTES && i < call->state->looks && x->pending && !x->damage; i++)
        exchange_step(x);
    if (!x->pending && !x->damage)
        return 0;
    /* From here on other threads may run, and they may give the arrays other memory. */
    PyObject *held[] = {hold_memory(call->args[0]), hold_memory(call->args[2])};
    int failed = drive(call);
    if (failed == 0 && x->pending)
        failed = ask_python(call);
    Py_XDECREF(held[0]);
    Py_XDECREF(held[1]);
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
    State *state = call->state;
    PyObject *const *args = call->args;
    struct messages *m = &state->messages;
    struct exchange *x = &call->exchange;
    struct view src = {0}, dst = {0};
    int64_t to, source, tag, words[HEAD_WORDS];
    int sends = args[0] != Py_None, receives = args[2] != Py_None, heads = args[6] == Py_True;
    if (!read_int(args[1], -2, m->size - 1, &to) || !read_int(args[3], -2, m->size - 1, &source)
        || !read_int(args[4], heads ? 0 : -INT64_MAX, heads ? INT32_MAX : INT64_MAX, &tag) || to == m->rank
        || source == m->rank || (sends && to < 0) || (receives && source < -1)
        || (sends && !view_array(args[0], &src))
        || (receives && (!view_array(args[2], &dst) || !dst.writable))
        || __atomic_load_n((uint64_t *)state->segment.buf, __ATOMIC_ACQUIRE))
        return 0;
    exchange_begin(x, m);
    if (sends)
        exchange_send(x, (int)to, tag, src.address, src.nbytes,
                      heads ? head_of(&src, words) : NULL, state->single_copy);
    /* If x and out overlap, nothing is received before x has been sent: a received message would
       overwrite elements that are still to be sent. */
    int over = src.address < dst.address + dst.nbytes && dst.address < src.address + src.nbytes;
    if (receives && !over)
        exchange_recv(x, source < 0 ? 0 : (int)source, source < 0 ? m->size - 1 : (int)source, tag,
                      dst.address, dst.nbytes, heads ? head_of(&dst, call->fitting) : NULL);
    else if (source >= 0)
        exchange_drain(x, (int)source);
    *nbytes = src.nbytes + dst.nbytes;
    return 1;
}

/* exchange(x, to, out, source, tag, limit, heads); limit as for deadline_of */
static PyObject *exchange(PyObject *capsule, PyObject *const *args, Py_ssize_t count)
{
    Call call;
    size_t nbytes;
    call.state = PyCapsule_GetPointer(capsule, NAME);
    call.args = args;
    if (call.state == NULL || count != 7)
        return PyErr_Format(PyExc_TypeError, "exchange: takes seven arguments");
    if (begin(&call, &nbytes)) {
        if (run(&call, nbytes) < 0)
            return NULL;
        if (!call.exchange.misfit)
            return PyLong_FromLong(call.exchange.from);
        if (args[0] != Py_None)
            Py_RETURN_NONE;
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
static int find_head(PyObject *bytes, struct view *head)
{
    if (view_array(bytes, head) && head->writable && head->nbytes >= 8 * HEAD_WORDS)
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
    (void)module;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "write_head: takes two arguments");
    if (!find_head(args[1], &head))
        return NULL;
    if (!view_array(args[0], &x))
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
    (void)module;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "read_head: takes two arguments");
    if (!find_head(args[0], &head))
        return NULL;
    if (!view_array(args[1], &out) || !out.writable
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
    (void)module;
    if (!view_array(out, &view) || !view.writable)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(view.nbytes);
}

/* -- life ---------------------------------------------------------------------------------- */

static void free_state(PyObject *capsule)
{
    State *state = PyCapsule_GetPointer(capsule, NAME);
    if (state->messages.in != NULL)
        messages_clear(&state->messages);
    if (state->segment.obj != NULL)
        PyBuffer_Release(&state->segment);
    Py_XDECREF(state->python);
    free(state->messages.in);
    free(state);
}

/* Finds this rank's ends of the two rings: to a peer, and from that peer. */
static void find_rings(State *state, Py_ssize_t rings, int peer)
{
    struct messages *m = &state->messages;
    for (int out = 0; out < 2; out++) {
        int src = out ? m->rank : peer, dst = out ? peer : m->rank;
        size_t index = (size_t)src * (m->size - 1) + dst - (dst > src);
        char *page = (char *)state->segment.buf + rings + index * (4096 + m->capacity);
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
    State *state = calloc(1, sizeof *state);
    PyObject *capsule = state == NULL ? PyErr_NoMemory() : PyCapsule_New(state, NAME, free_state);
    if (capsule == NULL)
        return NULL;
    struct messages *m = &state->messages;
    (void)module;
    if (!PyArg_ParseTuple(args, "OiinnnipO|n:make_messages", &segment, &m->rank, &m->size, &rings,
                          &ring_bytes, &streamed, &state->looks, &state->single_copy, &python,
                          &lines)
        || PyObject_GetBuffer(segment, &state->segment, PyBUF_WRITABLE) < 0)
        goto finished;
    Py_INCREF(state->python = python);
    m->capacity = (size_t)ring_bytes;
    m->streamed = (size_t)streamed;
    if (m->size < 2 || m->size > 1 << 15 || m->rank < 0 || m->rank >= m->size || ring_bytes < 4096
        || ring_bytes % 4096 || rings < 8 || rings % 8 || lines < 0 || lines % 8
        || (lines && (rings - lines) / (8 * LINE_WORDS) < m->size) || ring_bytes > state->segment.len
        || (state->segment.len - rings) / (4096 + ring_bytes) < m->size * (m->size - 1)) {
        PyErr_SetString(PyExc_ValueError, "make_messages: a number is out of its range, or the "
                                          "rings are not in the segment");
    } else if ((m->in = calloc(2 * (size_t)m->size, sizeof *m->in)) == NULL) {
        PyErr_NoMemory();
    } else {
        m->out = m->in + m->size;
        if (lines > SLEEPERS_AT) {
            m->sleepers = (uint32_t *)((char *)state->segment.buf + SLEEPERS_AT);
            m->asleep = (uint64_t *)((char *)state->segment.buf + lines) + ASLEEP;
            m->apart = LINE_WORDS;
        }
        for (int peer = 0; peer < m->size; peer++)
            if (peer != m->rank)
                find_rings(state, rings, peer);
        function = PyCFunction_New(&exchange_method, capsule);
    }
finished:
    Py_DECREF(capsule);
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

int add_messages(PyObject *module)
{
    return PyModule_AddFunctions(module, messages_functions);
}
