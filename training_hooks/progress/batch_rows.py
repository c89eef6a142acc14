"""Every row of a batch alone: which of them make its loss and its gradient."""

from loopscope import HookPoint, HookRegistry, RunDataContext, StepSchedule
from loopscope.errors import UnsuitableError
from loopscope.hooks import DebugInterventionHook, Metrics, ModelDataContext, RunInfo


@HookRegistry.register
class BatchRows(DebugInterventionHook):
    """Measure the loss of every row of the step's batch alone, and the norm of its gradient, before the step.

    Made for ``loopscope rewind``: a step that stands out is trained again with ``--hooks batch_rows``, and the rows
    behind it are named. It takes one forward and backward pass for each row, so it is switched on by name only.

    Rows are measured at the weights that the step begins with, in train mode; all see one dropout mask. Losses and
    norms stand in the order of the batch, like ``index``, the number of each row in the data set, which is left out
    where the loader has no numbers.

    Assumes that the loss is a mean over rows: one with a penalty, or with terms between rows, has this, or what is left
    of it, in the loss of every row. Batch normalisation that tracks statistics uses these, since one row has none of
    its own, so that its losses are not those of the batch. Runs in one process.

    Args:
        every_n_steps: measure one step in so many.
    """

    name = "batch_rows"
    hook_points = frozenset({HookPoint.PRE_STEP})
    mutates = False
    needs_loss = True
    needs_next_batch = True
    metrics = """
        index | number of row i in the data set, for each row of the batch | 0, 1, 2, …
            | What describe_row of the experiment takes, and part_of where the data are at hand.
        loss | L_i, the loss of row i alone, for each row | (−∞, ∞)
            | A few far above the others: outliers, or wrong targets; all of them: the step before went too far.
        gradient_norm | ‖∇L_i‖₂, for each row | [0, ∞) | Large beside a loss like the others': the row pulls elsewhere.
        largest_loss_share | max L_i / Σ L_i | [0, 1]
            | 1/B for B rows that are alike (where losses are positive); near 1: one row is the batch's loss.
    """

    def __init__(self, *, every_n_steps: int = 1) -> None:
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every_n_steps)

    def start(self, run: RunInfo) -> None:
        """Refuse several processes; raises :class:`UnsuitableError`."""
        if run.ranks.are_many:
            raise UnsuitableError(
                f"batch_rows measures rows in one process, and {run.ranks.place[1]} train together; leave it out."
            )

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the rows' numbers, losses and norms."""
        losses, norms = model_ctx.measure_rows()
        index = run_ctx.row_indices
        found: dict[str, object] = {} if index is None else {"index": index.tolist()}
        share = losses.max() / losses.sum()
        return found | {"loss": losses.tolist(), "gradient_norm": norms.tolist(), "largest_loss_share": share}
