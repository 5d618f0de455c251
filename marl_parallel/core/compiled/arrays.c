/* Neighbouring records as arrays, and arrays of actions into them. */

#include "codec.h"

/* Whether all infos of an environment are `{}`. */
static int are_empty_infos(PyObject *infos) {
    Py_ssize_t position = 0;
    PyObject *key, *info;
    int are_empty = PyDict_Check(infos);
    while (are_empty && PyDict_Next(infos, &position, &key, &info))
        are_empty = PyDict_CheckExact(info) && PyDict_Size(info) == 0;
    return are_empty;
}

/* Fields of `Arrays` after the observations, in the order of `Arrays`, without the infos; the last ones are events. */
enum {
    REWARDS, TERMINATIONS, TRUNCATIONS, TERMINATED, TRUNCATED, PRESENT, ACTING, OBSERVED, REWARDED, FLAGGED, ALIVE_NOW,
    ALIVE_BEFORE, PARTS, ENDS, BEGINS, DEAD_BEFORE, FIELDS
};

/* By field, bits of the presence, and from ALIVE_BEFORE on bits of the events. */
static const int bits_of_mask[FIELDS] = {
    [PRESENT] = OBSERVED_BIT | REWARDED_BIT, [ACTING] = ACTING_BIT, [OBSERVED] = OBSERVED_BIT,
    [REWARDED] = REWARDED_BIT, [FLAGGED] = FLAG_BITS, [ALIVE_NOW] = ALIVE_BIT, [ALIVE_BEFORE] = WAS_ALIVE,
    [PARTS] = TOOK_PART, [ENDS] = LIFE_ENDED, [BEGINS] = BEGAN, [DEAD_BEFORE] = WAS_DEAD,
};

/* Whether a record is plain, all agents act, and there are no infos. */
static int is_simple(uint64_t code) {
    return (code >> TURN_SHIFT) == (WRITTEN >> TURN_SHIFT) &&
           (code & (PLAIN | INFOS | INFOS_IN_BLOCK | ONLY_ALL | RESET | NOT_PLAIN)) == PLAIN;
}

/* The observations of a group, or one leaf of them: an array `(records, agents, ...)` with the values of a view of the
   block. The rows of agents that are not observed become zeros. The array is new, unless a target is passed. */
static PyObject *stacked(const Codec *codec, PyObject *leaf, PyObject *target, int written, Py_ssize_t start,
                         Py_ssize_t envs, int all_observed) {
    PyArrayObject *view, *array = (PyArrayObject *)target;
    PyObject *places;
    if (!PyArg_ParseTuple(leaf, "O!O!", &PyArray_Type, &view, &PyTuple_Type, &places)) return NULL;
    if (PyArray_NDIM(view) < 2 || PyArray_DIM(view, 0) != envs || PyArray_DIM(view, 1) != PyTuple_Size(places)) {
        PyErr_SetString(PyExc_ValueError, "expected a view of the block, (records, agents, ...)");
        return NULL;
    }
    if (target == NULL) {
        if ((array = (PyArrayObject *)PyArray_NewCopy(view, NPY_CORDER)) == NULL) return NULL;
    } else if (!PyArray_Check(target) || !PyArray_ISCARRAY(array) || PyArray_NDIM(array) != PyArray_NDIM(view) ||
               !PyArray_CompareLists(PyArray_DIMS(array), PyArray_DIMS(view), PyArray_NDIM(view))) {
        PyErr_SetString(PyExc_ValueError, "observations can be written to contiguous arrays of their shape only");
        return NULL;
    } else {
        if (!written && PyArray_CopyInto(array, view) < 0) return NULL;
        Py_INCREF(target);
    }
    Py_ssize_t rows = PyTuple_Size(places);
    size_t nbytes = envs && rows ? (size_t)(PyArray_NBYTES(array) / (envs * rows)) : 0;
    for (Py_ssize_t row = 0; !all_observed && row < rows; row++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GetItem(places, row));
        if (place == -1 && PyErr_Occurred()) {
            Py_DECREF(array);
            return NULL;
        }
        for (Py_ssize_t env = 0; place >= 0 && place < codec->n && env < envs; env++) {
            const Header header = header_of(codec, codec->base + (start + env) * codec->stride);
            if (!(header.presence[place] & OBSERVED_BIT))
                memset((char *)PyArray_DATA(array) + (env * rows + row) * (Py_ssize_t)nbytes, 0, nbytes);
        }
    }
    return (PyObject *)array;
}

