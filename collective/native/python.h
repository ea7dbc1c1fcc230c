/* Python's API, the state of the module, and the functions that the files with Python types have for
   each other.

   The source keeps to Python's limited API of 3.11, the first one with buffers, so that one wheel
   serves all later versions. Free-threaded builds have no limited API and use the full one. */
#ifndef COLLECTIVE_PYTHON_H
#define COLLECTIVE_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

/* From 3.12 on the headers count no reference to these objects, which live for ever there. In 3.11
   they do not, and a build with newer headers runs there, too. */
#undef Py_RETURN_NONE
#undef Py_RETURN_TRUE
#undef Py_RETURN_FALSE
#undef Py_RETURN_NOTIMPLEMENTED
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)
#define Py_RETURN_NOTIMPLEMENTED return Py_NewRef(Py_NotImplemented)

#ifdef Py_LIMITED_API
/* The limited API has these from 3.12 on. CPython exports both in 3.11, too. */
extern PyObject *PyObject_Vectorcall(PyObject *function, PyObject *const *args, size_t count,
                                     PyObject *names);
extern PyObject *PyVectorcall_Call(PyObject *function, PyObject *args, PyObject *names);
#endif

/* Without the interpreter lock, a critical section keeps two threads from using the fields of one
   object at a time. With the lock it is a plain block. No section may be left by return or goto. */
#ifndef Py_GIL_DISABLED
#undef Py_BEGIN_CRITICAL_SECTION
#undef Py_END_CRITICAL_SECTION
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
#endif

#include <time.h>

#include "core.h"

/* The clock of time.monotonic(), in nanoseconds. */
static inline int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Strings that C compares with keywords, or looks up as attributes: a constant and a text for each.
   The arguments of collective calls come first. */
#define CORE_NAMES(EACH)                                                                           \
    EACH(X, "x") EACH(OUT, "out") EACH(OP, "op") EACH(ORDER, "order") EACH(ROOT, "root")           \
    EACH(TIMEOUT, "timeout") EACH(ASYNC, "async_op") EACH(COUNTS, "counts") EACH(AXIS, "axis")     \
    EACH(TAG, "tag") EACH(NAME_SUM, "sum") EACH(NAME_RUN_PYTHON_PLAN, "run_python_plan")           \
    EACH(NAME_SECONDS, "seconds") EACH(NAME_END, "_end")                                           \
    EACH(NAME_FILENAME, "co_filename") EACH(NAME_BACK, "f_back")                                   \
    EACH(NAME_INSTRUCTION, "f_lasti")                                                              \
    EACH(NAME_DTYPE, "dtype") EACH(NAME_BASE, "base")                                              \
    EACH(NAME_IS_NEG, "is_neg") EACH(NAME_IS_CONJ, "is_conj") EACH(NAME_NEW_EMPTY, "new_empty")    \
    EACH(NAME_UNTYPED_STORAGE, "untyped_storage") EACH(NAME_CDATA, "_cdata")                       \
    EACH(NAME_REQUIRES_GRAD, "requires_grad") EACH(NAME_IS_INFERENCE, "is_inference")
#define CONSTANT(constant, text) constant,
enum name { CORE_NAMES(CONSTANT) NAMES, ARGUMENTS = AXIS + 1 };
#undef CONSTANT

/* The other objects in the state of the module. Each file sets its own. */
#define CORE_OBJECTS(EACH)                                                                         \
    EACH(PyTypeObject, deadline_type) /* collective.deadline.Deadline */                           \
    EACH(PyTypeObject, door_type) EACH(PyTypeObject, gate_type) EACH(PyTypeObject, handle_type)    \
    EACH(PyTypeObject, plan_type) EACH(PyTypeObject, messages_type) EACH(PyTypeObject, ring_type)  \
    EACH(PyTypeObject, replay_type) EACH(PyTypeObject, posted_type) EACH(PyTypeObject, turn_type) EACH(PyTypeObject, hold_type)    \
    EACH(PyObject, bound_method_type) /* types.MethodType */                                       \
    EACH(PyObject, zero) EACH(PyObject, nobody) EACH(PyObject, any)                                \
    EACH(PyTypeObject, ndarray) EACH(PyObject, empty) EACH(PyObject, asarray)                      \
    EACH(PyTypeObject, frozen_type) /* exactly this; NULL until see_frozen() */                    \
    EACH(PyObject, read_frozen) EACH(PyObject, wrap_frozen) EACH(PyObject, name_place)             \
    EACH(PyObject, known_place)

