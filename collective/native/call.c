/* Collective calls in C: their arguments, their result, and their plan; see method.h. */

#include "method.h"

#include <string.h>

/* Whether C can make the next call of an operation; sets whether its results are compared. C
   compares only those of an all_reduce, which are the same on all ranks. */
static int can_make(const struct operation *operation, PyObject *ring, int *due)
{
    *due = has_result(operation) && record_is_due(ring);
    return !*due || strcmp(operation->name, "all_reduce") == 0;
}

static int is_apart_or(const struct view *a, const struct view *b, const char *same)
{
    return a->address == same || a->address + a->nbytes <= b->address
           || b->address + b->nbytes <= a->address;
}

/* Multiplies a number of rows by that of the ranks. Returns 0 if no array can have so many rows, not
   even one without elements. Then Python raises the error, on all ranks. */
static int has_rows(int64_t rows, const Door *door, int64_t *product)
{
    return !__builtin_mul_overflow(rows, (int64_t)door->size, product);
}

/* Sets the shape of the result in call->views[1]; returns 0 if Python must make the call. */
static int shape_result(const Door *door, struct call *call)
{
    struct view *view = &call->views[1];
    enum shape shape = call->operation->shape;
    *view = call->views[0];
    if (call->division != NULL) { /* the result has the shape of one shard, or a piece of it */
        if (view->ndim-- == 0)
            return 0;
        memmove(view->shape, view->shape + 1, sizeof *view->shape * (size_t)view->ndim);
    }
    if (shape == SAME)
        return 1;
    if (view->ndim == 0)
        return 0;
    int64_t rows = view->shape[0], mine = rows / door->size + (door->rank < rows % door->size);
    view->shape[0] = shape == JOINED ? call->total : mine;
    return shape != EXCHANGED || has_rows(mine, door, &view->shape[0]);
}

/* Finds the array for the result, or makes one. */
static enum outcome find_output(const Door *door, struct call *call)
{
    enum shape shape = call->operation->shape;
    const struct view *x = &call->views[0];
    struct view want, *got = &call->views[1];
    if (!shape_result(door, call))
        return FALL_BACK;
    want = *got;
    int makes = call->out == Py_None;
    call->result = !makes ? Py_NewRef(call->out)
                   : (call->is_thawed ? aligned_array : new_array)(call->core, call->x, got);
    if (call->result == NULL)
        return FAILED;
    if ((!makes && !view_array(call->core, call->result, got))
        || !got->writable || got->dtype != want.dtype || got->ndim != want.ndim
        || memcmp(got->shape, want.shape, sizeof *want.shape * (size_t)want.ndim) != 0)
        return FALL_BACK;
    /* The one address where x may overlap the result: its beginning, for a call in place, or this
       rank's piece of a joined result. */
    size_t row = shape == JOINED && x->shape[0] ? x->nbytes / (size_t)x->shape[0] : 0;
    const char *same = (shape == SAME || shape == JOINED) && call->division == NULL
                           ? got->address + (size_t)call->before * row : NULL;
    call->dst = got;
    int apart = (call->operation->who == FROM_ROOT && shape == SAME) || is_apart_or(x, got, same);
    return apart ? DONE : FALL_BACK;
}

/* Reads the number of rows of each rank; returns whether C can make a call with these counts. */
static int read_counts(const Door *door, struct call *call, PyObject *counts)
{
    const struct view *x = &call->views[0];
    if (!PyList_CheckExact(counts) && !PyTuple_CheckExact(counts))
        return 0;
    /* A copy: another thread may change a list at any time. */
    call->counts = PySequence_Tuple(counts);
    if (call->counts == NULL)
        PyErr_Clear();
    if (call->counts == NULL || PyTuple_Size(call->counts) != door->size || x->ndim == 0)
        return 0;
    for (int rank = 0; rank < door->size; rank++) {
        PyObject *each = PyTuple_GetItem(call->counts, rank);
        int overflow;
        int64_t rows = PyLong_CheckExact(each) ? PyLong_AsLongLongAndOverflow(each, &overflow) : -1;
        if (rows < 0 || rows > INT32_MAX || (rank == door->rank && rows != x->shape[0]))
            return 0;
        call->before += rank < door->rank ? rows : 0;
        call->total += rows;
    }
    return 1;
}

