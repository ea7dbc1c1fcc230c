"""Modules and tensors copied to several devices of a process, and the sums of their gradients."""

from __future__ import annotations

import threading
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from collective.adapters.torch import (  # noqa: E402
    broadcast_coalesced,
    reduce_add_coalesced,
    replicate,
    replicating,
)
from collective.errors import (  # noqa: E402
    DeviceError,
    InvalidArgumentError,
    ShapeError,
    UnsupportedError,
)

CPUS = ["cpu", "cpu"]


def sparse(*values: float) -> torch.Tensor:
    indices = torch.arange(len(values))[None]
    return torch.sparse_coo_tensor(indices, torch.tensor(values), (5,), check_invariants=True)


def assorted() -> list[torch.Tensor]:
    return [
        torch.randn(3, 4),
        torch.arange(5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(1, 3).expand(4, 3),
        torch.tensor(2.5),
        torch.empty(0, 3),
        sparse(1.0, 2.0),
        torch.randn(8).bfloat16(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse_csr(),
        sparse(3.0).coalesce(),
        torch.ones(2, dtype=torch.bool),
    ]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


@pytest.mark.parametrize("buffer_bytes", [1, 64, 10 << 20])
def test_copies_keep_values_strides_and_layouts(buffer_bytes):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR")
        tensors = assorted()
    copies = replicating._copied(tensors, torch.device("cpu"), buffer_bytes)
    for tensor, copied in zip(tensors, copies):
        assert copied.dtype == tensor.dtype
        assert copied.layout == tensor.layout
        assert torch.equal(dense(copied), dense(tensor))
        if tensor.layout is torch.strided:
            assert copied.numel() == 0 or copied.data_ptr() != tensor.data_ptr()
            if tensor.stride()[:1] != (0,):
                assert copied.stride() == tensor.stride()
    assert copies[7].is_coalesced() is False
    assert copies[11].is_coalesced() is True


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["float32", "int8"]), st.integers(0, 40)), max_size=12),
    st.integers(1, 100),
)
def test_buckets_hold_each_tensor_once_by_dtype_within_limit(shapes, limit):
    tensors = [torch.zeros(n, dtype=getattr(torch, name)) for name, n in shapes]
    buckets = replicating._buckets(tensors, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    for bucket in buckets:
        assert bucket
        assert len({tensors[index].dtype for index in bucket}) == 1
        size = sum(tensors[index].nbytes for index in bucket)
        assert size <= limit or len(bucket) == 1


def test_copies_of_bucket_move_as_single_tensor(monkeypatch):
    moved = []
    before = replicating.move
    monkeypatch.setattr(replicating, "move", lambda x, to: moved.append(x.shape) or before(x, to))
    copies = replicating._copied([torch.ones(2, 3), torch.ones(4)], torch.device("meta"), 1000)
    assert moved == [(10,)]
    assert [(c.device.type, c.shape) for c in copies] == [("meta", (2, 3)), ("meta", (4,))]


def test_copies_of_bucket_have_separate_version_counters():
    weight = torch.ones(2, requires_grad=True)
    first, second = replicating._copied([torch.ones(2)] * 2, torch.device("cpu"), 1000)
    saved = (first * weight).sum()
    second.add_(1)
    saved.backward()
    assert weight.grad.tolist() == [1, 1]


def test_broadcast_coalesced_shares_tensors_on_same_device():
    tensors = [torch.ones(2), sparse(1.0), torch.ones(3, requires_grad=True)]
    rows = broadcast_coalesced(tensors, ["cpu", "meta", "cpu"])
    for row in (rows[0], rows[2]):
        assert row[0].data_ptr() == tensors[0].data_ptr()
        assert row[1]._values().data_ptr() == tensors[1]._values().data_ptr()
        assert row[2].data_ptr() == tensors[2].data_ptr()
        assert [t.requires_grad for t in row] == [False, False, True]
    assert {tensor.device.type for tensor in rows[1]} == {"meta"}
    assert broadcast_coalesced([], CPUS) == [[], []]


@pytest.mark.parametrize("buffer_bytes", [1, 1000])
def test_broadcast_coalesced_gradient_is_sum(buffer_bytes):
    xs = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (2, 3)]

    def run(*xs):
        rows = broadcast_coalesced(xs, ["cpu"] * 3, buffer_bytes)
        return tuple((t * t * (i + 1)).sum() for i, row in enumerate(rows) for t in row)

    assert gradcheck(run, xs)
    assert gradgradcheck(run, xs)
    sum(run(*xs)).backward()
    assert all(torch.allclose(x.grad, 12 * x) for x in xs)


def test_broadcast_coalesced_skips_copies_without_gradient():
    used, partly, unused, frozen = (torch.ones(2, requires_grad=i < 3) for i in range(4))
    first, second = broadcast_coalesced([used, partly, unused, frozen], CPUS)
    (first[0] + 2 * second[0] + 5 * second[1]).sum().backward()
    assert used.grad.tolist() == [3, 3]
    assert partly.grad.tolist() == [5, 5]
    assert unused.grad is None
    assert not first[3].requires_grad


