/* Messages in C, from a method to the transport's own function; see method.h. */

#include "method.h"

/* Tells Python that a message has failed, and raises the exception again. */
static void note_failure(PyObject *path)
{
    PyObject *error = error_take(), *noted = PyObject_CallMethod(path, "note_failure", "O", error);
    if (noted != NULL) /* otherwise the exception of note_failure stands */
        error_raise(error);
    Py_XDECREF(noted);
    Py_XDECREF(error);
}

/* The arguments of a message: x goes to a rank, out comes from another rank. */
struct message {
    PyObject *x, *to, *out, *from, *tag;
};

/* Reads the arguments of a message; returns whether C can exchange it. */
static int read_message(const struct core *core, struct message *m, enum message_kind which,
                        PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    *m = (struct message){Py_None, core->nobody, Py_None, core->nobody, core->zero};
    if (count != (which == SENDRECV ? 3 : 2))
        return 0;
    if (which != RECV)
        m->x = args[0], m->to = args[1];
    if (which != SEND)
        m->from = args[count - 1];
    if (which == RECV)
        m->out = args[0];
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_Size(names); i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        if (name == core->names[TAG])
            m->tag = args[count + i];
        else if (name == core->names[OUT] && which == SENDRECV)
            m->out = args[count + i];
        else
            return 0;
    }
    return (which == RECV || m->x != Py_None) && (which == SEND || m->out != Py_None)
           && (which != SENDRECV || PyObject_RichCompareBool(m->from, core->any, Py_EQ) == 0);
}

PyObject *call_message(const Method *method, Gate *path, PyObject *const *args, Py_ssize_t count,
                       PyObject *names)
{
    const struct core *core = method->core;
    struct message m;
    int plain = read_message(core, &m, method->message, args, count, names);
    PyErr_Clear(); /* a comparison in read_message may have raised */
    PyObject *owner = (PyObject *)path, *done = NULL, *lanes = read_field(owner, &path->lanes);
    PyObject *exchange = read_field(owner, &path->exchange);
    PyObject *timeout = read_field(owner, &path->timeout);
    if (!plain || exchange == NULL || exchange == Py_None || lanes == NULL
        || !PyDict_Check(lanes) || PyDict_Size(lanes) != 0 || timeout == NULL) {
        done = Py_NewRef(Py_NotImplemented);
    } else {
        /* If exchange is C's own, it holds the arrays and makes a deadline when it has to wait. */
        int in_c = PyCFunction_CheckExact(exchange);
        PyObject *limit = in_c ? Py_NewRef(timeout) : deadline_of(core, timeout, now_ns());
        PyObject *held = NULL;
        if (!in_c) {
            hold_all(core, m.x, &held);
            hold_all(core, m.out, &held);
        }
        PyObject *const arguments[] = {m.x, m.to, m.out, m.from, m.tag, limit, Py_True};
        if (limit != NULL)
            done = PyObject_Vectorcall(exchange, arguments, 7, NULL);
        Py_XDECREF(held);
        if (done == NULL) {
            note_failure(owner);
        } else if (Py_TYPE(done) == core->deadline_type) { /* nothing has been received */
            PyObject *deadline = done;
            done = PyObject_CallMethod(owner, "receive_rest", "OOOOOO", method->kind, m.x, m.out,
                                       m.from, m.tag, deadline);
            Py_DECREF(deadline);
        }
        Py_XDECREF(limit);
    }
    Py_XDECREF(lanes);
    Py_XDECREF(exchange);
    Py_XDECREF(timeout);
    if (done == NULL || done == Py_NotImplemented)
        return done;
    Py_DECREF(done);
    return Py_NewRef(m.out);
}
