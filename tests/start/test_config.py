"""Sources of settings, their precedence, and the settings that are refused."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.errors import ConfigError
from collective.start.config import load
from collective.start.keys import FORMER, KEYS

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("nowhere")]


def test_load_without_settings_gives_world_of_one_rank() -> None:
    config = load({})
    assert (config.rank, config.size, config.local_rank, config.local_size) == (0, 1, 0, 1)
    assert (config.backend, config.check, config.store) == ("auto", "auto", None)
    assert (config.timeout, config.start_timeout) == (300.0, 60.0)
    assert {config.origins[key] for key in KEYS} == {"default"}


# -- precedence ------------------------------------------------------------------------

SOURCES = ("argument", "environment", "file", "launcher")


@pytest.mark.parametrize(
    "present",
    [c for n in range(len(SOURCES) + 1) for c in itertools.combinations(SOURCES, n)],
    ids=lambda present: "+".join(present) or "none",
)
def test_load_takes_strongest_source(nowhere: Path, present: tuple[str, ...]) -> None:
    arguments: dict[str, object] = {}
    if "argument" in present:
        arguments["size"] = 11
    if "environment" in present:
        os.environ["COLLECTIVE_RANK"] = "0"
        os.environ["COLLECTIVE_SIZE"] = "12"
    if "file" in present:
        (nowhere / "collective.toml").write_text("size = 13")
    if "launcher" in present:
        os.environ.update(RANK="0", WORLD_SIZE="14")
    config = load(arguments)
    expected: dict[str, tuple[int, str]] = {
        "argument": (11, "argument"),
        "environment": (12, "environment COLLECTIVE_SIZE"),
        "file": (13, f"file {nowhere / 'collective.toml'}"),
        "launcher": (14, "launcher torchrun"),
    }
    strongest = next((source for source in SOURCES if source in present), None)
    value, origin = expected[strongest] if strongest else (1, "default")
    assert (config.size, config.origins["size"]) == (value, origin)


def test_load_takes_each_key_from_its_own_source(nowhere: Path) -> None:
    (nowhere / "collective.toml").write_text('timeout = 5\nbackend = "gloo"\ncheck = "never"')
    os.environ["COLLECTIVE_BACKEND"] = "mpi"
    config = load({"check": "always"})
    assert (config.timeout, config.backend, config.check) == (5.0, "mpi", "always")


def test_load_treats_none_and_empty_variable_as_absent() -> None:
    os.environ["COLLECTIVE_BACKEND"] = ""
    assert load({"backend": None, "timeout": None}).origins["backend"] == "default"


def test_load_takes_nearest_file(nowhere: Path) -> None:
    (nowhere.parent.parent / "collective.toml").write_text("timeout = 1")
    (nowhere.parent / "pyproject.toml").write_text("[tool.collective]\ntimeout = 2")
    assert load({}).timeout == 2
    (nowhere / "pyproject.toml").write_text("[tool.collective]\ntimeout = 4")
    assert load({}).timeout == 4
    (nowhere / "collective.toml").write_text("timeout = 5")
    assert load({}).timeout == 5


def private(file: Path, text: str) -> None:
    """Write a file of mode 0600, whose settings may name libraries and a store."""
    file.write_text(text)
    file.chmod(0o600)


def test_store_path_is_relative_to_its_source(nowhere: Path) -> None:
    private(nowhere.parent / "collective.toml", 'store = "meet"')
    assert load({}).store == str(nowhere.parent / "meet")
    assert load({"store": "meet"}).store == str(nowhere / "meet")
    assert load({"store": Path("meet")}).store == str(nowhere / "meet")
    assert load({"store": "~/meet"}).store == os.path.expanduser("~/meet")


@pytest.mark.parametrize("key", ["nccl_library", "cuda_library"])
def test_library_setting_accepts_path_or_linker_name(nowhere: Path, key: str) -> None:
    private(nowhere.parent / "collective.toml", f'{key} = "lib/own.so"')
    assert getattr(load({}), key) == str(nowhere.parent / "lib/own.so")
    os.environ[f"COLLECTIVE_{key.upper()}"] = "./own.so"
    assert getattr(load({}), key) == str(nowhere / "own.so")
    assert getattr(load({key: "~/own.so"}), key) == os.path.expanduser("~/own.so")
    assert getattr(load({key: "libown.so.2"}), key) == "libown.so.2"


@pytest.mark.parametrize(
    "address", ["tcp://node1:29500", "tcp://10.0.0.1:1", "tcp://[fd00::1]:65535"]
)
def test_store_accepts_tcp_address(nowhere: Path, address: str) -> None:
    assert load({"store": address}).store == address
    (nowhere / "collective.toml").write_text(f'store = "{address}"')
    assert load({}).store == address


@pytest.mark.parametrize(
    ("key", "default", "variable", "read", "argument"),
    [("device", None, "3", 3, 0), ("port", "", "29600 - 29663", "29600-29663", "29600")],
)
def test_setting_is_read_from_default_variable_and_argument(
    key: str, default: object, variable: str, read: object, argument: object
) -> None:
    assert getattr(load({}), key) == default
    os.environ[f"COLLECTIVE_{key.upper()}"] = variable
    assert getattr(load({}), key) == read
    assert getattr(load({key: argument}), key) == argument


def test_local_rank_follows_rank_that_differs_from_launcher() -> None:
    os.environ.update(RANK="2", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    same = load({"rank": 2, "size": 4})
    assert (same.local_rank, same.local_size) == (0, 2)
    other = load({"rank": 1, "size": 3})
    assert (other.local_rank, other.local_size) == (1, 3)
    assert other.origins["local_rank"] == "default"


# -- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("", r"timeot \(argument\): .* nearest is timeout\."),
        ("COLLECTIVE_BAKEND", r"COLLECTIVE_BAKEND .* nearest is COLLECTIVE_BACKEND\."),
        ("COLLECTIVE_timeout", "nearest is COLLECTIVE_TIMEOUT"),  # another name
        ("COLLECTIVE_XQZW", r"no setting of this name\. `collective config` lists all settings\."),
    ],
)
def test_misspelt_setting_raises_and_names_nearest(variable: str, why: str) -> None:
    if variable:
        os.environ[variable] = "3"
    with pytest.raises(ConfigError, match=why):
        load({} if variable else {"timeot": 3})


BAD: list[tuple[str, Any]] = [
    ("backend", 3),
    ("backend", " "),
    ("rank", -1),
    ("rank", 1.0),
    ("rank", True),
    ("size", 0),
    ("local_size", 0),
    ("local_rank", "x"),
    ("timeout", 0),
    ("timeout", float("inf")),
    ("timeout", float("nan")),
    ("timeout", True),
    ("timeout", [3]),
    ("start_timeout", -1),
    ("check", "sometimes"),
    ("check", []),
    ("store", 3),
    ("store", "tcp://"),
    ("store", "tcp://node1"),
    ("store", "tcp://node1:0"),
    ("store", "tcp://node1:65536"),
    ("store", "tcp://node1:29500/job"),
    ("store", "tcp:node1:29500"),
    ("store", "node1:29500"),
    ("store", "[::1]:29500"),
    ("interface", ""),
    ("interface", 0),
    ("across", " "),
    ("device", -1),
    ("device", "cuda:0"),
    ("nccl_library", " "),
    ("cuda_library", 7),
    ("disable", "signals"),
    ("port", ""),
    ("port", 0),
    ("port", True),
    ("port", "29663-29600"),
    ("port", "1-65536"),
    ("port", "29600-"),
    ("port", "٢٩٦٠٠"),
    ("store", ""),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_invalid_argument_raises_config_error(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .* \(argument\); it must be "):
        load({key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("rank", "one"), ("size", "2.5"), ("timeout", "soon"), ("check", "yes")]
)
def test_invalid_variable_raises_config_error(key: str, value: str) -> None:
    os.environ["COLLECTIVE_RANK"] = "0"
    os.environ["COLLECTIVE_SIZE"] = "1"
    os.environ[f"COLLECTIVE_{key.upper()}"] = value
    with pytest.raises(ConfigError, match=f"COLLECTIVE_{key.upper()}"):
        load({})


def test_invalid_value_below_stronger_source_raises(nowhere: Path) -> None:
    (nowhere / "collective.toml").write_text('timeout = "soon"')
    with pytest.raises(ConfigError, match=r"'soon' \(file "):
        load({"timeout": 3})


def test_rank_beyond_size_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"rank: 3 \(argument\) with size 1 \(default\)"):
        load({"rank": 3})
    with pytest.raises(ConfigError, match="local_rank: 2"):
        load({"rank": 0, "size": 4, "local_rank": 2, "local_size": 2})


def test_numpy_numbers_become_python_numbers() -> None:
    config = load({"rank": np.int64(1), "size": np.int32(2), "timeout": np.float32(0.5)})
    assert (config.rank, config.size, config.timeout) == (1, 2, 0.5)
    assert type(config.rank) is int
    assert type(config.timeout) is float


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"time_out = 3", r"time_out \(file .*collective.toml\).* timeout\."),
        (b"timeout = = 3", r"collective.toml: not valid TOML"),
        (b"\xff\xfe", r"collective.toml: cannot be read"),
    ],
)
def test_invalid_file_raises_config_error(nowhere: Path, content: bytes, why: str) -> None:
    (nowhere / "collective.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        load({})


# -- former settings, and those of the launcher ------------------------------------------


@pytest.mark.parametrize("name", FORMER)
@pytest.mark.parametrize("source", ["argument", "environment", "file"])
def test_former_setting_raises_and_names_what_it_has_become(
    nowhere: Path, name: str, source: str
) -> None:
    if source == "environment":
        os.environ[f"COLLECTIVE_{name.upper()}"] = "off"
    elif source == "file":
        (nowhere / "collective.toml").write_text(f'{name} = "off"')
    arguments = {name: "off"} if source == "argument" else {}
    with pytest.raises(ConfigError, match=re.escape(FORMER[name])):
        load(arguments)


def test_variable_of_launcher_sets_what_only_it_knows() -> None:
    os.environ["COLLECTIVE_LAUNCH"] = "restart=2,grow=on,store_server=launcher"
    config = load({})
    assert (config.restart, config.grow, config.store_server) == (2, "on", "launcher")
    assert config.origins["restart"] == "environment COLLECTIVE_LAUNCH"


@pytest.mark.parametrize("value", ["restart", "restart=-1", "timeout=3", "grow=on=off"])
def test_malformed_variable_of_launcher_raises(value: str) -> None:
    os.environ["COLLECTIVE_LAUNCH"] = value
    with pytest.raises(ConfigError, match=r"COLLECTIVE_LAUNCH: .*only `collective run` sets"):
        load({})


def test_disable_names_several_parts() -> None:
    os.environ["COLLECTIVE_DISABLE"] = "shm_adopt, native"
    config = load({})
    assert config.disable == "native,shm_adopt"


def test_disable_of_unknown_part_raises() -> None:
    with pytest.raises(ConfigError, match=r"disable: 'natve' \(argument\); it must be a list of"):
        load({"disable": "natve"})
