"""The law that a batch has the same gradient in any order of its rows."""

from ..bundles import FEWEST, Bundles
from ..groups import Groups
from ..law import Law, Outcome, broken, holds, not_checked
from ..rows import UndecidedError
from ..sorted_rows import adds_sorted_rows
from ..trial import TIMES_NOISE, Trial

LEAST_ROWS = 3
PARTS = 24
"""Connected parts of a batch of graphs that are changed, the largest first."""


class OrderDoesNotMatter(Law):
    """Compute the gradient of the batch with inputs and targets in another order of rows, in eval mode."""

    name = "order_does_not_matter"
    statement = "the order of rows does not change the gradient"
    remedy = "let no row depend on its position in the batch, and pair inputs and targets by rows"

    def check(self, trial: Trial) -> Outcome:
        """Compare the gradients of two orders with the noise of rounding."""
        try:
            trial.layout  # noqa: B018 - raises an error without rows of equal lengths
        except UndecidedError:
            return self._of_parts(trial, Groups.of(trial.step))
        if trial.layout.is_joined:
            return not_checked("the loss gets the targets of all rows joined")
        whole = trial.gradient()
        if not whole.isfinite().all():
            return not_checked("the gradient is not finite")
        difference = trial.depends_on(Bundles.of_single_rows(trial.rows))
        if not difference:
            return holds()
        if trial.bundles.members > 1 and trial.rows == FEWEST:
            return not_checked("the rows belong together in pairs, or their order matters: four rows show neither")
        if trial.bundles.members > 1:
            return holds(f"for bundles of {trial.bundles.members} rows that belong together")
        if trial.compares_rows:
            return not_checked("the loss compares the rows of a batch with each other by design")
        if name := adds_sorted_rows(trial):
            return not_checked(f"the loss adds up sorted rows in their order by design ({name})")
        size = float(whole.norm())
        noise = trial.gradient_noise / size
        return broken(f"another order changes the gradient by {difference / size:.2%}, rounding by {noise:.0e}")

    def _of_parts(self, trial: Trial, groups: Groups) -> Outcome:
        """Change connected nodes of a batch of graphs: they belong to one row, wherever they are in the batch."""
        before = trial.evaluate(needs_loss=False, train=False).outputs
        sizes = groups.owner.bincount()
        for position, one in enumerate(before):
            is_of_rows = one.ndim and LEAST_ROWS <= len(one) <= groups.count and len(one) < len(groups.owner)
            if groups.are_rows or not is_of_rows:
                continue
            for group in sizes.argsort(descending=True)[:PARTS].tolist():
                changed = groups.with_other_content(group)
                other = trial.evaluate(changed, needs_loss=False, train=False).outputs[position]
                sizes_by_row = (one.double() - other.double()).abs().reshape(len(one), -1).amax(1)
                rows = (sizes_by_row > TIMES_NOISE * trial.output_noise[position]).nonzero().flatten().tolist()
                if len(rows) > 1:
                    listing = " and ".join(map(str, rows[:2]))
                    return broken(f"{int(sizes[group])} connected nodes enter rows {listing} of the output")
        return not_checked("the inputs have different lengths")
