/* Signal handlers that know the sender, which Python's handlers do not: `survive` for worker processes (`signals.py`).

   A batch system sends a signal to all processes of a job, and a worker must survive it. A simulator's own alarm, its
   limit of CPU time and the signals that it sends to itself must keep their effect. So a handler here ignores signals
   that another process has sent, and passes on all others to what was installed before.

   The handlers only use async-signal-safe functions. Python does not notice them: `signal.getsignal` returns what was
   installed before, and `signal.signal` replaces them. The kernel resets handlers when a simulator executes a program. A
   forked child restores the earlier handler when its first signal comes.

   Built for the limited API of Python 3.10: one file for all later releases. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#ifndef NSIG
#define NSIG 65
#endif

static struct sigaction before[NSIG]; /* what was installed when `survive` was called */
static volatile pid_t senders[NSIG];  /* another process whose signal is passed on; 0 for none */
static volatile pid_t owner;          /* the process that called `survive` */

static int
is_from_another_process(int number, const siginfo_t *info)
{
    int sent = info->si_code == SI_USER || info->si_code == SI_QUEUE;
#ifdef SI_TKILL
    sent = sent || info->si_code == SI_TKILL;
#endif
    return sent && info->si_pid != owner && (senders[number] == 0 || info->si_pid != senders[number]);
}

static void
on_signal(int number, siginfo_t *info, void *context)
{
    const struct sigaction *old = &before[number];
    int error = errno;
    if (getpid() != owner) { /* a forked child of a simulator: as if this handler had never been there */
        sigaction(number, old, NULL);
        raise(number); /* delivered when this handler returns */
        errno = error;
        return;
    }
    if (is_from_another_process(number, info)) {
        return;
    }
    if (old->sa_flags & SA_SIGINFO) {
        old->sa_sigaction(number, info, context);
    }
    else if (old->sa_handler == SIG_DFL) {
        sigaction(number, old, NULL);
        raise(number);
    }
    else if (old->sa_handler != SIG_IGN) {
        old->sa_handler(number);
    }
    errno = error;
}

static PyObject *
survive(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int number, sender = 0;
    struct sigaction action;
    if (!PyArg_ParseTuple(arguments, "i|i", &number, &sender)) {
        return NULL;
    }
    if (number < 1 || number >= NSIG) {
        PyErr_Format(PyExc_ValueError, "there is no signal %d", number);
        return NULL;
    }
    if (sigaction(number, NULL, &action) != 0) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if ((action.sa_flags & SA_SIGINFO) && action.sa_sigaction == on_signal) {
        senders[number] = sender; /* `before` has what was installed */
        Py_RETURN_NONE;
    }
    owner = getpid();
    before[number] = action;
    senders[number] = sender;
    /* Functions of the system that a signal interrupts go on, unless a handler of Python waits for that. */
    int is_default = !(action.sa_flags & SA_SIGINFO) && action.sa_handler == SIG_DFL;
    int restarts = is_default ? SA_RESTART : action.sa_flags & SA_RESTART;
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | restarts;
    sigfillset(&action.sa_mask); /* one at a time: the frames of several may not fit the alternate stack */
    if (sigaction(number, &action, NULL) != 0) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"survive", survive, METH_VARARGS,
     "survive(number, sender=0)\n--\n\n"
     "Ignore a signal that another process sends to this one, except `sender`; all else is as before."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_signals",
    .m_doc = "Signal handlers that know the sender.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__signals(void)
{
    return PyModule_Create(&definition);
}
