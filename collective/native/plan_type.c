/* The types Shared (the shared memory of the ranks of one host) and Plan (a prepared call); see
   shared.c. */

#include "python.h"
#include "shared.h"
#include "sleeping.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    CORE_HEAD
    struct shared shared;
    Py_buffer memory; /* the control segment, which this buffer keeps mapped */
    char *descriptions; /* of this rank's last calls, in the segment */
    PyObject *callbacks; /* see Callbacks in __init__.py */
    /* The running call, with references that its caller has: */
    PyObject *request;
    PyObject *limit; /* for deadline_of */
    int64_t began;   /* when the call waited first, from where its deadline counts; 0 before that */
    PyObject *ring; /* the Ring in which the call must still be recorded, or NULL */
    PyThreadState *unlocked; /* not NULL while a long call runs without the interpreter lock */
    const struct view *views[2]; /* the arrays, or NULL */
    PyObject *held[2];           /* the holders of the arrays' memory, from hold_memory */
    int busy; /* whether a call is running; see begin() */
    const struct unlocked *call; /* not NULL if a thread without a thread state makes the call */
    PyObject *error; /* raised by a wait in such a call, or NULL */
} Shared;

typedef struct {
    CORE_HEAD
    struct plan plan;
    Shared *over;
    PyObject *request;
    PyObject *otherwise; /* otherwise(plan, src, dst, deadline) for arrays that C cannot take */
    char description[CALL_BYTES]; /* for the peers, padded with zeros */
    uint64_t described;           /* the number of this description in the segment, or 0 */
} Plan;

/* Time for which a wait yields the processor before it calls Python. */
#define YIELD_NS 50000
/* A call on at least this many bytes takes longer than releasing the interpreter lock. */
#define LONG_CALL_BYTES (64 << 10)
/* A thread without the interpreter lock yields the processor for this time, then naps, as Python's
   waits do. It takes the lock when it has waited as long as Python's waits go without a look at the
   peers' processes, or a quarter of the timeout if that is less. */
#define NAP_AFTER_NS 100000
#define NAP_SHARE 0.05
#define NEED_PYTHON_NS 50000000
/* A result of wait_for(), beside 0 and -1, and beside the other results of a call. */
#define MOVED (-4)

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

/* Keeps the arrays' memory at its address. Called before other threads of Python can run. Returns
   whether the memory is where it was when the arrays were viewed. */
static int hold(Shared *self)
{
    int there = 1;
    for (int i = 0; i < 2; i++) {
        const struct view *view = self->views[i];
        if (view != NULL && self->held[i] == NULL)
            self->held[i] = hold_memory(self->core, view->array);
        there = there && (view == NULL || is_there(self->core, view));
    }
    return there;
}

/* Begins a call; returns whether no other call is running. Two threads may begin a call at once, if
   one of them has no interpreter lock. So an atomic exchange decides. */
static int begin(Shared *self)
{
    return !__atomic_exchange_n(&self->busy, 1, __ATOMIC_ACQUIRE);
}

static void end(Shared *self)
{
    __atomic_store_n(&self->busy, 0, __ATOMIC_RELEASE);
}

static void let_go(Shared *self)
{
    PyObject *held[] = {self->held[0], self->held[1]};
    for (int i = 0; i < 2; i++) {
        self->views[i] = NULL;
        self->held[i] = NULL;
        self->shared.inside[i] = NULL;
    }
    end(self);
    /* This may run a finalizer that makes a call. */
    Py_XDECREF(held[0]);
    Py_XDECREF(held[1]);
}

