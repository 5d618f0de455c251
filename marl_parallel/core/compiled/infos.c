/* Infos of simple values in the block: written, read, and read as arrays over neighbouring environments. */

#include "codec.h"

static const char action_mask[] = "action_mask";

/* The area of a record: the number of bytes in use (8), then one value: a letter for its type, and its content.

       N F T       None, False, True          i f     int of 64 bits, float          s n    str, number of NumPy
       d l t       dict, list, tuple          a       array of numbers

   A value of any other type makes Python pickle all infos of the environment. */

enum { DEEPEST = 16, MOST_AXES = 8 };

typedef struct {
    char *at, *end;
    int mask_depth, has_mask;  /* how deep the keys of agents' infos are; whether one names an action mask */
} Area;

static Outcome put(Area *area, const void *bytes, Py_ssize_t size) {
    if (size > area->end - area->at) return LEFT;
    memcpy(area->at, bytes, (size_t)size);
    area->at += size;
    return DONE;
}

static Outcome put_head(Area *area, char kind, int64_t number) {
    return put(area, &kind, 1) == DONE ? put(area, &number, sizeof number) : LEFT;
}

/* Whether arrays and numbers of a type can be copied bytewise. */
static int is_plain_number(int type) {
    return PyTypeNum_ISBOOL(type) || PyTypeNum_ISINTEGER(type) || type == NPY_HALF || type == NPY_FLOAT ||
           type == NPY_DOUBLE;
}

static Outcome put_number(Area *area, PyObject *number) {
    char bytes[16];
    PyArray_Descr *dtype = PyArray_DescrFromScalar(number);
    if (dtype == NULL) return FAILED;
    Outcome outcome = LEFT;
    if (is_plain_number(dtype->type_num) && Py_TYPE(number) == dtype->typeobj) {
        PyArray_ScalarAsCtype(number, bytes);
        outcome = put_head(area, 'n', dtype->type_num);
        if (outcome == DONE) outcome = put(area, bytes, PyDataType_ELSIZE(dtype));
    }
    Py_DECREF(dtype);
    return outcome;
}

static Outcome put_array(Area *area, PyArrayObject *array) {
    int type = PyArray_TYPE(array), ndim = PyArray_NDIM(array);
    if (!is_plain_number(type) || ndim > MOST_AXES || !PyArray_ISCARRAY_RO(array) || has_metadata(array)) return LEFT;
    if (put_head(area, 'a', type) != DONE || put_head(area, ' ', ndim) != DONE) return LEFT;
    for (int axis = 0; axis < ndim; axis++) {
        int64_t size = PyArray_DIM(array, axis);
        if (put(area, &size, sizeof size) != DONE) return LEFT;
    }
    return put(area, PyArray_DATA(array), PyArray_NBYTES(array));
}

static Outcome put_value(Area *area, PyObject *value, int depth) {
    Outcome outcome;
    if (value == Py_None) return put(area, "N", 1);
    if (value == Py_False) return put(area, "F", 1);
    if (value == Py_True) return put(area, "T", 1);
    if (depth > DEEPEST) return LEFT;
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        return put(area, "f", 1) == DONE ? put(area, &number, sizeof number) : LEFT;
    }
    if (PyLong_CheckExact(value)) {
        long long number;
        outcome = integer_of(value, &number);
        return outcome == DONE ? put_head(area, 'i', number) : outcome;
    }
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        if (text == NULL) return FAILED; /* a lone surrogate */
        return put_head(area, 's', size) == DONE ? put(area, text, size) : LEFT;
    }
    if (PyDict_CheckExact(value)) {
        Py_ssize_t position = 0;
        PyObject *key, *part;
        if (put_head(area, 'd', PyDict_Size(value)) != DONE) return LEFT;
        while (PyDict_Next(value, &position, &key, &part)) {
            if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return LEFT;
            if ((outcome = put_value(area, key, depth + 1)) != DONE) return outcome;
            if ((outcome = put_value(area, part, depth + 1)) != DONE) return outcome;
        }
        return DONE;
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        int is_list = PyList_CheckExact(value);
        Py_ssize_t size = is_list ? PyList_Size(value) : PyTuple_Size(value);
        if (put_head(area, is_list ? 'l' : 't', size) != DONE) return LEFT;
        for (Py_ssize_t i = 0; i < size; i++) {
            PyObject *part = is_list ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i);
            if ((outcome = put_value(area, part, depth + 1)) != DONE) return outcome;
        }
        return DONE;
    }
    if (PyArray_CheckExact(value)) return put_array(area, (PyArrayObject *)value);
    return PyArray_IsScalar(value, Number) || PyArray_IsScalar(value, Bool) ? put_number(area, value) : LEFT;
}

