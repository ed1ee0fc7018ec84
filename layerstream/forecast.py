"""What a hit is worth: the time to load it beside the time to compute it, before anything was served."""

from __future__ import annotations

from dataclasses import dataclass

from layerstream.decisions import LoadMode
from layerstream.modes import choose_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One prompt, a part of which can be loaded. Seconds, of the rank that has most."""

    layers: int
    load_s: float
    """To bring the hit from host memory."""
    compute_s: float
    """To compute what the hit leaves."""
    recompute_s: float
    """To compute the hit."""
    tier_s: float = 0.0
    """To bring the hit from a tier into host memory, which comes first; 0 where it is there."""

    @property
    def cold_s(self) -> float:
        """Time to the first token if all is computed."""
        return self.compute_s + self.recompute_s

    @property
    def layerwise_s(self) -> float:
        """Time to the first token if layer i is loaded while layer i - 1 computes: with b to load a layer and c to
        compute it, b + (L - 1) * max(b, c) + c after the bytes are in host memory."""
        load, compute = self.load_s / self.layers, self.compute_s / self.layers
        return self.tier_s + load + (self.layers - 1) * max(load, compute) + compute

    @property
    def whole_s(self) -> float:
        """Time to the first token if all is loaded before anything is computed."""
        return self.tier_s + self.load_s + self.compute_s

    @property
    def saved_s(self) -> float:
        """What loading saves of the time to the first token; below 0 if computing is sooner."""
        return self.cold_s - self.layerwise_s

    @property
    def bottleneck(self) -> str:
        """What takes longest of a layerwise load: "tier", "link" or "compute"."""
        times = {"tier": self.tier_s, "link": self.load_s, "compute": self.compute_s}
        return max(times, key=times.__getitem__)

    def mode(self, *, running: int) -> tuple[LoadMode, int | None]:
        """How the hit is loaded beside so many other requests: see `layerstream.modes.choose_mode`."""
        return choose_mode(
            load_layer_s=self.load_s / self.layers,
            compute_layer_s=self.compute_s / self.layers,
            layers=self.layers,
            step_s=None,
            running=running,
        )
