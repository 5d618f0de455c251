"""`pymarl_connections`: a runner that works as PyMARL's has the same data as with a process for each environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from helpers.processes import wait_for
from helpers.pymarl_runner import Runner, process_connections
from mpe2 import simple_spread_v3
from simulators.crashing import FAULT_KINDS
from simulators.skirmish import CountingSkirmish, GlobalSkirmish, ModernSkirmish, Skirmish, TallyingSkirmish
from simulators.teams import Patrol

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy, make
from marl_parallel.vector import PyMARLConnections, pymarl_connections

pytestmark = pytest.mark.release_independent

ENVS, RUNS = 4, 8
TEAM, EACH = {"common_reward": True}, {"common_reward": False}
HOWS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "process": {"num_workers": 2},
    "pickled": {"num_workers": 2, "shared_memory": False},
}


def makers(kind: Callable[..., Any] = Skirmish, **keywords: Any) -> list[Callable[..., Any]]:
    return [functools.partial(kind, seed=seed, **keywords) for seed in range(ENVS)]


def record(connections: list[Any], **keywords: Any) -> tuple[list[dict[str, Any]], Runner]:
    """The batches of some runs, every third one in test mode."""
    runner = Runner(connections, **keywords)
    try:
        return [runner.run(test_mode=number % 3 == 2) for number in range(RUNS)], runner
    finally:
        runner.close()


def assert_same(got: tuple[list[dict[str, Any]], Runner], expected: tuple[list[dict[str, Any]], Runner]) -> None:
    for batch, other in zip(got[0], expected[0], strict=True):
        for name in other:
            assert np.array_equal(batch[name], other[name]), name
    for name in ("env_info", "infos", "stats", "total_steps"):
        assert getattr(got[1], name) == getattr(expected[1], name), name
    assert np.array_equal(got[1].returns, expected[1].returns)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("kind", "keywords"),
    [(Skirmish, {}), (ModernSkirmish, TEAM), (ModernSkirmish, EACH)],
    ids=["three", "team", "each"],
)
def test_runner_has_the_same_data(kind, keywords, how):
    options = {"team": keywords.get("common_reward", True), "render": True}
    expected = record(process_connections(makers(kind, **keywords)), **options)
    got = record(pymarl_connections(makers(kind, **keywords), **HOWS[how]), **options)
    assert_same(got, expected)
    batches = expected[0]
    lengths = {int(length) for batch in batches for length in batch["filled"].sum((1, 2))}
    assert len(lengths) > 3  # episodes of different length
    assert any((batch["avail_actions"][..., 0] * batch["filled"]).any() for batch in batches)  # some have died
    limits = [info for info in expected[1].infos if info.get("episode_limit")]
    assert limits or kind is ModernSkirmish
    assert 0 < sum(batch["terminated"].sum() for batch in batches) <= ENVS * RUNS


@pytest.mark.parametrize("how", HOWS)
def test_simulators_are_called_as_often_as_by_processes(how):
    """Also those whose episodes are over while others go on."""
    expected = record(process_connections(makers(TallyingSkirmish)))
    assert_same(record(pymarl_connections(makers(TallyingSkirmish), **HOWS[how])), expected)
    assert {"step", "get_state", "get_obs", "get_avail_actions"} < {*expected[1].stats[-1]}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # more workers than CPUs
@pytest.mark.parametrize(("how", "fault"), [("serial", "raise"), ("pickled", "raise"), ("one each", "os._exit")])
def test_restarts_are_ends_at_the_limit(how, fault):
    """Compared with processes that make an environment again which raises; each agent has a reward."""

    def faulty(kind: str) -> list[Callable[..., Any]]:
        plain = makers(CountingSkirmish, **EACH)
        return [
            functools.partial(maker, fault=kind, fault_at=7 + 6 * i) if i % 2 else maker
            for i, maker in enumerate(plain)
        ]

    expected = record(process_connections(faulty("raise")), team=False)
    connections = pymarl_connections(faulty(fault), on_error="restart", **HOWS.get(how, {"num_workers": ENVS}))
    got = record(connections, team=False)
    assert_same(got, expected)
    assert sum("dead" not in info for info in got[1].infos) == 2
    assert connections[0].connections.parallel_env.stats().restarts == 2  # none more in `get_stats`


@pytest.mark.parametrize("name", ["render", "save_replay"])
def test_a_new_simulator_is_not_called_before_its_reset(name):
    """The last episode of the test mode may have ended in a fault, and the runner saves replays then."""
    connections = pymarl_connections(
        makers(CountingSkirmish, fault="raise", fault_at=0)[:1], backend="serial", on_error="restart"
    )
    (connection,), env = connections, connections[0].connections.parallel_env
    for message in (("reset", None), ("step", [1, 1, 1])):
        connection.send(message)
        connection.recv()
    connection.send((name, None))
    connection.send(("get_stats", None))
    assert connection.recv() == {}
    assert env.stats().restarts == 1
    assert env.get_attr("calls")[0] == {}
    connection.send(("reset", None))
    connection.send((name, None))
    connection.recv()
    assert env.get_attr("calls")[0] == {"reset": 1, name: 1}
    connection.close()


@pytest.mark.parametrize("how", HOWS)
def test_process_wide_generators(how):
    """Environments of one worker process do not draw from each other's."""
    expected, isolated = record(process_connections(makers(GlobalSkirmish))), {}
    if HOWS[how].get("backend") == "serial":  # in the caller's process, they are the caller's
        isolated = {"isolate_rng": True}
    assert_same(record(pymarl_connections(makers(GlobalSkirmish), **isolated, **HOWS[how])), expected)