/* The observations of all groups as a new list. */
static PyObject *all_stacked(const Codec *codec, PyObject *leaves, PyObject *targets, int written, Py_ssize_t start,
                             Py_ssize_t envs, int all_observed) {
    Py_ssize_t size = PyTuple_Size(leaves);
    PyObject *arrays = PyList_New(size), *before = NULL;
    if (arrays == NULL) return NULL;
    int is_large = targets == Py_None && codec->has_large, failed = is_large && (before = use_kept()) == NULL;
    for (Py_ssize_t i = 0; !failed && i < size; i++) {
        PyObject *target = targets == Py_None ? NULL : PyList_GetItem(targets, i);
        failed = target == NULL && targets != Py_None;
        PyObject *array = failed ? NULL : stacked(codec, PyTuple_GetItem(leaves, i), target, written, start,
                                                    envs, all_observed);
        failed = array == NULL || PyList_SetItem(arrays, i, array) < 0;
    }
    use_other(before);
    if (failed) Py_CLEAR(arrays);
    return arrays;
}

/* Fill one row of all fields. */
static void fill_row(const Codec *codec, const Header *header, char **fields, Py_ssize_t row) {
    Py_ssize_t n = codec->n;
    memcpy(fields[REWARDS] + row * n * 8, header->rewards, (size_t)n * 8);
    for (int which = 0; which < 2; which++) {
        for (Py_ssize_t i = 0; i < n; i++) fields[TERMINATIONS + which][row * n + i] = header->flags[which][i] & 1;
        fields[TERMINATED + which][row] = header->flags[which][n] & 1;
    }
    for (int mask = PRESENT; mask < FIELDS; mask++) {
        const unsigned char *bits = mask < ALIVE_BEFORE ? header->presence : header->events;
        for (Py_ssize_t i = 0; i < n; i++) fields[mask][row * n + i] = (bits[i] & bits_of_mask[mask]) != 0;
    }
}

const char read_arrays_doc[] =
    "read_arrays(start, stop, leaves, targets, written, leftovers, copy, as_table, notes, nobody, no_envs)\n"
    "    -> list, (left, masked, ended) | None\n--\n\n"
    "Read neighbouring records as arrays: the list has the fields of `Arrays`, without vector rewards and last observations; `nobody`\n"
    "and `no_envs` are read-only fields of events that did not happen. `leaves` are pairs\n"
    "of a view of the block, `(records, agents, ...)`, and the agents' places; each is an array among the observations:\n"
    "new ones, or the `targets`, a list, which may have been `written` already. If there is more to do, the rest is as of\n"
    "`read`, and so is `copy`, for last observations. Rows of environments that are `left` are filled too, as far as their records tell. Without `notes`, nothing\n"
    "is noted, and there are no infos. `as_table`, infos are a tuple if all have the same keys, with numbers: arrays by\n"
    "key, `(records, agents)`, the keys with numbers of Python, and which agents have infos.";

