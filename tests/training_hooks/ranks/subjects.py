"""Every registered hook, with options under which it has something to say in a few steps."""

from loopscope import training_hooks
from loopscope.hooks import HookRegistry

from tests.training_hooks.ranks.runs import Subject

assert training_hooks.__all__
DIFFERENCES = {"method": "finite_difference", "epsilon": 1e-3}
SHARPNESS = {"iterations": 4, "k": 2, "probes": 2, "batches": 2, "critical_passes": 6}
CHOSEN = [
    Subject("adam_dynamics", {"sample": 100000}),
    Subject("attention", {"every": 1}),
    Subject("batch_dynamics", {"history": 4, "every": 5}, keeps_schedule=True),
    Subject("fourier", {"top_k": 2}),
    Subject("grad_clip", {"max_norm": 0.5}),
    Subject("grad_clip", {"method": "value", "max_value": 0.01}),
    Subject("grad_clip", {"method": "parameter", "max_norm": 0.1}),
    Subject("grad_clip", {"method": "zclip", "warmup": 2, "z_threshold": 0.1}),
    Subject("grad_clip", {"method": "adagc", "warmup": 2}),
    Subject("gradient_overflow", {"of": "gradients,weights", "formats": "e2m1"}, keeps_schedule=True),
    Subject("gradient_overflow", {"of": "output_gradients,activations"}, keeps_schedule=True),
    Subject("gradient_overflow", recipe="fp8", keeps_schedule=True),
    Subject("hessian", {"burst_length": 4}, keeps_schedule=True),
    Subject("hessian", {"burst_length": 4, **DIFFERENCES}, keeps_schedule=True),
    Subject("loss_spikes", {"window": 2}),
    Subject("lr_probe", {"steps": 6, "smoothing": 0.5}),
    Subject("metis_split", recipe="fp4_metis", keeps_schedule=True),
    Subject("model_smoothing", {"update_interval": 2}, keeps_schedule=True),
    Subject("output_projection_clip", {"window_size": 2}, tied=True),
    Subject("embedding_provenance", tied=True),
    Subject("embedding_provenance"),
    Subject("sharpness", SHARPNESS),
    Subject("sharpness", SHARPNESS | DIFFERENCES),
    Subject("subspace_gradient_info", {"window": 3, "top": 1}),
    Subject("variance", {"window": 2, "every": 2}, keeps_schedule=True),
    Subject("weight_average", {"interval": 1, "decay": 0.9}),
]
SUBJECTS = CHOSEN + [Subject(hook.name) for hook in HookRegistry if hook.name not in {each.name for each in CHOSEN}]
