"""PyMARL's and EPyMARL's `ParallelRunner` on a `ParallelEnv`: connections in place of its pipes.

The runner sends a command to each environment and then receives each reply. `PyMARLConnections` keeps commands, and
carries them out when the first reply is received: one step of the `ParallelEnv` for all environments.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import OfAdapter
from marl_parallel.core.block import stacking
from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.transition import COMMON
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.types import ParallelEnvError
from marl_parallel.vector.drop_in import drop_in
from marl_parallel.vector.forwarding import OfParallelEnv
from marl_parallel.vector.stepper import Arrays, ArrayStepper, Joint, Stacked

_STEP, _RESET, _CLOSE = "step", "reset", "close"
_CALLS = {"get_env_info": True, "get_stats": True, "render": False, "save_replay": False}
"""Commands that call the simulator's method of that name, and whether they have a reply."""
_ORDER = (*_CALLS, _RESET, _STEP)
_COMMANDS = (*_ORDER, _CLOSE)


class _Sent(NamedTuple):
    """A command that waits to be carried out; `actions` of a step."""

    command: str
    actions: NDArray[Any] | None = None

    @property
    def has_reply(self) -> bool:
        return _CALLS.get(self.command, True)


class _Failure(NamedTuple):
    """An error in place of a reply; `recv` raises it."""

    error: Exception


class _Seen(NamedTuple):
    """The states, masks and observations of a step or reset, with one row for each environment."""

    states: NDArray[Any]
    masks: NDArray[np.bool_]
    observations: Any

    def copied(self) -> _Seen:
        return _Seen(self.states.copy(), self.masks.copy(), self.observations.copy())

    def replies(self) -> Callable[[int], dict[str, Any]]:
        """A function that returns the part of one environment's reply that is in these arrays."""
        masks = self.masks.astype(np.int64)
        return lambda env_id: {
            "state": self.states[env_id], "avail_actions": masks[env_id], "obs": self.observations[env_id]
        }  # fmt: skip


