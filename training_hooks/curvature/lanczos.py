"""Spectra of symmetric operators from matrix-vector products: Lanczos, Hutchinson, stochastic Lanczos quadrature."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from loopscope.tensors import norms_of, scale_of, widest
from torch import Tensor

from ..measures import jackknife_variance

Product = Callable[[Tensor], Tensor]
"""The product of a symmetric n × n operator A with a vector of shape (n,)."""


def rademacher(size: int, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Draw ``count`` vectors of ±1, shape (count, size), with dtype and device of ``like``.

    They are drawn on the CPU, so they are the same for every device.
    """
    signs = torch.randint(0, 2, (count, size), generator=generator, dtype=torch.int8)
    return signs.to(device=like.device, dtype=like.dtype) * 2 - 1


SAME = 0.99
"""Smallest |cosine| of two Ritz vectors from independent starts that are one eigenvector."""


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights of a Lanczos run, shapes (m,); the weights add up to 1."""

    nodes: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Tridiagonal:
    """The operator in an orthonormal basis of m vectors, in which it is tridiagonal.

    ``diagonal`` has shape (m,), ``off_diagonal`` shape (m − 1,), and ``basis`` shape (m, n) with the vectors as rows.
    ``remainder`` is β_m, the length of the part of A times the last vector outside of the basis, zero-dimensional.
    """

    diagonal: Tensor
    off_diagonal: Tensor
    basis: Tensor
    remainder: Tensor

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return the Ritz values, ascending, shape (m,), and their coefficients as columns, shape (m, m); float64."""
        off = self.off_diagonal.double()
        matrix = torch.diag(self.diagonal.double()) + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors

    def largest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest Ritz values, descending, shape (count,), and their unit vectors, (count, n)."""
        values, vectors = self.ritz()
        chosen = vectors[:, -count:].flip(1)
        return values[-count:].flip(0), chosen.T.to(self.basis.dtype) @ self.basis

    def smallest(self) -> tuple[Tensor, Tensor]:
        """Return the smallest Ritz value λ and ‖Av − λv‖₂ = |β_m·s_m|, s_m the last coefficient of its vector v."""
        values, vectors = self.ritz()
        return values[0], (self.remainder * vectors[-1, 0]).abs()

    def quadrature(self) -> "Quadrature":
        """Return nodes and weights with qᵀf(A)q ≈ Σ w·f(node), q the first basis vector.

        Exact if f is a polynomial of degree up to 2m − 1 (Golub and Meurant 2010).
        """
        values, vectors = self.ritz()
        return Quadrature(values, vectors[0].square())


def lanczos(product: Product, start: Tensor, iterations: int) -> Tridiagonal:
    """Run Lanczos from ``start``, shape (n,), with full reorthogonalisation, for min(iterations, n) products.

    Every new vector is orthogonalised against all earlier vectors twice ("twice is enough", Parlett 1998), so that no
    eigenvalue is duplicated. If the vectors span an invariant subspace, the next one is ``start`` rolled along its
    elements and orthogonalised, and the tridiagonal matrix splits into blocks.
    """
    size = min(iterations, start.numel())
    basis = start.new_zeros(size, start.numel())
    basis[0] = start / torch.linalg.vector_norm(start)
    diagonal, off_diagonal = start.new_zeros(size), start.new_zeros(max(size - 1, 0))
    largest, unit, lengths = start.new_zeros(()), start.new_ones(()), start.new_zeros(2)
    for index in range(size):
        # β_j·q_{j+1} = A q_j − α_j·q_j − β_{j−1}·q_{j−1}, with α the diagonal and β the off-diagonal
        rest = product(basis[index])
        if not index:
            # A is divided by a power of two, so that its eigenvalues are near 1, and squares stay in the range.
            unit = scale_of(rest)
        rest = rest / unit
        diagonal[index] = torch.dot(rest, basis[index])
        rest = rest - diagonal[index] * basis[index]
        if index:
            rest.sub_(off_diagonal[index - 1] * basis[index - 1])
        earlier, candidates = basis[: index + 1], torch.stack([rest, start.roll(index + 1)])
        for _ in range(2):
            candidates = candidates - (candidates @ earlier.T) @ earlier
        lengths = torch.linalg.vector_norm(candidates, dim=1)
        if index + 1 == size:
            break
        # A remainder of the size of rounding errors means an invariant subspace; torch.where does not wait for the
        # device.
        largest = torch.maximum(largest, diagonal[index].abs() + lengths[0])
        is_independent = lengths[0] > torch.finfo(start.dtype).eps * largest
        off_diagonal[index] = torch.where(is_independent, lengths[0], 0.0)
        basis[index + 1] = torch.where(is_independent, candidates[0] / lengths[0], candidates[1] / lengths[1])
    wide = widest(start.device)
    return Tridiagonal(diagonal.to(wide) * unit, off_diagonal.to(wide) * unit, basis, lengths[0].to(wide) * unit)


def residuals(product: Product, values: Tensor, vectors: Tensor) -> Tensor:
    """Return ‖Av − λv‖₂ of unit vectors v, the rows of ``vectors``, shape (count,), with one product each.

    A has an eigenvalue within this distance of λ.
    """
    wide = values.to(vectors.dtype)
    differences = [product(vector) - value * vector for value, vector in zip(wide, vectors, strict=True)]
    return norms_of(differences)


@dataclass(frozen=True)
class KnownPairs:
    """Eigenpairs on which Lanczos runs from independent starts agree.

    ``values`` has shape (k,), ``vectors`` shape (k, n). ``places`` are the indices of their Ritz values in each run.
    """

    values: Tensor
    vectors: Tensor
    places: list[list[int]]

    @classmethod
    def of(cls, runs: Sequence[Tridiagonal]) -> "KnownPairs":
        """Compare the Ritz vectors of two or more runs; reads them on the host.

        Vectors of an eigenvalue with several eigenvectors differ between runs, so that it is not known.
        """
        pairs = [run.ritz() for run in runs]
        vectors = [(ritz[1].T.to(run.basis.dtype) @ run.basis) for ritz, run in zip(pairs, runs, strict=True)]
        if len(runs) < 2:
            return cls(pairs[0][0][:0], vectors[0][:0], [[] for _ in runs])
        matches = [(vectors[0] @ other.T).abs().max(dim=1) for other in vectors[1:]]
        agree = torch.stack([match.values for match in matches]).amin(0) > SAME
        first = agree.nonzero().flatten().tolist()
        others = [match.indices[agree].tolist() for match in matches]
        return cls(pairs[0][0][agree], vectors[0][agree], [first, *others])

    def deflated_trace(self, samples: Tensor, probes: Tensor) -> Tensor:
        """Return samples zᵀAz of the trace with the known eigenvalues counted exactly, shape (probes,).

        zᵀAz − Σλ(u·z)² + Σλ has the same mean, and scatters only by the remaining eigenvalues (Hutch++, Meyer et al.,
        arXiv 2010.09649). ``probes`` are the z, shape (probes, n), with elements of ±1.
        """
        shares = (probes @ self.vectors.T).double().square() - 1
        return samples - shares @ self.values

    def deflated(self, runs: Sequence[Tridiagonal]) -> list[Quadrature]:
        """Return the quadratures with the known eigenvalues counted exactly.

        A known node gets the weight 1/n instead of (u·q)². The others share the remaining weight in proportion.
        """
        quadratures = []
        for run, places in zip(runs, self.places, strict=True):
            quadrature, size = run.quadrature(), run.basis.shape[1]
            weights = quadrature.weights.clone()
            weights[places] = 0
            rest = weights.sum()
            if places and len(places) < size and rest > 0:
                weights *= (1 - len(places) / size) / rest
                weights[places] = 1 / size
                quadrature = Quadrature(quadrature.nodes, weights)
            quadratures.append(quadrature)
        return quadratures


def mean_and_error(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of n ≥ 2 samples and its standard error s/√n, with divisor n − 1 in s²."""
    return samples.mean(), samples.std(correction=1) / math.sqrt(samples.numel())


