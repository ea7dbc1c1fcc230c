/* Posted operations for Python: methods of Messages, and the type Posted; see posted.c. */

#include "messages_type.h"

#include <stdlib.h>
#include <structmember.h>
#include <string.h>

/* Time after which a step returns even if there is progress: Python handles deadlines and signals. */
#define LONGEST_NS INT64_C(50000000)

/* Number of looks before the interpreter lock is released, which takes as long as some of them. */
#define LOCKED_LOOKS 20

typedef struct {
    CORE_HEAD
    PyObject *over; /* the Messages */
    Py_buffer memory;
    struct posted posted;
} Posted;

static Posted *owner_of(struct posted *p)
{
    return (Posted *)((char *)p - offsetof(Posted, posted));
}

static int state_of(const Posted *self)
{
    return __atomic_load_n(&self->posted.state, __ATOMIC_ACQUIRE);
}

/* Gives back the memory of the operations that have ended. The list has a reference to each. */
static void reap(struct messages *m)
{
    for (struct posted *p = messages_finished(m), *next; p != NULL; p = next) {
        next = p->next;
        if (owner_of(p)->memory.obj != NULL)
            PyBuffer_Release(&owner_of(p)->memory);
        Py_DECREF((PyObject *)owner_of(p));
    }
}

static Posted *new_posted(Messages *over, PyObject *memory, int flags)
{
    Posted *self = object_new(over->core->posted_type, REFERENCES(Posted, over));
    if (self == NULL)
        return NULL;
    self->over = Py_NewRef((PyObject *)over);
    self->posted.source = self->posted.to = NOBODY;
    if (memory != Py_None && PyObject_GetBuffer(memory, &self->memory, flags) < 0)
        Py_CLEAR(self);
    return self;
}

static void posted_dealloc(PyObject *object)
{
    Posted *self = (Posted *)object;
    PyObject_GC_UnTrack(object);
    if (self->memory.obj != NULL)
        PyBuffer_Release(&self->memory);
    free(self->posted.message);
    object_free(object);
}

/* The bytes of a message for which no memory was passed. */
static int posted_buffer(PyObject *object, Py_buffer *view, int flags)
{
    const struct posted *p = &((Posted *)object)->posted;
    if (state_of((Posted *)object) == OVER && p->message != NULL)
        return PyBuffer_FillInfo(view, object, p->message->bytes, (Py_ssize_t)p->nbytes, 0, flags);
    PyErr_SetString(PyExc_BufferError, "Posted: there is no message");
    return -1;
}

enum { DONE_FIELD, WHOLE_FIELD, STATE_FIELD, DATA_FIELD, DAMAGE_FIELD };

static PyObject *posted_get(PyObject *object, void *closure)
{
    const struct posted *p = &((Posted *)object)->posted;
    int state = state_of((Posted *)object);
    switch ((intptr_t)closure) {
    case DONE_FIELD:
        return PyBool_FromLong(state > MATCHED);
    case WHOLE_FIELD:
        return PyBool_FromLong(state == OVER && (p->to >= 0 || p->bytes == NULL || p->nbytes <= p->room));
    case STATE_FIELD:
        return PyLong_FromLong(state);
    case DATA_FIELD:
        return state == OVER && p->message ? PyMemoryView_FromObject(object) : Py_NewRef(Py_None);
    default:
        return state == FAILED_STATE ? PyUnicode_FromString(p->damage) : Py_NewRef(Py_None);
    }
}

#define FIELD(name, number) {name, posted_get, NULL, NULL, (void *)(intptr_t)(number)}
static PyGetSetDef posted_fields[] = {
    FIELD("done", DONE_FIELD), FIELD("whole", WHOLE_FIELD), FIELD("state", STATE_FIELD),
    FIELD("data", DATA_FIELD), FIELD("damage", DAMAGE_FIELD), {NULL, NULL, NULL, NULL, NULL}};
#undef FIELD

#define MEMBER(name, type) {#name, type, offsetof(Posted, posted.name), READONLY, NULL}
static PyMemberDef posted_members[] = {
    MEMBER(source, T_INT), MEMBER(to, T_INT), MEMBER(tag, T_LONGLONG), MEMBER(nbytes, T_PYSSIZET),
    MEMBER(room, T_PYSSIZET), {NULL, 0, 0, 0, NULL}};
#undef MEMBER

static PyType_Slot posted_slots[] = {
    {Py_tp_dealloc, posted_dealloc}, {Py_tp_traverse, object_traverse}, {Py_tp_getset, posted_fields},
    {Py_tp_members, posted_members}, {Py_bf_getbuffer, posted_buffer},
    {Py_tp_doc, "A posted send or receive; see collective.contract.mail."}, {0, NULL}};

