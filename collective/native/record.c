/* The type Ring: the last calls of a communicator, with the place in the program that made each;
   collective/contract/recorder.py reads it. And the type InThread, for request.py. */

#include "python.h"

#include <structmember.h>

#define RECORDS 512 /* a power of two */

/* The objects in the list for each call: the request, and the place of the call. The place is a
   code object, or a string that describes the place completely. The arrays beside the list hold the
   instruction in that code, and whether the entry is only the comparison of the ranks' calls. */
enum { REQUEST, SITE, OBJECTS };

typedef struct {
    PyObject_HEAD
    Py_ssize_t started, finished;
    PyObject *libraries; /* list of the prefixes of the names of files that are no program's */
    PyObject *list;
    double began[RECORDS], ended[RECORDS];
    int instruction[RECORDS];
    char compares[RECORDS];
} Ring;

/* The limited API does not have this function. CPython exports it from 3.11 on; in 3.10 the weak
   symbol is NULL. */
extern int PyFrame_GetLasti(PyFrameObject *frame) __attribute__((weak));

static PyTypeObject *ring_type;
static PyObject *name_filename, *name_back, *name_instruction;
/* For each thread: the place of its calls in the program, if the thread makes them on behalf of
   other code; request.py sets it by in_thread. It is in C, since to ask a thread-local object of
   Python takes as long as the rest of a record. */
static __thread PyObject *site_in_thread;

static int is_in_library(const Ring *ring, PyObject *code)
{
    PyObject *file = PyObject_GetAttr(code, name_filename);
    int found = 0;
    for (Py_ssize_t i = 0; file && !found && i < PyList_Size(ring->libraries); i++) {
        PyObject *prefix = PyList_GetItem(ring->libraries, i);
        found = PyUnicode_Check(prefix) &&
                PyUnicode_Tailmatch(file, prefix, 0, PY_SSIZE_T_MAX, -1) == 1;
    }
    Py_XDECREF(file);
    return found;
}

static int instruction_of(PyObject *frame)
{
    if (PyFrame_GetLasti != NULL)
        return PyFrame_GetLasti((PyFrameObject *)frame);
    PyObject *number = PyObject_GetAttr(frame, name_instruction);
    long at = number != NULL ? PyLong_AsLong(number) : 0;
    Py_XDECREF(number);
    return (int)at;
}

/* Finds the innermost frame that belongs to the program: returns its code, and sets the
   instruction. The line number is computed only when the record is read. Returns a new reference,
   to "" if there is no such frame. */
static PyObject *find_site(const Ring *ring, PyObject *last, int *instruction)
{
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *code = NULL;
    Py_XINCREF(frame);
    while (frame != NULL && frame != Py_None) {
        Py_XDECREF(code);
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        /* A loop in the program makes its calls from the same code each time. So the last code is
           compared first, which is cheaper than a look at the file name. */
        if (code == last || !is_in_library(ring, code))
            break;
        PyObject *above = PyObject_GetAttr(frame, name_back);
        Py_DECREF(frame);
        frame = above;
    }
    *instruction = frame && frame != Py_None ? instruction_of(frame) : 0;
    Py_XDECREF(frame);
    if (PyErr_Occurred())
        PyErr_Clear();
    return code != NULL ? code : PyUnicode_FromString("");
}

void record_begin(PyObject *object, PyObject *request, int compares)
{
    Ring *ring = (Ring *)object;
    Py_ssize_t last = ring->started % RECORDS * OBJECTS, at = (ring->started + 1) % RECORDS;
    PyObject *site = Py_XNewRef(site_in_thread);
    ring->instruction[at] = 0;
    ring->compares[at] = (char)compares;
    if (site == NULL)
        site = find_site(ring, PyList_GetItem(ring->list, last + SITE), &ring->instruction[at]);
    PyList_SetItem(ring->list, at * OBJECTS + REQUEST, Py_NewRef(request));
    PyList_SetItem(ring->list, at * OBJECTS + SITE, site);
    ring->began[at] = 1e-9 * (double)now_ns();
    ring->started++;
}

