"""Every shipped hook, alone, in six cases: epoch loop, step loop, accumulation, bfloat16, attached, resumed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.oracle import experiments, models, product
from tests.oracle.recording import Case, attached_case, failed_case, run_case, written_config

Trained = tuple[nn.Module, torch.optim.Optimizer]
CASES = ("epoch", "step", "accumulation", "bf16", "attach", "resume")
OF_EPOCHS = ("--eval-every", "1", "--snapshot-every", "2")
OF_STEPS = ("--eval-every", "4", "--snapshot-every", "4", "--log-every", "4")


@dataclass(frozen=True)
class Variant:
    """A hook with options under which it is due within a few steps, on a supported model."""

    hook: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "pairs"
    has_reference: bool = False


QUICK_SHARPNESS = {"iterations": 3, "k": 1, "probes": 2, "density_probes": 1, "batches": 2, "critical_passes": 3}
COUNTED = {"interval": 4, "top_k": 20, "formats": "e4m3,e2m1", "rules": "tensor,mx_floor"}

VARIANTS = {
    "adam_dynamics": Variant("adam_dynamics", {"every_n_steps": 3, "sample": 64}, has_reference=True),
    "attention": Variant("attention", {"rows": 8, "every": 1}),
    "batch_dynamics": Variant("batch_dynamics", {"history": 3, "every": 4}),
    "consecutive": Variant("consecutive", {"interval": 2}),
    "counterfactual": Variant("counterfactual", {"k": 3}, has_reference=True),
    "counterfactual_validator": Variant("counterfactual_validator", {"k_max": 4}),
    "embedding_provenance": Variant("embedding_provenance", {"interval": 2}, "tied"),
    "fourier": Variant("fourier", {"top_k": 2}),
    "grad_clip": Variant("grad_clip", {"max_norm": 0.5}),
    "grad_clip.adagc": Variant("grad_clip", {"method": "adagc", "warmup": 3}),
    "grad_clip.norm_sum": Variant("grad_clip", {"method": "norm_sum", "max_norm": 0.5}),
    "grad_clip.parameter": Variant("grad_clip", {"method": "parameter", "max_norm": 0.1}),
    "grad_clip.value": Variant("grad_clip", {"method": "value", "max_value": 0.05}),
    "grad_clip.zclip": Variant("grad_clip", {"method": "zclip", "warmup": 3, "z_threshold": 0.1, "alpha": 0.5}),
    "gradient_flow": Variant("gradient_flow", {"interval": 3}, "deep"),
    "gradient_noise_scale": Variant("gradient_noise_scale", {"every_n_steps": 3}),
    "gradient_overflow": Variant("gradient_overflow", COUNTED | {"of": "output_gradients,weights,activations"}),
    "gradient_overflow.low_bit": Variant("gradient_overflow", {"interval": 4, "top_k": 20}, "low_bit"),
    "gradient_projection": Variant("gradient_projection", has_reference=True),
    "hessian": Variant("hessian", {"every_n_steps": 7, "burst_length": 2}, has_reference=True),
    "hessian.finite": Variant("hessian", {"every_n_steps": 7, "burst_length": 2, "method": "finite_difference"}),
    "loss_spikes": Variant("loss_spikes", {"window": 4, "threshold": 2.0}),
    "lr_probe": Variant("lr_probe", {"steps": 6, "smoothing": 0.5}),
    "matrix_updates": Variant("matrix_updates", {"interval": 3}),
    "metis_split": Variant("metis_split", {}, "low_bit"),
    "model_smoothing": Variant("model_smoothing", {"update_interval": 3}),
    "moe_router": Variant("moe_router", {"interval": 3, "routers": "decoder", "top_k": 2}),
    "output_logits": Variant("output_logits", {"interval": 3}),
    "optimizer_health": Variant("optimizer_health", {"interval": 3}),
    "output_projection_clip": Variant("output_projection_clip", {"window_size": 3, "scale_factor": 0.05}, "tied"),
    "output_projection_clip.logits": Variant(
        "output_projection_clip", {"window_size": 3, "scale_factor": 0.05, "scope": "logits"}, "tied"
    ),
    "parameter_norms": Variant("parameter_norms", {"interval": 3}),
    "path_length": Variant("path_length", {"every": 2}),
    "range_penalty": Variant("range_penalty", {"weight": 0.1, "every_n_steps": 3}),
    "sharpness": Variant("sharpness", QUICK_SHARPNESS),
    "subspace_gradient_info": Variant("subspace_gradient_info", {"window": 4, "top": 2, "every": 4}),
    "token_loss": Variant("token_loss", {"interval": 3}),
    "token_gradient": Variant("token_gradient", {"top_k": 2}),
    "training_diagnostics": Variant("training_diagnostics", {"window": 8, "lags": 2}),
    "variance": Variant("variance", {"window": 3, "every": 5}),
    "weight_average": Variant(
        "weight_average", {"decay": 0.9, "interval": 2, "swa_start": 0.5, "swa_interval": 2, "evaluate_every": 1}
    ),
    "weight_updates": Variant("weight_updates", {"interval": 3, "sample_size": 16, "topk": 20}),
    "what_if": Variant("what_if", {"fresh": 3, "follow": 1, "step": 6}),
}
"""Special cases; all other hooks, such as new ones, run with their default options on the classifier of pairs."""


def variants() -> dict[str, Variant]:
    """Return the variants of all shipped hooks by name; every hook has at least one."""
    hooks = product.shipped_hooks()
    if gone := sorted({variant.hook for variant in VARIANTS.values()} - set(hooks)):
        raise ValueError(f"tests/oracle/hook_cases.py names hooks that do not exist: {', '.join(gone)}; remove them.")
    return {name: Variant(name) for name in hooks} | VARIANTS


def names() -> list[str]:
    """Return the names of all cases of this part."""
    return [f"{name}/{case}" for name in sorted(variants()) for case in CASES]


def record(name: str) -> Case:
    """Run one case in the current folder and return its record."""
    variant, case = name.split("/")
    return CASE_FUNCTIONS[case](variants()[variant])


def options_of_command(variant: Variant, *more: str) -> list[str]:
    """Return the words after ``loopscope run`` for a hook."""
    config = written_config({"kind": variant.kind, "hook_config": {variant.hook: variant.options}})
    words = ["--config", config, "--hooks", variant.hook, "--seed", "5", "--traceback", "--no-console-output"]
    return [*words, *(("--reference", reference_for(variant)) if variant.has_reference else ()), *more]


def reference_for(variant: Variant) -> str:
    """Write the reference solution of a variant's model and return the file's name."""
    models.write_reference(variant.kind, "reference.pt")
    return "reference.pt"


def in_epochs(variant: Variant, *more: str) -> Case:
    """Run the epoch loop."""
    return run_case("oracle_epochs", "only", *options_of_command(variant, *OF_EPOCHS, *more))


def in_steps(variant: Variant) -> Case:
    """Run the step loop."""
    return run_case("oracle_steps", "only", *options_of_command(variant, *OF_STEPS))


def accumulating(variant: Variant) -> Case:
    """Run the epoch loop with two micro-batches a step."""
    return in_epochs(variant, "--accumulation-steps", "2")


def in_bf16(variant: Variant) -> Case:
    """Run the epoch loop under autocast to bfloat16, the mixed precision of CPUs."""
    return in_epochs(variant, "--amp", "bf16")


def resumed(variant: Variant) -> Case:
    """Run the epoch loop with a crash after step 8, and resume from the checkpoint of step 6, within an epoch."""
    words = options_of_command(variant, *OF_EPOCHS, "--checkpoint-every-steps", "6")
    experiments.CRASHES[:] = [2]
    try:
        status, _, errors = product.run_command("run", "oracle_epochs", *words)
    finally:
        experiments.CRASHES.clear()
    if status == 0:
        raise RuntimeError("The run to be resumed did not crash; its experiment no longer raises CrashError.")
    if "CrashError" not in errors:
        return failed_case(errors)
    return run_case("oracle_epochs", "only", "--traceback", "--no-console-output", command="resume")


def attached(variant: Variant) -> Case:
    """Run a loop of plain PyTorch with the hook attached."""
    return attached_case(lambda: train_attached(variant), Path("attached"))


def train_attached(variant: Variant, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Trained:
    """Train a model, which may be wrapped for several ranks, with a hook attached; return model and optimizer."""
    torch.manual_seed(5)
    model = models.build_model(variant.kind)
    trained = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, experiments.EPOCHS)
    loader = DataLoader(TensorDataset(*models.training_data()), models.BATCH_ROWS, shuffle=True)
    scope = product.attach(
        trained,
        optimizer,
        scheduler=scheduler,
        hooks=[variant.hook],
        hook_options={variant.hook: variant.options} if variant.options else {},
        loss=models.mean_loss,
        loader=loader,
        evaluate=models.evaluate,
        out="attached",
        length=experiments.EPOCHS,
        snapshot_every=2,
        reference=reference_for(variant) if variant.has_reference else None,
        seed=5,
    )
    with scope:
        for _ in range(experiments.EPOCHS):
            for batch in scope.batches(loader):
                scope.backward(models.mean_loss(trained, batch))
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            scope.epoch_end(**scope.evaluate(lambda: models.evaluate(model)))
    return model, optimizer


CASE_FUNCTIONS = dict(zip(CASES, (in_epochs, in_steps, accumulating, in_bf16, attached, resumed), strict=True))
