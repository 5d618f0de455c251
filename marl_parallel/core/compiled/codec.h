/* Converts actions and transitions between Python objects and the block of shared memory. Also waits for processes:
   `try_for`, and `exchange` for a step of all environments.

   A `Codec` does for many environments in one call what `block_transitions.py` and `env_runner.py` do for one:

       caller   write, write_arrays   actions into records        read, read_arrays   records into dicts, or into arrays
       worker   run     actions out of records, the simulator's step, its transition into the record
                put     a transition that `EnvRunner` has interpreted, such as the transition of a reset

   A function stops at a case that it does not support, or leaves it out, and returns the place: Python continues there.
   So the results are the same as with Python alone (`MARL_PARALLEL_PURE=1`). Infos of simple values lie in the block,
   where an info that several agents share becomes one info for each agent. All offsets, codes and types come from
   Python (`codec.py`).

   This code supports every transition of agents that are known beforehand, with values that fit their columns: any
   agents may be in any dict, die, come late and come back, and the next episode may begin in the same step. For `run`,
   `lives` has which agents are alive, by the rules of `EnvRunner`. Python handles the end of an episode, agents that come
   back, and adapters with methods to call. For the caller, `states` has who is alive and acts after the latest read.

   The most frequent transition is plain, and has a fast path: every agent is in every dict, in order; all rewards are
   numbers of one type, all flags False and of one type, and all infos dicts. Infos may be missing, and so may all flags
   except `__all__`. All agents act next, or only the agent whose turn it is: a `turn` is 0 for all agents, else the
   agent's place plus one. Keys are equal if they are the same object, or equal strings or integers.

   The header of a transition: a code of 8 bytes, rewards 8n, types of rewards n, terminated n + 1, truncated n + 1,
   presence n, events n, for the n agents. The code is written last. Its bits are below; the code of a plain transition also has
   the type of the rewards, the type of the flags, and the turn. The events say what the transition means in each
   agent's life; `EnvRunner` decides the same.

   Built for the limited API of Python 3.10: one module for all later releases. Its files, each of one subject:

       module.c               the module, its functions, and the names that its files share
       codec.c                the type `Codec`
       memory.c               memory of large arrays
       values.c               one value of a record
       infos.c                infos in the block
       records.c              what a record says: agents, header, who is alive and acts
       actions.c              actions into records, and out of them
       write_transitions.c    transitions into records
       read_transitions.c     records into dicts
       arrays.c               neighbouring records as arrays
       steps.c                the steps of simulators
       waiting.c              the time, and waiting for processes */

#ifndef MARL_PARALLEL_CODEC_H
#define MARL_PARALLEL_CODEC_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL marl_parallel_numpy /* NumPy's functions are imported once, by module.c */
#ifndef IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* What the files share stays inside the module: calls are direct, and other libraries may have the same names. */
#ifdef __GNUC__
#pragma GCC visibility push(hidden)
#endif

/* How values are read: arrays over the block, copies, or copies with NumPy scalars in place of arrays without axes. */
enum { VIEWS = 0, COPIES = 1, SCALARS = 2 };

/* The outcome of a function for one value or one environment. */
typedef enum { FAILED_BEFORE = -2, FAILED = -1, LEFT = 0, DONE = 1, DONE_BUT_INFOS = 2 } Outcome;

typedef enum { NO_KIND, ARRAY, NUMBER, DICT, TUPLE } Kind;

/* The place of an agent's value, or of a part of it: see the `form` of columns in `columns.py`. */
typedef struct Node {
    Kind kind;
    Py_ssize_t offset;         /* in each record */
    Py_ssize_t tag;            /* NUMBER: the offset of its tag */
    Py_ssize_t nbytes;         /* ARRAY, NUMBER */
    long long low, high;       /* NUMBER: the smallest and the largest value */
    int one_axis;              /* NUMBER: whether an array of shape (1,) fits */
    PyArray_Descr *dtype;      /* ARRAY */
    int ndim;                  /* ARRAY */
    npy_intp *dims;            /* ARRAY */
    Py_ssize_t size;           /* DICT, TUPLE */
    PyObject *keys;            /* DICT: a tuple */
    struct Node *parts;        /* DICT, TUPLE */
} Node;

