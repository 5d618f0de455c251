/* The time, and waiting for the semaphores of other processes. */

#include "codec.h"

#ifdef __linux__
#include <dlfcn.h>
#include <sched.h>
#include <semaphore.h>
#include <time.h>
#endif

/* Seconds, as of `time.monotonic`. An exception may be set, and stays set. */
double monotonic(void) {
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

#ifdef __linux__

enum { PAUSES = 16 };

/* `sem_clockwait`, which waits until a moment of the monotonic clock; NULL where the C library has none. */
static int (*clock_wait)(sem_t *, clockid_t, const struct timespec *);

void find_clock_wait(void) {
    *(void **)&clock_wait = dlsym(RTLD_DEFAULT, "sem_clockwait");
}

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

const char try_for_doc[] =
    "try_for(address, seconds) -> bool\n--\n\n"
    "Try for some seconds to take the semaphore at an address, without sleeping; other processes may use this CPU.";

PyObject *try_for(PyObject *Py_UNUSED(self), PyObject *args) {
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

const char exchange_doc[] =
    "exchange(queues, wake, countdown, request, reply, seconds, patience) -> float\n--\n\n"
    "Write a code to each worker and wait for a code of each, at most `patience` seconds, the first `seconds` of them\n"
    "without sleeping. `queues` is an int64 array `(workers, 8)` of the addresses of their queues; `wake` and `countdown`\n"
    "are the addresses of the doorbell's semaphores.\n\n"
    "With `request` 0 it writes nothing, and with a negative `patience` it does not wait: two calls do the work of\n"
    "one, with other work between them.\n\n"
    "Returns how many seconds that took; -1.0 if some worker has not sent the code `reply`, or after a signal: then no\n"
    "reply has been taken.";

PyObject *exchange(PyObject *Py_UNUSED(self), PyObject *args) {
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
    /* Made before anything is sent, because later it is too late for an exception. */
    PyObject *result = PyFloat_FromDouble(patience < 0 ? 0.0 : -1.0);
    if (result == NULL) return NULL;
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
    if (patience < 0) return result;
    Py_BEGIN_ALLOW_THREADS
    waited = wait_for((sem_t *)wake, seconds, patience);
    Py_END_ALLOW_THREADS
    if (waited < 0) return result;
    PyObject *seconds_waited = PyFloat_FromDouble(waited);
    if (seconds_waited == NULL) { /* without memory, the caller takes the replies one by one */
        PyErr_Clear();
        sem_post((sem_t *)wake);
        return result;
    }
    PyObject *others[] = {result, seconds_waited};
    int taken = take_replies(queues, size, reply);
    Py_DECREF(others[!taken]);
    return others[taken];
}

#endif
