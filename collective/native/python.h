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

/* The arguments of collective calls, by name. */
enum argument { X, OUT, OP, ORDER, ROOT, TIMEOUT, ASYNC, COUNTS, AXIS, ARGUMENTS };

/* The objects in the state of the module: their types and names. Each file sets its own. */
#define CORE_OBJECTS(EACH)                                                                         \
    /* module.c */                                                                                 \
    EACH(PyTypeObject, deadline_type) /* collective.deadline.Deadline */                           \
    EACH(PyObject, name_seconds) EACH(PyObject, name_end)                                          \
    /* door.c */                                                                                   \
    EACH(PyTypeObject, door_type) EACH(PyTypeObject, gate_type) EACH(PyTypeObject, handle_type)    \
    EACH(PyObject, bound_method_type) /* types.MethodType */                                       \
    EACH(PyObject, name_run_python_plan) EACH(PyObject, name_sum) EACH(PyObject, name_tag)         \
    EACH(PyObject, zero) EACH(PyObject, nobody) EACH(PyObject, any)                                \
    /* plan_type.c, messages_type.c and record.c */                                                \
    EACH(PyTypeObject, plan_type) EACH(PyTypeObject, messages_type) EACH(PyTypeObject, ring_type)  \
    EACH(PyObject, name_filename) EACH(PyObject, name_back) EACH(PyObject, name_instruction)       \
    EACH(PyTypeObject, turn_type) /* unlocked.c */                                                 \
    /* views.c */                                                                                  \
    EACH(PyTypeObject, ndarray) EACH(PyObject, empty)                                              \
    EACH(PyObject, is_neg) EACH(PyObject, is_conj) EACH(PyObject, new_empty)                       \
    EACH(PyObject, name_dtype) EACH(PyObject, name_base) EACH(PyObject, untyped_storage)           \
    EACH(PyObject, name_cdata) EACH(PyTypeObject, hold_type)                                       \
    EACH(PyObject, requires_grad) EACH(PyObject, is_inference)                                     \
    EACH(PyTypeObject, frozen_type) /* exactly this; NULL until see_frozen() */                    \
    EACH(PyObject, read_frozen) EACH(PyObject, wrap_frozen) EACH(PyObject, name_place)             \
    EACH(PyObject, known_place) EACH(PyObject, asarray)

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
    PyObject *arguments[ARGUMENTS]; /* the names of enum argument */
    PyObject *descrs[DTYPES];       /* NumPy's dtypes, each of them a single object; or all NULL */
    PyTypeObject *tensor_types[2];  /* exactly these: a subclass may behave differently */
    const struct dl_exchange *torch; /* NULL until see_tensors() */
    Py_ssize_t resizable_at; /* bytes from a storage's address to its flag, or 0 */
    struct hold *holds;      /* all that live */
    /* For each thread: the place of its calls in the program, if the thread makes them on behalf of
       other code; request.py sets it by in_thread. It is in C, since to ask a thread-local object
       of Python takes as long as the rest of a record. */
    Py_tss_t *site;
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

/* Whether the memory of a viewed array is still where it was, when other code has run. A tensor that
   got another storage leaves the memory to the object from hold_memory(). */
int is_kept(const struct core *core, PyObject *held, const struct view *view);

/* Returns an object that keeps the memory of an array at its address for as long as the object
   lives. It is needed while another thread or Python code may run. If a NumPy array owns its memory,
   the object is a weak reference: NumPy's resize refuses an array with a weak reference, even with
   refcheck=False, which ignores views and buffers. If the memory is that of another object, such as
   a bytearray or a mmap, the object is a view of that: np.ndarray(buffer=...) keeps none. For a
   tensor the object has its storage, so that a tensor that gets another storage leaves the memory
   there, and makes the storage refuse to be resized. Returns NULL for any other object, and never
   raises. */
PyObject *hold_memory(const struct core *core, PyObject *array);

/* Appends to *held the objects that hold the memory of an array, or of all arrays in a structure.
   *held is a list, or NULL as long as there is nothing to hold. Never raises. */
void hold_all(const struct core *core, PyObject *arrays, PyObject **held);

/* Whether the class of an array is exactly NumPy's. */
int is_numpy(const struct core *core, PyObject *array);

/* Makes an array with the class and dtype of another array, and with the shape of a view. */
PyObject *new_array(const struct core *core, PyObject *like, const struct view *view);

/* Does the same for a NumPy array whose memory a framework can use without a copy, unless it is so
   short that the framework copies it in less time. */
PyObject *aligned_array(const struct core *core, PyObject *like, const struct view *view);

/* Returns the fold of an operator, by its name, for a dtype, by its code; NULL if there is none. */
fold_function *fold_of(const char *op, int dtype, int level);

/* Below this many bytes, releasing the interpreter lock takes longer than a fold. */
#define LONG_FOLD_BYTES (64 << 10)