typedef struct {
    PyObject_HEAD
    PyObject *block;           /* the array of all bytes */
    char *base;
    Py_ssize_t stride, records, n;
    PyObject *agents;          /* a tuple */
    PyObject *all;             /* "__all__" */
    Node *actions, *observations, *finals; /* by agent; NULL if not all agents have one */
    Node *vectors;             /* of vector rewards, by agent; without a kind if undeclared */
    Py_ssize_t action_header, header; /* offsets in a record */
    Py_ssize_t infos, infos_nbytes;   /* the area for infos; 0 bytes if infos are always pickled */
    PyObject *number_types, *reward_types; /* tuples of types, by tag */
    Py_ssize_t floats;         /* how many of the reward types are floats; the others are integers */
    PyObject *np_false, *flags[4]; /* the flags by code, borrowed */
    PyObject *np_true;
    PyObject *no_values, *no_flags, *no_np_flags, *only_all; /* dicts that are copied for each environment */
    int64_t step_activity;
    PyObject **values;         /* by agent: values of one dict, or observations, last observations, vector rewards */
    PyObject *agents_list;     /* who acts or is alive, if all agents do; read-only */
    PyObject **keys;           /* by record and agent: the key that a simulator used last; comparing strings is slow */
    double *rewards;
    char *there;               /* by agent: whether it is in a dict */
    PyObject *places;          /* a dict of the places of agents that are strings or integers */
    PyObject **first_lives;    /* by record: the initial bytes of `lives` */
    unsigned char *lives;      /* by record: the bits ALIVE and ENDED of each agent */
    unsigned char *scratch;    /* for one transition: the header after the rewards; then new lives */
    unsigned char *states;     /* by record: the bits ALIVE, ACTING, ENDED of each agent after the latest read; then the
                                  bits KNOWN and OVER: the episode is over and no reset has followed */
    int same_step;             /* whether the next episode begins in the step that ends one */
    int has_large;             /* whether an observation is a large array */
    int in_infos;              /* whether infos have the statistics of agents that end */
    PyObject *totals_array;    /* None, or the array of: */
    double *totals;            /* by record: each agent's sum of rewards read, and steps; all steps. NULL for None */
    double inside;             /* seconds in simulators since the last `sums` */
    long long steps;
    Py_ssize_t place;          /* the environment at which `run` is */
    PyObject *moment_array;    /* None, or the array of: */
    const volatile double *moment; /* the time in seconds; NULL for the system's monotonic clock */
} Codec;

/* Bits of a code. WRITTEN: the record is complete; INFOS: infos are pickled; NO_INFOS: there are none at all; ONLY_ALL: no
   flags but `__all__`; RESET: in a plain transition, all agents begin a life. Python has another bit, for transitions
   that are pickled. */
