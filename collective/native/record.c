/* The type Ring: the last calls of a communicator, with the place in the program that made each;
   collective/contract/recorder.py reads it. And the type InThread, for request.py. */

#include "python.h"

#include <limits.h>
#include <structmember.h>

#define RECORDS 512 /* a power of two */

/* The objects in the list for each call: the request, and the place of the call. The place is a
   code object, or a string that describes the place completely. The arrays beside the list hold the
   instruction in that code, and whether the entry is only the comparison of the ranks' calls. */
enum { REQUEST, SITE, OBJECTS };

typedef struct {
    CORE_HEAD
    PyObject *libraries; /* list of the prefixes of the names of files that are no program's */
    PyObject *list;
    /* The calls that threads without the interpreter lock make. They cannot replace references in
       the list. So each of their calls has a number here, for ever: its index in sources, plus
       one. The array source holds these numbers; a 0 there stands for the objects in the list. */
    PyObject *sources; /* list of tuples (request, place) */
    PyObject *numbers; /* dict from these tuples to indices */
    Py_ssize_t started, finished; /* one thread writes them; others may read them at any time */
    int source[RECORDS];
    Py_ssize_t writing; /* number of the last call that such a thread has begun to record */
    /* Number of calls until one whose results the ranks compare, and of calls from one such call to
       the next one; see communicator/results.py. */
    Py_ssize_t left, interval;
    double began[RECORDS], ended[RECORDS];
    int instruction[RECORDS];
    char compares[RECORDS];
} Ring;

/* CPython exports this function from 3.11 on, but the limited API does not have it. If a later
   version drops it, its weak symbol is NULL. */
extern int PyFrame_GetLasti(PyFrameObject *frame) __attribute__((weak));

/* Returns a borrowed reference, or NULL. */
static PyObject *site_in_thread(const struct core *core)
{
    return PyThread_tss_get(core->site);
}

static int is_in_library(const Ring *ring, PyObject *code)
{
    PyObject *file = PyObject_GetAttr(code, ring->core->names[NAME_FILENAME]);
    int found = 0;
    for (Py_ssize_t i = 0; file && !found && i < PyList_Size(ring->libraries); i++) {
        /* The reference is borrowed. The list only grows, so it keeps the prefix. */
        PyObject *prefix = PyList_GetItem(ring->libraries, i);
        found = PyUnicode_Check(prefix) &&
                PyUnicode_Tailmatch(file, prefix, 0, PY_SSIZE_T_MAX, -1) == 1;
    }
    Py_XDECREF(file);
    return found;
}

static int instruction_of(const struct core *core, PyObject *frame)
{
    if (PyFrame_GetLasti != NULL)
        return PyFrame_GetLasti((PyFrameObject *)frame);
    PyObject *number = PyObject_GetAttr(frame, core->names[NAME_INSTRUCTION]);
    long at = number != NULL ? PyLong_AsLong(number) : 0;
    Py_XDECREF(number);
    return (int)at;
}

/* Whether the last recorded call was made from this code. */
static int is_last(const Ring *ring, PyObject *code)
{
    int same;
    Py_BEGIN_CRITICAL_SECTION(ring);
    same = code == PyList_GetItem(ring->list, ring->started % RECORDS * OBJECTS + SITE);
    Py_END_CRITICAL_SECTION();
    return same;
}

/* Finds the innermost frame that belongs to the program: returns its code, and sets the
   instruction. The line number is computed only when the record is read. Returns a new reference,
   to "" if there is no such frame. */
static PyObject *find_site(const Ring *ring, int *instruction)
{
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *code = NULL;
    Py_XINCREF(frame);
    while (frame != NULL && frame != Py_None) {
        Py_XDECREF(code);
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        /* A loop in the program makes its calls from the same code each time. So the last code is
           compared first, which is cheaper than a look at the file name. The list is read each time:
           is_in_library() may let the collector run a finalizer that replaces the last code. */
        if (is_last(ring, code) || !is_in_library(ring, code))
            break;
        PyObject *above = PyObject_GetAttr(frame, ring->core->names[NAME_BACK]);
        Py_DECREF(frame);
        frame = above;
    }
    *instruction = frame && frame != Py_None ? instruction_of(ring->core, frame) : 0;
    Py_XDECREF(frame);
    if (PyErr_Occurred())
        PyErr_Clear();
    return code != NULL ? code : PyUnicode_FromString("");
}

