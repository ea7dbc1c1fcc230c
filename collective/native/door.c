/* The type Door: a table of the plans of calls. */

#include "method.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* An entry of a Door's table of plans. C finds the plan of a call by its arguments, dtype and
   shape. To make a Request with its digest in Python takes many times as long as a small call, so C
   calls plan_for_c only for calls that are not in the table. An entry keeps no array.

   The field division is the call's order, if that is a division of shards: then the first axis of x
   is this rank's shards. It is compared by identity, as the operator is.

   The field plain is a method of a plan that is written in Python. The method takes NumPy's arrays
   as they are, so that no Buffers are needed. The field is NULL if the plan has no such method. */
struct entry {
    const struct operation *operation;
    PyObject *planned, *request, *plan, *plain, *op, *counts, *division; /* the last three: keys */
    int ordered, root, dtype, ndim;
    int64_t shape[VIEW_DIMENSIONS];
};
enum { ENTRY_REFERENCES = 7 };

/* Whether an entry is the plan of a call. The operator is compared by identity. Names in a program
   are interned, so a call in a program always passes the same object. The table holds a reference,
   so no other string can be at that address. A string that the program creates anew for each call
   matches no entry; then Python finds the plan. */
static int is_plan_of(const struct entry *p, const struct call *call)
{
    const struct view *x = &call->views[0];
    return p->operation == call->operation && p->op == call->op && p->ordered == call->ordered
           && p->division == call->division
           && p->root == call->root && p->dtype == x->dtype && p->ndim == x->ndim
           && (p->counts == NULL) == (call->counts == NULL)
           && (p->counts == NULL || PyObject_RichCompareBool(p->counts, call->counts, Py_EQ) == 1)
           && memcmp(p->shape, x->shape, sizeof *x->shape * (size_t)x->ndim) == 0;
}

static uint64_t hash_of(const struct call *call)
{
    const struct view *x = &call->views[0];
    uint64_t hash = (uint64_t)(uintptr_t)call->operation + (uintptr_t)call->op
                    + (uintptr_t)call->division + 31 * (unsigned)x->dtype + (unsigned)call->root
                    + (call->counts ? 127 * (uint64_t)call->total + 1 : 0);
    for (int i = 0; i < x->ndim; i++)
        hash = (hash ^ (uint64_t)x->shape[i]) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ hash >> 32;
}

/* Returns the place of a call's entry, or a place for a new one. */
static struct entry **place_of(Door *door, const struct call *call, uint64_t hash)
{
    for (uint64_t i = hash; i < hash + PLACES; i++) {
        struct entry **place = &door->table[i % ENTRIES];
        if (*place == NULL || is_plan_of(*place, call))
            return place;
    }
    return &door->table[(hash + (hash >> 40) % PLACES) % ENTRIES];
}

/* Frees an entry. It is in no table any more: a finalizer that runs then may make a call. */
static void forget(struct entry *p)
{
    if (p != NULL)
        references_clear(&p->planned, ENTRY_REFERENCES);
    free(p);
}

static struct found found_in(const struct core *core, const struct entry *p)
{
    int in_c = Py_TYPE(p->plan) == core->plan_type;
    return (struct found){Py_NewRef(p->plan), in_c ? NULL : Py_NewRef(p->request),
                          in_c ? NULL : Py_XNewRef(p->plain)};
}

/* Makes an entry of what plan_for_c has returned; returns its plan, or none with an exception. */
static struct found door_fill(Door *door, const struct call *call, PyObject *planned)
{
    const struct view *x = &call->views[0];
    struct found found = {NULL, NULL, NULL};
    struct entry *entry = malloc(sizeof *entry);
    if (entry == NULL) {
        PyErr_NoMemory();
        return found;
    }
    *entry = (struct entry){
        call->operation, Py_NewRef(planned), PyObject_GetAttrString(planned, "request"),
        PyObject_GetAttrString(planned, "plan"), NULL, Py_NewRef(call->op),
        Py_XNewRef(call->counts), Py_XNewRef(call->division), call->ordered, call->root,
        x->dtype, x->ndim, {0}};
    memcpy(entry->shape, x->shape, sizeof *x->shape * (size_t)x->ndim);
    assert(x->ndim <= VIEW_DIMENSIONS);
    if (entry->request != NULL && entry->plan != NULL) {
        if (Py_TYPE(entry->plan) != call->core->plan_type) {
            entry->plain = PyObject_GetAttrString(entry->plan, "plain");
            if (entry->plain == NULL) /* the plan has no such method */
                PyErr_Clear();
        }
        found = found_in(call->core, entry);
        (void)door; /* without free threads a critical section names no object */
        Py_BEGIN_CRITICAL_SECTION(door);
        struct entry **place = place_of(door, call, hash_of(call)), *old = *place;
        *place = entry;
        entry = old;
        Py_END_CRITICAL_SECTION();
    }
    forget(entry);
    return found;
}

