from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest

from layerstream.errors import ConfigError
from layerstream.tiers.options import read_options


class Options(msgspec.Struct, kw_only=True, frozen=True):
    path: str
    gib: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    sync: Literal["never", "data"] = "never"


def test_options_are_read_with_their_defaults() -> None:
    assert read_options(Options, {"path": "/x", "gib": 3}) == Options(path="/x", gib=3.0, sync="never")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/x", "gb": 3}, r"'gb' is unknown; did you mean 'gib'\? Allowed: path, gib, sync"),
        ({"path": "/x", "zzzz": 3}, r"'zzzz' is unknown\. Allowed: path, gib, sync"),
        ({"path": "/x", 7: 3}, r"7 is unknown\. Allowed"),
        ({"gib": 3}, "missing required field `path`"),
        ({"path": 3}, r"Expected `str`, got `int` - at `\$.path`"),
        ({"path": "/x", "gib": 0}, r"> 0\.0 - at `\$.gib`"),
        ({"path": "/x", "gib": True}, r"got `bool` - at `\$.gib`"),
        ({"path": "/x", "gib": float("inf")}, "'gib' got inf; allowed: a finite number"),
        ({"path": "/x", "gib": float("nan")}, "'gib' got nan; allowed: a finite number"),
        ({"path": "/x", "sync": "often"}, r"Invalid enum value 'often' - at `\$.sync`"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(Options, options)


def test_the_options_given_stay_as_they_are() -> None:
    options = {"path": "/x"}
    read_options(Options, options)
    assert options == {"path": "/x"}