def test_recycled_environments():
    expected = record(process_connections(makers(), max_episodes=3))
    got = record(pymarl_connections(makers(), num_workers=2, recycle=RecyclePolicy(max_episodes=3)))
    assert_same(got, expected)


def test_a_dead_worker_ends_the_episodes_of_its_environments():
    fault = {"fault": "os._exit", "fault_at": 3}
    first, others = makers(CountingSkirmish, **fault)[:2], makers(CountingSkirmish)[2:]
    connections = pymarl_connections([*first, *others], num_workers=2, on_error="restart")
    runner = record(connections)[1]
    assert len(runner.infos) == ENVS * RUNS
    assert sum("dead" not in info for info in runner.infos) in (2, 3)  # environment 0, its neighbour, and again


def test_what_is_sent_is_carried_out_together():
    connections = pymarl_connections(makers(), num_workers=2)
    env = connections[0].connections.parallel_env
    for connection in connections:
        connection.send(("reset", None))
    assert env.stats().resets == 0
    assert connections[3].poll()
    connections[2].recv()
    assert env.stats().resets == ENVS
    for connection in (connections[0], connections[1], connections[3]):
        connection.recv()
        assert not connection.poll()
    for connection in connections[1:]:
        connection.send(("step", [1, 1, 1]))
    assert env.stats().steps == 0
    replies = [connection.recv() for connection in connections[1:]]
    assert env.stats().steps == ENVS - 1  # environment 0 was not stepped
    assert {key: type(value) for key, value in replies[0].items()} == {
        "state": np.ndarray, "avail_actions": np.ndarray, "obs": np.ndarray, "reward": float, "terminated": bool,
        "info": dict,
    }  # fmt: skip
    assert replies[0]["obs"].dtype == replies[0]["state"].dtype == np.float32
    before = {key: replies[0][key].copy() for key in ("state", "avail_actions", "obs")}
    connections[1].send(("step", [1, 1, 1]))
    connections[1].recv()
    assert all(np.array_equal(replies[0][key], before[key]) for key in before)  # replies are the caller's own
    for connection in connections:
        connection.send(("close", None))


def test_actions_are_copied_when_they_are_sent():
    connections = pymarl_connections(makers(), backend="serial")
    actions = np.array([1, 1, 1])
    for connection in connections:
        connection.send(("reset", None))
    for connection in connections:
        connection.recv()
    connections[0].send(("step", actions))
    actions[:] = 99
    assert connections[0].recv()["reward"] == pytest.approx(-0.3)
    connections[0].connections.close()


