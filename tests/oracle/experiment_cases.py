"""The shipped experiments at tiny size, with ``--with-hooks full``."""

from pathlib import Path
from typing import Any

from tests.oracle.recording import Case, run_case, written_config

HOOKS: dict[str, Any] = {
    "adam_dynamics": {"every_n_steps": 3, "sample": 64},
    "attention": {"rows": 8, "every": 1},
    "batch_dynamics": {"history": 3, "every": 4},
    "counterfactual": {"k": 3},
    "gradient_flow": {"interval": 3},
    "gradient_noise_scale": {"every_n_steps": 3},
    "gradient_overflow": {"interval": 4, "top_k": 20},
    "hessian": {"every_n_steps": 6, "burst_length": 2},
    "loss_spikes": {"window": 4, "threshold": 2.0},
    "lr_probe": {"steps": 6, "smoothing": 0.5},
    "path_length": {"every": 2},
    "range_penalty": {"every_n_steps": 3},
    "sharpness": {"iterations": 3, "k": 1, "probes": 2, "density_probes": 1, "batches": 2, "critical_passes": 3},
    "subspace_gradient_info": {"window": 4, "top": 2, "every": 4},
    "training_diagnostics": {"window": 8, "lags": 2},
    "variance": {"window": 3, "every": 5},
    "weight_average": {"decay": 0.9, "interval": 2, "swa_start": 0.5, "swa_interval": 2, "evaluate_every": 1},
    "weight_updates": {"interval": 3, "sample_size": 16, "topk": 50},
}
"""Options under which hooks of the group are due within 12 steps."""
TINY_CLASSIFIER = {
    "p": 7, "train_size": 24, "test_size": 25, "embed_dim": 8, "num_heads": 2, "layers": 1, "ff_dim": 16,
    "batch_size": 6, "epochs": 3, "snapshot_every": 2,
}  # fmt: skip
TINY_DECODER = {
    "steps": 12, "context": 16, "width": 8, "layers": 1, "heads": 2, "hidden": 16, "vocabulary": 270, "batch_size": 4,
    "warmup_steps": 3, "evaluation_windows": 4, "sample_tokens": 8, "log_every": 4, "eval_every": 4,
    "snapshot_every": 6, "data": "text.txt",
}  # fmt: skip
OPTIONS = {
    "mod_arithmetic": TINY_CLASSIFIER,
    "tied_lm": TINY_DECODER,
    "lowbit_lm": TINY_DECODER | {"forward_warmup_steps": 3, "merge_steps": 5},
}
CASES = (
    "lowbit_lm/fp4_metis", "lowbit_lm/fp8", "lowbit_lm/nvfp4", "mod_arithmetic/random", "mod_arithmetic/stride",
    "tied_lm/baseline", "tied_lm/clip_rolling",
)  # fmt: skip


def names() -> list[str]:
    """Return the names of all cases of this part: experiment and strategy."""
    return list(CASES)


def record(name: str) -> Case:
    """Run one case in the current folder and return its record."""
    experiment, strategy = name.split("/")
    Path("text.txt").write_text(text())
    words = ["--config", written_config(OPTIONS[experiment] | {"hook_config": HOOKS}), "--strategy", strategy]
    return run_case(
        experiment, strategy, *words, "--with-hooks", "full", "--budget", "none", "--traceback", "--no-console-output"
    )


def text() -> str:
    """Return paragraphs of words from a linear congruential generator: Python's documentation varies with Python."""
    syllables = ["ka", "lo", "mi", "re", "tu", "san", "ter", "vel", "non", "pri", "dus", "qua"]
    state, words = 7, []
    for index in range(900):
        state = (1103515245 * state + 12345) % 2**31
        first, second = syllables[state // 2**16 % 12], syllables[state // 2**20 % 12]
        words.append(first + second + ("\n\n" if index % 30 == 29 else " "))
    return "".join(words)