static PyType_Spec posted_spec = {
    "collective.native._core.Posted", sizeof(Posted), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, posted_slots};

/* -- methods of Messages ----------------------------------------------------------------------- */

/* Begins a call, which must end with leave(). Returns NULL with an exception. */
static Messages *enter(PyObject *object, Py_ssize_t count, Py_ssize_t expected)
{
    Messages *self = (Messages *)object;
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
        return NULL;
    }
    if (self->messages.carrier == &streams)
        __atomic_add_fetch(&self->users, 1, __ATOMIC_SEQ_CST);
    return self;
}

static PyObject *leave(Messages *self, PyObject *result)
{
    PyObject *error = PyErr_Occurred() ? error_take() : NULL;
    reap(&self->messages);
    if (self->messages.carrier == &streams)
        streams_leave(self);
    if (error != NULL) {
        error_raise(error);
        Py_DECREF(error);
    }
    return result;
}

/* Whether nothing more may be posted: the communicator is broken or closed. */
static int is_shut(const Messages *self)
{
    return __atomic_load_n((uint64_t *)self->segment.buf, __ATOMIC_ACQUIRE) != 0
           || __atomic_load_n(&self->shut, __ATOMIC_RELAXED);
}

static int read_rank(const Messages *self, PyObject *object, int least, int *rank)
{
    long number = PyLong_AsLong(object);
    if (!PyErr_Occurred() && (number < least || number >= self->messages.size))
        PyErr_Format(PyExc_ValueError, "rank %ld of %d", number, self->messages.size);
    *rank = (int)number;
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *send(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Messages *over = enter(object, count, 3);
    if (over == NULL)
        return NULL;
    Posted *self = is_shut(over) ? NULL : new_posted(over, args[0], PyBUF_C_CONTIGUOUS);
    if (self == NULL)
        return leave(over, PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented));
    struct posted *p = &self->posted;
    p->tag = PyLong_AsLongLong(args[2]);
    p->nbytes = (size_t)self->memory.len;
    int failed = read_rank(over, args[1], 0, &p->to) < 0 || PyErr_Occurred();
    Py_INCREF((PyObject *)self);
    if (!failed && post_send(&over->messages, p, self->memory.buf, p->nbytes) < 0) {
        PyErr_NoMemory();
        failed = 1;
    }
    if (failed) {
        Py_DECREF((PyObject *)self);
        Py_CLEAR(self);
    }
    return leave(over, (PyObject *)self);
}

/* Reads source, tag and mask of a receive or a search. */
static int read_match(Messages *over, struct posted *p, PyObject *const *args)
{
    p->tag = PyLong_AsLongLong(args[1]);
    p->mask = PyLong_AsLongLong(args[2]);
    return PyErr_Occurred() ? -1 : read_rank(over, args[0], -1, &p->source);
}

/* Whether the operations of a list are over: all of them, or any one. */
static int are_over(PyObject *const *items, Py_ssize_t count, int any)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if ((state_of((Posted *)items[i]) > MATCHED) == any)
            return any;
    return !any;
}

/* Makes progress until the operations are over or nothing has moved for a while, without the lock. */
static void go_on(Messages *over, PyObject *const *items, Py_ssize_t count, int any)
{
    struct messages *m = &over->messages;
    int64_t start = now_ns(), moved = start, now = start;
    for (int idle = 0; !are_over(items, count, any); idle++) {
        if (messages_progress(m))
            idle = -1;
        else if (idle < over->looks)
            continue;
        now = now_ns();
        moved = idle < 0 ? now : moved;
        if (now - moved > over->idle_ns || now - start > LONGEST_NS)
            break;
        if (idle >= 0)
            sched_yield();
    }
}

/* Makes progress, and goes on for as long as something moves if seconds is not negative; sleeps for so
   long before it, over streams. */
static void advance(Messages *over, PyObject *const *items, Py_ssize_t count, int any, double seconds)
{
    struct messages *m = &over->messages;
    int looks = smaller((size_t)over->looks, LOCKED_LOOKS);
    do
        messages_progress(m);
    while (--looks > 0 && !are_over(items, count, any));
    if (seconds < 0 || are_over(items, count, any))
        return;
    PyThreadState *unlocked = PyEval_SaveThread();
    if (seconds > 0 && m->carrier == &streams) {
        struct exchange nothing;
        exchange_begin(&nothing, m);
        exchange_sleep(&nothing, seconds);
    }
    go_on(over, items, count, any);
    PyEval_RestoreThread(unlocked);
}

