/* Steps of simulators with the actions in their records; see `run`. */

#include "codec.h"

/* Count a step by its seconds, like `duration_index` in `worker_status.py`. */
static void count_step(int64_t *times, double seconds) {
    int64_t bits;
    memcpy(&bits, &seconds, sizeof bits);
    int64_t place = (bits >> 50) - ((1023 - 20) << 2); /* the exponent and two bits of the fraction; from 2**-20 s */
    times[place < 0 ? 0 : place < STEP_TIMES ? place : STEP_TIMES - 1] += 1;
}

/* Write a plain transition, if the function of `fast` returns that all agents go on, or whose turn it is. */
static Outcome write_plain(const Codec *codec, char *record, PyObject *dicts, PyObject *fast, PyObject *is_forked) {
    PyObject *check = PyTuple_GetItem(fast, 1);
    Py_ssize_t turn = 0;
    if (check != Py_None) {
        PyObject *found = PyObject_CallNoArgs(check);
        int goes_on = found == NULL ? -1 : found == Py_None ? 1 : PyObject_IsTrue(found);
        if (goes_on == 1 && PyTuple_GetItem(fast, 2) == Py_True) {
            turn = PyLong_AsSsize_t(found);
            goes_on = PyErr_Occurred() ? -1 : turn > 0 && turn <= codec->n;
        }
        Py_XDECREF(found);
        if (goes_on < 0) return FAILED_BEFORE;
        if (goes_on == 0 || *PyByteArray_AsString(is_forked)) return LEFT;
    }
    return write_transition(codec, record, dicts, turn);
}

/* The lives of a record's agents: the lives in `rules`, unless steps have changed them since. */
static unsigned char *lives_of(const Codec *codec, Py_ssize_t number, PyObject *rules) {
    unsigned char *lives = codec->lives + number * codec->n;
    PyObject *first = PyTuple_GetItem(rules, 1), *before = codec->first_lives[number];
    if (first == NULL) return NULL;
    if (before == first) return lives;
    char *own;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(first, &own, &size) < 0) return NULL;
    if (size != codec->n + 1) {
        PyErr_SetString(PyExc_ValueError, "expected a byte for each agent, and one more");
        return NULL;
    }
    memcpy(lives, own, (size_t)codec->n);
    Py_INCREF(first);
    codec->first_lives[number] = first;
    Py_XDECREF(before);
    return lives;
}

/* Write a transition whose agents' lives are known here: a plain one, the most frequent, or any other. */
static Outcome write_alive(const Codec *codec, char *record, Py_ssize_t number, PyObject *dicts, PyObject *fast,
                           PyObject *is_forked) {
    PyObject *rules = PyTuple_GetItem(fast, 3), *agents_left = PyTuple_GetItem(rules, 0);
    if (agents_left == NULL) return FAILED_BEFORE;
    unsigned char *lives = lives_of(codec, number, rules);
    if (lives == NULL) return FAILED_BEFORE;
    int all = 1;
    for (Py_ssize_t i = 0; all && i < codec->n; i++) all = lives[i] == ALIVE_BIT;
    if (all) {
        if (agents_left != Py_None) {
            Outcome left = note_left(codec, agents_left, lives);
            if (left != DONE) return left == FAILED ? FAILED_BEFORE : LEFT;
            if (*PyByteArray_AsString(is_forked)) return LEFT;
        }
        Outcome outcome = write_transition(codec, record, dicts, 0);
        if (outcome != LEFT) return outcome;
    }
    return write_any(codec, record, dicts, rules, lives, is_forked);
}

/* Call `after` for a step that is written; returns LEFT without a result if Python has to end this process. */
static Outcome follow(PyObject *after, PyObject *env_id, PyObject *is_forked, Outcome outcome, PyObject **result) {
    PyObject *done = PyObject_CallFunctionObjArgs(after, env_id, NULL);
    int left = *PyByteArray_AsString(is_forked);
    if (done == NULL || left) Py_CLEAR(*result);
    if (done == NULL) return FAILED;
    Py_DECREF(done);
    return left ? LEFT : outcome;
}

/* Step one environment. `result` is what Python has to go on with: NULL if nothing is left to do or after FAILED. */
static Outcome step_one(Codec *codec, PyObject *env_id, PyObject *fast, int64_t *status, int64_t *times,
                        PyObject *is_forked, PyObject *after, PyObject **result) {
    Py_ssize_t number;
    char *record = record_of(codec, env_id, &number);
    if (record == NULL) return FAILED;
    if (*PyByteArray_AsString(is_forked)) return LEFT;
    PyObject *actions = read_actions(codec, record);
    if (actions == NULL) return PyErr_Occurred() ? FAILED : LEFT;
    volatile int64_t *running = status;
    double began = codec->moment == NULL ? monotonic() : *codec->moment;
    running[0] = number + 1;
    running[1] = codec->step_activity;
    memcpy(status + 2, &began, sizeof began);
    *result = PyObject_CallFunctionObjArgs(PyTuple_GetItem(fast, 0), actions, NULL);
    Py_DECREF(actions);
    if (*PyByteArray_AsString(is_forked)) return *result == NULL ? FAILED : LEFT; /* Python ends this process */
    double seconds = (codec->moment == NULL ? monotonic() : *codec->moment) - began;
    codec->inside += seconds;
    count_step(times, seconds);
    codec->steps += 1;
    running[0] = -(number + 1);
    if (*result == NULL) return FAILED;
    Outcome outcome = PyTuple_GetItem(fast, 3) == Py_None
                          ? write_plain(codec, record, *result, fast, is_forked)
                          : write_alive(codec, record, number, *result, fast, is_forked);
    if (outcome == FAILED_BEFORE || (outcome == FAILED && !PyErr_ExceptionMatches(PyExc_Exception))) { /* Ctrl-C */
        Py_CLEAR(*result);
        return FAILED;
    }
    if (outcome == FAILED) {
        PyErr_Clear(); /* Python raises it again */
        return LEFT;
    }
    if (outcome == DONE_BUT_INFOS) {
        PyObject *infos = PyTuple_GetItem(*result, 4);
        Py_INCREF(infos);
        Py_DECREF(*result);
        *result = infos;
    }
    if (outcome == DONE) Py_CLEAR(*result);
    if (after != Py_None && (outcome == DONE || outcome == DONE_BUT_INFOS))
        return follow(after, env_id, is_forked, outcome, result);
    return outcome;
}

