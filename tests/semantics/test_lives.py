"""What a transition means in the life of each agent, as arrays: compared with rules that are written here again."""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

from marl_parallel import ParallelEnv, RecyclePolicy, make
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.vector import ArrayStepper, ShareVecEnv, Stacked

pytestmark = pytest.mark.release_independent

AGENTS = ["a", "b", "c"]
FIELDS = "alive", "were_alive", "took_part", "ended", "began", "were_dead"
NOBODY = {name: set[str]() for name in FIELDS}
MODES = "SAME_STEP", "NEXT_STEP", "DISABLED"


class Script(NamedTuple):
    """Who is observed, rewarded, and flagged in each step of one episode after another; the last step ends it."""

    first: list[str]
    steps: list[tuple[list[str], list[str], list[str]]]


def scripts(seed: int) -> list[Script]:
    rng = random.Random(seed)

    def some(chance: float) -> list[str]:
        return [agent for agent in AGENTS if rng.random() < chance]

    made = []
    for _ in range(3):
        steps = [(some(0.7), some(0.7), some(0.2)) for _ in range(rng.randrange(1, 7))]
        if rng.random() < 0.3:  # plain ones between the others
            steps[: len(steps) // 2] = [(AGENTS, AGENTS, [])] * (len(steps) // 2)
        made.append(Script(some(0.8) or AGENTS[:1], steps))
    return made


class Scripted:
    """Plays scripts in turn; ends its process in a step if action 1 is among the actions."""

    possible_agents = AGENTS
    observation_spaces = dict.fromkeys(AGENTS, spaces.Box(-np.inf, np.inf, (2,), np.float32))
    action_spaces = dict.fromkeys(AGENTS, spaces.Discrete(2))

    def __init__(self, seed: int) -> None:
        self.scripts, self.number = scripts(seed), -1

    def seen(self, agents: list[str]) -> dict[str, Any]:
        return {agent: np.full(2, self.number * 10 + self.time, np.float32) for agent in agents}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.number, self.time = self.number + 1, 0
        return self.seen(self.scripts[self.number % 3].first), {}

    def step(self, actions: Any) -> Any:
        if 1 in actions.values():
            os._exit(3)
        steps = self.scripts[self.number % 3].steps
        observed, rewarded, flagged = steps[self.time]
        self.time += 1
        flags = {agent: agent in flagged for agent in dict.fromkeys([*observed, *flagged])}
        over = {"__all__": self.time == len(steps)}
        no = {**dict.fromkeys(flags, False), "__all__": False}
        return self.seen(observed), dict.fromkeys(rewarded, 1.0), no, {**flags, **over}, {}


class Reference:
    """One environment by the rules: an agent is alive from its observation on until its flag, and may come back."""

    def __init__(self, seed: int, mode: str) -> None:
        self.scripts, self.mode, self.number, self.over = scripts(seed), mode, -1, False
        self.last: dict[str, list[float]] | None = None  # the last observations, if an episode has ended in this step

    def reset(self) -> dict[str, set[str]]:
        self.number, self.time, self.over, self.last = self.number + 1, 0, False, None
        self.alive, self.dead = {*self.scripts[self.number % 3].first}, set[str]()
        return {**NOBODY, "alive": {*self.alive}, "began": {*self.alive}}

    def step(self) -> dict[str, set[str]]:
        if self.over:
            return self.reset()
        self.last = None
        steps = self.scripts[self.number % 3].steps
        observed, rewarded, flagged = map(set, steps[self.time])
        self.time += 1
        back = (self.dead & observed) - flagged
        dead, were_alive = self.dead - back, self.alive
        self.alive, self.dead = (were_alive | observed) - flagged - dead, dead | flagged
        result = {"were_alive": were_alive, "took_part": observed | rewarded | flagged, "were_dead": dead}
        result |= {"ended": flagged - dead, "began": observed - were_alive - dead, "alive": self.alive}
        if self.time == len(steps):
            result["ended"] = result["ended"] | self.alive
            self.over, self.last = True, {agent: [self.number * 10 + self.time] * 2 for agent in observed}
            if self.mode == "SAME_STEP":
                last, first = self.last, self.reset()
                self.last = last
                result |= {"alive": first["alive"], "began": first["began"]}
        return result


class Facade:
    def __init__(self, env: ParallelEnv) -> None:
        self.stepper = ArrayStepper(env, self)


def sets(arrays: Any, env_id: int) -> dict[str, set[str]]:
    return {name: {a for a, yes in zip(AGENTS, getattr(arrays, name)[env_id]) if yes} for name in FIELDS}


def last_observations(arrays: Any, references: list[Reference]) -> None:
    """Check the last observations of the episodes that have ended in this step."""
    assert (not arrays.final_observations) == all(one.last is None for one in references)
    for env_id, one in enumerate(references):
        if one.last is not None:
            (final,), observed = arrays.final_observations, arrays.finally_observed[env_id]
            last = {agent: final[env_id, place].tolist() for place, agent in enumerate(AGENTS) if observed[place]}
            assert last == one.last
            assert not final[env_id, ~observed].any()


NOTHING = [Stacked(tuple(AGENTS), np.zeros((3, 3), np.int64))]


@pytest.mark.parametrize("how", ["codec", "python", "pickled", "processes"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_arrays_say_what_a_step_means_in_each_life(seed, mode, how, monkeypatch):
    if how == "python":
        monkeypatch.setattr("marl_parallel.core.block.codec.Codec", None)
    numbers = [3 * seed + place for place in range(3)]
    where: dict[str, Any] = {"num_workers": 2} if how == "processes" else {"backend": "serial"}
    env = ParallelEnv(
        [lambda number=number: Scripted(number) for number in numbers], mode, shared_memory=how != "pickled", **where
    )
    stepper, references = Facade(env).stepper, [Reference(number, mode) for number in numbers]
    with env:
        arrays, expected = stepper.reset(), [one.reset() for one in references]
        for _ in range(25):
            assert [sets(arrays, env_id) for env_id in range(3)] == expected
            last_observations(arrays, references)
            over = [env_id for env_id in range(3) if references[env_id].over]
            if mode == "DISABLED" and over:
                arrays = stepper.reset(env_ids=over)
                for one in references:
                    one.last = None
                expected = [one.reset() if one.over else {**NOBODY, "alive": one.alive} for one in references]
            else:
                if how == "codec" and mode != "DISABLED":  # else only some environments have been reset
                    arrays, _ = stepper.load_state(stepper.save_state())
                    assert [sets(arrays, env_id) for env_id in range(3)] == expected
                    last_observations(arrays, references)
                arrays, expected = stepper.step(NOTHING), [one.step() for one in references]


@pytest.mark.parametrize("mode", MODES)
def test_a_restart_ends_all_lives_and_begins_new_ones(mode):
    with ParallelEnv([lambda: Dying()] * 2, mode, on_error="restart", num_workers=2) as env:
        stepper = Facade(env).stepper
        stepper.reset()
        none = [Stacked(tuple(AGENTS), np.zeros((2, 3), np.int64))]
        arrays = stepper.step(none)
        assert sets(arrays, 0)["ended"] == {"a"}
        die = np.zeros((2, 3), np.int64)
        die[0, 1] = 1
        arrays = stepper.step([Stacked(tuple(AGENTS), die)])
        assert arrays.restarted.tolist() == [True, False]
        assert not arrays.recycled.any()
        lives = {"were_alive": {"b", "c"}, "took_part": {"b", "c"}, "ended": {"b", "c"}, "were_dead": {"a"}}
        new = {"alive": {*AGENTS}, "began": {*AGENTS}}
        both = mode == "SAME_STEP"
        assert sets(arrays, 0) == {**NOBODY, **lives, **(new if both else {})}
        assert sets(arrays, 1) == {**NOBODY, "alive": {"b", "c"}, "were_alive": {"b", "c"}, "took_part": {"b", "c"},
                                   "were_dead": {"a"}}  # fmt: skip
        if mode == "NEXT_STEP":
            arrays = stepper.step(none)
        elif mode == "DISABLED":
            arrays = stepper.reset(env_ids=[0])
        assert both or sets(arrays, 0) == {**NOBODY, **new}
        assert both or not arrays.restarted.any()


def with_one_script(player: Any) -> Any:
    """New simulators begin with the first script."""
    player.scripts = player.scripts[:1] * 3
    return player


@pytest.mark.parametrize("mode", MODES)
def test_lives_go_on_as_usual_where_environments_are_recycled(mode):
    numbers = range(3)
    env = ParallelEnv(
        [lambda number=number: with_one_script(Scripted(number)) for number in numbers], mode, num_workers=2,
        recycle=RecyclePolicy(max_episodes=1),
    )  # fmt: skip
    with env:
        stepper = Facade(env).stepper
        references = [with_one_script(Reference(number, mode)) for number in numbers]
        arrays, expected, recycled = stepper.reset(), [one.reset() for one in references], 0
        for _ in range(20):
            assert [sets(arrays, env_id) for env_id in numbers] == expected
            assert [*arrays.recycled] == [
                arrays.infos.get(env_id, {}).get("__common__", {}).get("recycled", False) for env_id in numbers
            ]
            assert not arrays.restarted.any()
            recycled += np.count_nonzero(arrays.recycled)
            over = [env_id for env_id in numbers if references[env_id].over]
            if mode == "DISABLED" and over:
                arrays = stepper.reset(env_ids=over)
                expected = [one.reset() if one.over else {**NOBODY, "alive": one.alive} for one in references]
            else:
                arrays, expected = stepper.step(NOTHING), [one.step() for one in references]
        assert recycled


@pytest.mark.parametrize("mode", ["NEXT_STEP", "DISABLED"])
def test_a_restart_after_the_end_ends_no_life_again(mode):
    """Both environments are in one worker; the second one is over when the first one ends the process."""
    short = [Script(AGENTS, [(AGENTS, AGENTS, [])])] * 3

    def constructor() -> Any:
        simulator = Scripted(0)
        simulator.scripts = short
        return simulator

    with ParallelEnv([constructor] * 2, mode, on_error="restart", num_workers=1) as env:
        stepper = Facade(env).stepper
        stepper.reset()
        none, die = (np.array([[number] * 3, [0] * 3]) for number in (0, 1))
        arrays = stepper.step([Stacked(tuple(AGENTS), none)])
        assert sets(arrays, 1)["ended"] == {*AGENTS}
        stepper.reset(env_ids=[0])
        arrays = stepper.step([Stacked(tuple(AGENTS), die)], env_ids=[0])
        assert sets(arrays, 0)["ended"] == {*AGENTS}
        arrays = stepper.step([Stacked(tuple(AGENTS), none)], env_ids=[1])
        assert arrays.restarted.tolist() == [False, True]
        assert sets(arrays, 1) == NOBODY


def test_a_life_ends_once_where_a_simulator_goes_on_after_its_end():
    """With auto_reset=False, dict environments are stepped on; new agents begin and end lives there, too."""
    scripts = [(["a"], ["a"], []), (["a", "b"], ["a"], []), (["a", "b"], ["a"], []), (["a"], ["a"], ["b"])]

    class GoesOn(Scripted):
        def step(self, actions: Any) -> Any:
            *dicts, infos = super().step(actions)
            dicts[3]["__all__"] = self.time in (1, 3)
            return (*dicts, infos)

    def constructor() -> Any:
        simulator = GoesOn(0)
        simulator.scripts = [Script(["a"], [*scripts, (["a"], ["a"], [])])] * 3
        return simulator

    with ParallelEnv([constructor], False, backend="serial") as env:
        stepper = Facade(env).stepper
        stepper.reset()
        ended, began = [], []
        for _ in range(4):
            arrays = stepper.step([Stacked(tuple(AGENTS), np.zeros((1, 3), np.int64))])
            ended.append("".join(sorted(sets(arrays, 0)["ended"])))
            began.append("".join(sorted(sets(arrays, 0)["began"])))
        assert ended == ["a", "", "b", ""]
        assert began == ["", "b", "", ""]


class Guests(Scripted):
    """An agent that is not known beforehand comes and ends in each step."""

    possible_agents = AGENTS[:2]
    observation_spaces = dict.fromkeys(possible_agents, Scripted.observation_spaces["a"])
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))

    def __init__(self) -> None:
        self.scripts, self.number = [Script(["a", "b"], [(["a", "b"], ["a", "b"], [])] * 200)] * 3, -1

    def step(self, actions: Any) -> Any:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        if self.time < 100:
            observations[f"guest {self.time}"] = 1
            terminateds[f"guest {self.time}"] = True
        return observations, rewards, terminateds, truncateds, infos


def test_records_do_not_grow_with_agents_that_have_left():
    with ParallelEnv([Guests], backend="serial") as env:
        env.reset()
        transitions = env.stepper.transitions
        sizes = []
        for _ in range(120):
            env.step([{"a": 0, "b": 0}])
            sizes.append(len(transitions.events_in(0)))
        assert {*sizes[:99]} == {3}
        assert {*sizes[100:]} == {2}
        assert env.stepper.transitions.codec is None or not transitions.records.has_leftovers(0)


class Dying(Scripted):
    """Agent a ends in the first step."""

    def __init__(self) -> None:
        self.scripts = [Script(AGENTS, [(AGENTS, AGENTS, ["a"]), *[(["b", "c"], ["b", "c"], [])] * 9])] * 3
        self.number = -1


class AllAlive(DictEnv):
    """All agents are alive from the first step on, also before they are observed."""

    def alive(self) -> list[str]:
        return AGENTS


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_life_begins_with_the_first_observation_also_if_the_turn_comes_later(backend):
    def constructor() -> Any:
        simulator = Scripted(0)
        simulator.scripts = [
            Script(["a"], [*[([agent], [agent], []) for agent in "bcbcaabc"], (AGENTS, AGENTS, [])])
        ] * 3
        return simulator

    with ParallelEnv([constructor] * 2, "SAME_STEP", backend=backend, adapter=AllAlive, num_workers=2) as env:
        stepper = Facade(env).stepper
        none = [Stacked(tuple(AGENTS), np.zeros((2, 3), np.int64))]
        for _ in range(2):
            arrays = stepper.reset()
            assert sets(arrays, 1)["began"] == {"a"}
            began = []
            for _ in range(9):
                arrays = stepper.step(none)
                began.append("".join(sorted(sets(arrays, 1)["began"])))
            assert began == ["b", "c", *[""] * 6, "a"]  # the last step begins the next episode
            assert sets(arrays, 1)["ended"] == {*AGENTS}


def test_one_life_may_end_and_the_next_one_begin_in_one_step():
    """As of agents that respawn at once: all agents are alive, also the one with a flag."""

    def constructor() -> Any:
        simulator = Scripted(0)
        simulator.scripts = [Script(AGENTS, [(AGENTS, AGENTS, ["a"]), *[(AGENTS, AGENTS, [])] * 3])] * 3
        return simulator

    with ShareVecEnv(ParallelEnv([constructor], backend="serial", adapter=AllAlive)) as env:
        env.reset()
        _, _, _, dones, _, _ = env.step(np.zeros((1, 3, 1), np.int64))
        arrays = env._stepper.latest
        assert (sets(arrays, 0)["ended"], sets(arrays, 0)["began"], sets(arrays, 0)["alive"]) == (
            {"a"},
            {"a"},
            {*AGENTS},
        )
        assert dones.tolist() == [[True, False, False]]
        _, _, _, dones, _, _ = env.step(np.zeros((1, 3, 1), np.int64))
        assert dones.tolist() == [[False, False, False]]


def test_in_turn_based_games_a_life_begins_with_the_first_observation():
    with make("pettingzoo.classic.tictactoe_v3:env", 2, auto_reset="NEXT_STEP", backend="serial") as env:
        stepper = Facade(env).stepper
        arrays = stepper.reset(seed=1)
        began, ended = arrays.began.copy(), arrays.ended.copy()
        agents = tuple(stepper.view.agents)
        for _ in range(9):
            masks = stepper.action_masks(agents)
            arrays = stepper.step([Stacked(agents, masks.argmax(axis=2))])
            began, ended = began + arrays.began.astype(int), ended + arrays.ended.astype(int)
            if arrays.terminated.any():
                break
        assert began.tolist() == ended.tolist() == [[1, 1]] * 2


@pytest.mark.parametrize("reward", [1.0, 2**60 + 1], ids=["numeric", "pickled"])
def test_last_observations_are_those_of_the_episode_whatever_infos_have(reward):
    """A simulator may have its own `final_obs` in infos, which stays there."""

    class Own(Scripted):
        def step(self, actions: Any) -> Any:
            seen, rewards, terminateds, truncateds, _ = super().step(actions)
            infos = {agent: {"final_obs": "my own"} for agent in AGENTS}
            return seen, dict.fromkeys(rewards, reward), terminateds, truncateds, infos

    with ParallelEnv([lambda: with_one_script(Own(0))], backend="serial") as env:
        stepper = Facade(env).stepper
        stepper.reset()
        for _ in range(8):
            arrays = stepper.step([Stacked(tuple(AGENTS), np.zeros((1, 3), np.int64))])
            assert arrays.infos[0]["a"]["final_obs"] == "my own"
            if arrays.truncated[0]:
                (final,) = arrays.final_observations
                assert arrays.finally_observed.tolist() == [[False, False, True]]  # as the script says
                assert final[0].tolist() == [[0, 0], [0, 0], [4, 4]]
                break
        else:
            raise AssertionError("no episode has ended")
