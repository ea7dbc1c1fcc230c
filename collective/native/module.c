/* The module collective.native._core: its functions for folds and naps, and its initialisation. */

#include "python.h"
#include "copying.h"
#include "sleeping.h"
#include "sums.h"

#include <string.h>

static const char *const op_names[OPS] = {
    "sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor"};

/* For each type, the buffer protocol's letters for its elements. bfloat16 is stored as uint16. */
static const char *const formats[DTYPES] = {
    "?", "b", "h", "i", "lq", "B", "H", "I", "LQ", "e", "f", "d", "F", "D", "H"};

/* A fold in C. The Python function for it has as self a pair: the reference function in Python, for
   arguments that are not plain, and the bytes of this struct. */
struct fold {
    fold_function *function;
    enum dtype dtype;
};

int is_plain(const Py_buffer *view, enum dtype dtype)
{
    const char *format = view->format ? view->format : "B";
    if (*format == 'Z')
        format = format[1] == 'f' ? "F" : format[1] == 'd' ? "D" : "";
    return format[0] != 0 && format[1] == 0 && strchr(formats[dtype], format[0]) != NULL
           && (uintptr_t)view->buf % (item_bytes[dtype] > 8 ? 8 : item_bytes[dtype]) == 0;
}

/* Whether two buffers are the same memory, or do not overlap at all. */
static int is_apart(const Py_buffer *one, const Py_buffer *other)
{
    const char *a = one->buf, *b = other->buf;
    return (a == b && one->len == other->len) || a + one->len <= b || b + other->len <= a;
}

fold_function *fold_of(const char *op, int dtype, int level)
{
    for (int i = 0; i < OPS; i++)
        if (strcmp(op_names[i], op) == 0)
            return dtype >= 0 && dtype < DTYPES ? find_fold(level, i, dtype) : NULL;
    return NULL;
}

/* Folds plain arrays. Returns 0 for any other arguments, before it has touched them. */
static int fold_plain(const struct fold *fold, PyObject *const *arrays)
{
    Py_buffer views[3];
    int taken = 0, plain = 1;
    while (taken < 3 && plain) {
        int flags = PyBUF_ND | PyBUF_FORMAT | (taken == 2 ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(arrays[taken], &views[taken], flags) < 0) {
            PyErr_Clear();
            plain = 0;
        } else {
            plain = is_plain(&views[taken], fold->dtype) && views[taken].len == views[0].len;
            taken++;
        }
    }
    const Py_buffer *out = &views[2];
    plain = plain && is_apart(&views[0], out) && is_apart(&views[1], out);
    if (plain) {
        size_t count = (size_t)out->len / item_bytes[fold->dtype];
        if (out->len < LONG_FOLD_BYTES) {
            fold->function(views[0].buf, views[1].buf, out->buf, count);
        } else {
            Py_BEGIN_ALLOW_THREADS
            fold->function(views[0].buf, views[1].buf, out->buf, count);
            Py_END_ALLOW_THREADS
        }
    }
    while (taken > 0)
        PyBuffer_Release(&views[--taken]);
    return plain;
}

int refuse_keywords(const char *type, PyObject *keywords)
{
    if (keywords == NULL || PyDict_Size(keywords) == 0)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: takes positional arguments only, no keywords", type);
    return -1;
}

PyObject *take_error(void)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

struct object {
    CORE_HEAD
};

void *new_object(PyTypeObject *type)
{
    struct object *object = (void *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (object != NULL) {
        object->core = PyType_GetModuleState(type);
        Py_INCREF(object->core->module);
    }
    return object;
}

int visit_object(PyObject *object, visitproc visit, void *arg)
{
    const struct core *core = ((struct object *)object)->core;
    Py_VISIT(Py_TYPE(object));
    if (core != NULL) /* the collector may run while the object is being allocated */
        Py_VISIT(core->module);
    return 0;
}

void free_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject *module = ((struct object *)object)->core->module;
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF((PyObject *)type);
    Py_DECREF(module);
}