def test_commands_out_of_order():
    connections = pymarl_connections(makers(), backend="serial")
    first, *others = connections
    with pytest.raises(ResetNeeded, match=r'environment 0: it was never reset; send \("reset", None\)'):
        first.send(("step", [1, 1, 1]))
    with pytest.raises(NoAsyncCallError, match=r"environment 0: recv\(\) .* sent since the last recv\(\): nothing"):
        first.recv()
    first.send(("save_replay", None))
    with pytest.raises(NoAsyncCallError, match="save_replay"):
        first.recv()
    with pytest.raises(ValueError, match="environment 0: unknown command 'rest'; expected one of get_env_info"):
        first.send(("rest", None))
    with pytest.raises(TypeError, match=r"expected a message \(command, data\), got 'reset'"):
        first.send("reset")
    for connection in connections:
        connection.send(("reset", None))
    for connection in connections:
        assert [*connection.recv()] == ["state", "avail_actions", "obs"]
    for wrong in ([1, 1], ["a", "b", "c"], 1, None, [[1, 1, 1]], [[1], [1, 1], [1]]):
        with pytest.raises(
            ValueError, match=r"environment 0: a step needs an action for each of 3 agents, an array \(3,"
        ):
            first.send(("step", wrong))
    first.send(("step", [1, 1, 1]))
    with pytest.raises(AlreadyPendingCallError, match="environment 0: the reply to an earlier step"):
        first.send(("step", [1, 1, 1]))
    first.send(("get_stats", None))
    assert first.recv()["terminated"] is False
    assert first.recv() == {"won": 0, "episodes": 1, "reset": 1, "save_replay": 1, "get_stats": 1}
    first.send(("reset", None))
    first.send(("step", [1, 1, 1]))  # a queue of both is as good
    assert "reward" not in first.recv()
    assert "reward" in first.recv()
    first.send(("close", None))
    for call in (first.recv, first.poll, lambda: first.send(("reset", None))):
        with pytest.raises(ClosedEnvironmentError, match="environment 0: its connection has been closed"):
            call()
    first.close()
    for connection in others:
        connection.close()
    with pytest.raises(ClosedEnvironmentError):
        others[0].recv()


def test_the_first_reset_is_of_all():
    connections = pymarl_connections(makers(), backend="serial")
    connections[1].send(("reset", None))
    with pytest.raises(ResetNeeded, match="reset all environments before"):
        connections[1].recv()
    connections[0].connections.close()


def test_workers_end_with_the_last_connection(tmp_path):
    connections = pymarl_connections(makers(), num_workers=2)
    env = connections[0].connections.parallel_env
    connections[0].send(("save_replay", None))  # nothing is received after it
    assert env.call("saved", env_ids=[0]) == ([],)
    for connection in connections[:3]:
        connection.send(("close", None))
    assert env.call("saved", env_ids=[0]) == ([0],)
    connections[3].send(("reset", None))
    connections[3].send(("close", None))
    with pytest.raises(ClosedEnvironmentError):
        env.call("saved")


def test_a_neighbour_whose_episode_is_over_may_be_new():
    """It had no part in the step in which its worker died."""

    class Brief(CountingSkirmish):
        episode_limit = 1

    crashing = functools.partial(CountingSkirmish, fault="os._exit", fault_at=1)
    connections = pymarl_connections([Brief, crashing], num_workers=1, on_error="restart")
    env = connections[0].connections.parallel_env
    for command in ("reset", "step"):
        for connection in connections:
            connection.send((command, [1, 1, 1]))
        replies = [connection.recv() for connection in connections]
    assert [reply["terminated"] for reply in replies] == [True, False]
    connections[1].send(("step", [1, 1, 1]))
    assert connections[1].recv()["info"] == {"episode_limit": True, "restarted": True}
    for connection in connections:
        connection.send(("get_stats", None))
    assert [connection.recv() for connection in connections] == [{}, {}]
    assert env.stats().restarts == 2
    for connection in connections:
        connection.send(("reset", None))
        connection.send(("step", [1, 1, 1]))
    assert [[*connection.recv()] for connection in connections] == [["state", "avail_actions", "obs"]] * 2
    assert [connection.recv()["terminated"] for connection in connections] == [True, False]
    connections[0].send(("get_stats", None))
    assert connections[0].recv()["won_mean"] == 0.0
    connections[0].connections.close()


