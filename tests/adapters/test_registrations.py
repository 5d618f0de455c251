"""Gymnasium and PettingZoo registrations of the caller's script exist in its workers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types

import gymnasium
import pettingzoo
import pytest
from gymnasium.envs.registration import EnvSpec
from helpers import TESTS
from simulators.deterministic import Hunt

from marl_parallel import ParallelEnv
from marl_parallel.core.objects.pickling import dump_registrations, install_registrations

SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import gymnasium, threading
    from gymnasium import spaces
    from simulators import registered  # as `import rware` does: registers by its name in a module
    import pettingzoo
    from simulators.deterministic import Hunt
    from marl_parallel import ParallelEnv
    from marl_parallel.backends.spawn import PortableProcessBackend

    class Lever(gymnasium.Env):
        observation_space = action_space = spaces.Discrete(9)

        def __init__(self, seed=0, pulls=1):
            self.seed, self.pulls = seed, pulls

        def reset(self, *, seed=None, options=None):
            return self.pulls, {{}}

        def step(self, action):
            return self.pulls, 0.0, False, False, {{}}

    gymnasium.register("script/Lever-v0", entry_point=Lever, kwargs={{"pulls": 3}})
    gymnasium.register("script/Lambda-v0", entry_point=lambda seed: Lever(seed, 4))
    gymnasium.register("script/Unpicklable-v0", entry_point=Lever, kwargs={{"pulls": threading.Lock()}})
    if hasattr(pettingzoo, "register"):
        pettingzoo.register("parallel", "script/Hunt-v0", entry_point="simulators.deterministic:Hunt")
        pettingzoo.register("parallel", "script/Named-v0", entry_point=lambda **more: globals()["Named"](**more))

    class Named(Hunt):
        pass

    def parallel(*constructors, backend="process"):
        return ParallelEnv(constructors, backend=backend, num_workers=2)

    lever, other = "script/Lever-v0", "script/Lambda-v0"
    for backend in ("process", PortableProcessBackend()):
        with parallel(lambda: gymnasium.make(lever), lambda: gymnasium.make(other, seed=6), backend=backend) as env:
            assert [one["agent_0"] for one in env.reset()[0]] == [3, 4], backend
    with parallel(lambda seed: gymnasium.make("registered/Scenario-v1", seed=seed)) as env:
        assert env.seed() == (42,)
    if hasattr(pettingzoo, "make"):
        hunt, named = "script/Hunt-v0", "script/Named-v0"
        with parallel(lambda: pettingzoo.make("parallel", hunt), lambda: pettingzoo.make("parallel", named)) as env:
            env.reset()
    print("made")
"""


def test_registrations_of_a_script_exist_in_workers(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT.format(tests=str(TESTS))))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "made" in done.stdout
    # A worker that imports a module with the same registration prints no warning.
    assert "Overriding" not in done.stderr


def test_registered_class_of_a_module_that_workers_cannot_import(concurrent_or_portable, build, monkeypatch):
    """As in a test that pytest loads by its path."""
    module = types.ModuleType("loaded_by_file")
    exec(
        "from simulators import deterministic\nclass Local(deterministic.Skirmish):\n    here = 'by value'\n",
        vars(module),
    )
    monkeypatch.setitem(sys.modules, "loaded_by_file", module)
    monkeypatch.setitem(gymnasium.registry, "test/Local-v0", EnvSpec("test/Local-v0", module.Local))
    env = build([lambda: gymnasium.make("test/Local-v0", disable_env_checker=True)] * 2, concurrent_or_portable)
    assert env.get_attr("here") == ("by value",) * 2


def test_registrations_exist_in_restarted_workers(build, monkeypatch, killable_setup):
    monkeypatch.setitem(
        gymnasium.registry, "test/Dying-v0", EnvSpec("test/Dying-v0", "simulators.deterministic:Skirmish")
    )
    env = build(
        [lambda: gymnasium.make("test/Dying-v0", disable_env_checker=True)] * 2, killable_setup, on_error="restart"
    )
    env.reset()
    with pytest.raises(Exception, match="died"):
        env.call(lambda simulator: os._exit(3))
    env.reset()


@pytest.fixture
def empty_registry(monkeypatch):
    """A registry without the new registrations, as in a worker."""
    mine = dict(gymnasium.registry)
    yield lambda *env_ids: [gymnasium.registry.pop(env_id) for env_id in env_ids]
    gymnasium.registry.clear()
    gymnasium.registry.update(mine)


def test_specs_are_unpickled_when_they_are_used(empty_registry):
    """Unpickling may import a simulator that the worker does not use; unpicklable specs are left out."""
    gymnasium.register("test/Here-v1", "simulators.deterministic:Skirmish", kwargs={"seed": 3}, max_episode_steps=5)
    gymnasium.register("test/Lock-v0", "simulators.deterministic:Skirmish", kwargs={"seed": threading.Lock()})
    gymnasium.register("test/Module-v0", "simulators.deterministic:Skirmish", kwargs={"seed": _MissingModule()})
    cartpole = gymnasium.registry["CartPole-v1"]
    sent = dump_registrations()
    empty_registry("test/Here-v1", "test/Lock-v0", "test/Module-v0")
    install_registrations(sent)
    assert gymnasium.registry["CartPole-v1"] is cartpole
    assert "test/Lock-v0" not in gymnasium.registry
    spec = gymnasium.spec("test/Here-v1")
    assert type(spec) is not EnvSpec
    assert (spec.namespace, spec.name, spec.version) == ("test", "Here", 1)
    env = gymnasium.make("test/Here", disable_env_checker=True)
    assert type(spec) is EnvSpec
    assert spec == EnvSpec("test/Here-v1", "simulators.deterministic:Skirmish", kwargs={"seed": 3}, max_episode_steps=5)
    assert env.unwrapped.received["seed"] == 3
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        gymnasium.make("test/Module-v0")
    assert dump_registrations()  # unused registrations are passed on


