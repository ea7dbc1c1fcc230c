/* Python's API, and the functions that the files with Python types have for each other.

   The source keeps to Python's limited API of 3.11, so that one wheel could serve all later
   versions. That is the first limited API with buffers. Python 3.10 has no buffers in its limited
   API, and free-threaded builds have no limited API, so both use the full API. */
#ifndef COLLECTIVE_PYTHON_H
#define COLLECTIVE_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <patchlevel.h>
#if PY_VERSION_HEX >= 0x030B0000 && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#ifdef Py_LIMITED_API
/* The limited API has these from 3.12 on. CPython exports the first one from 3.11 on; in 3.10 its
   weak symbol is NULL. */
extern PyObject *PyObject_Vectorcall(PyObject *function, PyObject *const *args, size_t count,
                                     PyObject *names) __attribute__((weak));
extern PyObject *PyVectorcall_Call(PyObject *function, PyObject *args, PyObject *names);
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
int view_array(PyObject *array, struct view *view);

/* Whether an array still has the address and the length that it had when it was viewed. */
int is_there(const struct view *view);

/* Returns an object that keeps the memory of an array at its address for as long as the object
   lives. It is needed while another thread or Python code may run. For a NumPy array the object is
   a weak reference: NumPy's resize refuses an array with a weak reference, even with
   refcheck=False, which ignores views and buffers. For a tensor the object is its storage: a tensor
   that gets other memory leaves the old memory to the holders of the storage. Returns NULL for any
   other object, and never raises. */
PyObject *hold_memory(PyObject *array);

/* Appends to *held the objects that hold the memory of an array, or of all arrays in a structure.
   *held is a list, or NULL as long as there is nothing to hold. Never raises. */
void hold_all(PyObject *arrays, PyObject **held);

/* Whether the class of an array is exactly NumPy's. */
int is_numpy(PyObject *array);

/* Makes an array with the class and dtype of another array, and with the shape of a view. */
PyObject *new_array(PyObject *like, const struct view *view);

/* Calls a function. The first count arguments are positional; those behind have the given names. */
PyObject *call_with(PyObject *function, PyObject *const *args, Py_ssize_t count, PyObject *names);

/* Returns the fold of an operator, by its name, for a dtype, by its code; NULL if there is none. */
fold_function *fold_of(const char *op, int dtype, int level);

/* Returns the Deadline of a call. The limit is either a Deadline, or the number of seconds that the
   call may take from the time began. A call that never waits needs no Deadline, so that it does not
   pay for one. Returns NULL with an exception. */
PyObject *deadline_of(PyObject *limit, int64_t began);

/* Raises TypeError and returns -1 if a type with positional arguments only gets keywords.

   The types of the core complete an object in tp_new and have no tp_init. So no object is ever
   incomplete, and a second call of __init__ changes nothing. */
int refuse_keywords(const char *type, PyObject *keywords);

/* Whether an object is a Ring. */
int is_ring(PyObject *object);

/* Record in a Ring that a call begins, with the place in the program that makes it; and that the
   call is over. Neither function raises. */
void record_begin(PyObject *ring, PyObject *request, int compares);
void record_end(PyObject *ring);

/* Adds the type Ring to the module; returns 0, or -1 with an exception. */
int add_ring(PyObject *module);

/* Adds the types Door, Gate, Handle and Method to the module; returns 0, or -1 with an
   exception. */
int add_door(PyObject *module);

/* Adds the Python functions of views.c to the module; returns 0, or -1 with an exception. */
int add_views(PyObject *module);

/* Whether an object is a Plan, which Shared.plan() returns. */
int is_plan(PyObject *object);

/* Makes a planned call. If this rank has no input, src is NULL; if it has no output, dst is NULL.
   The limit is as for deadline_of. If ring is not NULL, the beginning of the call is recorded
   there. Returns 0; or -1 with an exception; or 1, before anything has been done, if Python must
   make the call: the arrays overlap, dst is read-only, or another thread has changed an array. */
int run_plan(PyObject *plan, const struct view *src, const struct view *dst, PyObject *limit,
             PyObject *ring);

/* Adds the types Shared and Plan to the module; returns 0, or -1 with an exception. */
int add_plans(PyObject *module);

/* Adds the functions of messages_type.c to the module; returns 0, or -1 with an exception. */
int add_messages(PyObject *module);

#endif