/* Sleeps until a peer wakes this rank, unless the word is there; for a share of the wait so far. */
static void nap(struct shared *s, int64_t waited, const uint64_t *word, uint64_t value,
                uint64_t most)
{
    uint32_t *asleep = (uint32_t *)(s->stages[s->rank].line + ASLEEP);
    /* Announce the nap before the last look: see nap() in module.c. */
    __atomic_store_n(asleep, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(s->sleepers, 1, __ATOMIC_SEQ_CST);
    if (!reached(word, value, most))
        sleep_until_woken(asleep, 1e-9 * NAP_SHARE * (double)waited);
    __atomic_store_n(asleep, 0, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(s->sleepers, 1, __ATOMIC_SEQ_CST);
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
    PyObject *site = exchange_site(self->core, call->site);
    int failed = ask_python(self, rank, word, value, most);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* as in wait_for() */
    if (failed)
        self->error = take_error();
    exchange_site(self->core, site);
    PyGILState_Release(state);
    return failed;
}

/* Waits for a word, without the interpreter lock. After YIELD_NS Python waits instead: its wait
   handles deadlines, signals and dead peers. Returns MOVED if another thread has given an array other
   memory, in a way that hold() cannot forbid, such as share_memory_() of a tensor. */
static int wait_for(void *context, int rank, const uint64_t *word, uint64_t value, uint64_t most)
{
    Shared *self = context;
    if (self->call != NULL)
        return wait_unlocked(self, rank, word, value, most);
    if (self->unlocked == NULL && !hold(self))
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
        for (int i = 0; i < 2 && !failed; i++)
            if (self->views[i] != NULL && !is_kept(self->core, self->held[i], self->views[i]))
                failed = MOVED;
    }
    if (self->unlocked)
        self->unlocked = PyEval_SaveThread();
    return failed;
}

/* Records the call, if there is a ring and the call has not been recorded yet. A short call keeps
   the interpreter lock, or never has it. So it is recorded while the other ranks arrive and this
   rank has nothing else to do. */
static void record(void *context)
{
    Shared *self = context;
    if (self->ring != NULL && self->call != NULL)
        record_unlocked(self->ring, self->call->source);
    else if (self->ring != NULL)
        record_begin(self->ring, self->request, 0);
    self->ring = NULL;
}

/* -- Shared --------------------------------------------------------------------------------- */

/* Shared(segment, rank, size, lines, calls, areas, area_bytes, least_long, looks, callbacks) */
static int read_shared(Shared *self, PyObject *args)
{
    struct shared *s = &self->shared;
    PyObject *memory, *callbacks;
    Py_ssize_t lines, calls, areas, area_bytes, least_long;
    if (!PyArg_ParseTuple(args, "OiinnnnniO:Shared", &memory, &s->rank, &s->size, &lines, &calls,
                          &areas, &area_bytes, &least_long, &s->looks, &callbacks)
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
    s->wait = wait_for;
    s->arrived = record;
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
    Shared *self = new_object(type);
    if (self != NULL && read_shared(self, args) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Python breaks a cycle through the callbacks, or through the owner of the memory, there. */
static int shared_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(((Shared *)object)->callbacks);
    Py_VISIT(((Shared *)object)->memory.obj);
    return visit_object(object, visit, arg);
}

static void shared_dealloc(PyObject *object)
{
    Shared *self = (Shared *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->callbacks);
    if (self->memory.obj != NULL)
        PyBuffer_Release(&self->memory);
    for (size_t i = 0; i < self->shared.known; i++)
        free(self->shared.segments[i]);
    free(self->shared.segments);
    free(self->shared.stages);
    free(self->shared.sources);
    free(self->shared.results);
    free(self->shared.announced);
    free_object(object);
}

/* Reads one integer for each rank. */
static int read_words(PyObject *sequence, int size, uint64_t *words)
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

/* -- Plan ----------------------------------------------------------------------------------- */

static int read_starts(struct plan *p, int size, PyObject *elements)
{
    if (elements == Py_None)
        return 0;
    uint64_t *starts = calloc((size_t)size + 1, sizeof *starts);
    if (starts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    p->starts = starts;
    if (read_words(elements, size, starts + 1) < 0)
        return -1;
    for (int rank = 0; rank < size; rank++) {
        p->longest = starts[rank + 1] > p->longest ? starts[rank + 1] : p->longest;
        if (__builtin_add_overflow(starts[rank + 1], starts[rank], &starts[rank + 1])
            || starts[rank + 1] > (uint64_t)PTRDIFF_MAX / 16) { /* 16: bytes of the longest type */
            PyErr_SetString(PyExc_ValueError, "plan: more elements than fit into memory");
            return -1;
        }
    }
    p->count = starts[size];
    return 0;
}

static int read_fold(struct plan *p, const char *op, int dtype, int mean)
{
    int folds = p->operation == ALL_REDUCE || p->operation == REDUCE
                || p->operation == REDUCE_SCATTER || p->operation == SCAN;
    if (folds != (op != NULL)) {
        PyErr_SetString(PyExc_ValueError, "plan: a call that folds needs an operator, and no other "
                                          "call takes one");
        return -1;
    }
    if (op == NULL)
        return 0;
    p->fold = fold_of(op, dtype, fold_levels() - 1);
    if (p->fold != NULL) {
        p->folded = item_bytes[dtype];
        p->divide = mean ? find_divide(fold_levels() - 1, dtype) : NULL;
    }
    if (p->fold == NULL || (mean && p->divide == NULL)) {
        PyErr_SetString(PyExc_ValueError, "plan: C has no fold for this operator and dtype");
        return -1;
    }
    return 0;
}

/* plan(operation, digest, root, elements, op, dtype, mean, request, description, otherwise) */
static PyObject *shared_plan(PyObject *over, PyObject *args)
{
    PyObject *elements, *request, *otherwise;
    Py_ssize_t described;
    const char *op, *description;
    int operation, root, dtype, mean, size = ((Shared *)over)->shared.size;
    unsigned long long digest;
    if (!PyArg_ParseTuple(args, "iKiOzipOy#O:plan", &operation, &digest, &root, &elements, &op,
                          &dtype, &mean, &request, &description, &described, &otherwise))
        return NULL;
    Plan *self = new_object(((Shared *)over)->core->plan_type);
    if (self == NULL)
        return NULL;
    self->over = (Shared *)Py_NewRef(over);
    self->request = Py_NewRef(request);
    self->otherwise = Py_NewRef(otherwise);
    struct plan *p = &self->plan;
    p->operation = (enum operation)operation;
    p->root = root;
    p->digest = digest;
    if (described <= CALL_BYTES)
        memcpy(self->description, description, (size_t)described);
    if ((unsigned)p->operation >= OPERATIONS || p->root < 0 || p->root >= size
        || (splits(p) || joins(p)) != (elements != Py_None) || described > CALL_BYTES) {
        PyErr_SetString(PyExc_ValueError, "plan: the operation, root, elements or description are "
                                          "not valid");
    } else if (read_starts(p, size, elements) == 0 && read_fold(p, op, dtype, mean) == 0) {
        return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

/* A plan has no tp_clear: a cycle through it also runs through an object of Python. */
static int plan_traverse(PyObject *object, visitproc visit, void *arg)
{
    Plan *self = (Plan *)object;
    Py_VISIT(self->over);
    Py_VISIT(self->request);
    Py_VISIT(self->otherwise);
    return visit_object(object, visit, arg);
}

static void plan_dealloc(PyObject *object)
{
    Plan *self = (Plan *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF((PyObject *)self->over);
    Py_XDECREF(self->request);
    Py_XDECREF(self->otherwise);
    free(self->plan.starts);
    free_object(object);
}

/* Whether C can make the call on these arrays: they do not overlap, or this rank's own piece is at
   the same address in both. Returns -1, without an exception, if the arrays have other lengths or
   types than the call. */
static int fits(const struct shared *s, const struct plan *p, const struct view *src,
                const struct view *dst)
{
    size_t nbytes = input_bytes(s, p), room = output_bytes(s, p);
    if ((p->fold != NULL && p->item != p->folded) || nbytes != (src ? src->nbytes : 0)
        || room != (dst ? dst->nbytes : 0))
        return -1;
    /* An output may be read-only if nothing is written to it: at the root of a broadcast in place,
       and if the output has no elements. */
    int in_place = nbytes && room && p->operation == BROADCAST && src->address == dst->address;
    if (room && !dst->writable && !in_place)
        return 0;
    if (!nbytes || !room)
        return 1;
    size_t at = start_of(s, p, s->rank) * p->item;
    const char *from = src->address + (splits(p) ? at : 0);
    const char *to = dst->address + (joins(p) ? at : 0);
    return (from == to && p->operation != ALL_TO_ALL) || src->address + nbytes <= dst->address
           || dst->address + room <= src->address;
}

/* Raises the exception for a failed call; the wait callback has already raised its own. */
static void give_up(const Plan *self, int failed, PyObject *limit)
{
    PyObject *callbacks = self->over->callbacks, *done = NULL, *deadline = NULL;
    const struct shared *s = &self->over->shared;
    int64_t began = self->over->began != 0 ? self->over->began : now_ns();
    if (failed == DIFFERENT && (deadline = deadline_of(self->core, limit, began)) != NULL)
        done = PyObject_CallMethod(callbacks, "differ", "OO", self->request, deadline);
    else if (failed == BROKEN || failed == MOVED)
        done = PyObject_CallMethod(callbacks, failed == BROKEN ? "fail" : "moved", "O",
                                   self->request);
    else if (failed == DAMAGED)
        done = PyObject_CallMethod(callbacks, "refuse", "Ois", self->request, s->damaging,
                                   s->damage);
    if (done != NULL)
        PyErr_SetString(PyExc_SystemError, "a call in C has failed, but its callback in Python did "
                                           "not raise");
    Py_XDECREF(deadline);
    Py_XDECREF(done);
}

/* Tells the peers which call this rank makes. The segment keeps the last CALLS_KEPT descriptions, so
   newer ones may have replaced that of this plan. Only a call that has begun publishes. */
static void publish_call(Plan *self)
{
    uint64_t *line = self->over->shared.stages[self->over->shared.rank].line;
    if (self->described == 0 || line[DESCRIBED] - self->described >= CALLS_KEPT) {
        self->described = line[DESCRIBED] + 1;
        memcpy(self->over->descriptions + self->described % CALLS_KEPT * CALL_BYTES,
               self->description, CALL_BYTES);
        __atomic_store_n(&line[DESCRIBED], self->described, __ATOMIC_RELEASE);
    }
    line[LAST_CALL] = self->described;
}

/* Whether all ranks have announced the same sums in this call, undamaged. */
static int are_alike(const struct shared *s)
{
    const uint64_t *first = s->announced;
    int alike = s->all_announced && first[2] == ~(first[0] ^ first[1]);
    for (int rank = 1; rank < s->size && alike; rank++)
        alike = memcmp(first, first + ANNOUNCED * rank, ANNOUNCED * sizeof *first) == 0;
    return alike;
}

/* Returns what a plan's method summed() returns, or NULL with an exception. */
static PyObject *report_sums(const struct shared *s, const struct sums *sums)
{
    Py_ssize_t nbytes = s->size * ANNOUNCED * (Py_ssize_t)sizeof *s->announced;
    return Py_BuildValue("KKny#", (unsigned long long)sums->total,
                         (unsigned long long)sums->placed, (Py_ssize_t)sums->nbytes,
                         s->all_announced ? (const char *)s->announced : NULL, nbytes);
}

/* Does the work of run_plan. If summed is not NULL, sets *summed to the report of the sums of what
   the call copies to the result. If only_unlike is true and all ranks have announced the same sums,
   leaves *summed as it is. */
static int run_summed(PyObject *object, const struct view *src, const struct view *dst,
                      PyObject *limit, PyObject *ring, PyObject **summed, int only_unlike)
{
    struct sums sums = {0, 0, 0};
    Plan *self = (Plan *)object;
    Shared *over = self->over;
    struct shared *s = &over->shared;
    struct plan *p = &self->plan;
    const struct view *one = src != NULL ? src : dst;
    if (!begin(over)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "plan: another thread of this rank is in a call of this communicator. All "
                        "ranks must make their calls in one order. Make all calls in one thread, or "
                        "give each thread a communicator of its own: comm.dup()");
        return -1;
    }
    p->item = one != NULL ? item_bytes[one->dtype] : 1;
    if (p->starts == NULL)
        p->count = one != NULL ? one->nbytes / p->item : 0;
    int is_long = p->count * p->item >= LONG_CALL_BYTES;
    int fit = fits(s, p, sends(s, p) ? src : NULL, takes(s, p) ? dst : NULL);
    over->views[0] = src;
    over->views[1] = dst != src ? dst : NULL;
    /* Another thread may have run since the arrays were viewed, while PyTorch made the result. It may
       have changed an array. */
    if (fit > 0 && is_long && !hold(over))
        fit = 0;
    if (fit <= 0) {
        let_go(over);
        if (fit < 0)
            PyErr_SetString(PyExc_ValueError, "plan: the arrays have other lengths or types than "
                                              "the plan's");
        return fit < 0 ? -1 : 1;
    }
    publish_call(self);
    over->request = self->request;
    over->limit = limit;
    over->began = 0;
    over->ring = ring;
    s->sums = summed != NULL ? &sums : NULL;
    s->all_announced = 0;
    const void *from = src != NULL ? src->address : NULL, *to = dst != NULL ? dst->address : NULL;
    Py_BEGIN_CRITICAL_SECTION(over);
    shared_locate(s, p, from, to);
    Py_END_CRITICAL_SECTION();
    if (is_long)
        record(over);
    over->unlocked = is_long ? PyEval_SaveThread() : NULL;
    int failed = shared_call(s, p, from, (void *)to);
    if (over->unlocked != NULL)
        PyEval_RestoreThread(over->unlocked);
    over->unlocked = NULL;
    s->sums = NULL;
    record(over); /* a call that has failed before it arrived is not recorded yet */
    int reports = !failed && summed != NULL && !(only_unlike && are_alike(s));
    if (reports)
        *summed = report_sums(s, &sums);
    /* The ranks share their calls in steps of the same counters if the calls differ. So no other call
       may begin before that. */
    if (failed)
        give_up(self, failed, limit);
    let_go(over);
    return failed || (reports && *summed == NULL) ? -1 : 0;
}

int run_plan(PyObject *object, const struct view *src, const struct view *dst, PyObject *limit,
             PyObject *ring)
{
    return run_summed(object, src, dst, limit, ring, NULL, 0);
}

int run_compared(PyObject *object, const struct view *src, const struct view *dst, PyObject *limit,
                 PyObject *ring, PyObject **compare)
{
    PyObject *report = NULL;
    int state = run_summed(object, src, dst, limit, ring, &report, 1);
    if (report != NULL && (*compare = PyTuple_Pack(2, ((Plan *)object)->request, report)) == NULL)
        state = -1;
    Py_XDECREF(report);
    return state;
}

/* -- calls without the interpreter lock ------------------------------------------------------- */

int check_unlocked(struct unlocked *call, PyObject *request)
{
    double seconds = PyFloat_AsDouble(call->limit);
    if (seconds == -1.0 && PyErr_Occurred())
        return -1;
    call->patience = seconds < 4e-9 * NEED_PYTHON_NS ? (int64_t)(seconds * 1e9 / 4)
                                                     : NEED_PYTHON_NS;
    call->most = seconds < 9e9 ? (int64_t)(seconds * 1e9) : INT64_MAX;
    return (call->source = source_in(call->ring, request, call->site)) < 0 ? -1 : 1;
}

static struct view *view_unlocked(const struct unlocked *call, int which, const void *in, void *out,
                                  struct view *view)
{
    if (which == NEITHER)
        return NULL;
    *view = (struct view){.address = which == IN ? (char *)in : out, .dtype = call->dtype,
                          .nbytes = call->nbytes[which], .writable = which == GIVEN_OUT};
    return view;
}

static int is_aligned(const struct view *view, size_t item)
{
    return view == NULL || (uintptr_t)view->address % (item > 8 ? 8 : item) == 0;
}

int run_unlocked(const struct unlocked *call, const void *in, void *out, PyObject **error)
{
    Plan *self = (Plan *)call->plan;
    Shared *over = self->over;
    struct shared *s = &over->shared;
    struct plan *p = &self->plan;
    struct view views[2], *src = view_unlocked(call, call->src, in, out, &views[0]);
    struct view *dst = view_unlocked(call, call->dst, in, out, &views[1]);
    /* The queue's length is read as a word: another thread may change it. A program's order of an
       asynchronous call and this one makes the length visible here. */
    if (__atomic_load_n(&((PyVarObject *)call->queue)->ob_size, __ATOMIC_ACQUIRE) != 0
        || !begin(over))
        return 1;
    p->item = src != NULL || dst != NULL ? item_bytes[call->dtype] : 1;
    if (p->starts == NULL)
        p->count = src != NULL ? src->nbytes / p->item : dst != NULL ? dst->nbytes / p->item : 0;
    if (__atomic_load_n(&call->removed, __ATOMIC_ACQUIRE)
        || (p->operation != BARRIER && is_due(call->ring)) || !is_aligned(src, p->item)
        || !is_aligned(dst, p->item)
        || fits(s, p, sends(s, p) ? src : NULL, takes(s, p) ? dst : NULL) != 1) {
        end(over);
        return 1;
    }
    publish_call(self);
    over->request = self->request;
    over->limit = call->limit;
    over->began = 0;
    over->ring = call->ring;
    over->call = call;
    /* These arrays are never in symmetric memory. */
    s->inside[0] = s->inside[1] = NULL;
    int failed = shared_call(s, p, src != NULL ? src->address : NULL,
                             dst != NULL ? dst->address : NULL);
    record(over); /* a call that has failed before it arrived is not recorded yet */
    *error = over->error;
    over->error = NULL;
    over->call = NULL;
    if (!failed)
        record_unlocked_end(call->ring);
    if (!failed && p->operation != BARRIER)
        count_call(call->ring);
    if (failed && *error == NULL) { /* before other calls can begin, as in run_summed() */
        PyGILState_STATE state = PyGILState_Ensure();
        PyObject *site = exchange_site(self->core, call->site);
        give_up(self, failed, call->limit);
        *error = take_error();
        exchange_site(self->core, site);
        PyGILState_Release(state);
    }
    end(over);
    if (!failed && call->copies)
        memcpy(out, in, call->nbytes[IN]);
    if (!failed && call->clears)
        memset(out, 0, call->nbytes[GIVEN_OUT]);
    return failed ? -1 : 0;
}

/* -- plans as functions of Python ------------------------------------------------------------- */

/* Views the array of a Buffer, or sets *view to NULL for None. Sets *array to a new reference, which
   the view needs. Returns 1, 0 if C cannot view the array, or -1 with an exception. */
static int view_buffer(const struct core *core, PyObject *buffer, PyObject **array,
                       struct view **view)
{
    if (buffer == Py_None) {
        *view = NULL;
        return 1;
    }
    *array = PyObject_GetAttrString(buffer, "array");
    return *array == NULL ? -1 : view_array(core, *array, *view);
}

/* Makes a call on Buffers; returns None or the sums, or NULL with an exception. */
static PyObject *call_plan(PyObject *self, PyObject *args, int is_summed)
{
    PyObject *buffers[2], *arrays[2] = {NULL, NULL}, *deadline, *sums = NULL;
    struct view views[2], *src = views, *dst = views + 1;
    const struct core *core = ((Plan *)self)->core;
    if (!PyArg_ParseTuple(args, "OOO:plan", buffers, buffers + 1, &deadline))
        return NULL;
    int plain = view_buffer(core, buffers[0], &arrays[0], &src);
    if (plain > 0)
        plain = view_buffer(core, buffers[1], &arrays[1], &dst);
    int state = plain < 0 ? -1 : 1;
    if (plain > 0)
        state = run_summed(self, src, dst, deadline, NULL, is_summed ? &sums : NULL, 0);
    Py_XDECREF(arrays[0]);
    Py_XDECREF(arrays[1]);
    if (state == 0)
        return is_summed ? sums : Py_NewRef(Py_None);
    if (state < 0)
        return NULL;
    PyObject *plan = is_summed ? PyObject_GetAttrString(self, "summed") : Py_NewRef(self);
    PyObject *done = plan == NULL ? NULL
                     : PyObject_CallFunctionObjArgs(((Plan *)self)->otherwise, plan, buffers[0],
                                                    buffers[1], deadline, NULL);
    Py_XDECREF(plan);
    return done;
}

/* plan(src, dst, deadline) */
static PyObject *plan_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    return refuse_keywords("plan", keywords) < 0 ? NULL : call_plan(self, args, 0);
}

/* summed(src, dst, deadline) */
static PyObject *plan_summed(PyObject *self, PyObject *args)
{
    return call_plan(self, args, 1);
}

static PyMethodDef plan_methods[] = {
    {"summed", plan_summed, METH_VARARGS,
     "summed(src, dst, deadline, /)\n--\n\n"
     "Make the call; return the sums of the result, the number of bytes that they are of, and the\n"
     "sums that all ranks have announced, or None."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot plan_slots[] = {
    {Py_tp_dealloc, plan_dealloc}, {Py_tp_traverse, plan_traverse}, {Py_tp_call, plan_call},
    {Py_tp_methods, plan_methods},
    {Py_tp_doc, "A prepared call, from Shared.plan(): plan(src, dst, deadline)."}, {0, NULL}};

static PyType_Spec plan_spec = {
    "collective.native._core.Plan", sizeof(Plan), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, plan_slots};

static PyMethodDef shared_methods[] = {
    {"know", shared_know, METH_VARARGS,
     "know(number, nbytes=0, addresses=None, /)\n--\n\n"
     "Register a mapped symmetric segment, or remove it if there are no addresses; return whether\n"
     "that was possible."},
    {"plan", shared_plan, METH_VARARGS,
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

int add_plans(PyObject *module, struct core *core)
{
    return add_type(module, &shared_spec, NULL) < 0
                   || add_type(module, &plan_spec, &core->plan_type) < 0 ? -1 : 0;
}
