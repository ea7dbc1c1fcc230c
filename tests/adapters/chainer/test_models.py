"""Chainer models learn on this Python and NumPy; warnings count as errors."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.arrays")

import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions


@pytest.fixture(autouse=True)
def seeded() -> None:
    np.random.seed(0)


def steps(model: Any, loss: Any, optimizer: Any, count: int) -> list[float]:
    """Return the losses of some steps on the same batch."""
    optimizer.setup(model)
    losses = []
    for _ in range(count):
        model.cleargrads()
        value = loss()
        value.backward()
        optimizer.update()
        losses.append(float(value.array))
    return losses


def check_gradients(loss: Any, model: Any, step: float = 1e-5, close: float = 1e-5) -> None:
    """Compare the gradient of every parameter with differences along a random direction."""
    model.cleargrads()
    loss().backward()
    for name, parameter in sorted(model.namedparams()):
        kept, direction = parameter.array.copy(), np.random.standard_normal(parameter.shape)
        ends = []
        for end in (step, -step):
            parameter.array[...] = kept + end * direction
            ends.append(float(loss().array))
        parameter.array[...] = kept
        along = float((parameter.grad * direction).sum())
        np.testing.assert_allclose(
            along, (ends[0] - ends[1]) / (2 * step), close, close, err_msg=name
        )


class Pictures(chainer.Chain):
    """A network with convolutions, a transposed one first, batch norm, pooling and maxout."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.up = L.Deconvolution2D(1, 2, 3, outsize=(10, 10))
            self.conv = L.Convolution2D(2, 4, 3, pad=1)
            self.norm = L.BatchNormalization(4)
            self.separate = L.DepthwiseConvolution2D(4, 1, 2)
            self.maxout = L.Maxout(
                16, 3, 2, initialW=self.fill, initial_bias=chainer.initializers.Zero()
            )

    @staticmethod
    def fill(array: Any) -> None:
        array[...] = np.random.standard_normal(array.shape) / 8

    def forward(self, x: Any) -> Any:
        h = F.tanh(self.norm(self.conv(self.up(x))))
        return self.maxout(F.average_pooling_2d(self.separate(F.max_pooling_2d(h, 2)), 2))


def test_convolutional_network_learns_with_right_gradients() -> None:
    x = np.random.standard_normal((6, 1, 8, 8))
    t = np.arange(6) % 3
    with chainer.using_config("dtype", np.float64):
        model = Pictures()

        def loss() -> Any:
            return F.softmax_cross_entropy(model(x), t)

        loss()
        check_gradients(loss, model)
        losses = steps(model, loss, chainer.optimizers.Adam(0.03), 30)
    assert losses[-1] < 0.2 * losses[0]
    with chainer.using_config("train", False):
        assert F.accuracy(model(x), t).array == 1


