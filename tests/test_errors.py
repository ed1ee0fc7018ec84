"""Errors can be caught as layerstream's and as the stdlib kind they are, and survive a process boundary."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from layerstream import errors
from layerstream.errors import LayerStreamError

KINDS: dict[str, type[Exception]] = {
    "LayerStreamError": Exception,
    "ConfigError": ValueError,
    "GeometryError": ValueError,
    "GraphError": RuntimeError,
    "PoolError": MemoryError,
    "TierError": OSError,
    "ObjectError": errors.TierError,
    "TransferError": RuntimeError,
    "RaceError": errors.TransferError,
    "TransferTimeout": TimeoutError,
    "VerifyError": errors.TransferError,
}
CLASSES: dict[str, type[Exception]] = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
}


def test_tree_is_whole_here_and_in_the_module_text() -> None:
    assert set(CLASSES) == set(KINDS)
    assert errors.__doc__ is not None
    assert set(re.findall(r"\b(\w+(?:Error|Timeout))\b", errors.__doc__)) - {
        "ValueError",
        "MemoryError",
        "OSError",
        "RuntimeError",
        "TimeoutError",
    } == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_error_is_both_kinds(name: str) -> None:
    assert issubclass(CLASSES[name], LayerStreamError)
    assert issubclass(CLASSES[name], KINDS[name])
    assert CLASSES[name].__doc__


def test_a_timeout_is_a_transfer_error() -> None:
    assert issubclass(errors.TransferTimeout, errors.TransferError)


@pytest.mark.parametrize("name", KINDS)
def test_error_survives_pickling(name: str) -> None:
    back = pickle.loads(pickle.dumps(CLASSES[name]("request 'a': what to do")))
    assert type(back) is CLASSES[name]
    assert str(back) == "request 'a': what to do"
