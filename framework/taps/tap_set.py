"""The taps of a run: attached to the model, disabled in passes of hooks, removed at the end."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

from torch import nn

from ..errors import listed, notice
from ..hooks import Tap, TapOwner
from ..state import InternalFunction, has_compiled_code
from ..training import Ranks, eagerly, is_compiled
from .attached_tap import AttachedTap
from .compiled_checks import CHECKS
from .passes import RunningPasses

AGREEMENTS = 3
"""The steps after which ranks exchange what they leave out: torch compiles graphs for all shapes at the second one."""


class TapSet:
    """The taps of a run, in the order of their hooks, and the passes that are running now."""

    def __init__(
        self, model: nn.Module, *, audit: bool = False, compiled: bool = False, keeps_all: bool = False
    ) -> None:
        """Create an empty set; ``audit`` compares every byte of a gradient before and after each tap.

        ``compiled`` is set if the model is part of a compiled module that is trained, ``keeps_all`` if taps are kept
        that change the numbers of a graph of torch.compile.
        """
        self._model = model
        self._compiled = compiled or is_compiled(model)
        is_container = self._compiled and type(model).__module__.startswith("torch.nn.")  # its parts are compiled
        self._has_compiled_parts = is_container or any(map(is_compiled, model.children()))
        self._taps: dict[TapOwner, list[AttachedTap]] = {}
        self._passes = RunningPasses(audit=audit)
        self._results = len(CHECKS.results)
        self._keeps_all = keeps_all
        self._agreements = 0
        self.graphs: dict[str, Any] = {"compared": 0, "changed_by": [], "kept": keeps_all}
        """The number of compiled graphs that were compared with and without taps, and the taps that changed numbers."""
        self._call_watch = ExitStack()
        self._watches_calls = False
        self._steps = 0
        self._have_left_graphs = False
        """Whether no tap is in a graph of torch.compile, or will be."""
        self._awaits_call = False
        """Whether compiled code existed before the step, and neither the model nor a tap was called since."""
        self.is_idle = not self._compiled
        """Whether :meth:`disabled` has no effect: no tap was attached, and the model is not compiled."""

    def attach(self, owner: TapOwner, taps: Iterable[Tap]) -> None:
        """Attach a hook's taps.

        Raises:
            UsageError: a tap cannot be attached; all taps are then removed from the model.
        """
        CHECKS.keeps_all = self._keeps_all
        try:
            for declared in taps:
                self.is_idle = self._have_left_graphs = False
                tap = AttachedTap(owner, declared, self._model, self._passes, compiled=self._has_compiled_parts)
                self._taps.setdefault(owner, []).append(tap)
                tap.attach()
        except BaseException:
            self.remove()
            raise

    def arrange(self) -> None:
        """Attach taps to modules for steps on which they are due, and detach them otherwise; called before each step.

        PyTorch calls modules without hooks faster. Taps stay attached where a graph of torch.compile may be compiled,
        which otherwise would not contain them: in the first step, in compiled models, and if a graph has called them.
        """
        self._steps += 1
        if self._steps > 1 and not (self._compiled or (self._steps == 2 and self._is_uncalled)):
            if not self._have_left_graphs:
                taps = [*chain(*self._taps.values())]
                self._have_left_graphs = not any(tap.is_in_graph for tap in taps)
                for tap in taps if self._have_left_graphs else ():
                    tap.leave_graphs()
            self._detach_idle()
        self._awaits_call = not self._passes.have_called_taps and has_compiled_code()
        if self._awaits_call and not self._watches_calls:
            # It stays, since graphs are compiled again if a module has another number of hooks.
            self._watches_calls = True
            handle = self._model.register_forward_pre_hook(InternalFunction(self._note_call))
            self._call_watch.callback(handle.remove)

    def _detach_idle(self) -> None:
        for owner, taps in self._taps.items():
            # is_due() is called once per hook: a hook may tap every module of a model.
            outdated = not owner.is_due()
            for tap in taps:
                if tap.is_attached is outdated and not tap.is_in_graph:
                    tap.switch()

    def _note_call(self, module: nn.Module, inputs: object) -> None:
        if not self._passes.others:
            self._awaits_call = False

    def disabled(self) -> AbstractContextManager[None]:
        """Disable all taps in the body, for passes that are not the run's own.

        Compiled modules run eagerly there: compiling them for other shapes or modes may change the run's results.
        """
        return self._eager_pass() if self._compiled else self._passes

    @contextmanager
    def _eager_pass(self) -> Iterator[None]:
        with self._passes, eagerly():
            yield

    def untapped_pass(self) -> AbstractContextManager[None]:
        """Disable all taps in the body, an additional pass of the run, which stays compiled if the model is."""
        return self._passes

    @property
    def is_bypassed(self) -> bool:
        """Whether the training calls only code that was compiled before the taps were attached.

        The first step may begin after its pass, before which the next one compiles such code again. Without compiled
        code, modules whose taps are not called are just not called.
        """
        return self._steps > 1 and self._is_uncalled

    @property
    def _is_uncalled(self) -> bool:
        if not self._awaits_call or self._passes.have_called_taps:
            return False
        return any(tap.is_attached for taps in self._taps.values() for tap in taps)

    def disputed(self, ranks: Ranks) -> set[str]:
        """Return the labels of taps that this rank has left out newly, and another has read in this step.

        The ranks exchange them after the first backward passes, and then no rank reads what one has left out. Later a
        rank may compile a graph alone, for the shapes of its rows.
        """
        labels = set(chain(*CHECKS.results[self._results + self.graphs["compared"] :]))
        if self._agreements == AGREEMENTS:
            disputed = labels - CHECKS.left_out
        else:
            self._agreements += 1
            ranks.join()
            by_rank = [set(rank_labels) for rank_labels in ranks.gather(sorted(labels))]
            labels = set[str]().union(*by_rank)
            disputed = labels - by_rank[0].intersection(*by_rank) - CHECKS.left_out
        if self._keeps_all:
            return set()
        CHECKS.left_out |= labels
        return disputed

    def hooks_on(self, labels: set[str]) -> set[str]:
        """Return the names of the hooks with taps of these labels."""
        return {owner.hook for owner, taps in self._taps.items() if any(tap.labels & labels for tap in taps)}

    def describe_new_graphs(self) -> str:
        """Describe the comparisons of graphs with and without taps since the last call; empty if there were none.

        A notice names the taps that change numbers.
        """
        results = CHECKS.results[self._results + self.graphs["compared"] :]
        if not results:
            return ""
        self.graphs["compared"] += len(results)
        known = self.graphs["changed_by"]
        if changed := [label for label in dict.fromkeys(chain(*results)) if label not in known]:
            known += changed
            effect = (
                "change the last bits of the training, which is treated by them (compiled='all')"
                if self._keeps_all
                else "would change the last bits of the training, so they are left out; compiled='all' keeps them"
            )
            if CHECKS.are_split:
                effect = (
                    "are left out, since torch splits graphs by the buckets of DistributedDataParallel; set "
                    "torch._dynamo.config.optimize_ddp = False before the first step, which compiles whole graphs"
                )
            notice(f"In the graphs of torch.compile, the taps on {listed(changed)} {effect}.")
        verb = "changes" if known and self._keeps_all else "leaves"
        end = "" if known and self._keeps_all else " unchanged"
        return f"Observing {verb} the compiled graphs' numbers{end}: {self.graphs['compared']} compared bit for bit."

    @property
    def hooks(self) -> set[str]:
        """Names of the hooks with taps."""
        return {owner.hook for owner, taps in self._taps.items() if taps}

    def remove(self) -> None:
        """Remove all taps from the model, the last one first, also if the removal of one raises."""
        with ExitStack() as stack:
            stack.callback(self._taps.clear)
            stack.callback(self._call_watch.close)
            for taps in self._taps.values():
                for tap in taps:
                    stack.callback(tap.detach)
