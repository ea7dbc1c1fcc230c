/* Addresses and shapes of arrays, found without Python code. For NumPy's arrays C reads the struct
   that NumPy's C API publishes, or else uses the buffer protocol. For PyTorch's tensors C uses the
   functions that DLPack defines for this (dlpack.h 1.2, DLPackExchangeAPI). */

#include "python.h"

#include <string.h>

/* The first fields of DLPack's structures, in DLPack's own order. */
struct dl_tensor {
    void *data;
    int32_t device, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_exchange {
    uint32_t major, minor;
    struct dl_exchange *previous;
    void *allocator, *from_object, *to_object;
    int (*tensor_from_object)(void *object, struct dl_tensor *tensor);
};

enum { DL_CPU = 1 };

/* The first fields of a NumPy array, as NumPy's C API promises them (PyArrayObject_fields of
   numpy/ndarraytypes.h, the same in all versions since 1.7). The buffer protocol gives the same
   information. But there NumPy formats the dtype as a string each time, which takes longer than a
   small call. */
struct numpy_array {
    PyObject_HEAD
    char *data;
    int ndim;
    Py_ssize_t *shape, *strides;
    PyObject *base, *descr;
    int flags;
};

/* NumPy's flags NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, NPY_ARRAY_WRITEABLE and
   NPY_ARRAY_WARN_ON_WRITE. */
enum { PLAIN = 0x0001 | 0x0100, WRITEABLE = 0x0400, WARNS = 1u << 31 };

/* Returns the code of an element type by NumPy's letter for its kind, and its size; or -1. */
static int dtype_of(int kind, size_t nbytes)
{
    static const char kinds[DTYPES + 1] = "?iiiiuuuufffccB";
    for (int code = 0; code < DTYPES; code++)
        if (kinds[code] == kind && item_bytes[code] == nbytes)
            return code;
    return -1;
}

/* Returns the kind of elements by the format string of the buffer protocol; or 0. */
static int kind_of(const char *format)
{
    static const char letters[] = "?bhilqBHILQefd", kinds[] = "?iiiiiuuuuufff";
    int complex = format[0] == 'Z';
    const char *found = format[complex] ? strchr(letters, format[complex]) : NULL;
    return found == NULL || format[complex + 1] != 0 ? 0 : complex ? 'c' : kinds[found - letters];
}

static int set_shape(struct view *view, int ndim, const void *shape, size_t nbytes)
{
    if (ndim < 0 || ndim > VIEW_DIMENSIONS)
        return 0;
    memcpy(view->shape, shape, sizeof *view->shape * (size_t)ndim);
    view->ndim = ndim;
    view->nbytes = nbytes;
    return (uintptr_t)view->address % item_alignment[view->dtype] == 0;
}

static size_t length(int ndim, const Py_ssize_t *shape)
{
    size_t count = 1;
    for (int i = 0; i < ndim; i++)
        count *= (size_t)shape[i];
    return count;
}

static int view_fields(const struct core *core, const struct numpy_array *array,
                       struct view *view)
{
    view->dtype = 0;
    while (view->dtype < DTYPES && array->descr != core->descrs[view->dtype])
        view->dtype++;
    if (view->dtype == DTYPES || (array->flags & PLAIN) != PLAIN || array->flags & WARNS)
        return 0;
    view->address = array->data;
    view->writable = (array->flags & WRITEABLE) != 0;
    return set_shape(view, array->ndim, array->shape,
                     length(array->ndim, array->shape) * item_bytes[view->dtype]);
}

static int view_buffer(PyObject *array, struct view *view)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_ND | PyBUF_FORMAT) < 0)
        return 0;
    view->address = buffer.buf;
    view->writable = !buffer.readonly;
    view->dtype = dtype_of(kind_of(buffer.format), (size_t)buffer.itemsize);
    /* The array keeps the memory alive, so the buffer can be released. */
    int plain = view->dtype >= 0
                && set_shape(view, buffer.ndim, buffer.shape, (size_t)buffer.len);
    PyBuffer_Release(&buffer);
    return plain;
}

/* Whether a tensor's method with this name returns anything but False. */
static int answers(PyObject *tensor, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodObjArgs(tensor, method, NULL);
    int yes = answer != Py_False;
    Py_XDECREF(answer);
    return yes;
}

