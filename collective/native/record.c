/* The type Ring: the last calls of a communicator, and where in the program each was made; see
   collective/contract/recorder.py, which reads it. And InThread, of request.py. */

#include "python.h"

#include <structmember.h>

#define RECORDS 512 /* a power of two */

/* Of each call the list has the request, and the code object or a text that says all of the place.
   Beside it are the instruction in that code, and whether the calls were only compared. */
enum { REQUEST, SITE, OBJECTS };

typedef struct {
    PyObject_HEAD
    Py_ssize_t started, finished;
    PyObject *package; /* what the names of our own files begin with */
    PyObject *list;
    double began[RECORDS], ended[RECORDS];
    int instruction[RECORDS];
    char compares[RECORDS];
} Ring;

/* Not in the limited API; CPython exports it from 3.11 on: NULL in 3.10. */
extern int PyFrame_GetLasti(PyFrameObject *frame) __attribute__((weak));

static PyTypeObject *ring_type;
static PyObject *name_filename, *name_back, *name_instruction;
/* Of each thread, where the calls that it makes come from, if that is not where it makes them: of
   request.py's in_thread. In C, as to ask Python's for it takes as long as the rest of a record. */
static __thread PyObject *site_in_thread;

static int is_ours(const Ring *ring, PyObject *code)
{
    PyObject *file = PyObject_GetAttr(code, name_filename);
    int ours = file && PyUnicode_Tailmatch(file, ring->package, 0, PY_SSIZE_T_MAX, -1) == 1;
    Py_XDECREF(file);
    return ours;
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

/* Finds the innermost frame that is the program's: its code, and what is executed there. The line
   is found out when somebody asks. Returns a new reference, to "" where there is none. */
static PyObject *find_site(const Ring *ring, PyObject *last, int *instruction)
{
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *code = NULL;
    Py_XINCREF(frame);
    while (frame != NULL && frame != Py_None) {
        Py_XDECREF(code);
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        /* A loop of the program's calls again and again. */
        if (code == last || !is_ours(ring, code))
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
    PyObject *package;
    if (refuse_keywords("Ring", keywords) < 0 || !PyArg_ParseTuple(args, "U:Ring", &package))
        return NULL;
    Ring *ring = (Ring *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (ring == NULL)
        return NULL;
    ring->package = Py_NewRef(package);
    PyObject *none = Py_BuildValue("[O]", Py_None);
    ring->list = none ? PySequence_Repeat(none, RECORDS * OBJECTS) : NULL;
    Py_XDECREF(none);
    if (ring->list == NULL)
        Py_CLEAR(ring);
    return (PyObject *)ring;
}

/* The list is what could be part of a circle, and Python breaks it there. */
static int ring_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Ring *)object)->list);
    return 0;
}

static void ring_dealloc(PyObject *object)
{
    Ring *ring = (Ring *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(ring->list);
    Py_XDECREF(ring->package);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMemberDef ring_members[] = {
    {"started", T_PYSSIZET, offsetof(Ring, started), READONLY, NULL},
    {"finished", T_PYSSIZET, offsetof(Ring, finished), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef ring_methods[] = {
    {"begin", ring_begin, METH_VARARGS,
     "begin(request, compares=False, /)\n--\n\nRecord that a call begins, and where."},
    {"end", ring_end, METH_NOARGS, "end()\n--\n\nRecord that it is over."},
    {"kept", ring_kept, METH_O, "kept(number, /)\n--\n\nReturn what is known of a call, or None."},
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
    {"site", get_site, set_site, "Where the calls of this thread come from; None: from where it is.",
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
