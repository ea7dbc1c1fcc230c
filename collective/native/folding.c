/* The folds as functions of Python: of two arrays; and of several arrays along a schedule, such as that
   of a tree of virtual shards (see collective/algorithms/trees.py).

   Along a schedule the arrays are folded a part at a time: all steps of one part follow each other, so that the
   results of inner steps stay in the nearest cache. Every input is read once from memory, and every
   result is written once. */

#include "python.h"
#include "copying.h"

#include <stdlib.h>
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

/* NumPy writes the complex types as Zf and Zd. */
static int is_plain(const Py_buffer *view, enum dtype dtype)
{
    const char *format = view->format ? view->format : "B";
    if (*format == 'Z')
        format = format[1] == 'f' ? "F" : format[1] == 'd' ? "D" : "";
    return format[0] != 0 && format[1] == 0 && strchr(formats[dtype], format[0]) != NULL
           && (uintptr_t)view->buf % item_alignment[dtype] == 0;
}

/* Views an array that holds aligned elements of the type. Returns 0 for any other array, without an
   exception; then there is nothing to release. */
static int take(Py_buffer *view, PyObject *array, enum dtype dtype, int is_result)
{
    int flags = PyBUF_ND | PyBUF_FORMAT | (is_result ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array, view, flags) < 0) {
        PyErr_Clear();
        return 0;
    }
    if (is_plain(view, dtype))
        return 1;
    PyBuffer_Release(view);
    return 0;
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
    int taken = 0;
    while (taken < 3 && take(&views[taken], arrays[taken], fold->dtype, taken == 2))
        taken++;
    const Py_buffer *out = &views[2];
    int plain = taken == 3 && views[0].len == out->len && views[1].len == out->len
                && is_apart(&views[0], out) && is_apart(&views[1], out);
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

/* -- schedules ---------------------------------------------------------------------------------- */

/* Bytes of one array that are folded at a time: one page. Longer parts of four inputs leave the
   nearest cache of 32 KiB before the last step reads them, and take up to 13 % longer. */
#define PART_BYTES ((size_t)4 << 10)

/* One step: out = left op right, or a copy of left if right is COPIED. The numbers are slots. */
struct step {
    int32_t left, right, out;
};
#define COPIED (-1)

/* The function in Python has the bytes of this struct as self, followed by its steps. The slots of
   the inputs come first, then those of the scratch, then those of the results. */
struct schedule {
    fold_function *function;
    enum dtype dtype;
    int inputs, scratch, results, steps;
};

/* The arrays of one call. */
struct arrays {
    Py_buffer *views; /* the inputs, then the results */
    int taken;        /* number of views to release */
    char **slots;
    char *scratch;
};

static void give_back(struct arrays *arrays)
{
    while (arrays->taken > 0)
        PyBuffer_Release(&arrays->views[--arrays->taken]);
    free(arrays->views);
    free(arrays->slots);
    free(arrays->scratch);
}

/* Views all arrays. A result must not overlap an array before it. */
static enum outcome take_all(const struct schedule *schedule, struct arrays *arrays,
                             PyObject *inputs, PyObject *results)
{
    int number = schedule->inputs + schedule->results;
    for (int i = 0; i < number; i++) {
        int is_result = i >= schedule->inputs;
        PyObject *array = is_result ? PyList_GetItem(results, i - schedule->inputs)
                                    : PyList_GetItem(inputs, i);
        if (array == NULL)
            return FAILED;
        Py_buffer *view = &arrays->views[i];
        if (!take(view, array, schedule->dtype, is_result))
            return FALL_BACK;
        arrays->taken++;
        if (view->len != arrays->views[0].len)
            return FALL_BACK;
        for (int other = 0; is_result && other < i; other++) {
            const Py_buffer *before = &arrays->views[other];
            const char *one = before->buf, *two = view->buf;
            if (one < two + view->len && two < one + before->len)
                return FALL_BACK;
        }
    }
    return DONE;
}

/* Makes all steps, a part of the arrays at a time. */
static void fold_parts(const struct schedule *schedule, const struct step *steps, char **slots,
                       char *scratch, size_t nbytes)
{
    size_t item = item_bytes[schedule->dtype];
    int first = schedule->inputs, number = first + schedule->scratch + schedule->results;
    for (size_t at = 0; at < nbytes; at += PART_BYTES) {
        size_t length = nbytes - at < PART_BYTES ? nbytes - at : PART_BYTES;
        for (int i = 0; i < schedule->scratch; i++)
            slots[first + i] = scratch + (size_t)i * PART_BYTES;
        for (int i = 0; i < schedule->steps; i++) {
            const struct step *step = &steps[i];
            if (step->right == COPIED)
                copy(slots[step->out], slots[step->left], length);
            else
                schedule->function(slots[step->left], slots[step->right], slots[step->out],
                                   length / item);
        }
        for (int i = 0; i < number; i++)
            slots[i] += i < first || i >= first + schedule->scratch ? length : 0;
    }
}