/* Reads the arguments. */
static enum outcome read_call(const Door *door, struct call *call, PyObject *const *given)
{
    int counted = given[COUNTS] != Py_None;
    if (given[TIMEOUT] != Py_None || given[ASYNC] != Py_False || given[AXIS] != call->core->zero
        || (counted && call->operation->shape != JOINED) || PyList_Size(door->queue) != 0)
        return FALL_BACK;
    call->x = given[X], call->out = given[OUT], call->op = given[OP];
    call->order = given[ORDER], call->root_object = given[ROOT];
    if (call->order != Py_None) {
        if (!PyUnicode_Check(call->order))
            call->division = call->order; /* plan_for_c refuses what is no division of shards */
        else if (PyUnicode_CompareWithASCIIString(call->order, "rank") == 0)
            call->ordered = 1;
        else
            return FALL_BACK;
    }
    if (call->operation->folds && !PyUnicode_CheckExact(call->op))
        return FALL_BACK;
    call->root = -1;
    if (call->operation->who != EVERYBODY) {
        int overflow;
        if (!PyLong_CheckExact(call->root_object))
            return FALL_BACK;
        long root = PyLong_AsLongAndOverflow(call->root_object, &overflow);
        if (root < 0 || root >= door->size)
            return FALL_BACK;
        call->root = (int)root;
    }
    if (call->operation->shape == NONE) {
        call->result = Py_NewRef(Py_None);
        return DONE;
    }
    int is_root = call->root == door->rank, scatters = call->operation->shape == CUT
                                                       && call->operation->who == FROM_ROOT;
    if (call->operation->who == FROM_ROOT && !is_root) {
        if (call->x == Py_None)
            call->x = call->out;
        else if (scatters)
            return FALL_BACK;
    }
    if (!view_array(call->core, call->x, &call->views[0])
        || (counted && !read_counts(door, call, given[COUNTS])))
        return FALL_BACK;
    if (call->operation->shape == JOINED && !counted && call->views[0].ndim > 0) {
        if (!has_rows(call->views[0].shape[0], door, &call->total))
            return FALL_BACK;
        call->before = call->total / door->size * door->rank;
    }
    call->src = &call->views[0];
    if (scatters && !is_root) { /* x is the output, from which Python derives the whole shape */
        call->src = NULL;
        call->dst = &call->views[0];
        call->result = Py_NewRef(call->out);
        return call->out != Py_None && call->dst->ndim > 0 && call->dst->writable ? DONE : FALL_BACK;
    }
    if (call->operation->who == FROM_ROOT && is_root && !scatters) {
        if (call->out != Py_None && call->out != call->x)
            return FALL_BACK;
        call->dst = call->src;
        call->result = Py_NewRef(call->x);
        /* Without out, x is the result if it is an array as the other ranks get. */
        return call->src->writable && (call->out != Py_None || is_result(call->core, call->x))
                   ? DONE : FALL_BACK;
    }
    if (call->operation->who == AT_ROOT && !is_root) {
        call->result = Py_NewRef(Py_None);
        return DONE;
    }
    enum outcome found = find_output(door, call);
    if (call->operation->who == FROM_ROOT && !scatters)
        call->src = call->dst;
    return found;
}

/* Returns the number of a view's elements as an int; 0 for no view. */
static PyObject *count_of(const struct view *view)
{
    return PyLong_FromSize_t(view == NULL ? 0 : view->nbytes / item_bytes[view->dtype]);
}

PyObject *call_arguments(const struct call *call, int with_out)
{
    PyObject *arguments = PyDict_New();
    /* At the ranks that only receive a piece of a scatter, the call's array is its output. */
    int is_output = call->operation->shape == CUT && call->src == NULL;
    struct {
        enum name name;
        PyObject *value;
    } const all[] = {
        {X, is_output ? NULL : call->x}, {OUT, is_output ? call->x : with_out ? call->out : NULL},
        {OP, call->op}, {ORDER, call->order}, {ROOT, call->root_object}, {COUNTS, call->counts}};
    for (size_t i = 0; arguments != NULL && i < sizeof all / sizeof *all; i++)
        if (all[i].value != NULL && all[i].value != Py_None
            && call->operation->takes & BIT(all[i].name)
            && PyDict_SetItem(arguments, call->core->names[all[i].name], all[i].value) < 0)
            Py_CLEAR(arguments);
    return arguments;
}

/* Has Python handle the current exception of a call. Python raises an error, or goes on with the
   call if the ranks' arguments may differ in it. Returns the result of that. */
static PyObject *recover(const struct call *call)
{
    PyObject *error = error_take(), *held = NULL, *arguments = call_arguments(call, 1);
    hold_all(call->core, call->x, &held);
    hold_all(call->core, call->out, &held);
    PyObject *done = arguments == NULL ? NULL
                     : PyObject_CallMethod((PyObject *)call->path, "recover_for_c", "OOO",
                                           call->kind, arguments, error);
    Py_XDECREF(arguments);
    Py_XDECREF(held);
    Py_XDECREF(error);
    return done;
}