enum { PLAIN = 1, INFOS = 2, FINAL = 4, INFOS_IN_BLOCK = 8, NO_INFOS = 16, ONLY_ALL = 32, RESET = 128, NOT_PLAIN = 0x44 };
#define WRITTEN (1ULL << 63)
enum { REWARD_SHIFT = 8, FLAG_SHIFT = 16, TURN_SHIFT = 24 };
enum {
    OBSERVED_BIT = 1, REWARDED_BIT = 2, TERMINATED_BIT = 4, TRUNCATED_BIT = 8, FLAG_BITS = 12, INFOS_BIT = 16,
    ALIVE_BIT = 32, ACTING_BIT = 64, EVERYWHERE = 127, FINAL_BIT = 128
};
/* Events: see `ENDED` in `transition.py`. In a plain step, all agents go on; in a plain reset, all begin. */
enum { LIFE_ENDED = 1, TOOK_PART = 2, BEGAN = 4, WAS_DEAD = 8, WAS_ALIVE = 16, GOES_ON = 18, ALL_EVENTS = 31 };
enum { ENDED_BIT = 1 }; /* of lives: a flag has been set since the agent was last seen alive */
enum { KNOWN = 1, OVER = 2 }; /* of states */
enum { SOME = 0, ALL_IN_ORDER = 1, STACKED = 2 };
enum { NP_FALSE_CODE = 2, NP_TRUE_CODE = 3, TYPE_OF_TAG = 15, VECTOR_TAG = 15, NO_AXIS = 16, ONE_AXIS = 32 }; /* see `tag_of`, and `number_of` in `columns.py` */
#define LARGEST_EXACT 9007199254740992LL /* 2**53 */
#define STEP_TIMES 112 /* `StepTimes.SIZE` */

/* The parts of the header of a transition. */
typedef struct {
    uint64_t code;
    const double *rewards;
    const unsigned char *tags, *flags[2], *presence, *events;
} Header;

enum { LARGE = 1 << 16 }; /* bytes of an array whose memory is used again */

/* -- module.c ------------------------------------------------------------------------------------------------------ */

extern PyObject *name_fast, *name_infos, *name_metadata, *name_final_obs, *name_reset_info; /* interned */
extern PyObject *time_monotonic, *defaultdict; /* of the modules `time` and `collections` */
extern PyArray_Descr *int64_dtype, *double_dtype;

/* -- codec.c ------------------------------------------------------------------------------------------------------- */

extern PyType_Spec codec_spec; /* of the type `Codec` */

/* -- memory.c ------------------------------------------------------------------------------------------------------ */

extern const char keep_doc[];
PyObject *keep_sizes(PyObject *self, PyObject *args);  /* the function `keep` of the module */
int prepare_memory(void);                              /* before the first `use_kept`; -1 with an error */
void keep(size_t size, Py_ssize_t more);               /* keep more or fewer pieces of a size */
PyObject *use_kept(void);                              /* new arrays use this memory; returns the setting before */
void use_other(PyObject *before);                      /* restores that setting */

/* -- values.c ------------------------------------------------------------------------------------------------------ */

PyObject *damaged(const Codec *codec, const char *record); /* sets the error for a damaged record; returns NULL */
PyObject *read_or_damaged(const Codec *codec, const char *record, PyObject *value); /* a value, or that error */
int has_metadata(PyArrayObject *array);                    /* whether the dtype of an array has metadata */
int tag_of(PyObject *types, PyObject *value);              /* the tag of a number; -1 for other types */
int is_form(int tag);                                      /* whether `tag_of` may return a tag, for some types */
int is_tag(PyObject *types, int tag);                      /* whether `tag_of` may return a tag, for these types */
PyObject *number_in(PyObject *value, int tag);             /* the number itself, out of an array of one element too */
Outcome integer_of(PyObject *value, long long *number);    /* the value of an integer of Python or NumPy */
/* One value into a record, and out of it; `copy` tells how arrays are read. */
Outcome write_value(const Codec *codec, const Node *node, char *record, PyObject *value);
PyObject *read_value(const Codec *codec, const Node *node, char *record, int copy);
/* A reward of any type of number. */
PyObject *read_reward(const Codec *codec, const char *record, double number, int tag);

/* -- infos.c ------------------------------------------------------------------------------------------------------- */

Outcome write_infos(const Codec *codec, char *record, PyObject *infos); /* LEFT if they have to be pickled */
/* The infos of a record in the block; `reset` gets the infos of its automatic reset. */
PyObject *infos_in_block(const Codec *codec, const Header *header, char *record, int *has_mask, PyObject **reset);
/* The infos of neighbouring records as arrays; NULL without an error if they do not fit. */
PyObject *info_table(const Codec *codec, Py_ssize_t start, Py_ssize_t stop);