/* Infos with agents in their order, then other keys as they came: a new reference. NULL after an error. */
static PyObject *in_order(const Codec *codec, PyObject *infos) {
    Py_ssize_t position = 0, next = 0, agent = 0;
    PyObject *key, *info;
    int is_in_order = 1;
    while (is_in_order && PyDict_Next(infos, &position, &key, &info)) {
        Outcome outcome = place_of(codec, key, &agent);
        if (outcome == FAILED) return NULL;
        if (outcome == DONE) is_in_order = agent >= next;
        next = outcome == DONE ? agent + 1 : codec->n;
    }
    if (is_in_order) {
        Py_INCREF(infos);
        return infos;
    }
    PyObject *ordered = PyDict_New();
    for (agent = 0; ordered != NULL && agent < codec->n; agent++) {
        key = PyTuple_GetItem(codec->agents, agent);
        info = PyDict_GetItemWithError(infos, key);
        if (info == NULL ? PyErr_Occurred() != NULL : PyDict_SetItem(ordered, key, info) < 0) Py_CLEAR(ordered);
    }
    if (ordered != NULL && PyDict_Merge(ordered, infos, 0) < 0) Py_CLEAR(ordered);
    return ordered;
}

/* Write a dict of infos. */
static Outcome put_infos(const Codec *codec, Area *area, PyObject *infos, int depth) {
    PyObject *ordered = in_order(codec, infos);
    if (ordered == NULL) return FAILED;
    Outcome outcome = put_value(area, ordered, depth);
    Py_DECREF(ordered);
    return outcome;
}

/* Write the infos of one environment, or a pair: those of a last step, and of the reset after it. LEFT if they have to
   be pickled. */
Outcome write_infos(const Codec *codec, char *record, PyObject *infos) {
    char *start = record + codec->infos;
    if (codec->infos_nbytes < 8) return LEFT;
    Area area = {start + 8, start + codec->infos_nbytes, 0, 0};
    Outcome outcome = DONE;
    if (PyTuple_Check(infos)) {
        outcome = put_head(&area, 't', 2);
        for (int i = 0; i < 2 && outcome == DONE; i++) outcome = put_infos(codec, &area, PyTuple_GetItem(infos, i), 1);
    } else {
        outcome = put_infos(codec, &area, infos, 0);
    }
    if (outcome == FAILED) {
        PyErr_Clear(); /* pickle may support it */
        return LEFT;
    }
    int64_t used = area.at - start - 8;
    memcpy(start, &used, sizeof used);
    return outcome;
}

/* The functions below fail with or without an exception; `read_infos` sets one. */
static int get(Area *area, void *bytes, Py_ssize_t size) {
    if (size < 0 || size > area->end - area->at) return -1;
    memcpy(bytes, area->at, (size_t)size);
    area->at += size;
    return 0;
}

