/* One value: a number, an array, or a dict or tuple of values, between Python objects and a record. */

#include "codec.h"

/* Set the error for a record that no writer has written; returns NULL. Like `damaged` in `columns.py`. */
PyObject *damaged(const Codec *codec, const char *record) {
    return PyErr_Format(PyExc_ValueError,
                        "the record of environment %zd is damaged: native code has overwritten shared memory. Find it with a "
                        "memory checker; until then, pass shared_memory=False",
                        (record - codec->base) / codec->stride);
}

/* A value that was read; if that failed by what the record contains, NULL with the error for damage. */
PyObject *read_or_damaged(const Codec *codec, const char *record, PyObject *value) {
    if (value != NULL || !PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError))
        return value;
    PyErr_Clear();
    return damaged(codec, record);
}

/* An array over memory of the block, which it keeps alive. */
static PyObject *view_of(PyObject *block, const Node *node, char *data) {
    Py_INCREF(node->dtype);
    PyObject *view = PyArray_NewFromDescr(
        &PyArray_Type, node->dtype, node->ndim, node->dims, NULL, data, NPY_ARRAY_CARRAY, NULL);
    if (view == NULL) return NULL;
    Py_INCREF(block);
    if (PyArray_SetBaseObject((PyArrayObject *)view, block) < 0) {
        Py_DECREF(view);
        return NULL;
    }
    return view;
}

static Outcome write_array(const Codec *codec, const Node *node, char *target, PyObject *value) {
    if (!PyArray_CheckExact(value)) return LEFT;
    PyArrayObject *array = (PyArrayObject *)value;
    if (PyArray_NDIM(array) != node->ndim) return LEFT;
    for (int axis = 0; axis < node->ndim; axis++)
        if (PyArray_DIM(array, axis) != node->dims[axis]) return LEFT;
    int type = PyArray_TYPE(array), own_type = node->dtype->type_num;
    if (type == own_type && PyArray_ISCARRAY_RO(array) && PyArray_ISNBO(node->dtype->byteorder)) {
        memmove(target, PyArray_DATA(array), (size_t)node->nbytes); /* it may be a view of the block */
        return DONE;
    }
    /* Integers of another type need a comparison of each, which Python does. */
    if (type != own_type && !(PyTypeNum_ISFLOAT(type) && PyTypeNum_ISFLOAT(own_type))) return LEFT;
    PyObject *view = view_of(codec->block, node, target);
    if (view == NULL) return FAILED;
    int failed = PyArray_CopyInto((PyArrayObject *)view, array) < 0;
    Py_DECREF(view);
    return failed ? FAILED : DONE;
}

/* Whether the dtype of an array has metadata; also true after an error, which is cleared. */
int has_metadata(PyArrayObject *array) {
    PyObject *metadata = PyObject_GetAttr((PyObject *)PyArray_DESCR(array), name_metadata);
    if (metadata == NULL) PyErr_Clear();
    Py_XDECREF(metadata);
    return metadata != Py_None;
}

/* The tag of a number, or of an array of one element: the place of its type in `types`; -1 for other types. */
int tag_of(PyObject *types, PyObject *value) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    int of_array = 0;
    if (PyArray_CheckExact(value)) {
        PyArrayObject *array = (PyArrayObject *)value;
        int ndim = PyArray_NDIM(array);
        if (ndim > 1 || PyArray_SIZE(array) != 1 || !PyArray_ISNOTSWAPPED(array) || has_metadata(array)) return -1;
        type = (PyObject *)PyArray_DESCR(array)->typeobj;
        of_array = ndim == 0 ? NO_AXIS : ONE_AXIS;
    }
    for (Py_ssize_t tag = 0, size = PyTuple_Size(types); tag < size; tag++)
        if (PyTuple_GetItem(types, tag) == type) return (int)tag | of_array;
    return -1;
}

/* Whether `tag_of` may have returned a tag, for some types. */
int is_form(int tag) {
    int of_array = tag & ~TYPE_OF_TAG;
    return of_array == 0 || of_array == NO_AXIS || of_array == ONE_AXIS;
}

