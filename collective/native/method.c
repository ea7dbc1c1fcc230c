/* The type Method, and the base classes of communicators and of their paths; see method.h. */

#include "method.h"

#include <structmember.h>

#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif
#define OFFSET_FLAG ((size_t)1 << (8 * sizeof(size_t) - 1))

static const char *const message_names[MESSAGES] = {"send", "recv", "sendrecv"};

/* Makes the Work of an asynchronous call hold the memory of the arrays until it is over. */
static void hold_until_over(PyObject *work, PyObject *held)
{
    PyObject *done = held ? PyObject_CallMethod(work, "keep", "O", held) : NULL;
    /* The result may be no Work but a call that is made later. Such a call holds the memory
       itself, once it is made. */
    if (done == NULL)
        PyErr_Clear();
    Py_XDECREF(done);
}

/* Replaces the current TypeError by a clearer one, if the arguments do not suit the function. */
static void explain(PyObject *path, PyObject *function)
{
    PyObject *error = error_take();
    PyObject *better = PyObject_CallMethod(path, "explain", "OO", function, error);
    if (better != NULL)
        error_raise(better);
    Py_XDECREF(better);
    Py_XDECREF(error);
}

/* Whether the keyword arguments ask for a Work. */
static int is_asynchronous(const struct core *core, PyObject *const *args, PyObject *names)
{
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_Size(names); i++)
        if (PyTuple_GetItem(names, i) == core->names[ASYNC])
            return args[i] != Py_False;
    return 0;
}

/* Makes a call by the function in Python. The first argument is the communicator. */
static PyObject *call_python(const Method *method, Gate *path, PyObject *const *args,
                             Py_ssize_t count, PyObject *names)
{
    size_t given = (size_t)(count + (names ? PyTuple_Size(names) : 0));
    PyObject *held = NULL;
    for (size_t i = 1; i < given; i++)
        hold_all(method->core, args[i], &held);
    PyObject *done = PyObject_Vectorcall(method->function, args, (size_t)count, names);
    if (done != NULL && is_asynchronous(method->core, args + count, names))
        hold_until_over(done, held);
    Py_XDECREF(held);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_TypeError))
        explain((PyObject *)path, method->function);
    return done;
}

/* Makes a call: in C if the call is plain, otherwise in Python. */
static PyObject *method_vectorcall(PyObject *self, PyObject *const *args, size_t flagged,
                                   PyObject *names)
{
    const Method *method = (Method *)self;
    Py_ssize_t count = (Py_ssize_t)(flagged & ~OFFSET_FLAG);
    PyObject *path = NULL, *done;
    /* Keep the path: while the call waits, other code may drop the communicator. */
    if (count > 0 && PyObject_TypeCheck(args[0], method->core->handle_type))
        path = read_field(args[0], &((Handle *)args[0])->path);
    if (path == NULL || !PyObject_TypeCheck(path, method->core->gate_type)) {
        Py_XDECREF(path);
        return PyObject_Vectorcall(method->function, args, (size_t)count, names); /* raises */
    }
    done = (method->operation ? call_collective : call_message)(method, (Gate *)path, args + 1,
                                                                count - 1, names);
    if (done == Py_NotImplemented) {
        Py_DECREF(done);
        done = call_python(method, (Gate *)path, args, count, names);
    }
    Py_DECREF(path);
    return done;
}

/* Binds the method to the object on which it is looked up, as a function does. */
static PyObject *method_get(PyObject *self, PyObject *object, PyObject *type)
{
    (void)type;
    if (object == NULL || object == Py_None)
        return Py_NewRef(self);
    return PyObject_CallFunctionObjArgs(((Method *)self)->core->bound_method_type, self, object,
                                        NULL);
}

static PyObject *method_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *function, *kind, *name;
    if (refuse_keywords("Method", keywords) < 0
        || !PyArg_ParseTuple(args, "OO:Method", &function, &kind))
        return NULL;
    if (!PyCallable_Check(function))
        return PyErr_Format(PyExc_TypeError, "Method: the first argument must be callable");
    name = PyObject_GetAttrString(function, "__name__");
    if (name == NULL || !PyUnicode_Check(name)) {
        Py_XDECREF(name);
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_TypeError, "Method: __name__ must be a str");
    }
    const struct operation *operation = call_operation(name);
    int message = 0;
    while (message < MESSAGES
           && PyUnicode_CompareWithASCIIString(name, message_names[message]) != 0)
        message++;
    Method *method = NULL;
    if (operation == NULL && message == MESSAGES)
        PyErr_Format(PyExc_ValueError, "Method: C has no operation with the name %U", name);
    else
        method = object_new(type, REFERENCES(Method, dict));
    Py_DECREF(name);
    if (method == NULL)
        return NULL;
    method->vectorcall = method_vectorcall;
    method->function = Py_NewRef(function);
    method->kind = Py_NewRef(kind);
    method->operation = operation;
    method->message = (enum message_kind)message;
    return (PyObject *)method;
}

