"""One optimizer step, and what can be measured of a loss."""

from .compilation import compile_model, eagerly, is_compiled, quiet_graph_breaks
from .loss_probe import METHODS, LossProbe, Method
from .parallel import (
    Parallel, is_restarted, joined, speaks, split_groups, spread, started_together, with_settled_buckets,
)
from .profiler import Profiler
from .ranks import Ranks
from .student_t import critical_t, two_sided_p
from .train_step import (
    Precision, TrainingTask, advance, borrowed_scaler, check_metric, evaluations, forward_backward, is_skipped,
    measure_gradients, step_by_metric, takes_closure, update,
)

__all__ = [
    "METHODS", "LossProbe", "Method", "Parallel", "Precision", "Profiler", "Ranks", "TrainingTask", "advance",
    "borrowed_scaler", "check_metric", "compile_model", "critical_t", "eagerly", "evaluations", "forward_backward",
    "is_compiled", "is_restarted", "is_skipped", "joined", "measure_gradients", "quiet_graph_breaks", "speaks",
    "split_groups", "spread", "started_together", "step_by_metric", "takes_closure", "two_sided_p", "update",
    "with_settled_buckets",
]