/* Whether `tag_of` may have returned a tag for these types. */
int is_tag(PyObject *types, int tag) {
    return is_form(tag) && (tag & TYPE_OF_TAG) < PyTuple_Size(types);
}

/* The number in an array of one element as an array scalar; other values as they are. */
PyObject *number_in(PyObject *value, int tag) {
    if (tag > TYPE_OF_TAG) return PyArray_ToScalar(PyArray_DATA((PyArrayObject *)value), (PyArrayObject *)value);
    Py_INCREF(value);
    return value;
}

/* Turn a Python number, which is stolen, into a number of a type, or into an array of one element. */
static PyObject *with_tag(PyObject *types, int tag, PyObject *number) {
    if (number == NULL) return NULL;
    PyObject *type = PyTuple_GetItem(types, tag & TYPE_OF_TAG), *value = NULL;
    if (type == (PyObject *)Py_TYPE(number)) return number;
    if (type != NULL && tag <= TYPE_OF_TAG) value = PyObject_CallFunctionObjArgs(type, number, NULL);
    if (type != NULL && tag > TYPE_OF_TAG) {
        npy_intp one = 1;
        PyArray_Descr *dtype = PyArray_DescrFromTypeObject(type);
        if (dtype != NULL)
            value = PyArray_NewFromDescr(&PyArray_Type, dtype, tag & ONE_AXIS ? 1 : 0, &one, NULL, NULL, 0, NULL);
        if (value != NULL && PyArray_CopyObject((PyArrayObject *)value, number) < 0) Py_CLEAR(value);
    }
    Py_DECREF(number);
    return value;
}

/* The value of an integer of Python or NumPy. */
Outcome integer_of(PyObject *value, long long *number) {
    if (PyLong_Check(value)) { /* booleans too */
        *number = PyLong_AsLongLong(value);
    } else if (PyArray_IsScalar(value, Bool)) {
        *number = PyObject_IsTrue(value);
    } else {
        PyObject *integer = PyNumber_Index(value);
        if (integer == NULL) return FAILED;
        *number = PyLong_AsLongLong(integer);
        Py_DECREF(integer);
    }
    if (*number == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return FAILED;
        PyErr_Clear();
        return LEFT;
    }
    return DONE;
}

Outcome write_value(const Codec *codec, const Node *node, char *record, PyObject *value) {
    Outcome outcome = DONE;
    switch (node->kind) {
    case NO_KIND:
        return LEFT;
    case ARRAY:
        return write_array(codec, node, record + node->offset, value);
    case NUMBER: {
        int tag = tag_of(codec->number_types, value);
        long long number;
        if (tag < 0 || (tag & ONE_AXIS && !node->one_axis)) return LEFT;
        PyObject *scalar = number_in(value, tag);
        outcome = scalar == NULL ? FAILED : integer_of(scalar, &number);
        Py_XDECREF(scalar);
        if (outcome != DONE) return outcome;
        if (number < node->low || number > node->high) return LEFT;
        char *target = record + node->offset;
        switch (node->nbytes) {
        case 1: *(int8_t *)target = (int8_t)number; break;
        case 2: *(int16_t *)target = (int16_t)number; break;
        case 4: *(int32_t *)target = (int32_t)number; break;
        default: *(int64_t *)target = number;
        }
        record[node->tag] = (char)tag;
        return DONE;
    }
    case DICT:
        if (!PyDict_CheckExact(value) || PyDict_Size(value) != node->size) return LEFT;
        for (Py_ssize_t i = 0; i < node->size && outcome == DONE; i++) {
            PyObject *part = PyDict_GetItemWithError(value, PyTuple_GetItem(node->keys, i));
            if (part == NULL) return PyErr_Occurred() ? FAILED : LEFT;
            Py_INCREF(part);
            outcome = write_value(codec, &node->parts[i], record, part);
            Py_DECREF(part);
        }
        return outcome;
    case TUPLE:
        if (!PyTuple_CheckExact(value) || PyTuple_Size(value) != node->size) return LEFT;
        for (Py_ssize_t i = 0; i < node->size && outcome == DONE; i++)
            outcome = write_value(codec, &node->parts[i], record, PyTuple_GetItem(value, i));
        return outcome;
    }
    return LEFT;
}