struct dl_exchange;
struct hold;

/* The state of one instance of the module. Each interpreter that imports the module has an instance,
   and so has each new import after the old module was removed from sys.modules.

   An object of the core that needs the state keeps a pointer to it and a reference to the module.
   The collector does not clear the state: a finalizer may make calls while the collector breaks a
   cycle through the module. The types and the module's dictionary, which it does clear, are part of
   every such cycle. */
struct core {
    PyObject *module; /* borrowed: the module itself */
#define FIELD(type, name) type *name;
    CORE_OBJECTS(FIELD)
#undef FIELD
    PyObject *names[NAMES];
    PyObject *descrs[DTYPES];      /* NumPy's dtypes, each of them a single object; or all NULL */
    PyObject *tensor_types[2];     /* exactly these: a subclass may behave differently */
    /* PyArray_NewFromDescr of NumPy's C API; NULL if the descrs are. */
    PyObject *(*new_numpy)(PyTypeObject *, PyObject *descr, int ndim, const Py_ssize_t *shape,
                           const Py_ssize_t *strides, void *data, int flags, PyObject *base);
    const struct dl_exchange *torch; /* NULL until see_tensors() */
    Py_ssize_t resizable_at; /* bytes from a storage's address to its flag, or 0 */
    struct hold *holds;      /* all that live */
    /* For each thread: the place of its calls in the program, if the thread makes them on behalf of
       other code; request.py sets it by in_thread. It is in C, since to ask a thread-local object
       of Python takes as long as the rest of a record. */
    Py_tss_t *site;
};

/* What a function has done that cannot do all calls. Where it says FAILED, an exception is set. */
enum outcome {
    FAILED = -1,
    DONE = 0,
    FALL_BACK = 1 /* nothing has been done: Python must make the call */
};

/* Returns a new reference to a field that another thread may set meanwhile, or NULL. */
static inline PyObject *read_field(PyObject *owner, PyObject *const *field)
{
    PyObject *value;
    (void)owner;
    Py_BEGIN_CRITICAL_SECTION(owner);
    value = Py_XNewRef(*field);
    Py_END_CRITICAL_SECTION();
    return value;
}

#define VIEW_DIMENSIONS 8

/* The elements of an array: contiguous, aligned, in the host's memory, in native byte order. A view
   is valid as long as there is a reference to the array. */
struct view {
    PyObject *array; /* borrowed */
    char *address;
    size_t nbytes;
    int dtype, ndim, writable;
    int64_t shape[VIEW_DIMENSIONS];
};

/* Views an array whose class is exactly one of NumPy's or PyTorch's. Returns 1. Returns 0 if the
   class is another, or if the array is not as described at struct view: then Python must handle the
   array. Never raises. */
int view_array(const struct core *core, PyObject *array, struct view *view);

/* Returns NumPy's array over the memory of an array that never changes, such as JAX's: a new
   reference. Returns NULL, without an exception, if the array is no such array, or if Python must
   read it. */
PyObject *thawed(const struct core *core, PyObject *array);

/* Whether an array that has been viewed is what the other ranks of a broadcast get: no Parameter, no
   tensor that requires a gradient, and none that only inference mode accepts. */
int is_result(const struct core *core, PyObject *array);

/* Whether an array still has the address and the length that it had when it was viewed. */
int is_there(const struct core *core, const struct view *view);

/* Hold the memory of a call's two arrays, as far as that has not been done; and tell whether it is still
   where it was. Each view may be NULL. */
