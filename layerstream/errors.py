"""Every error layerstream raises on purpose.

    LayerStreamError
    ├── ConfigError          also ValueError           an option that cannot be used
    ├── GeometryError        also ValueError           a KV layout that is not understood
    ├── GraphError           also RuntimeError         a captured forward cannot be replayed, or not captured
    ├── PoolError            also MemoryError          the host pool cannot be set up
    ├── TierError            also OSError              a tier did not do what it was asked to
    │   └── ObjectError                                what a tier returned is not the object that was asked for
    └── TransferError        also RuntimeError         bytes did not arrive as promised
        ├── RaceError                                  two accesses conflict, and no event orders them
        ├── TransferTimeout  also TimeoutError         a copy did not end by its deadline
        └── VerifyError                                bytes arrived, and are not those saved

A message says what was wrong, what is allowed and what to do.
"""


class LayerStreamError(Exception):
    """Base of every error layerstream raises on purpose."""


class ConfigError(LayerStreamError, ValueError):
    """An option is unknown, of the wrong type, or has an impossible value."""


class GeometryError(LayerStreamError, ValueError):
    """A KV cache layout is not understood; the message names the layer."""


class GraphError(LayerStreamError, RuntimeError):
    """A forward cannot be captured, or what was captured no longer fits what it is replayed on."""


class PoolError(LayerStreamError, MemoryError):
    """The host pool cannot be set up as asked."""


class TierError(LayerStreamError, OSError):
    """A tier cannot be reached, refused, or answered too late; the message says which and what it was asked."""


class ObjectError(TierError):
    """Bytes that came from a tier are damaged, incomplete, of another version, or another object's."""


class TransferError(LayerStreamError, RuntimeError):
    """A transfer that the engine relies on failed; the message names the requests."""


class RaceError(TransferError):
    """Two accesses to the same bytes, one of them a write, that no event orders (option `sanitize`)."""


class TransferTimeout(TransferError, TimeoutError):
    """A transfer did not end by its deadline."""


class VerifyError(TransferError):
    """Restored bytes differ from the bytes that were saved (option `verify`)."""
