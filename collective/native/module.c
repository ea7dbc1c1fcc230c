/* The module collective.native._core: folds as Python's functions, and what else is in it. */

#include "python.h"

#include <string.h>

/* Below this many bytes letting go of the interpreter lock takes longer than the fold. */
#define LONG_FOLD_BYTES (64 << 10)

static const char *const op_names[OPS] = {
    "sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor"};

/* What the buffer protocol calls the elements in which a type is stored; bfloat16's in uint16. */
static const char *const formats[DTYPES] = {
    "?", "b", "h", "i", "lq", "B", "H", "I", "LQ", "e", "f", "d", "F", "D", "H"};

/* One fold, as an object that Python's function of it is bound to. */
typedef struct {
    PyObject_HEAD
    PyObject *reference; /* the same in Python, for arguments that are not plain */
    fold_function *fold;
    enum dtype dtype;
} Fold;

static PyTypeObject *fold_type;

static void fold_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Fold *)self)->reference);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Whether a buffer holds elements of the type, aligned. NumPy writes complex as Zf. */
static int is_plain(const Py_buffer *view, enum dtype dtype)
{
    const char *format = view->format ? view->format : "B";
    if (*format == 'Z')
        format = format[1] == 'f' ? "F" : format[1] == 'd' ? "D" : "";
    return format[0] != 0 && format[1] == 0 && strchr(formats[dtype], format[0]) != NULL
           && (uintptr_t)view->buf % (item_bytes[dtype] > 8 ? 8 : item_bytes[dtype]) == 0;
}

int is_apart(const Py_buffer *one, const Py_buffer *other)
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

/* Folds what is plain. Returns 0 for anything else, of which it has touched nothing. */
static int fold_plain(Fold *self, PyObject *const *arrays)
{
    static const int flags[3] = {PyBUF_ND | PyBUF_FORMAT, PyBUF_ND | PyBUF_FORMAT,
                                 PyBUF_ND | PyBUF_FORMAT | PyBUF_WRITABLE};
    Py_buffer views[3];
    int taken = 0, plain = 1;
    while (taken < 3 && plain) {
        if (PyObject_GetBuffer(arrays[taken], &views[taken], flags[taken]) < 0) {
            PyErr_Clear();
            plain = 0;
        } else {
            plain = is_plain(&views[taken], self->dtype) && views[taken].len == views[0].len;
            taken++;
        }
    }
    const Py_buffer *out = &views[2];
    plain = plain && is_apart(&views[0], out) && is_apart(&views[1], out);
    if (plain) {
        size_t count = (size_t)out->len / item_bytes[self->dtype];
        if (out->len < LONG_FOLD_BYTES) {
            self->fold(views[0].buf, views[1].buf, out->buf, count);
        } else {
            Py_BEGIN_ALLOW_THREADS
            self->fold(views[0].buf, views[1].buf, out->buf, count);
            Py_END_ALLOW_THREADS
        }
    }
    while (taken > 0)
        PyBuffer_Release(&views[--taken]);
    return plain;
}

/* fold(a, b, out=c) */
static PyObject *fold_call(PyObject *self, PyObject *const *args, Py_ssize_t count,
                           PyObject *keywords)
{
    Py_ssize_t named = keywords == NULL ? 0 : PyTuple_Size(keywords);
    /* Whatever the one keyword is: the reference refuses all but out. */
    if (count == 2 && named == 1
        && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), "out") == 0
        && fold_plain((Fold *)self, args))
        Py_RETURN_NONE;

    PyObject *positional = PyTuple_New(count), *options = PyDict_New(), *result = NULL;
    if (positional == NULL || options == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(positional, i, args[i]);
    }
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyDict_SetItem(options, PyTuple_GetItem(keywords, i), args[count + i]) < 0)
            goto done;
    result = PyObject_Call(((Fold *)self)->reference, positional, options);
done:
    Py_XDECREF(positional);
    Py_XDECREF(options);
    return result;
}

static PyMethodDef fold_method = {
    "fold", (PyCFunction)(void (*)(void))fold_call, METH_FASTCALL | METH_KEYWORDS,
    "fold(a, b, /, *, out)\n--\n\nSet out to a op b, elementwise; out may be a or b."};

static PyObject *make_fold(PyObject *module, PyObject *args)
{
    const char *name;
    int dtype, level = fold_levels() - 1;
    PyObject *reference;
    (void)module;
    if (!PyArg_ParseTuple(args, "siO|i:make_fold", &name, &dtype, &reference, &level))
        return NULL;
    if (level < 0 || level >= fold_levels()) {
        PyErr_SetString(PyExc_ValueError, "make_fold: no such level of instructions here");
        return NULL;
    }
    fold_function *fold = fold_of(name, dtype, level);
    if (fold == NULL) {
        Py_INCREF(reference);
        return reference;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(fold_type, Py_tp_alloc);
    Fold *self = (Fold *)allocate(fold_type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(reference);
    self->reference = reference;
    self->fold = fold;
    self->dtype = dtype;
    PyObject *function = PyCFunction_New(&fold_method, (PyObject *)self);
    Py_DECREF(self);
    return function;
}

static PyType_Slot fold_slots[] = {{Py_tp_dealloc, fold_dealloc}, {0, NULL}};

static PyType_Spec fold_spec = {
    "collective.native._core.Fold", sizeof(Fold), 0, Py_TPFLAGS_DEFAULT, fold_slots};

static PyMethodDef functions[] = {
    {"make_fold", make_fold, METH_VARARGS,
     "make_fold(op, dtype, reference, level=..., /)\n--\n\n"
     "Return the fold in C, or the reference where there is none. The tests name the level."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_core",
    .m_doc = "The native core; see collective.native.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    fold_type = (PyTypeObject *)PyType_FromSpec(&fold_spec);
    PyObject *names = PyTuple_New(fold_levels());
    if (fold_type == NULL || names == NULL)
        goto failed;
    for (int level = 0; level < fold_levels(); level++) {
        PyObject *name = PyUnicode_FromString(fold_level(level));
        if (name == NULL)
            goto failed;
        PyTuple_SetItem(names, level, name);
    }
    if (PyModule_AddIntConstant(module, "PROTOCOL", PROTOCOL) == 0
        && PyModule_AddObjectRef(module, "LEVELS", names) == 0 && add_shared(module) == 0) {
        Py_DECREF(names);
        return module;
    }
failed:
    Py_XDECREF(names);
    Py_DECREF(module);
    return NULL;
}