static PyObject *get_array(Area *area, PyArray_Descr *dtype) {
    char kind;
    int64_t ndim, size;
    npy_intp dims[MOST_AXES];
    int is_empty = 0;
    if (get(area, &kind, 1) < 0 || get(area, &ndim, sizeof ndim) < 0) goto failed;
    if (ndim < 0 || ndim > MOST_AXES) goto failed;
    for (int axis = 0; axis < ndim; axis++) {
        if (get(area, &size, sizeof size) < 0 || size < 0) goto failed;
        dims[axis] = (npy_intp)size;
        is_empty |= size == 0;
    }
    Py_ssize_t most = (area->end - area->at) / PyDataType_ELSIZE(dtype); /* no memory for missing elements */
    for (int axis = 0; !is_empty && axis < ndim; axis++)
        if ((most /= dims[axis]) == 0) goto failed;
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, dtype, (int)ndim, dims, NULL, NULL, 0, NULL);
    if (array != NULL && get(area, PyArray_DATA((PyArrayObject *)array), PyArray_NBYTES((PyArrayObject *)array)) < 0)
        Py_CLEAR(array);
    return array;
failed:
    Py_DECREF(dtype);
    return NULL;
}

static PyObject *get_value(Area *area, int depth) {
    char kind, bytes[16];
    int64_t number = 0;
    double real;
    if (depth > DEEPEST + 1 || get(area, &kind, 1) < 0) return NULL;
    switch (kind) {
    case 'N': Py_RETURN_NONE;
    case 'F': Py_RETURN_FALSE;
    case 'T': Py_RETURN_TRUE;
    case 'f': return get(area, &real, sizeof real) < 0 ? NULL : PyFloat_FromDouble(real);
    }
    if (get(area, &number, sizeof number) < 0) return NULL;
    switch (kind) {
    case 'i': return PyLong_FromLongLong(number);
    case 's': {
        char *text = area->at;
        if (number < 0 || number > area->end - text) break;
        area->at += number;
        return PyUnicode_DecodeUTF8(text, (Py_ssize_t)number, NULL);
    }
    case 'n':
    case 'a': {
        int is_plain = number == (int)number && is_plain_number((int)number);
        PyArray_Descr *dtype = is_plain ? PyArray_DescrFromType((int)number) : NULL;
        if (dtype == NULL) break;
        if (kind == 'a') return get_array(area, dtype);
        PyObject *value = NULL;
        if (get(area, bytes, PyDataType_ELSIZE(dtype)) == 0) value = PyArray_Scalar(bytes, dtype, NULL);
        Py_DECREF(dtype);
        return value;
    }
    case 'd': {
        PyObject *dict = PyDict_New();
        for (; dict != NULL && number > 0; number--) {
            char *text = area->at;
            PyObject *key = get_value(area, depth + 1);
            PyObject *part = key == NULL ? NULL : get_value(area, depth + 1);
            if (part == NULL || PyDict_SetItem(dict, key, part) < 0) Py_CLEAR(dict);
            if (depth == area->mask_depth && area->at - text > 9 + (Py_ssize_t)sizeof action_mask - 1 && *text == 's' &&
                memcmp(text + 9, action_mask, sizeof action_mask - 1) == 0)
                area->has_mask = 1;
            Py_XDECREF(key);
            Py_XDECREF(part);
        }
        return dict;
    }
    case 'l':
    case 't': {
        if (number < 0 || number > area->end - area->at) break;
        PyObject *parts = kind == 'l' ? PyList_New((Py_ssize_t)number) : PyTuple_New((Py_ssize_t)number);
        for (Py_ssize_t i = 0; parts != NULL && i < number; i++) {
            PyObject *part = get_value(area, depth + 1);
            int failed = part == NULL;
            if (!failed) failed = kind == 'l' ? PyList_SetItem(parts, i, part) : PyTuple_SetItem(parts, i, part);
            if (failed) Py_CLEAR(parts);
        }
        return parts;
    }
    }
    return NULL;
}

/* The infos of a record as a new dict; or a pair: infos of a step and infos of a reset. */
static PyObject *read_infos(const Codec *codec, char *record, int is_pair, int *has_mask) {
    char *start = record + codec->infos;
    PyObject *infos = NULL;
    Area area = {start + 8, start + 8, is_pair ? 2 : 1, 0};
    int64_t used = -1;
    if (codec->infos_nbytes >= 8) memcpy(&used, start, sizeof used);
    if (used >= 0 && used <= codec->infos_nbytes - 8) {
        area.end += used;
        infos = get_value(&area, 0);
    }
    *has_mask = area.has_mask;
    if (infos != NULL && !(is_pair ? PyTuple_CheckExact(infos) : PyDict_CheckExact(infos))) Py_CLEAR(infos);
    if (infos == NULL && !PyErr_Occurred()) return damaged(codec, record);
    return read_or_damaged(codec, record, infos);
}