/* Whether a buffer holds aligned elements of the type. NumPy writes the complex types as Zf and
   Zd. */
int is_plain(const Py_buffer *view, enum dtype dtype);

/* make_schedule(op, dtype, inputs, scratch, results, steps), of schedules.c. */
PyObject *make_schedule(PyObject *module, PyObject *args);

/* Returns the Deadline of a call. The limit is either a Deadline, or the number of seconds that the
   call may take from the time began. A call that never waits needs no Deadline, so that it does not
   pay for one. Returns NULL with an exception. */
PyObject *deadline_of(const struct core *core, PyObject *limit, int64_t began);

/* Raises TypeError and returns -1 if a type with positional arguments only gets keywords.

   The types of the core complete an object in tp_new and have no tp_init. So no object is ever
   incomplete, and a second call of __init__ changes nothing. */
int refuse_keywords(const char *type, PyObject *keywords);

/* The first fields of an object that needs the state. Its type has no subclasses. new_object()
   allocates the object, with a reference to the module, and zeros for its other fields; it returns
   NULL with an exception. visit_object() visits the type and the module for the collector. After
   the other fields have been cleared, free_object() drops the references and frees the memory. */
#define CORE_HEAD PyObject_HEAD const struct core *core;
void *new_object(PyTypeObject *type);
int visit_object(PyObject *object, visitproc visit, void *arg);
void free_object(PyObject *object);

/* Creates a type and adds it to the module. Stores a reference in *type, unless type is NULL.
   Returns 0, or -1 with an exception. */
int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type);

/* Record in a Ring that a call begins, with the place in the program that makes it; and that the
   call is over. Neither function raises. */
void record_begin(PyObject *ring, PyObject *request, int compares);
void record_end(PyObject *ring);

/* Whether the ranks compare the results of the next call; and count a call that has succeeded, whose
   results the ranks could have compared. */
int is_due(PyObject *ring);
void count_call(PyObject *ring);

/* Add the types and functions of a file to the module, and set its part of the state; return 0, or
   -1 with an exception. */
int add_unlocked(PyObject *module, struct core *core);
int add_ring(PyObject *module, struct core *core);
int add_door(PyObject *module, struct core *core);
int add_views(PyObject *module, struct core *core);
int add_plans(PyObject *module, struct core *core);
int add_messages(PyObject *module, struct core *core);

/* Sets the place in the program that this thread's calls come from, and returns the place before:
   both borrowed, or NULL. */
PyObject *exchange_site(const struct core *core, PyObject *site);

/* Takes the current exception, with its traceback, from the interpreter. */
PyObject *take_error(void);

/* Frees the part of the state that record.c has made. */
void free_ring(struct core *core);

/* Makes a planned call. If this rank has no input, src is NULL; if it has no output, dst is NULL.
   The limit is as for deadline_of. If ring is not NULL, the beginning of the call is recorded
   there. Returns 0; or -1 with an exception; or 1, before anything has been done, if Python must
   make the call: the arrays overlap, dst is read-only, or another thread has changed an array. */
int run_plan(PyObject *plan, const struct view *src, const struct view *dst, PyObject *limit,
             PyObject *ring);

/* Makes a call like run_plan, and compares the ranks' results if the plan can. If they differ, or have
   not been compared yet, sets *compare to a new tuple: the request, and what summed() returns. */
int run_compared(PyObject *plan, const struct view *src, const struct view *dst, PyObject *limit,
                 PyObject *ring, PyObject **compare);

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
    PyObject *plan, *ring, *queue, *site, *turn; /* turn may be NULL */
    PyObject *limit;
    Py_ssize_t source;  /* of the call in the ring */
    int64_t patience;   /* nanoseconds that a wait lasts before it needs Python */
    int64_t most;       /* nanoseconds that the call may take in all */
    int src, dst;       /* enum which */
    int copies, clears; /* whether in is copied to out afterwards; whether out is set to zero */
    int dtype;
    size_t nbytes[BOTH];
};

/* Makes a call, in a thread without the interpreter lock. Returns 0; 1, before anything has been
   done, if Python must make the call; or -1 if the call has failed, with a new reference to the
   exception in *error. */
int run_unlocked(const struct unlocked *call, const void *in, void *out, PyObject **error);

/* Sets the patience and the source of a call; returns 1, or -1 with an exception. */
int check_unlocked(struct unlocked *call, PyObject *request);

/* Returns the number by which record_unlocked records a call of this place; -1 with an exception. */
Py_ssize_t source_in(PyObject *ring, PyObject *request, PyObject *site);

/* As record_begin and record_end, in a thread without the interpreter lock. */
void record_unlocked(PyObject *ring, Py_ssize_t source);
void record_unlocked_end(PyObject *ring);

/* door.unlock(...), and removing all calls of a door. */
PyObject *unlock_call(const struct core *core, const void *door, PyObject *ring, PyObject *queue,
                      PyObject *args);
void lock_calls(const void *door);

#endif
