/* The type `Codec`: how an object is made and freed, and its methods. */

#include "codec.h"

static void free_nodes(Node *nodes, Py_ssize_t size) {
    for (Py_ssize_t i = 0; nodes != NULL && i < size; i++) {
        Py_XDECREF(nodes[i].dtype);
        Py_XDECREF(nodes[i].keys);
        PyMem_Free(nodes[i].dims);
        free_nodes(nodes[i].parts, nodes[i].size);
    }
    PyMem_Free(nodes);
}

/* Keep pieces of memory for so many arrays of each node; returns whether there are large ones. */
static int keep_all(const Node *nodes, Py_ssize_t size, Py_ssize_t more) {
    int any = 0;
    for (Py_ssize_t i = 0; nodes != NULL && i < size; i++) {
        if (nodes[i].kind == ARRAY && nodes[i].nbytes >= LARGE) {
            keep((size_t)nodes[i].nbytes, more);
            any = 1;
        }
        if (keep_all(nodes[i].parts, nodes[i].size, more)) any = 1;
    }
    return any;
}

static int build_node(Node *node, PyObject *form);

/* Build a node from each form of a tuple. */
static int build_nodes(Node **nodes, PyObject *forms) {
    Py_ssize_t size = PyTuple_Size(forms);
    if ((*nodes = PyMem_Calloc((size_t)size + 1, sizeof(Node))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < size; i++)
        if (build_node(*nodes + i, PyTuple_GetItem(forms, i)) < 0) return -1;
    return 0;
}

static int build_node(Node *node, PyObject *form) {
    if (form == Py_None) return 0;
    PyObject *kind = PyTuple_GetItem(form, 0), *parts = NULL;
    if (kind == NULL) return -1;
    if (PyUnicode_CompareWithASCIIString(kind, "array") == 0) {
        PyArray_Descr *dtype;
        PyObject *shape;
        node->kind = ARRAY;
        if (!PyArg_ParseTuple(form, "OnO!O!n", &kind, &node->offset, &PyArrayDescr_Type, &dtype, &PyTuple_Type, &shape,
                              &node->nbytes))
            return -1;
        Py_INCREF(dtype);
        node->dtype = dtype;
        node->ndim = (int)PyTuple_Size(shape);
        if ((node->dims = PyMem_Calloc((size_t)node->ndim + 1, sizeof(npy_intp))) == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (int axis = 0; axis < node->ndim; axis++) {
            node->dims[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
            if (node->dims[axis] == -1 && PyErr_Occurred()) return -1;
        }
        return 0;
    }
    if (PyUnicode_CompareWithASCIIString(kind, "number") == 0) {
        node->kind = NUMBER;
        return PyArg_ParseTuple(form, "OnnnLLp", &kind, &node->offset, &node->tag, &node->nbytes, &node->low,
                                &node->high, &node->one_axis)
                   ? 0
                   : -1;
    }
    node->kind = PyUnicode_CompareWithASCIIString(kind, "dict") == 0 ? DICT : TUPLE;
    PyObject *keys;
    if (!PyArg_ParseTuple(form, "OO!O!", &kind, &PyTuple_Type, &keys, &PyTuple_Type, &parts)) return -1;
    Py_INCREF(keys);
    node->keys = keys;
    node->size = PyTuple_Size(parts);
    return build_nodes(&node->parts, parts);
}

PyDoc_STRVAR(codec_doc,
    "Codec(block, stride, agents, all_key, headers, forms, types, dicts, activity, infos, totals, in_infos, same_step,\n"
    "      moment)\n--\n\n"
    "See `codec.py`, which makes the arguments of a layout.");

static int codec_init(PyObject *self, PyObject *args, PyObject *keywords) {
    Codec *codec = (Codec *)self;
    PyObject *block, *agents, *all, *actions, *observations, *finals, *vectors, *numbers, *rewards, *np_false, *np_true,
        *dicts[4], *totals, *moment;
    long long activity;
    if (codec->block != NULL || (keywords != NULL && PyDict_Size(keywords) > 0)) {
        PyErr_SetString(PyExc_TypeError, "a Codec is made once, without keywords");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O!nO!U(nn)(OOOO)(O!O!nOO)(O!O!O!O!)L(nn)OppO", &PyArray_Type, &block, &codec->stride,
                          &PyTuple_Type, &agents, &all, &codec->action_header, &codec->header, &actions, &observations, &finals, &vectors,
                          &PyTuple_Type, &numbers, &PyTuple_Type, &rewards, &codec->floats, &np_false, &np_true,
                          &PyDict_Type, &dicts[0], &PyDict_Type, &dicts[1], &PyDict_Type, &dicts[2], &PyDict_Type,
                          &dicts[3], &activity, &codec->infos, &codec->infos_nbytes, &totals, &codec->in_infos,
                          &codec->same_step, &moment))
        return -1;
    codec->step_activity = activity;
    codec->n = PyTuple_Size(agents);
    codec->base = PyArray_DATA((PyArrayObject *)block);
    codec->records = codec->stride > 0 ? PyArray_SIZE((PyArrayObject *)block) / codec->stride : 0;
    PyObject **owned[] = {&codec->block, &codec->agents, &codec->all, &codec->number_types, &codec->reward_types,
                          &codec->np_false, &codec->np_true, &codec->no_values, &codec->no_flags, &codec->no_np_flags,
                          &codec->only_all, &codec->totals_array, &codec->moment_array};
    PyObject *objects[] = {block, agents, all, numbers, rewards, np_false, np_true, dicts[0], dicts[1], dicts[2], dicts[3],
                           totals, moment};
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
        Py_INCREF(objects[i]);
        *owned[i] = objects[i];
    }
    if (totals != Py_None) {
        PyArrayObject *array = (PyArrayObject *)totals;
        if (!PyArray_Check(totals) || PyArray_TYPE(array) != NPY_DOUBLE || !PyArray_ISCARRAY(array) ||
            PyArray_SIZE(array) != codec->records * (2 * codec->n + 1)) {
            PyErr_SetString(PyExc_ValueError, "totals must be None or float64 (records, 2 * agents + 1), contiguous");
            return -1;
        }
        codec->totals = PyArray_DATA(array);
    }
    if (moment != Py_None) {
        PyArrayObject *array = (PyArrayObject *)moment;
        if (!PyArray_Check(moment) || PyArray_TYPE(array) != NPY_DOUBLE || !PyArray_ISCARRAY_RO(array) ||
            PyArray_SIZE(array) != 1) {
            PyErr_SetString(PyExc_ValueError, "moment must be None or a float64 array of one number");
            return -1;
        }
        codec->moment = PyArray_DATA(array);
    }
    PyObject *flags[] = {Py_False, Py_True, np_false, np_true};
    memcpy(codec->flags, flags, sizeof flags);
    if ((codec->places = PyDict_New()) == NULL) return -1;
    for (Py_ssize_t i = 0; i < codec->n; i++) {
        PyObject *agent = PyTuple_GetItem(agents, i);
        if (!PyUnicode_CheckExact(agent) && !PyLong_CheckExact(agent)) continue; /* comparing others may run any code */
        PyObject *place = PyLong_FromSsize_t(i);
        int failed = place == NULL || PyDict_SetItem(codec->places, agent, place) < 0;
        Py_XDECREF(place);
        if (failed) return -1;
    }
    codec->states = PyMem_Calloc((size_t)(codec->records * (codec->n + 1)) + 1, 1);
    codec->first_lives = PyMem_Calloc((size_t)codec->records + 1, sizeof(PyObject *));
    codec->lives = PyMem_Calloc((size_t)(codec->records * codec->n) + 1, 1);
    codec->scratch = PyMem_Calloc((size_t)(6 * codec->n) + 2, 1);
    codec->there = PyMem_Calloc((size_t)codec->n + 1, 1);
    codec->values = PyMem_Calloc((size_t)(3 * codec->n) + 1, sizeof(PyObject *));
    codec->agents_list = PyList_New(codec->n); /* without memory, PySequence_List of CPython 3.11 keeps a reference */
    for (Py_ssize_t i = 0; codec->agents_list != NULL && i < codec->n; i++) {
        PyObject *agent = PyTuple_GetItem(agents, i);
        Py_INCREF(agent);
        PyList_SetItem(codec->agents_list, i, agent);
    }
    codec->rewards = PyMem_Calloc((size_t)codec->n + 1, sizeof(double));
    codec->keys = PyMem_Calloc((size_t)(codec->records * codec->n) + 1, sizeof(PyObject *));
    if (codec->states == NULL || codec->there == NULL || codec->values == NULL || codec->rewards == NULL ||
        codec->keys == NULL || codec->first_lives == NULL || codec->lives == NULL || codec->scratch == NULL ||
        codec->agents_list == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (codec->n == 0) return 0; /* nothing is plain */
    Node **nodes[] = {&codec->actions, &codec->observations, &codec->finals, &codec->vectors};
    PyObject *forms[] = {actions, observations, finals, vectors};
    for (int i = 0; i < 4; i++) {
        if (forms[i] == Py_None) continue;
        if (!PyTuple_Check(forms[i]) || PyTuple_Size(forms[i]) != codec->n) {
            PyErr_SetString(PyExc_ValueError, "expected a form for each agent");
            return -1;
        }
        if (build_nodes(nodes[i], forms[i]) < 0) return -1;
    }
    if (totals != Py_None) codec->has_large = keep_all(codec->observations, codec->n, 2 * codec->records);
    return 0;
}

static void codec_dealloc(PyObject *self) {
    Codec *codec = (Codec *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject *owned[] = {codec->block, codec->agents, codec->all, codec->number_types, codec->reward_types,
                         codec->np_false, codec->np_true, codec->no_values, codec->no_flags, codec->no_np_flags,
                         codec->only_all, codec->places, codec->totals_array, codec->moment_array, codec->agents_list};
    if (codec->has_large) keep_all(codec->observations, codec->n, -2 * codec->records);
    free_nodes(codec->actions, codec->n);
    free_nodes(codec->observations, codec->n);
    free_nodes(codec->finals, codec->n);
    free_nodes(codec->vectors, codec->n);
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_XDECREF(owned[i]);
    for (Py_ssize_t i = 0; codec->keys != NULL && i < codec->records * codec->n; i++) Py_XDECREF(codec->keys[i]);
    PyMem_Free(codec->keys);
    PyMem_Free(codec->states);
    PyMem_Free(codec->there);
    for (Py_ssize_t i = 0; codec->first_lives != NULL && i < codec->records; i++) Py_XDECREF(codec->first_lives[i]);
    PyMem_Free(codec->first_lives);
    PyMem_Free(codec->lives);
    PyMem_Free(codec->scratch);
    PyMem_Free(codec->values);
    PyMem_Free(codec->rewards);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef codec_methods[] = {
    {"write", codec_write, METH_VARARGS, write_doc},
    {"put_actions", codec_put_actions, METH_VARARGS, put_actions_doc},
    {"read", codec_read, METH_VARARGS, read_doc},
    {"forget", codec_forget, METH_VARARGS, forget_doc},
    {"agents_of", codec_agents_of, METH_VARARGS, agents_doc},
    {"is_over", codec_is_over, METH_O, is_over_doc},
    {"put", codec_put, METH_VARARGS, put_doc},
    {"parts", codec_parts, METH_VARARGS, parts_doc},
    {"read_arrays", codec_read_arrays, METH_VARARGS, read_arrays_doc},
    {"write_arrays", codec_write_arrays, METH_VARARGS, write_arrays_doc},
    {"acting", codec_acting, METH_VARARGS, acting_doc},
    {"run", codec_run, METH_VARARGS, run_doc},
    {"lives", codec_lives, METH_VARARGS, lives_doc},
    {"sums", codec_sums, METH_NOARGS, sums_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef codec_members[] = {
    {"place", T_PYSSIZET, offsetof(Codec, place), READONLY, "The place of the environment that `run` stepped last."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot codec_slots[] = {
    {Py_tp_doc, (void *)codec_doc},
    {Py_tp_init, codec_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, codec_dealloc},
    {Py_tp_methods, codec_methods},
    {Py_tp_members, codec_members},
    {0, NULL},
};

PyType_Spec codec_spec = {
    .name = "marl_parallel.core._codec.Codec",
    .basicsize = sizeof(Codec),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = codec_slots,
};