struct found door_find(Door *door, const struct call *call)
{
    struct found found = {NULL, NULL, NULL};
    uint64_t hash = hash_of(call);
    Py_BEGIN_CRITICAL_SECTION(door);
    /* Nearly all calls are at their first place, so that is looked at first. */
    const struct entry *entry = door->table[hash % ENTRIES];
    if (entry != NULL && !is_plan_of(entry, call)) {
        entry = *place_of(door, call, hash + 1);
        entry = entry != NULL && is_plan_of(entry, call) ? entry : NULL;
    }
    if (entry != NULL)
        found = found_in(call->core, entry);
    Py_END_CRITICAL_SECTION();
    if (found.plan != NULL)
        return found;
    PyObject *arguments = call_arguments(call, 0);
    PyObject *planned = arguments == NULL ? NULL
                        : PyObject_CallMethod((PyObject *)call->path, "plan_for_c", "OO",
                                              call->kind, arguments);
    Py_XDECREF(arguments);
    /* If another thread has run meanwhile and has changed an array, Python must make the call, since
       it looks at the arrays again. */
    if (planned != NULL && planned != Py_None && are_there(call))
        found = door_fill(door, call, planned);
    Py_XDECREF(planned);
    return found;
}

/* -- calls as they were made ------------------------------------------------------------------ */

/* Returns the place of a call in the table of those made. A program that has a few buffers calls with
   one after the other. */
static struct made *made_at(Door *door, const struct operation *operation, PyObject *x)
{
    return &door->made[((uintptr_t)operation / 8 + (uintptr_t)x / 16) % REMEMBERED];
}

/* Copies a call. Its arrays are in its own views. */
static void copy_call(struct call *to, const struct call *from)
{
    *to = *from;
    to->src = from->src != NULL ? to->views + (from->src - from->views) : NULL;
    to->dst = from->dst != NULL ? to->views + (from->dst - from->views) : NULL;
}

/* Gives a call other references, and returns those that it had in their place. They are dropped
   afterwards: a finalizer may make a call through this door. */
static void exchange_kept(struct made *made, PyObject **kept)
{
    PyObject *old[MADE_REFERENCES];
    memcpy(old, &made->plan, sizeof old);
    memcpy(&made->plan, kept, sizeof old);
    memcpy(kept, old, sizeof old);
}

/* Whether a call was made before with these arguments, and they have what they had. */
static int is_again(const struct made *made, const struct operation *operation, PyObject *const *args,
                    Py_ssize_t count, PyObject *names)
{
    const struct call *call = &made->call;
    Py_ssize_t all = count + (names == NULL ? 0 : PyTuple_Size(names));
    if (made->plan == NULL || call->operation != operation || made->names != names
        || made->count != count || all > ARGUMENTS)
        return 0;
    for (Py_ssize_t i = 0; i < all; i++)
        if (args[i] != made->args[i])
            return 0;
    return (operation->shape == NONE || is_same(call->core, &call->views[0]))
           && (call->dst != &call->views[1] || makes_result(call)
               || is_same(call->core, &call->views[1]));
}

struct found door_recall(Door *door, const struct operation *operation, PyObject *const *args,
                         Py_ssize_t count, PyObject *names, struct call *call)
{
    struct found found = {NULL, NULL, NULL};
    if (PyList_Size(door->queue) != 0)
        return found;
    Py_BEGIN_CRITICAL_SECTION(door);
    const struct made *made = made_at(door, operation, count ? args[0] : NULL);
    if (is_again(made, operation, args, count, names)) {
        copy_call(call, &made->call);
        found.plan = Py_NewRef(made->plan);
    }
    Py_END_CRITICAL_SECTION();
    return found;
}

