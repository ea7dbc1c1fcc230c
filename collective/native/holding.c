/* Holding arrays: their memory stays at its address while other code may run, even if that code
   resizes an array or gives a tensor another storage. See collective/memory/holding.py. */

#include "python.h"

/* A tensor's storage, which must not be resized as long as this object lives. The module's state has
   a list of all of them. */
struct hold {
    CORE_HEAD
    PyObject *storage;
    char *flag; /* of the storage: whether it is resizable */
    char was;   /* the flag before the first of the holds on this storage */
    struct hold *next;
};

static void hold_dealloc(PyObject *object)
{
    struct hold *hold = (struct hold *)object;
    struct core *core = PyModule_GetState(hold->core->module);
    int others = 0;
    Py_BEGIN_CRITICAL_SECTION(core->module);
    struct hold **at = &core->holds;
    while (*at != NULL) {
        others += *at != hold && (*at)->flag == hold->flag;
        if (*at == hold)
            *at = hold->next;
        else
            at = &(*at)->next;
    }
    if (hold->flag != NULL && !others)
        *hold->flag = hold->was;
    Py_END_CRITICAL_SECTION();
    object_free(object);
}

/* Returns an object that keeps a tensor's storage, with its memory. A storage that nobody knows how
   to keep from being resized is only kept. */
static PyObject *hold_tensor(const struct core *core, PyObject *tensor)
{
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, core->names[NAME_UNTYPED_STORAGE], NULL);
    if (storage == NULL || core->resizable_at == 0)
        return storage;
    struct core *state = PyModule_GetState(core->module);
    PyObject *address = PyObject_GetAttr(storage, core->names[NAME_CDATA]);
    char *start = address != NULL ? PyLong_AsVoidPtr(address) : NULL;
    struct hold *hold = start != NULL ? object_new(core->hold_type, REFERENCES(struct hold, storage)) : NULL;
    Py_XDECREF(address);
    if (hold == NULL) {
        Py_DECREF(storage);
        return NULL;
    }
    hold->storage = storage;
    hold->flag = start + core->resizable_at;
    Py_BEGIN_CRITICAL_SECTION(core->module);
    const struct hold *other = core->holds;
    while (other != NULL && other->flag != hold->flag)
        other = other->next;
    hold->was = other != NULL ? other->was : *hold->flag;
    hold->next = core->holds;
    state->holds = hold;
    *hold->flag = 0;
    Py_END_CRITICAL_SECTION();
    return (PyObject *)hold;
}

/* Whether the memory of a viewed array is still where it was, when other code has run. A tensor that
   got another storage leaves the memory to the object from hold_memory(). */
static int is_kept(const struct core *core, PyObject *held, const struct view *view)
{
    if (held == NULL || !is_tensor(core, view->array))
        return is_there(core, view);
    if (view->nbytes == 0) /* which address a tensor without elements has is not defined */
        return 1;
    PyObject *storage = Py_IS_TYPE(held, core->hold_type) ? ((struct hold *)held)->storage : held;
    PyObject *data = PyObject_CallMethod(storage, "data_ptr", NULL);
    PyObject *length = data != NULL ? PyObject_CallMethod(storage, "nbytes", NULL) : NULL;
    const char *start = length != NULL ? PyLong_AsVoidPtr(data) : NULL;
    size_t nbytes = length != NULL ? PyLong_AsSize_t(length) : 0;
    Py_XDECREF(data);
    Py_XDECREF(length);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return start <= view->address && view->address + view->nbytes <= start + nbytes;
}

/* Holds the memory of NumPy's array, which may be a view of the array that owns the memory. */
static PyObject *hold_numpy(const struct core *core, PyObject *array)
{
    PyObject *owner = Py_NewRef(array), *base = PyObject_GetAttr(owner, core->names[NAME_BASE]);
    while (base != NULL && PyObject_TypeCheck(base, core->ndarray)) {
        Py_DECREF(owner);
        owner = base;
        base = PyObject_GetAttr(owner, core->names[NAME_BASE]);
    }
    PyObject *held = NULL;
    if (base == Py_None)
        held = PyWeakref_NewRef(owner, NULL);
    else if (base != NULL)
        held = is_tensor(core, base) ? hold_tensor(core, base) : PyMemoryView_FromObject(base);
    Py_XDECREF(base);
    Py_DECREF(owner);
    return held;
}

