"""The findings of `marl-parallel check` in words: questions, texts with their advice, and the report."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marl_parallel.core.transition import ALL

SEED = 42
AFTER = -1  # the key, in place of an environment's number, of the trace of a second, unseeded episode
BACKENDS = ("serial", "thread", "process")


class Severity(str, Enum):
    """How bad a finding is: a problem breaks something that training loops rely on, a remark is good to know."""

    PROBLEM = "problem"
    REMARK = "remark"


PROBLEM, REMARK = Severity.PROBLEM, Severity.REMARK


class Question(str, Enum):
    """The questions of `check`. A text is true if nothing is found; `COST` is a topic, and its answer is in words."""

    RUNS = "It runs alone: constructor, reset, step and close"
    API = "It keeps to its API"
    SPACES = "Observations keep to their spaces"
    DETERMINISM = "The same seed and actions give the same results"
    PICKLING = "Constructor, infos and exceptions pickle"
    PROCESSES = "It leaves no processes behind"
    SERIAL = 'Several environments give the same results with backend="serial"'
    THREAD = 'Several environments give the same results with backend="thread"'
    PROCESS = 'Several environments give the same results with backend="process"'
    COST = "Step and reset times"

    @classmethod
    def of_backend(cls, backend: str) -> Question:
        return cls[backend.upper()]


class Finding(NamedTuple):
    """A fault of the simulator, and the advice: a sentence or a phrase each.

    `where` is the method with the fault and the line where it begins, unless `what` has the line already.
    """

    question: Question
    severity: Severity
    what: str
    advice: str
    where: str = ""


_IN_RESET = "draw from a generator that is made in `reset` from its seed (gymnasium.utils.seeding.np_random)"
ISOLATED = "pass isolate_rng=True to ParallelEnv, so that each environment has states of its own, from its seed"
_PICKLED = "it then works, but travels pickled, which is slower"
_ONE_PER_PROCESS = (
    "one simulation per process: pass envs_per_worker=1 to ParallelEnv, so that each environment has a worker process "
    'of its own; backend="serial" and "thread" have one process for all'
)
_SHARES = (
    "let environments share nothing: no globals, class attributes that change, files or ports of one name; or pass "
    "envs_per_worker=1, so that each has a process of its own"
)
UNKNOWN_TO_WORKERS = (
    "this may come from what the script did before, which workers do not know, such as attributes that it has set in "
    "modules and defaults of libraries: do it in the constructor or in the module (docs/script_state.md)"
)
# By name: the question, the severity, the fault and the advice, with fields to fill in.
# fmt: off
_TEXTS: dict[str, tuple[Question, Severity, str, str]] = {
    "unpicklable constructor": (Question.PICKLING, PROBLEM,
        "the constructor cannot be pickled ({reason}), so it cannot be sent to a worker process",
        "create what does not pickle (locks, connections, windows, open files) when the constructor is called, or move "
        "the class or function that uses it into a module"),
    "unpicklable info": (Question.PICKLING, PROBLEM, "the info of {key} cannot be pickled ({reason})",
        "put plain numbers, texts and arrays into infos, not the simulator's own objects"),
    "unpicklable exception": (Question.PICKLING, REMARK,
        "its exception {name} cannot be pickled and unpickled ({reason})",
        "let {name}.__init__ pass all of its arguments to super().__init__, and hold plain values only; "
        "else errors arrive as text, without the exception as their __cause__"),
    "no environment": (Question.API, PROBLEM, "it is not an environment: {error}",
        "return one of the kinds that docs/environments.md lists"),
    "ambiguous agents": (Question.API, PROBLEM, "its agents cannot be told apart: {error}",
        "give every agent a name of its own"),
    "no action space": (Question.API, PROBLEM,
        "{whose} no action space, so there are no actions to step it with",
        "let it have `possible_agents`, and a space for each of them"),
    "unknown agent": (Question.API, REMARK, "agent {agent!r} is not among possible_agents",
        f"add it there, with its spaces; {_PICKLED}"),
    "no observation space": (Question.API, REMARK, "agent {agent!r} declares no observation space",
        f"declare one; {_PICKLED}"),
    "mask of another form": (Question.API, REMARK,
        "the action mask of {agent} does not match its action space, {space}",
        "actions are drawn without it: report masks in the form that the space's `sample` takes, or under another key"),
    "undeclared vector": (Question.API, REMARK, "the reward of {agent} is of type {kind}, not one number",
        "return a float, or declare `reward_space` if vectors are meant; vectors travel pickled without it"),
    "flag": (Question.API, PROBLEM, "the {name} of {agent} is of type {kind}, not bool", "return True or False"),
    "no last observation": (Question.API, REMARK,
        "agents get no last observation in the step that truncates them: {agents}",
        "return it in that step: a critic of observations needs it to estimate the rewards after a truncation. Without "
        "it, pass values of states or NaN to gae of a Rollout"),
    "no __all__": (Question.API, REMARK, f"terminateds lacks the key {ALL!r}, which says when the episode is over",
        f"set {ALL!r} in every step; without it, the episode counts as going on"),
    "unreadable": (Question.RUNS, PROBLEM, "the values that it returns cannot be read: {error}",
        "return what its spaces say, and plain numbers and dicts"),
    "not reset": (Question.DETERMINISM, REMARK,
        f"reset(seed={SEED}) begins another episode in a used environment than in a fresh one: {{where}}",
        "reset the whole state in `reset`, including counters and generators"),
    "seed ignored": (Question.DETERMINISM, PROBLEM,
        "the seed is ignored: episodes without a seed differ, but `reset` with any seed begins the same episode",
        "make a new generator in `reset` if a seed is passed (gymnasium.utils.seeding.np_random)"),
    "no seed": (Question.DETERMINISM, PROBLEM,
        "`reset` takes no seed: an environment's episodes differ, but all environments play the same ones",
        "let `reset` take a `seed`, and make the generator from it (gymnasium.utils.seeding.np_random)"),
    "random": (Question.DETERMINISM, PROBLEM, "two runs with the same seed and actions differ: {where}",
        f"{_IN_RESET}; look for default_rng() without a seed, for the time, for threads"),
    "random of the process": (Question.DETERMINISM, PROBLEM,
        "two runs with the same seed and actions differ: {where}",
        f"{_IN_RESET}, not from `random` or `np.random`, which belong to the whole process, and sort sets"),
    "process-wide generators": (Question.DETERMINISM, REMARK,
        "it draws from, or seeds, {names}, which all environments of a process share",
        f"{ISOLATED}; or {_IN_RESET}"),
    "random without a seed": (Question.DETERMINISM, PROBLEM,
        "an episode that begins with a seed can be repeated, but one that begins without, as after an automatic "
        "reset, cannot: two runs with the same seed and actions differ from {where} on",
        "in `reset`, make a new generator only if a seed is passed, and else go on with the present one "
        "(`super().reset(seed=seed)` and `self.np_random` of gymnasium.Env do that)"),
    "processes left": (Question.PROCESSES, PROBLEM, "{after}() leaves {count} behind: {first}",
        "end them in `close`, and wait for them: each restart would leave more of them"),
    "not alone": (Question.RUNS, REMARK, "{what}", _ONE_PER_PROCESS),
    "no test": (Question.API, REMARK, "{name} cannot be imported: {error}",
        "install what {name} needs, if it is wanted"),
    "shared": (Question.SERIAL, PROBLEM,
        "together with others, environment {env_id} gives other results than alone: {where}", _SHARES),
    "unlike the script": (Question.PROCESS, PROBLEM,
        "in a worker process, environment {env_id} gives other results than in the process of its script: {where}",
        f"{UNKNOWN_TO_WORKERS}; or environments of a worker share something: {_SHARES}"),
    "uneven steps": (Question.COST, REMARK, "uneven steps (p99 is {ratio:.0f}x the median)",
        "`step` waits for the slowest environment; send and recv(min_envs=...) go on with the others"),
    "long resets": (Question.COST, REMARK, "long resets (as long as {ratio:.0f} steps)",
        "`step` waits for environments that are reset; send and recv(min_envs=...) go on with the others"),
    "long imports": (Question.COST, REMARK, "long imports ({modules}, of CPU time in each worker process)",
        "import them once for all workers: pass preload={names} to ParallelEnv (docs/choosing.md)"),
    "lists": (Question.COST, REMARK, "{parts} come as {kinds}, not as arrays",
        "return NumPy arrays of the space's dtype; tuples and lists are converted one by one, which takes tens of "
        "microseconds a step"),
    "short steps": (Question.COST, REMARK, "short steps ({us:.0f} µs, less than it takes to wake a worker)",
        'a plain loop or backend="serial" is usually faster; `marl-parallel tune` compares them'),
}
# fmt: on


def make_finding(name: str, /, **fields: Any) -> Finding:
    """The finding of this name in `_TEXTS`, with its fields filled in."""
    question, severity, what, advice = _TEXTS[name]
    return Finding(question, severity, what.format(**fields), advice.format(**fields))


# For each reset and step: whether it is a step, and the fingerprints of its values, such as "reward of agent_0".
Trace: TypeAlias = list[tuple[bool, dict[str, str]]]


@dataclass
class Examination:
    """The results of one probe or of several."""

    environment: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # problems first, then remarks, in the order of the questions
    checked: set[Question] = field(default_factory=set)  # the questions that were examined to the end
    traces: dict[int, Trace] = field(default_factory=dict)  # by the number of the environment, or `AFTER`

    @property
    def healthy(self) -> bool:
        return all(finding.severity is not PROBLEM for finding in self.findings)

    def add(self, findings: Iterable[Finding]) -> None:
        unique, order = dict.fromkeys([*self.findings, *findings]), [*Question]
        self.findings = sorted(unique, key=lambda one: (one.severity is not PROBLEM, order.index(one.question)))

    def merge(self, other: Examination) -> None:
        self.facts |= other.facts
        self.checked |= other.checked
        self.traces |= other.traces
        self.add(other.findings)

    def answers(self) -> Mapping[Question, str]:
        """By question: "yes", "no", "yes, with a remark" where there are remarks only, or "not checked".

        The answer about costs is "even", or what has been found.
        """
        answers = {}
        for question in Question:
            about = [finding for finding in self.findings if finding.question is question]
            severities = {finding.severity for finding in about}
            if PROBLEM in severities:
                answers[question] = "no"
            elif question not in self.checked:
                answers[question] = "not checked"
            elif question is Question.COST:
                answers[question] = "; ".join(finding.what for finding in about) or "even"
            else:
                answers[question] = "yes, with a remark" if severities else "yes"
        return answers

    def as_json(self) -> dict[str, Any]:
        """Everything but the traces, in values that JSON has."""
        answers = self.answers().items()
        return {
            "environment": self.environment,
            "healthy": self.healthy,
            "facts": self.facts,
            "questions": [{"name": q.name.lower(), "question": q.value, "answer": answer} for q, answer in answers],
            "findings": [
                {**one._asdict(), "question": one.question.name.lower(), "severity": one.severity.value}
                for one in self.findings
            ],
        }


# -- the report in the terminal ----------------------------------------------------------------------------------------


def entries(result: Examination) -> list[tuple[Finding, list[str]]]:
    """The findings as `show` prints them, with backends: the same finding about several backends is one entry."""
    groups: dict[Any, tuple[Finding, list[str]]] = {}
    for one in result.findings:
        name = one.question.name.lower()
        about_backend = name in BACKENDS
        _, backends = groups.setdefault((one.severity, one.what) if about_backend else one, (one, []))
        backends.extend([name] * about_backend)
    return [*groups.values()]


def next_step(result: Examination) -> str:
    """What to do next."""
    problems = sum(finding.severity is PROBLEM for finding, _ in entries(result))
    name = shlex.quote(result.environment)
    if problems:
        what = "the problem" if problems == 1 else f"the {problems} problems"
        return f"fix {what} above, then run marl-parallel check {name} again"
    return f"run marl-parallel tune {name} to find the number of workers"


def show(result: Examination) -> None:
    """Print the answers, the cost of steps, and each finding with its advice."""
    console, facts, title = Console(highlight=False, soft_wrap=True), result.facts, result.environment
    if "kind" in facts:
        count = len(facts["agents"])
        agents = f"{count} agent{'s' * (count != 1)}" if count else "agents not known beforehand"
        title += f": {facts['kind'][0].lower()}{facts['kind'][1:]}, {agents}"
    console.print(f"[bold]{escape(title)}")
    table = Table(show_header=False)
    colours = {"yes": "green", "even": "green", "no": "red", "not checked": "dim"}
    for question, answer in result.answers().items():
        table.add_row(question.value, f"[{colours.get(answer, 'yellow')}]{answer}")
    console.print(table)
    if "step" in facts:
        costs = [
            f"{method} {_duration(facts[method]['median_s'])} (median), {_duration(facts[method]['p99_s'])} (p99)"
            for method in ("step", "reset")
        ]
        console.print(f"It costs: {'; '.join([*costs, 'constructor ' + _duration(facts['construct_s'])])}")
    if "reward_types" in facts:
        rewards, flags = (", ".join(facts[f"{part}_types"]) for part in ("reward", "flag"))
        console.print(f"Types: rewards {rewards}; flags {flags}")
        console.print(f"Seen: {escape(in_words(facts))}", soft_wrap=True)
    if facts.get("tests"):
        console.print(f"Tests run: {', '.join(facts['tests'])}")
    for one, backends in entries(result):
        where = f" (backend: {', '.join(backends)})" if backends else ""
        colour = "red" if one.severity is PROBLEM else "yellow"
        console.print(f"\n[{colour}]{one.severity.value}[/]: {escape(one.what)}{where}")
        if one.where:
            console.print(f"  where: {escape(one.where)}")
        console.print(f"  what to do: {escape(one.advice)}")
    if result.findings:
        console.print()


def _duration(seconds: float) -> str:
    """Seconds in a unit that fits: 0.0213 is 21.3 ms."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def few(agents: Sequence[str]) -> str:
    """The names of up to three agents, or how many there are."""
    return ", ".join(agents) if len(agents) <= 3 else f"{len(agents)} agents"


def in_words(facts: Mapping[str, Any]) -> str:
    """Describe the facts that `Traits` has found, and the state."""

    def which(text: str, agents: Sequence[str]) -> str:
        return f"{text} ({few(agents)})" if agents else f"no {text}"

    return "; ".join([
        which("action masks", facts["masked_agents"]),
        "no state" if facts["state"] is None else f"a state, {facts['state']}",
        which("agents that join late", facts["late_agents"]),
        which("agents that end before others", facts["early_agents"]),
        *(["agents take turns"] if facts["takes_turns"] else []),
    ])  # fmt: skip