const char run_doc[] =
    "run(env_ids, first, episodes, status, times, is_forked, after) -> None | (place, letter, value)\n--\n\n"
    "Step environments with the actions in their records, from the place `first` on, and write their transitions.\n"
    "`episodes` is a dict by environment; the attribute `fast` of an episode is None or four: the simulator's `step`;\n"
    "None, or a function whose result is false if Python has to interpret the step; whether this result is a `turn`;\n"
    "and None, or a tuple: who is left, None or a function, and the lives of all agents (see `lives`). Then this code\n"
    "decides who is alive. `status` is the array of the worker's status, `times` that of its step times. `after` is None\n"
    "or called with each environment whose transition is written here, before the next one is stepped.\n"
    "If a simulator forks, the child has a 1 in the bytearray `is_forked`; there, `run` returns as soon as its step\n"
    "does, and writes nothing.\n\n"
    "Returns None when all are done; else where it stopped, a letter, and a value: \"c\" if the step has to be called,\n"
    "\"r\" with what it returned, \"i\" with the infos of a transition that has been written. After an exception,\n"
    "`place` tells where.";

PyObject *codec_run(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_ids, *episodes, *status, *times, *is_forked, *after;
    Py_ssize_t first;
    if (!PyArg_ParseTuple(args, "O!nO!O!O!O!O:run", &PyTuple_Type, &env_ids, &first, &PyDict_Type, &episodes,
                          &PyArray_Type, &status, &PyArray_Type, &times, &PyByteArray_Type, &is_forked, &after))
        return NULL;
    if (PyArray_SIZE((PyArrayObject *)times) != STEP_TIMES) {
        PyErr_SetString(PyExc_ValueError, "times has another size");
        return NULL;
    }
    int64_t *counts = PyArray_DATA((PyArrayObject *)times);
    int64_t *numbers = PyArray_DATA((PyArrayObject *)status);
    Py_ssize_t size = PyTuple_Size(env_ids);
    for (codec->place = first; codec->place < size; codec->place++) {
        PyObject *env_id = PyTuple_GetItem(env_ids, codec->place), *result = NULL;
        PyObject *episode = PyDict_GetItemWithError(episodes, env_id);
        if (episode == NULL) {
            if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, env_id);
            return NULL;
        }
        PyObject *fast = PyObject_GetAttr(episode, name_fast);
        if (fast == NULL) return NULL;
        Outcome outcome = LEFT;
        if (fast != Py_None && PyTuple_CheckExact(fast) && PyTuple_Size(fast) == 4)
            outcome = step_one(codec, env_id, fast, numbers, counts, is_forked, after, &result);
        Py_DECREF(fast);
        if (outcome == FAILED) return NULL;
        if (outcome == LEFT && result == NULL) return Py_BuildValue("(nsO)", codec->place, "c", Py_None);
        if (outcome == LEFT) return Py_BuildValue("(nsN)", codec->place, "r", result);
        if (outcome == DONE_BUT_INFOS) return Py_BuildValue("(nsN)", codec->place, "i", result);
    }
    Py_RETURN_NONE;
}

const char lives_doc[] =
    "lives(env_id, first) -> bytes | None\n--\n\n"
    "The lives of all agents after the steps of `run` that began with these; None without such steps. The byte of an agent\n"
    "has the bit 32 if it is alive, and 1 if a flag of it has been set since it was last seen alive. `first` has one byte\n"
    "more, since only longer bytes are objects of their own.";

PyObject *codec_lives(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_id, *first;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "OO!:lives", &env_id, &PyBytes_Type, &first)) return NULL;
    if (record_of(codec, env_id, &number) == NULL) return NULL;
    if (codec->first_lives[number] != first) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)codec->lives + number * codec->n, codec->n);
}

const char sums_doc[] =
    "sums() -> (seconds, steps)\n--\n\nThe time inside simulators and the number of steps since the last call.";

PyObject *codec_sums(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    Codec *codec = (Codec *)self;
    PyObject *sums = Py_BuildValue("(dL)", codec->inside, codec->steps);
    if (sums == NULL) return NULL;
    codec->inside = 0.0;
    codec->steps = 0;
    return sums;
}