/* -- records.c ----------------------------------------------------------------------------------------------------- */

extern const char acting_doc[], forget_doc[], agents_doc[], is_over_doc[];
PyObject *codec_acting(PyObject *self, PyObject *args);
PyObject *codec_forget(PyObject *self, PyObject *args);
PyObject *codec_agents_of(PyObject *self, PyObject *args);
PyObject *codec_is_over(PyObject *self, PyObject *env_id);
char *record_of(const Codec *codec, PyObject *env_id, Py_ssize_t *number); /* a record; else NULL with an error */
int are_records(const Codec *codec, Py_ssize_t start, Py_ssize_t stop);    /* whether they exist; else sets an error */
/* The values of a dict whose keys are all agents in order, as borrowed references; LEFT for any other object. */
Outcome values_in_order(const Codec *codec, PyObject *dict, PyObject **values, PyObject **keys);
/* A dict of all agents into a record, and out of it. */
Outcome write_values(const Codec *codec, const Node *nodes, char *record, PyObject *dict);
Outcome write_in_order(const Codec *codec, const Node *nodes, char *record); /* what `values_in_order` has found */
PyObject *read_values(const Codec *codec, const Node *nodes, char *record, int copy);
PyObject *new_dict(const Codec *codec);                                    /* a dict for a value of each agent */
int any_has(const Codec *codec, const unsigned char *presence, int bit);   /* whether any agent has a bit */
PyObject *agents_with(const Codec *codec, const unsigned char *presence, int bit); /* the list of agents with a bit */
int is_left(const Codec *codec, const Header *header);                     /* whether Python has to read a record */
int is_header(const Codec *codec, const Header *header);                   /* whether this code writes such a header */
/* Append an episode that ends with a record to a list; before `note_state`. */
int append_end(const Codec *codec, Py_ssize_t number, const Header *header, PyObject *ended);
/* Note who is alive and acts after a record, and its rewards. It cannot fail, and comes last. */
void note_state(const Codec *codec, Py_ssize_t number, const Header *header);

/* -- actions.c ----------------------------------------------------------------------------------------------------- */

extern const char write_doc[], put_actions_doc[];
PyObject *codec_write(PyObject *self, PyObject *args);
PyObject *codec_put_actions(PyObject *self, PyObject *args);
PyObject *read_actions(const Codec *codec, char *record); /* NULL without an error if some agents have no column */

/* -- write_transitions.c ------------------------------------------------------------------------------------------- */

extern const char put_doc[];
PyObject *codec_put(PyObject *self, PyObject *args);
/* Write a plain transition; DONE_BUT_INFOS if its infos have to be pickled. */
Outcome write_transition(const Codec *codec, char *record, PyObject *dicts, Py_ssize_t turn);
/* Write any transition of known agents and numbers whose episode goes on, and update who is alive. */
Outcome write_any(const Codec *codec, char *record, PyObject *result, PyObject *rules, unsigned char *before,
                  PyObject *is_forked);
/* Check that an agent is left, by PettingZoo's rules; LEFT if no agent is. */
Outcome note_left(const Codec *codec, PyObject *agents_left, const unsigned char *lives);

/* -- read_transitions.c -------------------------------------------------------------------------------------------- */

extern const char read_doc[], parts_doc[];
PyObject *codec_read(PyObject *self, PyObject *args);
PyObject *codec_parts(PyObject *self, PyObject *args);
/* Read the infos of a record, and append the end of its episode; LEFT if Python has to read the record. */
Outcome read_infos_and_end(const Codec *codec, PyObject *env_id, Py_ssize_t number, const Header *header,
                           PyObject *leftovers, int copy, int with_infos, PyObject *ended, int *has_mask,
                           PyObject **infos);