void record_begin(PyObject *object, PyObject *request, int compares)
{
    Ring *ring = (Ring *)object;
    int instruction = 0;
    PyObject *site = Py_XNewRef(site_in_thread(ring->core));
    if (site == NULL)
        site = find_site(ring, &instruction);
    Py_BEGIN_CRITICAL_SECTION(object);
    Py_ssize_t at = (ring->started + 1) % RECORDS;
    ring->instruction[at] = instruction;
    ring->compares[at] = (char)compares;
    ring->source[at] = 0;
    PyList_SetItem(ring->list, at * OBJECTS + REQUEST, Py_NewRef(request));
    PyList_SetItem(ring->list, at * OBJECTS + SITE, site);
    ring->began[at] = 1e-9 * (double)now_ns();
    __atomic_store_n(&ring->started, ring->started + 1, __ATOMIC_RELEASE);
    Py_END_CRITICAL_SECTION();
}

void record_end(PyObject *object)
{
    Ring *ring = (Ring *)object;
    Py_BEGIN_CRITICAL_SECTION(object);
    ring->ended[ring->started % RECORDS] = 1e-9 * (double)now_ns();
    __atomic_store_n(&ring->finished, ring->started, __ATOMIC_RELAXED);
    Py_END_CRITICAL_SECTION();
}

int record_is_due(PyObject *object)
{
    return __atomic_load_n(&((Ring *)object)->left, __ATOMIC_RELAXED) <= 0;
}

void record_count(PyObject *object)
{
    Ring *ring = (Ring *)object;
    Py_ssize_t left = ring->left > 0 ? ring->left : ring->interval;
    __atomic_store_n(&ring->left, left - 1, __ATOMIC_RELAXED);
}

Py_ssize_t record_source(PyObject *object, PyObject *request, PyObject *site)
{
    Ring *ring = (Ring *)object;
    PyObject *key = PyTuple_Pack(2, request, site), *number = NULL;
    Py_ssize_t source = -1;
    if (key == NULL)
        return -1;
    number = PyDict_GetItemWithError(ring->numbers, key);
    if (number != NULL) {
        source = PyLong_AsSsize_t(number);
    } else if (!PyErr_Occurred()) {
        Py_ssize_t next = PyList_Size(ring->sources);
        number = PyLong_FromSsize_t(next);
        if (number != NULL && next < INT_MAX && PyList_Append(ring->sources, key) == 0
            && PyDict_SetItem(ring->numbers, key, number) == 0)
            source = next;
        Py_XDECREF(number);
    }
    Py_DECREF(key);
    return source;
}