int hold_both(const struct core *core, const struct view *const *views, PyObject **held);
int are_kept(const struct core *core, const struct view *const *views, PyObject *const *held);

/* Appends to *held the objects that hold the memory of an array, or of all arrays in a structure.
   *held is a list, or NULL as long as there is nothing to hold. Never raises. */
void hold_all(const struct core *core, PyObject *arrays, PyObject **held);

/* Whether the class of an array is exactly NumPy's; whether it is exactly one of PyTorch's. */
int is_numpy(const struct core *core, PyObject *array);
int is_tensor(const struct core *core, PyObject *array);

/* Makes an array with the class and dtype of another array, and with the shape and the dtype of a view,
   and views it. Returns NULL with an exception. Sets view->dtype to -1 if Python must handle the array. */
PyObject *new_array(const struct core *core, PyObject *like, struct view *view);

/* Does the same for a NumPy array whose memory a framework can use without a copy, unless it is so
   short that the framework copies it in less time. */
PyObject *aligned_array(const struct core *core, PyObject *like, struct view *view);

/* Whether an array is NumPy's, and has what another one at this address had when it was viewed. */
int is_same(const struct core *core, const struct view *view);

/* Returns the fold of an operator, by its name, for a dtype, by its code; NULL if there is none. */
fold_function *fold_of(const char *op, int dtype, int level);

/* Below this many bytes, releasing the interpreter lock takes longer than a fold. */
#define LONG_FOLD_BYTES (64 << 10)

/* Returns the Deadline of a call. The limit is either a Deadline, or the number of seconds that the
   call may take from the time began. A call that never waits needs no Deadline, so that it does not
   pay for one. Returns NULL with an exception. */
PyObject *deadline_of(const struct core *core, PyObject *limit, int64_t began);

/* -- objects.c: what all types of the core share ------------------------------------------------ */

/* Raises TypeError and returns -1 if a type with positional arguments only gets keywords.

   The types of the core complete an object in tp_new and have no tp_init. So no object is ever
   incomplete, and a second call of __init__ changes nothing. */
int refuse_keywords(const char *type, PyObject *keywords);

/* The first fields of an object that needs the state; its type has no subclasses. The fields that
   refer to objects of Python follow this head directly, and `references` is their number. So the
   three functions below serve all types. A type that has more references, or other memory, has
   functions of its own, which end with these. */
#define CORE_HEAD PyObject_HEAD const struct core *core; Py_ssize_t references;
struct object {
    CORE_HEAD
    PyObject *fields[]; /* each may be NULL */
};
#define REFERENCES(type, last)                                                                     \
    (Py_ssize_t)((offsetof(type, last) - offsetof(struct object, fields)) / sizeof(PyObject *) + 1)

/* Allocates an object, with a reference to the module, and zeros for all fields behind the head.
   Returns NULL with an exception. */
void *object_new(PyTypeObject *type, Py_ssize_t references);
/* Visits the type, the module and the references, for the collector. */
int object_traverse(PyObject *object, visitproc visit, void *arg);
/* Drops the references, and frees the memory. The second function is for types with the collector. */
void object_free(PyObject *object);
void object_dealloc(PyObject *object);

/* The same for references anywhere, which follow each other in memory. */
int references_visit(PyObject *const *first, Py_ssize_t count, visitproc visit, void *arg);
void references_clear(PyObject **first, Py_ssize_t count);

/* Creates a type and adds it to the module. Stores a reference in *type, unless type is NULL.
   Returns 0, or -1 with an exception. */
int type_add(PyObject *module, PyType_Spec *spec, PyTypeObject **type);

/* Takes the current exception, with its traceback, from the interpreter; and raises an exception,
   with the traceback that it has. */
PyObject *error_take(void);
void error_raise(PyObject *error);

/* -- record.c ------------------------------------------------------------------------------------ */

/* Record in a Ring that a call begins, with the place in the program that makes it; and that the
   call is over. Neither function raises. */
void record_begin(PyObject *ring, PyObject *request, int compares);
void record_end(PyObject *ring);

