"""Cost model of collective operations, fitted to measurements.

A message of n bytes takes ``alpha + n beta`` seconds (R. Hockney, "The communication challenge
for MPP", Parallel Computing 20, 1994), and folding n bytes takes ``n gamma`` seconds. The number
of messages, bytes and folds of an operation follows from its algorithm:

- R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
  MPICH", International Journal of High Performance Computing Applications 19, 2005: binomial
  tree, recursive doubling, and Rabenseifner's halving and doubling (section 4).
- P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
  Journal of Parallel and Distributed Computing 69, 2009: ring.
- N. Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize collective
  operation performance", IPDPS 2000: steps between hosts apart from steps inside a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ALGORITHMS",
    "Fit",
    "LinkSpeed",
    "Measured",
    "Vector",
    "coefficients",
    "fit",
    "operations",
]

Vector = np.ndarray[Any, np.dtype[np.float64]]
# Positions of the counts: messages and bytes inside hosts, messages and bytes between hosts, and
# bytes folded.
_ALPHA, _BETA, _FAR_ALPHA, _FAR_BETA, _GAMMA = range(5)
# Number of samples of the bootstrap.
_DRAWS = 200


class LinkSpeed(NamedTuple):
    """Speed of the connection between two ranks.

    Attributes:
        alpha: seconds that a message of any length takes.
        beta: additional seconds a byte.
    """

    alpha: float
    beta: float


class Measured(NamedTuple):
    """One measurement.

    Attributes:
        op: ``"all_reduce"``, …
        bytes: size of the array; if pieces are gathered or scattered, of all pieces together.
        ranks: number of ranks.
        seconds: time that the slowest rank took.
    """

    op: str
    bytes: int
    ranks: int
    seconds: float


class Arrangement(NamedTuple):
    """Placement of ranks on hosts: ``per_host`` on each, numbered host by host."""

    ranks: int
    per_host: int

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.ranks // self.per_host)

    @property
    def stages(self) -> tuple[int, int]:
        """Halvings of the largest power of two ranks: first inside hosts, then between hosts."""
        all_of_them = self.ranks.bit_length() - 1
        near = min(all_of_them, self.per_host.bit_length() - 1)
        return near, all_of_them - near

    @property
    def levels(self) -> tuple[int, int]:
        """Levels of a binomial tree: first inside a host, then over the hosts."""
        return (min(self.ranks, self.per_host) - 1).bit_length(), (self.hosts - 1).bit_length()


def _counts(
    near: float = 0, near_bytes: float = 0, far: float = 0, far_bytes: float = 0, folded: float = 0
) -> Vector:
    return np.array([near, near_bytes, far, far_bytes, folded], float)


def _rounds(arrangement: Arrangement, rounds: float, nbytes: float, folded: float = 0.0) -> Vector:
    """Count rounds in which every rank sends to the next; messages between hosts set the pace."""
    if arrangement.hosts > 1:
        return _counts(far=rounds, far_bytes=rounds * nbytes, folded=folded)
    return _counts(near=rounds, near_bytes=rounds * nbytes, folded=folded)


def _ring(arrangement: Arrangement, n: float) -> Vector:
    p = arrangement.ranks
    return _rounds(arrangement, 2 * (p - 1), n / p, n * (p - 1) / p)


def _climb(arrangement: Arrangement, n: float, folds: bool) -> Vector:
    """Count a way up or down a binomial tree."""
    near, far = arrangement.levels
    return _counts(near, near * n, far, far * n, (near + far) * n * folds)


def _tree(arrangement: Arrangement, n: float) -> Vector:
    return _climb(arrangement, n, True) + _climb(arrangement, n, False)


def _beyond_a_power_of_two(arrangement: Arrangement, n: float) -> Vector:
    """Count the steps for ranks beyond a power of two.

    These ranks send their input before the other steps, and get the result after them.
    """
    if arrangement.ranks & (arrangement.ranks - 1) == 0:
        return _counts()
    return _rounds(arrangement, 2, n, n)


def _doubling(arrangement: Arrangement, n: float) -> Vector:
    near, far = arrangement.stages
    # All ranks of a host send to other hosts at once, and share the host's connection.
    shared = min(arrangement.ranks, arrangement.per_host)
    counts = _counts(near, near * n, far, far * n * shared, (near + far) * n)
    return counts + _beyond_a_power_of_two(arrangement, n)


def _rabenseifner(arrangement: Arrangement, n: float) -> Vector:
    near, far = arrangement.stages
    shared = min(arrangement.ranks, arrangement.per_host)
    inside, all_of_it = 1 - 0.5**near, 1 - 0.5 ** (near + far)
    counts = _counts(
        2 * near, 2 * n * inside, 2 * far, 2 * n * (all_of_it - inside) * shared, n * all_of_it
    )
    return counts + _beyond_a_power_of_two(arrangement, n)


def _hierarchical(arrangement: Arrangement, n: float) -> Vector:
    """Count a ring on each host, and Rabenseifner's algorithm between the hosts."""
    inside = min(arrangement.ranks, arrangement.per_host)
    counts = _ring(Arrangement(inside, inside), n)
    return (
        counts + _rabenseifner(Arrangement(arrangement.hosts, 1), n)
        if arrangement.hosts > 1
        else counts
    )