class PyMARLConnections(OfParallelEnv, Sequence["PyMARLConnection"]):
    """One connection for each environment, with the protocol of the pipes in PyMARL's `ParallelRunner`.

    Commands wait until the first `recv`; then all are carried out together, each environment's commands in their order.
    A step that a fault interrupts ends its episode as at the episode limit: `terminated` is True, the reward 0, `info`
    is `{"episode_limit": True, "restarted": True}`, and observations, masks and state repeat the previous reply.
    `docs/frameworks/pymarl.md` shows what changes in the runner.

    Args:
        env: Its environments have PyMARL's interface (`adapter="pymarl"`), and `auto_reset` is False.

    Raises:
        ValueError: The environments have another interface or different agents, or `auto_reset` is not False.

    Example:
        >>> from marl_parallel import ParallelEnv
        >>> class Corridor:  # one agent walks to the right, to the end
        ...     n_agents, episode_limit = 1, 20
        ...
        ...     def reset(self):
        ...         self.place = 0
        ...
        ...     def step(self, actions):
        ...         self.place += int(actions[0])
        ...         return 1.0, self.place == 3, {}
        ...
        ...     def get_obs(self):
        ...         return [[self.place]]
        ...
        ...     def get_state(self):
        ...         return [self.place]
        ...
        ...     def get_avail_actions(self):
        ...         return [[1, 1]]
        ...
        ...     def get_total_actions(self):
        ...         return 2
        ...
        ...     def get_env_info(self):
        ...         sizes = {"state_shape": 1, "obs_shape": 1, "n_actions": 2}
        ...         return {**sizes, "n_agents": 1, "episode_limit": self.episode_limit}
        >>> connections = PyMARLConnections(ParallelEnv([Corridor] * 2, auto_reset=False, seed="own", num_workers=2))
        >>> for connection in connections:
        ...     connection.send(("reset", None))
        >>> [connection.recv()["avail_actions"].tolist() for connection in connections]
        [[[1, 1]], [[1, 1]]]
        >>> for connection, actions in zip(connections, [[1], [0]]):
        ...     connection.send(("step", actions))
        >>> [connection.recv()["obs"].tolist() for connection in connections]
        [[[1.0]], [[0.0]]]
        >>> for connection in connections:
        ...     connection.send(("close", None))
    """

    saved_as = "PyMARLConnections"

    def __init__(self, env: ParallelEnv) -> None:
        self._stepper = ArrayStepper(env, self, AutoresetMode.DISABLED, copy=True, partial_resets=True)
        self.env, self._view = env, self._stepper.view
        self._agents = tuple(self._view.agents)
        self._check_interface()
        self._hands_on = self._stepper.schema.joint_actions == "pymarl"
        transitions = self._stepper.transitions
        self._checks = not self._hands_on or (isinstance(transitions, BlockTransitions) and transitions.checks)
        numbers = range(env.num_envs)
        self._sent: list[deque[_Sent]] = [deque() for _ in numbers]
        self._replies: list[deque[Any]] = [deque() for _ in numbers]
        # What each has shown last; copies, if a restart may repeat it, since callers may change their arrays.
        self._latest: list[_Seen | None] = [None for _ in numbers]
        self._may_step = [False] * len(numbers)  # whether an episode is running, as far as has been carried out
        self._open = [True] * len(numbers)
        # The restarts of each at its latest reset that was carried out; -1 if it was rebuilt later in the same call.
        self._restarts = [0] * len(numbers)
        self._stepper.batch.write_states()
        self._is_team = self._has_one_reward()  # None: the first step decides

    # -- a sequence of connections -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sent)

    @overload
    def __getitem__(self, index: int) -> PyMARLConnection: ...
    @overload
    def __getitem__(self, index: slice) -> list[PyMARLConnection]: ...
    def __getitem__(self, index: int | slice) -> PyMARLConnection | list[PyMARLConnection]:
        env_ids = range(len(self._sent))[index]
        return (
            PyMARLConnection(self, env_ids)
            if isinstance(env_ids, int)
            else [PyMARLConnection(self, i) for i in env_ids]
        )

    def __iter__(self) -> Iterator[PyMARLConnection]:
        return iter(self[:])

    def close(self, **keywords: Any) -> None:
        """Close all connections and the environments, with the keywords of `ParallelEnv.close`."""
        self._open = [False] * len(self._open)
        for queue in (*self._sent, *self._replies):
            queue.clear()
        self._stepper.close(**keywords)

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[bytes]:
        """Save environments, once all of their replies have been received; see `ParallelEnv.save_state`.

        Returns:
            The state of each of `env_ids`.

        Raises:
            AlreadyPendingCallError: A command waits, or its reply.
        """
        self._check_received(env_ids, "save_state")
        return self._stepper.save_state(env_ids, self._is_rebuilt)

    def load_state(self, states: Sequence[bytes], env_ids: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Go on from what `save_state` has returned; arguments and errors are as in `ParallelEnv.load_state`.

        Returns:
            For each of these environments, what the reply to a reset has: state, masks and observations at that time.
        """
        self._check_received(env_ids, "load_state")
        arrays, rebuilt = self._stepper.load_state(states, env_ids)
        seen = self._seen(arrays)
        kept, reply_of = self._kept(seen), seen.replies()
        for env_id in rebuilt:
            over = arrays.terminated[env_id] or arrays.truncated[env_id]
            self._latest[env_id], self._may_step[env_id] = kept, not over
            self._restarts[env_id] = -1 if rebuilt[env_id] else self._stepper.batch.restarts_of(env_id)
        return [reply_of(env_id) for env_id in rebuilt]

    def _check_received(self, env_ids: Sequence[int] | None, name: str) -> None:
        self._stepper.batch.check_open()
        for env_id in self._stepper.batch.checked_ids(env_ids):
            if self._sent[env_id] or self._replies[env_id]:
                raise AlreadyPendingCallError(
                    f"environment {env_id}: {name}() was called before the reply to a command has been received; call "
                    "recv() first",
                    name,
                )

    def _is_rebuilt(self, env_id: int) -> bool:
        """Whether it has been rebuilt since its latest reset."""
        return self._stepper.batch.restarts_of(env_id) != self._restarts[env_id]

    # -- what the simulators are ---------------------------------------------------------------------------------------

    def _check_interface(self) -> None:
        """Raise `ValueError` unless the environments have PyMARL's interface."""
        schema, of_env = self._stepper.schema, self.env.possible_agents_of
        for env_id in range(self.env.num_envs):
            if len(own := of_env(env_id)) < len(self._agents):
                raise ValueError(
                    "PyMARLConnections needs environments with the same agents, since the runner has one number of "
                    f"agents, but environment {env_id} has only {own} of {[*self._agents]}"
                )
        action_spaces = [schema.action_spaces[agent] for agent in self._agents]
        try:
            self.env.call("get_env_info", env_ids=[0])
        except AttributeError as error:
            problem = str(error)
        else:
            observed = [space for space, _ in self._view.groups]
            if (
                len(observed) == 1
                and isinstance(observed[0], spaces.Box)
                and isinstance(action_spaces[0], spaces.Discrete)
                and all(space == action_spaces[0] for space in action_spaces)
                and schema.state_space is not None
                and schema.mask_spaces.keys() == {*self._agents}
            ):
                return
            problem = (
                f"got observation spaces {dict(schema.observation_spaces)}, action spaces "
                f"{dict(schema.action_spaces)}, masks of {[*schema.mask_spaces]} and state space {schema.state_space}"
            )
        raise ValueError(
            "PyMARLConnections needs environments with PyMARL's interface (get_env_info, get_obs, get_state, "
            f"get_avail_actions, reset, step), whose agents have equal spaces: {problem}"
        )

    def _has_one_reward(self) -> bool | None:
        """Whether agents share a reward: EPyMARL's wrappers have `common_reward`. None where that is unknown."""
        try:
            return bool(self.env.call("common_reward", env_ids=[0])[0])
        except AttributeError:
            return None

    # -- commands in, replies out --------------------------------------------------------------------------------------

    def put(self, env_id: int, message: Any) -> None:
        """Keep a command for one environment until it is carried out; see `PyMARLConnection.send`."""
        parts = [*message] if isinstance(message, Sequence) and not isinstance(message, str | bytes) else []
        command, *data = parts or [None]
        if isinstance(command, str) and command == _CLOSE:
            self.close_one(env_id)  # also after a fault that has closed everything
            return
        self._check_open(env_id)
        if len(parts) != 2:
            raise TypeError(f"environment {env_id}: expected a message (command, data), got {message!r}")
        if not isinstance(command, str) or command not in _COMMANDS:
            raise ValueError(
                f"environment {env_id}: unknown command {command!r}; expected one of {', '.join(_COMMANDS)}"
            )
        if command == _STEP:
            self._check_may_step(env_id)
            self._sent[env_id].append(_Sent(_STEP, self._actions(env_id, data[0])))
        else:
            self._sent[env_id].append(_Sent(command))

    def get(self, env_id: int) -> Any:
        """The next reply of one environment; carries out everything that has been sent if it is not here yet."""
        self._check_open(env_id)
        replies = self._replies[env_id]
        if not replies:
            if not any(sent.has_reply for sent in self._sent[env_id]):
                sent = [sent.command for sent in self._sent[env_id]]
                raise NoAsyncCallError(
                    f"environment {env_id}: recv() without a command that has a reply; sent since the last recv(): "
                    f"{', '.join(sent) or 'nothing'}",
                    "recv",
                )
            try:
                self._carry_out()
            except ParallelEnvError:
                if self._stepper.source.closed:
                    self._open = [False] * len(self._open)
                raise
        reply = replies.popleft()
        if isinstance(reply, _Failure):
            try:
                raise reply.error
            finally:
                del reply  # else the error and this frame would refer to each other
        return reply

    def has_reply(self, env_id: int) -> bool:
        """Whether `get` returns for one environment; see `PyMARLConnection.poll`."""
        self._check_open(env_id)
        return bool(self._replies[env_id]) or any(sent.has_reply for sent in self._sent[env_id])

    def _check_open(self, env_id: int) -> None:
        """Raise `ClosedEnvironmentError` if the connection is closed, or everything is."""
        if not self._open[env_id]:
            self._stepper.batch.check_open()
            raise ClosedEnvironmentError(f"environment {env_id}: its connection has been closed")

    def _check_may_step(self, env_id: int) -> None:
        for sent in reversed(self._sent[env_id]):
            if sent.command == _STEP:
                raise AlreadyPendingCallError(
                    f"environment {env_id}: the reply to an earlier step has not been received; call recv() first",
                    "send",
                )
            if sent.command == _RESET:
                return
        if not self._may_step[env_id]:
            why = "it was never reset" if self._latest[env_id] is None else "its episode is over"
            raise ResetNeeded(f'environment {env_id}: {why}; send ("reset", None) before the next step')

    def _actions(self, env_id: int, data: Any) -> NDArray[Any]:
        """The actions of a step as they are, in an array of its own."""
        try:
            actions = np.array(data)
        except ValueError:  # rows of different lengths
            actions = np.zeros(0, object)
        if actions.shape[:1] != (len(self._agents),) or actions.dtype.kind not in "biuf":
            raise ValueError(
                f"environment {env_id}: a step needs an action for each of {len(self._agents)} agents, an array "
                f"({len(self._agents)}, ...) of numbers; got {actions.dtype} of shape {actions.shape}: {data!r}"
            )
        if self._checks:
            self._by_agent([env_id], [actions])  # raises `ValueError` before the actions of others have been taken
        return actions

    def close_one(self, env_id: int) -> None:
        """Close a connection, and the environments with the last one; does nothing if it is closed."""
        if not self._open[env_id]:
            return
        try:
            sent = self._sent[env_id]
            while sent and not sent[0].has_reply:
                self._call(sent.popleft().command, [env_id])
        finally:
            # Nobody receives the other replies.
            self._open[env_id] = False
            self._sent[env_id].clear()
            self._replies[env_id].clear()
            if not any(self._open):
                self.close()

    # -- everything that was sent --------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Carry out all commands, equal ones of several environments together, each environment's in their order.

        Calls come before resets and steps, so that resets and steps cover as many environments as possible.
        """
        while next_of := {env_id: sent[0].command for env_id, sent in enumerate(self._sent) if sent}:
            command = min(next_of.values(), key=_ORDER.index)
            env_ids = [env_id for env_id, other in next_of.items() if other == command]
            sent = {env_id: self._sent[env_id].popleft() for env_id in env_ids}
            try:
                if command == _STEP:
                    self._step({env_id: of_env.actions for env_id, of_env in sent.items()})
                elif command == _RESET:
                    self._reset(env_ids)
                else:
                    self._call(command, env_ids)
            except AlreadyPendingCallError:  # another thread is inside a call: nothing has been done
                for env_id, of_env in sent.items():
                    self._sent[env_id].appendleft(of_env)
                raise

    def _step(self, actions: Mapping[int, Any]) -> None:
        # Environments whose episodes are over ignore a step, and a step of all takes less time than one of some.
        all_others_over = sum(self._may_step) == len(actions)
        env_ids = range(len(self._sent)) if all_others_over else [*actions]
        any_actions = next(iter(actions.values()))
        joint = [actions.get(env_id, any_actions) for env_id in env_ids]
        sent = self._as_sent(env_ids, joint) if self._hands_on else self._by_agent(env_ids, joint)
        arrays = self._stepper.step(sent, None if all_others_over else [*actions])
        infos = {env_id: arrays.infos.get(env_id, {}).get(COMMON, {}) for env_id in actions}
        interrupted = {  # by a fault in this step, or in a call since the last one
            env_id
            for env_id, info in infos.items()
            if (info.get("restarted") is True and "error" in info) or not arrays.present[env_id].any()
        }
        seen = self._seen(arrays)
        kept, reply_of = self._kept(seen), seen.replies()
        rewards, over = arrays.rewards.tolist(), (arrays.terminated | arrays.truncated).tolist()
        is_team = self._is_team
        if is_team is None and len(interrupted) < len(actions):
            is_team = self._has_team_reward([env_id for env_id in actions if env_id not in interrupted], rewards)
        for env_id, info in infos.items():
            reward = rewards[env_id] if is_team is False else rewards[env_id][0]
            if env_id in interrupted:
                latest = self._latest[env_id]
                assert latest is not None
                reply = latest.copied().replies()(env_id)
                info, over[env_id] = {"episode_limit": True, "restarted": True}, True
                reward = [0.0] * len(self._agents) if is_team is False else 0.0
            else:
                reply, self._latest[env_id], info = reply_of(env_id), kept, {**info}
            self._may_step[env_id] = not over[env_id]
            self._replies[env_id].append({**reply, "reward": reward, "terminated": over[env_id], "info": info})

    def _as_sent(self, env_ids: Sequence[int], joint: list[NDArray[Any]]) -> Joint:
        by_agent = functools.partial(self._by_agent, env_ids, joint)
        return Joint(np.stack(joint) if stacking.are_equal_arrays(joint) else joint, by_agent)

    def _by_agent(self, env_ids: Sequence[int], joint: list[NDArray[Any]]) -> list[Stacked]:
        """Integers `(k,)` or `(k, 1)`, or one-hot rows, as actions of the agents' spaces."""
        space = self._stepper.schema.action_spaces[self._agents[0]]
        one_hot = (len(self._agents), int(getattr(space, "n", 0)))
        whole = np.zeros((len(self._sent), len(self._agents)), np.int64)
        for env_id, of_env in zip(env_ids, joint):
            if of_env.shape == one_hot and one_hot[1] > 1 and (np.sort(of_env, axis=1) == np.eye(one_hot[1])[-1]).all():
                whole[env_id] = of_env.argmax(axis=1)
            elif of_env.size == len(self._agents) and of_env.dtype.kind in "iu":
                whole[env_id] = of_env.reshape(-1)
            else:
                raise ValueError(
                    f"environment {env_id}: its agents' space {space} needs one integer or one-hot row for each of "
                    f"{len(self._agents)} agents, got {of_env.dtype} of shape {of_env.shape}"
                )
        return [Stacked(self._agents, whole)]

    def _has_team_reward(self, stepped: Sequence[int], rewards: Sequence[Sequence[float]]) -> bool:
        """Whether agents share a reward, judged by these environments, which have been stepped."""
        for env_id in stepped:
            if self._stepper.batch.reports_restart(env_id):  # rebuilt after its step
                continue
            (is_team,) = self.env.call(OfAdapter("common_reward"), env_ids=[env_id])
            # A custom adapter may not know it.
            self._is_team = len({*rewards[env_id]}) == 1 if is_team is None else is_team
            return self._is_team
        return all(len({*rewards[env_id]}) == 1 for env_id in stepped)  # a later step decides

    def _reset(self, env_ids: list[int]) -> None:
        arrays = self._stepper.reset(env_ids=None if len(env_ids) == len(self._sent) else env_ids)
        for env_id in env_ids:
            self._latest[env_id] = None  # it was of the episode before
        seen = self._seen(arrays)
        kept, reply_of = self._kept(seen), seen.replies()
        for env_id in env_ids:
            self._latest[env_id], self._may_step[env_id] = kept, True
            # The process may have died after this environment's own reset, in the reset of another one.
            rebuilt = self._stepper.batch.reports_restart(env_id)
            self._restarts[env_id] = -1 if rebuilt else self._stepper.batch.restarts_of(env_id)
            self._replies[env_id].append(reply_of(env_id))

    def _kept(self, seen: _Seen) -> _Seen:
        """What a restart may repeat: the caller may change the arrays of a reply."""
        return seen.copied() if self._stepper.restarts else seen

    def _seen(self, arrays: Arrays) -> _Seen:
        """The states, masks and observations, in new arrays."""
        (observations,) = arrays.observations
        return _Seen(
            self._stepper.batch.states_seen()[0].copy(), self._stepper.action_masks(self._agents), observations
        )

    def _call(self, command: str, env_ids: list[int]) -> None:
        """Call a method of simulators. A fault raises no error if environments are restarted: the log reports it.

        Before its reset, a simulator that has been rebuilt is called only for `get_env_info`; other replies are {}:
        SMAC's `get_stats` divides by its number of battles, which is 0.
        """
        results = self._results(command, env_ids)
        for env_id in env_ids if _CALLS[command] else ():
            self._replies[env_id].append(results[env_id])

    def _results(self, name: str, env_ids: list[int]) -> dict[int, Any]:
        if name != "get_env_info":
            new = [env_id for env_id in env_ids if self._is_rebuilt(env_id)]
            if new:
                others = [env_id for env_id in env_ids if env_id not in new]
                return {**{env_id: {} for env_id in new}, **(self._results(name, others) if others else {})}
        try:
            return dict(zip(env_ids, self.env.call(name, env_ids=env_ids)))
        except (AttributeError, TypeError) as error:  # closes nothing
            if not _CALLS[name]:
                raise
            return dict.fromkeys(env_ids, _Failure(error.with_traceback(None)))  # which would refer to this object
        except ParallelEnvError as error:
            failed = [env_id for env_id in env_ids if env_id in error.env_ids]
            if self._stepper.source.closed or name == "get_env_info" or not failed:
                raise
            others = [env_id for env_id in env_ids if env_id not in failed]
            return {**{env_id: {} for env_id in failed}, **(self._results(name, others) if others else {})}


class PyMARLConnection:
    """The connection to one environment, in place of the runner's end of a pipe.

    Attributes:
        env_id: Which environment.
        connections: The `PyMARLConnections` of all environments, with their `parallel_env`.
    """

    def __init__(self, connections: PyMARLConnections, env_id: int) -> None:
        self.connections, self.env_id = connections, env_id

    def send(self, message: Sequence[Any]) -> None:
        """Send a command; it waits until the next `recv` of any connection.

        Args:
            message: The command and its data, as a tuple or list: `("step", actions)` with one integer for each agent,
                `("reset", None)`, `("get_env_info", None)` and `("get_stats", None)`, which have replies;
                `("render", None)` and `("save_replay", None)`, which have none; `("close", None)`, which closes this
                connection. Closing the last connection ends the workers.

        Raises:
            ResetNeeded: A step, but the environment was never reset, or its episode is over.
            AlreadyPendingCallError: A step, but an earlier one has not been received.
            ValueError, TypeError: An unknown command, or actions that are not integers, one for each agent.
            ClosedEnvironmentError: This connection has been closed, or all have.
        """
        self.connections.put(self.env_id, message)

    def recv(self) -> Any:
        """The reply to the first command that has none yet.

        The reply to a step is a dict with `state`, `avail_actions` (agents, actions), `obs` (agents, size), `reward`,
        `terminated` and `info`; to a reset, a dict with the first three; to others, the simulator's result.

        Raises:
            NoAsyncCallError: No command that has a reply was sent.
            AttributeError: The simulator has no such method.
            ParallelEnvError: A fault, as in `ParallelEnv.step`; everything is closed.
            ClosedEnvironmentError: This connection has been closed, or all have.
        """
        return self.connections.get(self.env_id)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether `recv` will return a reply; it may wait."""
        return self.connections.has_reply(self.env_id)

    def close(self) -> None:
        """Close this connection, and with the last one the workers; does nothing if it is closed."""
        self.connections.close_one(self.env_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env_id={self.env_id}, {self.connections!r})"


def pymarl_connections(env_fns: Sequence[Callable[..., Any]], **options: Any) -> list[PyMARLConnection]:
    """Connections for PyMARL's and EPyMARL's `ParallelRunner`, in place of its processes and pipes.

    Environments keep the seeds that they have (`seed="own"`) and are reset by the runner (`auto_reset=False`). In
    worker processes, each has its own states of `random`, `numpy.random` and torch's generator, as in a process of its
    own (`isolate_rng=True`).

    Args:
        env_fns: One function for each environment that returns it, as `functools.partial(env_fn, **env_args)`.
        options: Arguments of `ParallelEnv`, such as `num_workers`, `on_error="restart"` and `step_timeout`.

    Returns:
        One connection for each environment, see `PyMARLConnections`.

    Raises:
        TypeError: An option is not an argument of `ParallelEnv`, or is an argument that the runner requires as it is.
        ValueError, ParallelEnvError: As in `ParallelEnv`.

    Example:
        ```text
        # in ParallelRunner.__init__, in place of the pipes and the processes:
        self.parent_conns = pymarl_connections([partial(env_fn, **env_arg) for env_arg in env_args])
        ```
    """
    connections = drop_in(
        "pymarl_connections",
        env_fns,
        options,
        PyMARLConnections,
        defaults={"adapter": "pymarl", "isolate_rng": options.get("backend") != "serial"},
        fixed={"auto_reset": False, "seed": "own", "episode_stats": False},
        reason="the runner resets environments and counts returns",
    )
    return [*connections]
