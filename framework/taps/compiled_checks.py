"""The comparison of compiled graphs with and without taps, at the first pass of every graph."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor, nn

from ..state import InternalHook
from ..tensors import in_bytes


class Checks:
    """The comparisons of this process."""

    def __init__(self) -> None:
        self.keeps_all = False
        """Whether taps are kept that change the numbers of a graph."""
        self.results: list[list[str]] = []
        """For every graph, the labels of the taps that change its numbers."""
        self.left_out: set[str] = set()
        """The labels of the taps that no graph calls, since some rank cannot read them without a change of bits."""
        self.are_split = False
        """Whether torch has split a graph of DistributedDataParallel, which then has no taps."""
        self.are_running = False
        self._bodies = 0
        self._patched: AbstractContextManager[None] = nullcontext()

    @contextmanager
    def enabled(
        self, tracers: Collection[Any], add_root: Callable[[Any, Any], None], end_trace: Callable[[], None]
    ) -> Iterator[None]:
        """Check the graphs that are compiled in the body, in which calls of ``tracers`` are those of taps.

        ``add_root`` adds those of the module whose method became a graph; ``end_trace`` is called after a graph was
        recorded.
        """
        if not self._bodies:
            self._patched = patched(tracers, add_root, end_trace)
            self._patched.__enter__()
        self._bodies += 1
        try:
            yield
        finally:
            self._bodies -= 1
            if not self._bodies:
                self._patched.__exit__(None, None, None)
                self.left_out.clear()
                self.are_split = False


@contextmanager
def patched(
    tracers: Collection[Any], add_root: Callable[[Any, Any], None], end_trace: Callable[[], None]
) -> Iterator[None]:
    """Let the compiler check its graphs in the body, and ignore hooks of loopscope.

    Private: torch has no function that receives a graph with its compiler (torch 2.9 to 2.15). Outside of graphs it
    compiles the forward of its own modules only if they have hooks, which adds graphs and may change bits.
    """
    from torch._dynamo import utils
    from torch._dynamo.output_graph import OutputGraph

    compiler: Any = OutputGraph
    compile_graph, has_hooks = compiler.call_user_compiler, utils.nnmodule_has_hooks

    def has_hooks_of_others(module: nn.Module, **kinds: bool) -> bool:
        return any(not isinstance(hook, InternalHook) for hook in utils.nn_module_get_all_hooks(module, **kinds))

    compiler.call_user_compiler = partialmethod(_compile_checked, compile_graph, tracers, add_root, end_trace)
    utils.nnmodule_has_hooks = has_hooks_of_others  # type: ignore[assignment]
    try:
        yield
    finally:
        compiler.call_user_compiler, utils.nnmodule_has_hooks = compile_graph, has_hooks


CHECKS = Checks()
TRIALS = 8
"""The number of inputs with which graphs are compared."""


def _compile_checked(
    output: Any,
    original: Callable[..., Any],
    tracers: Collection[Any],
    add_root: Callable[[Any, Any], None],
    end_trace: Callable[[], None],
    graph: Any,
    inputs: list[Any],
) -> Any:
    """Compile a graph without the taps that change bits.

    The comparison runs here, since a compiler called later would get inputs without the compiler's knowledge of shapes.
    """
    add_root(graph, output.root_tx.f_locals.get("self"))
    labels = labels_of(graph, tracers)
    if not labels:
        return original(output, graph, inputs)
    if _is_split(output.compiler_fn, graph):
        CHECKS.are_split = True
        CHECKS.results.append(labels)
        return original(output, without_taps(graph, tracers, ()), inputs)

    def compiled(kept: Collection[str]) -> Callable[..., Any]:
        try:
            with _own_metrics():
                return original(output, without_taps(graph, tracers, kept), inputs)  # type: ignore[no-any-return]
        finally:
            end_trace()

    run = compiled(labels)
    if not torch.is_grad_enabled():  # a pass without gradients is no training, so that its graph has no taps
        return run
    bare = compiled(())
    changed: list[str] = []
    CHECKS.are_running = True
    try:
        chosen = run
        if not _are_equal(run, bare, inputs):
            neutral = [label for label in labels if _are_equal(compiled([label]), bare, inputs)]
            chosen = compiled(neutral) if neutral else bare
            if not _are_equal(chosen, bare, inputs):
                neutral, chosen = [], bare
            changed = [label for label in labels if label not in neutral]
    finally:
        CHECKS.are_running = False
    CHECKS.results.append(changed)
    return run if CHECKS.keeps_all else chosen


def _is_split(compiler: Any, graph: Any) -> bool:
    """Return whether torch splits the graph by the buckets of DistributedDataParallel.

    It compares what each part returns with the outputs that include the tokens of effects, so that parts with taps get
    wrong shapes (torch 2.13).
    """
    splitter = getattr(compiler, "__self__", None)
    if type(splitter).__name__ != "DDPOptimizer":
        return False
    bucket = torch._dynamo.backends.distributed.Bucket()
    for node in graph.graph.nodes:
        splitter.add_param_args(bucket, node)  # type: ignore[union-attr]
    return bucket.size >= splitter.first_bucket_cap  # type: ignore[union-attr,no-any-return]


@contextmanager
def _own_metrics() -> Iterator[None]:
    """Separate torch's metrics of a compilation in the body from those of the outer one, which holds each once."""
    metrics: Any = torch._dynamo.utils.get_metrics_context()
    earlier, metrics._metrics = metrics._metrics, {}
    try:
        yield
    finally:
        metrics._metrics = earlier


