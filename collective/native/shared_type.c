/* The type Shared: its memory and segments, and how a call waits for the other ranks. */

#include "shared_type.h"
#include "sleeping.h"

#include <assert.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* Number of polls of a word, 10 to 40 ns each, before the processor is yielded. If each rank has its own
   core, the polls take some microseconds. If a peer needs the core, they take a moment only. */
enum { LOOKS = 200, LOOKS_CROWDED = 4 };
/* Time for which a wait yields the processor before it calls Python. */
#define YIELD_NS 50000
/* A thread without the interpreter lock yields the processor for this time, then naps, as Python's
   waits do. */
#define NAP_AFTER_NS 100000
#define NAP_SHARE 0.05

/* Has Python wait for a word of a rank, until the deadline of the call. Returns 0, or -1 with an
   exception. */
static int ask_python(Shared *self, int rank, const uint64_t *word, uint64_t value, uint64_t most)
{
    Py_ssize_t offset = (const char *)word - (const char *)self->memory.buf;
    PyObject *deadline = deadline_of(self->core, self->limit, self->began);
    if (deadline == NULL)
        return -1;
    PyObject *done = PyObject_CallMethod(self->callbacks, "wait", "OOinKK", self->request,
                                         deadline, rank, offset, (unsigned long long)value,
                                         (unsigned long long)most);
    Py_DECREF(deadline);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Returns the time, when a wait begins. All waits of a call have one deadline, which counts from the
   first of them: a call that never waits reads no clock for it. */
static int64_t begin_wait(Shared *self)
{
    int64_t now = now_ns();
    if (self->began == 0)
        self->began = now;
    return now;
}

/* Two threads may begin a call at once, if one of them has no interpreter lock. So an atomic exchange
   decides. */
int shared_begin(Shared *self)
{
    return !__atomic_exchange_n(&self->busy, 1, __ATOMIC_ACQUIRE);
}

void shared_end(Shared *self)
{
    assert(self->busy);
    __atomic_store_n(&self->busy, 0, __ATOMIC_RELEASE);
}

void shared_let_go(Shared *self)
{
    PyObject *held[] = {self->held[0], self->held[1]};
    for (int i = 0; i < 2; i++) {
        self->views[i] = NULL;
        self->held[i] = NULL;
        self->shared.inside[i] = NULL;
    }
    shared_end(self);
    references_clear(held, 2); /* this may run a finalizer that makes a call */
}

/* Sleeps until a peer wakes this rank, unless the word is there; for a share of the wait so far. */
static void nap(struct shared *s, int64_t waited, const uint64_t *word, uint64_t value,
                uint64_t most)
{
    uint32_t *asleep = (uint32_t *)(s->stages[s->rank].line + ASLEEP);
    announce_nap(asleep, s->sleepers);
    if (!reached(word, value, most))
        sleep_until_woken(asleep, 1e-9 * NAP_SHARE * (double)waited);
    end_nap(asleep, s->sleepers);
}

/* Waits for a word in a thread without a thread state. Takes the interpreter lock, and lets Python
   wait, if the wait gets long or a rank has failed. */
static int wait_unlocked(Shared *self, int rank, const uint64_t *word, uint64_t value,
                         uint64_t most)
{
    const struct unlocked *call = self->call;
    struct shared *s = &self->shared;
    int64_t start = begin_wait(self), now = start;
    do {
        if (now - start < NAP_AFTER_NS || s->sleepers == NULL)
            sched_yield();
        else
            nap(s, now - start, word, value, most);
        if (reached(word, value, most))
            return 0;
        now = now_ns();
    } while (now - start < call->patience && now - self->began < call->most && !is_broken(s));
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *site = record_exchange_site(self->core, call->site);
    int failed = ask_python(self, rank, word, value, most);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* as in wait_for() */
    if (failed)
        self->error = error_take();
    record_exchange_site(self->core, site);
    PyGILState_Release(state);
    return failed;
}

/* Waits for a word, without the interpreter lock. After YIELD_NS Python waits instead: its wait
   handles deadlines, signals and dead peers. Returns MOVED if another thread has given an array other
   memory, in a way that hold_both() cannot forbid, such as share_memory_() of a tensor. */
static int wait_for(void *context, int rank, const uint64_t *word, uint64_t value, uint64_t most)
{
    Shared *self = context;
    if (self->call != NULL)
        return wait_unlocked(self, rank, word, value, most);
    if (self->unlocked == NULL && !hold_both(self->core, self->views, self->held))
        return MOVED;
    PyThreadState *state = self->unlocked ? self->unlocked : PyEval_SaveThread();
    int there = 0, failed = 0;
    int64_t end = begin_wait(self) + YIELD_NS;
    do {
        sched_yield();
        there = reached(word, value, most);
    } while (!there && now_ns() < end);
    if (there && self->unlocked)
        return 0;
    PyEval_RestoreThread(state);
    if (!there) {
        failed = ask_python(self, rank, word, value, most);
        /* Python's load of the word has no acquire order, so without this fence the processor may
           load what the peer announced before it loads the word. */
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!failed && !are_kept(self->core, self->views, self->held))
            failed = MOVED;
    }
    if (self->unlocked)
        self->unlocked = PyEval_SaveThread();
    return failed;
}

