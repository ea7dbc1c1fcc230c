"""Cartesian and graph topologies, and collectives between neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from . import communicators
from .communicators import COMM_NULL, Comm, Intracomm, _between, _modes
from .exceptions import CLASSES, MPIError
from .groups import PROC_NULL, UNDEFINED
from .info import INFO_NULL, Info
from .messages import Piece, blocks_of, simple, vector, vector_of_types

__all__ = ["Cartcomm", "Compute_dims", "Distgraphcomm", "Graphcomm", "Topocomm"]

GRAPH, CART, DIST_GRAPH = 1, 2, 3
UNWEIGHTED, WEIGHTS_EMPTY = 10, 11


class _Cart(NamedTuple):
    dims: list[int]
    periods: list[bool]
    kind: int = CART


class _Graph(NamedTuple):
    ends: list[int]
    edges: list[int]
    kind: int = GRAPH


class _Distributed(NamedTuple):
    sources: list[int]
    destinations: list[int]
    weights: tuple[list[int], list[int]] | None
    kind: int = DIST_GRAPH


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return a grid of ``nnodes`` ranks, as even as can be; given dimensions stay."""
    grid = [0] * dims if isinstance(dims, int) else [int(dim) for dim in dims]
    fixed = prod(dim for dim in grid if dim)
    if any(dim < 0 for dim in grid) or nnodes < 1 or nnodes % fixed:
        raise MPIError(CLASSES["ERR_DIMS"], f"Compute_dims: {nnodes} ranks in {grid}")
    free = [i for i, dim in enumerate(grid) if not dim]
    if not free and fixed != nnodes:
        raise MPIError(CLASSES["ERR_DIMS"], f"Compute_dims: {nnodes} ranks in {grid}")
    sizes, rest, factor = [1] * len(free), nnodes // fixed, 2
    factors = []
    while rest > 1:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor = factor + 1 if factor * factor <= rest else max(rest, factor + 1)
    for factor in reversed(factors):
        sizes[sizes.index(min(sizes))] *= factor
    for i, size in zip(free, sorted(sizes, reverse=True)):
        grid[i] = size
    return grid