class Sequences(chainer.Chain):
    def __init__(self, cell: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(5, 6)
            self.cell = cell
            self.out = L.Linear(6, 1)

    def forward(self, xs: Any) -> Any:
        embedded = [self.embed(x) for x in xs]
        if isinstance(self.cell, L.NStepLSTM):
            return self.out(self.cell(None, None, embedded)[0][-1])
        if isinstance(self.cell, (L.NStepGRU, L.NStepRNNTanh)):
            return self.out(self.cell(None, embedded)[0][-1])
        self.cell.reset_state()
        for x in F.transpose_sequence(embedded):
            h = self.cell(x)
        return self.out(h)


@pytest.mark.parametrize(
    "cell",
    [
        lambda: L.LSTM(6, 6),
        lambda: L.StatefulGRU(6, 6),
        lambda: L.StatefulPeepholeLSTM(6, 6),
        lambda: L.NStepLSTM(1, 6, 6, 0.0),
        lambda: L.NStepGRU(1, 6, 6, 0.0),
        lambda: L.NStepRNNTanh(1, 6, 6, 0.0),
    ],
    ids=["LSTM", "GRU", "peephole", "NStepLSTM", "NStepGRU", "NStepRNN"],
)
def test_recurrent_network_learns_with_right_gradients(cell: Any) -> None:
    with chainer.using_config("dtype", np.float64):
        model = Sequences(cell())
        uneven = hasattr(model.cell, "n_layers")
        lengths = (4, 3, 1) if uneven else (3, 3, 3)
        xs = [np.random.randint(0, 5, n).astype(np.int32) for n in lengths]
        t = np.random.standard_normal((3, 1))

        def loss() -> Any:
            return F.mean_squared_error(model(xs), t)

        loss()
        check_gradients(loss, model, close=1e-4)
        losses = steps(model, loss, chainer.optimizers.Adam(0.05), 15)
    assert losses[-1] < 0.5 * losses[0]


OPTIMIZERS = {
    "AdaDelta": {"eps": 1e-2},
    "AdaGrad": {"lr": 0.1},
    "Adam": {"alpha": 0.02},
    "AdamW": {"alpha": 0.02},
    "AMSGrad": {"alpha": 0.02},
    "AdaBound": {"alpha": 0.02},
    "AMSBound": {"alpha": 0.02},
    "CorrectedMomentumSGD": {"lr": 0.05},
    "MomentumSGD": {"lr": 0.05},
    "NesterovAG": {"lr": 0.05},
    "MSVAG": {"lr": 0.05},
    "RMSprop": {"lr": 0.01},
    "RMSpropGraves": {"lr": 0.02},
    "SGD": {"lr": 0.2},
    "SMORMS3": {"lr": 0.05},
}


def test_optimizer_list_is_complete() -> None:
    installed = {
        name
        for name, value in vars(chainer.optimizers).items()
        if isinstance(value, type) and issubclass(value, chainer.GradientMethod)
    }
    assert installed == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_reduces_loss(name: str) -> None:
    x = np.random.standard_normal((16, 4)).astype(np.float32)
    t = (x[:, 0] * x[:, 1] > 0).astype(np.int32)
    model = chainer.Sequential(L.Linear(4, 16), F.relu, L.Linear(16, 2))
    optimizer = getattr(chainer.optimizers, name)(**OPTIMIZERS[name])
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5.0))
    losses = steps(model, lambda: F.softmax_cross_entropy(model(x), t), optimizer, 60)
    assert losses[-1] < 0.6 * losses[0]


# -- the trainer -----------------------------------------------------------------------------


def data(count: int) -> Any:
    random = np.random.RandomState(3)
    x = random.standard_normal((count, 4)).astype(np.float32)
    return chainer.datasets.TupleDataset(x, (x.sum(1) > 0).astype(np.int32))


def classifier() -> Any:
    net = chainer.Sequential(L.Linear(None, 8), L.BatchNormalization(8), F.relu, L.Linear(8, 2))
    return L.Classifier(net)


def trainer_of(folder: Any, epochs: int, seen: io.StringIO | None = None) -> Any:
    np.random.seed(1)
    model = classifier()
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    # Without shuffling, because no snapshot contains the state of NumPy's random numbers.
    iterator = chainer.iterators.SerialIterator(data(60), 10, shuffle=False)
    updater = training.updaters.StandardUpdater(iterator, optimizer)
    trainer = training.Trainer(updater, (epochs, "epoch"), out=str(folder))
    held_out = chainer.iterators.SerialIterator(data(30), 10, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(held_out, model))
    trainer.extend(extensions.LogReport())
    columns = ["epoch", "main/loss", "validation/main/accuracy", "lr"]
    trainer.extend(extensions.PrintReport(columns, out=seen or io.StringIO()))
    trainer.extend(extensions.ProgressBar(update_interval=3))
    trainer.extend(extensions.ExponentialShift("lr", 0.99))
    trainer.extend(extensions.observe_lr())
    trainer.extend(extensions.ParameterStatistics(model))
    trainer.extend(extensions.snapshot(filename="snapshot_{.updater.epoch}"))
    trainer.extend(extensions.snapshot_object(model, "model_{.updater.epoch}"))
    trainer.extend(extensions.DumpGraph("main/loss"))
    trainer.extend(extensions.FailOnNonNumber())
    return trainer


def parameters_of(trainer: Any) -> dict[str, Any]:
    model = trainer.updater.get_optimizer("main").target
    arrays = {name: parameter.array for name, parameter in model.namedparams()}
    return {**arrays, "mean": model.predictor[1].avg_mean, "var": model.predictor[1].avg_var}


