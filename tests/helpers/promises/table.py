"""The promises of every facade: one test each. `class TestX(Promises): driver = X()` is a facade's row of the table."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from helpers.promises.driver import DISABLED, NEXT_STEP, SAME_STEP, Driver, InHalves, assert_equal
from helpers.promises.games import AGENTS, GAMES, OPEN, WEIGHTS, Fault, make
from helpers.promises.loop import ByAgent, Loop, Moment
from marl_parallel import ParallelEnv, RecyclePolicy
from marl_parallel.vector import StackedVecEnv

ENVS, STEPS = 3, 12
MODES = (SAME_STEP, NEXT_STEP, DISABLED)
FAULTS = {
    "step": Fault("step", 1, 2),
    "first_step": Fault("step", 2, 1),
    "reset": Fault("reset", 2),
    "first_reset": Fault("reset", 1),
    "after_a_death": Fault("step", 1, 3),
    "twice": Fault("step", 1, 2, twice=True),
}
"""When a simulator breaks: in the middle of an episode, right after an automatic reset, in it, at once, in the step
after the end of an agent, and once more in the first step after that."""


class Run:
    """A facade beside plain loops; each call compares what the facade shows."""

    def __init__(self, driver: Driver, game: str, mode: AutoresetMode, fault: Fault | None = None, **how: Any) -> None:
        script = driver.script(game)
        made = script._replace(vectors=how.pop("vectors", False))  # the loops play with numbers
        self.shows_vectors = made.vectors and "scalarize" not in how
        self.driver, self.mode, self.game = driver, mode, script
        arguments = {"backend": "serial", **({} if fault is None else {"on_error": "restart"}), **how}
        self.facade = driver.open([make(made, fault)] * ENVS, mode, **arguments)
        self.loops = [Loop(script, env_id, mode, fault) for env_id in range(ENVS)]
        for loop in self.loops:
            loop.passes_on = driver.passes_on and loop.dict_rules
        self.actions = np.random.default_rng(3)
        self.time = self.resets = 0
        self.moments: list[Moment] = []  # of the latest call
        self.read_ids: Sequence[int] = ()

    def drawn(self) -> list[ByAgent]:
        """An action for every agent; those of agents that do not act count nothing."""
        return [self.driver.drawn(self.actions, loop.now) for loop in self.loops]

    def compare(self, results: Any, env_ids: Sequence[int] = range(ENVS), what: str = "step") -> None:
        self.read_ids = env_ids
        self.moments = [self.loops[env_id].now for env_id in env_ids]  # type: ignore[misc]
        for env_id, moment in zip(env_ids, self.moments):
            shown = self.driver.read(self.facade, results, env_id)
            if self.shows_vectors and "rewards" in shown:
                shown["rewards"] = {agent: as_number(reward) for agent, reward in shown["rewards"].items()}
            expected = self.driver.expected(moment)
            missing = expected.keys() - shown.keys()
            assert not missing or what != "step" or moment.kind == "reset", f"the driver does not read {missing}"
            for key, value in shown.items():
                assert_equal(value, expected[key], f"{what} {self.time}, environment {env_id}, {moment.kind}, {key}")

    def compare_others(self, results: Any, env_ids: Sequence[int]) -> None:
        """The observations of environments that were not reset or loaded, if the driver `keeps_rows`."""
        for env_id in {*range(ENVS)} - {*env_ids} if self.driver.keeps_rows else ():
            moment = self.loops[env_id].now
            assert moment is not None
            seen = self.driver.read(self.facade, results, env_id)["observations"]
            expected = self.driver.expected(moment)["observations"]
            assert_equal(seen, expected, f"beside environments {env_ids} at {self.time}, environment {env_id}")

    def reset(self, env_ids: list[int] | None = None, *, has_begun: bool = False) -> Any:
        """Reset; every second time by `reset_async` and `reset_wait`, if nothing is in flight."""
        self.resets += 1
        in_halves = has_begun or (self.driver.waits and self.resets % 2 == 0 and not self.facade_env.pending)
        facade = InHalves(self.facade, has_begun=has_begun) if in_halves else self.facade
        results = self.driver.reset(facade, env_ids)
        for env_id in range(ENVS) if env_ids is None else env_ids:
            self.loops[env_id].reset()
        self.compare(results, range(ENVS) if env_ids is None else env_ids, "reset at")
        if env_ids is not None:
            self.compare_others(results, env_ids)
        return results

    def step(self, *, sends: bool = False) -> Any:
        actions = self.drawn()
        if sends:
            self.driver.send(self.facade, actions)
            results = self.driver.receive(self.facade)
        else:
            results = self.driver.step(self.facade, actions)
        for loop, of_env in zip(self.loops, actions):
            loop.step(of_env)
        self.time += 1
        self.compare(results)
        return results

    def receive(self, actions: list[ByAgent]) -> None:
        """The results of a step that has been sent."""
        results = self.driver.receive(self.facade)
        for loop, of_env in zip(self.loops, actions):
            loop.step(of_env)
        self.compare(results)

    @property
    def over(self) -> list[int]:
        return [env_id for env_id, loop in enumerate(self.loops) if loop.now is not None and loop.now.is_over]

    def play(self, steps: int = STEPS) -> Iterator[Any]:
        """Steps, every third by `send` and `receive`; with DISABLED, resets of what is over."""
        yield self.reset()
        for number in range(steps):
            yield self.step(sends=self.driver.sends and number % 3 == 2)
            if self.mode is not DISABLED or not self.over:
                continue
            if not self.driver.resets_some:
                if len(self.over) == ENVS:
                    self.reset()
            elif self.driver.resets_at_once or number % 2 or self.game.rules == "dicts":
                yield self.reset(self.over)

    @property
    def facade_env(self) -> ParallelEnv:
        return self.driver.env_of(self.facade)

    def close(self) -> None:
        self.driver.close(self.facade)


def as_number(reward: Any) -> float:
    """A vector reward as the number of the same game without vectors; 0.0 and NaN stand for no reward."""
    return float(np.dot(reward, WEIGHTS)) if isinstance(reward, np.ndarray) else reward


class Promises:
    """The row of one facade."""

    driver: ClassVar[Driver]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """The games and modes of the facade."""
        driver, wanted = self.driver, metafunc.fixturenames
        if "game" in wanted:
            metafunc.parametrize("game", driver.games)
        if "mode" in wanted:
            metafunc.parametrize("mode", driver.modes, ids=lambda mode: mode.name)
        if "fault" in wanted:
            metafunc.parametrize("fault", FAULTS)

    @pytest.fixture
    def runs(self) -> Iterator[Any]:
        """Makes a `Run`, which is closed in the end."""
        made: list[Run] = []

        def run(*arguments: Any, **keywords: Any) -> Run:
            made.append(Run(*arguments, **keywords))
            return made[-1]

        yield run
        for one in made:
            one.close()

    def run(self, runs: Any, mode: AutoresetMode | None = None, **how: Any) -> Run:
        """A run of the facade's first game and mode."""
        run: Run = runs(self.driver, self.driver.games[0], mode or self.driver.modes[0], **how)
        return run

    def zeros(self) -> list[ByAgent]:
        return [dict.fromkeys(AGENTS, 0) for _ in range(ENVS)]

    # -- lives, ends and restarts ----------------------------------------------------------------------------------

    def test_lives(self, game, mode, runs):
        """Who is observed, rewarded, flagged, acts, and takes part, and how episodes end, is that of a plain loop."""
        run = runs(self.driver, game, mode)
        for _ in run.play():
            pass

    def test_lives_without_shared_memory(self, mode, runs):
        """The same where transitions are pickled."""
        for game in self.driver.pickled_games:
            for _ in runs(self.driver, game, mode, shared_memory=False).play(9):
                pass

    def test_lives_in_processes(self, runs):
        for game in self.driver.pickled_games[-2:]:
            for _ in runs(self.driver, game, self.driver.modes[0], backend="process", num_workers=2).play(9):
                pass

    def test_restarts(self, fault, mode, runs):
        """A fault ends the episode by truncation, and the neighbours go on."""
        for game in self.driver.restarted_games:
            run = runs(self.driver, game, mode, FAULTS[fault])
            for _ in run.play(10):
                pass
            assert run.loops[1].restarts == 1 + FAULTS[fault].twice

    @pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")
    def test_restart_of_a_process(self, runs):
        """The same where the fault kills the worker process; another worker steps the neighbours."""
        game, mode = self.driver.restarted_games[0], self.driver.modes[0]
        run = runs(self.driver, game, mode, Fault(how="SIGKILL"), backend="process", num_workers=ENVS)
        for _ in run.play(6):
            pass
        assert run.loops[1].restarts == 1

    @pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")
    def test_recycling(self, mode, runs):
        """At the end of an episode, a new simulator goes on; nothing else shows it but its mark."""
        run = self.run(runs, mode, backend="process", num_workers=ENVS, recycle=RecyclePolicy(max_episodes=1))
        for loop in run.loops:
            loop.recycles = True
        for _ in run.play(9):
            pass
        assert run.loops[0].restarts > 1

    def test_resets_in_an_episode(self, mode, runs):
        """The caller resets some environments in the middle of their episodes, and all of them; then one breaks."""
        for game, fault in itertools.product(self.driver.restarted_games, (None, Fault("step", 3, 1))):
            run = runs(self.driver, game, mode, fault)
            for number in range(3):
                run.reset()
                for time in range(5):
                    run.step()
                    if time in (1, 3) and self.driver.resets_some:
                        run.reset([number, *{env_id for env_id in run.over if mode is DISABLED} - {number}])
                    elif mode is DISABLED and run.over:
                        break

    def test_some_in_flight(self, mode, runs):
        """Results of some environments come, and some are reset, while others are in flight; none is lost."""
        driver = self.driver
        for fault in (None, FAULTS["step"]) if driver.steps_some else ():
            run = runs(driver, driver.restarted_games[-1], mode, fault, backend="thread", num_workers=2)
            run.reset()
            ready, sent = [*range(ENVS)], dict[int, ByAgent]()
            counts = dict.fromkeys(ready, 0)
            while min(counts.values()) < 8:
                if over := [env_id for env_id in ready if env_id in run.over]:
                    run.reset(over)
                new = {env_id: driver.drawn(run.actions, run.loops[env_id].now) for env_id in ready}
                sent |= new
                results, ready = driver.step_some(run.facade, new)
                for env_id in ready:
                    run.loops[env_id].step(sent.pop(env_id))
                    counts[env_id] += 1
                run.compare(results, ready)

    def test_masks(self, mode, runs):
        """The masks of all agents are those in their latest observations or infos."""
        for game in self.driver.masked_games:
            run = runs(self.driver, game, mode)
            for results in run.play(9):
                for env_id, moment in zip(run.read_ids, run.moments):
                    masks = self.driver.masks(run.facade, results, env_id)
                    what = f"{game!r}, step {run.time}, masks of environment {env_id}"
                    assert_equal(masks, self.driver.expected_masks(moment), what)

    def test_vector_rewards(self, mode, runs):
        """They are refused or shown, or become the numbers that `scalarize` says."""
        driver, fault = self.driver, FAULTS["step"]
        for game in driver.vector_games:
            rules = {"agent_0": WEIGHTS, "agent_1": np.array(WEIGHTS), "agent_2": as_number}
            if driver.shows_vectors:
                for _ in runs(driver, game, mode, fault, vectors=True).play():
                    pass
            else:
                with pytest.raises(ValueError, match=r"takes rewards that are numbers, but agent 'agent_0'.*scalarize"):
                    runs(driver, game, mode, vectors=True)
            if driver.scalarizes:
                for _ in runs(driver, game, mode, fault, vectors=True, scalarize=rules).play():
                    pass

    # -- saved states ----------------------------------------------------------------------------------------------

    def test_saved_states(self, mode, runs):
        """Another facade goes on from the state after each call as the first one does, also if the next step fails."""
        driver = self.driver
        cases = [*itertools.product(driver.saved_games, [None]), (driver.saved_games[0], FAULTS["after_a_death"])]
        for game, fault in cases if driver.saves else ():
            first, other = (runs(driver, game, mode, fault) for _ in range(2))
            for number, _ in enumerate(first.play(8)):
                if number % 2:
                    continue
                states = driver.save(first.facade)
                other.loops, other.time = copy.deepcopy(first.loops), first.time
                other.compare(driver.load(other.facade, states), what="loaded at")
                for _ in range(2):
                    if not (mode is DISABLED and other.over):
                        other.step()

    def test_saved_states_of_some(self, mode, runs):
        """Only one environment goes back to an earlier time."""
        driver = self.driver
        for game in driver.saved_games if driver.saves and driver.loads_some else ():
            run = runs(driver, game, mode)
            states: list[tuple[bytes, Loop]] = []
            for _ in run.play(7):
                states.append((driver.save(run.facade)[1], copy.deepcopy(run.loops[1])))
            if not driver.loads_some_first:
                with pytest.raises(ResetNeeded, match="reset or load all environments"):
                    driver.load(runs(driver, game, mode).facade, states[0][:1], [1])
            for state, loop in states:
                run.loops[1] = copy.deepcopy(loop)
                results = driver.load(run.facade, [state], [1])
                run.compare(results, [1], "loaded at")
                run.compare_others(results, [1])
                if not (mode is DISABLED and run.over):
                    run.step()

    def test_states_of_another_facade(self, mode, runs):
        """Environments go on from them; what only that facade knew begins anew."""
        run = self.run(runs, mode)
        if not self.driver.saves or self.driver.is_drop_in:
            return
        run.reset()
        run.step()
        states = run.facade_env.save_state()
        loaded = self.run(runs, mode)
        loaded.loops = copy.deepcopy(run.loops)
        loaded.compare(self.driver.load(loaded.facade, states), what="loaded at")
        for loop in loaded.loops:
            loop.sums.clear()
        loaded.step()
        loaded.step()

    # -- arrays ----------------------------------------------------------------------------------------------------

    def test_arrays_belong_to_the_caller(self, mode, runs):
        """They keep their values, and overwriting them changes no later result."""
        for copies in (True, False) if self.driver.copies and self.driver.takes_views else (True,):
            kept = []
            run = self.run(runs, mode, copy=copies)
            for results in run.play():
                kept += [(array, array.copy()) for array in self.driver.parts(results)]
            for array, before in kept:
                assert np.array_equal(array, before, equal_nan=array.dtype.kind == "f"), "a later call has changed it"
            run = self.run(runs, mode, copy=copies)
            for results in run.play():
                for array in self.driver.parts(results):
                    if array.flags.writeable:
                        array[...] = 1

    def test_views(self, mode, runs):
        """With `copy=False`, observations are right until the next call."""
        if not self.driver.takes_views:
            with pytest.raises(ValueError, match="copy=False"):
                self.run(runs, mode, copy=False)
            return
        for _ in self.run(runs, mode, copy=False).play():
            pass

    # -- wrong use -------------------------------------------------------------------------------------------------

    def test_wrong_type(self, runs):
        if not self.driver.is_drop_in:
            name = type(self.run(runs).facade).__name__
            for wrong in (make(GAMES["all_live"])(), "game", None):
                with pytest.raises(TypeError, match=f"{name} takes a ParallelEnv, got {type(wrong).__name__}"):
                    self.driver.make(wrong)  # type: ignore[arg-type]

    def test_wrong_mode(self, runs):
        name = type(self.run(runs).facade).__name__
        for mode in MODES:
            if mode not in self.driver.modes:
                with pytest.raises(ValueError, match=f"{name} needs a ParallelEnv with auto_reset=.*, got auto_reset="):
                    self.driver.open([make(self.driver.script(self.driver.games[0]))], mode, backend="serial")

    def test_closed_environment(self, runs):
        if not self.driver.is_drop_in:
            env = self.run(runs).facade_env
            env.close()
            with pytest.raises(ClosedEnvironmentError):
                self.driver.make(env)

    def test_two_facades_of_one_environment(self, mode, runs):
        """The one that has reset steps; another takes over when it is closed or gone, but not before."""
        if self.driver.is_drop_in:
            return
        run = self.run(runs, mode)
        other = self.driver.make(run.facade_env)
        run.reset()
        with pytest.raises(RuntimeError, match=f"stepped by a {type(other).__name__} already"):
            self.driver.reset(other)
        with pytest.raises((RuntimeError, ResetNeeded)):
            self.driver.step(other, self.zeros())
        with pytest.raises(RuntimeError, match="stepped by a"):
            StackedVecEnv(run.facade_env).reset()
        run.step()
        run.facade = None
        gc.collect()
        run.facade = other
        run.reset()
        run.step()

    def test_calls_out_of_order(self, mode, runs):
        driver, run = self.driver, self.run(runs, mode)
        with pytest.raises(ResetNeeded):
            driver.step(run.facade, self.zeros())
        if driver.sends:
            with pytest.raises(ResetNeeded):
                driver.send(run.facade, self.zeros())
            with pytest.raises(NoAsyncCallError):
                driver.receive(run.facade)
        if driver.resets_some and not driver.resets_some_first:
            with pytest.raises(ResetNeeded):
                driver.reset(run.facade, [1])
        if driver.saves:
            with pytest.raises(ResetNeeded):
                driver.save(run.facade)
        run.reset()
        run.step()
        if driver.resets_at_once:
            while not run.over:
                run.step()
            with pytest.raises(ResetNeeded):
                driver.step(run.facade, self.zeros())
            run = self.run(runs, mode)
            run.reset()
        if not driver.sends:
            return
        with pytest.raises(NoAsyncCallError):
            driver.receive(run.facade)
        actions = self.zeros()
        driver.send(run.facade, actions)
        calls = [lambda: driver.step(run.facade, actions), lambda: driver.send(run.facade, actions)]
        if driver.refuses_reset_in_flight:
            calls.append(lambda: driver.reset(run.facade))
        if driver.saves:
            calls.append(lambda: driver.save(run.facade))
        for call in calls:
            with pytest.raises(AlreadyPendingCallError):
                call()
        run.receive(actions)
        if not driver.refuses_reset_in_flight:
            driver.send(run.facade, actions)
            for loop, of_env in zip(run.loops, actions):
                loop.step(of_env)
            run.reset()
            run.step()
            if driver.waits:
                run.facade.reset_async()
                for loop in run.loops:
                    loop.reset()
                run.reset()

    def test_calls_after_close(self, mode, runs):
        driver = self.driver
        for in_flight in (False, True) if driver.sends else (False,):
            run = self.run(runs, mode)
            run.reset()
            if in_flight:
                driver.send(run.facade, self.zeros())
            driver.close(run.facade)
            driver.close(run.facade)
            calls = [lambda: driver.reset(run.facade), lambda: driver.step(run.facade, self.zeros())]  # noqa: B023
            if driver.sends:
                calls.append(lambda: driver.send(run.facade, self.zeros()))  # noqa: B023
                calls.append(lambda: driver.receive(run.facade))  # noqa: B023
            if driver.saves:
                calls.append(lambda: driver.save(run.facade))  # noqa: B023
            if driver.waits:
                calls += [lambda: run.facade.reset_async(), lambda: run.facade.call_async("times", 2.0)]  # noqa: B023
            if driver.forwards:
                calls.append(lambda: run.facade.get_attr("mark"))  # noqa: B023
            for call in calls:
                with pytest.raises(ClosedEnvironmentError):
                    call()

    def test_wrong_actions(self, mode, runs):
        """They are refused before anything is stepped."""
        run = self.run(runs, mode)
        run.reset()
        for wrong in self.driver.wrong_actions(run.facade):
            with pytest.raises(self.driver.refusals):
                self.driver.step_with(run.facade, wrong)
        assert run.facade_env.stats().steps == 0
        run.step()

    # -- waiting, and what reaches the simulators --------------------------------------------------------------------

    def test_waits_that_time_out(self, mode, runs):
        """Nothing is lost; what is in flight refuses other calls, also while the first reset is."""
        driver = self.driver
        if not driver.waits:
            return
        run = self.run(runs, mode, backend="thread", num_workers=2)
        facade, actions = run.facade, self.zeros()
        sends: dict[str, Any] = {
            "reset": facade.reset_async,
            "step": lambda: driver.send(facade, actions),
            "call": lambda: facade.call_async("times", 2.0),
        }
        others = [lambda: driver.step(facade, actions), facade.render, lambda: facade.get_attr("mark"), *sends.values()]
        if driver.refuses_reset_in_flight:
            others.append(lambda: driver.reset(facade))
            if driver.resets_some:
                others.append(lambda: driver.reset(facade, [1]))
        for name in sends:
            with pytest.raises(NoAsyncCallError, match=f"{name}_wait.* without a {name}_async"):
                getattr(facade, f"{name}_wait")()
        run.facade_env.reset_async()  # not the facade's own
        for call in others:
            with pytest.raises(AlreadyPendingCallError, match="in flight"):
                call()
        run.facade_env.recv(ENVS)
        for loop in run.loops:
            loop.reset()
        for name, send in sends.items():
            OPEN.clear()
            try:
                send()
                for _ in range(2):
                    with pytest.raises(multiprocessing.TimeoutError, match="Nothing is lost") as caught:
                        getattr(facade, f"{name}_wait")(timeout=0.01)
                    assert isinstance(caught.value, TimeoutError)
                for call in others:
                    with pytest.raises(AlreadyPendingCallError):
                        call()
            finally:
                OPEN.set()
            if name == "reset":
                run.reset(has_begun=True)
            elif name == "step":
                run.receive(actions)
            else:
                assert facade.call_wait() == (0.0,) * ENVS
        run.step()

    def test_attributes_calls_and_frames(self, runs):
        """Those of all simulators, in the order of environments."""
        run = self.run(runs)
        run.reset()
        if self.driver.forwards:
            run.facade.set_attr("mark", [1.0, 2.0, 4.0])
            assert run.facade.call("times", 2.0) == (2.0, 4.0, 8.0)
            run.facade.set_attr("colour", "red")  # a new one
            assert run.facade.get_attr("colour") == ("red",) * ENVS
            frames = [frame[0, 0, 0] for frame in run.facade.render()]
            assert [*dict.fromkeys(frames)] == [0, 10, 20]

    def test_seeds_and_options(self, mode, runs):
        """Those of a reset reach the simulators; options are gone with the next one."""
        run = self.run(runs, mode)
        if self.driver.takes_options:
            run.facade.reset(seed=7, options={"hill": 3})
            assert run.facade_env.get_attr("latest") == tuple((7 + env_id, {"hill": 3}) for env_id in range(ENVS))
            run.facade.reset()
            assert run.facade_env.get_attr("latest") == ((None, None),) * ENVS
