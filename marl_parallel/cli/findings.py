"""What `marl-parallel check` asks of a simulator, what it may find, and all of that as one examination.

Nothing is examined here: what is looked at is in `probes.py` and `values.py`, who runs it in `isolation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Severity(str, Enum):
    """How bad it is."""

    PROBLEM = "problem"
    """It breaks, or breaks a promise that training loops rely on."""
    REMARK = "remark"
    """It works; but there is something to know."""


class Question(str, Enum):
    """What is asked; the text is what holds where nothing is found."""

    RUNS = "It runs alone: constructor, reset, step and close"
    API = "It keeps to its API"
    SPACES = "Observations keep to their spaces"
    DETERMINISM = "The same seed and actions give the same results"
    PICKLING = "Constructor, infos and exceptions pickle"
    PROCESSES = "It leaves no processes behind"
    SERIAL = 'Copies give the same results with backend="serial"'
    THREAD = 'Copies give the same results with backend="thread"'
    PROCESS = 'Copies give the same results with backend="process"'
    COST = "Steps and resets take about the same time each"

    @classmethod
    def of_backend(cls, backend: str) -> Question:
        """The question about a backend.

        Example:
            >>> Question.of_backend("thread").name
            'THREAD'
        """
        return cls[backend.upper()]


_BACKENDS = (Question.SERIAL, Question.THREAD, Question.PROCESS)

BACKENDS = tuple(question.name.lower() for question in _BACKENDS)
"""Those that there is a question about."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        question: What it answers.
        severity: How bad it is.
        what: What was seen, in a sentence.
        advice: What to do about it, in a sentence.
    """

    question: Question
    severity: Severity
    what: str
    advice: str


@dataclass
class Examination:
    """All that a check has come to know of an environment.

    Attributes:
        environment: As it was named.
        facts: What it is and what it costs.
        findings: What is not as it should be; problems first.
        checked: The questions that were looked into to the end.
    """

    environment: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    checked: set[Question] = field(default_factory=set)

    @property
    def healthy(self) -> bool:
        """Whether there are no problems."""
        return all(finding.severity is not Severity.PROBLEM for finding in self.findings)

    def add(self, findings: Iterable[Finding]) -> None:
        """Note findings that are not known yet, and bring them into order."""
        self.findings = sorted(
            dict.fromkeys([*self.findings, *findings]),
            key=lambda finding: (finding.severity is not Severity.PROBLEM, list(Question).index(finding.question)),
        )

    def drop(self, question: Question, severity: Severity) -> None:
        """Forget what says no more than another finding does."""
        self.findings = [one for one in self.findings if (one.question, one.severity) != (question, severity)]

    def merged(self) -> list[tuple[Finding, list[str]]]:
        """The findings in their order, those that are the same with several backends once; and with which."""
        backends: dict[Finding, list[str]] = {}
        for finding in self.findings:
            names = [finding.question.name.lower()] if finding.question in _BACKENDS else []
            alike = next(
                (one for one in backends if names and one.question in _BACKENDS and one.what == finding.what), finding
            )
            backends.setdefault(alike, []).extend(names)
        return list(backends.items())

    def answers(self) -> Mapping[Question, str]:
        """By question: "yes", "no", "yes, with a remark" where there are remarks only, or "not checked".

        Example:
            >>> examination = Examination("it", checked={Question.RUNS})
            >>> examination.answers()[Question.RUNS], examination.answers()[Question.API]
            ('yes', 'not checked')
        """
        return {question: self._answer(question) for question in Question}

    def _answer(self, question: Question) -> str:
        severities = {finding.severity for finding in self.findings if finding.question is question}
        if Severity.PROBLEM in severities:
            return "no"
        if question not in self.checked:
            return "not checked"
        return "yes, with a remark" if severities else "yes"

    def as_json(self) -> dict[str, Any]:
        """Everything, in what JSON knows."""
        answers = self.answers()
        return {
            "environment": self.environment,
            "healthy": self.healthy,
            "facts": self.facts,
            "questions": [
                {"name": question.name.lower(), "question": question.value, "answer": answers[question]}
                for question in Question
            ],
            "findings": [
                {**asdict(finding), "question": finding.question.name.lower(), "severity": finding.severity.value}
                for finding in self.findings
            ],
        }