/* run(inputs, results) */
static PyObject *run_schedule(PyObject *self, PyObject *args)
{
    const char *bytes = PyBytes_AsString(self);
    struct schedule schedule;
    PyObject *inputs, *results;
    memcpy(&schedule, bytes, sizeof schedule);
    if (!PyArg_ParseTuple(args, "O!O!:run", &PyList_Type, &inputs, &PyList_Type, &results))
        return NULL;
    if (PyList_Size(inputs) != schedule.inputs || PyList_Size(results) != schedule.results)
        return PyErr_Format(PyExc_ValueError, "run: %zd inputs and %zd results; expected %d and %d",
                            PyList_Size(inputs), PyList_Size(results), schedule.inputs,
                            schedule.results);
    int number = schedule.inputs + schedule.results;
    struct arrays arrays = {
        .views = calloc((size_t)number + 1, sizeof *arrays.views),
        .slots = calloc((size_t)(number + schedule.scratch) + 1, sizeof *arrays.slots),
        .scratch = malloc((size_t)schedule.scratch * PART_BYTES + 1)};
    enum outcome plain = FAILED;
    if (arrays.views == NULL || arrays.slots == NULL || arrays.scratch == NULL)
        PyErr_NoMemory();
    else
        plain = take_all(&schedule, &arrays, inputs, results);
    if (plain == DONE) {
        size_t nbytes = number > 0 ? (size_t)arrays.views[0].len : 0;
        const struct step *steps = (const void *)(bytes + sizeof schedule);
        for (int i = 0; i < number; i++)
            arrays.slots[i < schedule.inputs ? i : i + schedule.scratch] = arrays.views[i].buf;
        if (nbytes * (size_t)number < LONG_FOLD_BYTES) {
            fold_parts(&schedule, steps, arrays.slots, arrays.scratch, nbytes);
        } else {
            Py_BEGIN_ALLOW_THREADS
            fold_parts(&schedule, steps, arrays.slots, arrays.scratch, nbytes);
            Py_END_ALLOW_THREADS
        }
    }
    give_back(&arrays);
    return plain == FAILED ? NULL : PyBool_FromLong(plain == DONE);
}

static PyMethodDef run_method = {
    "run", run_schedule, METH_VARARGS,
    "run(inputs, results, /)\n--\n\n"
    "Fold a list of arrays into a list of arrays; return whether all of them were plain."};

/* Whether the slots of all steps exist. */
static int are_steps(const struct schedule *schedule, const struct step *steps)
{
    int64_t number = (int64_t)schedule->inputs + schedule->scratch + schedule->results;
    for (int i = 0; i < schedule->steps; i++)
        if (steps[i].left < 0 || steps[i].left >= number || steps[i].right < COPIED
            || steps[i].right >= number || steps[i].out < schedule->inputs
            || steps[i].out >= number)
            return 0;
    return 1;
}

static PyObject *make_schedule(PyObject *module, PyObject *args)
{
    struct schedule schedule = {NULL, 0, 0, 0, 0, 0};
    const char *name, *steps;
    Py_ssize_t length;
    int dtype;
    (void)module;
    if (!PyArg_ParseTuple(args, "siiiiy#:make_schedule", &name, &dtype, &schedule.inputs,
                          &schedule.scratch, &schedule.results, &steps, &length))
        return NULL;
    int most = 1 << 20; /* of each kind of slot */
    schedule.steps = (int)(length / (Py_ssize_t)sizeof(struct step));
    if (schedule.inputs < 0 || schedule.inputs > most || schedule.scratch < 0
        || schedule.scratch > most || schedule.results < 0 || schedule.results > most
        || length % (Py_ssize_t)sizeof(struct step) != 0 || length > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "make_schedule: a number is out of its range");
    PyObject *self = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizeof schedule + length);
    if (self == NULL)
        return NULL;
    char *bytes = PyBytes_AsString(self);
    memcpy(bytes + sizeof schedule, steps, (size_t)length);
    PyObject *function = NULL;
    if (!are_steps(&schedule, (const void *)(bytes + sizeof schedule))) {
        PyErr_SetString(PyExc_ValueError, "make_schedule: a step uses a slot that does not exist, or "
                                          "writes to an input");
    } else if ((schedule.function = fold_of(name, dtype, fold_levels() - 1)) == NULL) {
        function = Py_NewRef(Py_None);
    } else {
        schedule.dtype = (enum dtype)dtype;
        memcpy(bytes, &schedule, sizeof schedule);
        function = PyCFunction_New(&run_method, self);
    }
    Py_DECREF(self);
    return function;
}

static PyMethodDef functions[] = {
    {"make_schedule", make_schedule, METH_VARARGS,
     "make_schedule(op, dtype, inputs, scratch, results, steps, /)\n--\n\n"
     "Return a function that folds arrays along steps, or None if C has no such fold."},
    {"make_fold", make_fold, METH_VARARGS,
     "make_fold(op, dtype, reference, level=..., /)\n--\n\n"
     "Return the fold in C, or the reference if C has none. Only tests pass the level."},
    {NULL, NULL, 0, NULL}};

int add_folding(PyObject *module, struct core *core)
{
    (void)core;
    return PyModule_AddFunctions(module, functions);
}
