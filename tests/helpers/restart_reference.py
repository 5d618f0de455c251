"""What `on_error="restart"` must make of simulators that break: the reference, with fates, and workers that fall.

Section 2, point 6 of the design in straightforward code, on top of `reference`; it shares no code with the package.
Nothing breaks here: where a fate says that something would, what the design says of it is worked out instead.

Where the design is silent, this is what is taken for meant: a restart counts when it begins, also when its worker dies
before it gets to it; what an idle environment has to say of two restarts in a row is about the first of them; and
where an environment has an info `__common__` of its own, the mark is added to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gymnasium.vector import AutoresetMode
from simulators.crashing import RAISED, SEED, WAYS, Fate, Fates, seed_of

from helpers.comparison import assert_same
from helpers.reference import Copy

SAME_STEP = AutoresetMode.SAME_STEP
Dicts = tuple[dict[Any, Any], ...]


class Struck(Exception):
    """Here it would break."""

    def __init__(self, fate: Fate) -> None:
        super().__init__(fate)
        self.fate = fate


class Life(Copy):
    """One life of an environment.

    Attributes:
        unused: It has not been reset yet, and takes the place of one that was cut off.
        last: What its latest step itself had to say.
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
                raise Struck(self._fate)
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


class Story(NamedTuple):
    """What an environment was doing when its life ended.

    Attributes:
        kind: "step", "auto-reset" or "reset".
        dicts: What is told of it; empty for a reset.
        word: What the report must say.
    """

    kind: str
    dicts: Dicts
    word: str


class World:
    """What `ParallelEnv([crashing(make, fates)] * count, mode, on_error="restart", num_workers=workers)` must equal.

    Attributes:
        restarts: Of each environment so far.
        acting: Who should act next in each, as the caller knows it; None where the design leaves it open.
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
        self._marks: dict[int, tuple[Story, Dicts, list[Any] | None]] = {}
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
        """Observations and infos."""
        results = self._have_done("reset", dict.fromkeys(self._ids(env_ids)))
        return tuple(zip(*((dicts[0], dicts[4]) for dicts in results.values()), strict=True))

    def step(self, actions: Sequence[Any], env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Five tuples of dicts."""
        results = self._have_done("step", dict(zip(self._ids(env_ids), actions, strict=True)))
        return tuple(zip(*results.values(), strict=True))

    def _ids(self, env_ids: Sequence[int] | None) -> list[int]:
        return list(range(len(self._lives))) if env_ids is None else list(env_ids)

    def _have_done(self, method: str, given: Mapping[int, Any]) -> dict[int, Dicts]:
        done: dict[int, tuple[Dicts, list[Any] | None]] = {}
        for share in self._shares:
            self._work(share, method, {i: given[i] for i in given if i in share}, done)
        for i in given:
            self.acting[i] = done[i][1]
        return {i: copy.deepcopy(done[i][0]) for i in given}

    # -- one worker ------------------------------------------------------------------------------------------------

    def _work(self, share: range, method: str, given: Mapping[int, Any], done: dict[int, Any]) -> None:
        todo = []
        for i in given:
            if method == "step" and i in self._marks:
                done[i] = self._marks.pop(i)[1:]
            else:
                todo.append(i)
        ended: dict[int, Story] = {}
        for place, i in enumerate(todo):
            try:
                done[i] = self._live(i, method, given[i])
            except Struck as struck:
                ended[i] = self._story(i, method, struck.fate, in_reset=struck.fate.place == "reset")
                self.restarts[i] += 1
                if struck.fate.way not in RAISED:
                    self.restarts[i] -= 1  # counted with the others
                    ended.update({j: self._story(j, method, struck.fate) for j in todo[place + 1 :]})
                    self._fall(share, ended, struck.fate)
                    self._build(share, [*share], ended, given, done)
                    return
        self._build(share, [*ended], ended, given, done)

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

    def _story(self, i: int, method: str, fate: Fate, in_reset: bool = False) -> Story:
        """What is told of an environment that was in flight."""
        word = WAYS[fate.way].word
        if method == "reset" or (in_reset and self._mode is not SAME_STEP):
            return Story("reset", (), word)
        if in_reset:
            return Story("auto-reset", marked(self._lives[i].last, word), word)
        return Story("step", self._cut_off(i, word), word)

    def _cut_off(self, i: int, word: str) -> Dicts:
        alive = self._lives[i].alive
        flags = {**dict.fromkeys(alive, False), "__all__": False}, {**dict.fromkeys(alive, True), "__all__": True}
        return marked((copy.deepcopy(self._known[i]), dict.fromkeys(alive, 0.0), *flags, {}), word)

    def _fall(self, share: range, ended: dict[int, Story], fate: Fate) -> None:
        """The process has ended: whoever is not in flight any more was idle."""
        for i in share:
            self.restarts[i] += 1
            if i not in ended:
                word = WAYS[fate.way].word
                ended[i] = self._marks.pop(i)[0] if i in self._marks else Story("step", self._cut_off(i, word), word)

    def _build(
        self, share: range, queue: list[int], ended: dict[int, Story], given: Mapping[int, Any], done: dict[int, Any]
    ) -> None:
        while queue:
            i = queue.pop(0)
            try:
                dicts, acting = self._bear(i, ended[i], idle=i not in given or i in done)
            except Struck as struck:
                if struck.fate.way in RAISED:
                    self.restarts[i] += 1
                    queue.append(i)
                else:
                    self._fall(share, ended, struck.fate)
                    queue = [*share]
                continue
            story = ended.pop(i)
            if i in given and i not in done:
                done[i] = dicts, acting
            else:
                self._marks[i] = story, dicts, acting

    def _bear(self, i: int, story: Story, idle: bool) -> tuple[Dicts, list[Any] | None]:
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
    """The end of the old episode, and the first observations of the new one."""
    last, rewards, terminateds, truncateds, infos = copy.deepcopy(dicts)
    for agent, value in last.items():
        infos.setdefault(agent, {}).setdefault("final_obs", value)
    for agent, info in reset_infos.items():
        if info:
            infos.setdefault(agent, {}).setdefault("reset_info", info)
    return observations, rewards, terminateds, truncateds, infos


def assert_as_told(actual: Sequence[Any], expected: Sequence[Any], path: str) -> None:
    """As `assert_same`; of each report, that it says what it must."""
    infos = []
    for i, (info, wanted) in enumerate(zip(actual[-1], expected[-1], strict=True)):
        word = wanted.get("__common__", {}).get("error")
        common = info.get("__common__", {})
        if word is not None and "error" in common:
            assert isinstance(common["error"], str)
            assert word in common["error"], f"{path}: {word!r} is not in {common['error']!r}, environment {i}"
            info = {**info, "__common__": {**common, "error": word}}
        infos.append(info)
    assert_same((*actual[:-1], tuple(infos)), tuple(expected), path)


def assert_acting(env: Any, world: World, path: str) -> None:
    for i, (acting, expected) in enumerate(zip(env.acting, world.acting, strict=True)):
        assert expected is None or sorted(map(str, acting)) == sorted(map(str, expected)), f"{path}: environment {i}"
