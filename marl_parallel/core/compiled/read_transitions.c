/* Records into the dicts of transitions. */

#include "codec.h"

static PyObject *read_rewards(const Codec *codec, const char *record, const double *numbers, int tag) {
    PyObject *dict = new_dict(codec);
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        set_value(codec, &dict, i, read_reward(codec, record, numbers[i], tag));
    return dict;
}

static PyObject *empty_infos(const Codec *codec) {
    PyObject *dict = new_dict(codec);
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++) set_value(codec, &dict, i, PyDict_New());
    return dict;
}

/* The infos of a record, borrowed; NULL without an error if Python has to read it. */
static PyObject *pickled_infos(PyObject *leftovers, PyObject *env_id) {
    PyObject *own = PyDict_GetItemWithError(leftovers, env_id);
    if (own == NULL || !PyDict_CheckExact(own) || PyDict_Size(own) != 1) return NULL;
    return PyDict_GetItemWithError(own, name_infos);
}

/* The observations, or last observations, of the agents with a bit. */
static PyObject *read_some(const Codec *codec, const Header *header, const Node *nodes, int bit, char *record, int copy) {
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        if (header->presence[i] & bit) set_value(codec, &dict, i, read_value(codec, &nodes[i], record, copy));
    return dict;
}

static PyObject *read_some_rewards(const Codec *codec, const Header *header, char *record) {
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        if (header->presence[i] & REWARDED_BIT)
            set_value(codec, &dict, i, header->tags[i] == VECTOR_TAG
                                           ? read_value(codec, &codec->vectors[i], record, COPIES)
                                           : read_reward(codec, record, header->rewards[i], header->tags[i]));
    return dict;
}

static PyObject *read_flags(const Codec *codec, const Header *header, int which) {
    PyObject *dict = PyDict_New(), *flag;
    int bit = which ? TRUNCATED_BIT : TERMINATED_BIT;
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++) {
        if (!(header->presence[i] & bit)) continue;
        flag = codec->flags[header->flags[which][i]];
        Py_INCREF(flag);
        set_value(codec, &dict, i, flag);
    }
    flag = codec->flags[header->flags[which][codec->n]];
    if (dict != NULL && PyDict_SetItem(dict, codec->all, flag) < 0) Py_CLEAR(dict);
    return dict;
}

/* Empty infos for the agents that have one. */
static PyObject *read_empty_infos(const Codec *codec, const Header *header) {
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        if (header->presence[i] & INFOS_BIT) set_value(codec, &dict, i, PyDict_New());
    return dict;
}

/* Add a value to the info of an agent, or of another key, under a name that it does not have yet. */
static int add_to_info(PyObject *infos, PyObject *key, PyObject *name, PyObject *value) {
    PyObject *info = PyDict_GetItemWithError(infos, key);
    if (info == NULL && PyErr_Occurred()) return -1;
    if (info == NULL || info == Py_None) {
        if ((info = PyDict_New()) == NULL) return -1;
        int failed = PyDict_SetItem(infos, key, info) < 0;
        Py_DECREF(info);
        if (failed) return -1;
    }
    int has_it = PyDict_CheckExact(info) ? PyDict_Contains(info, name) : 1;
    return has_it != 0 ? (has_it < 0 ? -1 : 0) : PyDict_SetItem(info, name, value);
}

/* Add last observations and the infos of an automatic reset, as `with_final` in `env_runner.py` does. */
static int add_finals(const Codec *codec, const Header *header, char *record, int copy, PyObject *infos, PyObject *reset) {
    for (Py_ssize_t i = 0; i < codec->n; i++) {
        if (!(header->presence[i] & FINAL_BIT)) continue;
        PyObject *last = read_value(codec, &codec->finals[i], record, copy);
        int failed = last == NULL || add_to_info(infos, PyTuple_GetItem(codec->agents, i), name_final_obs, last) < 0;
        Py_XDECREF(last);
        if (failed) return -1;
    }
    Py_ssize_t position = 0;
    PyObject *key, *info;
    while (reset != NULL && PyDict_Next(reset, &position, &key, &info))
        if (!(PyDict_CheckExact(info) && PyDict_Size(info) == 0) && info != Py_None &&
            add_to_info(infos, key, name_reset_info, info) < 0)
            return -1;
    return 0;
}

/* Read the infos of a record, and append the end of its episode. `infos` is a new reference, NULL if all are empty, or
   without `with_infos`. LEFT if Python has to read the record. */
