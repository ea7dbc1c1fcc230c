/* The heads of users' arrays, also for transports that send messages themselves. */

#include "messages_type.h"

#include <string.h>

const int64_t *head_of(const struct view *view, int64_t kind, int64_t *words)
{
    memset(words, 0, 8 * HEAD_WORDS);
    words[0] = kind;
    words[2] = (int64_t)view->nbytes;
    if (kind == AN_OBJECT)
        return words;
    words[1] = view->dtype;
    words[3] = view->ndim;
    memcpy(words + 4, view->shape, sizeof *words * (size_t)view->ndim);
    return words;
}

/* Views the bytes of a head; returns 0 with an exception if they are no writable array of at least
   128 bytes. */
static int find_head(const struct core *core, PyObject *bytes, struct view *head)
{
    if (view_array(core, bytes, head) && head->writable && head->nbytes >= 8 * HEAD_WORDS)
        return 1;
    PyErr_SetString(PyExc_TypeError, "head: must be a writable array of at least 128 bytes");
    return 0;
}

/* Whether an array of nbytes travels inside its head. */
static int is_inline(size_t nbytes, const struct view *head)
{
    return nbytes <= head->nbytes - 8 * HEAD_WORDS;
}

/* write_head(x, head) */
static PyObject *write_head(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    struct view x, head;
    int64_t words[HEAD_WORDS];
    const struct core *core = PyModule_GetState(module);
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "write_head: takes two arguments");
    if (!find_head(core, args[1], &head))
        return NULL;
    if (!view_array(core, args[0], &x))
        Py_RETURN_NONE;
    memcpy(head.address, head_of(&x, AN_ARRAY, words), sizeof words);
    if (x.nbytes && is_inline(x.nbytes, &head))
        memcpy(head.address + sizeof words, x.address, x.nbytes);
    return PyLong_FromSize_t(x.nbytes);
}

/* read_head(head, out) */
static PyObject *read_head(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    struct view out, head;
    int64_t words[HEAD_WORDS];
    const struct core *core = PyModule_GetState(module);
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "read_head: takes two arguments");
    if (!find_head(core, args[0], &head))
        return NULL;
    if (!view_array(core, args[1], &out) || !out.writable
        || memcmp(head.address, head_of(&out, AN_ARRAY, words), sizeof words) != 0)
        Py_RETURN_FALSE;
    if (out.nbytes && is_inline(out.nbytes, &head))
        memcpy(out.address, head.address + sizeof words, out.nbytes);
    Py_RETURN_TRUE;
}

/* room_in(out) */
static PyObject *room_in(PyObject *module, PyObject *out)
{
    struct view view;
    if (!view_array(PyModule_GetState(module), out, &view) || !view.writable)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(view.nbytes);
}

static PyMethodDef functions[] = {
    {"write_head", (PyCFunction)(void (*)(void))write_head, METH_FASTCALL,
     "write_head(x, head, /)\n--\n\n"
     "Write the head of an array, and the array if the head has room; return the array's bytes,\n"
     "or None if the array is not plain."},
    {"read_head", (PyCFunction)(void (*)(void))read_head, METH_FASTCALL,
     "read_head(head, out, /)\n--\n\n"
     "Return whether out fits the array that the head describes; copy the array if it is in the\n"
     "head."},
    {"room_in", room_in, METH_O,
     "room_in(out, /)\n--\n\n"
     "Return the bytes of an array; None if it is read-only or not plain."},
    {NULL, NULL, 0, NULL}};

int add_heads(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