static PyObject *read_number(const Codec *codec, const Node *node, const char *record) {
    const char *source = record + node->offset;
    unsigned char tag = (unsigned char)record[node->tag];
    int is_signed = node->low < 0;
    int64_t number;
    if (!is_form(tag) || (tag & ONE_AXIS && !node->one_axis)) return damaged(codec, record);
    switch (node->nbytes) {
    case 1: number = is_signed ? *(const int8_t *)source : *(const uint8_t *)source; break;
    case 2: number = is_signed ? *(const int16_t *)source : *(const uint16_t *)source; break;
    case 4: number = is_signed ? *(const int32_t *)source : (int64_t)*(const uint32_t *)source; break;
    default: number = *(const int64_t *)source;
    }
    if (tag < PyTuple_Size(codec->number_types) &&
        PyTuple_GetItem(codec->number_types, tag) == (PyObject *)int64_dtype->typeobj)
        return PyArray_Scalar(&number, int64_dtype, NULL);
    PyObject *value = is_signed ? PyLong_FromLongLong(number) : PyLong_FromUnsignedLongLong((uint64_t)number);
    return read_or_damaged(codec, record, with_tag(codec->number_types, tag, value));
}

/* Whether a double is an integer that `double_of` may have returned. */
static int is_integer(double number) {
    return number >= -LARGEST_EXACT && number <= LARGEST_EXACT && number == (double)(long long)number;
}

PyObject *read_reward(const Codec *codec, const char *record, double number, int tag) {
    if (tag < PyTuple_Size(codec->reward_types) &&
        PyTuple_GetItem(codec->reward_types, tag) == (PyObject *)double_dtype->typeobj)
        return PyArray_Scalar(&number, double_dtype, NULL);
    if (!is_form(tag)) return damaged(codec, record);
    if ((tag & TYPE_OF_TAG) >= codec->floats && !is_integer(number)) return damaged(codec, record);
    return read_or_damaged(codec, record, with_tag(codec->reward_types, tag, PyFloat_FromDouble(number)));
}

/* One value as a new object; `copy` tells how arrays are read. */
PyObject *read_value(const Codec *codec, const Node *node, char *record, int copy) {
    switch (node->kind) {
    case NO_KIND:
        return damaged(codec, record); /* a vector where none is declared */
    case ARRAY: {
        char *data = record + node->offset;
        if (copy == VIEWS) return view_of(codec->block, node, data);
        if (copy == SCALARS && node->ndim == 0) return PyArray_Scalar(data, node->dtype, NULL);
        Py_INCREF(node->dtype);
        PyObject *array = PyArray_NewFromDescr(&PyArray_Type, node->dtype, node->ndim, node->dims, NULL, NULL, 0, NULL);
        if (array != NULL) memcpy(PyArray_DATA((PyArrayObject *)array), data, (size_t)node->nbytes);
        return array;
    }
    case NUMBER:
        return read_number(codec, node, record);
    case DICT: {
        PyObject *dict = PyDict_New();
        for (Py_ssize_t i = 0; dict != NULL && i < node->size; i++) {
            PyObject *part = read_value(codec, &node->parts[i], record, copy);
            if (part == NULL || PyDict_SetItem(dict, PyTuple_GetItem(node->keys, i), part) < 0) Py_CLEAR(dict);
            Py_XDECREF(part);
        }
        return dict;
    }
    case TUPLE: {
        PyObject *tuple = PyTuple_New(node->size);
        for (Py_ssize_t i = 0; tuple != NULL && i < node->size; i++) {
            PyObject *part = read_value(codec, &node->parts[i], record, copy);
            if (part == NULL || PyTuple_SetItem(tuple, i, part) < 0) Py_CLEAR(tuple);
        }
        return tuple;
    }
    }
    return NULL;
}
