/* Python, for the files of the core that are its side of it.

   The source keeps to Python's limited API of 3.11, in which buffers are, so that one wheel could
   serve all later versions. Python 3.10, which has no buffers there, and free-threaded builds,
   which have no limited API, take the whole one. */
#ifndef COLLECTIVE_PYTHON_H
#define COLLECTIVE_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <patchlevel.h>
#if PY_VERSION_HEX >= 0x030B0000 && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#ifdef Py_LIMITED_API
/* In the limited API from 3.12 on, exported from 3.11 on: NULL in 3.10. */
extern PyObject *PyObject_Vectorcall(PyObject *function, PyObject *const *args, size_t count,
                                     PyObject *names) __attribute__((weak));
extern PyObject *PyVectorcall_Call(PyObject *function, PyObject *args, PyObject *names);
#endif

#include <time.h>

#include "core.h"

/* The clock of time.monotonic(). */
static inline int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

#define VIEW_DIMENSIONS 8

/* The elements of an array: contiguous, aligned, in the host's memory, of this byte order. It is
   valid as long as somebody holds the array. */
struct view {
    PyObject *array; /* borrowed */
    char *address;
    size_t nbytes;
    int dtype, ndim, writable;
    int64_t shape[VIEW_DIMENSIONS];
};

/* Looks at an array of exactly NumPy's or PyTorch's class. Returns 1; or 0 if it is another, or is
   not as above: ask Python. Never raises. */
int view_array(PyObject *array, struct view *view);

/* Whether an array is still where it was when it was viewed. */
int is_there(const struct view *view);

/* Returns what keeps an array's memory where it is for as long as somebody has it: while another
   thread may run, or Python code does. NumPy's resize refuses an array that a weak reference refers
   to, also with refcheck=False, where it minds no view and no buffer; a tensor that is given other
   memory leaves its old memory to whoever has the storage. Returns NULL for anything else, and never
   raises. */
PyObject *hold_memory(PyObject *array);

/* Appends what holds the memory of an array, or of all in a structure, to *held: a list, or NULL
   as long as there is nothing to hold. Never raises. */
void hold_all(PyObject *arrays, PyObject **held);

/* Whether an array is exactly of NumPy's class. */
int is_numpy(PyObject *array);

/* Makes an array such as one that was viewed is, of the shape that a view has. */
PyObject *new_array(PyObject *like, const struct view *view);

/* Calls a function with as many arguments by position as count says, and those behind by name. */
PyObject *call_with(PyObject *function, PyObject *const *args, Py_ssize_t count, PyObject *names);

/* Returns the fold of an operator by its name for a dtype by its code; NULL if there is none. */
fold_function *fold_of(const char *op, int dtype, int level);

/* Returns the Deadline of a call by its limit: the seconds that it may take from began on, or a
   Deadline already. A call that waits for nobody needs none, and pays for none. Returns NULL with an
   exception. */
PyObject *deadline_of(PyObject *limit, int64_t began);

/* Raises TypeError and returns -1 if a type that takes arguments by position alone gets others.

   The types of the core make an object whole in tp_new and have no tp_init: no object is ever half
   made, and a second __init__ changes nothing. */
int refuse_keywords(const char *type, PyObject *keywords);

/* Whether an object is a Ring. */
int is_ring(PyObject *object);

/* Records in a Ring that a call begins, of the frame that called last; that it is over. Neither
   raises. */
void record_begin(PyObject *ring, PyObject *request, int compares);
void record_end(PyObject *ring);

/* Adds the type Ring to the module; returns 0, or -1 with an exception. */
int add_ring(PyObject *module);

/* Adds the types Door, Gate, Handle and Method to the module; returns 0, or -1 with an exception. */
int add_door(PyObject *module);

/* Adds what views.c has for Python to the module; returns 0, or -1 with an exception. */
int add_views(PyObject *module);

/* Whether an object is a Plan, what Shared.plan() returns. */
int is_plan(PyObject *object);

/* Makes a planned call; src or dst is NULL where this rank has none, limit as of deadline_of.
   Records in ring, if that is not NULL, that it begins. Returns 0; or 1 if arrays overlap, or dst is
   read-only: nothing has been done; or -1 with an exception. */
int run_plan(PyObject *plan, const struct view *src, const struct view *dst, PyObject *limit,
             PyObject *ring);

/* Adds the types Shared and Plan to the module; returns 0, or -1 with an exception. */
int add_plans(PyObject *module);

/* Adds the function make_messages; the same. */
int add_messages(PyObject *module);

#endif
