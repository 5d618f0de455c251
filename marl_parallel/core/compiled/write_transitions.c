/* Transitions into records: plain ones, and any other of known agents. */

#include "codec.h"

/* Whether a flag is an array of one False, which counts as False. */
static int is_false_array(PyObject *flag) {
    PyArrayObject *array = (PyArrayObject *)flag;
    return PyArray_CheckExact(flag) && PyArray_SIZE(array) == 1 && PyArray_TYPE(array) == NPY_BOOL &&
           *(npy_bool *)PyArray_DATA(array) == 0;
}

/* Check that all flags are False and of one type; `__all__` may come last, or alone, which is counted in `only_all`.
   `code` is the code of earlier flags, or -1. */
static Outcome check_flags(const Codec *codec, PyObject *flags, int *code, int *only_all, PyObject **keys) {
    if (!is_dict(flags)) return LEFT;
    Py_ssize_t size = PyDict_Size(flags), position = 0;
    PyObject *key, *value;
    if (size == 1 && PyDict_Next(flags, &position, &key, &value)) {
        int same = same_key(key, codec->all, NULL);
        if (same < 0) return FAILED;
        *only_all += same;
        if (same) return value == Py_False ? DONE : LEFT;
    }
    position = 0;
    if (size != codec->n && size != codec->n + 1) return LEFT;
    for (Py_ssize_t i = 0; i < size && PyDict_Next(flags, &position, &key, &value); i++) {
        int same = i < codec->n ? same_key(key, PyTuple_GetItem(codec->agents, i), keys + i)
                                : same_key(key, codec->all, NULL);
        if (same != 1) return same < 0 ? FAILED : LEFT;
        int own = value == Py_False ? 0 : value == codec->np_false || is_false_array(value) ? NP_FALSE_CODE : -1;
        if (own < 0 || (i == codec->n && own != 0)) return LEFT;
        if (i < codec->n && *code >= 0 && own != *code) return LEFT;
        if (i < codec->n) *code = own;
    }
    return DONE;
}

/* Convert a reward to a double that holds it exactly. */
static Outcome double_of(const Codec *codec, PyObject *reward, int tag, double *number) {
    long long integer;
    if ((tag & TYPE_OF_TAG) < codec->floats) {
        *number = PyFloat_AsDouble(reward);
        return *number == -1.0 && PyErr_Occurred() ? FAILED : DONE;
    }
    Outcome outcome = integer_of(reward, &integer);
    if (outcome != DONE) return outcome;
    *number = (double)integer;
    return integer > LARGEST_EXACT || integer < -LARGEST_EXACT ? LEFT : DONE;
}

/* Convert rewards, all of one type, to doubles that hold them exactly. */
static Outcome convert_rewards(const Codec *codec, PyObject *rewards, int *tag, PyObject **keys) {
    Outcome outcome = values_in_order(codec, rewards, codec->values, keys);
    if (outcome != DONE) return outcome;
    *tag = tag_of(codec->reward_types, codec->values[0]);
    if (*tag < 0) return LEFT;
    for (Py_ssize_t i = 0; i < codec->n && outcome == DONE; i++) {
        PyObject *reward = codec->values[i];
        if (Py_TYPE(reward) != Py_TYPE(codec->values[0])) return LEFT;
        if (*tag > TYPE_OF_TAG && tag_of(codec->reward_types, reward) != *tag) return LEFT;
        if (*tag & ONE_AXIS && codec->vectors[i].kind != NO_KIND) return LEFT; /* a vector */
        if ((reward = number_in(reward, *tag)) == NULL) return FAILED;
        outcome = double_of(codec, reward, *tag, &codec->rewards[i]);
        Py_DECREF(reward);
    }
    return outcome;
}

/* Zero the code of a record: until it is complete, it is not WRITTEN, whatever happens. Returns the code before. */
static uint64_t begin_record(const Codec *codec, char *record) {
    volatile uint64_t *word = (volatile uint64_t *)(record + codec->header);
    uint64_t before = *word;
    *word = 0;
    return before;
}

