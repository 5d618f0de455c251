"""How many threads the numerical libraries of a worker process may use.

Here live the environment variables for libraries still to be loaded and the setters of those that are. Which
number a worker gets is decided by whoever starts it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping

_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_LIBRARIES = re.compile(r"/[^/\n]*(?:openblas|mkl_rt|gomp|iomp|libomp|blis)[^/\n]*\.so[^/\n]*$")
# NumPy's and SciPy's wheels rename OpenBLAS's functions, so that each can carry a build of its own.
_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
    "MKL_Set_Num_Threads",
    "bli_thread_set_num_threads",
    "omp_set_num_threads",
)


def variables(threads: int) -> dict[str, str]:
    """The environment variables that give libraries not loaded yet this number of threads."""
    return dict.fromkeys(_VARIABLES, str(threads))


def default(environ: Mapping[str, str]) -> int:
    """The number that a BLAS library takes by itself: what the user's variables say, else one per CPU."""
    for name in _VARIABLES[:2]:
        if (value := environ.get(name, "")).isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0))


def set_loaded(threads: int) -> None:
    """Tell the libraries that this process has loaded already; they do not look at the environment again."""
    for path in _loaded_libraries():
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # mapped by someone who reads it as data, or replaced on disk since
            continue
        for name in _SETTERS:
            if hasattr(library, name):
                # All take one integer, but of different widths: a long is right for each.
                getattr(library, name)(ctypes.c_long(threads))
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)


def _loaded_libraries() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line[line.index("/") :].rstrip("\n") for line in maps if "/" in line}
    return sorted(path for path in paths if _LIBRARIES.search(path))