void record_end(PyObject *object)
{
    Ring *ring = (Ring *)object;
    ring->ended[ring->started % RECORDS] = 1e-9 * (double)now_ns();
    ring->finished = ring->started;
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
    Py_ssize_t n = PyLong_AsSsize_t(number), at = n % RECORDS;
    if (n > ring->started || n <= ring->started - RECORDS || n < 1)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    return Py_BuildValue("OOOidd", PyList_GetItem(ring->list, at * OBJECTS + REQUEST),
                         ring->compares[at] ? Py_True : Py_False,
                         PyList_GetItem(ring->list, at * OBJECTS + SITE), ring->instruction[at],
                         ring->began[at], ring->ended[at]);
}

static PyObject *ring_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *libraries;
    if (refuse_keywords("Ring", keywords) < 0 ||
        !PyArg_ParseTuple(args, "O!:Ring", &PyList_Type, &libraries))
        return NULL;
    Ring *ring = (Ring *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (ring == NULL)
        return NULL;
    ring->libraries = Py_NewRef(libraries);
    PyObject *none = Py_BuildValue("[O]", Py_None);
    ring->list = none ? PySequence_Repeat(none, RECORDS * OBJECTS) : NULL;
    Py_XDECREF(none);
    if (ring->list == NULL)
        Py_CLEAR(ring);
    return (PyObject *)ring;
}

/* Only the lists can be part of a reference cycle, and Python breaks the cycle at the lists. */
static int ring_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Ring *)object)->list);
    Py_VISIT(((Ring *)object)->libraries);
    return 0;
}

static void ring_dealloc(PyObject *object)
{
    Ring *ring = (Ring *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(ring->list);
    Py_XDECREF(ring->libraries);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMemberDef ring_members[] = {
    {"started", T_PYSSIZET, offsetof(Ring, started), READONLY, NULL},
    {"finished", T_PYSSIZET, offsetof(Ring, finished), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef ring_methods[] = {
    {"begin", ring_begin, METH_VARARGS,
     "begin(request, compares=False, /)\n--\n\n"
     "Record that a call begins, and the place in the program that makes it."},
    {"end", ring_end, METH_NOARGS, "end()\n--\n\nRecord that the last call is over."},
    {"kept", ring_kept, METH_O, "kept(number, /)\n--\n\nReturn the record of a call, or None."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot ring_slots[] = {
    {Py_tp_new, ring_new},           {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, ring_methods},   {Py_tp_traverse, ring_traverse},
    {Py_tp_members, ring_members},   {0, NULL}};

static PyType_Spec ring_spec = {"collective.native._core.Ring", sizeof(Ring), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, ring_slots};

static PyObject *get_site(PyObject *object, void *none)
{
    (void)object, (void)none;
    return Py_NewRef(site_in_thread ? site_in_thread : Py_None);
}

static int set_site(PyObject *object, PyObject *site, void *none)
{
    PyObject *old = site_in_thread;
    (void)object, (void)none;
    site_in_thread = site == Py_None ? NULL : Py_XNewRef(site);
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

int is_ring(PyObject *object)
{
    return Py_TYPE(object) == ring_type;
}

int add_ring(PyObject *module)
{
    name_filename = PyUnicode_InternFromString("co_filename");
    name_back = PyUnicode_InternFromString("f_back");
    name_instruction = PyUnicode_InternFromString("f_lasti");
    ring_type = (PyTypeObject *)PyType_FromSpec(&ring_spec);
    PyObject *in_thread = PyType_FromSpec(&in_thread_spec);
    int failed = ring_type == NULL || in_thread == NULL || PyModule_AddType(module, ring_type) < 0
                 || PyModule_AddType(module, (PyTypeObject *)in_thread) < 0;
    Py_XDECREF(in_thread);
    return failed ? -1 : 0;
}