/* A short call keeps the interpreter lock, or never has it. So it is recorded while the other ranks
   arrive and this rank has nothing else to do. */
void shared_record(void *context)
{
    Shared *self = context;
    if (self->ring != NULL && self->call != NULL)
        record_unlocked(self->ring, self->call->source);
    else if (self->ring != NULL)
        record_begin(self->ring, self->request, 0);
    self->ring = NULL;
}

/* -- Shared --------------------------------------------------------------------------------- */

/* Shared(segment, rank, size, lines, calls, areas, area_bytes, least_long, crowded, callbacks, pids=None,
   page_map=-1) */
static int read_shared(Shared *self, PyObject *args)
{
    struct shared *s = &self->shared;
    PyObject *memory, *callbacks, *pids = Py_None;
    Py_ssize_t lines, calls, areas, area_bytes, least_long;
    if (!PyArg_ParseTuple(args, "OiinnnnnpO|Oi:Shared", &memory, &s->rank, &s->size, &lines, &calls,
                          &areas, &area_bytes, &least_long, &s->crowded, &callbacks,
                          &pids, &s->page_map)
        || PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        return -1;
    self->callbacks = Py_NewRef(callbacks);
    /* An area must hold two blocks, each with a piece for every peer, of the longest element type:
       hence 32 bytes per rank. */
    Py_ssize_t most = self->memory.len, size = s->size;
    if (size < 2 || size > most || s->rank < 0 || s->rank >= size || area_bytes < 32 * size
        || area_bytes % 64 || area_bytes > most || least_long < 1 || least_long > area_bytes / 4
        || lines < 8 || lines % 8 || areas < 8 || areas % 8
        || (most - lines) / (8 * LINE_WORDS) < size || (most - areas) / area_bytes < 2 * size
        || calls < 8 || calls > most || most - calls < CALLS_KEPT * CALL_BYTES) {
        PyErr_SetString(PyExc_ValueError, "Shared: a number is out of its range, or the lines or "
                                          "areas of all ranks, or this rank's descriptions, are "
                                          "not in the segment");
        return -1;
    }
    self->descriptions = (char *)self->memory.buf + calls;
    s->area_bytes = (size_t)area_bytes;
    s->least_long = (size_t)least_long;
    s->looks = s->crowded ? LOOKS_CROWDED : LOOKS;
    s->wait = wait_for;
    s->arrived = shared_record;
    s->context = self;
    s->broken = self->memory.buf;
    if (lines > SLEEPERS_AT)
        s->sleepers = (uint32_t *)((char *)self->memory.buf + SLEEPERS_AT);
    s->stages = calloc((size_t)size, sizeof *s->stages);
    s->sources = calloc((size_t)size, sizeof *s->sources);
    s->results = calloc((size_t)size, sizeof *s->results);
    s->announced = calloc((size_t)size, ANNOUNCED * sizeof *s->announced);
    if (s->stages == NULL || s->sources == NULL || s->results == NULL || s->announced == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (read_pids(pids, size, &s->pids) < 0)
        return -1;
    unsigned char *base = self->memory.buf;
    for (Py_ssize_t rank = 0; rank < size; rank++)
        s->stages[rank] = (struct stage){
            (uint64_t *)(base + lines) + rank * LINE_WORDS,
            {base + areas + 2 * rank * area_bytes, base + areas + (2 * rank + 1) * area_bytes}};
    return 0;
}

static PyObject *shared_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    if (refuse_keywords("Shared", keywords) < 0)
        return NULL;
    Shared *self = object_new(type, REFERENCES(Shared, callbacks));
    if (self != NULL && read_shared(self, args) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Python breaks a cycle through the callbacks, or through the owner of the memory, there. */
static int shared_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Shared *)object)->memory.obj);
    return object_traverse(object, visit, arg);
}

static void shared_dealloc(PyObject *object)
{
    Shared *self = (Shared *)object;
    PyObject_GC_UnTrack(object);
    if (self->memory.obj != NULL)
        PyBuffer_Release(&self->memory);
    for (size_t i = 0; i < self->shared.known; i++)
        free(self->shared.segments[i]);
    free(self->shared.segments);
    free(self->shared.stages);
    free(self->shared.sources);
    free(self->shared.results);
    free(self->shared.announced);
    free(self->shared.pids);
    object_dealloc(object);
}

