"""Methods that vLLM adds to its workers (`worker_extension_cls`): a look at graphs and transfers from within."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from layerstream.metrics import TransferStats

PROBE = f"{__name__}.Probe"
"""What `worker_extension_cls` is told."""


class Probe:
    """Mixed into vLLM's worker; called through `LLM.collective_rpc`, so arguments and results are plain."""

    vllm_config: Any
    device: Any
    _probe_moved: TransferStats

    def probe_engine(self) -> dict[str, str]:
        """CUDA graph mode as the model runner has settled it, and the device."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        cuda = getattr(self.device, "type", None) == "cuda"
        return {
            "graphs": getattr(mode, "name", str(mode)),
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
        }

    def probe_watch(self) -> None:
        """Begin to add up what the connector's worker half reports."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        build = connector.build_connector_worker_meta
        self._probe_moved = TransferStats()

        def watched() -> Any:
            meta = build()
            if meta is not None:
                self._probe_moved = self._probe_moved.merge(meta.report.stats)
            return meta

        connector.build_connector_worker_meta = watched

    def probe_take(self) -> dict[str, float]:
        """The fields of `TransferStats` summed since the last call; `probe_watch` comes first."""
        taken, self._probe_moved = self._probe_moved, TransferStats()
        return asdict(taken)

    def probe_fill(self, seed: int) -> None:
        """Fill the weights at random, by their shapes: vectors, which are norms, with 1, matrices with standard
        deviation 1 / sqrt(columns). vLLM's dummy weights are so small that a token's logprobs hardly depend on KV."""
        parameters: Any = self.get_model().parameters()  # type: ignore[attr-defined]
        generators: dict[torch.device, torch.Generator] = {}
        with torch.no_grad():
            for parameter in parameters:
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                    continue
                place = parameter.device
                if place not in generators:
                    generators[place] = torch.Generator(place).manual_seed(seed)
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generators[place])
