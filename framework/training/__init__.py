"""Optimizer steps, measurements of a loss, and the processes that train together."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .compilation import compile_model, eagerly, is_compiled, quiet_graph_breaks
    from .loss_probe import METHODS, LossProbe, Method
    from .observed_pass import ObservedPass
    from .parallel import joined_process_group, parallelise, with_rebuilt_buckets
    from .processes import Parallel, is_main_process, is_restarted, torchrun_world_size
    from .profiler import Profiler, peak_memory
    from .ranks import Ranks
    from .step_clock import (
        BACKWARD, BETWEEN, DATA, END, EVALUATION, FORWARD, HOOKS, MANY_EVENTS, OTHER, PHASES, UPDATE, StepClock,
    )
    from .train_step import (
        Precision, TrainingTask, advance_scheduler, borrowed_scaler, check_metric, forward_backward, is_skipped,
        make_closure, measure_gradients, no_evaluation, step_by_metric, takes_closure, update,
    )
    from .user_functions import without_graph
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "BACKWARD", "BETWEEN", "DATA", "END", "EVALUATION", "FORWARD", "HOOKS", "MANY_EVENTS", "METHODS", "OTHER",
    "PHASES", "UPDATE",
    "LossProbe", "Method", "ObservedPass", "Parallel", "Precision", "Profiler", "Ranks", "StepClock", "TrainingTask",
    "advance_scheduler", "borrowed_scaler", "check_metric", "compile_model", "eagerly", "forward_backward",
    "is_compiled", "is_main_process", "is_restarted", "is_skipped", "joined_process_group", "make_closure",
    "measure_gradients", "no_evaluation", "parallelise", "peak_memory", "quiet_graph_breaks", "step_by_metric",
    "takes_closure", "torchrun_world_size", "update", "with_rebuilt_buckets", "without_graph",
]