/* Views a tensor. A new one, which C has made, is neither negated nor conjugated. */
static int view_tensor(const struct core *core, const struct dl_exchange *torch, PyObject *array,
                       struct view *view, int is_new)
{
    struct dl_tensor tensor;
    if (torch->tensor_from_object(array, &tensor) < 0 || tensor.device != DL_CPU)
        return 0;
    /* The string has NumPy's letter for each of DLPack's type codes. */
    int kind = tensor.code < 7 && tensor.lanes == 1 ? "iuf\0Bc?"[tensor.code] : 0;
    view->dtype = tensor.bits % 8 ? -1 : dtype_of(kind, tensor.bits / 8);
    int64_t stride = 1;
    for (int i = tensor.ndim - 1; i >= 0; i--) {
        if ((tensor.strides[i] != stride && tensor.shape[i] > 1)
            || __builtin_mul_overflow(stride, tensor.shape[i], &stride))
            return 0;
    }
    view->address = (char *)tensor.data + tensor.byte_offset;
    view->writable = 1;
    int dtype = view->dtype;
    /* The memory of a tensor that is lazily negated or conjugated does not hold its values. */
    if (dtype < 0 || (tensor.data == NULL && stride)
        || (dtype >= FLOAT16 && !is_new && answers(array, core->names[NAME_IS_NEG]))
        || ((dtype == COMPLEX64 || dtype == COMPLEX128) && !is_new
            && answers(array, core->names[NAME_IS_CONJ])))
        return 0;
    return set_shape(view, tensor.ndim, tensor.shape, (size_t)stride * item_bytes[view->dtype]);
}

/* Returns PyTorch's functions if the object is a tensor, otherwise NULL. */
static const struct dl_exchange *torch_of(const struct core *core, PyObject *array)
{
    const struct dl_exchange *torch = __atomic_load_n(&core->torch, __ATOMIC_ACQUIRE);
    PyObject *type = (PyObject *)Py_TYPE(array);
    return torch != NULL && (type == core->tensor_types[0] || type == core->tensor_types[1])
               ? torch : NULL;
}

int is_tensor(const struct core *core, PyObject *array)
{
    return torch_of(core, array) != NULL;
}

static int view_any(const struct core *core, PyObject *array, struct view *view, int is_new)
{
    const struct dl_exchange *torch;
    view->array = array;
    if (is_numpy(core, array)
            ? view_fields(core, (struct numpy_array *)array, view) || view_buffer(array, view)
            : (torch = torch_of(core, array)) != NULL && view_tensor(core, torch, array, view, is_new))
        return 1;
    PyErr_Clear();
    return 0;
}

int view_array(const struct core *core, PyObject *array, struct view *view)
{
    return view_any(core, array, view, 0);
}

int is_same(const struct core *core, const struct view *view)
{
    const struct numpy_array *array = (const struct numpy_array *)view->array;
    return is_numpy(core, view->array) && array->data == view->address
           && array->descr == core->descrs[view->dtype] && array->ndim == view->ndim
           && (array->flags & PLAIN) == PLAIN && !(array->flags & WARNS)
           && !(array->flags & WRITEABLE) == !view->writable
           && memcmp(array->shape, view->shape, sizeof *view->shape * (size_t)view->ndim) == 0;
}

int is_numpy(const struct core *core, PyObject *array)
{
    return Py_TYPE(array) == core->ndarray;
}

int is_result(const struct core *core, PyObject *array)
{
    if (is_numpy(core, array))
        return 1;
    PyObject *requires = (PyObject *)Py_TYPE(array) == core->tensor_types[0]
                             ? PyObject_GetAttr(array, core->names[NAME_REQUIRES_GRAD]) : NULL;
    int plain = requires == Py_False && !answers(array, core->names[NAME_IS_INFERENCE]);
    Py_XDECREF(requires);
    PyErr_Clear();
    return plain;
}

int is_there(const struct core *core, const struct view *view)
{
    struct view now;
    return view_array(core, view->array, &now) && now.address == view->address
           && now.nbytes == view->nbytes;
}

static PyObject *shape_of(const struct view *view)
{
    PyObject *shape = PyTuple_New(view->ndim);
    for (int i = 0; shape != NULL && i < view->ndim; i++) {
        PyObject *length = PyLong_FromLongLong(view->shape[i]);
        if (length == NULL || PyTuple_SetItem(shape, i, length) < 0)
            Py_CLEAR(shape);
    }
    return shape;
}

static size_t nbytes_of(const struct view *view)
{
    return length(view->ndim, (const Py_ssize_t *)view->shape) * item_bytes[view->dtype];
}

/* Makes NumPy's array without the call of empty(), which takes a fifth of a small call. */
static PyObject *new_numpy(const struct core *core, PyObject *like, struct view *view)
{
    PyObject *descr = Py_NewRef(((struct numpy_array *)like)->descr); /* the function steals it */
    PyObject *made = core->new_numpy(core->ndarray, descr, view->ndim, (Py_ssize_t *)view->shape, NULL,
                                     NULL, 0, NULL);
    view->array = made;
    view->address = made != NULL ? ((struct numpy_array *)made)->data : NULL;
    view->writable = 1;
    view->nbytes = nbytes_of(view);
    if ((uintptr_t)view->address % 8)
        view->dtype = -1;
    return made;
}