void record_unlocked(PyObject *object, Py_ssize_t source)
{
    Ring *ring = (Ring *)object;
    Py_ssize_t number = ring->started + 1, at = number % RECORDS;
    /* A reader may be reading the record that this one replaces; see ring_kept(). */
    __atomic_store_n(&ring->writing, number, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    ring->instruction[at] = 0;
    ring->compares[at] = 0;
    ring->source[at] = (int)source + 1;
    ring->began[at] = 1e-9 * (double)now_ns();
    __atomic_store_n(&ring->started, number, __ATOMIC_RELEASE);
}

void record_unlocked_end(PyObject *object)
{
    Ring *ring = (Ring *)object;
    ring->ended[ring->started % RECORDS] = 1e-9 * (double)now_ns();
    __atomic_store_n(&ring->finished, ring->started, __ATOMIC_RELEASE);
}

static PyObject *ring_begin(PyObject *object, PyObject *args)
{
    PyObject *request;
    int compares = 0;
    if (!PyArg_ParseTuple(args, "O|p:begin", &request, &compares))
        return NULL;
    record_begin(object, request, compares);
    Py_RETURN_NONE;
}

static PyObject *ring_end(PyObject *object, PyObject *none)
{
    (void)none;
    record_end(object);
    Py_RETURN_NONE;
}

static PyObject *ring_kept(PyObject *object, PyObject *number)
{
    Ring *ring = (Ring *)object;
    PyObject *record;
    Py_ssize_t n = PyLong_AsSsize_t(number), at = n % RECORDS;
    if (n == -1 && PyErr_Occurred())
        return NULL;
    Py_BEGIN_CRITICAL_SECTION(object);
    Py_ssize_t started = __atomic_load_n(&ring->started, __ATOMIC_ACQUIRE);
    if (n > started || n <= started - RECORDS || n < 1) {
        record = Py_NewRef(Py_None);
    } else {
        PyObject *source = ring->source[at] ? PyList_GetItem(ring->sources, ring->source[at] - 1)
                                            : NULL;
        PyObject *request = source ? PyTuple_GetItem(source, 0)
                                   : PyList_GetItem(ring->list, at * OBJECTS + REQUEST);
        PyObject *site = source ? PyTuple_GetItem(source, 1)
                                : PyList_GetItem(ring->list, at * OBJECTS + SITE);
        record = Py_BuildValue("OOOidd", request, ring->compares[at] ? Py_True : Py_False, site,
                               ring->instruction[at], ring->began[at], ring->ended[at]);
    }
    Py_END_CRITICAL_SECTION();
    /* A thread without the interpreter lock may have replaced the record meanwhile. */
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (record != NULL && __atomic_load_n(&ring->writing, __ATOMIC_RELAXED) >= n + RECORDS) {
        Py_DECREF(record);
        record = Py_NewRef(Py_None);
    }
    return record;
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *libraries;
    if (refuse_keywords("Ring", keywords) < 0 ||
        !PyArg_ParseTuple(args, "O!:Ring", &PyList_Type, &libraries))
        return NULL;
    Ring *ring = object_new(type, REFERENCES(Ring, numbers));
    if (ring == NULL)
        return NULL;
    ring->libraries = Py_NewRef(libraries);
    ring->left = ring->interval = PY_SSIZE_T_MAX;
    PyObject *none = Py_BuildValue("[O]", Py_None);
    ring->list = none ? PySequence_Repeat(none, RECORDS * OBJECTS) : NULL;
    Py_XDECREF(none);
    ring->sources = PyList_New(0);
    ring->numbers = PyDict_New();
    if (ring->list == NULL || ring->sources == NULL || ring->numbers == NULL)
        Py_CLEAR(ring);
    return (PyObject *)ring;
}

static PyMemberDef ring_members[] = {
    {"started", T_PYSSIZET, offsetof(Ring, started), READONLY, NULL},
    {"finished", T_PYSSIZET, offsetof(Ring, finished), READONLY, NULL},
    {"left", T_PYSSIZET, offsetof(Ring, left), 0, NULL},
    {"interval", T_PYSSIZET, offsetof(Ring, interval), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef ring_methods[] = {
    {"begin", ring_begin, METH_VARARGS,
     "begin(request, compares=False, /)\n--\n\n"
     "Record that a call begins, and the place in the program that makes it."},
    {"end", ring_end, METH_NOARGS, "end()\n--\n\nRecord that the last call is over."},
    {"kept", ring_kept, METH_O, "kept(number, /)\n--\n\nReturn the record of a call, or None."},
    {NULL, NULL, 0, NULL}};

/* Only the lists can be part of a reference cycle, and Python breaks the cycle at the lists. */
static PyType_Slot ring_slots[] = {
    {Py_tp_new, ring_new},           {Py_tp_dealloc, object_dealloc},
    {Py_tp_methods, ring_methods},   {Py_tp_traverse, object_traverse},
    {Py_tp_members, ring_members},   {0, NULL}};

static PyType_Spec ring_spec = {"collective.native._core.Ring", sizeof(Ring), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, ring_slots};

PyObject *record_exchange_site(const struct core *core, PyObject *site)
{
    PyObject *old = site_in_thread(core);
    PyThread_tss_set(core->site, site);
    return old;
}

static PyObject *get_site(PyObject *object, void *none)
{
    PyObject *site = site_in_thread(PyType_GetModuleState(Py_TYPE(object)));
    (void)none;
    return Py_NewRef(site ? site : Py_None);
}

static int set_site(PyObject *object, PyObject *site, void *none)
{
    const struct core *core = PyType_GetModuleState(Py_TYPE(object));
    PyObject *old = site_in_thread(core), *new = site == Py_None ? NULL : Py_XNewRef(site);
    (void)none;
    if (PyThread_tss_set(core->site, new) != 0) {
        Py_XDECREF(new);
        PyErr_NoMemory();
        return -1;
    }
    Py_XDECREF(old);
    return 0;
}

static PyGetSetDef in_thread_attributes[] = {
    {"site", get_site, set_site, "Place of this thread's calls, or None: the code that makes them.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot in_thread_slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_getset, in_thread_attributes}, {0, NULL}};

static PyType_Spec in_thread_spec = {
    "collective.native._core.InThread", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, in_thread_slots};

int add_record(PyObject *module, struct core *core)
{
    core->site = PyThread_tss_alloc();
    if (core->site == NULL || PyThread_tss_create(core->site) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    return type_add(module, &ring_spec, &core->ring_type) < 0
                   || type_add(module, &in_thread_spec, NULL) < 0 ? -1 : 0;
}

void record_free(struct core *core)
{
    if (core->site != NULL)
        PyThread_tss_free(core->site);
}