#: The algorithms of all-reduce: functions of a placement and ``n`` bytes that return the counts.
ALGORITHMS: Mapping[str, Callable[[Arrangement, float], Vector]] = {
    "ring": _ring,
    "tree": _tree,
    "recursive doubling": _doubling,
    "Rabenseifner": _rabenseifner,
    "hierarchical": _hierarchical,
}


def _piecewise(arrangement: Arrangement, n: float, folds: bool = False) -> Vector:
    p = arrangement.ranks
    return _rounds(arrangement, p - 1, n / p, n * (p - 1) / p * folds)


def _halved(arrangement: Arrangement, n: float) -> Vector:
    """Count a way up or down a binomial tree in which each level carries half as much."""
    near, far = arrangement.levels
    p, inside = arrangement.ranks, min(arrangement.ranks, arrangement.per_host)
    above = n * (p - inside) / p
    return _counts(near, n * (p - 1) / p - above, far, above)


# The other operations, by the algorithms of the same literature and of collective.algorithms.
_OTHERS: Mapping[str, Callable[[Arrangement, float], Vector]] = {
    "send": lambda arrangement, n: _rounds(arrangement, 1, n),
    "broadcast": lambda arrangement, n: _climb(arrangement, n, False),
    "reduce": lambda arrangement, n: _climb(arrangement, n, True),
    "reduce_scatter": lambda arrangement, n: _piecewise(arrangement, n, True),
    "all_gather": lambda arrangement, n: _piecewise(arrangement, n),
    "all_to_all": lambda arrangement, n: _piecewise(arrangement, n),
    "scatter": _halved,
    "gather": _halved,
    "scan": _doubling,
    "barrier": lambda arrangement, n: _counts(arrangement.levels[0], 0, arrangement.levels[1], 0),
}


def operations() -> list[str]:
    """Return the names of the operations that the model covers."""
    return ["all_reduce", *_OTHERS]


