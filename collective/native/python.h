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

#include "core.h"

/* Returns the fold of an operator by its name for a dtype by its code; NULL if there is none. */
fold_function *fold_of(const char *op, int dtype, int level);

/* Whether a buffer is all of another one, or has nothing in common with it. */
int is_apart(const Py_buffer *one, const Py_buffer *other);

/* Adds the type Shared to the module; returns 0, or -1 with an exception. */
int add_shared(PyObject *module);

#endif
