"""Loss and gradient norm of every single row of a batch."""

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, StepSchedule
from loopscope.errors import UnsuitableError
from loopscope.hooks import DebugInterventionHook, Metrics, ModelDataContext, RunInfo


@HookRegistry.register
class BatchRows(DebugInterventionHook):
    """Measure the loss and the gradient norm of every single row of the step's batch, before the step.

    Made for ``loopscope rewind``: repeat a conspicuous step with ``--hooks batch_rows`` to find the rows behind it. It
    takes one forward and backward pass per row, so it is enabled only by name.

    Rows are measured in train mode at the weights before the step, all with the same dropout mask. Losses and norms are
    in the order of the batch, like ``index``, the number of each row in the data set. If the loader does not number its
    rows, ``index`` is omitted.

    Assumes that the loss is a mean over rows. The loss of every row includes any penalty, and what remains of any
    terms between rows. Batch normalisation with running statistics normalises a row by these, since a single row has no
    batch statistics, so the losses differ from those in the batch. Supports one process only.

    Args:
        every_n_steps: steps between two measurements.
    """

    name = "batch_rows"
    hook_points = frozenset({HookPoint.PRE_STEP})
    mutates = False
    needs_loss = True
    needs_next_batch = True
    metrics = """
        index | number of row i in the data set, for each row of the batch | 0, 1, 2, …
            | The argument of the experiment's describe_row, or of part_of if the data are available.
        loss | L_i, the loss of row i alone, for each row | (−∞, ∞)
            | A few far above the others: outliers, or wrong targets. All high: the previous step was too large.
        gradient_norm | ‖∇L_i‖₂, for each row | [0, ∞)
            | Large at an ordinary loss: the row pulls in another direction.
        largest_loss_share | max L_i / Σ L_i | [0, 1], NaN
            | 1/B for B rows of equal loss (if losses are positive). Near 1: one row causes almost all of the loss.
    """

    def __init__(self, *, every_n_steps: int = 1) -> None:
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every_n_steps)

    def start(self, run: RunInfo) -> None:
        """Check that the run has one process.

        Raises:
            UnsuitableError: if it has several.
        """
        if run.ranks.are_many:
            raise UnsuitableError(
                f"Hook 'batch_rows' supports one process, but this run has {run.ranks.rank_and_count[1]}; "
                "leave the hook out."
            )

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the numbers, losses and gradient norms of the rows."""
        losses, norms = model_ctx.measure_rows()
        indices = run_ctx.row_indices
        metrics: dict[str, object] = {} if indices is None else {"index": indices.tolist()}
        share = losses.max() / losses.sum()
        wide = torch.promote_types(losses.dtype, norms.dtype)
        loss, norm = torch.stack([losses.to(wide), norms.to(wide)]).tolist()  # one transfer
        return metrics | {"loss": loss, "gradient_norm": norm, "largest_loss_share": share}
