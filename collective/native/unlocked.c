/* Calls that a thread makes without the interpreter lock, by numbers: for libraries in C that make
   the same call again and again on other arrays, such as the handlers of XLA's calls.

   The first call of a number goes through Python, which then "unlocks" it, by Door.unlock(). From
   then on run() makes the call. It takes the lock only if a wait gets long or the call fails. It
   leaves a call to Python if there is no entry, if an asynchronous call is in flight, if another
   thread is in a call of the same communicator, or if the ranks compare the results of the call.

   An entry belongs to a door. It is removed when the path shuts the door, so an entry exists only as
   long as C may make plain calls: see Path.open_doors.

   The table is one for the process, and not part of the module's state, because the caller in C
   knows no module. Its lock is held for some instructions only, and never while a thread waits for
   the interpreter lock. */

#include "python.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS 1024 /* a power of two */

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct unlocked *table[BUCKETS];

/* A fork waits until no thread has the lock. In the child that thread would not exist, and Python
   takes the lock there when it shuts the doors. */
static void lock_table(void)
{
    pthread_mutex_lock(&table_lock);
}

static void unlock_table(void)
{
    pthread_mutex_unlock(&table_lock);
}

static void prepare_forks(void)
{
    pthread_atfork(lock_table, unlock_table, unlock_table);
}

/* The error of this thread's last call, until failure() takes it. */
static __thread PyObject *failed;

/* A lock that a thread without the interpreter lock can hold, and Python code as well. */
typedef struct {
    CORE_HEAD
    PyThread_type_lock lock;
} Turn;

static struct unlocked **bucket_of(int64_t first, int64_t second)
{
    uint64_t hash = ((uint64_t)first ^ (uint64_t)second * 31) * UINT64_C(0x9E3779B97F4A7C15);
    return &table[(hash ^ hash >> 32) % BUCKETS];
}

/* Drops one use of an entry; the last one frees the entry. PyGILState_Ensure() is for the main
   interpreter, and so is every entry: see unlocked_add(). */
static void drop(struct unlocked *entry)
{
    if (__atomic_sub_fetch(&entry->users, 1, __ATOMIC_ACQ_REL) != 0)
        return;
    if (!Py_IsInitialized())
        return; /* XLA's threads may run longer than Python, which has freed all objects */
    PyGILState_STATE state = PyGILState_Ensure();
    references_clear(&entry->plan, UNLOCKED_REFERENCES);
    PyGILState_Release(state);
    free(entry);
}

/* Removes entries: those of an owner, or if that is NULL, the one with a key. */
static void remove_entries(const void *owner, int64_t first, int64_t second)
{
    struct unlocked *gone = NULL;
    struct unlocked **from = owner ? table : bucket_of(first, second);
    lock_table();
    for (struct unlocked **bucket = from; bucket < (owner ? table + BUCKETS : from + 1); bucket++) {
        for (struct unlocked **at = bucket; *at != NULL;) {
            struct unlocked *entry = *at;
            if (owner ? entry->owner == owner : entry->key[0] == first && entry->key[1] == second) {
                __atomic_store_n(&entry->removed, 1, __ATOMIC_RELEASE);
                *at = entry->next;
                entry->next = gone;
                gone = entry;
            } else {
                at = &entry->next;
            }
        }
    }
    unlock_table();
    while (gone != NULL) {
        struct unlocked *next = gone->next;
        drop(gone);
        gone = next;
    }
}

void unlocked_remove(const void *door)
{
    remove_entries(door, 0, 0);
}

/* Keeps the error of a call for failure(), in place of one that nobody has taken. */
static void keep_error(PyObject *error)
{
    if (failed != NULL && Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_CLEAR(failed);
        PyGILState_Release(state);
    }
    failed = error;
}

/* Makes the call with a number on other arrays. Returns DONE, which is 0; or another number if the
   caller must have Python make the call. Python finds the error by failure() if the call has failed. */
static int run(int64_t first, int64_t second, const void *in, void *out)
{
    lock_table();
    struct unlocked *entry = *bucket_of(first, second);
    while (entry != NULL && (entry->key[0] != first || entry->key[1] != second))
        entry = entry->next;
    if (entry != NULL)
        __atomic_add_fetch(&entry->users, 1, __ATOMIC_RELAXED);
    unlock_table();
    if (entry == NULL)
        return FALL_BACK;
    PyObject *error = NULL;
    PyThread_type_lock lock = entry->turn != NULL ? ((Turn *)entry->turn)->lock : NULL;
    if (lock != NULL)
        PyThread_acquire_lock(lock, WAIT_LOCK);
    enum outcome state = plan_run_unlocked(entry, in, out, &error);
    if (lock != NULL)
        PyThread_release_lock(lock);
    keep_error(error);
    drop(entry);
    return state;
}

typedef int run_function(int64_t first, int64_t second, const void *in, void *out);
static run_function *const runner = run;

