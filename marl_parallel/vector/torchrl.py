"""`TorchRLEnv`: all environments as one TorchRL environment, with agents stacked in groups.

Tensors share memory with the arrays of `FacadeStepper`; the agents of a group are some of their columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, TensorSpec, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import MarlGroupMapType, check_marl_grouping

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import choices_of, declares_mask, with_choices
from marl_parallel.adapters import AgentID, Schema, attributes
from marl_parallel.arguments import base_seed
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, Stacked, check_agents
from marl_parallel.core.block.joining import agents_alike, groups_by_name
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.spaces import Mismatch, fits_block, leaves, tree_map
from marl_parallel.core.transition import RESET_INFO, is_empty_info
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.forwarding import OfParallelEnv, rendered
from marl_parallel.vector.mailbox import Mailbox
from marl_parallel.vector.rows import AgentRows, bounds
from marl_parallel.vector.stepper import FacadeStepper

__doctest_requires__ = ["torchrl"]

GroupMap = dict[str, list[AgentID]]
_FLAGS = ("done", "terminated", "truncated")
_MASK_IN_OBSERVATION = ("observation", ACTION_MASK)


class TorchRLEnv(OfParallelEnv, EnvBase):  # type: ignore[misc, unused-ignore]
    """Many environments as one TorchRL environment of batch size `[num_envs]`.

    Agents are stacked in groups. With n environments and k agents in a group, its tensordict of batch size `[n, k]`
    holds:

    - `"action"`: `[n, k, ...]`. Rows of agents that do not act are ignored.
    - `"observation"`: `[n, k, ...]`, in the dtype of its space; zeros for agents that are absent.
    - `"mask"`, `"present"`: `[n, k]`, bool: which agents act next; which rows are data.
    - `"reward"`: `[n, k, 1]`, or `[n, k, num_objectives]` for vector rewards; float32.
    - `"done"`, `"terminated"`, `"truncated"`: `[n, k, 1]`, bool. When an episode ends, agents without a flag of their
      own get the environment's, also agents that have died before.

    At the root are `"done"`, `"terminated"` and `"truncated"` of environments, `[n, 1]`, and with
    `on_error="restart"` also `"restarted"`: which environments have been rebuilt. Errors and all other infos are in
    `infos`. Tensors are the caller's own.

    Groups with action masks also have `"action_mask"`: `[n, k, num_choices]`, bool, True = allowed, as in
    `FacadeStepper.action_masks`, but where nothing is allowed, everything is: TorchRL needs a choice to draw from. The
    mask is not part of `"observation"`. It limits the action spec, so that random actions are legal. Inside a
    `TransformedEnv`, which clones the spec, that takes TorchRL's transform `ActionMask`.
    With `return_state`, the root has the global `"state"`, `[n, ...]`.

    `Dict` spaces are nested tensordicts, `Tuple`s too, with the keys `"0"`, `"1"`, ...; `Discrete` observations are
    integers, not one-hot. Actions of `Discrete(n, start=s)` count from 0.

    Attributes and methods of the simulators are available as in TorchRL's `ParallelEnv`: `env.level` is a list of
    values, and `env.twice(3)` a list of results, one for each environment. `render` returns a frame of one environment.

    Only `_reset` resets environments, which TorchRL's loops call; see `docs/facades.md`. The seed of `set_seed` takes
    effect at each environment's next reset; native simulators, such as EnvPool, must then all be reset at once.

    With `flatten`, what a group holds is at the root, without the axis of agents, as in TorchRL's environments of one
    agent: `"observation"`, `"action"`, `"mask"`, `"present"`: `[n, ...]`; `"reward"`: `[n, 1]`.

    Args:
        env: Made with `auto_reset=False`, or `from_envpool`. No other facade may step it.
        group_map: The agents of each group, by its name; or a `MarlGroupMapType`. By default agents named `name_0`,
            `name_1` and so on are the group `name`, as in TorchRL's own wrapper, and any other is a group of its own.
            Agents of one name with different spaces become several groups, each named after its first agent.
        device: The device of the tensors; simulators stay on the CPU.
        info_masks: Whether groups also have action masks, from infos, if their observation spaces declare none.
        return_state: Whether to return the global state, which takes a request to the simulators after each step.
        flatten: Whether the only agent's values are at the root, as in an environment without agents.
        categorical_actions: Whether actions of `Discrete` spaces are numbers; if not, they are one-hot.

    Attributes:
        group_map: The agents of each group, by its name.
        num_workers: The number of environments, as in TorchRL's `ParallelEnv`.
        infos: By environment, the infos of the latest step, as in `ParallelEnv.step`, without environments that have
            none. Infos of a later `_reset` are under `reset_info` in each entry, except reports of restarts.

    Raises:
        TypeError, ValueError: As `FacadeStepper`; or a group has different spaces, or a space that tensors cannot
            represent; or no group has an action space for `info_masks`, environments have no `state_space` for
            `return_state`, or there are several agents with `flatten`.

    Example:
        >>> from marl_parallel import make
        >>> env = TorchRLEnv(make("mpe2.simple_spread_v3", num_envs=4, auto_reset=False, num_workers=2))
        >>> data = env.rollout(30, break_when_any_done=False)
        >>> data.batch_size, data["agent", "observation"].shape, data["next", "done"].sum()
        (torch.Size([4, 30]), torch.Size([4, 30, 3, 18]), tensor(4))
        >>> env.close()
    """

    saved_as = "TorchRLEnv"

    def __init__(
        self,
        env: ParallelEnv,
        group_map: MarlGroupMapType | Mapping[str, Sequence[AgentID]] | None = None,
        device: torch.device | str | None = "cpu",
        *,
        info_masks: bool = False,
        return_state: bool = False,
        flatten: bool = False,
        categorical_actions: bool = True,
    ) -> None:
        # TorchRL keeps the tensors of all steps of a rollout: views would all show the last one.
        stepper = FacadeStepper(env, self, AutoresetMode.DISABLED, copy=True, vectors=True, partial_resets=True)
        super().__init__(device=device, batch_size=[env.num_envs])
        self.is_closed = False
        self._stepper, self.env = stepper, env
        self._guard = stepper.batch.guard
        self.infos: dict[int, dict[Any, Any]] = {}
        if flatten and len(env.possible_agents) != 1:
            raise ValueError(f"flatten=True is for one agent, but the agents are {env.possible_agents}")
        self._flat, self._one_hot = flatten, not categorical_actions
        self.group_map = _grouped(group_map, self._stepper.schema)
        self._groups = {
            name: AgentRows(stepper, agents, vectors_for="TorchRLEnv") for name, agents in self.group_map.items()
        }
        self._choices = {  # of each part of an action
            name: counts
            for name, group in self._groups.items()
            if (counts := choices_of(group.action_space))
            and (
                info_masks
                or declares_mask(group.space, group.action_space)
                or {*group.agents} <= {*self._stepper.schema.mask_spaces}
            )
        }
        if info_masks and not self._choices:
            raise ValueError(
                "info_masks=True, but no group has a Discrete or one-dimensional MultiDiscrete action space"
            )
        state_space = self._stepper.schema.state_space if return_state else None
        if return_state and (state_space is None or not fits_block(state_space)):
            reason = "" if state_space is not None else f": {stepper.batch.no_state}"
            raise ValueError(f"return_state=True, but the state_space of these environments is {state_space}{reason}")
        self._returns_state = return_state
        self._state: Any = None  # with restarts, the latest one, `(num_envs, *state_space.shape)`
        self._seed: int | None = None
        self._unseeded = np.zeros(env.num_envs, np.bool_)  # whether an environment is to be reset with `_seed`
        self._mailbox = Mailbox[TensorDictBase](stepper, self._rows_of_results)
        self._rows_sent: dict[int, TensorDictBase] = {}  # by environment, the row of its latest `async_step_send`
        n = env.num_envs
        actions, observations, rewards, dones = (Composite(shape=(n,)) for _ in range(4))
        for name, group in self._groups.items():
            shape = (n,) if flatten else (n, len(group.agents))
            objectives = (1,) if group.reward_space is None else group.reward_space.shape or ()
            acted = _specs("action", group.action_space, shape, one_hot=self._one_hot)
            seen = _specs("observation", group.space, shape)
            masks = {key: _flag_spec(shape) for key in ("mask", "present")}
            if name in self._choices:
                seen.pop(_MASK_IN_OBSERVATION, None)
                masks[ACTION_MASK] = _flag_spec((*shape, sum(self._choices[name])))
            reward = {"reward": Unbounded(shape=(*shape, *objectives), dtype=torch.float32)}
            flags = {flag: _flag_spec((*shape, 1)) for flag in _FLAGS}
            parts = (actions, acted), (observations, {**seen, **masks}), (rewards, reward), (dones, flags)
            for whole, of_group in parts:
                whole.update(of_group if flatten else {name: Composite(of_group, shape=shape)})
        for flag in _FLAGS:
            dones[flag] = _flag_spec((n, 1))
        if self._stepper.restarts:
            observations["restarted"] = _flag_spec((n, 1))
        if state_space is not None:
            observations.update(_specs("state", state_space, (n,)))
        specs = [actions, observations, rewards, dones]
        if self.device is not None:
            specs = [spec.to(self.device) for spec in specs]
        self.action_spec, self.observation_spec, self.reward_spec, self.done_spec = specs
        self._forwards = True  # from now on, unknown attributes are the simulators'

    # -- called by TorchRL -----------------------------------------------------------------------------------------

    def _set_seed(self, seed: int | None) -> None:
        self._stepper.batch.resets.check_seed(seed)
        self._seed = None if seed is None else base_seed(seed)
        self._unseeded[:] = seed is not None

    @exclusive("reset")
    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> TensorDictBase:
        mask: torch.Tensor | None = None  # the root's, or the groups'
        if tensordict is not None:
            mask = tensordict.get("_reset", None)
            of_groups = [tensordict.get((name, "_reset"), None) for name in self._groups]
            any_agent = [flags.reshape(self.env.num_envs, -1).any(-1) for flags in of_groups if flags is not None]
            mask = torch.stack(any_agent).any(0) if mask is None and any_agent else mask
        ids = self._marked(mask)
        if ids is not None and not ids and self._stepper.latest is not None:
            return self._tensors(self._stepper.latest).clone()
        chosen: Any = slice(None) if ids is None else ids
        if seed is None and self._seed is not None and (due := self._unseeded[chosen]).any():
            env_ids = np.arange(self.env.num_envs)[chosen].tolist()
            seed = self._seed if due.all() else [self._seed + i if is_due else None for i, is_due in zip(env_ids, due)]
        statistics = self._stepper.transitions.statistics
        finished = statistics.finished
        arrays = self._stepper.reset(seed, options, ids)
        self._mailbox.forget(self._stepper.env_ids if ids is None else ids)
        if mask is not None:  # TorchRL's loops reset what has ended, right after the step
            statistics.finished = finished
        self._unseeded[chosen] = False
        if mask is None:
            self.infos = dict(arrays.infos)
        else:
            for env_id, infos in arrays.infos.items():
                self.infos[env_id] = _with_reset(self.infos.get(env_id, {}), infos)
        return self._tensors(arrays)

    @exclusive("step")
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ids = self._marked(tensordict.get("_step", None))
        actions = [
            Stacked(group.agents, self._action_arrays(name, group.action_space, tensordict))
            for name, group in self._groups.items()
        ]
        arrays = self._stepper.step(actions, ids)
        self.infos = dict(arrays.infos)
        result = self._tensors(arrays)
        self._set_rewards(result, arrays)
        if ids is None:
            return result
        for name in () if self._flat else self._groups:
            # `rollout(break_when_all_done=True)` adds these to some steps only, which it cannot stack then.
            tensordict.get(name).pop("_neg_step", None)
        stepped = torch.zeros(self.env.num_envs, dtype=torch.bool, device=result.device)
        stepped[ids] = True
        return result.where(stepped, self._skip_tensordict(tensordict))

    @exclusive("save_state")
    def save_state(self, env_ids: Sequence[int] | None = None) -> list[bytes]:
        """Save environments, in the middle of their episodes; arguments and errors: see `ParallelEnv.save_state`."""
        return self._stepper.save_state(env_ids)

    @exclusive("load_state")
    def load_state(self, states: Sequence[bytes]) -> TensorDictBase:
        """Go on from saved states of all environments; errors: see `ParallelEnv.load_state`.

        Returns:
            The tensordict that `reset` returns, so that a loop can go on.
        """
        arrays, _ = self._stepper.load_state(states)
        self._mailbox.forget(self._stepper.env_ids)
        self._unseeded[:] = False
        self.infos = dict(arrays.infos)
        return self._tensors(arrays)

    def _set_rewards(self, tensordict: TensorDictBase, arrays: Arrays) -> None:
        for name, group in self._groups.items():
            rewards = group.rewards(arrays).astype(np.float32)
            rewards = rewards[..., None] if group.reward_space is None else rewards
            tensordict.set(self._at(name, "reward"), torch.from_numpy(rewards[:, 0] if self._flat else rewards))

    def render(self, mode: str | None = "rgb_array", env_index: int = 0, **keywords: Any) -> Any:
        """A frame of one environment, as for TorchRL's `PixelRenderTransform`; `parallel_env.render` has them all.

        Args:
            mode: For the `render(mode)` of simulators without a `render_mode`; None for its default. The others ignore
                it.
            env_index: The environment.
            keywords: For the simulator's own `render`.

        Returns:
            What the simulator's `render` returns, such as an array `(height, width, 3)`; None if it shows the frame
            itself.

        Raises:
            ValueError: The simulator renders nothing, since it was constructed without a `render_mode`.
        """
        if keywords:
            with_mode = {"mode": mode} if self.env.render_mode is None and mode is not None else {}
            (frame,) = self.env.call("render", env_ids=[env_index], **with_mode, **keywords)
        else:
            (frame,) = rendered(self.env, mode, [env_index])
        if frame is None and mode not in (None, "human") and self.env.render_mode != "human":
            raise ValueError(
                f"environment {env_index} renders nothing; its render_mode is {self.env.render_mode!r}: construct "
                'simulators with render_mode="rgb_array"'
            )
        return frame

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environment; idempotent."""
        self.is_closed = True
        self._stepper.close()

    def __del__(self) -> None:
        """Nothing: the `ParallelEnv` may be used further, and closes when it is collected itself."""

    # -- some environments at a time, as in TorchRL's `AsyncEnvPool` ---------------------------------------------------

    @exclusive("reset_async")
    def async_reset_send(
        self, tensordict: TensorDictBase | None = None, env_index: int | Sequence[int] | None = None
    ) -> None:
        """Begin to reset some environments, and return; `async_reset_recv` returns the results.

        Args:
            tensordict: Its `"env_index"` has the environments, if `env_index` is None.
            env_index: The environments; None for all without a `tensordict`.

        Raises:
            AlreadyPendingCallError: One of them is in flight.
            NotImplementedError: The environment was made with `return_state`, or native simulators step in it.
        """
        ids = self._indices(tensordict, env_index)
        due = self._seed is not None and self._unseeded[list(ids)].any()
        seeds = [self._seed + i if self._unseeded[i] else None for i in ids] if due and self._seed is not None else None
        self._mailbox.send_resets(ids, seeds)
        self._unseeded[list(ids)] = False

    @exclusive("recv")
    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """The first observations of all environments whose reset is ready, at least `min_get`, in the form of `reset`.

        Args:
            min_get: How many to wait for; None for one.
            env_index: Wait for these environments instead, and return no others.
            max_get: The most to return, the first ones that were ready; None for all. Others wait for the next call.
            timeout: Seconds to wait at most; None for no limit.

        Returns:
            A tensordict of batch size `[environments]`, with `"env_index"`, `[environments]`, in this order. With an
            integer as `env_index`, of batch size `[]`.

        Raises:
            ValueError: Fewer than `min_get` resets are in flight, or not all of `env_index`; or `max_get` is less than
                `min_get`.
            TimeoutError: Nothing is lost, and this can be called again.
        """
        mailbox = self._mailbox
        ids = self._receive(mailbox.begun, mailbox.resetting, min_get, env_index, max_get, timeout)
        results: TensorDictBase = torch.stack([mailbox.begun.pop(env_id) for env_id in ids])
        results.set("env_index", torch.tensor(ids, device=self.device))
        return results[0] if isinstance(env_index, int) else results

    @exclusive("step_async")
    def async_step_send(self, tensordict: TensorDictBase, env_index: int | Sequence[int] | None = None) -> None:
        """Begin to step some environments, and return; `async_step_recv` returns the results.

        Args:
            tensordict: With the actions, of batch size `[environments]`, or `[]` for one.
            env_index: The environments, in the order of the rows; None for the `"env_index"` of `tensordict`.

        Raises:
            AlreadyPendingCallError: One of them is in flight.
            NotImplementedError: As in `async_reset_send`.
        """
        ids = self._indices(tensordict, env_index)
        rows = tensordict if tensordict.batch_dims else tensordict.unsqueeze(0)
        if rows.batch_size != (len(ids),):
            raise ValueError(f"expected a row for each of the environments {[*ids]}, got batch size {rows.batch_size}")
        of_env: list[dict[AgentID, Any]] = [{} for _ in ids]
        acting = self._stepper.transitions.acting
        for name, group in self._groups.items():
            arrays = self._action_arrays(name, group.action_space, rows)
            tree_map(partial(check_agents, group.agents), arrays)
            for column, agent in enumerate(group.agents):
                acting_rows = [row for row, env_id in enumerate(ids) if agent in acting[env_id]]
                try:
                    actions = stacking.picked(
                        group.action_space, stacking.column(arrays, column), acting_rows, len(ids)
                    )
                except Mismatch as error:
                    raise ValueError(f"the actions of agent {agent!r}{error.path}: {error}") from None
                for row, action in zip(acting_rows, actions):
                    of_env[row][agent] = action
        self._mailbox.send(of_env, ids)
        self._rows_sent.update(zip(ids, rows.unbind(0)))

    @exclusive("recv")
    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | Sequence[int] | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """The results of all environments whose step is ready, at least `min_get`.

        Arguments and errors are as in `async_reset_recv`.

        Returns:
            The rows of `async_step_send`, with `"next"` as in `step`, and with `"env_index"`. Environments whose
            `"done"` is set have to be reset.
        """
        mailbox = self._mailbox
        ids = self._receive(mailbox.stepped, mailbox.stepping, min_get, env_index, max_get, timeout)
        results: TensorDictBase = torch.stack([mailbox.stepped.pop(env_id) for env_id in ids])
        rows: TensorDictBase = torch.stack([self._rows_sent.pop(env_id) for env_id in ids])
        rows.set("next", results).set("env_index", torch.tensor(ids, device=self.device))
        return rows[0] if isinstance(env_index, int) else rows

    def _receive(
        self,
        arrived: Mapping[int, TensorDictBase],
        in_flight: Collection[int],
        min_get: int | None,
        env_index: int | Sequence[int] | None,
        max_get: int | None,
        timeout: float | None,
    ) -> list[int]:
        """Wait until enough results of one kind have arrived; returns the environments whose results are to be taken.

        `arrived` has the results of this kind, and `in_flight` the environments whose results have not come.
        """
        mailbox = self._mailbox
        expected = len(arrived) + len(in_flight)
        if env_index is not None:
            wanted = [*self._stepper.batch.checked_ids([env_index] if isinstance(env_index, int) else env_index)]
            if others := [env_id for env_id in wanted if env_id not in arrived and env_id not in in_flight]:
                raise ValueError(
                    f"env_index={env_index}, but environments {others} have no request of this kind in flight"
                )
        else:
            wanted, min_get = [], 1 if min_get is None else min_get
            if not 1 <= min_get <= expected:
                raise ValueError(f"min_get={min_get}, but {expected} requests of this kind are in flight")
            if max_get is not None and max_get < min_get:
                raise ValueError(f"max_get={max_get} is less than min_get={min_get}")
            if len(arrived) >= min_get and (mailbox.stepping or mailbox.resetting):
                mailbox.receive(0, 0.0)  # those that have come wait for max_get; others may be ready by now
        number = len(wanted) if min_get is None or wanted else min_get
        mailbox.receive_until(lambda: arrived.keys() >= {*wanted} and len(arrived) >= number, timeout)
        return wanted or [*arrived][:max_get]

    def _rows_of_results(self, arrays: Arrays, env_ids: Sequence[int], of_reset: bool) -> list[TensorDictBase]:
        """The results of these environments, for the mailbox."""
        tensors = self._tensors(arrays)
        if not of_reset:
            self._set_rewards(tensors, arrays)
        self.infos.update({env_id: arrays.infos[env_id] for env_id in env_ids if env_id in arrays.infos})
        return [tensors[env_id] for env_id in env_ids]

    # -- environments and their attributes, as in TorchRL's `ParallelEnv` ----------------------------------------------

    @property
    def num_workers(self) -> int:
        """The number of environments, each of which is a worker of TorchRL's `ParallelEnv`."""
        return self.env.num_envs

    def __getattr__(self, name: str) -> Any:
        """An attribute of the simulators, as a list with one value for each environment.

        For a method, a function that calls it in each environment and returns a list of the results.

        Raises:
            AttributeError: An environment has no such attribute, or its name begins with `_`.
            TypeError: A value cannot be pickled.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "_forwards" not in vars(self) or hasattr(type(self), name):
                raise
        if self._stepper.workers is None:
            return [*self.env.get_attr(name)]
        try:
            found = self.env.call(attributes.peek, name)
        except TypeError as error:
            raise TypeError(f"the attribute {name!r} of the simulators: {error}") from error
        for env_id, (kind, value) in enumerate(found):
            if kind == "missing":
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}, and environment {env_id}: {value}"
                )
        if any(kind == "method" for kind, _ in found):
            return lambda *args, **kwargs: [*self.env.call(name, *args, **kwargs)]
        return [value for _, value in found]

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be indexed, got {index!r}: its environments are stepped together. Step some "
            'with a "_step" mask or async_step_send(env_index=...), reset some with a "_reset" mask, and call methods '
            "of some with parallel_env.call(name, env_ids=[...])"
        )

    def _indices(self, tensordict: TensorDictBase | None, env_index: int | Sequence[int] | None) -> tuple[int, ...]:
        if self._stepper.workers is None or self._returns_state:
            raise NotImplementedError(
                "native simulators, and environments made with return_state=True, are stepped all at once: use step"
            )
        if env_index is None and tensordict is not None:
            index = tensordict.get("env_index", None)
            if index is None:
                raise ValueError('pass env_index, or a tensordict with "env_index"')
            env_index = [int(one) for one in torch.as_tensor(index).reshape(-1)]
        ids = self._stepper.batch.checked_ids([env_index] if isinstance(env_index, int) else env_index)
        mailbox = self._mailbox
        if waiting := [env_id for env_id in ids if env_id in mailbox.stepped or env_id in mailbox.begun]:
            raise AlreadyPendingCallError(f"results of environments {waiting} are ready: receive them first", "send")
        return ids

    # -- masks and results -----------------------------------------------------------------------------------------

    def _marked(self, mask: torch.Tensor | None) -> list[int] | None:
        """The environments of a mask; None for all."""
        if mask is None or mask.all():
            return None
        return [int(env_id) for env_id in mask.reshape(self.env.num_envs, -1).any(-1).nonzero()]

    def _tensors(self, arrays: Arrays) -> TensorDictBase:
        """Observations and flags: an agent's own if it ends its life, else the environment's."""
        per_agent = arrays.ended & (arrays.terminations | arrays.truncations)
        terminated = np.where(per_agent, arrays.terminations, arrays.terminated[:, None])
        truncated = np.where(per_agent, arrays.truncations, arrays.truncated[:, None])
        of_agents = dict(zip(_FLAGS, (terminated | truncated, terminated, truncated)))
        roots = dict(zip(_FLAGS, (arrays.terminated | arrays.truncated, arrays.terminated, arrays.truncated)))
        n = self.env.num_envs
        if self._stepper.restarts:
            roots["restarted"] = arrays.restarted.copy()
        result: dict[str, Any] = {name: torch.from_numpy(root[:, None]) for name, root in roots.items()}
        if self._returns_state:
            state = self._stepper.state()
            if self._stepper.restarts:
                cut_off = arrays.restarted & arrays.truncated  # like observations, the last one before the fault
                if self._state is not None:
                    state[cut_off] = self._state[cut_off]
                self._state = state.copy()  # the caller may change what is returned
            result["state"] = torch.from_numpy(state)
        for name, group in self._groups.items():
            observations = group.observations(arrays.observations)
            seen = {_key("observation", path): reduce(getitem, path, observations) for path, _ in leaves(group.space)}
            masks = {"mask": group.of(arrays.acting), "present": group.of(arrays.present)}
            if name in self._choices:
                seen.pop(_MASK_IN_OBSERVATION, None)
                masks[ACTION_MASK] = with_choices(self._choices[name], self._stepper.action_masks(group.agents))
            flags = {flag: group.of(values)[..., None] for flag, values in of_agents.items()}
            of_group = {key: torch.from_numpy(array) for key, array in {**seen, **masks, **flags}.items()}
            if self._flat:
                result.update({key: tensor[:, 0] for key, tensor in of_group.items() if key not in _FLAGS})
            else:
                result[name] = TensorDict(of_group, batch_size=(n, len(group.agents)), device=self.device)
        tensors = TensorDict(result, batch_size=(n,), device=self.device)
        for name in self._choices:
            self.full_action_spec[self._at(name, "action")].update_mask(tensors[self._at(name, ACTION_MASK)].clone())
        return tensors

    def _at(self, group: str, key: str) -> Any:
        """The key of a value of a group."""
        return key if self._flat else (group, key)

    def _action_arrays(self, name: str, space: Space[Any], tensordict: TensorDictBase) -> Any:
        """The actions of a group in arrays `(num_envs, agents, ...)`, in the form of their space."""
        key = self._at(name, "action")
        actions: Any = tensordict.get(key, None)
        if actions is None:
            keys = sorted(map(str, tensordict.keys(True, True)))
            raise ValueError(
                f"no actions{'' if self._flat else f' for the group {name!r}'}: there is no {key!r}, only "
                f"{', '.join(keys)}; let the policy write {key!r} (its out_keys), or call rand_action first"
            )
        paths = (path for path, _ in leaves(space))

        def of_leaf(leaf: Space[Any]) -> NDArray[Any]:
            path = next(paths)
            tensor = actions.get(tuple(map(str, path))) if path else actions
            array: NDArray[Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy(force=True)
            if self._one_hot and isinstance(leaf, spaces.Discrete):
                array = array.argmax(-1)
            if array.dtype.kind in "biu" and np.any(
                start := getattr(leaf, "start", 0)
            ):  # those in tensors count from 0
                array = array.astype(np.int64) + start
            return array[:, None] if self._flat else array

        return tree_map(of_leaf, space)


# -- groups ------------------------------------------------------------------------------------------------------------


def _grouped(group_map: MarlGroupMapType | Mapping[str, Sequence[AgentID]] | None, schema: Schema) -> GroupMap:
    """The agents of each group; raises `ValueError` if they cannot be stacked as tensors."""
    agents = schema.possible_agents
    for kind, declared in (("observation", schema.observation_spaces), ("action", schema.action_spaces)):
        for agent in agents:
            try:
                tree_map(_check_leaf, declared[agent], form=_check_not_empty)
            except Mismatch as error:
                part = f"{error.path}, {error}" if error.path else error
                raise ValueError(
                    f"agent {agent!r}: the {kind} space {declared[agent]} cannot become tensors, because of {part}"
                ) from None
    seen, acted = schema.observation_spaces, schema.action_spaces
    if group_map is None:
        groups = groups_by_name(agents, seen, acted)
    else:
        by_name = group_map.get_group_map(agents) if isinstance(group_map, MarlGroupMapType) else group_map
        groups = {str(name): list(members) for name, members in by_name.items()}
    check_marl_grouping(groups, agents)
    for name, members in groups.items():
        parts = agents_alike(members, seen, acted)
        if len(parts) > 1:
            different = "; ".join(f"{part} observe {seen[part[0]]} and act in {acted[part[0]]}" for part in parts)
            raise ValueError(f"the agents of the group {name!r} cannot be stacked: {different}")
    return groups


def _check_leaf(space: Space[Any]) -> None:
    # Torch has larger unsigned integers in name only: it cannot compare or draw them.
    if not fits_block(space) or space.dtype in (np.uint16, np.uint32, np.uint64):
        raise Mismatch(str(space))


def _check_not_empty(parts: Any, _: Any) -> None:
    if not parts:  # TorchRL loses these
        raise Mismatch("an empty space")


def _with_reset(infos: Mapping[Any, Any], of_reset: Mapping[Any, Any]) -> dict[Any, Any]:
    """The infos of a step, with the infos of the next reset as `reset_info`; marks of restarts are merged in."""
    result = dict(infos)
    for key, info in of_reset.items():
        before = result.get(key) or {}
        if info is not None and not is_empty_info(info) and isinstance(before, Mapping):
            result[key] = {**before, **(info if _is_mark(info) else {RESET_INFO: info})}
    return result


def _is_mark(common: Any) -> bool:
    return isinstance(common, dict) and common.get("restarted") is True


# -- spaces and their values in tensors --------------------------------------------------------------------------------


def _key(name: str, path: tuple[Any, ...]) -> Any:
    """The key of a leaf in a tensordict."""
    return (name, *map(str, path)) if path else name


def _specs(name: str, space: Space[Any], shape: tuple[int, ...], *, one_hot: bool = False) -> dict[Any, TensorSpec]:
    """By key, the specs of the leaves of a space for environments and agents of this shape."""
    specs = {
        _key(name, path): OneHot(int(leaf.n))
        if one_hot and isinstance(leaf, spaces.Discrete)
        else _spec(leaf, name == "observation")
        for path, leaf in leaves(space)
    }
    return {key: spec.expand(*shape, *spec.shape) for key, spec in specs.items()}


def _flag_spec(shape: tuple[int, ...]) -> TensorSpec:
    return Categorical(2, shape=shape, dtype=torch.bool)


def _dtype(space: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, space.dtype)).dtype


def _spec(space: Any, observed: bool) -> TensorSpec:
    """The spec of a leaf: actions count from 0; observations include the zeros in the rows of absent agents."""
    if isinstance(space, spaces.MultiBinary):
        return Binary(space.shape[-1], shape=space.shape, dtype=torch.int8)
    if isinstance(space, spaces.Discrete) and not (observed and space.start):
        return Categorical(int(space.n), dtype=_dtype(space))
    low, high = bounds(space)
    dtype = space.dtype
    if observed:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    elif isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim == 1:
            return MultiCategorical(space.nvec, dtype=_dtype(space))
        low, high = np.zeros_like(space.nvec), space.nvec - 1
    least, greatest = (torch.from_numpy(np.array(bound, dtype)) for bound in (low, high))
    shape, of_torch = least.shape, least.dtype
    if of_torch != torch.bool:
        limits = torch.iinfo(of_torch) if not of_torch.is_floating_point else None
        lowest, highest = (limits.min, limits.max) if limits else (-np.inf, np.inf)
        if (least == lowest).all() and (greatest == highest).all():
            return Unbounded(shape=shape, dtype=of_torch)
    return Bounded(least, greatest, shape=shape, dtype=of_torch)
