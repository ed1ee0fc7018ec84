"""The engine's side of `profiles.microbench.engine_process`: `python -m` this with a pipe's descriptor and a spec."""

from __future__ import annotations

import argparse
import json
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from layerstream.hooks.vllm.local_engine import LocalEngine
from layerstream.hooks.vllm.register import NAME
from profiles.microbench.engine_process import EngineSpec

COMMANDS = ("serve", "forget")
"""Methods of the engine that the other side may call."""
LOADED = {"load_mode": "layerwise", "recompute": "never"}
"""Rows say what loads take, whatever this machine was found to be quicker at."""


def start(spec: EngineSpec) -> LocalEngine:
    """Start the engine. Prompts are token ids, so it needs no tokenizer."""
    return LocalEngine(
        Path(spec.model),
        max_model_len=spec.max_model_len,
        connector=spec.connector,
        options={**LOADED, **spec.options} if spec.connector == NAME else spec.options,
        skip_tokenizer_init=True,
    )


def main() -> None:
    """Serve commands from the pipe until told to stop or the other end is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pipe", type=int)
    parser.add_argument("spec", type=json.loads)
    arguments = parser.parse_args()
    pipe = Connection(arguments.pipe)
    try:
        engine = start(EngineSpec(**arguments.spec))
    except Exception as error:  # noqa: BLE001 - whatever it was, the other side reports it
        traceback.print_exc()
        pipe.send((False, repr(error)))
        return
    pipe.send((True, {"dtype": engine.dtype, "core": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "any")}))
    while True:
        try:
            command, values = pipe.recv()
        except EOFError:
            command, values = "stop", {}
        if command not in COMMANDS:
            engine.close()
            return
        try:
            pipe.send((True, getattr(engine, command)(**values)))
        except Exception as error:  # noqa: BLE001 - as above
            traceback.print_exc()
            pipe.send((False, repr(error)))


if __name__ == "__main__":
    main()
