"""One training of the matrix, in a separate process."""

import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.trainer_matrix.attaching import AttachHooks, AttachNothing
from tests.trainer_matrix.digests import Recorder
from tests.trainer_matrix.table import ROWS


def run(name: str, folder: Path, form: str, options: dict[str, str], place: dict[str, str]) -> None:
    """Train in ``folder``, and write the digests of every step, the hooks that reported, and the error, if any.

    The ``form`` is ``hooks``, ``bare``, or ``script``, which is a bare training that evaluates. ``options`` are further
    arguments of ``loopscope.attach``, ``place`` has the environment variables of a rank.
    """
    os.environ.update(place)
    os.chdir(folder)
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    assert "loopscope" not in sys.modules
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    recorder, error = Recorder(), None
    attach: Any = AttachNothing(recorder, evaluates=form == "script")
    if form == "hooks":
        attach = AttachHooks(recorder, folder, **options)
    try:
        ROWS[name].train(attach)
        recorder.finish()
    except Exception as raised:
        traceback.print_exc()
        error = raised
    result = {"steps": recorder.steps, "error": describe(error), "is_refused": is_refused(error)}
    result["hooks"] = sorted(reporting_hooks(folder)) if form == "hooks" else []
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    if place:
        # Without the interpreter's shutdown, in which gloo's threads occasionally wait forever, with hooks or without.
        sys.stdout.flush()
        os._exit(0)


def describe(error: BaseException | None) -> str:
    """Return the type and the text of an error in one line, and only the text of one of loopscope."""
    if error is None:
        return ""
    text = " ".join(str(error).split())
    return text if is_refused(error) else f"{type(error).__name__}: {text}"


def is_refused(error: BaseException | None) -> bool:
    """Return whether loopscope has refused the training; a bare training does not import it."""
    return any(kind.__name__ == "UsageError" for kind in type(error).__mro__)


def reporting_hooks(folder: Path) -> set[str]:
    """Return the names of the hooks whose metrics are in a record."""
    return {key.split("/")[0] for line in lines_of_records(folder) for key in line if "/" in key}


def lines_of_records(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of all records below a folder."""
    folders = [path.parent for path in folder.rglob("experiment_config.json")]
    records = [path for run in folders for path in run.glob("*.jsonl") if path.stem not in ("alerts", "digests")]
    return [json.loads(line) for record in records for line in record.read_text(encoding="utf-8").splitlines()]
