"""Requests of a service as others recorded them: which prompt blocks they had in common.

One JSON object a line, in order of time: `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`,
one number for each block of the prompt, the last of which need not be full. Equal numbers are equal blocks behind equal
prefixes. It is the form of the traces that were published with Mooncake (Qin et al., FAST'25).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from layerstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Prompts as whole blocks, numbered 0 .. `distinct` - 1; 4 bytes for each block of each prompt."""

    block_tokens: int
    input_tokens: npt.NDArray[np.int64]
    """[requests]: length of each prompt in tokens."""
    starts: npt.NDArray[np.int64]
    """[requests + 1]: where each prompt's blocks begin in `blocks`."""
    blocks: npt.NDArray[np.int32]
    """The whole blocks of all prompts, one prompt after the other; a block that is not full is left out."""
    distinct: int
    """Different blocks."""

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def limits(self) -> npt.NDArray[np.int64]:
        """[requests]: most blocks of each prompt that can be hit; the block of its last token is always computed."""
        return np.maximum(self.input_tokens - 1, 0) // self.block_tokens

    def prompts(self) -> Iterator[tuple[list[int], int]]:
        """(blocks, most that can be hit) of each request."""
        blocks, starts = self.blocks, self.starts.tolist()
        for begin, end, limit in zip(starts[:-1], starts[1:], self.limits.tolist(), strict=True):
            yield blocks[begin:end].tolist(), limit


def read_trace(path: Path, *, block_tokens: int, progress: Callable[[int], None] | None = None) -> RequestTrace:
    """Read a trace, a line at a time.

    Args:
        path: the file.
        block_tokens: tokens in one block of the trace.
        progress: told of bytes that were read, some at a time.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request; the message begins with file:line.
    """
    if block_tokens < 1:
        raise ConfigError(f"a trace's block has {block_tokens} tokens; at least 1 is needed")
    ids, lengths, ends = array("q"), array("q"), array("q")
    for number, (length, hash_ids) in enumerate(_requests(path, progress), 1):
        whole = length // block_tokens
        if not whole <= len(hash_ids) <= -(-length // block_tokens):
            raise ConfigError(
                f"{path}:{number}: hash_ids has {len(hash_ids):,} numbers for {length:,} tokens, where blocks of "
                f"{block_tokens} tokens make {-(-length // block_tokens):,}; is it another block size "
                "(--trace-block-tokens)?"
            )
        ids.extend(hash_ids[:whole])
        lengths.append(length)
        ends.append(len(ids))
    if not lengths:
        raise ConfigError(f"{path}: holds no request; a trace has one JSON object a line")
    starts = np.concatenate(([0], np.frombuffer(ends, np.int64)))
    distinct, blocks = np.unique(np.frombuffer(ids, np.int64), return_inverse=True)
    numbered = blocks.astype(np.int32)
    _check_prefixes(path, numbered, starts, distinct)
    return RequestTrace(block_tokens, np.array(lengths, np.int64), starts, numbered, len(distinct))


def _requests(path: Path, progress: Callable[[int], None] | None) -> Iterator[tuple[int, list[int]]]:
    """(prompt tokens, ids) of each line."""
    # Optional at import time, and 200 MB of JSON take seconds with it.
    import msgspec

    length = Annotated[int, msgspec.Meta(ge=0)]
    name = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    form = msgspec.defstruct("Request", [("timestamp", float), ("input_length", length), ("hash_ids", list[name])])
    decode = msgspec.json.Decoder(form).decode
    before, unsaid, number = 0.0, 0, 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                request: Any = decode(line)
                if request.timestamp < before:
                    raise ConfigError(
                        f"{path}:{number}: timestamp {request.timestamp:g} comes after {before:g}; a trace is in order "
                        "of time"
                    )
                before = request.timestamp
                yield request.input_length, request.hash_ids
                unsaid += len(line)
                if progress is not None and unsaid >= 1 << 20:
                    progress(unsaid)
                    unsaid = 0
        if progress is not None:
            progress(unsaid)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give a trace with one JSON object a line"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}:{number}: {error}; a line is an object with timestamp, input_length and hash_ids, a list of whole "
            "numbers"
        ) from error


def _check_prefixes(
    path: Path, blocks: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> None:
    """Refuse ids that name a block's content rather than the prompt up to it: hits would be counted that are none."""
    before = np.empty_like(blocks)
    before[1:] = blocks[:-1]
    before[starts[:-1][starts[:-1] < len(blocks)]] = -1
    first = np.empty(len(ids), np.int32)
    # Of several writes to one place the last stays: from the end, that is the first time a block appears.
    first[blocks[::-1]] = before[::-1]
    wrong = np.flatnonzero(first[blocks] != before)
    if len(wrong):
        request = int(np.searchsorted(starts, wrong[0], side="right"))
        raise ConfigError(
            f"{path}:{request}: the block {ids[blocks[wrong[0]]]} comes behind another block here than before; equal "
            "hash_ids must be equal prefixes, the block's own content and all that is before it"
        )