PyObject *new_array(const struct core *core, PyObject *like, struct view *view)
{
    if (core->new_numpy != NULL && is_numpy(core, like))
        return new_numpy(core, like, view);
    PyObject *shape = shape_of(view), *dtype = NULL, *made = NULL;
    if (shape != NULL && !is_numpy(core, like))
        made = PyObject_CallMethodObjArgs(like, core->names[NAME_NEW_EMPTY], shape, NULL);
    else if (shape != NULL && (dtype = PyObject_GetAttr(like, core->names[NAME_DTYPE])) != NULL)
        made = PyObject_CallFunctionObjArgs(core->empty, shape, dtype, NULL);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    if (made != NULL && !view_any(core, made, view, 1))
        view->dtype = -1;
    return made;
}

/* Alignment that XLA requires of memory that it uses without a copy, in bytes. */
#define ALIGNMENT 64
/* Up to this many bytes, XLA copies an array in less time than it takes to make and to hold aligned
   memory. */
#define COPIED_BYTES (16 << 10)

PyObject *aligned_array(const struct core *core, PyObject *like, struct view *view)
{
    size_t nbytes = nbytes_of(view);
    if (nbytes <= COPIED_BYTES)
        return new_array(core, like, view);
    PyObject *shape = shape_of(view), *dtype = PyObject_GetAttr(like, core->names[NAME_DTYPE]);
    PyObject *room = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(nbytes + ALIGNMENT));
    PyObject *made = NULL;
    if (shape != NULL && dtype != NULL && room != NULL) {
        uintptr_t address = (uintptr_t)PyByteArray_AsString(room);
        made = PyObject_CallFunction((PyObject *)core->ndarray, "OOOn", shape, dtype, room,
                                     (Py_ssize_t)(-address % ALIGNMENT));
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(room);
    if (made != NULL && !view_array(core, made, view))
        view->dtype = -1;
    return made;
}

/* see_tensors(exchange_api, Tensor, Parameter, resizable_at) */
static PyObject *see_tensors(PyObject *module, PyObject *args)
{
    PyObject *capsule, *types[2];
    Py_ssize_t resizable_at;
    struct core *core = PyModule_GetState(module);
    if (!PyArg_ParseTuple(args, "OO!O!n:see_tensors", &capsule, &PyType_Type, &types[0],
                          &PyType_Type, &types[1], &resizable_at))
        return NULL;
    const struct dl_exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (found == NULL)
        return NULL;
    Py_BEGIN_CRITICAL_SECTION(module);
    if (core->torch == NULL && found->major == 1 && found->tensor_from_object != NULL) {
        for (int i = 0; i < 2; i++)
            core->tensor_types[i] = Py_NewRef(types[i]);
        core->resizable_at = resizable_at;
        __atomic_store_n(&core->torch, found, __ATOMIC_RELEASE);
    }
    Py_END_CRITICAL_SECTION();
    Py_RETURN_NONE;
}

/* Whether the last array that Python has read had this very object as its place. */
static int is_known_place(const struct core *core, PyObject *place)
{
    int known;
    Py_BEGIN_CRITICAL_SECTION(core->module);
    known = core->known_place == place;
    Py_END_CRITICAL_SECTION();
    return known;
}

static void know_place(const struct core *core, PyObject *place)
{
    struct core *state = PyModule_GetState(core->module);
    PyObject *old;
    Py_BEGIN_CRITICAL_SECTION(core->module);
    old = state->known_place;
    state->known_place = Py_NewRef(place);
    Py_END_CRITICAL_SECTION();
    Py_XDECREF(old);
}

PyObject *thawed(const struct core *core, PyObject *array)
{
    if (Py_TYPE(array) != __atomic_load_n(&core->frozen_type, __ATOMIC_ACQUIRE))
        return NULL;
    PyObject *place = PyObject_GetAttr(array, core->name_place), *made = NULL;
    /* Arrays at one place usually share the object, so C asks Python only for another object. */
    int known = place != NULL && is_known_place(core, place);
    if (place != NULL)
        made = PyObject_CallFunctionObjArgs(known ? core->asarray : core->read_frozen, array, NULL);
    if (made == NULL)
        PyErr_Clear(); /* Python raises the error again */
    else if (!is_numpy(core, made))
        Py_CLEAR(made);
    else if (!known)
        know_place(core, place);
    Py_XDECREF(place);
    return made;
}