class Topocomm(Intracomm):
    """Communicator whose ranks have neighbours."""

    __slots__ = ()

    def __new__(cls, comm: Comm | None = None) -> Any:
        """Return a handle of a communicator with such a topology."""
        if comm is not None and comm and isinstance(comm, Comm):
            kind = getattr(cls, "_topology", None)
            topology = comm._inner.topology
            if topology is None or (kind is not None and not isinstance(topology, kind)):
                raise TypeError(f"{cls.__name__}: the communicator has no such topology")
        return super().__new__(cls, comm)

    def _sides(self) -> tuple[list[int], list[int]]:
        """Return sources and destinations; several edges to one rank are several entries."""
        raise NotImplementedError

    degrees = property(lambda self: (len(self._sides()[0]), len(self._sides()[1])))
    indegree = property(lambda self: len(self._sides()[0]))
    outdegree = property(lambda self: len(self._sides()[1]))
    inoutedges = property(lambda self: self._sides())
    inedges = property(lambda self: self._sides()[0])
    outedges = property(lambda self: self._sides()[1])

    def _arrivals(self, count: int) -> Sequence[int]:
        return range(count)

    def _neighbours(self, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> Any:
        sources, targets = self._sides()
        order = [i for i in self._arrivals(len(sources)) if sources[i] != PROC_NULL]
        sent = [i for i, target in enumerate(targets) if target != PROC_NULL]
        return _between(
            [outgoing[i] for i in sent], [targets[i] for i in sent],
            [incoming[i] for i in order], [sources[i] for i in order],
        )  # fmt: skip

    def _Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Send a buffer to all neighbours, and put theirs together."""
        n = self.indegree
        incoming = blocks_of(simple(recvbuf, True, n), n)
        return self._neighbours([simple(sendbuf, False)] * self.outdegree, incoming)

    def _Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Send a buffer to all neighbours, and put theirs of any length together."""
        incoming = vector(recvbuf, True, self.indegree)
        return self._neighbours([simple(sendbuf, False)] * self.outdegree, incoming)

    def _Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Exchange equal parts with all neighbours."""
        n, m = self.degrees
        outgoing = blocks_of(simple(sendbuf, False, m), m)
        return self._neighbours(outgoing, blocks_of(simple(recvbuf, True, n), n))

    def _Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Exchange parts of any length with all neighbours."""
        n, m = self.degrees
        return self._neighbours(vector(sendbuf, False, m), vector(recvbuf, True, n))

    def _Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Any:
        """Exchange parts with all neighbours, with a datatype for each."""
        n, m = self.degrees
        outgoing = vector_of_types(sendbuf, False, m)
        return self._neighbours(outgoing, vector_of_types(recvbuf, True, n))

    Neighbor_allgather, Ineighbor_allgather, Neighbor_allgather_init = _modes(_Neighbor_allgather)
    Neighbor_allgatherv, Ineighbor_allgatherv, Neighbor_allgatherv_init = _modes(
        _Neighbor_allgatherv
    )
    Neighbor_alltoall, Ineighbor_alltoall, Neighbor_alltoall_init = _modes(_Neighbor_alltoall)
    Neighbor_alltoallv, Ineighbor_alltoallv, Neighbor_alltoallv_init = _modes(_Neighbor_alltoallv)
    Neighbor_alltoallw, Ineighbor_alltoallw, Neighbor_alltoallw_init = _modes(_Neighbor_alltoallw)

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send an object to all neighbours, and return theirs."""
        return self.neighbor_alltoall([sendobj] * self.outdegree)

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send an object to each neighbour, and return theirs."""
        sources, targets = self._sides()
        objects = communicators._as_many(sendobj, len(targets))
        order = [i for i in self._arrivals(len(sources)) if sources[i] != PROC_NULL]
        sent = [i for i, target in enumerate(targets) if target != PROC_NULL]
        received = self._swap(
            [objects[i] for i in sent], [sources[i] for i in order], [targets[i] for i in sent]
        )
        result = [None] * len(sources)
        for i, value in zip(order, received):
            result[i] = value
        return result


class Cartcomm(Topocomm):
    """Communicator whose ranks are a grid."""

    __slots__ = ()
    _topology = _Cart

    def Get_dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._live.topology.dims)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return dimensions, whether each is periodic, and this rank's coordinates."""
        topology = self._live.topology
        periods = [int(period) for period in topology.periods]
        return list(topology.dims), periods, self.Get_coords(self.rank)

    dim = ndim = property(Get_dim)
    topo = property(Get_topo)
    dims = property(lambda self: self.Get_topo()[0])
    periods = property(lambda self: self.Get_topo()[1])
    coords = property(lambda self: self.Get_topo()[2])

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at coordinates."""
        dims, periods = self._live.topology[:2]
        rank = 0
        for coord, dim, period in zip(coords, dims, periods):
            if not period and not 0 <= coord < dim:
                raise MPIError(CLASSES["ERR_ARG"], f"coordinate {coord} of {dim}")
            rank = rank * dim + coord % dim
        return rank

    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        if not 0 <= rank < self.size:
            raise MPIError(CLASSES["ERR_RANK"])
        coords = []
        for dim in reversed(self._live.topology.dims):
            rank, coord = divmod(rank, dim)
            coords.append(coord)
        return coords[::-1]

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return source and destination of a shift along a dimension."""
        if not 0 <= direction < self.dim:
            raise MPIError(CLASSES["ERR_DIMS"])
        return self._moved(direction, -disp), self._moved(direction, disp)

    def _moved(self, direction: int, disp: int) -> int:
        coords = self.Get_coords(self.rank)
        coords[direction] += disp
        dims, periods = self._live.topology[:2]
        if not periods[direction] and not 0 <= coords[direction] < dims[direction]:
            return PROC_NULL
        return self.Get_cart_rank(coords)

    def _sides(self) -> tuple[list[int], list[int]]:
        ranks = [rank for direction in range(self.dim) for rank in self.Shift(direction, 1)]
        return ranks, list(ranks)

    def _arrivals(self, count: int) -> Sequence[int]:
        # A message to the lower neighbour arrives from its upper one. If both are one rank, its
        # first message is to its lower neighbour.
        return [i ^ 1 for i in range(count)]

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the communicator of the ranks that differ in some dimensions only."""
        dims, periods = self._live.topology[:2]
        coords = self.coords
        color = 0
        for dim, coord, remains in zip(dims, coords, remain_dims):
            color = color if remains else color * dim + coord
        part = self.Split(color, self.rank)
        kept = [i for i, remains in enumerate(remain_dims) if remains]
        part._inner.kind = Cartcomm
        part._inner.topology = _Cart([dims[i] for i in kept], [periods[i] for i in kept])
        return Cartcomm._of(part._inner)


class Graphcomm(Topocomm):
    """Communicator with a graph that every rank knows."""

    __slots__ = ()
    _topology = _Graph

    def Get_dims(self) -> tuple[int, int]:
        """Return the numbers of nodes and edges."""
        topology = self._live.topology
        return len(topology.ends), len(topology.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Return where each node's edges end in the list of edges, and that list."""
        topology = self._live.topology
        return list(topology.ends), list(topology.edges)

    dims = property(Get_dims)
    topo = property(Get_topo)
    nnodes = property(lambda self: self.Get_dims()[0])
    nedges = property(lambda self: self.Get_dims()[1])
    index = property(lambda self: self.Get_topo()[0])
    edges = property(lambda self: self.Get_topo()[1])

    def Get_neighbors(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        index, edges = self._live.topology[:2]
        return list(edges[index[rank - 1] if rank else 0 : index[rank]])

    def Get_neighbors_count(self, rank: int) -> int:
        """Return the number of neighbours of a rank."""
        return len(self.Get_neighbors(rank))

    neighbors = property(lambda self: self.Get_neighbors(self.rank))
    nneighbors = property(lambda self: len(self.Get_neighbors(self.rank)))

    def _sides(self) -> tuple[list[int], list[int]]:
        return self.neighbors, self.neighbors


class Distgraphcomm(Topocomm):
    """Communicator with a graph of which every rank knows its own edges."""

    __slots__ = ()
    _topology = _Distributed

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return the numbers of sources and destinations, and whether there are weights."""
        topology = self._live.topology
        return len(topology.sources), len(topology.destinations), topology.weights is not None

    def Get_dist_neighbors(
        self,
    ) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        """Return sources, destinations and their weights."""
        topology = self._live.topology
        return list(topology.sources), list(topology.destinations), topology.weights

    def _sides(self) -> tuple[list[int], list[int]]:
        topology = self._live.topology
        return list(topology.sources), list(topology.destinations)


def Create_cart(self: Any, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Any:
    """Return a communicator whose ranks are a grid."""
    grid: list[int] = [dims] if isinstance(dims, int) else [int(dim) for dim in dims]
    if periods is None or isinstance(periods, (bool, int)):
        periods = [bool(periods)] * len(grid)
    if len(periods) != len(grid):
        raise ValueError(f"expecting {len(grid)} items, got {len(periods)}")
    size = prod(grid)
    if any(dim < 0 for dim in grid) or size > self.size:
        raise MPIError(CLASSES["ERR_DIMS"], f"Create_cart: {grid} of {self.size} ranks")
    topology = _Cart(grid, [bool(period) for period in periods])
    return _with(self, size, topology, Cartcomm)


def _with(comm: Any, size: int, topology: Any, kind: Any) -> Any:
    """Return a communicator of the first ranks with a topology."""
    _, number = comm._agree()
    made = comm._child(range(size), number, kind)
    if made:
        made._inner.topology = topology
    return made if made else COMM_NULL


def Create_graph(
    self: Any, index: Sequence[int], edges: Sequence[int], reorder: bool = False
) -> Any:
    """Return a communicator with a graph that every rank knows."""
    ends, targets = [int(i) for i in index], [int(edge) for edge in edges]
    if ends and ends[0] == 0 and ends[-1] == len(targets):
        del ends[0]  # where edges begin, as in adjacency arrays
    topology = _Graph(ends, targets)
    if len(topology.ends) > self.size:
        raise MPIError(CLASSES["ERR_ARG"], f"Create_graph: {len(index)} nodes")
    return _with(self, len(topology.ends), topology, Graphcomm)


def Create_dist_graph_adjacent(
    self: Any, sources: Sequence[int], destinations: Sequence[int], sourceweights: Any = None,
    destweights: Any = None, info: Info = INFO_NULL, reorder: bool = False,
) -> Any:  # fmt: skip
    """Return a communicator with a graph of which each rank gives its edges of both sides."""
    sources = [int(rank) for rank in sources or ()]
    destinations = [int(rank) for rank in destinations or ()]
    weights = _weights(sourceweights, len(sources)), _weights(destweights, len(destinations))
    weighted = None if None in weights else weights
    topology = _Distributed(sources, destinations, weighted)  # type: ignore[arg-type]
    return _with(self, self.size, topology, Distgraphcomm)


def _weights(weights: Any, count: int) -> list[int] | None:
    if weights is None or (isinstance(weights, int) and weights == UNWEIGHTED):
        return None
    if isinstance(weights, int) and weights == WEIGHTS_EMPTY:
        weights = []
    values = [int(weight) for weight in weights]
    if len(values) != count:
        raise ValueError(f"expecting {count} items, got {len(values)}")
    return values


def Create_dist_graph(
    self: Any, sources: Sequence[int], degrees: Sequence[int], destinations: Sequence[int],
    weights: Any = None, info: Info = INFO_NULL, reorder: bool = False,
) -> Any:  # fmt: skip
    """Return a communicator with a graph of which each rank gives some edges."""
    numbers = [1] * len(sources) if degrees is None else [int(n) for n in degrees]
    values = _weights(weights, len(destinations))
    given = values is not None
    edges, at = [], 0
    for source, degree in zip(sources, numbers):
        for target in destinations[at : at + degree]:
            edges.append((int(source), int(target), values[at] if values else 0))
            at += 1
    parts = self.allgather((edges, given))
    everywhere = [edge for part, _ in parts for edge in part]
    weighted = all(flag for _, flag in parts)
    mine = [(s, w) for s, t, w in everywhere if t == self.rank]
    theirs = [(t, w) for s, t, w in everywhere if s == self.rank]
    both = ([w for _, w in mine], [w for _, w in theirs]) if weighted else None
    topology = _Distributed([s for s, _ in mine], [t for t, _ in theirs], both)
    return _with(self, self.size, topology, Distgraphcomm)


def Cart_map(self: Any, dims: Sequence[int], periods: Any = None) -> int:
    """Return this rank's number in a grid, or ``UNDEFINED``."""
    size = prod([dims] if isinstance(dims, int) else dims)
    return self.rank if self.rank < size else UNDEFINED


def Graph_map(self: Any, index: Sequence[int], edges: Sequence[int]) -> int:
    """Return this rank's number in a graph, or ``UNDEFINED``."""
    ends = [int(i) for i in index]
    nodes = len(ends) - (ends[:1] == [0] and ends[-1] == len(edges))
    return self.rank if self.rank < nodes else UNDEFINED


for _function in (
    Create_cart, Create_graph, Create_dist_graph_adjacent, Create_dist_graph, Cart_map, Graph_map,
):  # fmt: skip
    setattr(Intracomm, _function.__name__, _function)