/* Write a plain transition; DONE_BUT_INFOS if its infos have to be pickled. */
Outcome write_transition(const Codec *codec, char *record, PyObject *dicts, Py_ssize_t turn) {
    Outcome outcome;
    int flag_code = -1, only_all = 0, tag;
    if (!PyTuple_CheckExact(dicts) || PyTuple_Size(dicts) != 5 || codec->observations == NULL) return LEFT;
    PyObject *terminateds = PyTuple_GetItem(dicts, 2), *truncateds = PyTuple_GetItem(dicts, 3);
    PyObject *infos = PyTuple_GetItem(dicts, 4), **keys = keys_of(codec, record);
    if ((outcome = check_flags(codec, terminateds, &flag_code, &only_all, keys)) != DONE) return outcome;
    if ((outcome = check_flags(codec, truncateds, &flag_code, &only_all, keys)) != DONE) return outcome;
    if (only_all == 1) return LEFT;
    if (only_all) flag_code = 0;
    if (!PyDict_CheckExact(infos)) return LEFT;
    if ((outcome = values_in_order(codec, infos, codec->values, keys)) == FAILED) return outcome;
    int of_agents = outcome == DONE, are_empty = 1, none = PyDict_Size(infos) == 0;
    Py_ssize_t position = 0;
    PyObject *key, *info;
    while (PyDict_Next(infos, &position, &key, &info)) {
        if (!PyDict_CheckExact(info)) return LEFT;
        are_empty &= PyDict_Size(info) == 0;
    }
    if (are_empty && !of_agents && !none) return LEFT;
    if ((outcome = convert_rewards(codec, PyTuple_GetItem(dicts, 1), &tag, keys)) != DONE) return outcome;
    if ((outcome = values_in_order(codec, PyTuple_GetItem(dicts, 0), codec->values, keys)) != DONE) return outcome;
    uint64_t before = begin_record(codec, record);
    if ((outcome = write_in_order(codec, codec->observations, record)) != DONE) return outcome;
    char *header = record + codec->header;
    volatile uint64_t *word = (volatile uint64_t *)header;
    size_t n = (size_t)codec->n;
    uint64_t code = WRITTEN | PLAIN | (uint64_t)tag << REWARD_SHIFT | (uint64_t)flag_code << FLAG_SHIFT;
    code |= (uint64_t)turn << TURN_SHIFT | (none ? NO_INFOS : 0) | (only_all ? ONLY_ALL : 0);
    if (!are_empty) code |= write_infos(codec, record, infos) == DONE ? INFOS_IN_BLOCK : INFOS;
    memcpy(header + 8, codec->rewards, 8 * n);
    if (before != code) { /* else the rest of the header is correct already */
        char *next = header + 8 + 8 * n;
        memset(next, tag, n);
        next += n;
        for (int i = 0; i < 2; i++, next += n + 1) {
            memset(next, flag_code, n);
            next[n] = 0;
        }
        int presence = EVERYWHERE & ~(are_empty && !none ? 0 : INFOS_BIT);
        if (only_all) presence &= ~FLAG_BITS;
        memset(next, turn ? presence & ~ACTING_BIT : presence, n);
        if (turn) next[turn - 1] = (char)presence;
        memset(next + n, GOES_ON, n);
    }
    *word = code;
    return code & INFOS ? DONE_BUT_INFOS : DONE;
}

/* The code of a flag: its place in `flags`; -1 for anything else. */
static int code_of_flag(const Codec *codec, PyObject *flag) {
    for (int code = 0; code <= NP_TRUE_CODE; code++)
        if (flag == codec->flags[code]) return code;
    PyArrayObject *array = (PyArrayObject *)flag;
    if (!PyArray_CheckExact(flag) || PyArray_SIZE(array) != 1 || PyArray_TYPE(array) != NPY_BOOL) return -1;
    return NP_FALSE_CODE + (*(npy_bool *)PyArray_DATA(array) != 0);
}

/* A transition before it is written. */
typedef struct {
    unsigned char *tags, *flags[2], *presence, *events, *lives; /* in the scratch of the Codec, as in the header */
    PyObject **observations, **finals, **vectors;      /* borrowed, by agent */
    int all[2], any;           /* whether each dict has a flag for `__all__`; whether any agent has a flag */
    int over, are_empty;       /* whether an `__all__` is true; whether all infos are empty and belong to agents */
    int are_dicts;             /* whether all infos are dicts */
} Draft;

static Draft empty_draft(const Codec *codec) {
    size_t n = (size_t)codec->n;
    unsigned char *tags = codec->scratch, *presence = tags + 3 * n + 2;
    memset(codec->scratch, 0, 6 * n + 2);
    memset(codec->rewards, 0, 8 * n);
    return (Draft){tags, {tags + n, tags + 2 * n + 1}, presence, presence + n, presence + 2 * n,
                   codec->values, codec->values + n, codec->values + 2 * n, {0, 0}, 0, 0, 1, 1};
}