def test_reduce_add_coalesced_sums_into_new_memory():
    rows = [[torch.full((2,), float(i)), sparse(float(i))] for i in range(4)]
    total, coalesced = reduce_add_coalesced(rows)
    assert total.tolist() == [6, 6]
    assert coalesced.is_sparse
    assert coalesced.to_dense().tolist() == [6, 0, 0, 0, 0]
    assert [row[0].tolist() for row in rows] == [[i, i] for i in range(4)]
    (alone,) = reduce_add_coalesced([[rows[1][0]]])
    assert alone.tolist() == [1, 1]
    assert alone.data_ptr() != rows[1][0].data_ptr()
    assert reduce_add_coalesced([[], []]) == []
    assert reduce_add_coalesced(rows, "meta")[0].device.type == "meta"


@pytest.mark.parametrize("order", [(0, 1, 1), (1, 0, 0), (1, 1, 0), (0, 0, 1)], ids=str)
def test_reduce_add_coalesced_mixes_sparse_and_dense(order):
    kinds = [torch.ones(5), sparse(1.0)]
    (total,) = reduce_add_coalesced([[kinds[kind]] for kind in order])
    expected = sum(dense(kinds[kind]) for kind in order)
    assert torch.equal(total, expected)


def test_reduce_add_coalesced_gradient_reaches_each_input():
    xs = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(4)]

    def run(a, b, c, d):
        return tuple(total**2 for total in reduce_add_coalesced([[a, b], [c, d]]))

    assert gradcheck(run, xs)
    assert gradgradcheck(run, xs)


def test_coalesced_calls_with_bad_arguments_raise():
    with pytest.raises(DeviceError, match="cpu and meta"):
        broadcast_coalesced([torch.ones(1), torch.ones(1, device="meta")], CPUS)
    with pytest.raises(InvalidArgumentError, match="buffer_bytes: 0"):
        broadcast_coalesced([torch.ones(1)], CPUS, 0)
    with pytest.raises(ShapeError, match=r"\[1, 2\] tensors"):
        reduce_add_coalesced([[torch.ones(1)], [torch.ones(1)] * 2])
    with pytest.raises(ShapeError, match=r"\(1,\), \(2,\)"):
        reduce_add_coalesced([[torch.ones(1)], [torch.ones(2)]])
    with pytest.raises(InvalidArgumentError, match="no lists"):
        reduce_add_coalesced([])


