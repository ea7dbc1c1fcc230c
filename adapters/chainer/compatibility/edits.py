"""Replacements in Chainer 7.8.1 and ChainerMN: where, why, and with which installed packages."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

Condition = Callable[[], bool]


def always() -> bool:
    """Return True: the old text fails with all installed packages."""
    return True


@dataclass(frozen=True)
class Edit:
    """One expression of a module's source, and its replacement.

    Args:
        old: text in Chainer 7.8.1.
        new: replacement, with the same number of lines.
        reason: clause that completes "it has to be replaced, because …".
        needed: function that returns whether the old text fails or causes a warning, with the
            installed packages.
        count: number of occurrences of ``old``.
    """

    old: str
    new: str
    reason: str
    needed: Condition = always
    count: int = 1


def numpy_from(*version: int) -> Condition:
    """Return a condition: whether NumPy is at least of that version; major and minor."""
    installed = tuple(int(part) for part in np.__version__.split(".")[:2])
    return lambda: installed >= version


def without_pkg_resources() -> bool:
    """Return whether importing pkg_resources warns or fails, or there is no pkg_resources."""
    if sys.version_info >= (3, 12):
        return True  # a setuptools that does not warn fails on these versions
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
# Edits of one kind, with their common reason.
_SCTYPES = partial(Edit, reason="NumPy 2.0 has no sctypes", needed=numpy_from(2, 0))
_SHAPES = partial(Edit, reason="NumPy 2.5 warns of shapes being set", needed=numpy_from(2, 5))
_FETCHING = partial(Edit, reason="an error would end the thread, and the program would wait for it")

# By module, in the order of their names.
EDITS: dict[str, tuple[Edit, ...]] = {
    "chainer._environment_check": (
        # Chainer uses this module on macOS only.
        Edit(
            old="import numpy.distutils.system_info\n",
            new="\n",
            reason="numpy.distutils warns since NumPy 1.23, and is not there on Python 3.12",
        ),
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
            count=6,
        ),
    ),
    "chainer.functions.connection.deconvolution_2d": (
        Edit(
            old="self._set_cover_all(x, W)",
            new="self._set_cover_all(x.shape, W.shape)",
            reason="the function expects shapes, and backward fails if x needs no gradient",
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
            reason="the part of the batch of a worker that has ended is lost",
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
            reason="an evaluator's iterator may be None, as in ChainerMN's seq2seq example",
        ),
    ),
    "chainer.training.extensions.snapshot_writers": (
        _MULTIPROCESSING,
        Edit(
            old="self._queue.join()",
            new="multiprocessing.finish(self._queue, self._consumer)",
            reason="it never returns if the writer of the snapshots has failed",
        ),
        Edit(old="self._consumer.join()", new="pass", reason="finish() has joined it before"),
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
            reason="create_communicator has to know the name of collective's communicator",
        ),
    ),
    "chainermn.extensions.observation_aggregator": (
        Edit(
            old='value.to_device("native")',
            new='value.to_device("native" if chx.is_available() else "@numpy")',
            reason='the device "native" needs ChainerX',
        ),
    ),
    "chainermn.functions.batch_normalization": (_PURE_NCCL,),
    "chainermn.iterators.multi_node_iterator": (
        Edit(
            old="int(_size)",
            new="int(_size[0])",
            reason="NumPy 2.4 does not convert an array of length 1 to int, and 1.25 warns",
            needed=numpy_from(1, 25),
        ),
    ),
    "chainermn.optimizers": (_PURE_NCCL,),
}