def coefficients(op: str, nbytes: float, ranks: int, per_host: int, algorithm: str) -> Vector:
    """Return the counts of an operation, by which the model multiplies its prices.

    Args:
        op: one of :func:`operations`.
        nbytes: size of the array, as in :class:`Measured`.
        ranks: number of ranks.
        per_host: number of ranks on each host, with consecutive numbers.
        algorithm: for ``all_reduce``, one of :data:`ALGORITHMS`.

    Returns:
        ``[5]``: messages and bytes inside hosts, messages and bytes between hosts, and bytes
        folded, on the longest path.
    """
    if ranks < 2:
        return _counts()
    arrangement = Arrangement(ranks, per_host)
    return (
        ALGORITHMS[algorithm](arrangement, nbytes)
        if op == "all_reduce"
        else _OTHERS[op](arrangement, nbytes)
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Model fitted to measurements on one host.

    Attributes:
        algorithm: the algorithm that the model assumes for ``all_reduce``.
        link: speed of the connection between ranks of a host.
        gamma: seconds that folding a byte takes.
        separate: whether the measurements can tell ``gamma`` from ``beta``. If not, ``beta``
            includes the time of folding, and ``gamma`` is 0.
        errors: for each measurement, ``model / measured - 1``.
        r2: share of the variance of log(seconds) that the model explains.
        drawn: ``[draws, 3]``: alpha, beta, gamma of each bootstrap sample.
    """

    algorithm: str
    link: LinkSpeed
    gamma: float
    separate: bool
    errors: Vector
    r2: float
    drawn: Vector

    @property
    def typical(self) -> float:
        """The root mean square of the relative errors."""
        return float(np.sqrt(np.mean(self.errors**2)))

    @property
    def worst(self) -> float:
        """The largest relative error, with its sign."""
        return float(self.errors[np.argmax(np.abs(self.errors))])

    def seconds(self, counts: Vector, far: LinkSpeed | None = None) -> float:
        """Return the cost of ``counts`` from :func:`coefficients`, in seconds.

        ``far`` is the speed between hosts; None takes the speed inside a host.
        """
        return float(counts @ _prices(np.array([*self.link, self.gamma]), far))

    def interval(self, counts: Vector, far: LinkSpeed | None = None) -> tuple[float, float]:
        """Return the limits between which the cost lies with 90 % probability, if the model holds.

        The limits come from the residual bootstrap (B. Efron, R. Tibshirani, "An Introduction to
        the Bootstrap", 1993, chapter 9). They cover the uncertainty of the fit and the scatter of
        single measurements.
        """
        scatter = np.random.default_rng(1).choice(self.errors, len(self.drawn))
        drawn = np.array([counts @ _prices(one, far) for one in self.drawn]) * (1 - scatter)
        low, high = np.quantile(drawn, [0.05, 0.95])
        return max(0.0, float(low)), max(0.0, float(high))


def _prices(near: Vector, far: LinkSpeed | None) -> Vector:
    alpha, beta, gamma = near
    return np.array([alpha, beta, *(far or (alpha, beta)), gamma])


def fit(measured: Sequence[Measured], algorithm: str) -> Fit:
    """Fit alpha, beta and gamma, none of them negative, by least squares of relative errors.

    Args:
        measured: measurements on one host. The fit ignores operations that are not in
            :func:`operations`, single ranks, and measurements of 0 seconds.
        algorithm: the algorithm that the model assumes for ``all_reduce``.

    Raises:
        ValueError: fewer than three usable measurements, or all of one length.
    """
    known = set(operations())
    usable = [m for m in measured if m.op in known and m.ranks > 1 and m.seconds > 0]
    if len(usable) < 3 or len({m.bytes for m in usable}) < 2:
        raise ValueError(
            f"{len(usable)} usable measurements of {len({m.bytes for m in usable})} lengths; a "
            "fit needs at least three, of two or more lengths"
        )
    seconds = np.array([m.seconds for m in usable])
    counts = np.array([coefficients(m.op, m.bytes, m.ranks, m.ranks, algorithm) for m in usable])
    # Divide by the measured seconds, so that the target is 1 and small messages count as much as
    # large ones.
    rows = counts[:, [_ALPHA, _BETA, _GAMMA]] / seconds[:, None]
    separate = _independent(rows)
    columns = [0, 1, 2] if separate else [0, 1]

    def solved(wanted: Vector) -> Vector:
        solutions = np.zeros((len(wanted), 3))
        solutions[:, columns] = _non_negative(rows[:, columns], wanted)
        return solutions

    target = np.ones(len(usable))
    prices = solved(target[None])[0]
    errors = rows @ prices - 1
    spread = errors * np.sqrt(len(usable) / max(1, len(usable) - len(columns)))
    generator = np.random.default_rng(0)
    drawn = solved(target + errors - generator.choice(spread, (_DRAWS, len(spread))))
    logs = np.log(seconds)
    model = np.log(np.maximum(seconds * (errors + 1), 1e-12))
    varied = float(np.sum((logs - logs.mean()) ** 2))
    r2 = 1 - float(np.sum((model - logs) ** 2)) / varied if varied else 0.0
    alpha, beta, gamma = map(float, prices)
    return Fit(algorithm, LinkSpeed(alpha, beta), gamma, separate, errors, r2, drawn)


def _independent(rows: Vector) -> bool:
    """Tell whether the columns are linearly independent, within the accuracy of measurements."""
    lengths = np.linalg.norm(rows, axis=0)
    if not lengths.all():
        return False
    return bool(np.linalg.cond(rows / lengths) < 50)


def _non_negative(rows: Vector, targets: Vector) -> Vector:
    """Return, for each of ``targets``, the best x >= 0 for ``rows @ x = target``.

    There are few unknowns, so the function tries all choices of which unknowns are zero. The best
    solution solves the unconstrained problem of the other unknowns (C. Lawson, R. Hanson, "Solving
    Least Squares Problems", 1974, chapter 23).

    Args:
        rows: ``[m, n]``.
        targets: ``[k, m]``.

    Returns:
        ``[k, n]``.
    """
    width = rows.shape[1]
    best, least = np.zeros((len(targets), width)), np.sum(targets**2, axis=1)
    for chosen in range(1, 1 << width):
        columns = [i for i in range(width) if chosen >> i & 1]
        part = rows[:, columns]
        lengths = np.linalg.norm(part, axis=0)
        if not lengths.all():
            continue
        solution = targets @ np.linalg.pinv(part / lengths).T / lengths
        rest = np.sum((targets - solution @ part.T) ** 2, axis=1)
        better = (solution >= 0).all(axis=1) & (rest < least)
        best[better] = 0
        best[np.ix_(better, columns)] = solution[better]
        least = np.where(better, rest, least)
    return best
