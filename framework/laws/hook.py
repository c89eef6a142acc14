"""The hook that tries the laws of every training at its first steps; registered when it is asked for by name."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import listed, require
from ..hooks import (
    ENDLESS,
    DebugInterventionHook,
    HookPoint,
    HookRegistry,
    Metrics,
    ModelDataContext,
    RunDataContext,
    RunInfo,
    StepSchedule,
    StepTap,
    Tap,
)
from ..observing import optimizers_over
from ..state import RandomStreams
from .law import broken, holds
from .recording import Recording, is_function
from .saved_files import SavedFiles
from .schedules import Schedules
from .session import FILE, LEARNS, LawCheck
from .training_watch import TrainingWatch
from .trial import Trial
from .values import weight_of

NEVER = 10**9
EVALUATION = "evaluation_changes_nothing"
CHECKPOINT = "checkpoint_is_complete"
HALVES = "halves_make_a_whole"
ADD_UP = "micro_batches_add_up"
SCHEDULE = "schedule_lasts"
NEAR = 1e-6
LEAST_UPDATES = 4
"""Updates after which parameters that none has changed are reported."""
MOST_UPDATES = 50
"""Updates after the last tries, in which parameters without a gradient may get one."""
LONGEST_EPOCH = 200
"""Updates within which a batch of another number of rows is awaited."""
LONGEST_TRIES = 40.0
"""Seconds of processor time after which later steps try only the laws that no earlier one has decided."""
LONGEST_WAIT = 20.0
"""Seconds of processor time after the last tries, in which an evaluation of the script may begin."""
LEAST_WAITS = 10
"""Updates after the last tries that show whether parameters get a gradient, however long they take."""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class Laws(DebugInterventionHook):
    """Try the laws that every training obeys, at two steps: gradients, rows, masks, losses, weights.

    ``loopscope check`` runs a training with this hook and shows its result, the file ``laws.json`` in the folder of the
    run. Every try is rolled back.

    Args:
        only: the names of the laws; by default all.
        steps: the steps at which they are tried.
        continues: let a custom loop continue afterwards; otherwise it ends, once the first evaluation was seen, too, or
            20 seconds later.
    """

    name = "laws"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    metrics = """
        broken | laws that a counterexample breaks at this step | 0, 1, 2, … | Above 0: see laws.json.
    """

    only: Sequence[str] = ()
    steps: Sequence[int] = (1, 5)
    continues: bool = True

    def __post_init__(self) -> None:
        require(bool(self.steps) and min(self.steps) >= 1, f"laws.steps is {self.steps!r}; give steps from 1 on.")
        import_module("loopscope.laws.shipped")
        self._check = LawCheck(self.only)
        self._places = sorted({*self.steps})
        self.step_schedule = StepSchedule(
            mode="stride", every_n_steps=NEVER, warmup=self._places[0] - 1, also=self._later_places()
        )
        self._tried = 0
        self._constants: list[Tensor] = []
        self._idle: set[str] = set()
        """Parameters that have not learned yet."""
        self._learned: set[str] = set()
        """Parameters that had a gradient at any update so far."""
        self._waits = MOST_UPDATES
        self._moved: set[str] = set()
        self._trainable: set[str] = set()
        self._updates, self._is_judged, self._is_over = 0, False, False
        self._is_waiting_for_group = ADD_UP in self._check
        """Whether no group of another number of micro-batches was seen."""
        self._divisors: list[float] = []
        """Numbers by which the script divides a loss that is a sum over rows, if they are multiples of their number."""
        self._rows = 0
        """The number of rows at that step."""
        self._start: float | None = None
        """The processor time at the first tries."""
        self._end: float | None = None
        """The processor time at which the wait for an evaluation ends."""

    def _later_places(self) -> tuple[int, ...]:
        return tuple(place - self._places[0] + 1 for place in self._places)

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file with the results."""
        return (FILE,)

    def start(self, run: RunInfo) -> None:
        """Record the steps from now on."""
        self._path = Path(run.output_dir) / FILE
        self._is_main = run.task.ranks.is_main
        self._streams = RandomStreams(run.seed)
        self._recording = Recording(self._streams)
        self._watch = TrainingWatch(self._on_evaluation, self._on_update)
        self._files = SavedFiles()
        self._schedules, self._is_schedule_judged = Schedules(), False
        self._planned = 0 if run.steps >= ENDLESS else run.steps
        """The planned updates; 0 without a plan."""
        self._write()

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Return the taps that record the steps, and watch the first evaluation."""
        if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
            self._is_waiting_for_group = False  # Lightning divides the last group of an epoch by the usual number
        self._is_function = is_function(model)
        return [
            StepTap(self._recording, always=self._is_function),
            StepTap(self._watch, always=True),
            StepTap(self._files, always=True),
        ]

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Try every law."""
        if run_ctx.step > self._updates + 1:  # a resumed training, whose earlier updates were not seen
            self._planned = 0
        self._recording.leave()  # the loop may receive the use of gradients before the recording does
        steps = self._recording.steps
        for step in steps:
            step.verify()
        optimizers = optimizers_over(model_ctx.model.parameters())
        trial = Trial(
            steps, model_ctx.model, optimizers, model_ctx.branch, self._streams, run_ctx.step, self._constants
        )
        trial.clipping = self._watch.clipping
        self._schedules.find(optimizers)
        self._start = self._start or time.process_time()
        is_short = time.process_time() - self._start > LONGEST_TRIES
        for name in self._check.try_at(trial, leaves_decided=is_short):
            self._tried += 1
            self._write(f"step {run_ctx.step}: {name.replace('_', ' ')}")
        self._constants = list(steps[0].constants) if steps else []
        self._divisors = trial.fixed_divisors or self._divisors
        self._rows = trial.rows if trial.fixed_divisors else self._rows
        if run_ctx.step >= self._places[-1]:
            self._end = time.process_time() + LONGEST_WAIT
            self._idle = {name for name in self._check.subjects(LEARNS) if name in self._trainable}
        return {"broken": sum(result["verdict"] == "broken" for result in self._check.results())}

    def _on_evaluation(self, problems: Sequence[str]) -> None:
        """Add what the first evaluation of the script has shown."""
        self._check.add(EVALUATION, self._places[-1], broken("; ".join(problems)) if problems else holds())
        self._write("an evaluation")

    def _on_update(self, model: nn.Module, moved: Collection[str]) -> None:
        """Note which parameters learn at other steps, such as experts without tokens in a batch."""
        self._moved.update(moved)
        self._updates += 1
        self._judge_files()
        self._judge_schedule()
        if self._is_over:
            return
        self._judge_groups()
        self._judge_short_batch()
        self._trainable = {name for name, item in model.named_parameters() if item.requires_grad}
        if self._end is None or (self._idle and self._waits):
            self._learned |= {
                name for name, item in model.named_parameters() if item.grad is not None and bool(item.grad.any())
            }
        if self._end is not None and self._idle and self._waits:
            self._check.excuse(LEARNS, self._idle & self._learned)
            self._idle -= self._learned
            self._waits = max(0, self._waits - 1)
            self._write("parameters without a gradient")
        if self._has_seen_all():  # a training that continues pays for its files and its schedule alone
            self._is_over, self._recording.weights = True, []
            self._judge_updates()
            self._write("end")
            self._watch.stop()

    def _judge_files(self) -> None:
        """Add what the newest files lack."""
        if sentence := self._files.problem():
            self._check.add(CHECKPOINT, self._updates, broken(sentence))
            self._write("a saved file")

    def _judge_groups(self) -> None:
        """Add a group of another number of micro-batches than usual, such as the last one of an epoch.

        It breaks the law if its losses are divided by the usual number.
        """
        counts = self._watch.counts
        if not counts or not self._is_waiting_for_group:
            return
        usual, (number, factors) = self._usual_group(), counts[-1]
        others = [item for count, item in counts if count == usual]
        if number != usual > 1 and all(any(abs(usual * one - 1) < NEAR for one in item) for item in (factors, *others)):
            self._is_waiting_for_group = False
            sentence = f"an update of {number} micro-batches divides their losses by {usual}, the usual number"
            self._check.add(ADD_UP, self._updates, broken(sentence))

    def _judge_schedule(self) -> None:
        """Add a schedule that is stepped too often."""
        if self._is_schedule_judged or SCHEDULE not in self._check:
            return
        self._schedules.note()
        if sentence := self._schedules.problem():
            self._is_schedule_judged = True
            self._check.add(SCHEDULE, self._updates, broken(sentence))
            self._write("the schedule")
        elif self._planned and (outcome := self._schedules.planned_outcome(self._planned)):
            self._planned = 0
            self._check.add(SCHEDULE, self._updates, outcome)
            self._write("the schedule")

    def _judge_short_batch(self) -> None:
        """Add a batch of another number of rows, such as the last one of an epoch, whose loss has the same divisor."""
        shapes, divisors = self._watch.batches[-1] if self._watch.batches else ((), set[float]())
        rows = {shape[0] for shape in shapes if shape}
        if not self._divisors or len(rows) != 1 or rows == {self._rows}:
            return
        (number,) = rows
        same = [item for item in self._divisors if any(abs(item - one) < NEAR * item for one in divisors)]
        self._divisors = []
        if same:
            sentence = f"the summed loss of a batch of {number} rows is divided by {same[0]:g}, as that of {self._rows}"
            self._check.add(HALVES, self._updates, broken(sentence))

    def _usual_group(self) -> int:
        """Return the number of micro-batches of most updates; the larger one of two."""
        counts = Counter(count for count, _ in self._watch.counts)
        return max(sorted(counts, reverse=True), key=counts.__getitem__, default=1)

    def _judge_updates(self) -> None:
        """Add parameters that no update of the training has changed, to those that its gradients show."""
        still = sorted(name for name in self._trainable - self._moved if weight_of(name) not in self._moved)
        if self._updates < LEAST_UPDATES or not self._moved or not still or self._is_judged:
            return
        self._is_judged = True
        if not self._check.subjects(LEARNS):
            sentence = f"{listed(still, 3)}: not changed by {self._updates} updates, while others are"
            self._check.add(LEARNS, self._places[-1], broken(sentence, still))
            self._check.decide(LEARNS)

    def end(self, status: str) -> None:
        """Judge the updates of a training that has ended, its last file, and its schedule."""
        if not self._tried:
            return
        if not self._is_over:
            self._judge_updates()
        self._judge_files()
        if status == "completed" and not self.is_finished and not self._is_schedule_judged:
            self._check.add(SCHEDULE, self._updates, self._schedules.outcome())
        self._write("end")

    @property
    def is_finished(self) -> bool:  # type: ignore[override]
        """Whether a custom loop may end."""
        return not self.continues and self._has_seen_all()

    def _has_seen_all(self) -> bool:
        """Return whether all laws were tried, and the waits for an evaluation and for gradients have ended."""
        if self._end is None:
            return False
        is_evaluated = EVALUATION not in self._check or self._watch.is_decided or self._is_function
        is_waiting = bool(self._idle) and self._waits > 0
        if is_waiting and self._waits > MOST_UPDATES - LEAST_WAITS:
            return False
        is_waiting |= self._is_waiting_for_group and self._usual_group() > 1
        is_waiting |= not self._is_schedule_judged and self._schedules.end_soon()
        is_waiting |= bool(self._divisors) and self._updates < LONGEST_EPOCH
        return (is_evaluated and not is_waiting) or time.process_time() > self._end

    def results(self) -> list[dict[str, Any]]:
        """Return the results of all laws up to now."""
        return self._check.results()

    def _write(self, trying: str = "") -> None:
        """Write what is known so far, for the command that waits for it."""
        is_first = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        if self._is_main and is_first:
            total = len(self._check) * len(self._places)
            self._check.write(self._path, self._tried, total, trying, is_ended=self.is_finished)
