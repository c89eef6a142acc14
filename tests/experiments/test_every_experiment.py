"""Contracts of every registered experiment: presets, options with help, and strategies with existing hooks."""

from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from loopscope import experiments, training_hooks
from loopscope.cli.options import parse_run
from loopscope.cli.run_parser import run_parser
from loopscope.hooks import ExperimentRegistry, HookRegistry
from loopscope.runs import ExperimentConfig, ExperimentRunner
from loopscope.runs.config import fits

FILLED = (experiments, training_hooks)
EXPERIMENTS = list(ExperimentRegistry)


def named(experiment: type[Any]) -> str:
    return experiment.name


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=named)
def test_experiment_declares_config_strategies_and_summary(experiment: type[ExperimentRunner[Any]]) -> None:
    """Strategies are present and distinct, and the docstring begins with a sentence."""
    assert issubclass(experiment, ExperimentRunner)
    assert issubclass(experiment.config_class, ExperimentConfig)
    assert experiment.strategies
    assert len(set(experiment.strategies)) == len(experiment.strategies)
    assert (experiment.__doc__ or "").partition("\n")[0].endswith(".")


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=named)
def test_every_preset_makes_a_valid_config(experiment: type[ExperimentRunner[Any]]) -> None:
    """The command parses each preset to the same values as the config class."""
    for name, preset in experiment.presets.items():
        config = experiment.config_class(**preset)
        options = parse_run(experiment, ["--preset", name])
        assert {field.name: options[field.name] for field in fields(config)} == {
            field.name: getattr(config, field.name) for field in fields(config)
        }


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=named)
def test_every_option_has_help_and_typed_default(experiment: type[ExperimentRunner[Any]]) -> None:
    """Every field of the config class appears in the help, and its default has the annotated type."""
    text = " ".join(run_parser(experiment, None).format_help().split())
    for name, annotation in get_type_hints(experiment.config_class).items():
        assert fits(getattr(experiment.config_class(), name), annotation)
        assert f"--{name.replace('_', '-')} " in text
    helps = {action.dest: action.help for action in run_parser(experiment, None)._actions}
    assert all(helps[field.name] for field in fields(experiment.config_class))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=named)
def test_the_hooks_of_every_strategy_and_group_exist(experiment: type[ExperimentRunner[Any]]) -> None:
    runner = experiment(experiment.config_class())
    for strategy in experiment.strategies:
        assert set(runner.strategy_hooks(strategy)) <= set(HookRegistry.names())
    for names in runner.hook_sets.values():
        assert set(names) <= set(HookRegistry.names())
