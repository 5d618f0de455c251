/* Converts actions and transitions between Python objects and the block of shared memory. Also waits for processes:
   `try_for`, and `exchange` for a step of all environments.

   A `Codec` does for many environments in one call what `records.py`, `block_transitions.py` and `episode.py` do for one:

       caller   write, write_arrays   actions into records        read, read_arrays   records into dicts, or into arrays
       worker   run     actions out of records, the simulator's step, its transition into the record
                put     a transition that `Episode` has interpreted, such as the transition of a reset

   A function stops at a case that it does not support, or leaves it out, and returns the place: Python continues there.
   So the results are the same as with Python alone (`MARL_PARALLEL_PURE=1`). Infos of simple values lie in the block,
   where an info that several agents share becomes one info for each agent. All offsets, codes and types come from
   Python (`codec.py`).

   This file supports every transition of agents that are known beforehand, with values that fit their columns: any
   agents may be in any dict, die, come late and come back, and the next episode may begin in the same step. For `run`,
   `lives` has which agents are alive, by the rules of `Episode`. Python handles the end of an episode, agents that come
   back, and adapters with methods to call. For the caller, `states` has who is alive and acts after the latest read.

   The most frequent transition is plain, and has a fast path: every agent is in every dict, in order; all rewards are
   numbers of one type, all flags False and of one type, and all infos dicts. Infos may be missing, and so may all flags
   except `__all__`. All agents act next, or only the agent whose turn it is: a `turn` is 0 for all agents, else the
   agent's place plus one. Keys are equal if they are the same object, or equal strings or integers.

   The header of a transition: a code of 8 bytes, rewards 8n, types of rewards n, terminated n + 1, truncated n + 1,
   presence n, events n, for the n agents. The code is written last. Its bits are below; the code of a plain transition also has
   the type of the rewards, the type of the flags, and the turn. The events say what the transition means in each
   agent's life; `Episode` decides the same.

   Built for the limited API of Python 3.10: one file for all later releases. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <dlfcn.h>
#include <sched.h>
#include <semaphore.h>
#include <time.h>
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

/* Bits of a code. INFOS: infos are pickled; NO_INFOS: there are none at all; ONLY_ALL: no flags but `__all__`; RESET: in
   a plain transition, all agents begin a life. Python has another bit, for records that Python has written. */
enum { PLAIN = 1, INFOS = 2, FINAL = 4, INFOS_IN_BLOCK = 8, NO_INFOS = 16, ONLY_ALL = 32, RESET = 128, NOT_PLAIN = 0x44 };
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
enum { NP_FALSE_CODE = 2, NP_TRUE_CODE = 3, TYPE_OF_TAG = 15, VECTOR_TAG = 15, NO_AXIS = 16, ONE_AXIS = 32 }; /* see `tag_of` in `columns.py` */
#define LARGEST_EXACT 9007199254740992LL /* 2**53 */
#define STEP_TIMES 112 /* `StepTimes.SIZE` */

static PyObject *name_fast, *name_infos, *name_metadata, *name_final_obs, *name_reset_info, *time_monotonic, *defaultdict;
static const char action_mask[] = "action_mask";
static PyArray_Descr *int64_dtype, *double_dtype;

/* Seconds, as of `time.monotonic`. An exception may be set, and stays set. */
static double monotonic(void) {
#ifdef __linux__
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return (double)moment.tv_sec + 1e-9 * (double)moment.tv_nsec;
#else
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback); /* the simulator's */
    PyObject *moment = PyObject_CallNoArgs(time_monotonic);
    double seconds = moment == NULL ? 0.0 : PyFloat_AsDouble(moment);
    Py_XDECREF(moment);
    PyErr_Restore(error_type, error, traceback);
    return seconds;
#endif
}

/* -- memory of large arrays --------------------------------------------------------------------------------------- */

/* The system maps large memory anew for each array, and the first use of each page is a page fault: that takes longer
   than the copy. So the memory of returned arrays is used again once nothing refers to it. For each size, at most as
   many pieces are kept as two batches have arrays of this size (`keep`). NumPy calls these functions with the GIL, and
   returns memory to the functions that it came from. */

enum { LARGE = 1 << 16, MORE_SIZES = 16 };

/* Before each piece of memory; its size is the alignment of malloc. */
typedef union Piece {
    struct {
        size_t size;
        union Piece *next;     /* the next one that is kept */
    } of;
    char aligned[64];
} Piece;

typedef struct {
    size_t size;
    Py_ssize_t count, most;    /* `most` is positive: a size that no codec has any more is removed */
    Piece *first;
} Kept;

static Kept *kept;
static int sizes, room;        /* how many sizes there are, and for how many there is room */

/* The place of a size; `sizes` if it is new. */
static int place_of_size(size_t size) {
    int place = 0;
    while (place < sizes && kept[place].size != size) place++;
    return place;
}

/* Keep more or fewer pieces of a size. Without memory for a new size, none is kept. */
static void keep(size_t size, Py_ssize_t more) {
    int place = place_of_size(size);
    if (size < LARGE || (place == sizes && more <= 0)) return;
    if (place == sizes) {
        if (sizes == room) {
            Kept *larger = realloc(kept, (size_t)(room + MORE_SIZES) * sizeof(Kept));
            if (larger == NULL) return;
            kept = larger;
            room += MORE_SIZES;
        }
        kept[sizes++] = (Kept){.size = size};
    }
    kept[place].most += more;
    while (kept[place].count > 0 && kept[place].count > kept[place].most) {
        Piece *piece = kept[place].first;
        kept[place].first = piece->of.next;
        kept[place].count -= 1;
        free(piece);
    }
    if (kept[place].most <= 0) kept[place] = kept[--sizes];
}

