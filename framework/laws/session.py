"""A check: the laws that are tried at some steps of a training, and what they show together."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ..durable_files import write_json
from ..errors import require, unknown, with_lines
from .law import Law, LawRegistry, LawVerdict, Outcome, holds, not_checked
from .rows import UndecidedError
from .trial import Trial

FILE = "laws.json"
"""The name of the file with the results, in the folder of the run."""
LEARNS = "every_parameter_learns"


class LawCheck:
    """The outcomes of laws at the steps that were tried."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Select laws by ``names``; without names, all."""
        known = LawRegistry.names()
        for name in names:
            if name not in known:
                raise unknown("law", name, known)
        require(bool(known), "No law is registered.")
        self._laws: list[Law] = [law() for law in LawRegistry if not names or law.name in names]
        self._outcomes: dict[str, list[tuple[int, Outcome]]] = {law.name: [] for law in self._laws}

    def __len__(self) -> int:
        """Return the number of laws."""
        return len(self._laws)

    def try_at(self, trial: Trial, *, leaves_decided: bool = False) -> Iterable[str]:
        """Try every law at a step; yield the name of each law after it was tried.

        Args:
            trial: the step.
            leaves_decided: leave out laws that an earlier step has decided, if time is short.
        """
        for law in self._laws:
            outcomes = self._outcomes[law.name]
            is_decided = any(outcome.verdict != "not checked" for _, outcome in outcomes)
            if not (leaves_decided and is_decided and not law.is_persistent):
                outcomes.append((trial.number, _outcome(law, trial)))
            yield law.name

    def add(self, name: str, step: int, outcome: Outcome) -> None:
        """Add an outcome that the training itself has shown, if the law was selected."""
        if name in self._outcomes:
            self._outcomes[name].append((step, outcome))

    def __contains__(self, name: str) -> bool:
        """Return whether a law was selected."""
        return name in self._outcomes

    def subjects(self, name: str) -> frozenset[str]:
        """Return what breaks a persistent law at all steps that were tried."""
        found = [outcome.subjects for _, outcome in self._outcomes.get(name, ())]
        return frozenset.intersection(*found) if found else frozenset()

    def decide(self, name: str) -> None:
        """Let only the newest outcome of a law count."""
        self._outcomes[name] = self._outcomes[name][-1:]

    def excuse(self, name: str, subjects: Iterable[str]) -> None:
        """Drop subjects of a persistent law that later steps have refuted, such as parameters that learn by now."""
        refuted = frozenset(subjects)
        self._outcomes[name] = [
            (step, replace(outcome, subjects=outcome.subjects - refuted))
            for step, outcome in self._outcomes.get(name, [])
        ]

    def results(self) -> list[dict[str, Any]]:
        """Return for each law its name, statement, verdict, evidence, remedy, and the step of the evidence."""
        return [self._result(law) for law in self._laws]

    def write(self, path: Path, tried: int, total: int, trying: str, *, is_ended: bool = False) -> None:
        """Write the results, the number of laws for each verdict, and the progress of the check.

        ``is_ended`` is set if the check ends the command.
        """
        results = self.results()
        counts = {verdict: sum(item["verdict"] == verdict for item in results) for verdict in get_args(LawVerdict)}
        write_json(
            path, {**counts, "laws": results, "tried": tried, "total": total, "trying": trying, "is_ended": is_ended}
        )

    def _result(self, law: Law) -> dict[str, Any]:
        outcomes = self._outcomes[law.name]
        step, outcome = _combined(law, outcomes) if outcomes else (0, not_checked("the training made no step"))
        result: dict[str, Any] = {"law": law.name, "statement": law.statement, "verdict": outcome.verdict}
        if outcome.evidence:
            result["evidence"] = outcome.evidence
        if outcome.verdict == "broken":
            result |= {"step": step, "remedy": law.remedy}
        return result


def _combined(law: Law, outcomes: Sequence[tuple[int, Outcome]]) -> tuple[int, Outcome]:
    """Return the outcome that counts, with its step."""
    decided = [item for item in outcomes if item[1].verdict != "not checked"]
    if not decided:
        return next((item for item in outcomes if item[1].evidence), (0, not_checked("it needs another step")))
    violations = [item for item in decided if item[1].verdict == "broken"]
    if law.is_persistent:
        common = frozenset.intersection(*[outcome.subjects for _, outcome in decided])
        if len(violations) < len(decided) or not common:
            return next((item for item in decided if item not in violations), (decided[-1][0], holds()))
        return violations[-1]
    return violations[0] if violations else decided[-1]


def _outcome(law: Law, trial: Trial) -> Outcome:
    """Return the outcome of a law; one that raises an error is not checked."""
    try:
        return law.check(trial)
    except UndecidedError as reason:
        return not_checked(str(reason))
    except Exception as error:  # of the training's own functions on inputs that they do not expect, for example
        return not_checked(with_lines(error))