/* -- arrays.c ------------------------------------------------------------------------------------------------------ */

extern const char read_arrays_doc[], write_arrays_doc[];
PyObject *codec_read_arrays(PyObject *self, PyObject *args);
PyObject *codec_write_arrays(PyObject *self, PyObject *args);

/* -- steps.c ------------------------------------------------------------------------------------------------------- */

extern const char run_doc[], lives_doc[], sums_doc[];
PyObject *codec_run(PyObject *self, PyObject *args);
PyObject *codec_lives(PyObject *self, PyObject *args);
PyObject *codec_sums(PyObject *self, PyObject *ignored);

/* -- waiting.c ----------------------------------------------------------------------------------------------------- */

double monotonic(void); /* seconds, as of `time.monotonic`; an exception may be set, and stays set */
#ifdef __linux__
extern const char try_for_doc[], exchange_doc[];
void find_clock_wait(void); /* looks for a function that not every C library has */
PyObject *try_for(PyObject *self, PyObject *args);
PyObject *exchange(PyObject *self, PyObject *args);
#endif

#ifdef __GNUC__
#pragma GCC visibility pop
#endif

/* -- small functions that run for each agent ----------------------------------------------------------------------- */

/* Whether an object is a dict that Python iterates over as this code does; PettingZoo's conversions return the other. */
static inline int is_dict(PyObject *object) {
    return PyDict_CheckExact(object) || (PyObject *)Py_TYPE(object) == defaultdict;
}

/* Whether a key equals `own`. If so, the key is stored in `used`, if that is passed, for the next comparison. */
static inline int same_key(PyObject *key, PyObject *own, PyObject **used) {
    if (key == own || (used != NULL && key == *used)) return 1;
    int comparable = (PyUnicode_CheckExact(key) && PyUnicode_CheckExact(own)) ||
                     (PyLong_CheckExact(key) && PyLong_CheckExact(own)); /* comparing others may run any code */
    int same = comparable ? PyObject_RichCompareBool(key, own, Py_EQ) : 0;
    if (same == 1 && used != NULL) {
        PyObject *before = *used;
        Py_INCREF(key);
        *used = key;
        Py_XDECREF(before);
    }
    return same;
}

/* The latest keys of the simulator of a record. */
static inline PyObject **keys_of(const Codec *codec, const char *record) {
    return codec->keys + (record - codec->base) / codec->stride * codec->n;
}

/* The place of an agent; LEFT if it is unknown, or not a string or an integer. */
static inline Outcome place_of(const Codec *codec, PyObject *key, Py_ssize_t *place) {
    if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return LEFT;
    PyObject *found = PyDict_GetItemWithError(codec->places, key);
    if (found == NULL) return PyErr_Occurred() ? FAILED : LEFT;
    *place = PyLong_AsSsize_t(found);
    return DONE;
}

/* Set the value of an agent, which is stolen. After an error, or if the value is NULL, the dict becomes NULL. */
static inline void set_value(const Codec *codec, PyObject **dict, Py_ssize_t agent, PyObject *value) {
    if (value == NULL || PyDict_SetItem(*dict, PyTuple_GetItem(codec->agents, agent), value) < 0) Py_CLEAR(*dict);
    Py_XDECREF(value);
}

/* The bits of a record's agents in `states`. */
static inline unsigned char *state_of(const Codec *codec, Py_ssize_t record) {
    return codec->states + record * (codec->n + 1);
}

/* The header of the transition in a record; its parts are not copied. */
static inline Header header_of(const Codec *codec, const char *record) {
    size_t n = (size_t)codec->n;
    const char *header = record + codec->header;
    const unsigned char *tags = (const unsigned char *)header + 8 + 8 * n;
    return (Header){
        *(const uint64_t *)header, (const double *)(header + 8), tags, {tags + n, tags + 2 * n + 1}, tags + 3 * n + 2,
        tags + 4 * n + 2,
    };
}

#endif
