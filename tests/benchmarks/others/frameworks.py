"""The compared frameworks, each in a separate file, which is imported only if the framework is installed."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from tests.benchmarks.others.work import Asked, Work

APART = Path(__file__).parents[3] / ".venv-fastai" / "bin" / "python"
"""The environment of ``make fastai``; fastai needs a torchvision that matches torch's build."""


@dataclass(frozen=True)
class Framework:
    """One way to train."""

    title: str
    file: str
    package: str = ""

    @cached_property
    def module(self) -> ModuleType:
        """The module that trains; raises ``ImportError`` if the framework is not installed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings from imports of the frameworks are irrelevant here
            return import_module(f"tests.benchmarks.others.{self.file}")

    @property
    def name(self) -> str:
        """The title with the installed version."""
        try:
            return f"{self.title} {version(self.package)}" if self.package else self.title
        except PackageNotFoundError:
            return self.title

    @property
    def train(self) -> Callable[[Work, Asked], None]:
        """The training function."""
        return self.module.train


BARE = Framework("bare loop", "bare")
OURS = Framework("loopscope", "with_loopscope")
OTHERS: Sequence[Framework] = (
    Framework("Ignite", "with_ignite", "pytorch-ignite"),
    Framework("Lightning", "with_lightning", "lightning"),
    Framework("HF Trainer", "with_hugging_face", "transformers"),
    Framework("fastai", "with_fastai", "fastai"),
)
FRAMEWORKS: Sequence[Framework] = (BARE, OURS, *OTHERS)


def installed() -> Iterator[Framework]:
    """Yield the importable frameworks."""
    for framework in FRAMEWORKS:
        try:
            assert framework.train
        except ImportError:
            continue
        yield framework