int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    PyTypeObject *added = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (added == NULL || PyModule_AddType(module, added) < 0) {
        Py_XDECREF((PyObject *)added);
        return -1;
    }
    if (type != NULL)
        *type = added;
    else
        Py_DECREF((PyObject *)added);
    return 0;
}

/* This makes no call into Python, which would take as long as the rest of a small call. */
PyObject *deadline_of(const struct core *core, PyObject *limit, int64_t began)
{
    if (PyObject_TypeCheck(limit, core->deadline_type))
        return Py_NewRef(limit);
    double seconds = PyFloat_AsDouble(limit);
    if (seconds == -1.0 && PyErr_Occurred())
        return NULL;
    PyObject *deadline = PyType_GenericNew(core->deadline_type, NULL, NULL);
    PyObject *end = PyFloat_FromDouble(1e-9 * (double)began + seconds);
    if (deadline != NULL
        && (end == NULL || PyObject_SetAttr(deadline, core->name_seconds, limit) < 0
            || PyObject_SetAttr(deadline, core->name_end, end) < 0))
        Py_CLEAR(deadline);
    Py_XDECREF(end);
    return deadline;
}

/* Imports the class Deadline; returns 0, or -1 with an exception. */
static int find_deadline(struct core *core)
{
    PyObject *module = PyImport_ImportModule("collective.deadline");
    PyObject *type = module ? PyObject_GetAttrString(module, "Deadline") : NULL;
    Py_XDECREF(module);
    core->deadline_type = (PyTypeObject *)type;
    core->name_seconds = PyUnicode_InternFromString("seconds");
    core->name_end = PyUnicode_InternFromString("_end");
    return type != NULL && core->name_seconds != NULL && core->name_end != NULL ? 0 : -1;
}

/* fold(a, b, out=c) */
static PyObject *fold_call(PyObject *self, PyObject *const *args, Py_ssize_t count,
                           PyObject *keywords)
{
    struct fold fold;
    memcpy(&fold, PyBytes_AsString(PyTuple_GetItem(self, 1)), sizeof fold);
    Py_ssize_t named = keywords == NULL ? 0 : PyTuple_Size(keywords);
    /* If the keyword is not out, the reference refuses the call. */
    if (count == 2 && named == 1
        && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), "out") == 0
        && fold_plain(&fold, args))
        Py_RETURN_NONE;
    return PyObject_Vectorcall(PyTuple_GetItem(self, 0), args, (size_t)count, keywords);
}

static PyMethodDef fold_method = {
    "fold", (PyCFunction)(void (*)(void))fold_call, METH_FASTCALL | METH_KEYWORDS,
    "fold(a, b, /, *, out)\n--\n\nSet out to a op b, elementwise; out may be a or b."};

/* Returns the word that says whether a rank naps, or NULL with an exception. */
static uint32_t *sleeper_at(const Py_buffer *segment, Py_ssize_t at)
{
    if (at > SLEEPERS_AT && at % 8 == 0 && at <= segment->len - 8)
        return (uint32_t *)((char *)segment->buf + at);
    PyErr_SetString(PyExc_ValueError, "nap, wake: no rank's word is at this offset of the segment");
    return NULL;
}

static PyObject *make_fold(PyObject *module, PyObject *args)
{
    const char *name;
    int dtype, level = fold_levels() - 1;
    PyObject *reference;
    (void)module;
    if (!PyArg_ParseTuple(args, "siO|i:make_fold", &name, &dtype, &reference, &level))
        return NULL;
    if (level < 0 || level >= fold_levels()) {
        PyErr_SetString(PyExc_ValueError, "make_fold: the level must be an index into LEVELS");
        return NULL;
    }
    struct fold fold = {fold_of(name, dtype, level), dtype};
    if (fold.function == NULL)
        return Py_NewRef(reference);
    PyObject *self = Py_BuildValue("(Oy#)", reference, &fold, (Py_ssize_t)sizeof fold);
    PyObject *function = self == NULL ? NULL : PyCFunction_New(&fold_method, self);
    Py_XDECREF(self);
    return function;
}