PyObject *codec_read_arrays(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *leaves, *targets, *leftovers, *nobody, *no_envs;
    Py_ssize_t start, stop;
    int written, copy, as_table, notes;
    if (!PyArg_ParseTuple(args, "nnO!OpO!pppOO:read_arrays", &start, &stop, &PyTuple_Type, &leaves, &targets, &written,
                          &PyDict_Type, &leftovers, &copy, &as_table, &notes, &nobody, &no_envs))
        return NULL;
    if (!are_records(codec, start, stop)) return NULL;
    npy_intp dims[2] = {stop - start, codec->n};
    int simple = PyDict_Size(leftovers) == 0, failed = 0, any_over = 0;
    for (Py_ssize_t i = start; simple && i < stop; i++)
        simple = is_simple(header_of(codec, codec->base + i * codec->stride).code);
    PyObject *arrays[FIELDS] = {NULL}, *found[4] = {NULL}, *result = NULL; /* infos, left, masked, ended */
    PyObject *observations = all_stacked(codec, leaves, targets, written, start, dims[0], simple);
    char *fields[FIELDS];
    if (observations == NULL) return NULL;
    for (int field = 0; field < FIELDS; field++) {
        int of_envs = field == TERMINATED || field == TRUNCATED;
        if (simple && field > OBSERVED) Py_INCREF(arrays[field] = field > PARTS ? nobody : arrays[OBSERVED]);
        else arrays[field] = PyArray_ZEROS(of_envs ? 1 : 2, dims, field == REWARDS ? NPY_DOUBLE : NPY_BOOL, 0);
        if (arrays[field] == NULL) goto finally;
        if (arrays[field] != nobody) fields[field] = PyArray_DATA((PyArrayObject *)arrays[field]);
    }
    if (as_table && notes && !simple && PyDict_Size(leftovers) == 0) {
        found[0] = info_table(codec, start, stop);
        if (found[0] == NULL && PyErr_Occurred()) goto finally;
    }
    as_table = found[0] != NULL;
    for (int i = as_table; i < 4; i++)
        if ((found[i] = i == 0 ? PyDict_New() : PyList_New(0)) == NULL) goto finally;
    if (simple)
        for (int mask = PRESENT; mask <= OBSERVED; mask++) memset(fields[mask], 1, (size_t)(dims[0] * dims[1]));
    for (Py_ssize_t i = start; !failed && i < stop; i++) {
        const Header header = header_of(codec, codec->base + i * codec->stride);
        any_over |= (header.flags[0][codec->n] | header.flags[1][codec->n]) & 1;
        if (simple) memcpy(fields[REWARDS] + (i - start) * codec->n * 8, header.rewards, (size_t)codec->n * 8);
        else fill_row(codec, &header, fields, i - start);
        if (!notes) continue;
        PyObject *number = PyLong_FromSsize_t(i), *infos = NULL;
        int has_mask = 0;
        Outcome outcome = FAILED;
        if (number != NULL)
            outcome = read_infos_and_end(codec, number, i, &header, leftovers, copy, !as_table, found[3], &has_mask,
                                         &infos);
        failed = outcome == FAILED;
        if (!failed && (outcome == LEFT || has_mask))
            failed = PyList_Append(found[outcome == LEFT ? 1 : 2], number) < 0;
        if (!failed && infos != NULL && !as_table && !are_empty_infos(infos))
            failed = PyDict_SetItem(found[0], number, infos) < 0;
        Py_XDECREF(infos);
        Py_XDECREF(number);
    }
    if (failed) goto finally;
    PyObject *flag = simple ? Py_True : Py_False, *others = NULL;
    if (PyList_Size(found[1]) || PyList_Size(found[2]) || PyList_Size(found[3]) || PyDict_Size(leftovers))
        others = Py_BuildValue("(OOO)", found[1], found[2], found[3]);
    else Py_INCREF(others = Py_None);
    if (others != NULL)
        result = Py_BuildValue("([OOOOOOOOOOOOOO{}OOOOOOOOOO[]O]N)", observations, arrays[REWARDS], arrays[TERMINATIONS],
                               arrays[TRUNCATIONS], arrays[TERMINATED], arrays[TRUNCATED], arrays[PRESENT], arrays[ACTING],
                               found[0], arrays[OBSERVED], arrays[REWARDED], arrays[FLAGGED], flag, flag, Py_None,
                               any_over ? Py_False : Py_True, arrays[ALIVE_NOW], arrays[ALIVE_BEFORE], arrays[PARTS],
                               arrays[ENDS], arrays[BEGINS], arrays[DEAD_BEFORE], no_envs, no_envs, nobody, others);
    for (Py_ssize_t i = start, left = 0; result != NULL && notes && i < stop; i++) {
        if (left < PyList_Size(found[1]) && PyLong_AsSsize_t(PyList_GetItem(found[1], left)) == i) {
            left++; /* to Python */
            continue;
        }
        const Header header = header_of(codec, codec->base + i * codec->stride);
        note_state(codec, i, &header);
    }
finally:
    Py_DECREF(observations);
    for (int field = 0; field < FIELDS; field++) Py_XDECREF(arrays[field]);
    for (int i = 0; i < 4; i++) Py_XDECREF(found[i]);
    return result;
}

