/* Memory of large arrays.

   The system maps large memory anew for each array, and the first use of each page is a page fault: that takes longer
   than the copy. So the memory of returned arrays is used again once nothing refers to it. For each size, at most as
   many pieces are kept as two batches have arrays of this size (`keep`). NumPy calls these functions with the GIL, and
   returns memory to the functions that it came from. */

#include "codec.h"

enum { MORE_SIZES = 16 };

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
void keep(size_t size, Py_ssize_t more) {
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
static PyObject *unrestored;   /* the setting that could not be restored without memory */

/* Make the object that NumPy knows this memory by. */
int prepare_memory(void) {
    if (memory_capsule == NULL) memory_capsule = PyCapsule_New(&memory_handler, "mem_handler", NULL);
    return memory_capsule == NULL ? -1 : 0;
}

/* Change NumPy's setting. Without memory, CPython may do so and report an error all the same. */
static int set_handler(PyObject *handler) {
    PyObject *replaced = PyDataMem_SetHandler(handler);
    if (replaced == NULL) {
        PyObject *now = PyDataMem_GetHandler();
        int is_set = now == handler;
        Py_XDECREF(now);
        if (!is_set) return -1;
        PyErr_Clear();
    }
    Py_XDECREF(replaced);
    return 0;
}

/* Let new arrays in this thread use this memory; returns the previous setting. */
PyObject *use_kept(void) {
    PyObject *before = PyDataMem_GetHandler();
    if (before != NULL && set_handler(memory_capsule) < 0) Py_CLEAR(before);
    if (before != memory_capsule || unrestored == NULL) return before;
    Py_DECREF(before);
    before = unrestored;
    unrestored = NULL;
    return before;
}

/* Restore the setting `before`, which `use_kept` has returned. Without memory for that, the next call does it: until then,
   new arrays use this memory, too. */
void use_other(PyObject *before) {
    if (before == NULL) return;
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback); /* setting it calls Python */
    int failed = set_handler(before) < 0;
    PyErr_Restore(error_type, error, traceback);
    if (failed) {
        PyObject *earlier = unrestored;
        unrestored = before;
        before = earlier;
    }
    Py_XDECREF(before);
}

const char keep_doc[] =
    "keep(size, more) -> int\n--\n\n"
    "Keep `more` further pieces of memory of a size in bytes (fewer if negative) for arrays of `Codec`.\n"
    "Returns how many unused pieces there are now.";

PyObject *keep_sizes(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_ssize_t size, more;
    if (!PyArg_ParseTuple(args, "nn:keep", &size, &more)) return NULL;
    if (size > 0) keep((size_t)size, more);
    int place = size > 0 ? place_of_size((size_t)size) : sizes;
    return PyLong_FromSsize_t(place < sizes ? kept[place].count : 0);
}