class LoggedSkirmish(TallyingSkirmish):
    """Its episodes end at the limit. A rebuilt one writes calls before its first reset to a file.

    Args:
        log: The file.
        dies_in: The reset, of the first life, in which the process ends.
        restarts: See `Skirmish`.
    """

    episode_limit = 3

    def __init__(self, log: Path, dies_in: int = 0, restarts: int = 0) -> None:
        super().__init__(restarts=restarts)
        self.log, self.dies_in, self.restarts = log, dies_in, restarts

    def called(self, name: str) -> None:
        super().called(name)
        if self.restarts and not self.episodes and name != "reset":
            with self.log.open("a") as file:
                file.write(f"{name}\n")

    def reset(self) -> None:
        super().reset()
        self.health[:] = self.enemy = 99
        if self.restarts == 0 and self.episodes == self.dies_in:
            os._exit(2)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_neighbour_that_was_reset_before_its_process_died_is_new(tmp_path, shared_memory):
    """Its reset had ended; the process died in a later one of the same call."""
    log = tmp_path / "calls"
    log.touch()
    first, second = (functools.partial(LoggedSkirmish, log, dies_in=dies_in) for dies_in in (0, 2))
    connections = pymarl_connections([first, second], num_workers=1, on_error="restart", shared_memory=shared_memory)
    env = connections[0].connections.parallel_env

    def replies_to(*commands: str) -> list[Any]:
        for command in commands:
            for connection in connections:
                connection.send((command, [1, 1, 1]))
        return [connection.recv() for connection in connections]

    def play() -> list[dict[str, Any]]:
        replies = [replies_to("step") for _ in range(3)]
        assert [reply["terminated"] for reply in replies[-1]] == [True, True]
        return replies[-1]

    replies_to("reset")
    play()
    resets = replies_to("render", "save_replay", "reset")
    assert env.stats().restart_kinds == {"neighbour": 1, "death": 1}
    assert [reply["obs"][0, 2] for reply in resets] == [0.0, 0.0]
    assert resets[1]["state"][-1] == 0.0
    assert np.array_equal(resets[0]["state"], resets[1]["state"])
    assert replies_to("render", "save_replay", "get_stats")[0] == {}
    connections[0].send(("step", [1, 1, 1]))
    reply = connections[0].recv()
    assert reply["info"] == {"episode_limit": True, "restarted": True}
    assert np.array_equal(reply["obs"], resets[0]["obs"])
    assert np.array_equal(reply["state"], resets[0]["state"])
    ends = []
    for _ in range(3):  # the simulator of environment 0 is not stepped
        connections[1].send(("step", [1, 1, 1]))
        ends.append(connections[1].recv()["terminated"])
    assert ends == [False, False, True]
    stats = replies_to("render", "save_replay", "get_stats")
    assert stats[0] == {}
    assert stats[1]["episodes"] == 1
    replies_to("reset")
    play()
    assert [one["episodes"] for one in replies_to("get_stats")] == [1, 2]
    assert env.stats().restarts == 2
    connections[0].connections.close()
    assert log.read_text() == ""


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(("fault", "restarts"), [("raise", 1), ("os._exit", 2)])
def test_a_fault_in_the_state_of_a_step(fault, restarts, shared_memory):
    """A step ends with its state: without one, the episode ends with the step before."""

    class Stateless(Skirmish):
        def __init__(self, env_id: int, restarts: int = 0) -> None:
            super().__init__(seed=env_id)
            self.fails = env_id == 1 and restarts == 0

        def get_state(self) -> Any:
            if self.fails and self.time == 1:
                FAULT_KINDS[fault].cause()
            return super().get_state()

    connections = pymarl_connections([Stateless] * 2, num_workers=1, on_error="restart", shared_memory=shared_memory)
    replies = []
    for command in ("reset", "step", "reset", "step"):
        for connection in connections:
            connection.send((command, [1, 1, 1]))
        replies.append([connection.recv() for connection in connections])
    first, failed, reset, second = (reply[1] for reply in replies)
    assert failed["terminated"]
    assert failed["info"] == {"episode_limit": True, "restarted": True}
    assert np.array_equal(failed["obs"], first["obs"])
    assert np.array_equal(failed["state"], first["state"])
    assert reset["obs"][0, 2] == 0.0  # the time
    assert second["obs"][0, 2] == 1.0
    assert not second["terminated"]
    assert not replies[1][0]["terminated"]  # its step was complete
    assert connections[0].connections.parallel_env.stats().restarts == restarts
    connections[0].connections.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_changed_reply_is_not_what_a_restart_repeats(shared_memory):
    connections = pymarl_connections(
        makers(fault="raise", fault_at=1)[:2], num_workers=1, on_error="restart", shared_memory=shared_memory
    )
    names = ("state", "avail_actions", "obs")
    expected: list[Any] = []
    for command in ("reset", "step", "step"):
        for connection in connections:
            connection.send((command, [1, 1, 1]))
        replies = [connection.recv() for connection in connections]
        if "restarted" in replies[0].get("info", {}):
            break
        expected = [{name: reply[name].copy() for name in names} for reply in replies]
        for reply in replies:
            for name in names:
                reply[name][...] = -7
    else:
        pytest.fail("there was no restart")
    for reply, before in zip(replies, expected, strict=True):
        assert all(np.array_equal(reply[name], before[name]) for name in names)
    connections[0].connections.close()