/* Note the flags of one dict. */
static Outcome note_flags(const Codec *codec, PyObject *dict, int which, Draft *draft) {
    Py_ssize_t position = 0, agent;
    PyObject *key, *flag;
    Outcome outcome = DONE;
    if (!is_dict(dict)) return LEFT;
    while (outcome == DONE && PyDict_Next(dict, &position, &key, &flag)) {
        int code = code_of_flag(codec, flag);
        if (code < 0) return LEFT;
        int is_all = same_key(key, codec->all, NULL);
        if (is_all < 0) return FAILED;
        if (is_all) {
            draft->flags[which][codec->n] = (unsigned char)code;
            draft->all[which] = 1;
            draft->over |= code & 1;
        } else if ((outcome = place_of(codec, key, &agent)) == DONE) {
            draft->flags[which][agent] = (unsigned char)code;
            draft->presence[agent] |= which ? TRUNCATED_BIT : TERMINATED_BIT;
            draft->any = 1;
        }
    }
    return outcome;
}

/* Note rewards, each with the tag of its type. */
static Outcome note_rewards(const Codec *codec, PyObject *dict, Draft *draft) {
    Py_ssize_t position = 0, agent;
    PyObject *key, *reward;
    Outcome outcome = DONE;
    if (!is_dict(dict)) return LEFT;
    while (outcome == DONE && PyDict_Next(dict, &position, &key, &reward)) {
        if ((outcome = place_of(codec, key, &agent)) != DONE) return outcome;
        int is_vector = codec->vectors[agent].kind == ARRAY && PyArray_CheckExact(reward) &&
                        PyArray_NDIM((PyArrayObject *)reward) > 0;
        int tag = is_vector ? VECTOR_TAG : tag_of(codec->reward_types, reward);
        if (tag < 0) return LEFT;
        if (is_vector) {
            draft->vectors[agent] = reward;
        } else {
            PyObject *number = number_in(reward, tag);
            if (number == NULL) return FAILED;
            outcome = double_of(codec, number, tag, &codec->rewards[agent]);
            Py_DECREF(number);
        }
        draft->tags[agent] = (unsigned char)tag;
        draft->presence[agent] |= REWARDED_BIT;
    }
    return outcome;
}

/* Note who is observed, or has a last observation. */
static Outcome note_observations(const Codec *codec, PyObject *dict, PyObject **values, int bit, Draft *draft) {
    Py_ssize_t position = 0, agent;
    PyObject *key, *value;
    Outcome outcome = DONE;
    if (!is_dict(dict)) return LEFT;
    while (outcome == DONE && PyDict_Next(dict, &position, &key, &value)) {
        if ((outcome = place_of(codec, key, &agent)) != DONE) return outcome;
        values[agent] = value;
        draft->presence[agent] |= (unsigned char)bit;
    }
    return outcome;
}

/* Note which agents have an info, unless one is not empty, or does not belong to an agent. */
static Outcome note_infos(const Codec *codec, PyObject *infos, Draft *draft) {
    Py_ssize_t position = 0, agent;
    PyObject *key, *info;
    if (!PyDict_CheckExact(infos)) return LEFT;
    while (PyDict_Next(infos, &position, &key, &info)) {
        Outcome outcome = LEFT;
        if (!PyDict_CheckExact(info)) draft->are_dicts = 0;
        else if (PyDict_Size(info) == 0) outcome = place_of(codec, key, &agent);
        if (outcome == FAILED) return FAILED;
        if (outcome == DONE) draft->presence[agent] |= INFOS_BIT;
        else draft->are_empty = 0;
    }
    for (agent = 0; !draft->are_empty && agent < codec->n; agent++) draft->presence[agent] &= (unsigned char)~INFOS_BIT;
    return DONE;
}

/* Note five dicts; LEFT if a value is not numeric, or belongs to an unknown agent. */
static Outcome note_dicts(const Codec *codec, PyObject **dicts, Draft *draft) {
    Outcome outcome = DONE;
    for (int which = 0; which < 2 && outcome == DONE; which++) outcome = note_flags(codec, dicts[2 + which], which, draft);
    if (outcome == DONE) outcome = note_observations(codec, dicts[0], draft->observations, OBSERVED_BIT, draft);
    if (outcome == DONE) outcome = note_rewards(codec, dicts[1], draft);
    return outcome == DONE ? note_infos(codec, dicts[4], draft) : outcome;
}

