"""Cartesian and graph topologies, and collectives between neighbours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import collective

from .collectives import Read, pickles
from .communicators import Comm, Intracomm
from .exceptions import CLASSES, TRANSLATED, MPIError
from .groups import PROC_NULL, UNDEFINED
from .handles import reader
from .info import INFO_NULL, Info
from .layouts import Piece
from .messages import equal, simple, vector, vector_of_types
from .operations import Operation
from .requests import forms

GRAPH, CART, DIST_GRAPH = 1, 2, 3
UNWEIGHTED, WEIGHTS_EMPTY = 10, 11


class _Topology(NamedTuple):
    """Neighbours of this rank, and how they come about.

    Attributes:
        kind: ``CART``, ``GRAPH`` or ``DIST_GRAPH``.
        sources, destinations: ranks; several edges to one rank are several entries.
        form: a grid; where each node's edges end in the list of edges, and that list; or weights.
    """

    kind: int
    sources: list[int]
    destinations: list[int]
    form: Any


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return a grid of ``nnodes`` ranks, as even as can be; given dimensions stay."""
    grid = [0] * dims if isinstance(dims, int) else [int(dim) for dim in dims]
    if nnodes > 0 and all(dim >= 0 for dim in grid):
        with contextlib.suppress(collective.InvalidArgumentError):
            ranks = SimpleNamespace(rank=0, size=nnodes)
            return list(collective.Grid[Any](ranks, [dim or None for dim in grid]).shape)
    raise MPIError(CLASSES["ERR_DIMS"], f"Compute_dims: {nnodes} ranks in {grid}")


def _gathering(read: Read) -> Any:
    def prepare(self: Topocomm, sendbuf: Any, recvbuf: Any) -> Operation:
        """Send a buffer to all neighbours, and put theirs together."""
        return self._moving_along([simple(sendbuf, False)] * self.outdegree, read, recvbuf)

    return forms(prepare)


def _exchanging(read: Read) -> Any:
    def prepare(self: Topocomm, sendbuf: Any, recvbuf: Any) -> Operation:
        """Exchange parts with all neighbours."""
        return self._moving_along(read(sendbuf, False, self.outdegree), read, recvbuf)

    return forms(prepare)