void door_remember(Door *door, const struct call *call, PyObject *plan, PyObject *const *args,
                   Py_ssize_t count, PyObject *names)
{
    Py_ssize_t all = count + (names == NULL ? 0 : PyTuple_Size(names));
    if (call->division != NULL || call->counts != NULL || call->is_thawed || all > ARGUMENTS
        || (call->operation->shape != NONE && !is_same(call->core, &call->views[0])))
        return;
    PyObject *kept[MADE_REFERENCES] = {Py_NewRef(plan), Py_XNewRef(names), Py_XNewRef(call->op),
                                       Py_XNewRef(call->order), Py_XNewRef(call->root_object)};
    Py_BEGIN_CRITICAL_SECTION(door);
    struct made *made = made_at(door, call->operation, count ? args[0] : NULL);
    exchange_kept(made, kept);
    made->count = count;
    memcpy(made->args, args, (size_t)all * sizeof *args);
    copy_call(&made->call, call);
    Py_END_CRITICAL_SECTION();
    references_clear(kept, MADE_REFERENCES);
}

static PyObject *door_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *ring, *queue;
    int rank, size;
    if (refuse_keywords("Door", keywords) < 0
        || !PyArg_ParseTuple(args, "OO!ii:Door", &ring, &PyList_Type, &queue, &rank, &size))
        return NULL;
    if (Py_TYPE(ring) != ((struct core *)PyType_GetModuleState(type))->ring_type)
        return PyErr_Format(PyExc_TypeError, "Door: the first argument must be a Ring");
    if (rank < 0 || rank >= size)
        return PyErr_Format(PyExc_ValueError, "Door: rank %d is not one of %d ranks", rank, size);
    Door *door = object_new(type, REFERENCES(Door, queue));
    if (door == NULL)
        return NULL;
    door->ring = Py_NewRef(ring);
    door->queue = Py_NewRef(queue);
    door->rank = rank;
    door->size = size;
    return (PyObject *)door;
}

static int door_traverse(PyObject *object, visitproc visit, void *arg)
{
    for (int i = 0; i < ENTRIES; i++) {
        const struct entry *entry = ((Door *)object)->table[i];
        int stop = entry ? references_visit(&entry->planned, ENTRY_REFERENCES, visit, arg) : 0;
        if (stop)
            return stop;
    }
    for (int i = 0; i < REMEMBERED; i++) {
        int stop = references_visit(&((Door *)object)->made[i].plan, MADE_REFERENCES, visit, arg);
        if (stop)
            return stop;
    }
    return object_traverse(object, visit, arg);
}

static int door_clear(PyObject *object)
{
    for (int i = 0; i < ENTRIES; i++) {
        struct entry *entry = ((Door *)object)->table[i];
        ((Door *)object)->table[i] = NULL;
        forget(entry);
    }
    for (int i = 0; i < REMEMBERED; i++) {
        PyObject *kept[MADE_REFERENCES] = {NULL};
        exchange_kept(&((Door *)object)->made[i], kept);
        references_clear(kept, MADE_REFERENCES);
    }
    return 0;
}

static void door_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    unlocked_remove(object);
    door_clear(object);
    object_dealloc(object);
}

static PyObject *door_unlock(PyObject *object, PyObject *args)
{
    Door *door = (Door *)object;
    return unlocked_add(door->core, door, door->ring, door->queue, args);
}

static PyObject *door_lock(PyObject *object, PyObject *none)
{
    (void)none;
    unlocked_remove(object);
    Py_RETURN_NONE;
}

static PyMethodDef door_methods[] = {
    {"unlock", door_unlock, METH_VARARGS,
     "unlock(first, second, plan, request, arrays, site, seconds, turn, /)\n--\n\n"
     "Let threads without the interpreter lock make a call; return whether they can."},
    {"lock", door_lock, METH_NOARGS,
     "lock()\n--\n\nLet Python make all calls from now on that have been unlocked."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot door_slots[] = {
    {Py_tp_new, door_new},           {Py_tp_dealloc, door_dealloc},
    {Py_tp_traverse, door_traverse}, {Py_tp_clear, door_clear},
    {Py_tp_methods, door_methods},   {0, NULL}};

static PyType_Spec door_spec = {"collective.native._core.Door", sizeof(Door), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, door_slots};


int add_door(PyObject *module, struct core *core)
{
    return type_add(module, &door_spec, &core->door_type);
}