/* Hold references to all values of a draft, or drop them: the code between may run any Python code. */
static void hold(const Codec *codec, const Draft *draft, int on) {
    for (Py_ssize_t i = 0; i < codec->n; i++) {
        PyObject *values[] = {draft->presence[i] & OBSERVED_BIT ? draft->observations[i] : NULL,
                              draft->presence[i] & FINAL_BIT ? draft->finals[i] : NULL,
                              draft->presence[i] & REWARDED_BIT && draft->tags[i] == VECTOR_TAG ? draft->vectors[i] : NULL};
        for (int j = 0; j < 3; j++) {
            if (on) Py_XINCREF(values[j]);
            else Py_XDECREF(values[j]);
        }
    }
}

/* Which agents are alive after a step, and the events in their lives, by the rules of `EnvRunner`; LEFT if an agent has
   come back after its end. */
static Outcome note_lives(const Codec *codec, const unsigned char *before, const Draft *draft) {
    for (Py_ssize_t i = 0; i < codec->n; i++) {
        int observed = draft->presence[i] & OBSERVED_BIT, ends = (draft->flags[0][i] | draft->flags[1][i]) & 1;
        int ended = before[i] & ENDED_BIT, was_alive = before[i] & ALIVE_BIT;
        if (ended && observed && !ends) return LEFT;
        int alive = !ended && !ends && (observed || was_alive), event = was_alive ? WAS_ALIVE : 0;
        if (ended) event |= WAS_DEAD;
        else if (ends) event |= LIFE_ENDED;
        if (ends || draft->presence[i] & (OBSERVED_BIT | REWARDED_BIT)) event |= TOOK_PART;
        if (observed && !ended && !was_alive) event |= BEGAN;
        draft->events[i] = (unsigned char)event;
        draft->lives[i] = (unsigned char)((alive ? ALIVE_BIT : 0) | (ended || ends ? ENDED_BIT : 0));
        draft->presence[i] |= (unsigned char)((alive ? ALIVE_BIT : 0) | (alive && observed ? ACTING_BIT : 0));
    }
    return DONE;
}

/* Check that an agent is alive; LEFT if none is. */
static Outcome check_any_alive(const Codec *codec, const unsigned char *lives) {
    Outcome outcome = LEFT;
    for (Py_ssize_t i = 0; outcome == LEFT && i < codec->n; i++) outcome = lives[i] & ALIVE_BIT ? DONE : LEFT;
    return outcome;
}

/* Under PettingZoo's rules, check that an agent is left that has not ended; LEFT if no agent is. */
Outcome note_left(const Codec *codec, PyObject *agents_left, const unsigned char *lives) {
    PyObject *left = PyObject_CallNoArgs(agents_left);
    if (left == NULL) return FAILED;
    Outcome outcome = LEFT;
    if (left == Py_None) {
        outcome = check_any_alive(codec, lives);
    } else if (PyList_CheckExact(left)) {
        for (Py_ssize_t i = 0, agent; outcome == LEFT && i < PyList_Size(left); i++) {
            outcome = place_of(codec, PyList_GetItem(left, i), &agent);
            if (outcome == LEFT) break; /* Python decides whether it counts */
            if (outcome == DONE) outcome = lives[agent] & ENDED_BIT ? LEFT : DONE;
        }
    }
    Py_DECREF(left);
    return outcome;
}

/* The code of a header, with the bits of a plain transition if it is plain. */
static uint64_t code_of(const Codec *codec, uint64_t code, const Draft *draft, int no_infos) {
    const unsigned char *tags = draft->tags, *presence = draft->presence, *events = draft->events;
    unsigned char *const *flags = draft->flags;
    int only_all = !draft->any;
    int everywhere = EVERYWHERE & ~(code || no_infos ? INFOS_BIT : 0) & ~(only_all ? FLAG_BITS : 0);
    int flag = flags[0][0];
    Py_ssize_t n = codec->n, acting = 0, turn = 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (presence[i] & ACTING_BIT && ++acting == 1) turn = i + 1;
    if (acting != 1 || n == 1) turn = 0;
    if ((flag & 1) || flags[0][n] || flags[1][n] || tags[0] == VECTOR_TAG) return code;
    if (events[0] != GOES_ON && events[0] != BEGAN) return code;
    for (Py_ssize_t i = 0; i < n; i++) {
        int expected = turn && turn != i + 1 ? everywhere & ~ACTING_BIT : everywhere;
        if (presence[i] != expected || tags[i] != tags[0] || flags[0][i] != flag || flags[1][i] != flag ||
            events[i] != events[0])
            return code;
    }
    code |= PLAIN | (uint64_t)tags[0] << REWARD_SHIFT | (uint64_t)flag << FLAG_SHIFT | (uint64_t)turn << TURN_SHIFT;
    return code | (no_infos ? NO_INFOS : 0) | (only_all ? ONLY_ALL : 0) | (events[0] == BEGAN ? RESET : 0);
}