/* The infos of a record in the block; with final observations, `reset` gets the infos of the automatic reset. */
PyObject *infos_in_block(const Codec *codec, const Header *header, char *record, int *has_mask, PyObject **reset) {
    PyObject *infos = read_infos(codec, record, (header->code & FINAL) != 0, has_mask);
    *reset = NULL;
    if (infos == NULL || !(header->code & FINAL)) return infos;
    PyObject *own = NULL;
    if (PyTuple_Check(infos) && PyTuple_Size(infos) == 2) {
        own = PyTuple_GetItem(infos, 0);
        *reset = PyTuple_GetItem(infos, 1);
    }
    if (own == NULL || !PyDict_CheckExact(own) || !PyDict_CheckExact(*reset)) {
        damaged(codec, record);
        own = *reset = NULL;
    }
    Py_XINCREF(own);
    Py_XINCREF(*reset);
    Py_DECREF(infos);
    return own;
}

enum { MOST_KEYS = 16 };

/* The values of one key in the infos of all agents. */
typedef struct {
    const char *name;          /* in the block */
    int64_t length;
    char kind;                 /* as in the area */
    int type;
    PyObject *array;           /* (records, agents) */
} Column;

/* The number after a letter; -1 for another letter. */
static int64_t head_of(Area *area, char kind) {
    int64_t number;
    if (area->end - area->at < 9 || *area->at != kind) return -1;
    memcpy(&number, area->at + 1, sizeof number);
    area->at += 9;
    return number;
}

/* The next text in the area, and its length; NULL if the next value is not a text. */
static const char *text_of(Area *area, int64_t *length) {
    *length = head_of(area, 's');
    if (*length < 0 || *length > area->end - area->at) return NULL;
    area->at += *length;
    return area->at - *length;
}

/* Copy a number into a column; LEFT for another value, or if its type differs from earlier numbers. */
static Outcome take_number(Area *area, Column *column, npy_intp *dims, Py_ssize_t place) {
    char kind = area->at < area->end ? *area->at : 0, truth = kind == 'T';
    const char *bytes = area->at + 1;
    int64_t type = NPY_BOOL;
    if (truth || kind == 'F') {
        kind = 'T';
        bytes = &truth;
        area->at += 1;
    } else if (kind == 'f' || kind == 'i') {
        type = kind == 'f' ? NPY_DOUBLE : NPY_INT64;
        if (area->end - area->at < 9) return LEFT;
        area->at += 9;
    } else {
        type = head_of(area, 'n');
        if (type < 0 || !is_plain_number((int)type)) return LEFT;
        bytes = area->at;
    }
    if (column->array == NULL) {
        column->kind = kind;
        column->type = (int)type;
        if ((column->array = PyArray_ZEROS(2, dims, (int)type, 0)) == NULL) return FAILED;
    }
    if (column->kind != kind || column->type != type) return LEFT;
    PyArrayObject *array = (PyArrayObject *)column->array;
    Py_ssize_t size = PyArray_ITEMSIZE(array);
    if (kind == 'n') {
        if (area->end - area->at < size) return LEFT;
        area->at += size;
    }
    memcpy((char *)PyArray_DATA(array) + place * size, bytes, (size_t)size);
    return DONE;
}

/* Copy the infos of one record: of known agents, all with the same keys in the same order. `size` is the number of
   keys, -1 at first. */
