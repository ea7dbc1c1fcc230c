"""What is replaced in Chainer 7.8.1 and ChainerMN, where, why, and with what installed."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

__all__ = ["EDITS", "Edit"]

Condition = Callable[[], bool]


def always() -> bool:
    """Tell that it fails everywhere."""
    return True


@dataclass(frozen=True)
class Edit:
    """One expression of a module's source, and what stands there instead.

    Args:
        old: the text in Chainer 7.8.1.
        new: the text that takes its place, of as many lines.
        reason: completes "it is replaced as …".
        needed: tells whether the old text fails, or warns of it, with what is installed.
        count: how often ``old`` is there.
    """

    old: str
    new: str
    reason: str
    needed: Condition = always
    count: int = 1


def numpy_from(*version: int) -> Condition:
    """Return whether NumPy is of that version or newer; major and minor."""
    found = tuple(int(part) for part in np.__version__.split(".")[:2])
    return lambda: found >= version


def python_from(*version: int) -> Condition:
    """Return whether Python is of that version or newer."""
    return lambda: sys.version_info >= version


def without_pkg_resources() -> bool:
    """Tell whether pkg_resources warns when it is imported, fails, or is not there."""
    if sys.version_info >= (3, 12):
        return True  # setuptools that do not warn of it fail there
    try:
        major, minor = importlib.metadata.version("setuptools").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return True
    return (int(major), int(minor)) >= (67, 5)


_PKG_RESOURCES = Edit(
    old="import pkg_resources\n",
    new="import collective.adapters.chainer.compatibility.requirements as pkg_resources\n",
    reason="setuptools 82 has no pkg_resources, and those from 67.5 warn of it",
    needed=without_pkg_resources,
)
_PURE_NCCL = Edit(
    old="from chainermn.communicators.pure_nccl_communicator \\\n",
    new="from collective.adapters.chainer.compatibility.nccl \\\n",
    reason="the module needs mpi4py, for an isinstance",
)
_MULTIPROCESSING = Edit(
    old="import multiprocessing\n",
    new="import collective.adapters.chainer.compatibility.processes as multiprocessing\n",
    reason="processes that are not forked import Chainer anew",
)
# What several edits of a module have in common.
_DISTUTILS = partial(
    Edit, reason="numpy.distutils warns since NumPy 1.23, and is not there on Python 3.12"
)
_SCTYPES = partial(Edit, reason="NumPy 2.0 has no sctypes", needed=numpy_from(2, 0))
_SHAPES = partial(Edit, reason="NumPy 2.5 warns of shapes being set", needed=numpy_from(2, 5))
_FETCHING = partial(Edit, reason="an error would end the thread, and the program wait for it")

# By module, in the order of their names.
EDITS: dict[str, tuple[Edit, ...]] = {
    "chainer._environment_check": (
        _DISTUTILS(old="import numpy.distutils.system_info\n", new="\n"),
        # Asked on macOS only, for the Accelerate of before macOS 13.3. NumPy 2 is built for
        # the new one, and NumPy 1.2x wheels with OpenBLAS.
        _DISTUTILS(old="numpy.distutils.system_info.get_info('blas_opt')", new="None"),
        _PKG_RESOURCES,
    ),
    "chainer.dataset.convert": (
        Edit(
            old="numpy.maximum(shape, array.shape, shape)",
            new="numpy.maximum(shape, array.shape, out=shape)",
            reason="NumPy 2.4 warns of an output by position",
            needed=numpy_from(2, 4),
        ),
    ),
    "chainer.distributions.categorical": (
        Edit(
            old="self.log_p[mg + [",
            new="self.log_p[list(mg) + [",
            reason="numpy.meshgrid returns a tuple since NumPy 2.0",
            needed=numpy_from(2, 0),
            count=2,
        ),
    ),
    "chainer.functions.array.as_strided": (
        _SCTYPES(old="np.sctypes['int']", new="(np.int8, np.int16, np.int32, np.int64)"),
        _SCTYPES(
            old="np.sctypes['float']", new="(np.float16, np.float32, np.float64, np.longdouble)"
        ),
    ),
    "chainer.functions.array.resize_images": (
        Edit(
            old="numpy.float)",
            new="float)",
            reason="NumPy 1.24 has no float",
            needed=numpy_from(1, 24),
            count=6,
        ),
    ),
    "chainer.functions.connection.deconvolution_2d": (
        Edit(
            old="self._set_cover_all(x, W)",
            new="self._set_cover_all(x.shape, W.shape)",
            reason="shapes are expected, so that backward fails where x needs no gradient",
        ),
    ),
    "chainer.functions.math.fix": (
        Edit(
            old="xp.fix(x)",
            new="xp.trunc(x)",
            reason="NumPy 2.5 warns of fix, which is trunc",
            needed=numpy_from(2, 5),
        ),
    ),
    "chainer.iterators.multiprocess_iterator": (
        _MULTIPROCESSING,
        Edit(
            old="if self._comm.is_terminated:",
            new="if self._pool.check() or self._comm.is_terminated:",
            reason="a worker that ended takes its part of the batch along",
        ),
        _FETCHING(old="alive = self._task()", new="alive = multiprocessing.fetch(self)"),
        _FETCHING(
            old="self._not_empty_cond.wait(_response_time)",
            new="multiprocessing.wait_for_batch(self, _response_time)",
        ),
        Edit(
            old="thread.setDaemon(True)",
            new="thread.daemon = True",
            reason="Python warns of setDaemon since 3.10",
            needed=python_from(3, 10),
        ),
    ),
    "chainer.links.activation.maxout": (
        _SHAPES(
            old="array.shape = (out_size, pool_size, in_size)",
            new="array = array.reshape(out_size, pool_size, in_size)",
        ),
        _SHAPES(old="array.shape = (linear_out_size, in_size)", new="pass"),
        _SHAPES(
            old="array.shape = (out_size, pool_size)",
            new="array = array.reshape(out_size, pool_size)",
        ),
        _SHAPES(old="array.shape = linear_out_size,", new="pass"),
    ),
    "chainer.testing.doctest_helper": (_PKG_RESOURCES,),
    "chainer.testing.helper": (_PKG_RESOURCES,),
    "chainer.training.extensions.evaluator": (
        Edit(
            old="            iterator.finalize()",
            new="            iterator is None or iterator.finalize()",
            reason="an evaluator may have None for an iterator, as ChainerMN's seq2seq example has",
        ),
    ),
    "chainer.training.extensions.snapshot_writers": (
        _MULTIPROCESSING,
        Edit(
            old="self._queue.join()",
            new="multiprocessing.finish(self._queue, self._consumer)",
            reason="it waits for ever if what writes the snapshots has failed",
        ),
        Edit(old="self._consumer.join()", new="pass", reason="finish() has done so before"),
    ),
    "chainer.training.updaters.multiprocess_parallel_updater": (_MULTIPROCESSING,),
    "chainer.variable": (
        Edit(
            old="getattr(array, 'device', 'CPU')",
            new="'CPU' if xp is numpy else getattr(array, 'device', 'CPU')",
            reason="an array of NumPy 2.0 has a device, called cpu",
            needed=numpy_from(2, 0),
        ),
    ),
    "chainermn": (
        Edit(
            old="__version__ = chainer.__version__\n",
            new="__version__ = chainer.__version__; "
            "__import__('collective.adapters.chainer.chainermn')\n",
            reason="create_communicator is to know the name of ours",
        ),
    ),
    "chainermn.extensions.observation_aggregator": (
        Edit(
            old='value.to_device("native")',
            new='value.to_device("native" if chx.is_available() else "@numpy")',
            reason='the device "native" is one of ChainerX',
        ),
    ),
    "chainermn.functions.batch_normalization": (_PURE_NCCL,),
    "chainermn.iterators.multi_node_iterator": (
        Edit(
            old="int(_size)",
            new="int(_size[0])",
            reason="an array of length 1 is no number since NumPy 2.4, and warns since 1.25",
            needed=numpy_from(1, 25),
        ),
    ),
    "chainermn.optimizers": (_PURE_NCCL,),
}
