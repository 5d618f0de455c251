"""Known forms of results that an adapter does not take, such as those of older APIs, and what to do about them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from marl_parallel.adapters import attributes
from marl_parallel.adapters.attributes import declared, length_of

_SHARE = "share_observation_space"
_WITH_OWN_FORMS = {"mappo", "pymarl"}
_NEW_STEP = "let `step` return five values, with terminated and truncated flags in place of dones"


def way_out(method: str, result: Any, source: Any, adapters: Set[str]) -> str:
    """Which form a wrong result has, and what to do, in sentences; empty if its form is not known.

    Args:
        method: "reset" or "step".
        result: What the simulator returned.
        source: The simulator.
        adapters: The values of `adapter=` for the kind that it was treated as.
    """
    one_agent = "gymnasium" in adapters
    if adapters & _WITH_OWN_FORMS:
        return ""
    if method == "step":
        return _of_step(result, one_agent)
    return _of_reset(result, source, one_agent) if method == "reset" else ""


def mappo_way(source: Any, *, has_shares: bool = False) -> str:
    """How a simulator with lists is used with `adapter="mappo"`; `has_shares` if it returns share observations."""
    missing = [f"`{name}_space`" for name in ("observation", "action") if declared(source, f"{name}_space") is None]
    if missing:
        names = ", ".join([*missing, f"`{_SHARE}`"])
        return f'let it declare {names}, lists with one space per agent, and pass adapter="mappo"'
    if declared(source, _SHARE) is None and has_shares:
        return f'let it declare `{_SHARE}`, a list with one space per agent, and pass adapter="mappo"'
    if declared(source, _SHARE) is None:
        return f'set `env.{_SHARE} = env.observation_space` in the constructor, and pass adapter="mappo"'
    return 'pass adapter="mappo"'


def _of_reset(result: Any, source: Any, one_agent: bool) -> str:
    number = attributes.number_of_agents(source)
    for what in ("action", "observation"):
        number = number or length_of(declared(source, f"{what}_space"))
    without_infos = "It returned observations without infos"
    if isinstance(result, Mapping):
        return f"{without_infos}: let `reset` return (observations, {{}})"
    parts = [*result] if isinstance(result, tuple | list) else []
    length = number or (len(parts[0]) if parts and _is_list(parts[0]) else 0)
    has_shares = (
        len(parts) in (2, 3)
        and all(_has_rows(part, length) for part in parts[:2])
        and (parts[-1] is None or _has_rows(parts[-1], length))
        and not (len(parts) == number and len({*map(np.shape, parts)}) == 1)
    )
    if has_shares:
        more = ", share observations and available actions" if len(parts) == 3 else " and share observations"
        return (
            f"It returned observations{more}, as simulators of MAPPO and HARL do: {mappo_way(source, has_shares=True)}"
        )
    of_all = _is_list(result) and len(result) == number and all(map(_is_value, result))
    if of_all or (number is None and _is_list(result) and _has_rows(result, len(result))):
        return (
            f"{without_infos}, in a list, as simulators of MAPPO do: {mappo_way(source)}; or let `reset` return "
            "(observations, {}), and `step` five values"
        )
    if one_agent and isinstance(result, np.ndarray):
        return (
            "It returned an observation without an info, which is the API of OpenAI's gym before 0.26: convert it with "
            "Shimmy, or let `reset` return (observation, {})"
        )
    return ""


def _of_step(result: Any, one_agent: bool) -> str:
    if not isinstance(result, tuple | list) or len(result) != 4 or one_agent:
        return ""
    last = result[-1]
    if isinstance(last, Mapping) and last and all(isinstance(one, bool | np.bool_) for one in last.values()):
        return "The infos are missing: let `step` return them as a fifth dict"
    if isinstance(result[0], Mapping):
        return f"Four values are the API of older releases of PettingZoo and RLlib: {_NEW_STEP}"
    return f"Four values are an older API: {_NEW_STEP}" if _is_list(result[0]) else ""


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _is_value(value: Any) -> bool:
    """Whether a value may be an observation: an array, a list or a number, and no object of another class."""
    return _is_list(value) or isinstance(value, int | float | np.number) or hasattr(value, "shape")


def _has_rows(value: Any, number: int) -> bool:
    """Whether a value has an array or list for each of so many agents."""
    return _is_list(value) and len(value) == number > 0 and all(map(_is_list, value))
