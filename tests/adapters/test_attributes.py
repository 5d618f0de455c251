"""Attributes are found, set and called through wrappers and conversions, on the object that owns them."""

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from mpe2 import simple_spread_v3
from pettingzoo.utils import BaseParallelWrapper
from pettingzoo.utils.conversions import aec_to_parallel

from marl_parallel.adapters import attributes


class Track:
    length = 10

    def __init__(self):
        self.speed = 1
        self._hidden = "secret"

    def step(self, actions):
        return actions

    def scaled(self, factor, *, offset=0):
        return self.speed * factor + offset

    @property
    def area(self):
        return self.length**2


class Slotted:
    __slots__ = ("env", "gear")

    def __init__(self, env):
        self.env = env

    def step(self, actions):
        return self.env.step(actions)


class Forwarding:
    """Forwards missing attributes, except private ones, like PettingZoo's wrappers."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(f"{name} is private")
        return getattr(self.env, name)


def names(source):
    return [type(layer).__name__ for layer in attributes.layers(source)]


def test_layers_from_outside_to_inside():
    env = Forwarding(Slotted(Track()))
    assert names(env) == ["Forwarding", "Slotted", "Track"]
    circular = Slotted(None)
    circular.env = circular
    assert names(circular) == ["Slotted"]
    assert names(Slotted("not an environment")) == ["Slotted"]


def test_layers_of_a_conversion():
    env = aec_to_parallel(simple_spread_v3.env())
    inwards = names(env)
    assert inwards[0] == "aec_to_parallel_wrapper"
    assert inwards[-1] == "raw_env"
    assert len(inwards) == len(set(inwards))


def test_find():
    env = Forwarding(Slotted(Track()))
    assert attributes.find(env, "speed") == 1
    assert attributes.find(env, "_hidden") == "secret"
    assert attributes.find(TimeLimit(gymnasium.make("CartPole-v1"), 5), "gravity") == 9.8
    assert attributes.find(simple_spread_v3.parallel_env(), "max_cycles") == 25


def test_error_of_find_names_the_layers():
    with pytest.raises(AttributeError, match=r"Forwarding has no attribute 'wings', nor .* \(Slotted, Track\)"):
        attributes.find(Forwarding(Slotted(Track())), "wings")
    with pytest.raises(AttributeError, match=r"^Track has no attribute 'wings': "):
        attributes.find(Track(), "wings")


def test_error_of_find_includes_the_simulators_message():
    class Unready(Track):
        @property
        def position(self):
            raise AttributeError("no position before the start")

    with pytest.raises(AttributeError, match="Slotted has no attribute 'position'"):
        attributes.find(Slotted(Unready()), "position")
    with pytest.raises(AttributeError, match=r"nor .* no position before the start"):
        attributes.find(Forwarding(Unready()), "position")


def test_assign_sets_on_the_owner_not_on_the_wrapper():
    track = Track()
    env = Forwarding(Slotted(track))
    attributes.assign(env, "speed", 4)
    attributes.assign(env, "length", 3)
    attributes.assign(env, "gear", 2)
    attributes.assign(env, "_hidden", "new")
    assert (track.speed, track.length, track.area, track._hidden) == (4, 3, 9, "new")
    assert env.env.gear == 2
    assert vars(env) == {"env": env.env}
    assert Track.length == 10


def test_assign_through_real_wrappers_and_conversions():
    parallel = BaseParallelWrapper(aec_to_parallel(simple_spread_v3.env()))
    attributes.assign(parallel, "max_cycles", 7)
    assert parallel.unwrapped.max_cycles == 7
    assert "max_cycles" not in vars(parallel)

    cart = gymnasium.make("CartPole-v1")
    attributes.assign(cart, "gravity", 1.6)
    assert cart.unwrapped.gravity == 1.6
    # A wrapper's `render_mode` is a property without a setter; the environment's own is an attribute.
    attributes.assign(cart, "render_mode", "rgb_array")
    assert cart.unwrapped.render_mode == cart.render_mode == "rgb_array"


def test_assign_sets_new_attributes_on_the_outermost_object():
    track = Track()
    env = Forwarding(Slotted(track))
    attributes.assign(env, "wings", 2)
    assert (env.wings, vars(env)["wings"]) == (2, 2)
    assert "wings" not in vars(track)
    attributes.assign(env, "wings", 3)
    assert attributes.find(env, "wings") == 3


def test_assign_sets_new_attributes_where_gymnasium_does():
    ours, theirs = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
    attributes.assign(ours, "wings", 2)
    theirs.set_wrapper_attr("wings", 2)
    owners = [
        [type(layer).__name__ for layer in attributes.layers(env) if "wings" in vars(layer)] for env in (ours, theirs)
    ]
    assert owners[0] == owners[1] == [type(ours).__name__]


class Fixed(Forwarding):
    def __setattr__(self, name, value):
        if name != "env":
            raise AttributeError(f"{name} is fixed")
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    "env",
    [Slotted(Track()), Fixed(Track()), type("Point", (tuple,), {"__slots__": ()})()],
    ids=lambda env: type(env).__name__,
)
def test_assign_refuses_new_attributes_that_cannot_be_added(env):
    with pytest.raises(
        AttributeError, match=rf"^{type(env).__name__} has no attribute 'wings'.*it cannot be added: .*wings"
    ):
        attributes.assign(env, "wings", 2)
    assert not attributes.has(env, "wings")


def test_assign_refuses_read_only_attributes():
    with pytest.raises(AttributeError, match=r"^'area' of Track is a property that can only be read"):
        attributes.assign(Forwarding(Track()), "area", 2)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (5, 5),
        (np.int64(6), 6),
        (True, None),
        (np.bool_(True), None),
        (None, None),
        (2.0, None),
        (lambda: 5, None),
    ],
)
def test_declared_seed(seed, expected):
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.seed = seed
    found = attributes.declared_seed(env)
    assert found == expected
    assert found is None or type(found) is int
    plain = Track()
    plain.seed = seed
    assert attributes.declared_seed(plain) == expected


def test_declared_seed_missing_or_failing():
    class RaisingProperty(Track):
        @property
        def seed(self):
            raise RuntimeError("not now")

    assert attributes.declared_seed(Track()) is None
    assert attributes.declared_seed(RaisingProperty()) is None


def test_presence_is_checked_without_a_call():
    env = Forwarding(Slotted(Track()))
    assert attributes.has(env, "scaled")
    assert attributes.has(env, "gear") is False
    assert attributes.has(env, "speed")


def test_wrappers_are_recognised_by_name_and_base_class():
    class Slow(TimeLimit):
        pass

    env = Slow(gymnasium.make("CartPole-v1"), 5)
    for kind, there in [(Slow, True), (TimeLimit, True), (gymnasium.Wrapper, True), (Track, False)]:
        assert attributes.is_wrapped(env, (kind.__module__, kind.__qualname__)) is there
    assert not attributes.is_wrapped(env, ("elsewhere", "TimeLimit"))