def labels_of(graph: Any, tracers: Collection[Any]) -> list[str]:
    """Return the labels of the taps in a graph and its subgraphs, each once."""
    graphs = [item for item in graph.modules() if isinstance(item, torch.fx.GraphModule)]
    nodes = [node for item in graphs for node in item.graph.nodes if node.target in tracers]
    return [*dict.fromkeys(node.args[0] for node in nodes)]


def without_taps(graph: Any, tracers: Collection[Any], keep: Collection[str]) -> Any:
    """Return a copy of a graph without the taps whose labels are not in ``keep``."""
    nodes, values = torch.fx.Graph(), dict[Any, Any]()
    nodes.output(nodes.graph_copy(graph.graph, values))
    for node, copied in values.items():
        if hasattr(node, "_dynamo_source"):  # torch keeps it outside of the node's meta
            copied._dynamo_source = node._dynamo_source
        if node.target in tracers and node.args[0] not in keep:
            nodes.erase_node(copied)
    copy = torch.fx.GraphModule(graph, nodes)
    copy.meta = graph.meta
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(graph, name):
            setattr(copy, name, getattr(graph, name))
    for name, part in graph.named_children():
        if isinstance(part, torch.fx.GraphModule):
            setattr(copy, name, without_taps(part, tracers, keep))
    return copy


def _are_equal(run: Callable[..., Any], bare: Callable[..., Any], inputs: list[Any]) -> bool:
    """Return whether two graphs compute the same bits from the inputs, and from others like them.

    Graphs that differ in few elements, such as those of a loop's end, often agree on one set of inputs.
    """
    if run is bare:
        return True
    devices = {item.device for item in inputs if isinstance(item, Tensor) and item.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    for trial in range(TRIALS):
        with torch.random.fork_rng([*devices], device_type=kind):
            torch.manual_seed(trial)
            varied = [_varied(item, trial) for item in inputs]
            for actual, expected in zip(_pass_of(run, varied, trial), _pass_of(bare, varied, trial), strict=True):
                if actual is None or expected is None:
                    if actual is not expected:
                        return False
                elif not torch.equal(in_bytes(actual), in_bytes(expected)):
                    return False
    return True


def _varied(item: Any, trial: int) -> Any:
    if trial == 0 or not (isinstance(item, Tensor) and item.is_floating_point()):
        return item
    with torch.no_grad():
        return (item * (1 + 0.1 * torch.randn_like(item))).requires_grad_(item.requires_grad)


def _pass_of(run: Callable[..., Any], inputs: list[Any], seed: int) -> list[Tensor | None]:
    """Return the outputs of a graph, and the gradients of its inputs, from a pass that leaves no trace."""
    leaves = [_leaf_of(item) if isinstance(item, Tensor) else _number_of(item) for item in inputs]
    with torch._dynamo.compiled_autograd._disable(), _own_metrics(), _without_saving_hooks():
        torch.manual_seed(seed)
        outputs = [item for item in torch.utils._pytree.tree_leaves(run(*leaves)) if isinstance(item, Tensor)]
        differentiable = [item for item in outputs if item.requires_grad]
        sources = [item for item in leaves if isinstance(item, Tensor) and item.requires_grad]
        if not (differentiable and sources):
            return [item.detach() for item in outputs]
        tangents = [torch.randn_like(item) for item in differentiable]
        gradients = torch.autograd.grad(differentiable, sources, tangents, allow_unused=True)
        return [*(item.detach() for item in outputs), *gradients]


def _without_saving_hooks() -> AbstractContextManager[Any]:
    """Hide the hooks on saved tensors of the training in the body, such as those of activation checkpointing."""
    return torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _number_of(item: Any) -> Any:
    """Return the number of a symbol, such as a size of this batch in a graph for all sizes; other items unchanged."""
    return item.node.hint if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)) else item


def _leaf_of(tensor: Tensor) -> Tensor:
    # A pass may write into its inputs, such as the statistics of batches, but not into parameters.
    copy = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad)
