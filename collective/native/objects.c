/* What all types of the core share: allocation, the collector, errors; and deadlines. */

#include "python.h"

#include <assert.h>

int refuse_keywords(const char *type, PyObject *keywords)
{
    if (keywords == NULL || PyDict_Size(keywords) == 0)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: takes positional arguments only, no keywords", type);
    return -1;
}

PyObject *error_take(void)
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

void error_raise(PyObject *error)
{
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), Py_NewRef(error),
                  PyException_GetTraceback(error));
}

int references_visit(PyObject *const *first, Py_ssize_t count, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < count; i++)
        Py_VISIT(first[i]);
    return 0;
}

void references_clear(PyObject **first, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        Py_CLEAR(first[i]);
}

void *object_new(PyTypeObject *type, Py_ssize_t references)
{
    struct object *object = (void *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (object != NULL) {
        object->core = PyType_GetModuleState(type);
        object->references = references;
        Py_INCREF(object->core->module);
    }
    return object;
}

int object_traverse(PyObject *self, visitproc visit, void *arg)
{
    struct object *object = (struct object *)self;
    Py_VISIT(Py_TYPE(self));
    if (object->core != NULL) /* the collector may run while the object is being allocated */
        Py_VISIT(object->core->module);
    return references_visit(object->fields, object->references, visit, arg);
}

void object_free(PyObject *self)
{
    struct object *object = (struct object *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject *module = object->core->module;
    assert(object->references >= 0);
    references_clear(object->fields, object->references);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF((PyObject *)type);
    Py_DECREF(module);
}

void object_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    object_free(self);
}

int type_add(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
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
        && (end == NULL || PyObject_SetAttr(deadline, core->names[NAME_SECONDS], limit) < 0
            || PyObject_SetAttr(deadline, core->names[NAME_END], end) < 0))
        Py_CLEAR(deadline);
    Py_XDECREF(end);
    return deadline;
}
