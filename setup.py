"""The compiled codec: pyproject.toml cannot say where NumPy's headers are, and which builds of Python can load it."""

import sysconfig

import numpy
from setuptools import Extension, setup

# Free-threaded builds have no limited API: the compiler refuses it, and so does the command that makes wheels.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

CODEC = Extension(
    "marl_parallel.core._codec",
    ["marl_parallel/core/_codec.c"],
    include_dirs=[numpy.get_include()],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=True,
    optional=True,  # without a compiler, Python does the same
)

setup(
    ext_modules=[CODEC] if LIMITED_API else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
)
