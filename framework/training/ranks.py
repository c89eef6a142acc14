"""The ranks that train one model: means over the data-parallel group, and agreement of all ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import RankError, RankLostError, UsageError, listed
from ..tensors import fully_sharded_modules, is_sharded

Result = TypeVar("Result")


class Ranks:
    """The ranks that train one model together; without arguments this process alone.

    Values are averaged over the data-parallel group, whose ranks see different rows; the ranks of a tensor-parallel
    group see the same rows. All ranks agree on decisions in a separate gloo group on the CPU, so that a rank that has
    raised never meets a rank that waits in another collective.

    Args:
        data: the process groups that divide the rows, one for each data-parallel dimension of the mesh.
        members: the ranks that train together; by default those of ``data``.
        averages: gradients after a backward pass are local to the rank and need averaging.
        shards: parameters are sharded over the ranks, so that reading them needs collectives.
        uneven: ranks may have different numbers of rows, and the loss of each rank is weighted by its rows.
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
        """Raise :class:`UsageError` if this process is not one of the ranks."""
        members = {*members, *(rank for group in data for rank in distributed.get_process_group_ranks(group))}
        self.members = tuple(sorted(members))
        self.data, self.averages, self.shards, self.uneven = tuple(data), averages, shards, uneven
        self.are_many = len(self.members) > 1
        self.size = 1
        """Data-parallel world size."""
        self.index = 0
        """Data-parallel rank of this process; equal for the ranks of a tensor-parallel group."""
        # Row-major index over the data-parallel dimensions of the mesh.
        for group in self.data:
            self.index = self.index * distributed.get_world_size(group) + distributed.get_rank(group)
            self.size *= distributed.get_world_size(group)
        # Stored, since the rank cannot be queried after the group is destroyed.
        self._rank = distributed.get_rank() if self.are_many else 0
        if self.are_many and self._rank not in self.members:
            raise UsageError(
                f"This process is rank {self._rank}, but the model is trained by the ranks "
                f"{listed([*map(str, members)], 9)}; build the model on a mesh of all ranks that train it."
            )

    @classmethod
    def of(cls, model: nn.Module, replica: DistributedDataParallel | None = None, *, uneven: bool = False) -> "Ranks":
        """Return the ranks that train a model, from the replica that wraps it, from its sharded parameters, or both."""
        sharded: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
        meshes = {parameter.device_mesh: None for parameter in sharded}
        data: list[Any] = [] if replica is None else [replica.process_group]
        for module in fully_sharded_modules(model):
            # Private, since FSDP2 has no public access to the mesh dimensions over which it shards.
            state = module._get_fsdp_state()
            for group in vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]:  # a list since torch 2.12
                data = data or ([] if group is None else group.mesh_info.mesh.get_all_groups())
        roots = [_root_mesh(mesh) for mesh in meshes]
        if len({tuple(root.mesh.flatten().tolist()) for root in roots}) > 1:
            raise UsageError("Parameters of the model are on meshes of different ranks; use one mesh for all of them.")
        members = roots[0].mesh.flatten().tolist() if roots else ()
        return cls(data, members, averages=replica is not None, shards=bool(meshes), uneven=uneven)

    @classmethod
    def all_processes(cls, parallel: object) -> "Ranks":
        """Return all processes, as ranks that only agree; without ``parallel`` this process alone."""
        return cls() if parallel is None else cls(members=range(distributed.get_world_size()))

    @property
    def shares_layers(self) -> bool:
        """Whether ranks share layers and see the same rows (tensor parallelism)."""
        return len(self.members) > self.size

    @property
    def sharing(self) -> str:
        """A description of what the ranks divide: rows, parameters, layers, or nothing."""
        kinds = {"rows": self.size > 1, "parameters": self.shards, "layers": self.shares_layers}
        return ", ".join(kind for kind, is_shared in kinds.items() if is_shared) or "nothing"

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints for all ranks."""
        return not self.are_many or self._rank == self.members[0]

    @property
    def rank_and_count(self) -> tuple[int, int]:
        """The index of this process among the ranks, counted from 0, and their number."""
        return (self.members.index(self._rank), len(self.members)) if self.are_many else (0, 1)

    def arrangement(self, model: nn.Module) -> dict[str, Any]:
        """Return the arrangement that determines the bits of a run: rows of each rank, shard layout, averaging."""
        sharded: list[Any] = [(name, tensor) for name, tensor in model.named_parameters() if is_sharded(tensor)]
        layout = {name: f"{tensor.placements} of {tuple(tensor.device_mesh.shape)}" for name, tensor in sharded}
        return {"indices": self.gather(self.index), "layout": layout, "averages": self.averages}

    def is_this_process(self, rank: int) -> bool:
        """Return whether ``rank`` is the rank of this process."""
        return rank == self._rank

    # Means

    def means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over the data-parallel group, with one all-reduce for each dtype."""
        return [total / self.size for total in self.sums(tensors)] if self.data else [*tensors]

    @torch.no_grad()
    def sums(self, tensors: Sequence[Tensor], *, largest: bool = False) -> list[Tensor]:
        """Return the sum, or maximum (``largest``), of each tensor over the ranks; one all-reduce for each dtype."""
        results: list[Tensor] = [*tensors]
        operation = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if self.data):  # the same order on all ranks
            indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[index].reshape(-1) for index in indices])
            for group in self.data:
                distributed.all_reduce(flat, op=operation, group=group)
            sizes = [tensors[index].numel() for index in indices]
            for index, part in zip(indices, torch.split(flat, sizes), strict=True):
                results[index] = part.view_as(tensors[index])
        return results

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over the data-parallel group."""
        return self.means([value])[0] if self.data else value

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their means over the ranks; a parameter without a gradient on any rank stays without."""
        if not self.are_many:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        has_any = torch.tensor([float(parameter.grad is not None) for parameter in trained])
        self._reduce(has_any)  # on the CPU, since the result is read there
        means = self.means([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in trained])
        for parameter, mean, has_gradient in zip(trained, means, has_any.tolist(), strict=True):
            parameter.grad = mean if has_gradient else None

    def rows(self, count: int) -> int:
        """Return the number of rows on all ranks, given the ``count`` of this rank."""
        if not self.data:
            return count
        total = torch.tensor(count)
        self._reduce(total)
        return int(total) * self.size // len(self.members)  # tensor-parallel ranks have the same rows, which count once

    def weight(self, count: int) -> float:
        """Return the weight of this rank's mean loss over ``count`` rows in the mean over ranks; 1 for equal counts."""
        # w = n·R / Σ n for R ranks: the mean over the ranks of w·L is then Σ n·L / Σ n, the mean loss of all rows.
        return count * self.size / self.rows(count) if self.uneven and self.data else 1.0

    def evaluation(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the means over the ranks of evaluation numbers; equal numbers are returned exactly.

        Raises :class:`UsageError` if the names differ between ranks.
        """
        if not self.are_many:
            return dict(numbers)
        by_rank = self.gather({name: float(value) for name, value in numbers.items()})
        names = [sorted(rank_numbers) for rank_numbers in by_rank]
        self._require_equal("The names of the evaluation's numbers differ between the ranks:", names)
        columns = {name: [rank_numbers[name] for rank_numbers in by_rank] for name in numbers}
        return {name: values[0] if len({*values}) == 1 else fmean(values) for name, values in columns.items()}

    # Agreements

    def agree(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, with one all-reduce of one number."""
        if not self.are_many:
            return flag
        total = torch.tensor(float(flag))
        self._reduce(total)
        return bool(total)

    def join(self) -> None:
        """Check that no rank has failed; raises :class:`RankError` for a failure that a rank has sent."""
        for rank, failures in self.exchange_failures(None) or ():
            raise RankError(rank, failures[0])

    def exchange_failures(self, failures: Any) -> list[tuple[int, Any]] | None:
        """Exchange failures, and return those of all ranks with their ranks; ``None`` if no rank has any."""
        # Failures are rare, so one number first: its all-reduce takes 190 µs on 2 gloo ranks, 455 on 3 (busy machine).
        if not self.are_many or not self.agree(failures is not None):
            return None
        by_rank = zip(self.members, self.gather(failures), strict=True)
        return [(rank, sent) for rank, sent in by_rank if sent is not None]

    def call_on_all(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on all ranks and return the local result; all raise the :class:`UsageError` of one."""
        refusal = None
        try:
            result = function()
        except UsageError as error:
            refusal = error
        refusals = self.exchange_failures(None if refusal is None else str(refusal))
        if refusal is not None:
            raise refusal
        for _, sentence in refusals or ():
            raise UsageError(sentence)
        return result

    def check_equal(self, settings: Mapping[str, Any]) -> None:
        """Raise :class:`UsageError` on all ranks if a setting differs between them."""
        by_rank = self.gather(dict(settings))
        for name in dict.fromkeys(name for rank_settings in by_rank for name in rank_settings):
            values = [rank_settings.get(name, "missing") for rank_settings in by_rank]
            self._require_equal(f"{name} differs between the ranks:", values)

    def gather(self, value: Any, purpose: str = "") -> list[Any]:
        """Return the plain values of all ranks, in rank order; each thread needs a separate ``purpose``."""
        if not self.are_many:
            return [value]
        values = [None] * len(self.members)
        try:
            distributed.all_gather_object(values, value, group=self.group(purpose))
        except (RuntimeError, ValueError) as error:  # ValueError if the program has destroyed the group
            raise _rank_lost_error(error) from error
        return values

    def group(self, purpose: str = "") -> Any:
        """Return a gloo group of the ranks, created once for each purpose, with the timeout of the default group."""
        if (group := _GROUPS.get((self.members, purpose))) is None:
            world: Any = distributed.group.WORLD
            # Private, since torch has no public access to the timeout of a group.
            timeout = world._get_backend(world._device_types[0]).options._timeout
            group = distributed.new_group([*self.members], timeout, "gloo", use_local_synchronization=True)
            _GROUPS[self.members, purpose] = group
        return group

    def _reduce(self, value: Tensor) -> None:
        try:
            distributed.all_reduce(value, group=self.group())
        except (RuntimeError, ValueError) as error:
            raise _rank_lost_error(error) from error

    def _require_equal(self, claim: str, values: list[Any]) -> None:
        if any(value != values[0] for value in values):
            by_rank = [
                f"{value if value != '' else 'none'} on rank {rank}"
                for rank, value in zip(self.members, values, strict=True)
            ]
            raise UsageError(f"{claim} {listed(by_rank, 4)}; start all ranks with the same settings.")


_GROUPS: WeakValueDictionary[tuple[tuple[int, ...], str], Any] = WeakValueDictionary()
"""The gloo groups by ranks and purpose; weak, since torch owns them until the program destroys its process groups."""


def _root_mesh(mesh: Any) -> Any:
    """Return the root device mesh of a submesh."""
    # Private in every version of torch: there is no public access from a submesh to its root.
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # up to torch 2.9

    return _mesh_resources.get_root_mesh(mesh)


def _rank_lost_error(error: Exception) -> RankLostError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RankLostError(f"Another rank has ended, or did not answer within the timeout: {first_line}")
