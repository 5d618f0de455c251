/* Dicts of actions into records, and out of them. */

#include "codec.h"

const char write_doc[] =
    "write(env_ids, actions, first, all_count, needs_all) -> int\n--\n\n"
    "Write dicts of actions from the place `first` on: actions of agents that act, or with `all_count`, all in the\n"
    "dict, where actions may be missing unless `needs_all`. `read` has noted who acts. Returns the place where it\n"
    "stopped: Python writes that environment's actions.";

/* Write the action of one agent; LEFT if it does not fit. */
static Outcome write_action(const Codec *codec, char *record, Py_ssize_t agent, PyObject *action) {
    Py_INCREF(action);
    Outcome outcome = write_value(codec, &codec->actions[agent], record, action);
    Py_DECREF(action);
    if (outcome == DONE) codec->there[agent] = 1;
    return outcome;
}

/* Write the actions of some agents; LEFT if a needed action is missing, or an action has no place. */
static Outcome write_some(const Codec *codec, char *record, PyObject *dict, const unsigned char *state, int all_count,
                          int needs_all) {
    if (!PyDict_CheckExact(dict)) return LEFT;
    char *form = record + codec->action_header;
    memset(codec->there, 0, (size_t)codec->n);
    Outcome outcome = DONE;
    Py_ssize_t position = 0, agent;
    PyObject *key, *action;
    while (all_count && outcome == DONE && PyDict_Next(dict, &position, &key, &action)) {
        outcome = place_of(codec, key, &agent);
        if (outcome == DONE) outcome = write_action(codec, record, agent, action);
    }
    for (agent = 0; outcome == DONE && (!all_count || needs_all) && agent < codec->n; agent++) {
        if (!(state[agent] & ACTING_BIT) || codec->there[agent]) continue;
        action = PyDict_GetItemWithError(dict, PyTuple_GetItem(codec->agents, agent));
        if (action == NULL) return PyErr_Occurred() ? FAILED : LEFT;
        outcome = write_action(codec, record, agent, action);
    }
    if (outcome != DONE) return outcome;
    int everyone = !all_count; /* else the order matters, as in `values_in_order` */
    for (agent = 0; everyone && agent < codec->n; agent++) everyone = codec->there[agent];
    form[0] = everyone ? ALL_IN_ORDER : SOME;
    if (!everyone) memcpy(form + 1, codec->there, (size_t)codec->n);
    return DONE;
}

PyObject *codec_write(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_ids, *actions;
    Py_ssize_t place;
    int all_count, needs_all;
    if (!PyArg_ParseTuple(args, "O!Onpp:write", &PyTuple_Type, &env_ids, &actions, &place, &all_count, &needs_all))
        return NULL;
    Py_ssize_t size = PyTuple_Size(env_ids);
    if (codec->actions == NULL) return PyLong_FromSsize_t(place);
    for (; place < size; place++) {
        Py_ssize_t number;
        char *record = record_of(codec, PyTuple_GetItem(env_ids, place), &number);
        if (record == NULL) return NULL;
        const unsigned char *state = state_of(codec, number);
        if (state[codec->n] != KNOWN) break; /* after the end of an episode, Python decides which actions count */
        PyObject *of_env = PySequence_GetItem(actions, place);
        if (of_env == NULL) return NULL;
        Outcome outcome = LEFT;
        int everyone = PyDict_CheckExact(of_env) && PyDict_Size(of_env) == codec->n;
        for (Py_ssize_t i = 0; everyone && !all_count && i < codec->n; i++) everyone = state[i] & ACTING_BIT;
        if (everyone) outcome = write_values(codec, codec->actions, record, of_env);
        if (outcome == DONE) record[codec->action_header] = ALL_IN_ORDER;
        if (outcome == LEFT) outcome = write_some(codec, record, of_env, state, all_count, needs_all);
        Py_DECREF(of_env);
        if (outcome == FAILED) {
            if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* Ctrl-C */
            PyErr_Clear(); /* Python raises it again */
        }
        if (outcome != DONE) break;
    }
    return PyLong_FromSsize_t(place);
}

const char put_actions_doc[] =
    "put_actions(env_id, actions) -> bool\n--\n\n"
    "Write the actions of one environment, all in the dict; False if one does not fit, or is of an unknown agent.";

PyObject *codec_put_actions(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_id, *actions;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "OO:put_actions", &env_id, &actions)) return NULL;
    char *record = record_of(codec, env_id, &number);
    if (record == NULL) return NULL;
    Outcome outcome = LEFT;
    if (codec->actions != NULL) outcome = write_some(codec, record, actions, state_of(codec, number), 1, 0);
    if (outcome == FAILED) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* Ctrl-C */
        PyErr_Clear(); /* Python raises it again */
    }
    return PyBool_FromLong(outcome == DONE);
}

/* The actions of a record; NULL without an error if some agents have no column. */
PyObject *read_actions(const Codec *codec, char *record) {
    const char *header = record + codec->action_header;
    if (codec->actions == NULL) return NULL;
    if (header[0] & ~(ALL_IN_ORDER | STACKED)) return damaged(codec, record);
    int copy = header[0] & STACKED ? SCALARS : COPIES;
    if (header[0] & ALL_IN_ORDER) return read_values(codec, codec->actions, record, copy);
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        if (header[1 + i]) set_value(codec, &dict, i, read_value(codec, &codec->actions[i], record, copy));
    return dict;
}