/* Returns an object that keeps the memory of an array at its address for as long as the object
   lives. It is needed while another thread or Python code may run. If a NumPy array owns its memory,
   the object is a weak reference: NumPy's resize refuses an array with a weak reference, even with
   refcheck=False, which ignores views and buffers. If the memory is that of another object, such as
   a bytearray or a mmap, the object is a view of that: np.ndarray(buffer=...) keeps none. For a
   tensor the object has its storage, so that a tensor that gets another storage leaves the memory
   there, and makes the storage refuse to be resized. Returns NULL for any other object, and never
   raises. */
static PyObject *hold_memory(const struct core *core, PyObject *array)
{
    PyObject *held = NULL;
    if (PyObject_TypeCheck(array, core->ndarray))
        held = hold_numpy(core, array);
    else if (is_tensor(core, array))
        held = hold_tensor(core, array);
    if (held == NULL)
        PyErr_Clear();
    return held;
}

int are_kept(const struct core *core, const struct view *const *views, PyObject *const *held)
{
    for (int i = 0; i < 2; i++)
        if (views[i] != NULL && !is_kept(core, held[i], views[i]))
            return 0;
    return 1;
}

/* A look at a tensor may release the interpreter lock: PyTorch does so in is_neg(). So both arrays are
   held before either is looked at. */
int hold_both(const struct core *core, const struct view *const *views, PyObject **held)
{
    for (int i = 0; i < 2; i++)
        if (views[i] != NULL && held[i] == NULL)
            held[i] = hold_memory(core, views[i]->array);
    return are_kept(core, views, held);
}

/* Returns the items of a list, tuple or dict as a tuple, which keeps them: to hold an array may run
   Python code, and that code or another thread may change the structure. Returns NULL for any other
   object, or with an exception. */
static PyObject *items_of(PyObject *arrays)
{
    if (PyTuple_Check(arrays))
        return Py_NewRef(arrays);
    if (PyList_Check(arrays))
        return PyList_AsTuple(arrays);
    PyObject *values = PyDict_Check(arrays) ? PyDict_Values(arrays) : NULL;
    PyObject *items = values ? PyList_AsTuple(values) : NULL;
    Py_XDECREF(values);
    return items;
}

/* As hold_all(), but returns 0 without going on if the structure is nested too deeply. */
static int hold_each(const struct core *core, PyObject *arrays, PyObject **held)
{
    PyObject *items, *holder;
    int whole = 1;
    if (Py_EnterRecursiveCall("")) {
        PyErr_Clear();
        return 0;
    }
    if ((items = items_of(arrays)) != NULL) {
        for (Py_ssize_t at = 0; whole && at < PyTuple_Size(items); at++)
            whole = hold_each(core, PyTuple_GetItem(items, at), held);
        Py_DECREF(items);
    } else if (!PyErr_Occurred() && (holder = hold_memory(core, arrays)) != NULL) {
        if (*held == NULL)
            *held = PyList_New(0);
        if (*held != NULL)
            PyList_Append(*held, holder);
        Py_DECREF(holder);
    }
    PyErr_Clear();
    Py_LeaveRecursiveCall();
    return whole;
}

void hold_all(const struct core *core, PyObject *arrays, PyObject **held)
{
    /* This fails for a structure that contains itself. Python refuses such a structure later. */
    (void)hold_each(core, arrays, held);
}

/* hold(arrays) */
static PyObject *hold_arrays(PyObject *module, PyObject *arrays)
{
    PyObject *held = NULL;
    hold_all(PyModule_GetState(module), arrays, &held);
    return held != NULL ? held : PyList_New(0);
}

static PyType_Slot hold_slots[] = {{Py_tp_dealloc, hold_dealloc}, {0, NULL}};

static PyType_Spec hold_spec = {
    "collective.native._core.Hold", sizeof(struct hold), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hold_slots};

static PyMethodDef functions[] = {
    {"hold", hold_arrays, METH_O,
     "hold(arrays, /)\n--\n\n"
     "Return a list that keeps the memory of all arrays in a structure; see memory/holding.py."},
    {NULL, NULL, 0, NULL}};

int add_holding(PyObject *module, struct core *core)
{
    if (type_add(module, &hold_spec, &core->hold_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