/* Runs a plan that is written in Python. */
static enum outcome run_in_python(Door *door, const struct call *call, const struct found *found,
                                  PyObject *limit)
{
    const struct core *core = call->core;
    PyObject *x = call->src == NULL ? Py_None : call->src == call->dst ? call->result : call->x;
    PyObject *out = call->dst ? call->result : Py_None;
    int numpy = (x == Py_None || is_numpy(core, x)) && (out == Py_None || is_numpy(core, out));
    PyObject *ran = NULL, *held = NULL, *deadline = NULL, *of_x = NULL, *of_out = NULL;
    enum outcome state = FALL_BACK;
    hold_all(core, x, &held);
    if (out != x)
        hold_all(core, out, &held);
    /* Before the memory was held, another thread may have run and may have changed an array. */
    if (are_there(call)) {
        record_begin(door->ring, found->request, 0);
        if ((deadline = deadline_of(core, limit, now_ns())) == NULL)
            ; /* the exception stands */
        else if (numpy && found->plain != NULL)
            ran = PyObject_CallFunctionObjArgs(found->plain, x, out, deadline, NULL);
        else if ((of_x = count_of(call->src)) != NULL && (of_out = count_of(call->dst)) != NULL)
            /* A tensor can still get other memory, so the path compares the counts. */
            ran = PyObject_CallMethodObjArgs((PyObject *)call->path, core->names[NAME_RUN_PYTHON_PLAN],
                                             found->request, found->plan, x, of_x, out, of_out,
                                             deadline, NULL);
        state = ran == NULL ? FAILED : DONE;
    }
    Py_XDECREF(of_x);
    Py_XDECREF(of_out);
    Py_XDECREF(deadline);
    Py_XDECREF(ran);
    Py_XDECREF(held);
    return state;
}

/* Returns the result of a call that has succeeded. If compare is not NULL, has Python compare the
   ranks' results first; see plan_run_compared(). */
static PyObject *result_of(const struct call *call, PyObject *compare)
{
    if (compare != NULL) {
        PyObject *done = PyObject_CallMethod((PyObject *)call->path, "compare_for_c", "OO",
                                             call->result, compare);
        Py_XDECREF(done);
        if (done == NULL)
            return NULL;
    }
    return Py_NewRef(call->result);
}

/* Makes a call by its plan, and drops the references in found. */
static PyObject *make(Door *door, struct call *call, struct found found)
{
    PyObject *limit = read_field((PyObject *)call->path, &call->path->timeout), *done = NULL;
    PyObject *compare = NULL;
    enum outcome state;
    if (limit == NULL || (call->is_due && found.request != NULL))
        state = FALL_BACK; /* Python raises the error, or compares the results of a plan in Python */
    else if (call->is_due)
        state = plan_run_compared(found.plan, call->src, call->dst, limit, door->ring, &compare);
    else if (found.request == NULL)
        state = plan_run(found.plan, call->src, call->dst, limit, door->ring);
    else
        state = run_in_python(door, call, &found, limit);
    if (state == DONE) {
        record_end(door->ring);
        if (has_result(call->operation))
            record_count(door->ring);
        done = result_of(call, compare);
    } else {
        done = state == FAILED ? recover(call) : Py_NewRef(Py_NotImplemented);
    }
    Py_XDECREF(compare);
    Py_XDECREF(limit);
    Py_DECREF(found.plan);
    Py_XDECREF(found.request);
    Py_XDECREF(found.plain);
    return done;
}

/* Puts the arguments in their places by name; returns whether C knows all of them. */
static int sort_arguments(const struct core *core, const struct operation *operation,
                          PyObject *const *args, Py_ssize_t count, PyObject *names,
                          PyObject **given)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    if (count > (operation->takes & BIT(X) ? 1 : 0))
        return 0;
    if (count)
        given[X] = args[0];
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        int which = 0;
        /* Keywords in a program's source are interned, so equal keywords are the same object. */
        while (which < ARGUMENTS && name != core->names[which])
            which++;
        if (which == ARGUMENTS || !(operation->takes & BIT(which)) || (which == X && count))
            return 0;
        given[which] = args[count + i];
    }
    return 1;
}

/* Returns the framework's array for a result of NumPy's, or what is no such result as it is. */
static PyObject *frozen(const struct core *core, PyObject *done)
{
    if (done == NULL || !is_numpy(core, done))
        return done;
    PyObject *wrapped = PyObject_CallFunctionObjArgs(core->wrap_frozen, done, NULL);
    Py_DECREF(done);
    return wrapped;
}