/* Breaks reference cycles, but keeps the function until the end: a finalizer may still make calls
   through this method. The dict, which refers to the function as well, is cleared. */
static int method_clear(PyObject *object)
{
    Method *method = (Method *)object;
    Py_CLEAR(method->dict);
    Py_CLEAR(method->kind);
    return 0;
}

static PyMemberDef method_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Method, dict), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef method_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot method_slots[] = {
    {Py_tp_new, method_new},           {Py_tp_dealloc, object_dealloc},
    {Py_tp_traverse, object_traverse}, {Py_tp_clear, method_clear},
    {Py_tp_call, PyVectorcall_Call},   {Py_tp_descr_get, method_get},
    {Py_tp_members, method_members},   {Py_tp_getset, method_attributes},
    {0, NULL}};

static PyType_Spec method_spec = {
    "collective.native._core.Method", sizeof(Method), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
        | Py_TPFLAGS_METHOD_DESCRIPTOR, method_slots};

/* -- base classes for Python ----------------------------------------------------------------- */

/* Their subclasses are classes of Python, from which an object cannot find the module's state. So
   they have no CORE_HEAD, and each type knows its number of references. */

static int base_traverse(PyObject *object, PyObject *const *first, Py_ssize_t count,
                         visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    return references_visit(first, count, visit, arg);
}

static void base_dealloc(PyObject *object, inquiry clear)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Defines the functions of a base class, whose `count` references begin at the field `first`. */
#define BASE_CLASS(name, type, first, count)                                                       \
    static int name##_traverse(PyObject *object, visitproc visit, void *arg)                       \
    {                                                                                              \
        return base_traverse(object, &((type *)object)->first, count, visit, arg);                 \
    }                                                                                              \
    static int name##_clear(PyObject *object)                                                      \
    {                                                                                              \
        references_clear(&((type *)object)->first, count);                                         \
        return 0;                                                                                  \
    }                                                                                              \
    static void name##_dealloc(PyObject *object)                                                   \
    {                                                                                              \
        base_dealloc(object, name##_clear);                                                        \
    }                                                                                              \
    static PyType_Slot name##_slots[] = {                                                          \
        {Py_tp_members, name##_members}, {Py_tp_traverse, name##_traverse},                        \
        {Py_tp_clear, name##_clear},     {Py_tp_dealloc, name##_dealloc},                          \
        {0, NULL}};                                                                                \
    static PyType_Spec name##_spec = {                                                             \
        "collective.native._core." #type, sizeof(type), 0,                                         \
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, name##_slots};

#define ATTRIBUTE(name, type, field) {name, T_OBJECT_EX, offsetof(type, field), 0, NULL}
static PyMemberDef gate_members[] = {
    ATTRIBUTE("timeout", Gate, timeout), ATTRIBUTE("door", Gate, doors[OF_ALL]),
    ATTRIBUTE("door_of_pieces", Gate, doors[OF_PIECES]),
    ATTRIBUTE("door_of_scatter", Gate, doors[OF_SCATTER]),
    ATTRIBUTE("exchange", Gate, exchange), ATTRIBUTE("lanes", Gate, lanes),
    {NULL, 0, 0, 0, NULL}};
static PyMemberDef handle_members[] = {ATTRIBUTE("_path", Handle, path), {NULL, 0, 0, 0, NULL}};
BASE_CLASS(gate, Gate, timeout, DOORS + 3)
BASE_CLASS(handle, Handle, path, 1)

int add_methods(PyObject *module, struct core *core)
{
    PyObject *types = PyImport_ImportModule("types");
    core->bound_method_type = types ? PyObject_GetAttrString(types, "MethodType") : NULL;
    Py_XDECREF(types);
    if (core->bound_method_type == NULL
        || (core->zero = PyLong_FromLong(0)) == NULL
        || (core->nobody = PyLong_FromLong(-2)) == NULL
        || (core->any = PyLong_FromLong(-1)) == NULL
        || type_add(module, &gate_spec, &core->gate_type) < 0
        || type_add(module, &handle_spec, &core->handle_type) < 0)
        return -1;
    return type_add(module, &method_spec, NULL);
}