/* Write the values of a draft that is held. After LEFT, some may have been written. */
static Outcome write_draft_values(const Codec *codec, char *record, const Draft *draft) {
    Outcome outcome = DONE;
    for (Py_ssize_t i = 0; i < codec->n && outcome == DONE; i++) {
        int bits = draft->presence[i];
        if (bits & OBSERVED_BIT) outcome = write_value(codec, &codec->observations[i], record, draft->observations[i]);
        if (bits & FINAL_BIT && outcome == DONE)
            outcome = write_value(codec, &codec->finals[i], record, draft->finals[i]);
        if (bits & REWARDED_BIT && draft->tags[i] == VECTOR_TAG && outcome == DONE)
            outcome = write_value(codec, &codec->vectors[i], record, draft->vectors[i]);
    }
    return outcome;
}

/* Write the header of a draft, and its infos: an object for the block, NULL if all are empty. `code` is FINAL or 0. */
static Outcome write_header(const Codec *codec, char *record, const Draft *draft, uint64_t code, PyObject *infos,
                            int no_infos) {
    size_t n = (size_t)codec->n;
    char *header = record + codec->header;
    volatile uint64_t *word = (volatile uint64_t *)header;
    begin_record(codec, record);
    if (infos != NULL) code |= write_infos(codec, record, infos) == DONE ? INFOS_IN_BLOCK : INFOS;
    if (!(code & FINAL)) code = code_of(codec, code, draft, no_infos);
    memcpy(header + 8, codec->rewards, 8 * n);
    memcpy(header + 8 + 8 * n, codec->scratch, 5 * n + 2);
    *word = WRITTEN | code;
    return code & INFOS ? DONE_BUT_INFOS : DONE;
}

/* Write any transition of known agents and numbers whose episode goes on, and update who is alive. `rules` are those of
   the attribute `fast` of `EnvRunner`. */
Outcome write_any(const Codec *codec, char *record, PyObject *result, PyObject *rules, unsigned char *before,
                         PyObject *is_forked) {
    if (!PyTuple_CheckExact(result) || PyTuple_Size(result) != 5 || codec->observations == NULL) return LEFT;
    PyObject *dicts[5], *agents_left = PyTuple_GetItem(rules, 0);
    for (int i = 0; i < 5; i++) dicts[i] = PyTuple_GetItem(result, i);
    Draft draft = empty_draft(codec);
    Outcome outcome = note_dicts(codec, dicts, &draft);
    if (outcome == DONE && (draft.over || !draft.are_dicts)) outcome = LEFT; /* Python checks infos that are no dicts */
    if (outcome == DONE) outcome = note_lives(codec, before, &draft);
    if (outcome == DONE && agents_left == Py_None && !draft.all[0]) outcome = check_any_alive(codec, draft.lives);
    if (outcome != DONE) return outcome;
    hold(codec, &draft, 1);
    if (agents_left != Py_None && !(draft.all[0] && draft.all[1])) outcome = note_left(codec, agents_left, draft.lives);
    if (outcome == DONE && *PyByteArray_AsString(is_forked)) outcome = LEFT; /* Python ends this process */
    if (outcome == DONE) begin_record(codec, record);
    if (outcome == DONE) outcome = write_draft_values(codec, record, &draft);
    hold(codec, &draft, 0);
    if (outcome != DONE) return outcome;
    outcome = write_header(codec, record, &draft, 0, draft.are_empty ? NULL : dicts[4], PyDict_Size(dicts[4]) == 0);
    memcpy(before, draft.lives, (size_t)codec->n);
    return outcome;
}