def test_broadcast_coalesced_detects_in_place_change_before_backward():
    weight = torch.ones(2, requires_grad=True)
    loss = sum((row[0] ** 2).sum() for row in broadcast_coalesced([weight], CPUS))
    with torch.no_grad():
        weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Shared(nn.Module):
    """A module that shares a weight, a layer and a list, and keeps a bound method."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.first
        self.parts = {"layers": [self.first, self.second], "owner": self}
        self.parts["self"] = self.parts  # a cycle
        self.kept = self.method
        self.vocabulary = [self.first] * 1001  # so long that it counts as data and is not searched
        self.register_buffer("none", None)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def method(self):
        return self.first.weight


def test_replicas_keep_sharing_of_module():
    module = Shared()
    for replica in replicate(module, CPUS):
        assert type(replica) is Shared
        assert replica.first is replica.again is replica.parts["layers"][0]
        assert replica.first is not module.first
        assert replica.first.weight is replica.second.weight is replica.kept()
        assert replica.parts["owner"] is replica
        assert replica.vocabulary is module.vocabulary
        assert replica.none is None
        assert [n for n, _ in replica.named_parameters()] == [
            n for n, _ in module.named_parameters()
        ]
        assert list(replica.state_dict()) == list(module.state_dict())
    assert module.parts["layers"][0] is module.first


def test_replica_gradients_reach_parameters_of_module():
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    replicas = replicate(module, CPUS)
    for replica in replicas:
        assert not replica.weight.is_leaf
        assert not replica.bias.requires_grad
        assert replica.weight.data_ptr() == module.weight.data_ptr()
    sum(replica(torch.ones(1, 2)) for replica in replicas).sum().backward()
    assert module.weight.grad.tolist() == [[2, 2]]


@pytest.mark.parametrize("how", ["detach", "no_grad", "inference"])
def test_replicas_without_gradients_are_detached(how):
    module = nn.BatchNorm1d(3)
    mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(how)
    with mode() if mode else torch.enable_grad():
        replicas = replicate(module, CPUS, detach=how == "detach")
        for replica in replicas:
            assert replica.weight.grad_fn is None
            assert not replica.weight.requires_grad
            assert replica.weight.data_ptr() == module.weight.data_ptr()
            replica(torch.randn(4, 3))


def test_replicas_after_first_have_copies_of_buffers():
    module = nn.BatchNorm1d(3)
    first, second, third = replicate(module, ["cpu"] * 3)
    for name, buffer in module.named_buffers():
        assert getattr(first, name) is buffer
        copies = [getattr(second, name), getattr(third, name)]
        assert len({t.data_ptr() for t in [buffer, *copies]}) == 3
        assert all(torch.equal(copied, buffer) for copied in copies)
    away, home = replicate(module, ["meta", "cpu"])
    assert away.running_mean.is_meta
    assert home.running_mean is module.running_mean


def test_replicas_keep_sparse_and_trainable_buffers():
    module = nn.Module()
    module.register_buffer("sparse", sparse(1.0, 2.0))
    module.register_buffer("learnt", torch.ones(2, requires_grad=True))
    first, second = replicate(module, CPUS)
    assert first.sparse is module.sparse
    assert torch.equal(second.sparse.to_dense(), module.sparse.to_dense())
    (first.learnt + 2 * second.learnt).sum().backward()
    assert module.learnt.grad.tolist() == [3, 3]


def test_replica_registrations_do_not_reach_module():
    module = nn.Sequential(nn.Linear(2, 2))
    seen = []
    module[0].register_forward_hook(lambda part, *_: seen.append(part))
    first, second = replicate(module, CPUS)
    first[0].register_forward_hook(lambda *_: seen.append("extra"))
    first[0].note = 1
    first[0].register_buffer("more", torch.ones(1))
    for part in (first, second, module):
        part(torch.ones(1, 2))
    assert seen == [first[0], "extra", second[0], module[0]]
    assert not hasattr(module[0], "note")
    assert list(module.state_dict()) == ["0.weight", "0.bias"]


class Lists(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(1))})

    def forward(self, x):
        return x * sum(self.many) * self.named["a"]


def test_replicas_support_parameter_lists_and_dicts_of_any_length():
    module = Lists(1200)  # more entries than the search accepts in plain lists
    replicas = replicate(module, CPUS)
    assert [len(replica.many) for replica in replicas] == [1200] * 2
    sum(replica(torch.ones(1)) for replica in replicas).backward()
    assert {p.grad.item() for p in module.many} == {2}
    assert module.named["a"].grad.item() == 2400


MODULES = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)).eval(),
    "lstm": lambda: nn.LSTM(4, 4, 2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_replica_outputs_and_gradients_equal_module(name):
    torch.manual_seed(1)
    module = MODULES[name]()
    x = torch.randn(3, 2, 4)

    def run(part):
        out = part(x)
        return out[0] if isinstance(out, tuple) else out

    run(module).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    outs = [run(replica) for replica in replicate(module, CPUS)]
    assert torch.allclose(outs[0], run(module), atol=1e-6)
    sum(out.square().sum() for out in outs).backward()
    for parameter, grad in zip(module.parameters(), expected):
        assert torch.allclose(parameter.grad, 2 * grad, rtol=1e-4, atol=1e-5)


def test_replica_sparse_gradients_stay_sparse():
    module = nn.Embedding(5, 2, sparse=True)
    first, second = replicate(module, CPUS)
    (first(torch.tensor([0, 1])).sum() + second(torch.tensor([1])).sum()).backward()
    assert module.weight.grad.is_sparse
    assert module.weight.grad.to_dense()[:, 0].tolist() == [1, 2, 0, 0, 0]


def test_replica_in_place_parameter_change_reaches_module():
    module = nn.Embedding(5, 2, max_norm=1.0)
    nn.init.ones_(module.weight)
    for number, replica in enumerate(replicate(module, CPUS)):
        replica(torch.tensor([number])).sum().backward()
    assert module.weight.norm(dim=1).tolist() == pytest.approx([1, 1, 2**0.5, 2**0.5, 2**0.5])
    assert module.weight.grad[:, 0].tolist() == [1, 1, 0, 0, 0]


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
def test_replicate_of_unsupported_module_raises():
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(UnsupportedError, match=r"\(0\) is a ScriptModule.*before it is scripted"):
        replicate(nn.Sequential(scripted), CPUS)
    compiled = nn.Linear(2, 2)
    compiled._compiled_call_impl = threading.current_thread  # module.compile() sets this attribute
    with pytest.raises(UnsupportedError, match=r"Linear \(the module itself\) is compiled"):
        replicate(compiled, CPUS)
    with pytest.raises(UnsupportedError, match=r"OptimizedModule \(0\) is compiled"):
        replicate(nn.Sequential(torch.compile(nn.Linear(2, 2))), CPUS)
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight' is not initialized"):
        replicate(nn.Sequential(nn.LazyLinear(2)), CPUS)
    with pytest.raises(DeviceError, match="cpu and meta"):
        replicate(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), CPUS)
