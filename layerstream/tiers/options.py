"""Options of one tier, checked against a struct that declares them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from layerstream.errors import ConfigError

Options = TypeVar("Options", bound=msgspec.Struct)


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """`options` as the struct `kind`, whose fields say what is allowed (`msgspec.Meta` for ranges).

    Raises:
        ConfigError: an option is unknown, missing, or breaks its field's rule.
    """
    fields = [field.name for field in msgspec.structs.fields(kind)]
    for key in options:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"option {key!r} is unknown{hint} Allowed: {', '.join(fields)}")
        if isinstance(options[key], float) and not math.isfinite(options[key]):
            raise ConfigError(f"option {key!r} got {options[key]}; allowed: a finite number")
    try:
        return msgspec.convert(dict(options), type=kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}. Allowed: {', '.join(fields)}") from error
