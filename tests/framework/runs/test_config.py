"""Options of experiments: the type and the range of every value are checked when a config is created."""

import math
import re
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest
from loopscope.errors import UsageError
from loopscope.experiments import GrokkingConfig
from loopscope.runs import ExperimentConfig, RunFlags, RunOptions, describe_type, field_names
from loopscope.runs.config import fits

from tests.framework.runs.small_experiment import SmallConfig

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seed": -1}, "seed is -1; it must be in 0..2**63-1."),
    ({"seed": 2**63}, "it must be in 0..2**63-1."),
    ({"seed": "3"}, "seed is '3'; it must be an integer."),
    ({"seed": True}, "seed is True; it must be an integer."),
    ({"batch_size": 0}, "batch_size is 0; it must be at least 1."),
    ({"batch_size": 2.0}, "batch_size is 2.0; it must be an integer."),
    ({"accumulation_steps": 0}, "accumulation_steps is 0; it must be at least 1."),
    ({"eval_every": 0}, "eval_every is 0; it must be at least 1."),
    ({"snapshot_every": 0}, "snapshot_every is 0; it must be at least 1."),
    ({"output_dir": None}, "output_dir is None; it must be a path."),
    ({"epochs": 0}, "epochs is 0; it must be at least 1."),
    ({"max_epochs": 0}, "max_epochs is 0; it must be at least 1."),
    ({"lr": 0.0}, "lr is 0.0; it must be greater than 0."),
    ({"lr": math.inf}, "lr is inf; it must be finite and greater than 0."),
    ({"lr": math.nan}, "lr is nan; it must be finite and greater than 0."),
    ({"lr": None}, "lr is None; it must be a number."),
    ({"min_lr": 0.5, "lr": 0.1}, "min_lr is 0.5; it must be in 0..lr (0.1)."),
    ({"weight_decay": -0.1}, "weight_decay is -0.1; it must be at least 0."),
    ({"optimizer": "lion"}, "optimizer is 'lion'; it must be adamw, adam or sgd."),
    ({"target_acc": 99.5}, "target_acc is 99.5; it must be a fraction in (0, 1]: 99.5 % is 0.995."),
    ({"mode": "slow"}, "mode is 'slow'; it must be fast or exact."),
    ({"ratio": "half"}, "ratio is 'half'; it must be a number or null."),
    ({"bright": 1}, "bright is 1; it must be true or false."),
    ({"label": 3}, "label is 3; it must be text."),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_wrong_type_or_range_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        SmallConfig(**options)
    assert sentence in str(refusal.value)


def test_integer_is_accepted_as_a_float() -> None:
    """None is accepted for an optional value."""
    config = SmallConfig(lr=1, ratio=None)
    assert (config.lr, config.ratio) == (1, None)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        SmallConfig().seed = 3  # type: ignore[misc]


def test_as_dict_returns_plain_values_in_field_order() -> None:
    values = SmallConfig(folder=Path("a/b")).as_dict()
    assert list(values) == field_names(SmallConfig)
    assert (values["folder"], values["output_dir"], values["mode"]) == ("a/b", "output", "fast")


def test_a_subclass_checks_its_own_fields_too() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wide(GrokkingConfig):
        width: int = 8

        def __post_init__(self) -> None:
            super().__post_init__()
            self.at_least(2, "width")

    assert Wide(width=2).width == 2
    with pytest.raises(UsageError, match=r"width is 1; it must be at least 2\."):
        Wide(width=1)
    with pytest.raises(UsageError, match=r"width is 'wide'; it must be an integer\."):
        Wide(width="wide")  # type: ignore[arg-type]


def test_experiment_and_run_options_are_complete() -> None:
    """ExperimentConfig has exactly the listed fields, and RunOptions includes those of RunFlags."""
    assert field_names(ExperimentConfig) == [
        *("seed", "output_dir", "batch_size", "accumulation_steps", "amp", "with_compile", "log_every"),
        *("eval_every", "snapshot_every"),
    ]
    assert set(field_names(RunFlags)) < set(field_names(RunOptions))


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ([1], list[int], True),
        ((1,), list[int], False),
        ({"a": 1}, dict[str, int] | None, True),
        (3, Any, True),
        (None, type(None), True),
        (1.0, int, False),
        (False, float, False),
    ],
)
def test_values_fit_annotations(value: Any, annotation: Any, expected: bool) -> None:
    assert fits(value, annotation) is expected


def test_annotations_are_described_in_words() -> None:
    assert describe_type(Path | None) == "a path or null"
    assert describe_type(bool) == "true or false"
    assert describe_type(dict[str, int]) == "dict[str, int]"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"save_checkpoints": -1}, "save_checkpoints is -1; it must be at least 0."),
        ({"checkpoint_every_steps": -1}, "checkpoint_every_steps is -1; it must be at least 0."),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0; it must be at least 1."),
        ({"resume": True, "overwrite": True}, "resume and overwrite exclude each other"),
    ],
)
def test_options_of_checkpoints_are_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        RunOptions(**options)