static Outcome take_infos(const Codec *codec, char *record, Column *columns, Py_ssize_t *size, npy_intp *dims,
                          Py_ssize_t row, char *there) {
    char *start = record + codec->infos;
    int64_t used, length;
    memcpy(&used, start, sizeof used);
    if (used < 0 || used > codec->infos_nbytes - 8) return LEFT;
    Area area = {start + 8, start + 8 + used, 0, 0};
    int64_t count = head_of(&area, 'd');
    if (count < 0) return LEFT;
    for (Py_ssize_t agent = 0; count > 0; count--, agent++) {
        const char *name = text_of(&area, &length);
        Py_ssize_t tried = 0, own_length = -1;
        for (; name != NULL && tried < codec->n; tried++, agent++) {
            PyObject *own = PyTuple_GetItem(codec->agents, agent % codec->n);
            const char *own_name = PyUnicode_Check(own) ? PyUnicode_AsUTF8AndSize(own, &own_length) : NULL;
            if (own_name == NULL) PyErr_Clear();
            if (own_name != NULL && own_length == length && memcmp(name, own_name, (size_t)length) == 0) break;
        }
        if (name == NULL || tried == codec->n) return LEFT;
        int64_t keys = head_of(&area, 'd');
        if (*size < 0 && keys > 0 && keys <= MOST_KEYS) *size = (Py_ssize_t)keys;
        if (keys <= 0 || keys != *size) return LEFT;
        agent %= codec->n;
        for (Py_ssize_t i = 0; i < *size; i++) {
            const char *key = text_of(&area, &length);
            if (key == NULL) return LEFT;
            if (length == sizeof action_mask - 1 && memcmp(key, action_mask, (size_t)length) == 0) return LEFT;
            if (columns[i].name == NULL) columns[i] = (Column){key, length, 0, 0, NULL};
            if (columns[i].length != length || memcmp(columns[i].name, key, (size_t)length) != 0) return LEFT;
            Outcome outcome = take_number(&area, &columns[i], dims, row * codec->n + agent);
            if (outcome != DONE) return outcome;
        }
        there[row * codec->n + agent] = 1;
    }
    return DONE;
}

/* The infos of neighbouring records, if all have the same keys with numbers, in the block: a tuple of a dict of arrays
   `(records, agents)` by key, of the keys with numbers of Python, and of which agents have infos. NULL without an error
   for other infos. */
PyObject *info_table(const Codec *codec, Py_ssize_t start, Py_ssize_t stop) {
    Column columns[MOST_KEYS] = {{0}};
    npy_intp dims[2] = {stop - start, codec->n};
    Py_ssize_t size = -1;
    Outcome outcome = codec->infos_nbytes < 8 ? LEFT : DONE;
    PyObject *there = PyArray_ZEROS(2, dims, NPY_BOOL, 0), *table = NULL, *plain = NULL, *result = NULL;
    if (there == NULL) return NULL;
    for (Py_ssize_t i = start; outcome == DONE && i < stop; i++) {
        char *record = codec->base + i * codec->stride;
        const Header header = header_of(codec, record);
        if ((header.code & (INFOS | FINAL | INFOS_IN_BLOCK)) != INFOS_IN_BLOCK || is_left(codec, &header)) outcome = LEFT;
        else outcome = take_infos(codec, record, columns, &size, dims, i - start, PyArray_DATA((PyArrayObject *)there));
    }
    if (outcome == DONE && size > 0 && (table = PyDict_New()) != NULL && (plain = PyList_New(0)) != NULL) {
        int failed = 0;
        for (Py_ssize_t i = 0; i < size && !failed; i++) {
            PyObject *key = PyUnicode_DecodeUTF8(columns[i].name, (Py_ssize_t)columns[i].length, NULL);
            key = read_or_damaged(codec, columns[i].name, key);
            failed = key == NULL || PyDict_SetItem(table, key, columns[i].array) < 0 ||
                     (columns[i].kind != 'n' && PyList_Append(plain, key) < 0);
            Py_XDECREF(key);
        }
        if (!failed && PyDict_Size(table) == size) result = Py_BuildValue("(OOO)", table, plain, there);
    }
    Py_XDECREF(table);
    Py_XDECREF(plain);
    Py_DECREF(there);
    for (int i = 0; i < MOST_KEYS; i++) Py_XDECREF(columns[i].array);
    return result;
}