Outcome read_infos_and_end(const Codec *codec, PyObject *env_id, Py_ssize_t number, const Header *header,
                           PyObject *leftovers, int copy, int with_infos, PyObject *ended, int *has_mask,
                           PyObject **infos) {
    char *record = codec->base + number * codec->stride;
    PyObject *reset = NULL, *pickled;
    *has_mask = 0;
    *infos = NULL;
    if (is_left(codec, header)) return LEFT;
    pickled = pickled_infos(leftovers, env_id);
    if (pickled == NULL && PyErr_Occurred()) return FAILED;
    if ((pickled != NULL) != ((header->code & INFOS) != 0)) return LEFT;
    if (pickled == NULL && PyDict_Size(leftovers) > 0) {
        int has_leftovers = PyDict_Contains(leftovers, env_id);
        if (has_leftovers) return has_leftovers < 0 ? FAILED : LEFT;
    }
    Py_XINCREF(pickled);
    *infos = pickled;
    int failed = 0;
    if (with_infos && header->code & INFOS_IN_BLOCK) failed = (*infos = infos_in_block(codec, header, record, has_mask, &reset)) == NULL;
    if (!failed && header->code & FINAL) {
        if (*has_mask) { /* Python finds out which agents have masks */
            Py_CLEAR(*infos);
            Py_XDECREF(reset);
            return LEFT;
        }
        if (*infos == NULL) failed = (*infos = read_empty_infos(codec, header)) == NULL;
        if (!failed) failed = add_finals(codec, header, record, copy, *infos, reset) < 0;
    }
    Py_XDECREF(reset);
    if (!failed) failed = append_end(codec, number, header, ended) < 0;
    if (failed) Py_CLEAR(*infos);
    return failed ? FAILED : DONE;
}

/* Put the five dicts of one record into the lists; LEFT if Python has to do it. */
static Outcome read_record(const Codec *codec, PyObject *env_id, PyObject *leftovers, int copy, PyObject **lists,
                           Py_ssize_t at, PyObject *ended, int *has_mask) {
    Py_ssize_t number;
    char *record = record_of(codec, env_id, &number);
    if (record == NULL) return FAILED;
    const Header header = header_of(codec, record);
    const uint64_t code = header.code;
    int tag = (int)(code >> REWARD_SHIFT & 0xFF), flag_code = (int)(code >> FLAG_SHIFT & 0xFF), plain = code & PLAIN;
    PyObject *infos;
    Outcome outcome = read_infos_and_end(codec, env_id, number, &header, leftovers, copy, 1, ended, has_mask, &infos);
    if (outcome != DONE) return outcome;
    PyObject *no_flags = code & ONLY_ALL ? codec->only_all : flag_code ? codec->no_np_flags : codec->no_flags;
    PyObject *dicts[5] = {NULL, NULL, NULL, NULL, infos};
    dicts[0] = plain ? read_values(codec, codec->observations, record, copy)
                     : read_some(codec, &header, codec->observations, OBSERVED_BIT, record, copy);
    if (dicts[0] != NULL)
        dicts[1] = plain ? read_rewards(codec, record, header.rewards, tag) : read_some_rewards(codec, &header, record);
    for (int i = 2; i < 4; i++)
        if (dicts[i - 1] != NULL) dicts[i] = plain ? PyDict_Copy(no_flags) : read_flags(codec, &header, i - 2);
    if (dicts[3] != NULL && infos == NULL) {
        if (plain) dicts[4] = code & NO_INFOS ? PyDict_New() : empty_infos(codec);
        else dicts[4] = read_empty_infos(codec, &header);
    }
    int failed = 0;
    for (int i = 0; i < 5; i++) failed |= dicts[i] == NULL;
    for (int i = 0; i < 5; i++) {
        if (failed) Py_XDECREF(dicts[i]);
        else failed = PyList_SetItem(lists[i], at, dicts[i]) < 0;
    }
    return failed ? FAILED : DONE;
}

const char read_doc[] =
    "read(env_ids, leftovers, copy)\n"
    "    -> (observations, rewards, terminateds, truncateds, infos), (left, masked, ended) | None\n"
    "--\n\n"
    "Read records: five tuples of dicts, and None. If Python has more to do, five lists of dicts, None for the environments\n"
    "that are `left`. `leftovers` is a dict by environment; arrays are copies, or views of the block. `masked` are the\n"
    "environments that have an action mask among the infos in the block, `ended` those whose episode has ended, with the\n"
    "flags of `__all__`. Notes who acts and is alive, and adds rewards to the totals that the Codec was made with.";

