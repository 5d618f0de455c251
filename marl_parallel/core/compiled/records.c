/* What several files need of a record: its agents, its header, and what the last read has noted of it. */

#include "codec.h"

/* The values of a dict whose keys are all agents in order, as borrowed references; LEFT for any other object. */
Outcome values_in_order(const Codec *codec, PyObject *dict, PyObject **values, PyObject **keys) {
    if (!is_dict(dict) || PyDict_Size(dict) != codec->n) return LEFT;
    Py_ssize_t position = 0;
    PyObject *key, *value;
    for (Py_ssize_t i = 0; i < codec->n && PyDict_Next(dict, &position, &key, &value); i++) {
        int same = same_key(key, PyTuple_GetItem(codec->agents, i), keys + i);
        if (same != 1) return same < 0 ? FAILED : LEFT;
        values[i] = value;
    }
    return DONE;
}

Outcome write_values(const Codec *codec, const Node *nodes, char *record, PyObject *dict) {
    Outcome outcome = values_in_order(codec, dict, codec->values, keys_of(codec, record));
    return outcome == DONE ? write_in_order(codec, nodes, record) : outcome;
}

/* Write the values that `values_in_order` has found. After LEFT, some may have been written. */
Outcome write_in_order(const Codec *codec, const Node *nodes, char *record) {
    Outcome outcome = DONE;
    for (Py_ssize_t i = 0; i < codec->n; i++) Py_INCREF(codec->values[i]); /* a cast may warn and so run any code */
    for (Py_ssize_t i = 0; i < codec->n && outcome == DONE; i++)
        outcome = write_value(codec, &nodes[i], record, codec->values[i]);
    for (Py_ssize_t i = 0; i < codec->n; i++) Py_DECREF(codec->values[i]);
    return outcome;
}

/* A dict for a value of each agent; copying one and replacing its values is quicker than letting a new one grow. */
PyObject *new_dict(const Codec *codec) {
    return codec->n > 5 ? PyDict_Copy(codec->no_values) : PyDict_New();
}

PyObject *read_values(const Codec *codec, const Node *nodes, char *record, int copy) {
    PyObject *dict = new_dict(codec);
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        set_value(codec, &dict, i, read_value(codec, &nodes[i], record, copy));
    return dict;
}

char *record_of(const Codec *codec, PyObject *env_id, Py_ssize_t *number) {
    *number = PyLong_AsSsize_t(env_id);
    if (*number >= 0 && *number < codec->records) return codec->base + *number * codec->stride;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "there is no record %zd", *number);
    return NULL;
}

int any_has(const Codec *codec, const unsigned char *presence, int bit) {
    int any = 0;
    for (Py_ssize_t i = 0; i < codec->n; i++) any |= presence[i] & bit;
    return any;
}

/* The list of agents that have a bit: a new list, or the list of all agents. */
PyObject *agents_with(const Codec *codec, const unsigned char *presence, int bit) {
    Py_ssize_t n = codec->n, count = 0;
    for (Py_ssize_t i = 0; i < n; i++) count += (presence[i] & bit) != 0;
    if (count == n && n > 0) {
        Py_INCREF(codec->agents_list);
        return codec->agents_list;
    }
    PyObject *agents = PyList_New(0);
    for (Py_ssize_t i = 0; agents != NULL && i < n; i++)
        if (presence[i] & bit && PyList_Append(agents, PyTuple_GetItem(codec->agents, i)) < 0) Py_CLEAR(agents);
    return agents;
}

/* Whether a code is one that this code writes. */
static int is_code(const Codec *codec, uint64_t code) {
    if (!(code & WRITTEN) || (code & INFOS && code & INFOS_IN_BLOCK)) return 0;
    code &= ~WRITTEN;
    if (!(code & PLAIN)) return !(code & ~(uint64_t)(INFOS | INFOS_IN_BLOCK | FINAL));
    uint64_t flag = code >> FLAG_SHIFT & 0xFF;
    return !(code & NOT_PLAIN) && is_tag(codec->reward_types, (int)(code >> REWARD_SHIFT & 0xFF)) &&
           (flag == 0 || flag == NP_FALSE_CODE) && code >> TURN_SHIFT <= (uint64_t)codec->n;
}