static void *new_piece(void *Py_UNUSED(context), size_t size) {
    int place = size < LARGE ? sizes : place_of_size(size);
    Piece *piece;
    if (place < sizes && kept[place].count > 0) {
        piece = kept[place].first;
        kept[place].first = piece->of.next;
        kept[place].count -= 1;
    } else if ((piece = malloc(sizeof(Piece) + size)) == NULL) {
        return NULL;
    }
    piece->of.size = size;
    return piece + 1;
}

static void *new_zeros(void *Py_UNUSED(context), size_t count, size_t size) {
    if (size > 0 && count > (SIZE_MAX - sizeof(Piece)) / size) return NULL;
    Piece *piece = calloc(1, sizeof(Piece) + count * size);
    if (piece == NULL) return NULL;
    piece->of.size = count * size;
    return piece + 1;
}

static void *resized(void *Py_UNUSED(context), void *memory, size_t size) {
    Piece *piece = realloc(memory == NULL ? NULL : (Piece *)memory - 1, sizeof(Piece) + size);
    if (piece == NULL) return NULL;
    piece->of.size = size;
    return piece + 1;
}

static void free_piece(void *Py_UNUSED(context), void *memory, size_t Py_UNUSED(size)) {
    if (memory == NULL) return;
    Piece *piece = (Piece *)memory - 1;
    int place = piece->of.size < LARGE ? sizes : place_of_size(piece->of.size);
    if (place == sizes || kept[place].count >= kept[place].most) {
        free(piece);
        return;
    }
    piece->of.next = kept[place].first;
    kept[place].first = piece;
    kept[place].count += 1;
}

static PyDataMem_Handler memory_handler = {
    "marl_parallel", 1, {NULL, new_piece, new_zeros, resized, free_piece},
};
static PyObject *memory_capsule;

/* Let new arrays in this thread use this memory; returns the previous setting. */
static PyObject *use_kept(int on) {
    return on ? PyDataMem_SetHandler(memory_capsule) : NULL;
}

/* Restore the setting `before`, which `use_kept` has returned. */
static void use_other(PyObject *before) {
    if (before == NULL) return;
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback); /* setting it calls Python */
    Py_XDECREF(PyDataMem_SetHandler(before));
    PyErr_Restore(error_type, error, traceback);
    Py_DECREF(before);
}

PyDoc_STRVAR(keep_doc,
    "keep(size, more) -> int\n--\n\n"
    "Keep `more` further pieces of memory of a size in bytes (fewer if negative) for arrays of `Codec`.\n"
    "Returns how many unused pieces there are now.");

static PyObject *keep_sizes(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_ssize_t size, more;
    if (!PyArg_ParseTuple(args, "nn:keep", &size, &more)) return NULL;
    if (size > 0) keep((size_t)size, more);
    int place = size > 0 ? place_of_size((size_t)size) : sizes;
    return PyLong_FromSsize_t(place < sizes ? kept[place].count : 0);
}

/* -- one value ---------------------------------------------------------------------------------------------------- */

/* Set the error for a record that no writer has written; returns NULL. Like `damaged` in `columns.py`. */
static PyObject *damaged(const Codec *codec, const char *record) {
    return PyErr_Format(PyExc_ValueError,
                        "the record of environment %zd is damaged: native code has overwritten shared memory. Find it with a "
                        "memory checker; until then, pass shared_memory=False",
                        (record - codec->base) / codec->stride);
}