/* Note the events of agents, a dict or None. */
static Outcome note_events(const Codec *codec, PyObject *events, const Draft *draft) {
    Py_ssize_t position = 0, agent;
    PyObject *key, *value;
    if (events == Py_None) {
        for (agent = 0; agent < codec->n; agent++)
            if (draft->presence[agent] & (OBSERVED_BIT | REWARDED_BIT)) draft->events[agent] = GOES_ON;
        return DONE;
    }
    if (!PyDict_CheckExact(events)) return LEFT;
    while (PyDict_Next(events, &position, &key, &value)) {
        Outcome outcome = place_of(codec, key, &agent);
        if (outcome != DONE) return outcome;
        long bits = PyLong_AsLong(value);
        if (bits < 0 || bits & ~(long)ALL_EVENTS) return PyErr_Occurred() ? FAILED : LEFT;
        draft->events[agent] = (unsigned char)bits;
    }
    return DONE;
}

const char put_doc[] =
    "put(env_id, transition) -> 0 | 1 | 2\n--\n\n"
    "Write a `Transition`. Returns 1; 2 if its infos, and the infos of its reset, have to be pickled; or 0 if Python has to\n"
    "pickle it, since it has values other than numbers that fit their spaces, or unknown agents.";

PyObject *codec_put(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_id, *transition, *parts[10], *pair = NULL;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "OO!:put", &env_id, &PyTuple_Type, &transition)) return NULL;
    char *record = record_of(codec, env_id, &number);
    if (record == NULL) return NULL;
    if (PyTuple_Size(transition) != 11) {
        PyErr_SetString(PyExc_ValueError, "expected a Transition");
        return NULL;
    }
    if (PyTuple_GetItem(transition, 10) != Py_None) return PyLong_FromLong(0); /* masks have no place in a record */
    for (int i = 0; i < 10; i++) parts[i] = PyTuple_GetItem(transition, i);
    PyObject *infos = parts[4], *final = parts[7] == Py_None ? NULL : parts[7];
    PyObject *reset = final == NULL || parts[8] == Py_None ? NULL : parts[8];
    if (codec->observations == NULL || (reset != NULL && !PyDict_CheckExact(reset))) return PyLong_FromLong(0);
    if (final != NULL) { /* before anything is written, since it may fail */
        pair = reset == NULL ? Py_BuildValue("(O{})", infos) : PyTuple_Pack(2, infos, reset);
        if (pair == NULL) return NULL;
    }
    Draft draft = empty_draft(codec);
    Outcome outcome = note_dicts(codec, parts, &draft);
    if (outcome == DONE && !(draft.all[0] && draft.all[1])) outcome = LEFT;
    if (outcome == DONE && final != NULL) outcome = note_observations(codec, final, draft.finals, FINAL_BIT, &draft);
    for (int i = 5; i < 7 && outcome == DONE; i++) {
        PyObject *agents = PySequence_Fast(parts[i], "expected agents");
        if (agents == NULL) {
            Py_XDECREF(pair);
            return NULL;
        }
        for (Py_ssize_t j = 0, agent; outcome == DONE && j < PySequence_Size(agents); j++) {
            PyObject *one = PySequence_GetItem(agents, j);
            outcome = one == NULL ? FAILED : place_of(codec, one, &agent);
            if (outcome == DONE) draft.presence[agent] |= i == 5 ? ALIVE_BIT : ACTING_BIT;
            Py_XDECREF(one);
        }
        Py_DECREF(agents);
    }
    if (outcome == DONE) outcome = note_events(codec, parts[9], &draft);
    int reset_is_empty = 1;
    Py_ssize_t position = 0;
    PyObject *key, *info;
    while (reset != NULL && PyDict_Next(reset, &position, &key, &info))
        reset_is_empty &= PyDict_CheckExact(info) && PyDict_Size(info) == 0;
    if (outcome == DONE) {
        /* With last observations, the header is still that of the last step, which a death does not lose. */
        if (final == NULL) begin_record(codec, record);
        hold(codec, &draft, 1);
        outcome = write_draft_values(codec, record, &draft);
        hold(codec, &draft, 0);
    }
    if (outcome == DONE) {
        PyObject *written = draft.are_empty && reset_is_empty ? NULL : pair == NULL ? infos : pair;
        outcome = write_header(codec, record, &draft, final == NULL ? 0 : FINAL, written, PyDict_Size(infos) == 0);
    }
    Py_XDECREF(pair);
    if (outcome == FAILED) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* Ctrl-C */
        PyErr_Clear(); /* Python raises it again */
    }
    return PyLong_FromLong(outcome == DONE ? 1 : outcome == DONE_BUT_INFOS ? 2 : 0);
}
