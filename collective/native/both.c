/* One message to send over one transport and one to receive over another, at the same time: a rank of
   several hosts speaks with its own host through rings and with the others over streams.

   A thread can sleep at a socket or at a word, and not at both. As long as both messages are under way,
   it sleeps at the socket for a millisecond at most, and then looks at the ring. As soon as one of the
   two is over, the other one waits as it would alone. */

#include "messages_type.h"
#include "sleeping.h"

#include <string.h>

/* Time for which the thread yields the processor before it sleeps. */
#define YIELD_NS INT64_C(50000)
/* Time after which Python looks for deadlines and failures. */
#define LONGEST_NS INT64_C(50000000)
#define SLEEP_S 1e-3

struct both {
    Call halves[2]; /* the first one sends, the second one receives */
    Call *streamed; /* the half over streams */
};

/* Whether both messages are under way, and neither has failed. */
static int are_pending(const struct both *both)
{
    const struct exchange *out = &both->halves[0].exchange, *in = &both->halves[1].exchange;
    return out->pending && in->pending && !out->damage && !in->damage;
}

static int step(struct both *both)
{
    return exchange_step(&both->halves[0].exchange) | exchange_step(&both->halves[1].exchange);
}

/* Moves bytes, without the interpreter lock, until one of the messages is over, for this time at most. */
static void go_on(struct both *both, int64_t most)
{
    int64_t start = now_ns(), moved = start;
    while (are_pending(both) && now_ns() - start < most) {
        if (step(both))
            moved = now_ns();
        else if (now_ns() - moved < YIELD_NS)
            sched_yield();
        else
            exchange_sleep(&both->streamed->exchange, SLEEP_S);
    }
}

/* The function advance(), which Python calls while it waits; see messages_type.c. Returns 0 as soon as
   one of the messages is over. */
static PyObject *advance(PyObject *capsule, PyObject *args)
{
    struct both *both = PyCapsule_GetContext(capsule);
    double seconds = 0;
    if (!PyArg_ParseTuple(args, "|d:advance", &seconds))
        return NULL;
    if (both == NULL)
        return PyErr_Occurred() ? NULL : PyLong_FromLong(0);
    for (int half = 0; half < 2; half++)
        if (!are_kept(both->halves[half].over->core, both->halves[half].views, both->halves[half].held))
            return call_raise_moved(&both->halves[half]) < 0 ? NULL : PyLong_FromLong(0);
    Py_BEGIN_ALLOW_THREADS
    go_on(both, seconds < 1e-9 * LONGEST_NS ? (int64_t)(1e9 * seconds) : LONGEST_NS);
    Py_END_ALLOW_THREADS
    const struct exchange *x = &both->streamed->exchange;
    int partial = exchange_is_partial(x) ? PARTIAL : 0;
    return PyLong_FromLong(are_pending(both) ? x->pending | partial : 0);
}

static PyMethodDef advance_method = {"advance", advance, METH_VARARGS, NULL};

/* Exchanges both messages, which have begun; returns -1 with an exception. */
static int run(struct both *both)
{
    Call *halves = both->halves;
    for (int half = 0; half < 2; half++)
        if (!hold_both(halves[half].over->core, halves[half].views, halves[half].held))
            return call_raise_moved(&halves[half]);
    halves[0].began = halves[1].began = now_ns();
    Py_BEGIN_ALLOW_THREADS
    go_on(both, LONGEST_NS);
    Py_END_ALLOW_THREADS
    if (are_pending(both) && call_ask_python(both->streamed, &advance_method, both) < 0)
        return -1;
    /* The half that has failed comes first, since the other one may wait without end. */
    int first = halves[1].exchange.damage != NULL || !halves[1].exchange.pending;
    return call_finish(&halves[first]) < 0 || call_finish(&halves[!first]) < 0 ? -1 : 0;
}

/* exchange_both(sending, x, to, receiving, out, source, tag, limit, heads) */
static PyObject *exchange_both(PyObject *module, PyObject *args)
{
    struct core *core = PyModule_GetState(module);
    PyObject *sending, *receiving, *x, *out, *what, *limit;
    struct both both;
    struct view views[2];
    int64_t words[HEAD_WORDS], fitting[HEAD_WORDS];
    int to, source, heads;
    memset(both.halves, 0, sizeof both.halves);
    if (!PyArg_ParseTuple(args, "OOiOOiOOp:exchange_both", &sending, &x, &to, &receiving, &out, &source,
                          &what, &limit, &heads))
        return NULL;
    Messages *overs[2] = {messages_of(core, sending), NULL};
    if (overs[0] == NULL || (overs[1] = messages_of(core, receiving)) == NULL)
        return NULL;
    int overflow = 0;
    int64_t tag = PyLong_CheckExact(what) ? PyLong_AsLongLongAndOverflow(what, &overflow) : -1;
    int streamed = overs[1]->messages.carrier == &streams;
    const struct messages *m = &overs[0]->messages, *n = &overs[1]->messages;
    if ((m->carrier == &streams) == streamed || to < 0 || to >= m->size || to == m->rank || source < 0
        || source >= n->size || source == n->rank)
        return PyErr_Format(PyExc_ValueError, "exchange_both: one rank of each transport is needed");
    if (is_over(overs[0]) || is_over(overs[1]) || overflow || !PyLong_CheckExact(what)
        || (heads && (tag < 0 || tag > INT32_MAX)) || !view_array(core, x, &views[0])
        || !view_array(core, out, &views[1]) || !views[1].writable
        /* A received message would overwrite elements that are still to be sent. */
        || (views[0].address < views[1].address + views[1].nbytes
            && views[1].address < views[0].address + views[0].nbytes))
        Py_RETURN_NOTIMPLEMENTED;
    for (int half = 0; half < 2; half++) {
        Call *call = &both.halves[half];
        call->over = overs[half];
        call->what = what;
        call->limit = limit;
        call->to = half == 0 ? to : NOBODY;
        call->source = half == 1 ? source : NOBODY;
        call->views[half] = &views[half];
        exchange_begin(&call->exchange, &overs[half]->messages);
    }
    both.streamed = &both.halves[streamed];
    exchange_send(&both.halves[0].exchange, to, tag, views[0].address, views[0].nbytes,
                  heads ? head_of(&views[0], AN_ARRAY, words) : NULL, EXCHANGES);
    exchange_recv(&both.halves[1].exchange, source, source, tag, views[1].address, views[1].nbytes,
                  heads ? head_of(&views[1], AN_ARRAY, fitting) : NULL);
    Messages *over = both.streamed->over;
    __atomic_add_fetch(&over->users, 1, __ATOMIC_SEQ_CST);
    int failed = run(&both);
    streams_leave(over);
    for (int half = 0; half < 2; half++)
        references_clear(both.halves[half].held, 2);
    if (failed < 0)
        return NULL;
    const Call *receive = &both.halves[1];
    return receive->exchange.misfit ? call_deadline(receive) : PyLong_FromLong(receive->exchange.from);
}

static PyMethodDef both_functions[] = {
    {"exchange_both", exchange_both, METH_VARARGS,
     "exchange_both(sending, x, to, receiving, out, source, tag, limit, heads, /)\n--\n\n"
     "Send x over one transport while receiving into out over another; see\n"
     "collective.native.exchange_both."},
    {NULL, NULL, 0, NULL}};

int add_both(PyObject *module)
{
    return PyModule_AddFunctions(module, both_functions);
}