int read_words(PyObject *sequence, int size, uint64_t *words)
{
    for (int rank = 0; rank < size; rank++) {
        PyObject *number = PySequence_GetItem(sequence, rank);
        words[rank] = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
        Py_XDECREF(number);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

int read_pids(PyObject *sequence, Py_ssize_t size, uint64_t **pids)
{
    if (sequence == Py_None)
        return 0;
    *pids = calloc((size_t)size, sizeof **pids);
    if (*pids == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return read_words(sequence, (int)size, *pids);
}

/* Inserts a segment; returns 0 if there is no memory. The caller has the critical section. */
static int insert(struct shared *s, struct segment *segment)
{
    if (s->known == s->room) {
        size_t room = 2 * s->room + 8;
        struct segment **longer = realloc(s->segments, room * sizeof *longer);
        if (longer == NULL)
            return 0;
        s->segments = longer;
        s->room = room;
    }
    size_t at = segments_until(s, segment->parts[s->rank]);
    memmove(&s->segments[at + 1], &s->segments[at], (s->known++ - at) * sizeof *s->segments);
    s->segments[at] = segment;
    return 1;
}

/* Removes a segment; returns 0 if it is not known, or -1 with an exception. A running call may have
   released the interpreter lock, so the segments that it uses cannot be removed before it ends. */
static int remove_segment(Shared *self, uint64_t number)
{
    struct shared *s = &self->shared;
    struct segment *segment = NULL;
    int used = 0;
    Py_BEGIN_CRITICAL_SECTION(self);
    for (size_t at = 0; at < s->known && segment == NULL; at++) {
        if (s->segments[at]->number != number)
            continue;
        segment = s->segments[at];
        used = segment == s->inside[0] || segment == s->inside[1];
        if (!used)
            memmove(&s->segments[at], &s->segments[at + 1],
                    (--s->known - at) * sizeof *s->segments);
    }
    Py_END_CRITICAL_SECTION();
    if (!used)
        free(segment);
    else
        PyErr_Format(PyExc_RuntimeError, "know: a running call uses segment %llu",
                     (unsigned long long)number);
    return used ? -1 : segment != NULL;
}

/* Registers a mapped symmetric segment, by know(number, nbytes, addresses); or removes it, by
   know(number). Returns whether that was possible. */
static PyObject *shared_know(PyObject *object, PyObject *args)
{
    struct shared *s = &((Shared *)object)->shared;
    unsigned long long number;
    Py_ssize_t nbytes = 0;
    PyObject *addresses = NULL;
    int done;
    if (!PyArg_ParseTuple(args, "K|nO:know", &number, &nbytes, &addresses))
        return NULL;
    if (addresses == NULL) {
        done = remove_segment((Shared *)object, number);
        return done < 0 ? NULL : PyBool_FromLong(done);
    }
    if (number == 0 || nbytes < 0)
        return PyErr_Format(PyExc_ValueError, "know: the number or the length is out of its range");
    struct segment *segment = malloc(sizeof *segment + (size_t)s->size * sizeof *segment->parts);
    if (segment == NULL)
        return PyErr_NoMemory();
    *segment = (struct segment){number, (size_t)nbytes};
    /* The addresses are read before the segment is inserted, since that may run Python code. */
    done = read_words(addresses, s->size, (uint64_t *)segment->parts) == 0 ? 0 : -1;
    Py_BEGIN_CRITICAL_SECTION(object);
    if (done == 0)
        done = insert(s, segment);
    Py_END_CRITICAL_SECTION();
    if (done > 0)
        Py_RETURN_TRUE;
    free(segment);
    return done < 0 ? NULL : PyErr_NoMemory();
}

static PyMethodDef shared_methods[] = {
    {"know", shared_know, METH_VARARGS,
     "know(number, nbytes=0, addresses=None, /)\n--\n\n"
     "Register a mapped symmetric segment, or remove it if there are no addresses; return whether\n"
     "that was possible."},
    {"plan", plan_new, METH_VARARGS,
     "plan(operation, digest, root, elements, op, dtype, mean, request, description, otherwise, /)"
     "\n--\n\nPrepare a call. The peers can read the description: 256 bytes at most."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot shared_slots[] = {
    {Py_tp_new, shared_new},         {Py_tp_dealloc, shared_dealloc},
    {Py_tp_methods, shared_methods}, {Py_tp_traverse, shared_traverse},
    {Py_tp_doc, "The shared memory of the ranks of one host, for plans."}, {0, NULL}};

static PyType_Spec shared_spec = {
    "collective.native._core.Shared", sizeof(Shared), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    shared_slots};

int add_shared(PyObject *module, struct core *core)
{
    (void)core;
    return type_add(module, &shared_spec, NULL);
}
