"""Alternative spellings of options: names with commas, ``--hook.option value``, keys of YAML files."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.cli.options import parse_hook_options, parse_recorded, parse_run, run_options
from loopscope.errors import UsageError
from loopscope.hooks import ExperimentRegistry, HookRegistry, hook_options

from tests.framework.cli.test_cli_bad_input import refused
from tests.framework.runs.small_experiment import Small, registered

FILLED = (experiments, sinks, training_hooks)
CLIP = "grad_clip.max_norm"


@pytest.fixture(autouse=True)
def small():
    with registered(Small):
        yield


def options(*words: str) -> dict[str, Any]:
    return parse_run(Small, words)


def of_hooks(*words: str) -> dict[str, dict[str, Any]]:
    return dict(run_options(options(*words)).hook_options)


def from_file(text: str, folder: Path) -> dict[str, Any]:
    (folder / "options.yaml").write_text(text, "utf-8")
    return options("--config", str(folder / "options.yaml"))


# Commas


@pytest.mark.parametrize(
    "words", ["norms,fourier,hessian", "norms fourier,hessian", "norms, fourier ,hessian", ",norms,,fourier,hessian,"]
)
def test_names_may_be_separated_by_commas(words: str, tmp_path: Path) -> None:
    wanted = ["norms", "fourier", "hessian"]
    assert options("--hooks", *words.split())["hooks"] == wanted
    assert from_file(f"hooks: '{words.replace(' ', ',')}'", tmp_path)["hooks"] == wanted
    assert from_file(f"hooks: {json.dumps(words.split())}", tmp_path)["hooks"] == wanted


def test_comma_separated_strategies_are_recorded_separately() -> None:
    parsed = run_options(options("--strategy", "plain,clipped"))
    assert parsed.strategies == parsed.recorded["strategy"] == ["plain", "clipped"]


@pytest.mark.parametrize(
    ("words", "name"), [("--hooks ,", "','"), ("--hooks=", "''"), ("--strategy plain,clipt", "'clipt'")]
)
def test_invalid_names_between_commas_are_refused(words: str, name: str, tmp_path: Path, capfd) -> None:
    assert name in refused(["run", "small", *words.split(" "), "--output-dir", str(tmp_path)], tmp_path, capfd)


def test_strategy_name_with_comma_is_refused() -> None:
    """Registering an experiment with such a strategy raises a UsageError."""
    experiment = type("Odd", (Small,), {"name": "odd", "strategies": ("a,b",)})
    with pytest.raises(UsageError, match=r"has the strategy 'a,b', which cannot .* the command line"):
        ExperimentRegistry.register(experiment)


# Dots


@pytest.mark.longer
@settings(max_examples=20)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
@example("--x")
@example("-1e-3")
def test_dotted_option_becomes_hook_config_entry(value: str) -> None:
    """Every spelling of --hook.option gives the same entry of hook_config for any value."""
    with registered(Small):
        for spelling in (CLIP, f"hook_config.{CLIP}", f"hook-config.{CLIP}"):
            assert options(f"--{spelling}={value}")["hook_config"] == [f"{CLIP}={value}"]
        if not value.startswith("-"):
            assert options(f"--{CLIP}", value, "--lr", "1")["hook_config"] == [f"{CLIP}={value}"]


@pytest.mark.parametrize("value", ["-1", "-.5", "-1e-3", "-inf", "-nan"])
def test_negative_numbers_are_values(value: str) -> None:
    assert options(f"--{CLIP}", value)["hook_config"] == [f"{CLIP}={value}"]


@pytest.mark.longer
def test_every_hook_option_has_dotted_form() -> None:
    """The dotted form accepts dashes and underscores, with and without an equals sign."""
    defaults = {
        f"{hook.name}.{option}": parameter.default
        for hook in HookRegistry
        for option, parameter in hook_options(hook).items()
    }
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in defaults.items()}
    expected = parse_hook_options([f"{name}={value}" for name, value in values.items()])
    assert of_hooks(*(word for name, value in values.items() for word in (f"--{name}", value))) == expected
    assert of_hooks(*(f"--{name}".replace("_", "-") + f"={value}" for name, value in values.items())) == expected


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (f"--{CLIP} 1 --hook-config {CLIP}=2", 2.0),
        (f"--hook-config {CLIP}=2 --{CLIP}=1", 1.0),
        (f"--hook_config.{CLIP}=3 --{CLIP} 1 --grad-clip.max-norm=4", 4.0),
    ],
)
def test_last_of_several_values_is_used(words: str, value: float) -> None:
    assert of_hooks(*words.split())["grad_clip"] == {"max_norm": value}


@pytest.mark.longer
def test_dotted_option_is_recorded_for_resume(tmp_path: Path) -> None:
    """The recorded configuration that a resume reads contains the option in hook_config."""
    words = ["run", "small", "--strategy", "plain", "--output-dir", str(tmp_path), "--no-console-output"]
    assert main([*words, "--hooks", "grad_clip", f"--{CLIP}", "0.5"]) == 0
    _, recorded = parse_recorded(tmp_path / "small/plain")
    assert recorded["hook_config"] == [f"{CLIP}=0.5"]


def test_printed_config_of_dotted_option_is_valid(tmp_path: Path, capfd) -> None:
    """The YAML output of --print-config contains the option and can be read back with --config."""
    assert main(["run", "small", "--hooks", "grad_clip", f"--{CLIP}=0.5", "--print-config"]) == 0
    printed = capfd.readouterr().out
    assert yaml.safe_load(printed)["hook_config"] == [f"{CLIP}=0.5"]
    assert from_file(printed, tmp_path)["hook_config"] == [f"{CLIP}=0.5"]


DOTTED = [
    (f"--{CLIP}", f"--{CLIP} needs a value"),
    (f"--{CLIP} --lr 1", f"--{CLIP} needs a value"),
    (f"--{CLIP} -x", f"--{CLIP} needs a value"),
    (f"--{CLIP} much", "grad_clip.max_norm is 'much'; it must be a number"),
    ("--grad_clip.max_nrm=1", "Did you mean 'max_norm'?"),
    ("--grad_clip.max_norm.more=1", "'max_norm.more'"),
    ("--grad_clp.max_norm=1", "Did you mean 'grad_clip'?"),
    ("--grad_clip.=1", "takes hook.option=value"),
    ("--.max_norm=1", "takes hook.option=value"),
    (f"--{CLIP} 1 2", "Unexpected word '2'"),
    (f"--hooks norms --{CLIP}=1", "add --hooks grad_clip"),
]


@pytest.mark.parametrize(("words", "fragment"), DOTTED, ids=lambda value: value[:40])
def test_invalid_dotted_option_is_refused(words: str, fragment: str, tmp_path: Path, capfd) -> None:
    """A missing value, a wrong value and unknown names each raise an error with the reason."""
    more = ["--hooks", "grad_clip", "--output-dir", str(tmp_path)] if "--hooks" not in words else []
    assert fragment in refused(["run", "small", "--strategy", "plain", *more, *words.split()], tmp_path, capfd)


def test_help_documents_dotted_options(capfd) -> None:
    assert main(["run", "small", "--help"]) == 0
    assert "--hook.option value" in " ".join(capfd.readouterr().out.split())


# Files


@pytest.mark.parametrize(
    "text",
    [
        f"{CLIP}: 0.5",
        "hook_config.grad-clip.max-norm: 0.5",
        "hook-config: []\ngrad-clip.max_norm: 0.5",
        f"hook_config: {{grad_clip: {{max_norm: 3}}}}\n{CLIP}: 0.5",
        f"hook_config: {CLIP}=3\n{CLIP}: 0.5",
    ],
)
def test_config_file_accepts_dotted_keys(text: str, tmp_path: Path) -> None:
    """Dotted keys override the same option in the hook_config section of the file."""
    assert parse_hook_options(from_file(text, tmp_path)["hook_config"]) == {"grad_clip": {"max_norm": 0.5}}


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("lr: 1\nseed: 2\nlr: 3", "has the key 'lr' 2 times"),
        ("hook_config:\n  grad_clip: {max_norm: 1, max_norm: 2}", "has the key 'max_norm' 2 times"),
        ("{lr: 1, lr: 1, lr: 1}", "has the key 'lr' 3 times"),
        ("hook_csv: true\nhook-csv: false", "with dashes and with underscores"),
        ("hook_config: []\nhook-config: []\ngrad_clip.max_norm: 1", "with dashes and with underscores"),
        ("grad_clp.max_norm: 1", "Did you mean 'grad_clip'?"),
    ],
)
def test_duplicate_config_keys_are_refused(text: str, fragment: str, tmp_path: Path, capfd) -> None:
    """Repeated keys, mixed dash and underscore spellings and unknown hooks in a YAML file raise an error."""
    (tmp_path / "twice.yaml").write_text(text)
    assert fragment in refused(["run", "small", "--config", str(tmp_path / "twice.yaml")], tmp_path, capfd)


def test_yaml_alias_is_not_a_duplicate_key(tmp_path: Path) -> None:
    """A mapping that an alias repeats is accepted."""
    text = "hook_config:\n  grad_clip: &same {max_norm: 1}\n  grad-clip: *same"
    assert parse_hook_options(from_file(text, tmp_path)["hook_config"]) == {"grad_clip": {"max_norm": 1.0}}