/* A value that was read; if that failed by what the record contains, NULL with the error for damage. */
static PyObject *read_or_damaged(const Codec *codec, const char *record, PyObject *value) {
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
static int has_metadata(PyArrayObject *array) {
    PyObject *metadata = PyObject_GetAttr((PyObject *)PyArray_DESCR(array), name_metadata);
    if (metadata == NULL) PyErr_Clear();
    Py_XDECREF(metadata);
    return metadata != Py_None;
}

/* The tag of a number, or of an array of one element: the place of its type in `types`; -1 for other types. */
static int tag_of(PyObject *types, PyObject *value) {
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
static int is_form(int tag) {
    int of_array = tag & ~TYPE_OF_TAG;
    return of_array == 0 || of_array == NO_AXIS || of_array == ONE_AXIS;
}

/* Whether `tag_of` may have returned a tag for these types. */
static int is_tag(PyObject *types, int tag) {
    return is_form(tag) && (tag & TYPE_OF_TAG) < PyTuple_Size(types);
}

/* The number in an array of one element as an array scalar; other values as they are. */
static PyObject *number_in(PyObject *value, int tag) {
    if (tag > TYPE_OF_TAG) return PyArray_ToScalar(PyArray_DATA((PyArrayObject *)value), (PyArrayObject *)value);
    Py_INCREF(value);
    return value;
}

/* Turn a Python number, which is stolen, into a number of a type, or into an array of one element. */
static PyObject *with_tag(PyObject *types, int tag, PyObject *number) {
    PyObject *type = PyTuple_GetItem(types, tag & TYPE_OF_TAG), *value = NULL;
    if (number == NULL || type == (PyObject *)Py_TYPE(number)) return number;
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
static Outcome integer_of(PyObject *value, long long *number) {
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

static Outcome write_value(const Codec *codec, const Node *node, char *record, PyObject *value) {
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

static PyObject *read_reward(const Codec *codec, const char *record, double number, int tag) {
    if (tag < PyTuple_Size(codec->reward_types) &&
        PyTuple_GetItem(codec->reward_types, tag) == (PyObject *)double_dtype->typeobj)
        return PyArray_Scalar(&number, double_dtype, NULL);
    if (!is_form(tag)) return damaged(codec, record);
    if ((tag & TYPE_OF_TAG) >= codec->floats && !is_integer(number)) return damaged(codec, record);
    return read_or_damaged(codec, record, with_tag(codec->reward_types, tag, PyFloat_FromDouble(number)));
}

/* One value as a new object; `copy` tells how arrays are read. */
static PyObject *read_value(const Codec *codec, const Node *node, char *record, int copy) {
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

/* -- infos in the block ------------------------------------------------------------------------------------------- */

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

/* Write the infos of one environment; LEFT if they have to be pickled. */
static Outcome write_infos(const Codec *codec, char *record, PyObject *infos) {
    char *start = record + codec->infos;
    if (codec->infos_nbytes < 8) return LEFT;
    Area area = {start + 8, start + codec->infos_nbytes, 0, 0};
    Outcome outcome = put_value(&area, infos, 0);
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

/* -- the dicts of all agents -------------------------------------------------------------------------------------- */

/* Whether an object is a dict that Python iterates over as this file does; PettingZoo's conversions return the other. */
static int is_dict(PyObject *object) {
    return PyDict_CheckExact(object) || (PyObject *)Py_TYPE(object) == defaultdict;
}

/* Whether a key equals `own`. If so, the key is stored in `used`, if that is passed, for the next comparison. */
static int same_key(PyObject *key, PyObject *own, PyObject **used) {
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
static PyObject **keys_of(const Codec *codec, const char *record) {
    return codec->keys + (record - codec->base) / codec->stride * codec->n;
}

/* The values of a dict whose keys are all agents in order, as borrowed references; LEFT for any other object. */
static Outcome values_in_order(const Codec *codec, PyObject *dict, PyObject **values, PyObject **keys) {
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

/* Write the values of a dict of all agents into a record. After LEFT, some may have been written. */
static Outcome write_values(const Codec *codec, const Node *nodes, char *record, PyObject *dict) {
    Outcome outcome = values_in_order(codec, dict, codec->values, keys_of(codec, record));
    if (outcome != DONE) return outcome;
    for (Py_ssize_t i = 0; i < codec->n; i++) Py_INCREF(codec->values[i]); /* a cast may warn and so run any code */
    for (Py_ssize_t i = 0; i < codec->n && outcome == DONE; i++)
        outcome = write_value(codec, &nodes[i], record, codec->values[i]);
    for (Py_ssize_t i = 0; i < codec->n; i++) Py_DECREF(codec->values[i]);
    return outcome;
}

/* Write a plain transition; DONE_BUT_INFOS if its infos have to be pickled. */
static Outcome write_transition(const Codec *codec, char *record, PyObject *dicts, Py_ssize_t turn) {
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
    if ((outcome = write_values(codec, codec->observations, record, PyTuple_GetItem(dicts, 0))) != DONE)
        return outcome;
    char *header = record + codec->header;
    volatile uint64_t *word = (volatile uint64_t *)header;
    size_t n = (size_t)codec->n;
    uint64_t code = PLAIN | (uint64_t)tag << REWARD_SHIFT | (uint64_t)flag_code << FLAG_SHIFT;
    code |= (uint64_t)turn << TURN_SHIFT | (none ? NO_INFOS : 0) | (only_all ? ONLY_ALL : 0);
    if (!are_empty) {
        *word = 0; /* a worker that dies here leaves no code that does not hold */
        code |= write_infos(codec, record, infos) == DONE ? INFOS_IN_BLOCK : INFOS;
    }
    memcpy(header + 8, codec->rewards, 8 * n);
    if (*word != code) { /* else the rest of the header is correct already */
        char *next = header + 8 + 8 * n;
        *word = 0;
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
        *word = code;
    }
    return code & INFOS ? DONE_BUT_INFOS : DONE;
}

/* The place of an agent; LEFT if it is unknown, or not a string or an integer. */
static Outcome place_of(const Codec *codec, PyObject *key, Py_ssize_t *place) {
    if (!PyUnicode_CheckExact(key) && !PyLong_CheckExact(key)) return LEFT;
    PyObject *found = PyDict_GetItemWithError(codec->places, key);
    if (found == NULL) return PyErr_Occurred() ? FAILED : LEFT;
    *place = PyLong_AsSsize_t(found);
    return DONE;
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
} Draft;

static Draft empty_draft(const Codec *codec) {
    size_t n = (size_t)codec->n;
    unsigned char *tags = codec->scratch, *presence = tags + 3 * n + 2;
    memset(codec->scratch, 0, 6 * n + 2);
    memset(codec->rewards, 0, 8 * n);
    return (Draft){tags, {tags + n, tags + 2 * n + 1}, presence, presence + n, presence + 2 * n,
                   codec->values, codec->values + n, codec->values + 2 * n, {0, 0}, 0, 0, 1};
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
        if (!PyDict_CheckExact(info)) return LEFT;
        Outcome outcome = PyDict_Size(info) == 0 ? place_of(codec, key, &agent) : LEFT;
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

/* Which agents are alive after a step, and the events in their lives, by the rules of `Episode`; LEFT if an agent has
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
static Outcome note_left(const Codec *codec, PyObject *agents_left, const unsigned char *lives) {
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
    *word = 0; /* a worker that dies here leaves no code that does not hold */
    if (infos != NULL) code |= write_infos(codec, record, infos) == DONE ? INFOS_IN_BLOCK : INFOS;
    if (!(code & FINAL)) code = code_of(codec, code, draft, no_infos);
    memcpy(header + 8, codec->rewards, 8 * n);
    memcpy(header + 8 + 8 * n, codec->scratch, 5 * n + 2);
    *word = code;
    return code & INFOS ? DONE_BUT_INFOS : DONE;
}

/* Write any transition of known agents and numbers whose episode goes on, and update who is alive. `rules` are those of
   the attribute `fast` of `Episode`. */
static Outcome write_any(const Codec *codec, char *record, PyObject *result, PyObject *rules, unsigned char *before,
                         PyObject *is_forked) {
    if (!PyTuple_CheckExact(result) || PyTuple_Size(result) != 5 || codec->observations == NULL) return LEFT;
    PyObject *dicts[5], *agents_left = PyTuple_GetItem(rules, 0);
    for (int i = 0; i < 5; i++) dicts[i] = PyTuple_GetItem(result, i);
    Draft draft = empty_draft(codec);
    Outcome outcome = note_dicts(codec, dicts, &draft);
    if (outcome == DONE && draft.over) outcome = LEFT;
    if (outcome == DONE) outcome = note_lives(codec, before, &draft);
    if (outcome == DONE && agents_left == Py_None && !draft.all[0]) outcome = check_any_alive(codec, draft.lives);
    if (outcome != DONE) return outcome;
    hold(codec, &draft, 1);
    if (agents_left != Py_None && !(draft.all[0] && draft.all[1])) outcome = note_left(codec, agents_left, draft.lives);
    if (outcome == DONE && *PyByteArray_AsString(is_forked)) outcome = LEFT; /* Python ends this process */
    if (outcome == DONE) outcome = write_draft_values(codec, record, &draft);
    hold(codec, &draft, 0);
    if (outcome != DONE) return outcome;
    outcome = write_header(codec, record, &draft, 0, draft.are_empty ? NULL : dicts[4], PyDict_Size(dicts[4]) == 0);
    memcpy(before, draft.lives, (size_t)codec->n);
    return outcome;
}

/* A dict for a value of each agent; copying one and replacing its values is quicker than letting a new one grow. */
static PyObject *new_dict(const Codec *codec) {
    return codec->n > 5 ? PyDict_Copy(codec->no_values) : PyDict_New();
}

/* Set the value of an agent, which is stolen. After an error, or if the value is NULL, the dict becomes NULL. */
static void set_value(const Codec *codec, PyObject **dict, Py_ssize_t agent, PyObject *value) {
    if (value == NULL || PyDict_SetItem(*dict, PyTuple_GetItem(codec->agents, agent), value) < 0) Py_CLEAR(*dict);
    Py_XDECREF(value);
}

static PyObject *read_values(const Codec *codec, const Node *nodes, char *record, int copy) {
    PyObject *dict = new_dict(codec);
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        set_value(codec, &dict, i, read_value(codec, &nodes[i], record, copy));
    return dict;
}

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

static char *record_of(const Codec *codec, PyObject *env_id, Py_ssize_t *number) {
    *number = PyLong_AsSsize_t(env_id);
    if (*number >= 0 && *number < codec->records) return codec->base + *number * codec->stride;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "there is no record %zd", *number);
    return NULL;
}

static unsigned char *state_of(const Codec *codec, Py_ssize_t record) {
    return codec->states + record * (codec->n + 1);
}

static int any_has(const Codec *codec, const unsigned char *presence, int bit) {
    int any = 0;
    for (Py_ssize_t i = 0; i < codec->n; i++) any |= presence[i] & bit;
    return any;
}

/* The list of agents that have a bit: a new list, or the list of all agents. */
static PyObject *agents_with(const Codec *codec, const unsigned char *presence, int bit) {
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

/* -- methods ------------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(write_doc,
    "write(env_ids, actions, first, all_count, needs_all) -> int\n--\n\n"
    "Write dicts of actions from the place `first` on: actions of agents that act, or with `all_count`, all in the\n"
    "dict, where actions may be missing unless `needs_all`. `read` has noted who acts. Returns the place where it\n"
    "stopped: Python writes that environment's actions.");

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

static PyObject *codec_write(PyObject *self, PyObject *args) {
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

/* The infos of a record, borrowed; NULL without an error if Python has to read it. */
static PyObject *pickled_infos(PyObject *leftovers, PyObject *env_id) {
    PyObject *own = PyDict_GetItemWithError(leftovers, env_id);
    if (own == NULL || !PyDict_CheckExact(own) || PyDict_Size(own) != 1) return NULL;
    return PyDict_GetItemWithError(own, name_infos);
}

/* The parts of the header of a transition. */
typedef struct {
    uint64_t code;
    const double *rewards;
    const unsigned char *tags, *flags[2], *presence, *events;
} Header;

static Header header_of(const Codec *codec, const char *record) {
    size_t n = (size_t)codec->n;
    const char *header = record + codec->header;
    const unsigned char *tags = (const unsigned char *)header + 8 + 8 * n;
    return (Header){
        *(const uint64_t *)header, (const double *)(header + 8), tags, {tags + n, tags + 2 * n + 1}, tags + 3 * n + 2,
        tags + 4 * n + 2,
    };
}

/* Whether a code is one that this file writes. */
static int is_code(const Codec *codec, uint64_t code) {
    if (code & INFOS && code & INFOS_IN_BLOCK) return 0;
    if (!(code & PLAIN)) return !(code & ~(uint64_t)(INFOS | INFOS_IN_BLOCK | FINAL));
    uint64_t flag = code >> FLAG_SHIFT & 0xFF;
    return !(code & NOT_PLAIN) && is_tag(codec->reward_types, (int)(code >> REWARD_SHIFT & 0xFF)) &&
           (flag == 0 || flag == NP_FALSE_CODE) && code >> TURN_SHIFT <= (uint64_t)codec->n;
}

/* Whether Python has to read a record: Python has written it, it is damaged, or statistics need Python. */
static int is_left(const Codec *codec, const Header *header) {
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

/* Whether the header of a record is one that this file writes. */
static int is_header(const Codec *codec, const Header *header) {
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

/* Note who is alive and acts after a record, and whether its episode is over; and its rewards. Append an episode that has
   ended to a list: the environment, and the flags of `__all__`. */
static int note_state(const Codec *codec, Py_ssize_t number, const Header *header, PyObject *ended) {
    Py_ssize_t n = codec->n;
    unsigned char *state = state_of(codec, number);
    int terminated = header->flags[0][n] & 1, truncated = header->flags[1][n] & 1, over = terminated | truncated;
    int stays_over = over && state[n] & OVER;
    for (Py_ssize_t i = 0; i < n; i++) {
        int died = !over && header->events[i] & (LIFE_ENDED | WAS_DEAD) && !(header->presence[i] & ALIVE_BIT);
        state[i] = (header->presence[i] & (ALIVE_BIT | ACTING_BIT)) | (died ? ENDED_BIT : 0);
    }
    state[n] = KNOWN | (over && !codec->same_step ? OVER : 0);
    if (codec->totals == NULL || stays_over) return 0;
    add_totals(codec, number, header);
    if (!over) return 0;
    PyObject *one = Py_BuildValue("(nii)", number, terminated, truncated);
    int failed = one == NULL || PyList_Append(ended, one) < 0;
    Py_XDECREF(one);
    return failed ? -1 : 0;
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
    if (info == NULL) {
        if ((info = PyDict_New()) == NULL) return -1;
        int failed = PyDict_SetItem(infos, key, info) < 0;
        Py_DECREF(info);
        if (failed) return -1;
    }
    int has_it = PyDict_CheckExact(info) ? PyDict_Contains(info, name) : 1;
    return has_it != 0 ? (has_it < 0 ? -1 : 0) : PyDict_SetItem(info, name, value);
}

/* Add last observations and the infos of an automatic reset, as `with_final` in `episode.py` does. */
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

/* The infos of a record in the block; with final observations, `reset` gets the infos of the automatic reset. */
static PyObject *infos_in_block(const Codec *codec, const Header *header, char *record, int *has_mask, PyObject **reset) {
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

/* Note what a record says, as `note_state`. `infos` is a new reference, NULL if all are empty, or without `with_infos`.
   LEFT if Python has to read it. */
static Outcome note_record(const Codec *codec, PyObject *env_id, Py_ssize_t number, const Header *header, PyObject *leftovers,
                           int copy, int with_infos, PyObject *ended, int *has_mask, PyObject **infos) {
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
    if (!failed) failed = note_state(codec, number, header, ended) < 0;
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
    Outcome outcome = note_record(codec, env_id, number, &header, leftovers, copy, 1, ended, has_mask, &infos);
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

PyDoc_STRVAR(read_doc,
    "read(env_ids, leftovers, copy)\n"
    "    -> (observations, rewards, terminateds, truncateds, infos), (left, masked, ended) | None\n"
    "--\n\n"
    "Read records: five tuples of dicts, and None. If Python has more to do, five lists of dicts, None for the environments\n"
    "that are `left`. `leftovers` is a dict by environment; arrays are copies, or views of the block. `masked` are the\n"
    "environments that have an action mask among the infos in the block, `ended` those whose episode has ended, with the\n"
    "flags of `__all__`. Notes who acts and is alive, and adds rewards to the totals that the Codec was made with.");

static PyObject *codec_read(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_ids, *leftovers, *lists[8] = {NULL}, *before = NULL; /* the last three: left, masked, ended */
    int copy, has_mask;
    if (!PyArg_ParseTuple(args, "O!O!p:read", &PyTuple_Type, &env_ids, &PyDict_Type, &leftovers, &copy)) return NULL;
    Py_ssize_t size = PyTuple_Size(env_ids);
    int is_large = copy && codec->has_large;
    if (is_large && (before = use_kept(1)) == NULL) return NULL;
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
    if (PyList_Size(lists[5]) == 0 && PyList_Size(lists[6]) == 0 && PyList_Size(lists[7]) == 0 &&
        PyDict_Size(leftovers) == 0) {
        for (int i = 0; i < 5; i++) {
            PyObject *column = PyList_AsTuple(lists[i]);
            Py_DECREF(lists[i]);
            if ((lists[i] = column) == NULL) goto failed;
        }
        for (int i = 5; i < 8; i++) Py_CLEAR(lists[i]);
        return Py_BuildValue("((NNNNN)O)", lists[0], lists[1], lists[2], lists[3], lists[4], Py_None);
    }
    return Py_BuildValue("([NNNNN](NNN))", lists[0], lists[1], lists[2], lists[3], lists[4], lists[5], lists[6], lists[7]);
failed:
    use_other(before);
    for (int i = 0; i < 8; i++) Py_XDECREF(lists[i]);
    return NULL;
}

/* -- infos as arrays over neighbouring environments ----------------------------------------------------------------- */

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
static PyObject *info_table(const Codec *codec, Py_ssize_t start, Py_ssize_t stop) {
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

/* Whether all infos of an environment are `{}`. */
static int are_empty_infos(PyObject *infos) {
    Py_ssize_t position = 0;
    PyObject *key, *info;
    int are_empty = PyDict_Check(infos);
    while (are_empty && PyDict_Next(infos, &position, &key, &info))
        are_empty = PyDict_CheckExact(info) && PyDict_Size(info) == 0;
    return are_empty;
}

/* -- arrays over neighbouring environments -------------------------------------------------------------------------- */

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

/* Whether a range of records exists; else an error is set. */
static int are_records(const Codec *codec, Py_ssize_t start, Py_ssize_t stop) {
    if (start >= 0 && start <= stop && stop <= codec->records) return 1;
    PyErr_Format(PyExc_IndexError, "there are no records %zd to %zd", start, stop);
    return 0;
}

/* Whether a record is plain, all agents act, and there are no infos. */
static int is_simple(uint64_t code) {
    return (code >> TURN_SHIFT) == 0 && (code & (PLAIN | INFOS | INFOS_IN_BLOCK | ONLY_ALL | RESET | NOT_PLAIN)) == PLAIN;
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
    int is_large = targets == Py_None && codec->has_large, failed = is_large && (before = use_kept(1)) == NULL;
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

PyDoc_STRVAR(read_arrays_doc,
    "read_arrays(start, stop, leaves, targets, written, leftovers, copy, as_table, notes, nobody, no_envs)\n"
    "    -> list, (left, masked, ended) | None\n--\n\n"
    "Read neighbouring records as arrays: the list has the fields of `Arrays`, without vector rewards and last observations; `nobody`\n"
    "and `no_envs` are read-only fields of events that did not happen. `leaves` are pairs\n"
    "of a view of the block, `(records, agents, ...)`, and the agents' places; each is an array among the observations:\n"
    "new ones, or the `targets`, a list, which may have been `written` already. If there is more to do, the rest is as of\n"
    "`read`, and so is `copy`, for last observations. Rows of environments that are `left` are filled too, as far as their records tell. Without `notes`, nothing\n"
    "is noted, and there are no infos. `as_table`, infos are a tuple if all have the same keys, with numbers: arrays by\n"
    "key, `(records, agents)`, the keys with numbers of Python, and which agents have infos.");

static PyObject *codec_read_arrays(PyObject *self, PyObject *args) {
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
            outcome = note_record(codec, number, i, &header, leftovers, copy, !as_table, found[3], &has_mask, &infos);
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
finally:
    Py_DECREF(observations);
    for (int field = 0; field < FIELDS; field++) Py_XDECREF(arrays[field]);
    for (int i = 0; i < 4; i++) Py_XDECREF(found[i]);
    return result;
}

PyDoc_STRVAR(acting_doc,
    "acting(start, stop) -> array | None\n--\n\n"
    "Which agents act in neighbouring environments, by what `read` and `read_arrays` have noted: bool `(records, agents)`.\n"
    "None if all agents act; rows of which nothing is known are False.");

static PyObject *codec_acting(PyObject *self, PyObject *args) {
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

PyDoc_STRVAR(write_arrays_doc,
    "write_arrays(start, stop, columns, values, acting) -> bool\n--\n\n"
    "Write the actions of all agents in neighbouring records. `columns` has, for each array of `values`, a view of the block\n"
    "of its shape, and the tags of its numbers, None if it has none, with their tag. `acting` is None if all actions count,\n"
    "else bool `(records, agents)`. Returns False if the values are no arrays of these shapes, or of dtypes that not every\n"
    "number would survive; then nothing counts as written.");

static PyObject *codec_write_arrays(PyObject *self, PyObject *args) {
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

PyDoc_STRVAR(forget_doc,
    "forget(env_id, over)\n--\n\n"
    "Forget who acts and is alive in an environment: its record does not have it. Its episode is `over`, or not.");

static PyObject *codec_forget(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_id;
    Py_ssize_t number;
    int over;
    if (!PyArg_ParseTuple(args, "Op:forget", &env_id, &over) || record_of(codec, env_id, &number) == NULL) return NULL;
    state_of(codec, number)[codec->n] = over ? OVER : 0;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(agents_doc,
    "agents_of(start, stop, bit) -> list\n--\n\n"
    "The lists of agents in neighbouring environments that act next (64), are alive (32), or have ended and not come back\n"
    "(1), as noted last; empty for environments without notes. The lists are read-only.");

static PyObject *codec_agents_of(PyObject *self, PyObject *args) {
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

PyDoc_STRVAR(is_over_doc,
    "is_over(env_id) -> bool\n--\n\nWhether an episode is over by what was noted last, and no reset has followed.");

static PyObject *codec_is_over(PyObject *self, PyObject *env_id) {
    Codec *codec = (Codec *)self;
    Py_ssize_t number;
    if (record_of(codec, env_id, &number) == NULL) return NULL;
    return PyBool_FromLong(state_of(codec, number)[codec->n] & OVER);
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

PyDoc_STRVAR(put_doc,
    "put(env_id, transition) -> 0 | 1 | 2\n--\n\n"
    "Write a `Transition`. Returns 1; 2 if its infos, and the infos of its reset, have to be pickled; or 0 if Python has to\n"
    "write it, since it has values other than numbers that fit their spaces, or unknown agents.");

static PyObject *codec_put(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_id, *transition, *parts[10], *pair = NULL;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "OO!:put", &env_id, &PyTuple_Type, &transition)) return NULL;
    char *record = record_of(codec, env_id, &number);
    if (record == NULL) return NULL;
    if (PyTuple_Size(transition) != 10) {
        PyErr_SetString(PyExc_ValueError, "expected a Transition");
        return NULL;
    }
    for (int i = 0; i < 10; i++) parts[i] = PyTuple_GetItem(transition, i);
    PyObject *infos = parts[4], *final = parts[7] == Py_None ? NULL : parts[7];
    PyObject *reset = final == NULL || parts[8] == Py_None ? NULL : parts[8];
    if (codec->observations == NULL || (reset != NULL && !PyDict_CheckExact(reset))) return PyLong_FromLong(0);
    Draft draft = empty_draft(codec);
    Outcome outcome = note_dicts(codec, parts, &draft);
    if (outcome == DONE && !(draft.all[0] && draft.all[1])) outcome = LEFT;
    if (outcome == DONE && final != NULL) outcome = note_observations(codec, final, draft.finals, FINAL_BIT, &draft);
    for (int i = 5; i < 7 && outcome == DONE; i++) {
        PyObject *agents = PySequence_Fast(parts[i], "expected agents");
        if (agents == NULL) return NULL;
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
        hold(codec, &draft, 1);
        outcome = write_draft_values(codec, record, &draft);
        hold(codec, &draft, 0);
    }
    if (outcome == DONE && !(draft.are_empty && reset_is_empty)) {
        if (final != NULL) {
            pair = reset == NULL ? Py_BuildValue("(O{})", infos) : PyTuple_Pack(2, infos, reset);
            if (pair == NULL) return NULL;
        }
        outcome = write_header(codec, record, &draft, final == NULL ? 0 : FINAL, pair == NULL ? infos : pair,
                               PyDict_Size(infos) == 0);
        Py_XDECREF(pair);
    } else if (outcome == DONE) {
        outcome = write_header(codec, record, &draft, final == NULL ? 0 : FINAL, NULL, PyDict_Size(infos) == 0);
    }
    if (outcome == FAILED) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* Ctrl-C */
        PyErr_Clear(); /* Python raises it again */
    }
    return PyLong_FromLong(outcome == DONE ? 1 : outcome == DONE_BUT_INFOS ? 2 : 0);
}

/* The events of each agent that has some. */
static PyObject *read_events(const Codec *codec, const Header *header) {
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < codec->n; i++)
        if (header->events[i]) set_value(codec, &dict, i, PyLong_FromLong(header->events[i]));
    return dict;
}

PyDoc_STRVAR(parts_doc,
    "parts(env_id, copy) -> tuple\n--\n\n"
    "The fields of the `Transition` that `put` or `run` has written; nothing is noted. Infos are None if they are\n"
    "pickled; infos of a reset are None if they are pickled or all empty.");

static PyObject *codec_parts(PyObject *self, PyObject *args) {
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

/* The actions of a record; NULL without an error if some agents have no column. */
static PyObject *read_actions(const Codec *codec, char *record) {
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

/* Count a step by its seconds, like `duration_place` in `worker_status.py`. */
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

PyDoc_STRVAR(run_doc,
    "run(env_ids, first, episodes, status, times, is_forked, after) -> None | (place, letter, value)\n--\n\n"
    "Step environments with the actions in their records, from the place `first` on, and write their transitions.\n"
    "`episodes` is a dict by environment; the attribute `fast` of an episode is None or four: the simulator's `step`;\n"
    "None, or a function whose result is false if Python has to interpret the step; whether this result is a `turn`;\n"
    "and None, or a tuple: who is left, None or a function, and the lives of all agents (see `lives`). Then this file\n"
    "decides who is alive. `status` is the array of the worker's status, `times` that of its step times. `after` is None\n"
    "or called with each environment whose transition is written here, before the next one is stepped.\n"
    "If a simulator forks, the child has a 1 in the bytearray `is_forked`; there, `run` returns as soon as its step\n"
    "does, and writes nothing.\n\n"
    "Returns None when all are done; else where it stopped, a letter, and a value: \"c\" if the step has to be called,\n"
    "\"r\" with what it returned, \"i\" with the infos of a transition that has been written. After an exception,\n"
    "`place` tells where.");

static PyObject *codec_run(PyObject *self, PyObject *args) {
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

PyDoc_STRVAR(lives_doc,
    "lives(env_id, first) -> bytes | None\n--\n\n"
    "The lives of all agents after the steps of `run` that began with these; None without such steps. The byte of an agent\n"
    "has the bit 32 if it is alive, and 1 if a flag of it has been set since it was last seen alive. `first` has one byte\n"
    "more, since only longer bytes are objects of their own.");

static PyObject *codec_lives(PyObject *self, PyObject *args) {
    Codec *codec = (Codec *)self;
    PyObject *env_id, *first;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "OO!:lives", &env_id, &PyBytes_Type, &first)) return NULL;
    if (record_of(codec, env_id, &number) == NULL) return NULL;
    if (codec->first_lives[number] != first) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)codec->lives + number * codec->n, codec->n);
}

PyDoc_STRVAR(sums_doc,
    "sums() -> (seconds, steps)\n--\n\nThe time inside simulators and the number of steps since the last call.");

static PyObject *codec_sums(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    Codec *codec = (Codec *)self;
    double inside = codec->inside;
    long long steps = codec->steps;
    codec->inside = 0.0;
    codec->steps = 0;
    return Py_BuildValue("(dL)", inside, steps);
}

/* -- construction ------------------------------------------------------------------------------------------------- */

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
    codec->agents_list = PySequence_List(agents);
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

static PyType_Spec codec_spec = {
    .name = "marl_parallel.core._codec.Codec",
    .basicsize = sizeof(Codec),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = codec_slots,
};

/* -- waiting ------------------------------------------------------------------------------------------------------ */

#ifdef __linux__

enum { PAUSES = 16 };

/* `sem_clockwait`, which waits until a moment of the monotonic clock; NULL where the C library has none. */
static int (*clock_wait)(sem_t *, clockid_t, const struct timespec *);

/* Let the other thread of this core run alone for some cycles. */
static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Try to take a semaphore for some time without sleeping; other processes may use this CPU. Between two tries, the
   other thread of this core, which may be the caller's, runs alone. */
static int tried_for(sem_t *semaphore, double seconds) {
    for (double until = monotonic() + seconds; sem_trywait(semaphore);) {
        if (monotonic() >= until) return 0;
        for (int i = 0; i < PAUSES; i++) relax();
        sched_yield();
    }
    return 1;
}

PyDoc_STRVAR(try_for_doc,
    "try_for(address, seconds) -> bool\n--\n\n"
    "Try for some seconds to take the semaphore at an address, without sleeping; other processes may use this CPU.");

static PyObject *try_for(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_ssize_t address;
    double seconds;
    if (!PyArg_ParseTuple(args, "nd:try_for", &address, &seconds)) return NULL;
    int taken;
    Py_BEGIN_ALLOW_THREADS
    taken = tried_for((sem_t *)address, seconds);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(taken);
}

/* A worker's queues of requests and replies, from `Queue.addresses` in `process.py`: the addresses of the codes, of the
   semaphore, and of the numbers of codes written and read; and the size in codes. */
typedef struct {
    int64_t codes, ready, counts, capacity;
} Queue;

static uint64_t *code_in(const Queue *queue, int is_read) {
    return (uint64_t *)queue->codes + ((int64_t *)queue->counts)[is_read] % queue->capacity;
}

/* Take a semaphore: try without sleeping, then sleep. Returns how long it took; -1 if it was not posted, in time or
   before a signal came. */
static double wait_for(sem_t *semaphore, double seconds, double patience) {
    double began = monotonic();
    if (seconds > 0 && tried_for(semaphore, seconds < patience ? seconds : patience)) return monotonic() - began;
    struct timespec until;
    clock_gettime(clock_wait == NULL ? CLOCK_REALTIME : CLOCK_MONOTONIC, &until);
    double left = patience - (monotonic() - began);
    int64_t nanoseconds = until.tv_nsec + (int64_t)(1e9 * (left > 0 ? left : 0));
    until.tv_sec += nanoseconds / 1000000000;
    until.tv_nsec = nanoseconds % 1000000000;
    int missed = clock_wait == NULL ? sem_timedwait(semaphore, &until)
                                    : clock_wait(semaphore, CLOCK_MONOTONIC, &until);
    return missed ? -1.0 : monotonic() - began;
}

/* Take the replies of all workers if each has replied with a code; else none. */
static int take_replies(const Queue *queues, Py_ssize_t size, uint64_t code) {
    Py_ssize_t taken = 0;
    int all = 1;
    for (; all && taken < size; taken += all) {
        const Queue *replies = queues + 2 * taken + 1;
        all = sem_trywait((sem_t *)replies->ready) == 0;
        if (all && *code_in(replies, 1) != code) {
            sem_post((sem_t *)replies->ready);
            all = 0;
        }
    }
    for (Py_ssize_t i = 0; i < taken; i++) {
        const Queue *replies = queues + 2 * i + 1;
        if (all) ((int64_t *)replies->counts)[1] += 1;
        else sem_post((sem_t *)replies->ready);
    }
    return all;
}

PyDoc_STRVAR(exchange_doc,
    "exchange(queues, wake, countdown, request, reply, seconds, patience) -> float\n--\n\n"
    "Write a code to each worker and wait for a code of each, at most `patience` seconds, the first `seconds` of them\n"
    "without sleeping. `queues` is an int64 array `(workers, 8)` of the addresses of their queues; `wake` and `countdown`\n"
    "are the addresses of the doorbell's semaphores.\n\n"
    "With `request` 0 it writes nothing, and with a negative `patience` it does not wait: two calls do the work of\n"
    "one, with other work between them.\n\n"
    "Returns how many seconds that took; -1.0 if some worker has not sent the code `reply`, or after a signal: then no\n"
    "reply has been taken.");

static PyObject *exchange(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *array;
    Py_ssize_t wake, countdown;
    unsigned long long request, reply;
    double seconds, patience;
    if (!PyArg_ParseTuple(args, "O!nnKKdd:exchange", &PyArray_Type, &array, &wake, &countdown, &request, &reply,
                          &seconds, &patience))
        return NULL;
    if (PyArray_TYPE((PyArrayObject *)array) != NPY_INT64 || !PyArray_ISCARRAY_RO((PyArrayObject *)array) ||
        PyArray_SIZE((PyArrayObject *)array) % 8 != 0 || PyArray_SIZE((PyArrayObject *)array) == 0) {
        PyErr_SetString(PyExc_ValueError, "queues must be int64 (workers, 8), contiguous");
        return NULL;
    }
    const Queue *queues = PyArray_DATA((PyArrayObject *)array);
    Py_ssize_t size = PyArray_SIZE((PyArrayObject *)array) / 8;
    double waited;
    if (request) sem_init((sem_t *)countdown, 1, (unsigned)(size - 1)); /* the last worker to reply rings */
    for (Py_ssize_t i = 0; request && i < size; i++) {
        const Queue *requests = queues + 2 * i;
        *code_in(requests, 0) = request;
        ((int64_t *)requests->counts)[0] += 1;
        sem_post((sem_t *)requests->ready);
    }
    if (patience < 0) return PyFloat_FromDouble(0.0);
    Py_BEGIN_ALLOW_THREADS
    waited = wait_for((sem_t *)wake, seconds, patience);
    Py_END_ALLOW_THREADS
    if (waited >= 0 && !take_replies(queues, size, reply)) waited = -1.0;
    return PyFloat_FromDouble(waited);
}

#endif

static PyMethodDef functions[] = {
    {"keep", keep_sizes, METH_VARARGS, keep_doc},
#ifdef __linux__
    {"try_for", try_for, METH_VARARGS, try_for_doc},
    {"exchange", exchange, METH_VARARGS, exchange_doc},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_codec", "The compiled fast path of records; see `codec.py`.", -1,
    functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__codec(void) {
    import_array();
    PyObject *time = PyImport_ImportModule("time");
    if (time == NULL) return NULL;
    time_monotonic = PyObject_GetAttrString(time, "monotonic");
    Py_DECREF(time);
    PyObject *collections = PyImport_ImportModule("collections");
    if (collections == NULL) return NULL;
    defaultdict = PyObject_GetAttrString(collections, "defaultdict");
    Py_DECREF(collections);
#ifdef __linux__
    *(void **)&clock_wait = dlsym(RTLD_DEFAULT, "sem_clockwait");
#endif
    memory_capsule = PyCapsule_New(&memory_handler, "mem_handler", NULL);
    if (memory_capsule == NULL) return NULL;
    name_fast = PyUnicode_InternFromString("fast");
    name_infos = PyUnicode_InternFromString("infos");
    name_metadata = PyUnicode_InternFromString("metadata");
    name_final_obs = PyUnicode_InternFromString("final_obs");
    name_reset_info = PyUnicode_InternFromString("reset_info");
    int64_dtype = PyArray_DescrFromType(NPY_INT64);
    double_dtype = PyArray_DescrFromType(NPY_DOUBLE);
    if (time_monotonic == NULL || defaultdict == NULL || name_fast == NULL || name_infos == NULL ||
        name_metadata == NULL || name_final_obs == NULL || name_reset_info == NULL)
        return NULL;
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&codec_spec);
    if (module == NULL || type == NULL || PyModule_AddIntConstant(module, "LARGE", LARGE) < 0 ||
        PyModule_AddObject(module, "Codec", type) < 0) {
        Py_XDECREF(module);
        Py_XDECREF(type);
        return NULL;
    }
    return module;
}