/* Makes a call that the door remembers. Returns NotImplemented if it remembers none. */
static PyObject *make_again(Door *door, const Method *method, Gate *path, PyObject *const *args,
                            Py_ssize_t count, PyObject *names)
{
    struct call call;
    struct found found = door_recall(door, method->operation, args, count, names, &call);
    if (found.plan == NULL)
        return Py_NewRef(Py_NotImplemented);
    call.path = path;
    call.kind = method->kind;
    if (!makes_result(&call))
        call.result = Py_NewRef(call.dst != NULL ? call.dst->array : Py_None);
    else
        call.result = new_array(call.core, call.x, call.dst);
    PyObject *done = call.result == NULL ? NULL : Py_NewRef(Py_NotImplemented);
    if (done != NULL && (call.dst == NULL || call.dst->dtype >= 0)) {
        Py_DECREF(done);
        done = make(door, &call, found);
    } else {
        Py_DECREF(found.plan);
    }
    Py_XDECREF(call.result);
    return done;
}

PyObject *call_collective(const Method *method, Gate *path, PyObject *const *args, Py_ssize_t count,
                          PyObject *names)
{
    const struct core *core = method->core;
    const struct operation *operation = method->operation;
    /* Keep the door: while the call waits, other code may close the communicator. */
    PyObject *owner = (PyObject *)path, *door = read_field(owner, &path->doors[operation->door]);
    int is_due, is_open = door != NULL && Py_TYPE(door) == core->door_type;
    PyObject *done = is_open && can_make(operation, ((Door *)door)->ring, &is_due) && !is_due
                         ? make_again((Door *)door, method, path, args, count, names)
                         : Py_NewRef(Py_NotImplemented);
    PyObject *given[ARGUMENTS] = {
        Py_None, Py_None, operation->folds ? core->names[NAME_SUM] : Py_None, Py_None,
        operation->who == EVERYBODY ? Py_None : core->zero, Py_None, Py_False, Py_None,
        core->zero};
    if (done != Py_NotImplemented || !sort_arguments(core, operation, args, count, names, given)) {
        Py_XDECREF(door);
        return done;
    }
    if (given[COUNTS] != Py_None) {
        /* With counts the ranks need not ask each other for lengths, so the general door serves. */
        Py_XDECREF(door);
        door = read_field(owner, &path->doors[OF_ALL]);
    }
    struct call call = {
        .core = core, .operation = operation, .path = path, .kind = method->kind};
    PyObject *thaw = NULL;
    enum outcome plain = FALL_BACK;
    if (door != NULL && Py_TYPE(door) == core->door_type
        && can_make(operation, ((Door *)door)->ring, &call.is_due)) {
        /* An array that never changes is no output, and is itself the root's result. */
        if (operation->who != FROM_ROOT && given[OUT] == Py_None
            && (thaw = thawed(core, given[X])) != NULL)
            given[X] = thaw;
        call.is_thawed = thaw != NULL;
        plain = read_call((Door *)door, &call, given);
    }
    if (plain != FALL_BACK) {
        Py_DECREF(done);
        struct found found = {NULL, NULL, NULL};
        if (plain == DONE)
            found = door_find((Door *)door, &call);
        if (found.plan != NULL) {
            if (found.request == NULL)
                door_remember((Door *)door, &call, found.plan, args, count, names);
            done = make((Door *)door, &call, found);
        } else {
            done = PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
        }
    }
    if (thaw != NULL)
        done = frozen(core, done);
    Py_XDECREF(thaw);
    Py_XDECREF(door);
    Py_XDECREF(call.result);
    Py_XDECREF(call.counts);
    return done;
}

#define ALWAYS (BIT(TIMEOUT) | BIT(ASYNC))
#define ARRAYS (ALWAYS | BIT(X) | BIT(OUT))
#define PIECES (ARRAYS | BIT(COUNTS) | BIT(AXIS))
static const struct operation operations[] = {
    {"all_reduce", SAME, EVERYBODY, 1, ARRAYS | BIT(OP) | BIT(ORDER), OF_ALL},
    {"reduce", SAME, AT_ROOT, 1, ARRAYS | BIT(ROOT) | BIT(OP) | BIT(ORDER), OF_ALL},
    {"scan", SAME, EVERYBODY, 1, ARRAYS | BIT(OP), OF_ALL},
    {"reduce_scatter", CUT, EVERYBODY, 1, PIECES | BIT(OP) | BIT(ORDER), OF_ALL},
    {"broadcast", SAME, FROM_ROOT, 0, ARRAYS | BIT(ROOT), OF_PIECES},
    {"scatter", CUT, FROM_ROOT, 0, PIECES | BIT(ROOT), OF_SCATTER},
    {"all_gather", JOINED, EVERYBODY, 0, PIECES, OF_PIECES},
    {"gather", JOINED, AT_ROOT, 0, PIECES | BIT(ROOT), OF_PIECES},
    {"all_to_all", EXCHANGED, EVERYBODY, 0, PIECES, OF_PIECES},
    {"barrier", NONE, EVERYBODY, 0, ALWAYS, OF_ALL}};

const struct operation *call_operation(PyObject *name)
{
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (PyUnicode_CompareWithASCIIString(name, operations[i].name) == 0)
            return &operations[i];
    return NULL;
}
