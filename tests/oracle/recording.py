"""Record of one case, and its execution in a separate folder with a separate process state."""

import io
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from tests.oracle import product
from tests.oracle.digests import digest, digest_of_generators, digest_of_values

Case = dict[str, dict[str, Any]]
"""``facts``, the same in every environment: by metric the number of values, the first and the last step, or the class
of the exception under ``refused``; ``digests``, those of this environment: by metric and by part of the final state."""
REFUSED = "refused"


@contextmanager
def isolated_case() -> Iterator[None]:
    """Run a case in an empty folder, with seeded generators and one thread, independent of earlier cases."""
    original_folder = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        os.chdir(folder)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        product.OPTIMIZERS.clear()
        try:
            yield
        finally:
            os.chdir(original_folder)


def written_config(options: dict[str, Any]) -> str:
    """Write options to a YAML file in the current folder and return its name."""
    Path("options.yaml").write_text(yaml.safe_dump(options))
    return "options.yaml"


def failed_case(errors: str) -> Case:
    """Return the record of a refused command, from its standard error."""
    return {"facts": {REFUSED: product.refusal(errors)}, "digests": {}}


def case_of(values: Iterable[tuple[str, int, Any]], state: dict[str, str]) -> Case:
    """Return the record of a run from its (metric, step, value) triples and the digests of its final state."""
    series: dict[str, list[tuple[int, Any]]] = {}
    for metric, step, value in values:
        series.setdefault(metric, []).append((step, value))
    facts = {name: [len(pairs), pairs[0][0], pairs[-1][0]] for name, pairs in series.items()}
    digests = {name: digest_of_values(pairs) for name, pairs in series.items()}
    return {"facts": facts, "digests": digests | state}


def run_case(experiment: str, strategy: str, *words: str, command: str = "run") -> Case:
    """Run an experiment by the command line in the current folder, or resume it there, and return its record."""
    folder = Path("output") / experiment / strategy
    status, _, errors = product.run_command(command, experiment if command == "run" else str(folder), *words)
    if status:
        return failed_case(errors)
    weights, optimizer = product.read_final_weights(folder), product.OPTIMIZERS[-1]
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    if not {*map(digest, trained)} & {*map(digest, weights.values())}:
        raise RuntimeError(f"The newest optimizer of {experiment} does not belong to the run that wrote the weights.")
    return case_of(product.read_metrics(folder), state_of(weights, optimizer))


def state_of(weights: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the digests of the final state of a training: weights, optimizer with its parameters, generators."""
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    return {
        "weights": digest(weights),
        "optimizer": digest([trained, optimizer.state_dict()]),
        "generators": digest_of_generators(),
    }


def attached_case(train: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], folder: Path) -> Case:
    """Train with attached hooks whose run is in ``folder``, and return the record of the result of ``train``."""
    try:
        model, optimizer = train()
    except Exception as error:
        return {"facts": {REFUSED: type(error).__name__}, "digests": {}}
    return case_of(product.read_metrics(folder), state_of(model.state_dict(), optimizer))