/* Reads the arguments of Door.unlock into an entry; returns 0, or -1 with an exception. */
static int read_entry(struct unlocked *entry, const struct core *core, PyObject *args,
                      PyObject **request)
{
    long long first, second;
    Py_ssize_t in_bytes, out_bytes;
    PyObject *plan, *site, *limit, *turn;
    if (!PyArg_ParseTuple(args, "LLOO(iippinn)OOO:unlock", &first, &second, &plan, request,
                          &entry->src, &entry->dst, &entry->copies, &entry->clears, &entry->dtype,
                          &in_bytes, &out_bytes, &site, &limit, &turn))
        return -1;
    entry->key[0] = first;
    entry->key[1] = second;
    entry->nbytes[IN] = (size_t)in_bytes;
    entry->nbytes[GIVEN_OUT] = (size_t)out_bytes;
    entry->plan = Py_NewRef(plan);
    entry->site = Py_NewRef(site);
    entry->limit = Py_NewRef(limit);
    if (turn != Py_None && Py_TYPE(turn) != core->turn_type) {
        PyErr_SetString(PyExc_TypeError, "unlock: the turn must be a Turn or None");
        return -1;
    }
    entry->turn = turn == Py_None ? NULL : Py_NewRef(turn);
    if (entry->src < NEITHER || entry->src > GIVEN_OUT || entry->dst < NEITHER
        || entry->dst > GIVEN_OUT || (unsigned)entry->dtype >= DTYPES || in_bytes < 0
        || out_bytes < 0 || (entry->copies && in_bytes != out_bytes)) {
        PyErr_SetString(PyExc_ValueError, "unlock: the arrays are not valid");
        return -1;
    }
    return 0;
}

PyObject *unlocked_add(const struct core *core, const void *door, PyObject *ring, PyObject *queue,
                      PyObject *args)
{
    PyObject *request;
    /* A thread that Python does not know can enter only the main interpreter, which is number 0. */
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0)
        Py_RETURN_FALSE;
    struct unlocked *entry = calloc(1, sizeof *entry);
    if (entry == NULL)
        return PyErr_NoMemory();
    entry->owner = door;
    entry->users = 1;
    entry->ring = Py_NewRef(ring);
    entry->queue = Py_NewRef(queue);
    enum outcome fits = read_entry(entry, core, args, &request) < 0 ? FAILED : DONE;
    if (fits == DONE)
        fits = Py_TYPE(entry->plan) == core->plan_type ? plan_check_unlocked(entry, request)
                                                       : FALL_BACK;
    if (fits != DONE) {
        drop(entry);
        return fits == FAILED ? NULL : Py_NewRef(Py_False);
    }
    struct unlocked **bucket = bucket_of(entry->key[0], entry->key[1]);
    remove_entries(NULL, entry->key[0], entry->key[1]);
    lock_table();
    entry->next = *bucket;
    *bucket = entry;
    unlock_table();
    return Py_NewRef(Py_True);
}

/* forget(first, second) */
static PyObject *forget(PyObject *module, PyObject *args)
{
    long long first, second;
    (void)module;
    if (!PyArg_ParseTuple(args, "LL:forget", &first, &second))
        return NULL;
    remove_entries(NULL, first, second);
    Py_RETURN_NONE;
}

/* failure() */
static PyObject *failure(PyObject *module, PyObject *none)
{
    PyObject *error = failed;
    (void)module, (void)none;
    failed = NULL;
    return error != NULL ? error : Py_NewRef(Py_None);
}

/* -- Turn ------------------------------------------------------------------------------------ */

static PyObject *turn_enter(PyObject *object, PyObject *none)
{
    Turn *turn = (Turn *)object;
    (void)none;
    if (!PyThread_acquire_lock(turn->lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(turn->lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    return Py_NewRef(object);
}

static PyObject *turn_exit(PyObject *object, PyObject *error)
{
    (void)error;
    PyThread_release_lock(((Turn *)object)->lock);
    Py_RETURN_NONE;
}

static PyObject *turn_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    if (refuse_keywords("Turn", keywords) < 0 || !PyArg_ParseTuple(args, ":Turn"))
        return NULL;
    Turn *turn = object_new(type, 0);
    if (turn != NULL && (turn->lock = PyThread_allocate_lock()) == NULL) {
        Py_DECREF(turn);
        return PyErr_NoMemory();
    }
    return (PyObject *)turn;
}

static void turn_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    if (((Turn *)object)->lock != NULL)
        PyThread_free_lock(((Turn *)object)->lock);
    object_dealloc(object);
}

static PyMethodDef turn_methods[] = {
    {"__enter__", turn_enter, METH_NOARGS, NULL},
    {"__exit__", turn_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

static PyType_Slot turn_slots[] = {
    {Py_tp_new, turn_new},          {Py_tp_dealloc, turn_dealloc},
    {Py_tp_traverse, object_traverse}, {Py_tp_methods, turn_methods},
    {Py_tp_doc, "A lock that threads without the interpreter lock can hold, too."}, {0, NULL}};

static PyType_Spec turn_spec = {"collective.native._core.Turn", sizeof(Turn), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, turn_slots};

static PyMethodDef functions[] = {
    {"forget", forget, METH_VARARGS,
     "forget(first, second, /)\n--\n\nRemove the call that has been unlocked by this number."},
    {"failure", failure, METH_NOARGS,
     "failure()\n--\n\nReturn the error of this thread's last unlocked call, once; else None."},
    {NULL, NULL, 0, NULL}};

int add_unlocked(PyObject *module, struct core *core)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare_forks);
    PyObject *capsule = PyCapsule_New((void *)runner, "collective.native._core.run", NULL);
    int added = capsule != NULL && PyModule_AddObjectRef(module, "run", capsule) == 0;
    Py_XDECREF(capsule);
    return !added || PyModule_AddFunctions(module, functions) < 0
                   || type_add(module, &turn_spec, &core->turn_type) < 0 ? -1 : 0;
}