def test_messages_may_be_lists():
    connections = pymarl_connections(makers()[:1], backend="serial")
    (connection,) = connections
    connection.send(["reset", None])
    assert "obs" in connection.recv()
    connection.send(["step", [1, 1, 1]])
    assert connection.recv()["reward"] == pytest.approx(-0.3)
    wrong: Any
    for wrong in (["reset"], ("reset", None, None), [], (), {"reset": None}, b"re", "re", None, 3):
        with pytest.raises(TypeError, match=r"environment 0: expected a message \(command, data\), got"):
            connection.send(wrong)
    for unknown in ([None, None], [np.zeros(2), None], (["reset"], None)):
        with pytest.raises(ValueError, match="environment 0: unknown command"):
            connection.send(unknown)
    connection.send(["close", None])
    with pytest.raises(ClosedEnvironmentError):
        connection.connections.parallel_env.reset()
    connection.send(["close", None])  # once more is no error


@pytest.mark.parametrize("name", ["render", "get_stats", "save_replay"])
def test_a_call_that_fails(name, caplog):
    """It is an error, or a log record if environments are restarted; the next step then ends the episode."""
    keywords = {"call_fault": name}
    connections = pymarl_connections(makers(**keywords), backend="serial", on_error="restart")
    for connection in connections:
        connection.send(("reset", None))
    for connection in connections:
        connection.recv()
    replies = []
    for _ in range(2):
        connections[1].send((name, None))
        connections[1].send(("step", [1, 1, 1]))
        replies += [connections[1].recv() for _ in range(1 + (name == "get_stats"))]
    (record,) = caplog.records
    assert f"{name} is out of order; it is restarted" in record.getMessage()
    if name == "get_stats":
        assert replies[2] == {}
    assert replies[-1]["info"] == {"episode_limit": True, "restarted": True}
    assert replies[-1]["terminated"] is True
    assert np.array_equal(replies[-1]["obs"], replies[name == "get_stats"]["obs"])
    for connection in connections:
        connection.send(("reset", None))
    assert [connection.recv()["obs"].shape for connection in connections] == [(3, 4)] * ENVS
    connections[0].connections.close()

    failing = pymarl_connections(makers(**keywords), backend="serial")
    for _ in range(2):
        failing[0].send((name, None))
    failing[0].send(("get_env_info", None))
    with pytest.raises(EnvError, match=f"{name} is out of order"):
        failing[0].recv()
    with pytest.raises(ClosedEnvironmentError):
        failing[0].recv()


def test_closing_after_a_fault_hides_nothing():
    """As a runner does in a `finally`."""
    runner = Runner(pymarl_connections(makers(fault="raise", fault_at=0), backend="serial"))

    def train() -> None:
        try:
            runner.run()
        finally:
            runner.close()

    with pytest.raises(EnvError):
        train()
    runner.close()
    with pytest.raises(ClosedEnvironmentError):
        runner.connections[0].send(("reset", None))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("form", [list, np.array, sum])
