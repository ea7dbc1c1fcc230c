/* Folds of several arrays along a schedule, such as that of a tree of virtual shards; see
   collective/algorithms/trees.py.

   The arrays are folded a part at a time: all steps of one part follow each other, so that the
   results of inner steps stay in the nearest cache. Every input is read once from memory, and every
   result is written once. */

#include "python.h"
#include "copying.h"

#include <stdlib.h>
#include <string.h>

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

/* Views all arrays. Returns 1, 0 if an array is not plain, or -1 with an exception. */
static int take(const struct schedule *schedule, struct arrays *arrays, PyObject *inputs,
                PyObject *results)
{
    int number = schedule->inputs + schedule->results;
    for (int i = 0; i < number; i++) {
        int is_result = i >= schedule->inputs;
        PyObject *array = is_result ? PyList_GetItem(results, i - schedule->inputs)
                                    : PyList_GetItem(inputs, i);
        if (array == NULL)
            return -1;
        int flags = PyBUF_ND | PyBUF_FORMAT | (is_result ? PyBUF_WRITABLE : 0);
        Py_buffer *view = &arrays->views[i];
        if (PyObject_GetBuffer(array, view, flags) < 0) {
            PyErr_Clear();
            return 0;
        }
        arrays->taken++;
        if (!is_plain(view, schedule->dtype) || view->len != arrays->views[0].len)
            return 0;
        for (int other = 0; is_result && other < i; other++) {
            const Py_buffer *before = &arrays->views[other];
            const char *one = before->buf, *two = view->buf;
            if (one < two + view->len && two < one + before->len)
                return 0;
        }
    }
    return 1;
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
    int plain = -1;
    if (arrays.views == NULL || arrays.slots == NULL || arrays.scratch == NULL)
        PyErr_NoMemory();
    else
        plain = take(&schedule, &arrays, inputs, results);
    if (plain > 0) {
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
    return plain < 0 ? NULL : PyBool_FromLong(plain);
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

PyObject *make_schedule(PyObject *module, PyObject *args)
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
