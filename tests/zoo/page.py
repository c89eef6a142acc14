"""The file docs/data/zoo.txt with the outcomes of all cases."""

from collections.abc import Sequence

from docs.dates import today
from tests.zoo.outcome import Outcome
from tests.zoo.table import HEAD, line, summary

THREADS = "thread-"
"""Start of the names of cases after public threads."""


def page(outcomes: Sequence[Outcome]) -> str:
    """Return the text of the file."""
    threads = [item for item in outcomes if item.name.startswith(THREADS)]
    planted = [item for item in outcomes if item not in threads]
    faults = [item for item in planted if item.case.kind == "fault"]
    healthy = [item for item in planted if item.case.kind == "healthy"]
    parts = [f"Trained on {today()}.\n", summary(planted), "\n## Planted faults\n"]
    parts += [HEAD + "".join(map(line, faults)), "## Healthy trainings\n", HEAD + "".join(map(line, healthy))]
    parts += ["## After public threads\n", HEAD + "".join(map(line, threads))]
    parts += ["## What happens in each\n", *(f"- `{item.name}`: {item.case.sentence}" for item in outcomes)]
    return "\n".join(parts) + "\n"