const char write_arrays_doc[] =
    "write_arrays(start, stop, columns, values, acting) -> bool\n--\n\n"
    "Write the actions of all agents in neighbouring records. `columns` has, for each array of `values`, a view of the block\n"
    "of its shape, and the tags of its numbers, None if it has none, with their tag. `acting` is None if all actions count,\n"
    "else bool `(records, agents)`. Returns False if the values are no arrays of these shapes, or of dtypes that not every\n"
    "number would survive; then nothing counts as written.";

PyObject *codec_write_arrays(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *columns, *values, *acting;
    Py_ssize_t start, stop;
    if (!PyArg_ParseTuple(args, "nnO!OO:write_arrays", &start, &stop, &PyTuple_Type, &columns, &values, &acting))
        return NULL;
    if (!are_records(codec, start, stop)) return NULL;
    Py_ssize_t size = PyTuple_Size(columns);
    if (!PyList_Check(values) || PyList_Size(values) != size) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyArrayObject *view, *array = (PyArrayObject *)PyList_GetItem(values, i);
        PyObject *tags, *tag;
        if (!PyArg_ParseTuple(PyTuple_GetItem(columns, i), "O!OO", &PyArray_Type, &view, &tags, &tag)) return NULL;
        if (!PyArray_CheckExact((PyObject *)array) || PyArray_NDIM(array) != PyArray_NDIM(view) ||
            !PyArray_CompareLists(PyArray_DIMS(array), PyArray_DIMS(view), PyArray_NDIM(view)))
            Py_RETURN_FALSE;
        int from = PyArray_TYPE(array), to = PyArray_TYPE(view);
        int numbers = tags == Py_None || PyTypeNum_ISBOOL(from) || PyTypeNum_ISINTEGER(from);
        int floats = PyTypeNum_ISFLOAT(from) && PyTypeNum_ISFLOAT(to);
        if (!numbers || !(from == to || floats || PyArray_CanCastSafely(from, to))) Py_RETURN_FALSE;
        if (PyArray_CopyInto(view, array) < 0) return NULL;
        if (tags != Py_None && PyArray_CopyObject((PyArrayObject *)tags, tag) < 0) return NULL;
    }
    const char *mask = NULL;
    if (acting != Py_None) {
        PyArrayObject *array = (PyArrayObject *)acting;
        if (!PyArray_Check(acting) || PyArray_TYPE(array) != NPY_BOOL || !PyArray_ISCARRAY_RO(array) ||
            PyArray_SIZE(array) != (stop - start) * codec->n) {
            PyErr_SetString(PyExc_ValueError, "acting must be None or bool (records, agents), contiguous");
            return NULL;
        }
        mask = PyArray_DATA(array);
    }
    for (Py_ssize_t i = start; i < stop; i++) {
        char *form = codec->base + i * codec->stride + codec->action_header;
        form[0] = (char)(STACKED | (mask == NULL ? ALL_IN_ORDER : SOME));
        if (mask != NULL) memcpy(form + 1, mask + (i - start) * codec->n, (size_t)codec->n);
    }
    Py_RETURN_TRUE;
}
