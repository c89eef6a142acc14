"""The law that the outputs of a row do not depend on the inputs of other rows."""

import torch
from torch import Tensor

from ..groups import Groups
from ..law import Law, Outcome, broken, holds, not_checked
from ..rows import UndecidedError
from ..trial import TIMES_NOISE, Trial


class RowsDoNotMix(Law):
    """Replace the inputs of one row by those of another row, and compare the outputs of all other rows.

    The model is in eval mode, since batch normalisation mixes rows by design.
    """

    name = "rows_do_not_mix"
    statement = "outputs of a row do not depend on other rows"
    remedy = "look for view or reshape in place of transpose, batch_first, and operations over dimension 0"

    def check(self, trial: Trial) -> Outcome:
        """Compare outputs before and after a change of a row, bit for bit."""
        try:
            count = trial.rows
        except UndecidedError:
            return self._of_groups(trial, Groups.of(trial.step))
        outcome = self._of_rows(trial, count)
        if outcome.verdict == "broken" and trial.may_use_statistics:
            return not_checked("functions may normalise by the mean of the batch by design")
        return outcome

    def _of_rows(self, trial: Trial, count: int) -> Outcome:
        """Change the first row, and compare the outputs of all others."""
        if count < 3:
            return not_checked("a batch of two rows has no third one to compare")
        order = torch.arange(count)
        order[0] = count - 1
        changed = trial.inputs_with_rows(order)
        if all(torch.equal(value, trial.inputs[index]) for index, value in changed.items()):
            return not_checked("the first and the last row are equal")
        before, again, after = (
            trial.evaluate(value, needs_loss=False, train=False).outputs for value in (None, None, changed)
        )
        if not all(map(torch.equal, before, again)):
            return not_checked("two equal passes differ")
        dimensions = [self._dimension(trial, output) for output in before]
        of_pairs = _of_pairs(trial, count, before, after)
        if of_pairs.verdict == "broken" or dimensions.count(None) == len(dimensions):
            return of_pairs
        for position, (dimension, one, other) in enumerate(zip(dimensions, before, after, strict=True)):
            if dimension is None:
                continue
            one, other = one.movedim(dimension, 0), other.movedim(dimension, 0)
            differing = _differs(one, other)[1:]
            if differing.any():
                if not trial.layout.is_certain:
                    return not_checked("the inputs do not show whether dimension 0 is the batch or the time")
                row = int(differing.nonzero()[0]) + 1
                size = float((one[1:].double() - other[1:].double()).abs().max())
                # Kernels may sum in another order if rows are grouped by their contents, as in mixtures of experts.
                if size <= TIMES_NOISE * trial.output_noise[position]:
                    continue
                return broken(f"the output of row {row} changes by {size:.1e} with the input of row 0")
        return holds("apart from batch normalisation" if trial.normalisations() else "")

    def _of_groups(self, trial: Trial, groups: Groups) -> Outcome:
        """Change the entries of one row, such as the nodes of a graph, and compare the outputs of other rows."""
        if not groups.are_rows:
            return not_checked("the inputs have different lengths, and none shows the rows of their entries")
        before = trial.evaluate(needs_loss=False, train=False).outputs
        if all(groups.rows_of(item) is None for item in before):
            return not_checked("no output has one entry per row")
        for row in (0, groups.count // 2, groups.count - 1):
            after = trial.evaluate(groups.with_other_content(row), needs_loss=False, train=False).outputs
            for position, (one, other) in enumerate(zip(before, after, strict=True)):
                rows = groups.rows_of(one)
                if rows is None:
                    continue
                differing = rows[_differs(one, other).cpu()]
                size = float((one.double() - other.double())[(rows != row).to(one.device)].abs().max())
                if bool((differing != row).any()) and size > TIMES_NOISE * trial.output_noise[position]:
                    found = int(differing[differing != row][0])
                    return broken(f"the output of row {found} changes by {size:.1e} with the entries of row {row}")
        return holds("apart from batch normalisation" if trial.normalisations() else "")

    def _dimension(self, trial: Trial, output: Tensor) -> int | None:
        """Return the dimension of an output that is the batch; ``None`` without one, and for one entry per pair."""
        rows = trial.layout
        if tuple(output.shape[:2]) == (rows.count, rows.count):
            return None
        for dimension in (rows.dimension, 0):
            if output.ndim > dimension and output.shape[dimension] == rows.count:
                return dimension
        return None


def _of_pairs(trial: Trial, count: int, before: list[Tensor], after: list[Tensor]) -> Outcome:
    """Compare tables with an entry for every pair of rows, such as similarities."""
    tables = [item for item in zip(before, after, trial.output_noise, strict=True) if item[0].shape == (count, count)]
    for one, other, noise in tables if trial.layout.is_certain else ():
        if (size := _change_of_others(one, other)) > TIMES_NOISE * noise:
            return broken(f"the outputs of pairs of other rows change by {size:.1e} with the input of row 0")
    return holds() if tables else not_checked("no output has one entry per row")


def _change_of_others(one: Tensor, other: Tensor) -> float:
    """Return the largest change of a table of pairs outside of the pairs of row 0.

    A softmax over rows or columns gives each of them another factor, and its logarithm another summand.
    """
    first, second = one[1:, 1:].double(), other[1:, 1:].double()
    size = float((second - first).abs().max())
    for change in (second - first, second / first):
        spreads = (change.amax(dimension) - change.amin(dimension) for dimension in (0, 1))
        if any(float(spread.max()) <= 1e-3 * float(change.abs().max()) for spread in spreads):
            return 0.0
    return size


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """Return for each row whether an element differs; two NaN are equal."""
    return ((one != other) & ~(one.isnan() & other.isnan())).reshape(len(one), -1).any(1)