class Topocomm(Intracomm):
    """Communicator whose ranks have neighbours."""

    __slots__ = ()
    # Kind of the topologies that the class is for; None for all.
    _topology_kind: int | None = None

    def __new__(cls, comm: Comm | None = None) -> Any:
        """Return a handle of a communicator with such a topology."""
        if comm and isinstance(comm, Comm):
            kind = getattr(comm._inner.topology, "kind", None)
            if kind is None or cls._topology_kind not in (None, kind):
                raise TypeError(f"{cls.__name__}: the communicator has no such topology")
        return super().__new__(cls, comm)

    inedges = property(lambda self: list(self._live.topology.sources))
    outedges = property(lambda self: list(self._live.topology.destinations))
    inoutedges = property(lambda self: (self.inedges, self.outedges))
    indegree = property(lambda self: len(self.inedges))
    outdegree = property(lambda self: len(self.outedges))
    degrees = property(lambda self: (self.indegree, self.outdegree))

    def _departing(self, items: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return ranks with the items for them, in the order in which these must be sent."""
        edges = list(zip(self.outedges, items))
        if self._live.topology.kind == CART:
            # A message to the upper neighbour arrives from its lower one. If both are one rank,
            # that rank receives first from its lower neighbour.
            edges = [edges[i ^ 1] for i in range(len(edges))]
        return [edge for edge in edges if edge[0] != PROC_NULL]

    def _moving_along(self, sends: Sequence[Piece], read: Read, recvbuf: Any) -> Operation:
        """Return what sends a piece to each neighbour, and receives theirs into a buffer."""
        receives = zip(self.inedges, read(recvbuf, True, self.indegree))
        receives_of_ranks = [edge for edge in receives if edge[0] != PROC_NULL]
        return self._moving(self._departing(sends), receives_of_ranks)

    Neighbor_allgather, Ineighbor_allgather, Neighbor_allgather_init = _gathering(equal)
    Neighbor_allgatherv, Ineighbor_allgatherv, Neighbor_allgatherv_init = _gathering(vector)
    Neighbor_alltoall, Ineighbor_alltoall, Neighbor_alltoall_init = _exchanging(equal)
    Neighbor_alltoallv, Ineighbor_alltoallv, Neighbor_alltoallv_init = _exchanging(vector)
    Neighbor_alltoallw, Ineighbor_alltoallw, Neighbor_alltoallw_init = _exchanging(vector_of_types)

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send an object to all neighbours, and return theirs."""
        return self.neighbor_alltoall([sendobj] * self.outdegree)

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send an object to each neighbour, and return theirs; None for ``PROC_NULL``."""
        sends, sources = self._departing(pickles(sendobj, self.outdegree)), self.inedges
        received = iter(self._swap(sends, [rank for rank in sources if rank != PROC_NULL]))
        return [None if source == PROC_NULL else next(received) for source in sources]


class Cartcomm(Topocomm):
    """Communicator whose ranks are a grid."""

    __slots__ = ()
    _topology_kind = CART

    Get_dim, dim = reader(lambda c: len(c.topology.form.shape), "the number of dimensions")
    Get_topo, topo = reader(
        lambda c: tuple(
            list(map(int, values))
            for values in (c.topology.form.shape, c.topology.form.periodic, c.topology.form.coords)
        ),
        "dimensions, whether each is periodic, and this rank's coordinates",
    )
    ndim = dim
    dims = property(lambda self: self.topo[0])
    periods = property(lambda self: self.topo[1])
    coords = property(lambda self: self.topo[2])

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at coordinates."""
        with TRANSLATED:
            rank = int(self._live.topology.form.rank_at(list(coords)))
        if rank == collective.NULL:
            raise MPIError(CLASSES["ERR_ARG"], f"coordinates {coords} of {self.dims}")
        return rank

    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        with TRANSLATED:
            return list(self._live.topology.form.coords_of(rank))

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return source and destination of a shift along a dimension."""
        if not 0 <= direction < self.dim:
            raise MPIError(CLASSES["ERR_DIMS"])
        source, target = _neighbours(self._live.topology.form, direction, int(disp))
        return source, target

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the communicator of the ranks that differ in some dimensions only."""
        dims, periods, coords = self.topo
        color = 0
        for dim, coord, remains in zip(dims, coords, remain_dims):
            color = color if remains else color * dim + coord
        part = self.Split(color, self.rank)
        kept = [i for i, remains in enumerate(remain_dims) if remains]
        part._inner.kind = Cartcomm
        periodic = [bool(periods[i]) for i in kept]
        part._inner.topology = _cart(part._inner, [dims[i] for i in kept], periodic)
        return Cartcomm._of(part._inner)


def _neighbours(grid: collective.Grid[Any], axis: int, distance: int = 1) -> list[int]:
    """Return the ranks before and behind this one along an axis."""
    ranks = grid.neighbours(axis, distance)
    return [PROC_NULL if rank == collective.NULL else rank for rank in ranks]


def _cart(context: Any, dims: list[int], periods: list[bool]) -> _Topology:
    grid = collective.Grid[Any](context, dims, periods)
    ranks = [rank for axis in range(len(dims)) for rank in _neighbours(grid, axis)]
    return _Topology(CART, ranks, ranks, grid)


class Graphcomm(Topocomm):
    """Communicator with a graph that every rank knows."""

    __slots__ = ()
    _topology_kind = GRAPH

    Get_topo, topo = reader(
        lambda context: tuple(map(list, context.topology.form)),
        "where each node's edges end in the list of edges, and that list",
    )
    Get_dims, dims = reader(
        lambda context: tuple(map(len, context.topology.form)), "the numbers of nodes and edges"
    )
    nnodes = property(lambda self: self.dims[0])
    nedges = property(lambda self: self.dims[1])
    index = property(lambda self: self.topo[0])
    edges = property(lambda self: self.topo[1])

    def Get_neighbors(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        index, edges = self.topo
        return _edges_of(index, edges, rank)

    def Get_neighbors_count(self, rank: int) -> int:
        """Return the number of neighbours of a rank."""
        return len(self.Get_neighbors(rank))

    neighbors, nneighbors = Topocomm.inedges, Topocomm.indegree


def _edges_of(index: list[int], edges: list[int], rank: int) -> list[int]:
    return edges[index[rank - 1] if rank else 0 : index[rank]]


class Distgraphcomm(Topocomm):
    """Communicator with a graph of which every rank knows its own edges."""

    __slots__ = ()
    _topology_kind = DIST_GRAPH

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return the numbers of sources and destinations, and whether there are weights."""
        return self.indegree, self.outdegree, self._live.topology.form is not None

    def Get_dist_neighbors(
        self,
    ) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        """Return sources, destinations and their weights."""
        return self.inedges, self.outedges, self._live.topology.form


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
    periodic = [bool(period) for period in periods]
    return _with(self, size, lambda context: _cart(context, grid, periodic), Cartcomm)


def _with(comm: Any, size: int, topology: Callable[[Any], Any], kind: Any) -> Any:
    """Return a communicator of the first ranks with the topology that its context gets."""
    _, number = comm._agree()
    part = comm._child(range(size), number, kind)
    if part:
        part._inner.topology = topology(part._inner)
    return part


def Create_graph(
    self: Any, index: Sequence[int], edges: Sequence[int], reorder: bool = False
) -> Any:
    """Return a communicator with a graph that every rank knows."""
    ends, targets = [int(i) for i in index], [int(edge) for edge in edges]
    if ends and ends[0] == 0 and ends[-1] == len(targets):
        del ends[0]  # where edges begin, as in adjacency arrays
    if len(ends) > self.size:
        raise MPIError(CLASSES["ERR_ARG"], f"Create_graph: {len(index)} nodes")

    def graph(context: Any) -> _Topology:
        neighbours = _edges_of(ends, targets, context.rank)
        return _Topology(GRAPH, neighbours, neighbours, (ends, targets))

    return _with(self, len(ends), graph, Graphcomm)


def Create_dist_graph_adjacent(
    self: Any, sources: Sequence[int], destinations: Sequence[int], sourceweights: Any = None,
    destweights: Any = None, info: Info = INFO_NULL, reorder: bool = False,
) -> Any:  # fmt: skip
    """Return a communicator with a graph of which each rank gives its edges of both sides."""
    sources = [int(rank) for rank in sources or ()]
    destinations = [int(rank) for rank in destinations or ()]
    weights = _weights(sourceweights, len(sources)), _weights(destweights, len(destinations))
    weighted = None if None in weights else weights
    topology = _Topology(DIST_GRAPH, sources, destinations, weighted)
    return _with(self, self.size, lambda _: topology, Distgraphcomm)


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
    topology = _Topology(DIST_GRAPH, [s for s, _ in mine], [t for t, _ in theirs], both)
    return _with(self, self.size, lambda _: topology, Distgraphcomm)


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