def jackknife_error(estimate: Callable[[Sequence[Quadrature]], Tensor], runs: Sequence[Quadrature]) -> Tensor:
    """Return the standard errors of an estimate from K ≥ 2 runs, in its shape, by the jackknife over runs."""
    return jackknife_variance(torch.stack([estimate([*runs[:i], *runs[i + 1 :]]) for i in range(len(runs))])).sqrt()


@dataclass(frozen=True)
class Density:
    """A spectral density as point masses: ``nodes`` and ``weights``, shapes (points,), with weights of sum 1."""

    nodes: Tensor
    weights: Tensor

    @classmethod
    def of(cls, quadratures: Sequence[Quadrature]) -> "Density":
        """Average the quadratures of Lanczos runs from random starts (Ubaru, Chen and Saad 2017)."""
        nodes = torch.cat([quadrature.nodes for quadrature in quadratures])
        return cls(nodes, torch.cat([quadrature.weights for quadrature in quadratures]) / len(quadratures))

    def moment(self, power: int) -> Tensor:
        """Return Σ w·node^power, an estimate of tr(A^power)/n."""
        return (self.weights * self.nodes.pow(power)).sum()

    def negative_energy(self) -> Tensor:
        """Return the share of negative eigenvalues in tr(A²)."""
        return (self.weights * self.nodes.clamp(max=0).square()).sum() / self.moment(2)

    def grid(self, points: int) -> Tensor:
        """Return an even grid over the nodes with three extra steps on each side, shape (points,)."""
        # grid_i = lowest + (i − 3)·step, i = 0..points − 1, with points − 7 steps from the lowest to the highest node
        lowest, highest = self.nodes.min(), self.nodes.max()
        steps = torch.arange(points, device=self.nodes.device, dtype=self.nodes.dtype) - 3
        return lowest + (highest - lowest) / (points - 7) * steps

    def smoothed(self, grid: Tensor) -> Tensor:
        """Return the density on an even grid, with its shape, smoothed by a Gaussian whose σ is one grid step.

        NaN if all points of the grid are equal.
        """
        # p(x) = Σ_j w_j·N(x; node_j, spacing²): (points, nodes) @ (nodes,)
        spacing = grid[1] - grid[0]
        distances = (grid[:, None] - self.nodes) / spacing
        kernel = torch.exp(-distances.square() / 2) / (math.sqrt(2 * math.pi) * spacing)
        return kernel @ self.weights
