"""Options of ``loopscope run EXPERIMENT`` from the command line, YAML files and records, and what they configure."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from ..errors import UsageError, listed, require, shortened, unknown
from ..hooks import ExperimentRegistry, HookRegistry, MetricSink, hook_options
from ..runs import ExperimentConfig, RunFlags, RunOptions, RunRecord, field_names, run_folders
from ..sweeps import with_all_seeds
from .parser import NAMES, NEGATIVE_NUMBER, CommandParser, dashed, typed
from .run_parser import Experiment, flag_name, flag_sinks, run_parser

Options = dict[str, Any]
PREFIX = re.compile(r"^hook[-_]config\.")


def parse_run(experiment: Experiment, words: Sequence[str]) -> Options:
    """Return the options from the words after the experiment's name, and whether to ``print_config``.

    Flags override config files in any order, later files override earlier ones, and files override the preset.

    Raises:
        UsageError: with one sentence for invalid words.
    """
    words = with_all_seeds(without_dots(words), of_experiment="seeds" in field_names(experiment.config_class))
    files, preset = _files_and_preset(words)
    contents = {file: read_config(Path(file)) for file in files}
    for content in contents.values() if preset is None else ():
        preset = content.get("preset", preset)
    parser = run_parser(experiment, preset)
    options = parser.defaults | {"preset": preset}
    for file, content in contents.items():
        options |= parser.typed(content, f" in the config file {file}")
    given = parser.parse(words)
    given["hook_config"] = options["hook_config"] + given.get("hook_config", [])
    return {**_complete(experiment, parser, options | given), "print_config": given["print_config"]}


def read_config(path: Path) -> dict[Any, Any]:
    """Return the options in a YAML file; raises :class:`UsageError` if it is not a mapping.

    ``hook_config`` may be a list of ``hook.option=value``, a mapping from ``hook.option`` to a value, or a mapping from
    hooks to mappings of their options. The result is always a list, and includes top-level keys ``hook.option``.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The config file {path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except ValueError as error:  # the name contains a zero byte
        raise UsageError(f"The config file {str(path)!r} cannot be read: {error}.") from error
    content = read_yaml(text, f"The config file {path}")
    if content is not None and not isinstance(content, dict):
        start = shortened(repr(content), 20)  # only a few characters: it may be another program's file with secrets
        raise UsageError(f"The config file {path} contains {type(content).__name__} {start}; it must be a mapping.")
    options = content or {}
    key = "hook-config" if "hook-config" in options else "hook_config"
    dotted = {PREFIX.sub("", str(name)): options.pop(name) for name in [*options] if "." in str(name)}
    given = options.get(key)
    if dotted or isinstance(given, Mapping):
        assignments = _assignments(given) if isinstance(given, Mapping) else typed("--hook-config", given, NAMES)
        options[key] = [*assignments, *_assignments(dotted)]
    return options


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML.

    Raises:
        UsageError: starting with ``source``, for text that is not YAML, and for a repeated key.
    """
    try:
        content = get_loader("yaml")(text)
        _refuse_repeated(yaml.compose(text, Loader=yaml.SafeLoader), source)
    except yaml.YAMLError as error:
        raise UsageError(f"{source} is not YAML: {error}.") from error
    return content


def _refuse_repeated(node: Any, source: str) -> None:
    """Raise :class:`UsageError` for a repeated key: YAML readers silently keep the last value."""
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key in (key for key, times in keys.items() if times > 1):
            raise UsageError(f"{source} has the key {shortened(key)!r} {keys[key]} times; keep one of them.")
        inner = [value for _, value in node.value]
    for value in inner:
        _refuse_repeated(value, source)


def without_dots(words: Iterable[str]) -> list[str]:
    """Replace ``--hook.option value`` by ``--hook-config=hook.option=value``, the form in the record.

    >>> without_dots(["--norms.k", "-1", "--hook_config.norms.k=2", "--seed", "3"])
    ['--hook-config=norms.k=-1', '--hook-config=norms.k=2', '--seed', '3']
    """
    result, rest = [], iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option.startswith("--") and "." in option:
            if not equals and (value := next(rest, "--")).startswith("-") and not re.match(NEGATIVE_NUMBER, value):
                raise UsageError(f"{option} needs a value.")
            word = f"--hook-config={PREFIX.sub('', option[2:])}={value}"
        result.append(word)
    return result


def _assignments(options: Mapping[Any, Any]) -> Iterable[str]:
    """Yield ``hook.option=value`` for every option of a flat or nested mapping."""
    for target, content in options.items():
        if isinstance(content, Mapping) and "." not in str(target):
            yield from _assignments({f"{target}.{option}": value for option, value in content.items()})
        else:
            yield f"{target}={content if isinstance(content, str) else json.dumps(content)}"


def parse_recorded(folder: Path) -> tuple[Experiment, Options]:
    """Return the experiment of a run and the options of the command that resumes it, even in a moved folder.

    The folder of one run resumes that run, the folder of a strategy all its seeds, and the folder of an experiment all
    runs of the original command.

    Raises:
        UsageError: if the folder has no run, or its run was not started by ``loopscope run``.
    """
    run = run_folders(folder, "resume")[0]
    record = RunRecord.read(run)
    remedy = "continue or repeat it with the program that started it"
    require(bool(record.options), f"{run} was not started by loopscope run; {remedy}.")
    has_seeds = isinstance(record.options.get("seed"), list)  # then each seed has a separate folder
    here = {"output_dir": str(run.resolve().parents[1 + has_seeds]), "resume": True, "overwrite": False}
    alone = {"strategy": [record.strategy]} if folder in (run, run.parent if has_seeds else run) else {}
    seed = {"seed": [record.config.get("seed")]} if has_seeds and run == folder else {}
    return typed_options(record.experiment, {**record.options, **here, **alone, **seed})


def typed_options(name: str, recorded: Mapping[str, Any]) -> tuple[Experiment, Options]:
    """Return an experiment and the recorded options of a command, converted to their types."""
    experiment = ExperimentRegistry.get(name)
    parser = run_parser(experiment, recorded.get("preset"))
    options = parser.defaults | parser.typed(recorded, " in the recorded options")
    return experiment, _complete(experiment, parser, options)


def config_of(experiment: Experiment, options: Options) -> ExperimentConfig:
    """Return the config of the experiment, with the first of several seeds; all seeds are checked.

    Raises:
        UsageError: for options that the config class rejects.
    """
    given = _chosen(options, experiment.config_class)
    configs = [experiment.config_class(**{**given, "seed": seed}) for seed in seeds_of(options) or [options["seed"]]]
    return configs[0]


def seeds_of(options: Options) -> list[int]:
    """Return the seeds with separate folders; empty for a single seed given as a number."""
    return options["seed"] if isinstance(options["seed"], list) else []


def run_options(options: Options, experiment: Experiment | None = None) -> RunOptions:
    """Return the options of the run, including the recorded options that restart it.

    The ``experiment`` is that of a run with its own record, which names the options that are not the defaults.
    """
    jobs = options["jobs"]
    require(jobs is None or jobs >= 1, f"--jobs is {jobs}; it must be at least 1.")
    return RunOptions(
        **_chosen(options, RunFlags),
        strategies=options["strategy"],
        seeds=seeds_of(options),
        hooks=[name.replace("-", "_") for name in options["hooks"]],
        hook_options=parse_hook_options(options["hook_config"]),
        recorded=plain(options),
        changed=None if experiment is None else [*changed_options(experiment, plain(options))],
    )


def _chosen(options: Options, group: type[ExperimentConfig | RunFlags]) -> Options:
    return {name: options[name] for name in field_names(group)}


def plain(options: Mapping[str, Any]) -> Options:
    """Return the options as plain values for a config file: paths as text, without None."""
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return {name: value for name, value in shown.items() if value is not None}


def changed_options(experiment: Experiment, options: Mapping[str, Any]) -> Options:
    """Return the options, as plain values, that differ from the defaults or the preset."""
    defaults = plain(run_parser(experiment, options.get("preset")).defaults)
    return {name: value for name, value in options.items() if value != defaults.get(name)}


def parse_hook_options(assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the options of ``--hook-config hook.option=value`` by hook, typed by the hook's constructor.

    Names may contain dashes; the last value for an option counts.

    Raises:
        UsageError: for an unknown hook or option, and for a value of another type.
    """
    options: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        target, equals, value = assignment.partition("=")
        name, _, option = target.replace("-", "_").partition(".")
        if not (equals and name and option):
            raise UsageError(f"--hook-config takes hook.option=value, but got {assignment!r}.")
        parameters = hook_options(HookRegistry.get(name))
        if option not in parameters:
            raise unknown(f"option of hook {name!r}:", option, parameters)
        annotation = parameters[option].annotation
        options.setdefault(name, {})[option] = typed(f"--hook-config {name}.{option}", value, annotation)
    return options


def wanted_sinks(options: Mapping[str, Any]) -> Callable[[], list[MetricSink]]:
    """Return a factory of the sinks of a strategy; raises :class:`UsageError` if a sink refuses its value."""
    values: dict[type[Any], Any] = {sink: options[flag_name(sink)] for sink in flag_sinks()}
    wanted = {sink: value for sink, value in values.items() if value not in (None, False)}
    included = {name for sink in wanted for name in sink.includes}  # another selected sink writes their files as well
    for sink in wanted:
        sink.check_installed()

    def make() -> list[MetricSink]:
        chosen = {sink: value for sink, value in wanted.items() if sink.name not in included}
        return [sink(**{sink.option: value}) if sink.option else sink() for sink, value in chosen.items()]

    make()
    return make


def _complete(experiment: Experiment, parser: CommandParser, options: Options) -> Options:
    """Return the options in the order of the help; raises :class:`UsageError` if a required one is missing."""
    missing = [dashed(name) for name in parser.types if name not in options]
    require(not missing, f"loopscope run {experiment.name} needs {listed(missing)}.")
    named = {name: _separated(options[name]) for name in ("strategy", "hooks")}
    return {name: options[name] for name in parser.types} | named


def _separated(names: Iterable[str]) -> list[str]:
    """Split names at commas; an invalid name, such as an empty text, is kept and refused later.

    >>> _separated(["norms,fourier", "hessian", ","])
    ['norms', 'fourier', 'hessian', ',']
    """
    return [name for word in names for name in [part.strip() for part in word.split(",") if part.strip()] or [word]]


def _files_and_preset(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the config files and the preset, which decide the defaults; a missing value is refused later."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", action="append", nargs="?", default=[])
    first.add_argument("--preset", nargs="?")
    given, _ = first.parse_known_args(words)
    return [file for file in given.config if file is not None], given.preset
