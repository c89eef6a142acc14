"""All cases of the zoo, by name, and the lines of their table."""

from collections.abc import Iterable, Sequence
from statistics import median

from tests.zoo import threads
from tests.zoo.case import CASES, Case
from tests.zoo.faults import data, loops, numerics, parameters, rates
from tests.zoo.faults import trainers as faulty_trainers
from tests.zoo.healthy import trainers, unusual, usual
from tests.zoo.outcome import SHOWN, Outcome

MODULES = (numerics, rates, parameters, data, loops, faulty_trainers, usual, unusual, trainers, threads)
HEAD = "| case | model | way | cause | findings | result | at step | loss |\n|---|---|---|---|---|---|---|---|\n"


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases whose name contains one of the texts; all without a text."""
    return [case for name, case in CASES.items() if not names or any(text in name for text in names)]


def line(outcome: Outcome) -> str:
    """Return the line of the table for an outcome."""
    case = outcome.case
    shown = [f"{severity} {name}" for severity, name in outcome.findings[:SHOWN]]
    findings = ", ".join(shown) or outcome.error.replace("|", "\\|").replace("\n", " ")[:200]
    cause = case.expected[0] if case.expected else ""
    result = f"**{outcome.result}**" if not outcome.is_accepted else outcome.result
    step = "" if outcome.first_step is None else str(outcome.first_step)
    cause = f"{cause}, hidden" if case.hidden else cause
    losses = " → ".join(f"{loss:.3g}" for loss in outcome.losses)
    cells = [case.name, case.model, case.way, cause, findings, result, step, losses]
    return f"| {' | '.join(cells)} |\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the measures of DOCTOR's table in sentences."""
    shown = [item for item in outcomes if item.case.kind == "fault" and not item.case.hidden]
    hidden = [item for item in outcomes if item.case.kind == "fault" and item.case.hidden]
    healthy = [item for item in outcomes if item.case.kind == "healthy"]
    three = count(shown, "first", "among three")
    lines = [
        f"- Planted faults whose cause is the first finding: {count(shown, 'first')} of {len(shown)}; among the first "
        f"three findings: {three}; missed: {count(shown, 'missed')}; another cause in a warning instead: "
        f"{count(shown, 'wrong cause', 'later')}.",
        f"- Faults that the record cannot show with certainty: {count(hidden, 'first', 'among three', 'later')} of "
        f"{len(hidden)} reported as suspicious, {count(hidden, 'not shown')} not shown, "
        f"{count(hidden, 'wrong cause')} with another cause in a warning.",
        f"- Healthy runs with a warning or worse: {count(healthy, 'false alarm')} of {len(healthy)}.",
        delays(shown),
    ]
    if errors := count(outcomes, "error"):
        lines.append(f"- Trainings that ended with an error: {errors}.")
    return "\n".join(lines)


def count(outcomes: Iterable[Outcome], *results: str) -> int:
    """Return the number of outcomes with one of the results."""
    return sum(outcome.result in results for outcome in outcomes)


def delays(outcomes: Iterable[Outcome]) -> str:
    """Return the sentence about the steps from the first one at which a cause is knowable to its finding."""
    steps = [outcome.delay for outcome in outcomes if outcome.delay is not None]
    if not steps:
        return "- Steps until the finding: no cause was found."
    at_once = sum(step <= 1 for step in steps)
    return (
        f"- Steps from the first one at which the cause is knowable to the finding: median {median(steps):g}, largest "
        f"{max(steps)}; at most 1 in {at_once} of {len(steps)}."
    )
