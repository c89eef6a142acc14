"""The right trainings of the zoo and of the trainer matrix, with the hook that tries all laws."""

import json
import multiprocessing
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.trainer_matrix.table import ROWS
from tests.zoo.recorder import Recorder
from tests.zoo.table import CASES

BATCHES = 60
"""Batches after which a custom loop of the zoo ends."""
STEPS = (1, 5, 9)
Broken = dict[str, str]
"""The laws that a training breaks, with their evidence."""


class LawRecorder(Recorder):
    """Attaches the hook that tries laws to a case of the zoo, or to a row of the matrix."""

    is_bare = False

    def attach(self, *target: Any, **options: Any) -> Any:
        """Attach the hook alone."""
        return super().attach(*target, **options, hooks=["laws"], hook_options={"laws": {"steps": STEPS}})

    def __call__(self, target: Any, optimizer: Any = None, **options: Any) -> Any:
        """Attach the hook to a row of the matrix."""
        return self.attach(*([target] if optimizer is None else [target, optimizer]), **options)


def right_trainings() -> list[str]:
    """Return the names of the right cases of the zoo, and of the rows of one process in the matrix."""
    of_zoo = [f"zoo {case.name}" for case in CASES.values() if case.kind == "healthy"]
    rows = [row for row in ROWS.values() if not row.absent and not row.control and row.ranks == 1]
    return of_zoo + [f"matrix {row.name}" for row in rows]


def broken_by_each(names: list[str]) -> Iterator[Broken | None]:
    """Train in separate processes, and yield the broken laws of each training; ``None`` if no law was tried."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(broken_by_training, names)


def broken_by_training(name: str) -> Broken | None:
    """Train a case or a row, and return the laws that it breaks; ``None`` if none was tried."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    kind, name = name.split(" ", 1)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        recorder = LawRecorder(Path(folder), "none", BATCHES if kind == "zoo" else None)
        train = partial(CASES[name].build, recorder) if kind == "zoo" else partial(ROWS[name].train, recorder)
        with warnings.catch_warnings(), suppress(Exception), redirect_stdout(nothing), redirect_stderr(nothing):
            warnings.simplefilter("ignore")
            train()
        contents = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).rglob("laws.json")]
    laws = [law for content in contents for law in content["laws"]]
    if not any(content["tried"] for content in contents):
        return None
    return {law["law"]: law["evidence"] for law in laws if law["verdict"] == "broken"}