class _MissingModule:
    """Can be pickled, but its module is missing when it is unpickled."""

    def __reduce__(self):
        return _import, ("not_installed",)


def _import(name):
    return __import__(name)


def test_replaced_registration(empty_registry):
    replaced = gymnasium.registry["CartPole-v1"]
    gymnasium.registry["CartPole-v1"] = EnvSpec("CartPole-v1", "simulators.deterministic:Skirmish")
    sent = dump_registrations()
    gymnasium.registry["CartPole-v1"] = replaced
    install_registrations(sent)
    assert gymnasium.spec("CartPole-v1").entry_point == "simulators.deterministic:Skirmish"


def test_pettingzoo_without_a_registry(monkeypatch):
    monkeypatch.delattr(pettingzoo, "aec_registry", raising=False)
    monkeypatch.delattr(pettingzoo, "parallel_registry", raising=False)
    assert pickle.loads(dump_registrations()).keys() == {"gymnasium"}
    with ParallelEnv([Hunt], backend="serial") as env:
        env.reset()


# The registry of OpenAI's gym 0.26, and what of it `make` and `register` use.
GYM = {
    "__init__.py": "from gym.envs.registration import make, register, spec\n",
    "error.py": """
        class Error(Exception): pass
        class Unregistered(Error): pass
        class UnregisteredEnv(Unregistered): pass
        class NameNotFound(UnregisteredEnv): pass
    """,
    "envs/__init__.py": """
        from gym.envs.registration import make, register, registry, spec

        register(id="Own-v0", entry_point="gym.envs.registration:Nothing")
    """,
    "envs/registration.py": """
        import importlib, warnings
        from dataclasses import dataclass, field
        from gym import error

        @dataclass
        class EnvSpec:
            id: str
            entry_point: object
            max_episode_steps: object = None
            kwargs: dict = field(default_factory=dict)

        registry = {}

        def register(id, **kwargs):
            if id in registry:
                warnings.warn(f"WARN: Overriding environment {id} already in registry.", UserWarning)
            registry[id] = EnvSpec(id=id, **kwargs)

        def spec(id):
            if id not in registry:
                raise error.NameNotFound(f"Environment {id} doesn't exist.")
            return registry[id]

        def make(id, **kwargs):
            create = spec(id).entry_point
            if isinstance(create, str):
                module, name = create.split(":")
                create = getattr(importlib.import_module(module), name)
            return create(**spec(id).kwargs, **kwargs)
    """,
    "../registers_itself.py": """
        import gym
        from simulators.deterministic import Hunt

        gym.register("package/Hunt-v0", entry_point="registers_itself:Hunt", kwargs={"env_id": 4})
    """,
}
WITH_GYM = """
    import sys
    sys.path.insert(0, {tests!r})
    import pickle, threading
    from marl_parallel import EnvError, ParallelEnv
    from marl_parallel.backends.spawn import PortableProcessBackend
    from marl_parallel.core.objects import pickling
    from simulators.deterministic import Hunt

    def travel():
        return {{*pickle.loads(pickling.dump_registrations()).get("gym", ())}}

    assert "gym" not in sys.modules
    with ParallelEnv([Hunt]) as env:
        assert env.call(lambda _: "gym" in sys.modules) == (False,)
    assert "gym" not in sys.modules, "nothing but the program imports it"

    import gym
    import registers_itself

    class Script(Hunt):
        pass

    gym.register("script/Class-v0", entry_point=Script, kwargs={{"env_id": 1}})
    gym.register("script/Lambda-v0", entry_point=lambda: Hunt(env_id=2))
    gym.register("script/Text-v0", entry_point="simulators.deterministic:Hunt", kwargs={{"env_id": 3}})
    gym.register("script/Longer-v0", entry_point="gym.envs.registration:Nothing", max_episode_steps=77)
    gym.register("script/Lock-v0", entry_point=Script, kwargs={{"env_id": threading.Lock()}})
    ids = ["script/Class-v0", "script/Lambda-v0", "script/Text-v0", "package/Hunt-v0"]
    assert travel() == {{*ids, "script/Longer-v0"}}

    def made(env_id):
        def make():
            import gym
            return gym.make(ids[env_id])
        return make

    def limit(_):
        import gym
        return gym.spec("script/Longer-v0").max_episode_steps, gym.spec("Own-v0").id

    for backend in ("process", PortableProcessBackend(), "thread", "serial"):
        with ParallelEnv([made(env_id) for env_id in range(4)], backend=backend, num_workers=2) as env:
            env.reset()
            assert env.get_attr("env_id") == (1, 2, 3, 4)
            assert env.call(limit) == ((77, "Own-v0"),) * 4

    def missing():
        import gym
        return gym.make("script/Lock-v0")

    try:
        ParallelEnv([missing])
    except EnvError as error:
        assert "What to do: import the module that registers this id with gym inside the constructor." in str(error)
    print("made")
"""


def test_registrations_with_openais_gym(tmp_path):
    for name, text in GYM.items():
        path = tmp_path / "gym" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (tmp_path / "script.py").write_text(textwrap.dedent(WITH_GYM.format(tests=str(TESTS))))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "made" in done.stdout
    assert "Overriding" not in done.stderr
