"""The processes that train one model together: over whom means are taken, and what all of them must do as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import RankError, RankLostError, UsageError, listed
from ..state import fully_sharded_modules, is_sharded

Result = TypeVar("Result")


class Ranks:
    """The processes that train one model together; without any argument this one alone.

    Numbers are averaged over the ranks that see different rows; those that hold parts of one layer (tensor
    parallelism) see the same ones. Decisions are agreed on by all of them, in a group of their own on the CPU, so that
    a rank which has raised never meets one that still waits in another collective.

    Args:
        data: the process groups over whose ranks the rows are spread, one after another (a mesh of two dimensions has
            two).
        members: the ranks that train together; by default those of ``data``.
        averages: gradients of a backward pass are those of a rank, and are still to be averaged.
        shards: parameters lie in parts on the ranks, so that looking at them takes collectives.
        uneven: a batch may have other numbers of rows on the ranks, and each rank's loss counts by its rows.
    """

    def __init__(
        self,
        data: Sequence[Any] = (),
        members: Iterable[int] = (),
        *,
        averages: bool = True,
        shards: bool = False,
        uneven: bool = False,
    ) -> None:
        """Raise :class:`UsageError` where this process is none of the ranks."""
        found = {*members, *(rank for group in data for rank in distributed.get_process_group_ranks(group))}
        self.members = tuple(sorted(found))
        self.data, self.averages, self.shards, self.uneven = tuple(data), averages, shards, uneven
        self.are_many = len(self.members) > 1
        self.size = 1
        """How many ranks see rows of their own."""
        self.index = 0
        """Which of them this one is; ranks that hold parts of one layer have the same."""
        for group in self.data:
            self.index = self.index * distributed.get_world_size(group) + distributed.get_rank(group)
            self.size *= distributed.get_world_size(group)
        self._rank = distributed.get_rank() if self.are_many else 0  # which nobody can ask once the group is gone
        if self.are_many and self._rank not in self.members:
            raise UsageError(
                f"This process is rank {self._rank}, but the model is trained by the ranks "
                f"{listed([*map(str, found)], 9)}; give it a mesh of all ranks that train it."
            )

    @classmethod
    def of(cls, model: nn.Module, replica: DistributedDataParallel | None = None, *, uneven: bool = False) -> "Ranks":
        """Return who trains a model: known by the replica around it, by the shards of its parameters, or both."""
        sharded: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
        meshes = {parameter.device_mesh: None for parameter in sharded}
        data: list[Any] = [] if replica is None else [replica.process_group]
        for module in fully_sharded_modules(model):
            # Private: nothing public tells which dimensions of the mesh FSDP2 spreads the rows over.
            state = module._get_fsdp_state()
            for group in vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]:  # several since torch 2.12
                data = data or ([] if group is None else group.mesh_info.mesh.get_all_groups())
        roots = [_root_mesh(mesh) for mesh in meshes]
        if len({tuple(root.mesh.flatten().tolist()) for root in roots}) > 1:
            raise UsageError("Parameters of the model lie on meshes of different ranks; build them of one mesh.")
        members = roots[0].mesh.flatten().tolist() if roots else ()
        return cls(data, members, averages=replica is not None, shards=bool(meshes), uneven=uneven)

    @classmethod
    def all_processes(cls, parallel: object) -> "Ranks":
        """Return all processes that were started, as ranks that only agree; where none train in ``parallel`` one."""
        return cls() if parallel is None else cls(members=range(distributed.get_world_size()))

    @property
    def shares_layers(self) -> bool:
        """Whether ranks hold parts of one layer and see the same rows: tensor parallelism."""
        return len(self.members) > self.size

    @property
    def sharing(self) -> str:
        """What the ranks share, in words."""
        kinds = {"rows": self.size > 1, "parameters": self.shards, "layers": self.shares_layers}
        return ", ".join(kind for kind, is_so in kinds.items() if is_so) or "nothing"

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all."""
        return not self.are_many or self._rank == self.members[0]

    @property
    def place(self) -> tuple[int, int]:
        """Which of the ranks this process is, from 0 on, and how many there are."""
        return (self.members.index(self._rank), len(self.members)) if self.are_many else (0, 1)

    def arrangement(self, model: nn.Module) -> dict[str, Any]:
        """Return in plain values on what the bits of a run depend: which rows each rank sees, how parameters lie."""
        sharded: list[Any] = [(name, each) for name, each in model.named_parameters() if is_sharded(each)]
        layout = {name: f"{each.placements} of {tuple(each.device_mesh.shape)}" for name, each in sharded}
        return {"indices": self.gather(self.index), "layout": layout, "averages": self.averages}

    def is_this_process(self, rank: int) -> bool:
        """Whether this process has the rank."""
        return rank == self._rank

    # Means

    def means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over the ranks of each tensor, by one all-reduce for each dtype."""
        return [each / self.size for each in self.sums(tensors)] if self.data else [*tensors]

    @torch.no_grad()
    def sums(self, tensors: Sequence[Tensor], *, largest: bool = False) -> list[Tensor]:
        """Return the sum of each tensor over the ranks, or its ``largest`` elements; one all-reduce for each dtype."""
        found: list[Tensor] = [*tensors]
        operation = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if self.data):  # in one order on all ranks
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[place].reshape(-1) for place in places])
            for group in self.data:
                distributed.all_reduce(flat, op=operation, group=group)
            sizes = [tensors[place].numel() for place in places]
            for place, part in zip(places, torch.split(flat, sizes), strict=True):
                found[place] = part.view_as(tensors[place])
        return found

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks that see different rows; alone the value itself."""
        return self.means([value])[0] if self.data else value

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their means; a parameter that no rank has a gradient of is left without."""
        if not self.are_many:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        has_any = torch.tensor([float(parameter.grad is not None) for parameter in trained])
        self._reduce(has_any)  # on the host, where it is read
        means = self.means([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in trained])
        for parameter, mean, has in zip(trained, means, has_any.tolist(), strict=True):
            parameter.grad = mean if has else None

    def rows(self, count: int) -> int:
        """Return how many rows the ranks have together, of which this one has ``count``."""
        if not self.data:
            return count
        total = torch.tensor(count)
        self._reduce(total)
        return int(total) * self.size // len(self.members)  # ranks that share a layer have the same rows

    def weight(self, count: int) -> float:
        """Return what the mean loss of this rank's ``count`` rows counts in the mean over the ranks: mostly just 1."""
        return count * self.size / self.rows(count) if self.uneven and self.data else 1.0

    def evaluation(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the means of numbers that each rank has found on its part of the data, exactly where all are equal.

        Raises :class:`UsageError` where ranks have numbers of different names.
        """
        if not self.are_many:
            return dict(numbers)
        each = self.gather({name: float(value) for name, value in numbers.items()})
        self._must_be_equal("What the evaluation returns differs between the ranks:", [sorted(found) for found in each])
        columns = {name: [found[name] for found in each] for name in numbers}
        return {name: values[0] if len({*values}) == 1 else fmean(values) for name, values in columns.items()}

    # Agreements

    def agree(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, by one all-reduce of one number."""
        if not self.are_many:
            return flag
        total = torch.tensor(float(flag))
        self._reduce(total)
        return bool(total)

    def join(self) -> None:
        """Go on together; raises :class:`RankError` where another rank tells that it cannot."""
        for rank, failures in self.exchange_failures(None) or ():
            raise RankError(rank, failures[0])

    def exchange_failures(self, failures: Any) -> list[tuple[int, Any]] | None:
        """Return the failures that ranks tell of, each with its rank; ``None`` where no rank has any."""
        if not self.are_many or not self.agree(failures is not None):
            return None
        each = zip(self.members, self.gather(failures), strict=True)
        return [(rank, found) for rank, found in each if found is not None]

    def call_on_all(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns on this rank; a :class:`UsageError` of one rank is raised on all of them."""
        refused = None
        try:
            found = function()
        except UsageError as error:
            refused = error
        refusals = self.exchange_failures(None if refused is None else str(refused))
        if refused is not None:
            raise refused
        for _, sentence in refusals or ():
            raise UsageError(sentence)
        return found

    def check_equal(self, settings: Mapping[str, Any]) -> None:
        """Raise :class:`UsageError`, the same on all ranks, for settings of which ranks have different values."""
        each = self.gather(dict(settings))
        for name in dict.fromkeys(name for found in each for name in found):
            values = [found.get(name, "not there") for found in each]
            self._must_be_equal(f"{name} differs between the ranks:", values)

    def gather(self, value: Any, purpose: str = "") -> list[Any]:
        """Return a plain value of each rank, in their order; threads gather each for a ``purpose`` of its own."""
        if not self.are_many:
            return [value]
        found = [None] * len(self.members)
        try:
            distributed.all_gather_object(found, value, group=self.group(purpose))
        except (RuntimeError, ValueError) as error:  # the latter where the program has destroyed the group
            raise _lost(error) from error
        return found

    def group(self, purpose: str = "") -> Any:
        """Return a gloo group of the ranks, made once for each purpose, with the timeout of the world."""
        if (group := _GROUPS.get((self.members, purpose))) is None:
            world: Any = distributed.group.WORLD
            # Private: torch has no public name that tells the timeout a group was made with.
            timeout = world._get_backend(world._device_types[0]).options._timeout
            group = distributed.new_group([*self.members], timeout, "gloo", use_local_synchronization=True)
            _GROUPS[self.members, purpose] = group
        return group

    def _reduce(self, value: Tensor) -> None:
        try:
            distributed.all_reduce(value, group=self.group())
        except (RuntimeError, ValueError) as error:
            raise _lost(error) from error

    def _must_be_equal(self, what: str, each: list[Any]) -> None:
        if any(value != each[0] for value in each):
            said = [
                f"{value if value != '' else 'none'} on rank {rank}"
                for rank, value in zip(self.members, each, strict=True)
            ]
            raise UsageError(f"{what} {listed(said, 4)}; start all ranks alike.")


_GROUPS: WeakValueDictionary[tuple[tuple[int, ...], str], Any] = WeakValueDictionary()
"""The control groups of ranks; torch holds them, and lets go of them where a program destroys its process groups."""


def _root_mesh(mesh: Any) -> Any:
    """Return the whole device mesh of which ``mesh`` is a part."""
    # Private in every torch: nothing public leads from a part to the whole.
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # up to torch 2.9

    return _mesh_resources.get_root_mesh(mesh)


def _lost(error: Exception) -> RankLostError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RankLostError(f"Another rank is gone, or did not answer in time: {first}")
