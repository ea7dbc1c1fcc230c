/* The module collective.native._core: its functions for naps and checksums, and its initialisation. */

#include "python.h"
#include "copying.h"
#include "sleeping.h"
#include "sums.h"

#include <string.h>

/* Returns the word that says whether a rank naps, or NULL with an exception. */
static uint32_t *sleeper_at(const Py_buffer *segment, Py_ssize_t at)
{
    if (at > SLEEPERS_AT && at % 8 == 0 && at <= segment->len - 8)
        return (uint32_t *)((char *)segment->buf + at);
    PyErr_SetString(PyExc_ValueError, "nap, wake: no rank's word is at this offset of the segment");
    return NULL;
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
    uint32_t *asleep = sleeper_at(&segment, at);
    int woken = 0;
    uint32_t *sleepers = (uint32_t *)((char *)segment.buf + SLEEPERS_AT);
    PyObject *there = NULL;
    if (asleep != NULL) {
        announce_nap(asleep, sleepers);
        there = PyObject_CallFunctionObjArgs(ready, NULL);
        int is_there = there == NULL ? -1 : PyObject_IsTrue(there);
        if (is_there < 0)
            Py_CLEAR(there);
        if (is_there == 0) {
            PyThreadState *state = PyEval_SaveThread();
            sleep_until_woken(asleep, seconds);
            PyEval_RestoreThread(state);
        }
        woken = end_nap(asleep, sleepers);
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
    {NULL, NULL, 0, NULL}};

/* Makes the names, and imports the class Deadline; returns 0, or -1 with an exception. */
static int find_objects(struct core *core)
{
#define TEXT(constant, text) text,
    static const char *const texts[NAMES] = {CORE_NAMES(TEXT)};
#undef TEXT
    for (int i = 0; i < NAMES; i++)
        if ((core->names[i] = PyUnicode_InternFromString(texts[i])) == NULL)
            return -1;
    PyObject *module = PyImport_ImportModule("collective.deadline");
    PyObject *type = module ? PyObject_GetAttrString(module, "Deadline") : NULL;
    Py_XDECREF(module);
    core->deadline_type = (PyTypeObject *)type;
    return type != NULL ? 0 : -1;
}

static int fill_module(PyObject *module)
{
    struct core *core = PyModule_GetState(module);
    core->module = module;
    PyObject *all = Py_BuildValue("(sss)", "baseline", "avx2", "avx512");
    PyObject *here = all == NULL ? NULL : PyTuple_GetSlice(all, 0, fold_levels());
    int failed = here == NULL || PyModule_AddObjectRef(module, "LEVELS", here) < 0
                 || PyModule_AddIntConstant(module, "PROTOCOL", PROTOCOL) < 0
                 || find_objects(core) < 0;
    static int (*const files[])(PyObject *, struct core *) = {
        add_folding, add_shared, add_plans, add_views, add_holding, add_messages, add_record, add_door,
        add_methods, add_unlocked};
    for (size_t i = 0; i < sizeof files / sizeof *files && !failed; i++)
        failed = files[i](module, core) < 0;
    Py_XDECREF(all);
    Py_XDECREF(here);
    return failed ? -1 : 0;
}

static int traverse_module(PyObject *module, visitproc visit, void *arg)
{
    struct core *core = PyModule_GetState(module);
    int stop;
#define VISIT(type, name) Py_VISIT(core->name);
    CORE_OBJECTS(VISIT)
#undef VISIT
    if ((stop = references_visit(core->names, NAMES, visit, arg)) != 0
        || (stop = references_visit(core->descrs, DTYPES, visit, arg)) != 0)
        return stop;
    return references_visit(core->tensor_types, 2, visit, arg);
}

static void free_module(void *module)
{
    struct core *core = PyModule_GetState(module);
#define CLEAR(type, name) Py_CLEAR(core->name);
    CORE_OBJECTS(CLEAR)
#undef CLEAR
    references_clear(core->names, NAMES);
    references_clear(core->descrs, DTYPES);
    references_clear(core->tensor_types, 2);
    record_free(core);
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