/* Whether the ranks compare the results of the next call; and count a call that has succeeded, whose
   results the ranks could have compared. */
int record_is_due(PyObject *ring);
void record_count(PyObject *ring);

/* Add the types and functions of a file to the module, and set its part of the state; return 0, or
   -1 with an exception. */
int add_unlocked(PyObject *module, struct core *core);
int add_record(PyObject *module, struct core *core);
int add_door(PyObject *module, struct core *core);
int add_methods(PyObject *module, struct core *core);
int add_views(PyObject *module, struct core *core);
int add_holding(PyObject *module, struct core *core);
int add_folding(PyObject *module, struct core *core);
int add_shared(PyObject *module, struct core *core);
int add_plans(PyObject *module, struct core *core);
int add_messages(PyObject *module, struct core *core);

/* Sets the place in the program that this thread's calls come from, and returns the place before:
   both borrowed, or NULL. */
PyObject *record_exchange_site(const struct core *core, PyObject *site);

/* Frees the part of the state that record.c has made. */
void record_free(struct core *core);

/* Makes a planned call. If this rank has no input, src is NULL; if it has no output, dst is NULL.
   The limit is as for deadline_of. If ring is not NULL, the beginning of the call is recorded
   there. Returns FALL_BACK if the arrays overlap, dst is read-only, or another thread has changed an
   array. */
enum outcome plan_run(PyObject *plan, const struct view *src, const struct view *dst,
                      PyObject *limit, PyObject *ring);

/* Makes a call like plan_run, and compares the ranks' results if the plan can. If they differ, or have
   not been compared yet, sets *compare to a new tuple: the request, and what summed() returns. */
enum outcome plan_run_compared(PyObject *plan, const struct view *src, const struct view *dst,
                               PyObject *limit, PyObject *ring, PyObject **compare);

/* -- calls that threads make without the interpreter lock; see unlocked.c ----------------------- */

/* The arrays that the caller of such a call passes, and which of them the plan reads and writes. */
enum which { NEITHER = -1, IN, GIVEN_OUT, BOTH };

/* One call that a thread without the interpreter lock can make. It has references to its objects,
   but such a thread cannot count references. So the table and the threads that make the call count
   theirs in users, and the last one drops the objects. */
struct unlocked {
    struct unlocked *next; /* in the table */
    int64_t key[2];
    const void *owner; /* the door that the call would go through otherwise */
    int users;
    int removed; /* whether the call has been removed from the table */
    PyObject *plan, *ring, *queue, *site, *limit, *turn; /* turn may be NULL */
    Py_ssize_t source;  /* of the call in the ring */
    int64_t patience;   /* nanoseconds that a wait lasts before it needs Python */
    int64_t most;       /* nanoseconds that the call may take in all */
    int src, dst;       /* enum which */
    int copies, clears; /* whether in is copied to out afterwards; whether out is set to zero */
    int dtype;
    size_t nbytes[BOTH];
};
enum { UNLOCKED_REFERENCES = 6 };

/* Makes a call, in a thread without the interpreter lock. If it has failed, the exception is not set,
   but *error is a new reference to it. */
enum outcome plan_run_unlocked(const struct unlocked *call, const void *in, void *out,
                               PyObject **error);

/* Sets the patience and the source of a call; returns DONE, or FAILED. */
enum outcome plan_check_unlocked(struct unlocked *call, PyObject *request);

/* Returns the number by which record_unlocked records a call of this place; -1 with an exception. */
Py_ssize_t record_source(PyObject *ring, PyObject *request, PyObject *site);

/* As record_begin and record_end, in a thread without the interpreter lock. */
void record_unlocked(PyObject *ring, Py_ssize_t source);
void record_unlocked_end(PyObject *ring);

/* door.unlock(...), and removing all calls of a door. */
PyObject *unlocked_add(const struct core *core, const void *door, PyObject *ring, PyObject *queue,
                      PyObject *args);
void unlocked_remove(const void *door);

#endif
