"""The reference of `on_error="restart"`, with scheduled faults and workers that die.

Section 2, point 6 of the design in straightforward code on top of `reference`; it shares no code with the package.
Nothing fails here: at a scheduled fault, the results that the design requires are computed.

Assumptions where the design does not say: a restart counts when it begins, also if its worker dies before it runs; the
mark of an idle environment after two restarts describes the first; and the mark is merged into an info `__common__` of
the environment's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode
from simulators.crashing import FAULT_KINDS, RAISED, SEED, Fate, Fates, seed_of

from helpers.comparison import assert_same
from helpers.reference import ReferenceEnv

SAME_STEP = AutoresetMode.SAME_STEP
Dicts = tuple[dict[Any, Any], ...]


class FaultDue(Exception):
    """A fault is due here."""

    def __init__(self, fate: Fate) -> None:
        super().__init__(fate)
        self.fate = fate


class Life(ReferenceEnv):
    """One life of an environment.

    Attributes:
        unused: Not reset yet, in place of a life that was interrupted.
        last: The environment's own results of its latest step.
    """

    def __init__(self, make: Callable[..., Any], index: int, seed: int, mode: AutoresetMode, fate: Fate | None) -> None:
        self._fate, self._left = fate, fate.after if fate is not None else 0
        self._come_to("constructor")
        super().__init__(make, index, seed, mode)
        self.unused = False
        self.last: Dicts = ()

    def _come_to(self, place: str) -> None:
        if self._fate is not None and self._fate.place == place:
            if self._left == 0:
                raise FaultDue(self._fate)
            self._left -= 1

    @property
    def alive(self) -> list[Any]:
        return sorted(self.seen - self.dead, key=str)

    def begin_later(self) -> None:
        self.unused, self.flags = True, (False, True)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        self._come_to("reset")
        self.unused = False
        return super().reset(seed, options)

    def step(self, actions: Mapping[Any, Any]) -> Any:
        if self.unused and self.mode is AutoresetMode.DISABLED:
            self.observations = {}
            return {}, {}, {"__all__": False}, {"__all__": True}, {}
        return super().step(actions)

    def native_step(self, actions: Mapping[Any, Any]) -> Any:
        self._come_to("step")
        result = super().native_step(actions)
        self.last = copy.deepcopy(result)
        return result


class Interrupted(NamedTuple):
    """The interrupted call of a life.

    Attributes:
        kind: "step", "auto-reset" or "reset".
        dicts: The results to return; empty for a reset.
        word: A part of the expected report.
    """

    kind: str
    dicts: Dicts
    word: str


class RestartReference:
    """The reference of `ParallelEnv([crashing(make, fates)] * count, mode, on_error="restart", num_workers=workers)`.

    Attributes:
        restarts: The number of restarts of each environment so far.
        acting: The agents that act next in each environment; None if the design does not define them.
    """

    def __init__(
        self, make: Callable[..., Any], count: int, workers: int, mode: AutoresetMode, fates: Fates, base: int = SEED
    ) -> None:
        assert count % workers == 0, "how a remainder is shared out is not known here"
        self._make, self._mode, self._fates, self._base = make, mode, fates, base
        size = count // workers
        self._shares = [range(start, start + size) for start in range(0, count, size)]
        self.restarts = [0] * count
        self._lives = [Life(make, i, base + i, mode, fates.get((i, 0))) for i in range(count)]
        self._known: list[dict[Any, Any]] = [{} for _ in range(count)]
        self._begun = [False] * count
        self._marks: dict[int, tuple[Interrupted, Dicts, list[Any] | None]] = {}
        self.acting: list[list[Any] | None] = [[] for _ in range(count)]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(seed_of(self._base, i, n) for i, n in enumerate(self.restarts))

    def restarts_of_workers(self) -> list[int]:
        return [sum(self.restarts[i] for i in share) for share in self._shares]

    def close(self) -> None:
        for life in self._lives:
            life.env.close()

    def reset(self, env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Returns observations and infos."""
        results = self._have_done("reset", dict.fromkeys(self._ids(env_ids)))
        return tuple(zip(*((dicts[0], dicts[4]) for dicts in results.values()), strict=True))

    def step(self, actions: Sequence[Any], env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Returns five tuples of dicts."""
        results = self._have_done("step", dict(zip(self._ids(env_ids), actions, strict=True)))
        return tuple(zip(*results.values(), strict=True))

    def _ids(self, env_ids: Sequence[int] | None) -> list[int]:
        return list(range(len(self._lives))) if env_ids is None else list(env_ids)

    def _have_done(self, method: str, calls: Mapping[int, Any]) -> dict[int, Dicts]:
        done: dict[int, tuple[Dicts, list[Any] | None]] = {}
        for share in self._shares:
            self._work(share, method, {i: calls[i] for i in calls if i in share}, done)
        for i in calls:
            self.acting[i] = done[i][1]
        return {i: copy.deepcopy(done[i][0]) for i in calls}

    # -- one worker ------------------------------------------------------------------------------------------------

    def _work(self, share: range, method: str, calls: Mapping[int, Any], done: dict[int, Any]) -> None:
        todo = []
        for i in calls:
            if method == "step" and i in self._marks:
                done[i] = self._marks.pop(i)[1:]
            else:
                todo.append(i)
        ended: dict[int, Interrupted] = {}
        for place, i in enumerate(todo):
            try:
                done[i] = self._live(i, method, calls[i])
            except FaultDue as struck:
                ended[i] = self._interruption_of(i, method, struck.fate, in_reset=struck.fate.place == "reset")
                self.restarts[i] += 1
                if struck.fate.fault not in RAISED:
                    self.restarts[i] -= 1  # counted with the others
                    ended.update({j: self._interruption_of(j, method, struck.fate) for j in todo[place + 1 :]})
                    self._end_worker(share, ended, struck.fate)
                    self._build(share, [*share], ended, calls, done)
                    return
        self._build(share, [*ended], ended, calls, done)

    def _live(self, i: int, method: str, actions: Any) -> tuple[Dicts, list[Any] | None]:
        life = self._lives[i]
        if method == "step":
            dicts = life.step(actions)
        else:
            dicts = _as_of_a_step(*life.reset())
            self._begun[i] = True
            if i in self._marks:
                dicts = marked(dicts, self._marks.pop(i)[0].word)
        self._known[i] = copy.deepcopy(dicts[0])
        return dicts, self._acting(life)

    def _acting(self, life: Life) -> list[Any] | None:
        if life.over:
            return None if life.dict_rules else []
        return life.acting

    def _interruption_of(self, i: int, method: str, fate: Fate, in_reset: bool = False) -> Interrupted:
        """The interruption of an environment in flight."""
        word = FAULT_KINDS[fate.fault].word
        if method == "reset" or (in_reset and self._mode is not SAME_STEP):
            return Interrupted("reset", (), word)
        if in_reset:
            return Interrupted("auto-reset", marked(self._lives[i].last, word), word)
        return Interrupted("step", self._cut_off(i, word), word)

    def _cut_off(self, i: int, word: str) -> Dicts:
        alive = self._lives[i].alive
        flags = {**dict.fromkeys(alive, False), "__all__": False}, {**dict.fromkeys(alive, True), "__all__": True}
        return marked((copy.deepcopy(self._known[i]), dict.fromkeys(alive, 0.0), *flags, {}), word)

    def _end_worker(self, share: range, ended: dict[int, Interrupted], fate: Fate) -> None:
        """End the process: environments that had finished were idle."""
        for i in share:
            self.restarts[i] += 1
            if i not in ended:
                word = FAULT_KINDS[fate.fault].word
                ended[i] = (
                    self._marks.pop(i)[0] if i in self._marks else Interrupted("step", self._cut_off(i, word), word)
                )

    def _build(
        self,
        share: range,
        queue: list[int],
        ended: dict[int, Interrupted],
        calls: Mapping[int, Any],
        done: dict[int, Any],
    ) -> None:
        while queue:
            i = queue.pop(0)
            try:
                dicts, acting = self._bear(i, ended[i], idle=i not in calls or i in done)
            except FaultDue as struck:
                if struck.fate.fault in RAISED:
                    self.restarts[i] += 1
                    queue.append(i)
                else:
                    self._end_worker(share, ended, struck.fate)
                    queue = [*share]
                continue
            story = ended.pop(i)
            if i in calls and i not in done:
                done[i] = dicts, acting
            else:
                self._marks[i] = story, dicts, acting

    def _bear(self, i: int, story: Interrupted, idle: bool) -> tuple[Dicts, list[Any] | None]:
        n = self.restarts[i]
        life = Life(self._make, i, seed_of(self._base, i, n), self._mode, self._fates.get((i, n)))
        if story.kind == "reset":
            dicts = marked(_as_of_a_step(*life.reset()), story.word)
            self._begun[i] = True
        elif self._mode is SAME_STEP and (self._begun[i] or not idle):
            dicts = _continued(story.dicts, *life.reset())
        else:
            life.begin_later()
            dicts = story.dicts
        if not life.unused:
            self._known[i] = copy.deepcopy(dicts[0])
        self._lives[i] = life
        return dicts, self._acting(life)


def _as_of_a_step(observations: dict[Any, Any], infos: dict[Any, Any]) -> Dicts:
    unfinished = {**dict.fromkeys(observations, False), "__all__": False}
    return observations, dict.fromkeys(observations, 0.0), unfinished, dict(unfinished), infos


def marked(dicts: Dicts, word: str) -> Dicts:
    *others, infos = dicts
    mark = {"restarted": True, "error": word}
    return *others, {**infos, "__common__": {**mark, **infos.get("__common__", {})}}


def _continued(dicts: Dicts, observations: dict[Any, Any], reset_infos: dict[Any, Any]) -> Dicts:
    """The end of the old episode with the first observations of the new one."""
    last, rewards, terminateds, truncateds, infos = copy.deepcopy(dicts)
    for agent, value in last.items():
        infos.setdefault(agent, {}).setdefault("final_obs", value)
    for agent, info in reset_infos.items():
        if info:
            infos.setdefault(agent, {}).setdefault("reset_info", info)
    return observations, rewards, terminateds, truncateds, infos


def assert_same_with_reports(actual: Sequence[Any], expected: Sequence[Any], path: str) -> None:
    """As `assert_same`; actual reports must contain the expected words."""
    infos = []
    for i, (info, expected_info) in enumerate(zip(actual[-1], expected[-1], strict=True)):
        word = expected_info.get("__common__", {}).get("error")
        common = info.get("__common__", {})
        if word is not None and "error" in common:
            assert isinstance(common["error"], str)
            assert word in common["error"], f"{path}: {word!r} is not in {common['error']!r}, environment {i}"
            info = {**info, "__common__": {**common, "error": word}}
        infos.append(info)
    assert_same((*actual[:-1], tuple(infos)), tuple(expected), path)


def assert_acting(env: Any, world: RestartReference, path: str) -> None:
    for i, (acting, expected) in enumerate(zip(env.acting, world.acting, strict=True)):
        assert expected is None or sorted(map(str, acting)) == sorted(map(str, expected)), f"{path}: environment {i}"