def test_trainer_learns_reports_and_resumes(tmp_path: Any, capsys: Any) -> None:
    seen = io.StringIO()
    whole = trainer_of(tmp_path / "whole", 6, seen)
    whole.run()
    log = json.loads((tmp_path / "whole" / "log").read_text())
    assert [entry["epoch"] for entry in log] == [1, 2, 3, 4, 5, 6]
    assert log[-1]["validation/main/accuracy"] > 0.85
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    # The logged value is from the last of the epoch's six iterations.
    np.testing.assert_allclose(log[0]["lr"], 0.1 * 0.99**5)
    assert "validation/main/accuracy" in seen.getvalue()
    assert "36 iter, 6 epoch / 6 epochs" in capsys.readouterr().out
    assert "digraph" in (tmp_path / "whole" / "cg.dot").read_text()

    resumed = trainer_of(tmp_path / "resumed", 6)
    chainer.serializers.load_npz(tmp_path / "whole" / "snapshot_3", resumed)
    assert resumed.updater.epoch == 3
    resumed.run()
    for name, array in parameters_of(resumed).items():
        np.testing.assert_array_equal(array, parameters_of(whole)[name], err_msg=name)

    model = classifier()
    chainer.serializers.load_npz(tmp_path / "whole" / "model_6", model)
    np.testing.assert_array_equal(
        model.predictor[0].W.array, parameters_of(whole)["/predictor/0/W"]
    )


def test_hdf5_round_trip_keeps_weights(tmp_path: Any) -> None:
    pytest.importorskip("h5py")
    models = [chainer.Sequential(L.Linear(3, 2), L.BatchNormalization(2)) for _ in range(2)]
    chainer.serializers.save_hdf5(tmp_path / "model.h5", models[0])
    chainer.serializers.load_hdf5(tmp_path / "model.h5", models[1])
    np.testing.assert_array_equal(models[1][0].W.array, models[0][0].W.array)


def test_multithread_iterator_yields_each_example_once() -> None:
    with chainer.iterators.MultithreadIterator(data(20), 5, repeat=False, n_threads=2) as iterator:
        batches = [chainer.dataset.concat_examples(batch) for batch in iterator]
    assert sorted(np.concatenate([x for x, _ in batches])[:, 0]) == sorted(
        x[0] for x, _ in data(20)
    )


# -- values of edited functions --------------------------------------------------------------


def test_as_strided_returns_values_and_gradient() -> None:
    x = chainer.Variable(np.arange(6.0))
    y = F.as_strided(x, (3, 2), (1, 2), 1)
    np.testing.assert_array_equal(y.array, [[1, 3], [2, 4], [3, 5]])
    y.grad = np.array([[1.0, 10], [2, 20], [4, 40]])
    y.backward()
    np.testing.assert_array_equal(x.grad, [0, 1, 2, 14, 20, 40])


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_resize_images_returns_values_and_gradient(mode: str) -> None:
    x = chainer.Variable(np.array([[[[0.0, 2.0], [4.0, 6.0]]]], np.float32))
    y = F.resize_images(x, (3, 3), mode=mode, align_corners=mode == "bilinear")
    if mode == "nearest":
        np.testing.assert_allclose(y.array[0, 0], [[0, 0, 2], [0, 0, 2], [4, 4, 6]])
    else:
        np.testing.assert_allclose(y.array[0, 0], [[0, 1, 2], [2, 3, 4], [4, 5, 6]])
        F.sum(y).backward()
        np.testing.assert_allclose(x.grad[0, 0], np.full((2, 2), 2.25))


@pytest.mark.parametrize("given", [np.asarray, chainer.Variable])
def test_categorical_log_prob_accepts_arrays_and_variables(given: Any) -> None:
    p = np.random.dirichlet(np.ones(4), (2, 3))
    chosen = np.array([[0, 1, 2], [3, 0, 1]])
    result = chainer.distributions.Categorical(p=p).log_prob(given(chosen))
    np.testing.assert_allclose(
        result.array, np.log(np.take_along_axis(p, chosen[..., None], 2)[..., 0])
    )


def test_edited_functions_return_right_values() -> None:
    theta = np.array([[[1.0, 0, 0], [0, 1, 0]]])
    grid = F.spatial_transformer_grid(theta, (2, 3)).array
    np.testing.assert_allclose(grid[0, 0], [[-1, 0, 1]] * 2)
    joined = chainer.dataset.concat_examples([np.ones(2), np.ones(3)], padding=0)
    np.testing.assert_array_equal(joined, [[1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(F.fix(np.array([-1.5, 1.5])).array, [-1, 1])
    x = chainer.Variable(np.array([-5.0, 5.0]))
    F.sum(F.fmod(x, np.array([3.0, 3.0]))).backward()
    np.testing.assert_array_equal(x.grad, [1, 1])


def test_deconvolution_of_plain_array_has_weight_gradient() -> None:
    link = L.Deconvolution2D(1, 1, 2)
    link.cleargrads()
    F.sum(link(np.ones((1, 1, 2, 2), np.float32))).backward()
    np.testing.assert_allclose(link.W.grad, np.full((1, 1, 2, 2), 4))