static PyObject *receive(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Messages *over = enter(object, count, 5);
    if (over == NULL)
        return NULL;
    Posted *self = is_shut(over) ? NULL : new_posted(over, args[0], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE);
    if (self == NULL)
        return leave(over, PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented));
    struct posted *p = &self->posted;
    if (read_match(over, p, args + 1) < 0) {
        Py_DECREF((PyObject *)self);
        return leave(over, NULL);
    }
    p->room = (size_t)self->memory.len;
    if (args[0] != Py_None)
        p->bytes = p->room ? self->memory.buf : "";
    Py_INCREF((PyObject *)self);
    post_receive(&over->messages, p);
    PyObject *item = (PyObject *)self;
    if (args[4] == Py_True && !are_over(&item, 1, 0))
        advance(over, &item, 1, 0, 0);
    return leave(over, item);
}

static PyObject *find(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Messages *over = enter(object, count, 4);
    Posted *self = over != NULL ? new_posted(over, Py_None, 0) : NULL;
    if (over == NULL)
        return NULL;
    int failed = self == NULL || read_match(over, &self->posted, args) < 0;
    if (!failed && post_find(&over->messages, &self->posted, args[3] == Py_True))
        return leave(over, (PyObject *)self);
    Py_XDECREF((PyObject *)self);
    return leave(over, failed ? NULL : Py_NewRef(Py_None));
}

static PyObject *cancel(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Messages *over = enter(object, count, 1);
    if (over == NULL)
        return NULL;
    if (Py_TYPE(args[0]) != over->core->posted_type || ((Posted *)args[0])->over != object)
        return leave(over, PyErr_Format(PyExc_TypeError, "cancel: not a receive of these messages"));
    return leave(over, PyBool_FromLong(post_cancel(&over->messages, &((Posted *)args[0])->posted)));
}

static PyObject *step(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Messages *over = enter(object, count, 3);
    if (over == NULL)
        return NULL;
    PyObject *items[16], **all = items;
    Py_ssize_t number = PyTuple_CheckExact(args[0]) ? PyTuple_Size(args[0]) : -1;
    double seconds = PyFloat_AsDouble(args[2]);
    int any = args[1] == Py_True;
    if (number > 16)
        all = malloc((size_t)number * sizeof *all);
    for (Py_ssize_t i = 0; i < number && all != NULL; i++) {
        all[i] = PyTuple_GetItem(args[0], i); /* borrowed: the caller has the tuple */
        if (Py_TYPE(all[i]) != over->core->posted_type)
            number = -1;
    }
    PyObject *result = NULL;
    if (number >= 0 && all != NULL && !PyErr_Occurred()) {
        advance(over, all, number, any, seconds);
        result = PyBool_FromLong(are_over(all, number, any));
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "step: expected a tuple of posted operations");
    }
    if (all != items)
        free(all);
    return leave(over, result);
}

static PyObject *end(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Messages *over = enter(object, count, 1);
    if (over == NULL)
        return NULL;
    struct messages *m = &over->messages;
    int queued = __atomic_load_n(&m->queued, __ATOMIC_RELAXED), receiving = 0;
    for (int rank = 0; rank < m->size; rank++)
        receiving |= post_wants(m, rank);
    if (args[0] != Py_False)
        __atomic_store_n(&over->shut, 1, __ATOMIC_RELAXED);
    if (args[0] == Py_True)
        post_close(m);
    return leave(over, Py_BuildValue("(ii)", queued, receiving));
}

#define METHOD(name, text) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}
PyMethodDef posted_methods[] = {
    METHOD(send, "send(data, to, tag, /)\n--\n\nPost a send."),
    METHOD(receive, "receive(memory, source, tag, mask, wait, /)\n--\n\n"
           "Post a receive into memory; if that is None, of any length. If wait is true, wait for a\n"
           "moment."),
    METHOD(find, "find(source, tag, mask, take, /)\n--\n\n"
           "Return a message that no receive has got, or None; take it out if take is true."),
    METHOD(cancel, "cancel(posted, /)\n--\n\n"
           "Withdraw a receive; return whether no message has been found for it."),
    METHOD(step, "step(items, any, seconds, /)\n--\n\n"
           "Make progress, and return whether all items are over, or any. If seconds is not\n"
           "negative, do so as long as something moves; over streams sleep before it."),
    METHOD(end, "end(at_once, /)\n--\n\n"
           "Return the number of sends that have not left, and whether a receive is in flight. If\n"
           "at_once is true, end all operations; if it is None, only let nobody post any more."),
    {NULL, NULL, 0, NULL}};

int add_posted(PyObject *module, struct core *core)
{
    return type_add(module, &posted_spec, &core->posted_type);
}
