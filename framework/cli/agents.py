"""The command ``loopscope agents``: a text for the AGENTS.md of a repository that trains with loopscope."""

import sys
from collections.abc import Sequence

from .parser import CommandParser

TEXT = """\
## Trainings recorded by loopscope

Trainings in this repository are observed by loopscope (`loopscope run`, or `loopscope.attach` in a script). A run is a
folder: `experiment_config.json` (settings, versions, commit), `NAME.jsonl` (every metric with its step), `alerts.jsonl`
(problems that hooks reported), `summary.json` (result; missing while the run is in progress). Observation changes no
bit of a training. Do not read the JSONL files whole: they are large. Ask the commands below.

1. `loopscope ls FOLDER --json`: which runs exist, their state, length and final numbers, the newest first.
2. `loopscope doctor RUN --json`: what is wrong: findings with `severity`, `step`, `evidence`, `why` and `next`, the
   most important first.
3. `loopscope alerts RUN --json --since STEP`: what has happened since a step, the newest last; also while it trains.
4. `loopscope show RUN --json --metrics 'training_checks/l*'`: extremes and some values of each metric that matches;
   without `--metrics` the result and all metrics with their first and last value.
5. `loopscope compare RUN RUN --json`: differing settings, results, tests over seeds, the first differing step.

- Every output is one JSON object with `"schema": 1`, at most 4,096 bytes. If `truncated` is present, it names the cut
  field, the number of omitted entries, and the command that prints them (`more`). `--max-bytes N` changes the limit,
  `--all` lifts it.
- Exit status: 0 done; 1 the answer is "no" (the runs differ, a finding at `--fail-on warning`), or the run failed;
  2 bad input. With `--json` an error is `{"schema": 1, "error": ..., "status": ...}`.
- Fix the first finding before anything else: others are often its consequences. `info` needs no action.
- A step that matters can be repeated bit for bit: `loopscope rewind RUN --step N --hooks HOOK --json`; the cause of a
  spike: `loopscope rewind RUN --spike --json` (only runs of `loopscope run`). Both train again; for runs of
  `loopscope watch` the script runs again, and writes its files again.
- `loopscope hooks NAME --json` explains the formula and the reading of every metric of a hook.
"""


def agents_parser() -> CommandParser:
    """Build the parser of ``loopscope agents``."""
    return CommandParser("agents", "Print a text about loopscope for the AGENTS.md of your repository.")


def agents(words: Sequence[str]) -> None:
    """Print the text."""
    agents_parser().parse(words)
    sys.stdout.write(TEXT)