PyObject *codec_read(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_ids, *leftovers, *lists[8] = {NULL}, *before = NULL; /* the last three: left, masked, ended */
    int copy, has_mask;
    if (!PyArg_ParseTuple(args, "O!O!p:read", &PyTuple_Type, &env_ids, &PyDict_Type, &leftovers, &copy)) return NULL;
    Py_ssize_t size = PyTuple_Size(env_ids);
    int is_large = copy && codec->has_large;
    if (is_large && (before = use_kept()) == NULL) return NULL;
    for (int i = 0; i < 8; i++)
        if ((lists[i] = PyList_New(i < 5 ? size : 0)) == NULL) goto failed;
    for (Py_ssize_t place = 0; place < size; place++) {
        PyObject *env_id = PyTuple_GetItem(env_ids, place);
        Outcome outcome = LEFT;
        if (codec->observations != NULL)
            outcome = read_record(codec, env_id, leftovers, copy, lists, place, lists[7], &has_mask);
        if (outcome == FAILED) goto failed;
        if (outcome == DONE && !has_mask) continue;
        int failed = PyList_Append(lists[outcome == DONE ? 6 : 5], env_id);
        for (int i = 0; i < 5 && outcome == LEFT && !failed; i++) {
            Py_INCREF(Py_None);
            failed = PyList_SetItem(lists[i], place, Py_None);
        }
        if (failed) goto failed;
    }
    use_other(before);
    before = NULL;
    PyObject *result, *seen = NULL;
    if (PyList_Size(lists[5]) == 0 && PyList_Size(lists[6]) == 0 && PyList_Size(lists[7]) == 0 &&
        PyDict_Size(leftovers) == 0) {
        for (int i = 0; i < 5; i++) {
            PyObject *column = PyList_AsTuple(lists[i]);
            Py_DECREF(lists[i]);
            if ((lists[i] = column) == NULL) goto failed;
        }
        for (int i = 5; i < 8; i++) Py_CLEAR(lists[i]);
        result = Py_BuildValue("((NNNNN)O)", lists[0], lists[1], lists[2], lists[3], lists[4], Py_None);
    } else {
        Py_INCREF(seen = lists[0]);
        result = Py_BuildValue("([NNNNN](NNN))", lists[0], lists[1], lists[2], lists[3], lists[4], lists[5], lists[6],
                               lists[7]);
    }
    for (Py_ssize_t place = 0; result != NULL && place < size; place++) {
        Py_ssize_t number;
        const char *record = record_of(codec, PyTuple_GetItem(env_ids, place), &number);
        if (seen != NULL && PyList_GetItem(seen, place) == Py_None) continue; /* left to Python */
        const Header header = header_of(codec, record);
        note_state(codec, number, &header);
    }
    Py_XDECREF(seen);
    return result;
failed:
    use_other(before);
    for (int i = 0; i < 8; i++) Py_XDECREF(lists[i]);
    return NULL;
}

/* The events of each agent that has some. */
static PyObject *read_events(const Codec *codec, const Header *header) {
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        if (header->events[i]) set_value(codec, &dict, i, PyLong_FromLong(header->events[i]));
    return dict;
}

const char parts_doc[] =
    "parts(env_id, copy) -> tuple\n--\n\n"
    "The fields of the `Transition` that `put` or `run` has written; nothing is noted. Infos are None if they are\n"
    "pickled; infos of a reset are None if they are pickled or all empty.";

PyObject *codec_parts(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_id;
    Py_ssize_t number;
    int copy, has_mask;
    if (!PyArg_ParseTuple(args, "Op:parts", &env_id, &copy)) return NULL;
    char *record = record_of(codec, env_id, &number);
    if (record == NULL) return NULL;
    const Header header = header_of(codec, record);
    if (codec->observations == NULL || !is_header(codec, &header)) return damaged(codec, record);
    PyObject *parts[10] = {NULL}; /* the fields of `Transition` */
    parts[0] = read_some(codec, &header, codec->observations, OBSERVED_BIT, record, copy);
    if (parts[0] != NULL) parts[1] = read_some_rewards(codec, &header, record);
    for (int i = 2; i < 4; i++)
        if (parts[i - 1] != NULL) parts[i] = read_flags(codec, &header, i - 2);
    if (parts[3] != NULL) {
        if (header.code & INFOS_IN_BLOCK) parts[4] = infos_in_block(codec, &header, record, &has_mask, &parts[8]);
        else if (header.code & INFOS && !any_has(codec, header.presence, INFOS_BIT)) Py_INCREF(parts[4] = Py_None);
        else parts[4] = read_empty_infos(codec, &header);
    }
    if (parts[4] != NULL) parts[5] = agents_with(codec, header.presence, ALIVE_BIT);
    if (parts[5] != NULL) parts[6] = agents_with(codec, header.presence, ACTING_BIT);
    if (parts[6] != NULL) {
        if (header.code & FINAL) parts[7] = read_some(codec, &header, codec->finals, FINAL_BIT, record, copy);
        else Py_INCREF(parts[7] = Py_None);
    }
    if (parts[8] == NULL) Py_INCREF(parts[8] = Py_None);
    if (parts[7] != NULL) parts[9] = read_events(codec, &header);
    PyObject *result = parts[9] == NULL ? NULL : PyTuple_New(10);
    for (int i = 0; i < 10; i++) {
        if (result == NULL) Py_XDECREF(parts[i]);
        else if (PyTuple_SetItem(result, i, parts[i]) < 0) Py_CLEAR(result);
    }
    return result;
}
