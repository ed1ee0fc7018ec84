"""The engine's side of `profiles.microbench.engine_process`: `python -m` this with a pipe's descriptor and a spec."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from multiprocessing.connection import Connection

from profiles.microbench.engine_process import Answer, EngineSpec


class _Engine:
    """What the commands are done with."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        self._llm = LLM(**spec.vllm_arguments())

    def generate(self, prompt: list[int], tokens: int, logprobs: int | None) -> Answer:
        sampling = self._sampling(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs, detokenize=False
        )
        begun = time.perf_counter()
        (output,) = self._llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        completion, times = output.outputs[0], output.metrics
        return Answer(
            seconds=seconds,
            cached_tokens=output.num_cached_tokens or 0,
            token_ids=tuple(completion.token_ids),
            logprobs=tuple(
                {token: entry.logprob for token, entry in position.items()} for position in completion.logprobs or ()
            ),
            decode_seconds=times.last_token_ts - times.first_token_ts if tokens > 1 and times else None,
        )

    def reset(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    """Serve commands from the pipe until told to stop or the other end is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pipe", type=int)
    parser.add_argument("spec", type=json.loads)
    arguments = parser.parse_args()
    pipe = Connection(arguments.pipe)
    try:
        engine = _Engine(EngineSpec(**arguments.spec))
    except Exception as error:  # noqa: BLE001 - whatever it was, the other side reports it
        traceback.print_exc()
        pipe.send((False, repr(error)))
        return
    pipe.send((True, None))
    while True:
        try:
            command, values = pipe.recv()
        except EOFError:
            command, values = "stop", {}
        if command == "stop":
            engine.stop()
            return
        try:
            pipe.send((True, getattr(engine, command)(**values)))
        except Exception as error:  # noqa: BLE001 - as above
            traceback.print_exc()
            pipe.send((False, repr(error)))


if __name__ == "__main__":
    main()
