"""Libraries that come with extras: whether they are there, without importing them."""

from importlib.util import find_spec


def installed(library: str) -> bool:
    """Whether a library can be imported; a folder that happens to have its name, such as Ray's `/tmp/ray`, is none.

    Example:
        >>> installed("numpy"), installed("no_such_library")
        (True, False)
    """
    spec = find_spec(library)
    return spec is not None and spec.origin is not None