/* Whether Python has to read a record: its transition is pickled, it is damaged, or statistics need Python. */
int is_left(const Codec *codec, const Header *header) {
    if (!is_code(codec, header->code)) return 1;
    if (header->code & PLAIN) return 0;
    Py_ssize_t types = PyTuple_Size(codec->reward_types);
    int any_over = header->flags[0][codec->n] | header->flags[1][codec->n];
    if (any_over > NP_TRUE_CODE || (header->code & INFOS && header->code & FINAL)) return 1;
    if (codec->in_infos && any_over & 1) return 1;
    for (Py_ssize_t i = 0; i < codec->n; i++) {
        int bits = header->presence[i];
        if ((bits & FINAL_BIT && !(header->code & FINAL)) || header->events[i] & ~ALL_EVENTS) return 1;
        if (bits & REWARDED_BIT && ((header->tags[i] & TYPE_OF_TAG) >= types || !is_form(header->tags[i])))
            return 1; /* vectors: Python adds them up */
        if (codec->in_infos && (bits & (REWARDED_BIT | ALIVE_BIT)) == REWARDED_BIT) return 1;
        for (int j = 0; j < 2; j++) {
            int flag = header->flags[j][i], is_there = bits & (j ? TRUNCATED_BIT : TERMINATED_BIT);
            if (is_there && (flag > NP_TRUE_CODE || (flag & 1 && codec->in_infos))) return 1;
        }
    }
    return 0;
}

/* Whether the header of a record is one that this code writes. */
int is_header(const Codec *codec, const Header *header) {
    if (!is_code(codec, header->code)) return 0;
    for (Py_ssize_t i = 0; i <= codec->n; i++) {
        if (header->flags[0][i] > NP_TRUE_CODE || header->flags[1][i] > NP_TRUE_CODE) return 0;
        int bits = i < codec->n ? header->presence[i] : 0, tag = bits & REWARDED_BIT ? header->tags[i] : 0;
        if (bits & FINAL_BIT && !(header->code & FINAL)) return 0;
        if (i < codec->n && !(header->code & PLAIN) && header->events[i] & ~ALL_EVENTS) return 0;
        if (tag == VECTOR_TAG ? codec->vectors[i].kind == NO_KIND : !is_tag(codec->reward_types, tag)) return 0;
    }
    return 1;
}

/* Add the rewards of a record, and one step, to its totals, for agents that have a reward or a flag that is set. */
static void add_totals(const Codec *codec, Py_ssize_t number, const Header *header) {
    Py_ssize_t n = codec->n;
    double *totals = codec->totals + number * (2 * n + 1);
    if (totals[2 * n] < 0) { /* a reset, which does not count */
        memset(totals, 0, (size_t)(2 * n + 1) * sizeof(double));
        return;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        int bits = header->presence[i], rewarded = bits & REWARDED_BIT;
        int ends = (bits & TERMINATED_BIT && header->flags[0][i] & 1) || (bits & TRUNCATED_BIT && header->flags[1][i] & 1);
        if (rewarded) totals[i] += header->rewards[i];
        if (rewarded || ends) totals[n + i] += 1;
    }
    totals[2 * n] += 1;
}

/* Append an episode that ends with a record to a list: the environment, and the flags of `__all__`. Comes before
   `note_state`. */
int append_end(const Codec *codec, Py_ssize_t number, const Header *header, PyObject *ended) {
    int terminated = header->flags[0][codec->n] & 1, truncated = header->flags[1][codec->n] & 1;
    int stays_over = state_of(codec, number)[codec->n] & OVER;
    if (codec->totals == NULL || stays_over || !(terminated | truncated)) return 0;
    PyObject *one = Py_BuildValue("(nii)", number, terminated, truncated);
    int failed = one == NULL || PyList_Append(ended, one) < 0;
    Py_XDECREF(one);
    return failed ? -1 : 0;
}

/* Note who is alive and acts after a record, and whether its episode is over; and its rewards. It cannot fail, and comes
   last: a call that raises an exception has noted nothing. */