/* see_frozen(type, read, wrap, place) */
static PyObject *see_frozen(PyObject *module, PyObject *args)
{
    PyObject *type, *read, *wrap, *place;
    struct core *core = PyModule_GetState(module);
    if (!PyArg_ParseTuple(args, "O!OOU:see_frozen", &PyType_Type, &type, &read, &wrap, &place))
        return NULL;
    Py_BEGIN_CRITICAL_SECTION(module);
    if (core->frozen_type == NULL) {
        core->read_frozen = Py_NewRef(read);
        core->wrap_frozen = Py_NewRef(wrap);
        core->name_place = Py_NewRef(place);
        __atomic_store_n(&core->frozen_type, (PyTypeObject *)Py_NewRef(type), __ATOMIC_RELEASE);
    }
    Py_END_CRITICAL_SECTION();
    Py_RETURN_NONE;
}

static PyObject *see_array(PyObject *module, PyObject *array)
{
    struct view view;
    if (!view_array(PyModule_GetState(module), array, &view))
        Py_RETURN_NONE;
    return Py_BuildValue("KniNO", (unsigned long long)(uintptr_t)view.address,
                         (Py_ssize_t)view.nbytes, view.dtype, shape_of(&view),
                         view.writable ? Py_True : Py_False);
}

static PyMethodDef functions[] = {
    {"see_tensors", see_tensors, METH_VARARGS,
     "see_tensors(exchange_api, Tensor, Parameter, resizable_at, /)\n--\n\n"
     "Let C view tensors of exactly these classes, too."},
    {"see_frozen", see_frozen, METH_VARARGS,
     "see_frozen(type, read, wrap, place, /)\n--\n\n"
     "Let C make calls on arrays of exactly this class, which never change."},
    {"view", see_array, METH_O,
     "view(array, /)\n--\n\n"
     "Return address, bytes, dtype and shape of an array, and whether it is writable; or None."},
    {NULL, NULL, 0, NULL}};

/* Finds the function that makes NumPy's arrays, in the table of NumPy's C API. The places of that table
   are the same in all versions of NumPy. */
static void find_new_numpy(struct core *core)
{
    enum { ARRAY_TYPE = 2, NEW_FROM_DESCR = 94 };
    PyObject *module = PyImport_ImportModule("numpy._core._multiarray_umath");
    if (module == NULL) { /* NumPy 1 */
        PyErr_Clear();
        module = PyImport_ImportModule("numpy.core._multiarray_umath");
    }
    PyObject *capsule = module != NULL ? PyObject_GetAttrString(module, "_ARRAY_API") : NULL;
    void **table = capsule != NULL ? PyCapsule_GetPointer(capsule, NULL) : NULL;
    if (table != NULL && table[ARRAY_TYPE] == (void *)core->ndarray)
        memcpy(&core->new_numpy, &table[NEW_FROM_DESCR], sizeof core->new_numpy);
    Py_XDECREF(capsule);
    Py_XDECREF(module);
}

/* Finds NumPy's dtypes, and checks with a test array that the fields of struct numpy_array agree
   with the buffer protocol. If they disagree, forgets the dtypes, so that all arrays are viewed by
   the buffer protocol. */
static void find_descrs(struct core *core, PyObject *numpy)
{
    static const char *const names[BFLOAT16] = {
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128"};
    PyObject *size = PyObject_GetAttrString((PyObject *)core->ndarray, "__basicsize__");
    PyObject *array = PyObject_CallMethod(numpy, "zeros", "((ii)s)", 2, 3, "int32");
    struct view fields, buffer;
    for (int i = 0; i < BFLOAT16; i++)
        core->descrs[i] = PyObject_CallMethod(numpy, "dtype", "s", names[i]);
    int fits = size != NULL && PyLong_AsSsize_t(size) >= (Py_ssize_t)sizeof(struct numpy_array);
    find_new_numpy(core);
    if (!fits || array == NULL || !view_fields(core, (struct numpy_array *)array, &fields)
        || !view_buffer(array, &buffer) || fields.address != buffer.address
        || fields.nbytes != buffer.nbytes || fields.dtype != buffer.dtype || fields.ndim != 2
        || fields.shape[0] != 2 || fields.shape[1] != 3 || !fields.writable) {
        core->new_numpy = NULL;
        for (int i = 0; i < BFLOAT16; i++)
            Py_CLEAR(core->descrs[i]);
    }
    Py_XDECREF(size);
    Py_XDECREF(array);
    PyErr_Clear();
}

int add_views(PyObject *module, struct core *core)
{
    PyObject *numpy = PyImport_ImportModule("numpy");
    core->ndarray = numpy ? (PyTypeObject *)PyObject_GetAttrString(numpy, "ndarray") : NULL;
    core->empty = numpy ? PyObject_GetAttrString(numpy, "empty") : NULL;
    core->asarray = numpy ? PyObject_GetAttrString(numpy, "asarray") : NULL;
    int found = core->ndarray != NULL && core->empty != NULL && core->asarray != NULL;
    if (found)
        find_descrs(core, numpy); /* clears errors */
    Py_XDECREF(numpy);
    if (!found)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
