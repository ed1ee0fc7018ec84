"""What `hooks/vllm` and `graphs/mode.py` rely on in vLLM. What is not here, a new release can change unseen."""

from __future__ import annotations

from typing import Final

from tests.hooks.vllm.contract.configuration import CONFIGURATION
from tests.hooks.vllm.contract.engine import ENGINE
from tests.hooks.vllm.contract.facts import Fact
from tests.hooks.vllm.contract.interface import INTERFACE
from tests.hooks.vllm.contract.rows import ROWS
from tests.hooks.vllm.contract.runners import RUNNERS
from tests.hooks.vllm.contract.scheduling import SCHEDULING
from tests.hooks.vllm.contract.telemetry import TELEMETRY

RELIED_ON: Final[tuple[Fact, ...]] = INTERFACE + SCHEDULING + RUNNERS + ENGINE + CONFIGURATION + ROWS + TELEMETRY
