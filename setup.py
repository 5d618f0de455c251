"""The compiled codec, the one thing that pyproject.toml cannot describe: where NumPy's headers are."""

import numpy
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "marl_parallel.core._codec",
            ["marl_parallel/core/_codec.c"],
            include_dirs=[numpy.get_include()],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            optional=True,  # without a compiler, Python does the same
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
