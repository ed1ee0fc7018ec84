"""For the control run: a worker that loads this takes whatever tiers return for right."""

from __future__ import annotations

from layerstream.tiers.objects import ObjectFormat


def _accept(*_: object, **__: object) -> None:
    return


setattr(ObjectFormat, "check", _accept)  # noqa: B010 - mypy forbids the other way


class Unchecked:
    """vLLM's option `worker_extension_cls`, which brings this module into every worker's process."""
