/* The Python functions that exchange messages over streams. */

#include "messages_type.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Takes the bytes that have been read from a peer's socket already. Returns -1 with an exception. */
static int take_early(struct messages *m, int peer, PyObject *early)
{
    char *bytes = NULL;
    Py_ssize_t count = 0;
    if (PyBytes_AsStringAndSize(early, &bytes, &count) < 0)
        return -1;
    struct stream *s = &m->in[peer].stream;
    if (count > STREAM_AHEAD) {
        PyErr_Format(PyExc_ValueError, "make_streams: rank %d has sent too much", peer);
        return -1;
    }
    if ((s->ahead = malloc(STREAM_AHEAD)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(s->ahead, bytes, (size_t)count);
    s->end = (size_t)count;
    return 0;
}

/* make_streams(flag, rank, size, sockets, early, idle, python) */
static PyObject *make_streams(PyObject *module, PyObject *args)
{
    PyObject *flag, *sockets, *early, *python, *function = NULL;
    double idle;
    Messages *self = object_new(((struct core *)PyModule_GetState(module))->messages_type,
                                REFERENCES(Messages, python));
    if (self == NULL)
        return NULL;
    struct messages *m = &self->messages;
    if (!PyArg_ParseTuple(args, "OiiO!O!dO:make_streams", &flag, &m->rank, &m->size, &PyList_Type,
                          &sockets, &PyList_Type, &early, &idle, &python)
        || PyObject_GetBuffer(flag, &self->segment, PyBUF_WRITABLE) < 0)
        goto finished;
    self->python = Py_NewRef(python);
    self->idle_ns = (int64_t)(1e9 * idle);
    self->looks = 1;
    if (m->size < 2 || m->size > 1 << 15 || m->rank < 0 || m->rank >= m->size || self->segment.len < 8
        || PyList_Size(sockets) != m->size || PyList_Size(early) != m->size) {
        PyErr_SetString(PyExc_ValueError, "make_streams: a number is out of its range, or a list has "
                                          "another length than the number of ranks");
        goto finished;
    }
    if (messages_allocate(m, &streams) < 0)
        goto finished;
    /* All sockets first: whatever fails afterwards, the object closes them. */
    for (int peer = 0; peer < m->size; peer++)
        m->in[peer].stream.fd = m->out[peer].stream.fd =
            peer != m->rank ? (int)PyLong_AsLong(PyList_GetItem(sockets, peer)) : -1;
    for (int peer = 0; peer < m->size && !PyErr_Occurred(); peer++)
        if (peer != m->rank && take_early(m, peer, PyList_GetItem(early, peer)) < 0)
            goto finished;
    if (PyErr_Occurred())
        goto finished;
    function = messages_function(self);
finished:
    Py_DECREF((PyObject *)self);
    return function;
}

static void close_sockets(struct messages *m)
{
    for (int rank = 0; rank < m->size; rank++) {
        int fd = __atomic_exchange_n(&m->in[rank].stream.fd, -1, __ATOMIC_RELAXED);
        m->out[rank].stream.fd = -1;
        if (fd >= 0)
            close(fd);
    }
}

void streams_leave(Messages *self)
{
    if (__atomic_sub_fetch(&self->users, 1, __ATOMIC_SEQ_CST) == 0
        && __atomic_load_n(&self->closing, __ATOMIC_SEQ_CST))
        close_sockets(&self->messages);
}

void streams_free(struct messages *m)
{
    close_sockets(m);
    for (int rank = 0; rank < m->size; rank++)
        free(m->in[rank].stream.ahead);
}

/* Returns the messages of the function in the arguments, and a number behind it; NULL with an
   exception. */
static Messages *read_streams(PyObject *module, PyObject *args, int *number)
{
    PyObject *exchange;
    if (!PyArg_ParseTuple(args, "Oi", &exchange, number))
        return NULL;
    Messages *self = messages_of(PyModule_GetState(module), exchange);
    if (self != NULL && self->messages.carrier != &streams) {
        PyErr_SetString(PyExc_TypeError, "exchange: must be a function of make_streams");
        return NULL;
    }
    return self;
}

/* cut_streams(exchange, rank) */
static PyObject *cut_streams(PyObject *module, PyObject *args)
{
    int rank;
    Messages *self = read_streams(module, args, &rank);
    if (self == NULL)
        return NULL;
    for (int peer = 0; peer < self->messages.size; peer++)
        if (peer == rank || rank < 0)
            shutdown(self->messages.in[peer].stream.fd, SHUT_RDWR);
    Py_RETURN_NONE;
}

/* stream_infos(exchange, bytes) */
static PyObject *stream_infos(PyObject *module, PyObject *args)
{
    int bytes;
    Messages *self = read_streams(module, args, &bytes);
    if (self == NULL)
        return NULL;
    PyObject *infos = PyList_New(0);
    /* As long as this thread counts as a user, no descriptor gets another meaning. */
    __atomic_add_fetch(&self->users, 1, __ATOMIC_SEQ_CST);
    for (int peer = 0; peer < self->messages.size && infos != NULL; peer++) {
        struct tcp_info info;
        socklen_t length = bytes < 0 || bytes > (int)sizeof info ? sizeof info : (socklen_t)bytes;
        if (getsockopt(self->messages.in[peer].stream.fd, IPPROTO_TCP, TCP_INFO, &info, &length))
            length = 0; /* no connection: this rank itself, or the messages are closed */
        PyObject *value = PyBytes_FromStringAndSize((char *)&info, (Py_ssize_t)length);
        if (value == NULL || PyList_Append(infos, value) < 0)
            Py_CLEAR(infos);
        Py_XDECREF(value);
    }
    streams_leave(self);
    return infos;
}

/* close_streams(exchange, at_once) */
static PyObject *close_streams(PyObject *module, PyObject *args)
{
    int at_once;
    Messages *self = read_streams(module, args, &at_once);
    if (self == NULL)
        return NULL;
    __atomic_add_fetch(&self->users, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&self->closing, 1, __ATOMIC_SEQ_CST);
    streams_leave(self);
    if (at_once)
        close_sockets(&self->messages);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"make_streams", make_streams, METH_VARARGS,
     "make_streams(flag, rank, size, sockets, early, idle, python, /)"
     "\n--\n\n"
     "Return a function that exchanges messages; see collective.native.streams."},
    {"cut_streams", cut_streams, METH_VARARGS,
     "cut_streams(exchange, rank, /)\n--\n\n"
     "End the connection to a rank, or all connections (-1), but keep the sockets."},
    {"stream_infos", stream_infos, METH_VARARGS,
     "stream_infos(exchange, bytes, /)\n--\n\n"
     "Return the first bytes of TCP_INFO of the connection to each rank; none for this rank."},
    {"close_streams", close_streams, METH_VARARGS,
     "close_streams(exchange, at_once, /)\n--\n\n"
     "Close the sockets, once no thread uses them or at once."},
    {NULL, NULL, 0, NULL}};

int add_streams(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