/* nap(segment, asleep, seconds, ready) */
static PyObject *nap(PyObject *module, PyObject *args)
{
    Py_buffer segment;
    Py_ssize_t at;
    double seconds;
    PyObject *ready;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*ndO:nap", &segment, &at, &seconds, &ready))
        return NULL;
    uint32_t *asleep = sleeper_at(&segment, at), woken = 0;
    uint32_t *sleepers = (uint32_t *)((char *)segment.buf + SLEEPERS_AT);
    PyObject *there = NULL;
    if (asleep != NULL) {
        /* Announce the nap first, then call ready() once more. A peer that acts between an earlier
           look and this announcement would wake nobody, but this last look sees what it did. */
        __atomic_store_n(asleep, 1, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
        there = PyObject_CallFunctionObjArgs(ready, NULL);
        int is_there = there == NULL ? -1 : PyObject_IsTrue(there);
        if (is_there < 0)
            Py_CLEAR(there);
        if (is_there == 0) {
            PyThreadState *state = PyEval_SaveThread();
            sleep_until_woken(asleep, seconds);
            PyEval_RestoreThread(state);
        }
        woken = __atomic_exchange_n(asleep, 0, __ATOMIC_SEQ_CST) == 0;
        __atomic_sub_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
    }
    PyBuffer_Release(&segment);
    if (there == NULL)
        return NULL;
    Py_DECREF(there);
    return PyBool_FromLong(woken);
}

/* wake(segment, asleep) */
static PyObject *wake_all(PyObject *module, PyObject *args)
{
    Py_buffer segment;
    PyObject *words;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*O:wake", &segment, &words))
        return NULL;
    for (Py_ssize_t i = 0; i < PySequence_Size(words) && !PyErr_Occurred(); i++) {
        PyObject *number = PySequence_GetItem(words, i);
        Py_ssize_t at = number == NULL ? -1 : PyLong_AsSsize_t(number);
        Py_XDECREF(number);
        uint32_t *asleep = PyErr_Occurred() ? NULL : sleeper_at(&segment, at);
        if (asleep != NULL)
            wake(asleep);
    }
    PyBuffer_Release(&segment);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* sums(array) */
static PyObject *sums_of(PyObject *module, PyObject *array)
{
    struct sums sums = {0, 0, 0};
    Py_buffer view;
    (void)module;
    if (PyObject_GetBuffer(array, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (view.len < LONG_FOLD_BYTES) {
        add_to_sums(&sums, 0, view.buf, (size_t)view.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        add_to_sums(&sums, 0, view.buf, (size_t)view.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return Py_BuildValue("KK", (unsigned long long)sums.total, (unsigned long long)sums.placed);
}

/* A fact of the machine, the same for all interpreters of the process; until Python has asked the
   machine, a usual value. */
size_t cached_bytes = (size_t)32 << 20;

/* set_cached(nbytes) */
static PyObject *set_cached(PyObject *module, PyObject *number)
{
    size_t nbytes = PyLong_AsSize_t(number);
    (void)module;
    if (nbytes == (size_t)-1 && PyErr_Occurred())
        return NULL;
    __atomic_store_n(&cached_bytes, nbytes, __ATOMIC_RELAXED);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_cached", set_cached, METH_O,
     "set_cached(nbytes, /)\n--\n\n"
     "Set the bytes of a call's arrays, of all ranks together, that the last cache holds."},
    {"nap", nap, METH_VARARGS,
     "nap(segment, asleep, seconds, ready, /)\n--\n\n"
     "Sleep until woken, unless ready(); return whether this rank was woken."},
    {"wake", wake_all, METH_VARARGS,
     "wake(segment, asleep, /)\n--\n\nWake the ranks that nap, by the offsets of their words."},
    {"sums", sums_of, METH_O,
     "sums(array, /)\n--\n\nReturn the two sums of an array's bytes; see sums.h."},
    {"make_schedule", make_schedule, METH_VARARGS,
     "make_schedule(op, dtype, inputs, scratch, results, steps, /)\n--\n\n"
     "Return a function that folds arrays along steps, or None if C has no such fold."},
    {"make_fold", make_fold, METH_VARARGS,
     "make_fold(op, dtype, reference, level=..., /)\n--\n\n"
     "Return the fold in C, or the reference if C has none. Only tests pass the level."},
    {NULL, NULL, 0, NULL}};

static int fill_module(PyObject *module)
{
    struct core *core = PyModule_GetState(module);
    core->module = module;
    PyObject *all = Py_BuildValue("(sss)", "baseline", "avx2", "avx512");
    PyObject *here = all == NULL ? NULL : PyTuple_GetSlice(all, 0, fold_levels());
    int failed = here == NULL || PyModule_AddObjectRef(module, "LEVELS", here) < 0
                 || PyModule_AddIntConstant(module, "PROTOCOL", PROTOCOL) < 0
                 || find_deadline(core) < 0 || add_plans(module, core) < 0
                 || add_views(module, core) < 0 || add_messages(module, core) < 0
                 || add_ring(module, core) < 0 || add_door(module, core) < 0
                 || add_unlocked(module, core) < 0;
    Py_XDECREF(all);
    Py_XDECREF(here);
    return failed ? -1 : 0;
}

static int traverse_module(PyObject *module, visitproc visit, void *arg)
{
    struct core *core = PyModule_GetState(module);
#define VISIT(type, name) Py_VISIT(core->name);
    CORE_OBJECTS(VISIT)
#undef VISIT
    for (int i = 0; i < ARGUMENTS; i++)
        Py_VISIT(core->arguments[i]);
    for (int i = 0; i < DTYPES; i++)
        Py_VISIT(core->descrs[i]);
    for (int i = 0; i < 2; i++)
        Py_VISIT(core->tensor_types[i]);
    return 0;
}

static void free_module(void *module)
{
    struct core *core = PyModule_GetState(module);
#define CLEAR(type, name) Py_CLEAR(core->name);
    CORE_OBJECTS(CLEAR)
#undef CLEAR
    for (int i = 0; i < ARGUMENTS; i++)
        Py_CLEAR(core->arguments[i]);
    for (int i = 0; i < DTYPES; i++)
        Py_CLEAR(core->descrs[i]);
    for (int i = 0; i < 2; i++)
        Py_CLEAR(core->tensor_types[i]);
    free_ring(core);
}

/* The core keeps all objects in the state of the module, so interpreters share no object, and each
   may have its own lock. Python 3.11 does not know this slot. */
#ifndef Py_mod_multiple_interpreters
#define Py_mod_multiple_interpreters 3
#define Py_MOD_PER_INTERPRETER_GIL_SUPPORTED ((void *)2)
#endif

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill_module},
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#ifdef Py_GIL_DISABLED
    /* docs/decisions/0058-optional-c-extension.md lists the guard of each state that several threads
       reach, and docs/measurements/native.md the runs under the thread sanitizer. */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static PyModuleDef_Slot slots_of_3_11[] = {{Py_mod_exec, fill_module}, {0, NULL}};

#define DEFINITION(its_slots)                                                                      \
    {.m_base = PyModuleDef_HEAD_INIT, .m_name = "_core",                                           \
     .m_doc = "The native core; see collective.native.", .m_size = sizeof(struct core),            \
     .m_methods = functions, .m_slots = its_slots, .m_traverse = traverse_module,                  \
     .m_free = free_module}

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    static struct PyModuleDef definition = DEFINITION(slots);
    static struct PyModuleDef definition_of_3_11 = DEFINITION(slots_of_3_11);
    return PyModuleDef_Init(Py_Version >= 0x030C0000 ? &definition : &definition_of_3_11);
}