void note_state(const Codec *codec, Py_ssize_t number, const Header *header) {
    Py_ssize_t n = codec->n;
    unsigned char *state = state_of(codec, number);
    int over = (header->flags[0][n] | header->flags[1][n]) & 1;
    int stays_over = over && state[n] & OVER;
    for (Py_ssize_t i = 0; i < n; i++) {
        int died = !over && header->events[i] & (LIFE_ENDED | WAS_DEAD) && !(header->presence[i] & ALIVE_BIT);
        state[i] = (header->presence[i] & (ALIVE_BIT | ACTING_BIT)) | (died ? ENDED_BIT : 0);
    }
    state[n] = KNOWN | (over && !codec->same_step ? OVER : 0);
    if (codec->totals != NULL && !stays_over) add_totals(codec, number, header);
}

/* Whether a range of records exists; else an error is set. */
int are_records(const Codec *codec, Py_ssize_t start, Py_ssize_t stop) {
    if (start >= 0 && start <= stop && stop <= codec->records) return 1;
    PyErr_Format(PyExc_IndexError, "there are no records %zd to %zd", start, stop);
    return 0;
}

const char acting_doc[] =
    "acting(start, stop) -> array | None\n--\n\n"
    "Which agents act in neighbouring environments, by what `read` and `read_arrays` have noted: bool `(records, agents)`.\n"
    "None if all agents act; rows of which nothing is known are False.";

PyObject *codec_acting(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    Py_ssize_t start, stop, n = codec->n, acting = 0;
    if (!PyArg_ParseTuple(args, "nn:acting", &start, &stop) || !are_records(codec, start, stop)) return NULL;
    for (Py_ssize_t i = start; i < stop; i++) {
        const unsigned char *state = state_of(codec, i);
        for (Py_ssize_t j = 0; state[n] & KNOWN && j < n; j++) acting += (state[j] & ACTING_BIT) != 0;
    }
    if (acting == (stop - start) * n) Py_RETURN_NONE;
    npy_intp dims[2] = {stop - start, n};
    PyObject *mask = PyArray_ZEROS(2, dims, NPY_BOOL, 0);
    if (mask == NULL) return NULL;
    char *at = PyArray_DATA((PyArrayObject *)mask);
    for (Py_ssize_t i = start; i < stop; i++, at += n) {
        const unsigned char *state = state_of(codec, i);
        for (Py_ssize_t j = 0; state[n] & KNOWN && j < n; j++) at[j] = (state[j] & ACTING_BIT) != 0;
    }
    return mask;
}

const char forget_doc[] =
    "forget(env_id, over)\n--\n\n"
    "Forget who acts and is alive in an environment: its record does not have it. Its episode is `over`, or not.";

PyObject *codec_forget(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_id;
    Py_ssize_t number;
    int over;
    if (!PyArg_ParseTuple(args, "Op:forget", &env_id, &over) || record_of(codec, env_id, &number) == NULL) return NULL;
    state_of(codec, number)[codec->n] = over ? OVER : 0;
    Py_RETURN_NONE;
}

const char agents_doc[] =
    "agents_of(start, stop, bit) -> list\n--\n\n"
    "The lists of agents in neighbouring environments that act next (64), are alive (32), or have ended and not come back\n"
    "(1), as noted last; empty for environments without notes. The lists are read-only.";

PyObject *codec_agents_of(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    Py_ssize_t start, stop;
    int bit;
    if (!PyArg_ParseTuple(args, "nni:agents_of", &start, &stop, &bit) || !are_records(codec, start, stop))
        return NULL;
    PyObject *lists = PyList_New(stop - start);
    for (Py_ssize_t i = start; lists != NULL && i < stop; i++) {
        const unsigned char *state = state_of(codec, i);
        PyObject *agents = state[codec->n] & KNOWN ? agents_with(codec, state, bit) : PyList_New(0);
        if (agents == NULL || PyList_SetItem(lists, i - start, agents) < 0) Py_CLEAR(lists);
    }
    return lists;
}

const char is_over_doc[] =
    "is_over(env_id) -> bool\n--\n\nWhether an episode is over by what was noted last, and no reset has followed.";

PyObject *codec_is_over(PyObject *self, PyObject *env_id) {
    Codec *codec = (Codec *)self;
    Py_ssize_t number;
    if (record_of(codec, env_id, &number) == NULL) return NULL;
    return PyBool_FromLong(state_of(codec, number)[codec->n] & OVER);
}