def test_without_common_reward_the_first_step_shows_the_form_of_rewards(form, how):
    class Undeclared(Skirmish):
        def step(self, actions: Any) -> Any:
            rewards, over, limit = self.fight(actions)
            return form(rewards), over or limit, {}

    connections = pymarl_connections([Undeclared], **HOWS[how])
    rewards = []
    for message in (("reset", None), ("step", [1, 1, 1]), ("step", [2, 1, 1]), ("step", [1, 1, 1])):
        connections[0].send(message)
        rewards.append(connections[0].recv().get("reward"))
    listed = [[-0.1] * 3, [1.0, -0.1, -0.1], [-0.1] * 3]
    assert rewards == [None, *[pytest.approx(sum(each) if form is sum else each) for each in listed]]
    assert {type(reward) for reward in rewards[1:]} == {float if form is sum else list}
    connections[0].close()


def test_a_rebuilt_simulator_does_not_show_the_form_of_rewards():
    """Environment 0 is rebuilt after its first step, as its neighbour's process dies: it knows no reward then."""

    class Listing(Skirmish):
        def step(self, actions: Any) -> Any:
            rewards, over, limit = self.fight(actions)
            return rewards, over or limit, {}

    connections = pymarl_connections(
        [Listing, functools.partial(Listing, fault="os._exit", fault_at=0)], num_workers=1, on_error="restart"
    )
    replies = []
    for command in ("reset", "step", "reset", "step"):
        for connection in connections:
            connection.send((command, [1, 1, 1]))
        replies.append([connection.recv() for connection in connections])
    assert replies[1][1]["info"] == {"episode_limit": True, "restarted": True}
    assert [reply["reward"] for reply in replies[3]] == [pytest.approx([-0.1] * 3)] * 2
    connections[0].connections.close()


def test_a_method_that_is_missing():
    class Silent(Skirmish):
        get_stats: Any = property()

    connections = pymarl_connections([Silent, Silent], backend="serial")
    for connection in connections:
        connection.send(("get_stats", None))
    for connection in connections:
        with pytest.raises(AttributeError, match="get_stats"):
            connection.recv()
    connections[0].send(("get_env_info", None))
    assert connections[0].recv()["n_agents"] == 3
    connections[0].connections.close()


def test_arguments():
    for name, value in {"auto_reset": True, "seed": 3, "episode_stats": True}.items():
        with pytest.raises(TypeError, match=f"pymarl_connections takes no {name}="):
            pymarl_connections([Skirmish], **{name: value})
    with pytest.raises(TypeError, match="num_worker"):
        pymarl_connections([Skirmish], num_worker=2)
    env = ParallelEnv([simple_spread_v3.parallel_env], auto_reset=False, backend="serial")
    with pytest.raises(ValueError, match="needs environments with PyMARL's interface"):
        PyMARLConnections(env)
    env.close()
    env = ParallelEnv([Skirmish], backend="serial", adapter="pymarl")
    with pytest.raises(ValueError, match="PyMARLConnections needs a ParallelEnv with auto_reset=False"):
        PyMARLConnections(env)
    env.close()


def test_make():
    connections = make(Skirmish, 3, facade="pymarl", seed="own", backend="serial")
    assert isinstance(connections, PyMARLConnections)
    assert [one.env_id for one in connections[1:]] == [1, 2]
    for connection in connections:
        connection.send(("reset", None))
    assert connections[2].recv()["state"].shape == (5,)
    connections.close()
    with pytest.raises(ClosedEnvironmentError):
        connections[2].recv()


def test_a_refused_call_loses_no_command(tmp_path):
    """While another thread is inside a call, `recv` raises; later, all commands are carried out."""
    env = ParallelEnv([functools.partial(Patrol, 2)] * 2, False, seed="own", adapter="pymarl", num_workers=2)
    connections = PyMARLConnections(env)
    for connection in connections:
        connection.send(("reset", None))

    def wait(_: Any) -> None:
        wait_for((tmp_path / "go").exists)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(env.call, wait)
        try:
            wait_for(lambda: bool(env.stepper.batch.guard))
            with pytest.raises(AlreadyPendingCallError, match=r"is inside call\(\)"):
                connections[0].recv()
        finally:
            (tmp_path / "go").touch()
        held.result(60.0)
    assert [connection.recv()["obs"].shape for connection in connections] == [(2, 3)] * 2
    env.close()
