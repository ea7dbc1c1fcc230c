"""The store over Ray's key-value store, with a dictionary in place of Ray."""

from __future__ import annotations

import pytest

from collective.errors import RendezvousError
from collective.start.ray_store import RayStore


class Values:
    """Functions of ``ray.experimental.internal_kv`` over a dictionary."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool) -> bool:
        existed = key in self.values
        if overwrite or not existed:
            self.values[key] = value
        return existed

    def _internal_kv_get(self, key: bytes) -> bytes | None:
        return self.values.get(key)

    def _internal_kv_del(self, key: bytes, *, del_by_prefix: bool = False) -> int:
        gone = [k for k in self.values if k == key or (del_by_prefix and k.startswith(key))]
        for name in gone:
            del self.values[name]
        return len(gone)


class Unconnected(Values):
    """The functions in a process that has not called ``ray.init()``."""

    def _internal_kv_get(self, key: bytes) -> bytes | None:
        raise AttributeError("'NoneType' object has no attribute 'internal_kv_get'")


def test_ray_store_keeps_and_forgets_values() -> None:
    store = RayStore(Values(), "group")
    assert store.try_get("key") is None
    store.set("key", b"1")
    store.set("key", b"2")
    assert store.try_get("key") == b"2"
    store.delete("key")
    store.delete("key")
    assert store.try_get("key") is None


def test_ray_store_put_if_absent_returns_the_first_value() -> None:
    store = RayStore(Values(), "group")
    assert store.put_if_absent("key", b"1") == b"1"
    assert store.put_if_absent("key", b"2") == b"1"


def test_ray_store_delete_all_spares_other_names() -> None:
    values = Values()
    RayStore(values, "other").set("key", b"1")
    store = RayStore(values, "group")
    store.set("key", b"1")
    store.delete_all()
    assert list(values.values) == [b"collective/other/key"]


def test_ray_store_names_key_and_remedy_when_ray_fails() -> None:
    store = RayStore(Unconnected(), "group")
    with pytest.raises(RendezvousError, match=r"get of 'key' in Ray's .*\(ray\.init\)"):
        store.try_get("key")
