"""What was reviewed of each vLLM version, kept in `vllm-<minor>.txt`, and how another vLLM differs from it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.hooks.vllm.contract.facts import Fact
from tests.hooks.vllm.contract.relied_on import RELIED_ON
from tests.hooks.vllm.contract.source import Source

Facts = Mapping[str, list[str]]
"""Title -> lines."""

FOLDER = Path(__file__).parent
ACCEPT = "python tests/hooks/vllm/contract --accept"


def facts_of(source: Source, facts: Iterable[Fact] | None = None) -> dict[str, list[str]]:
    """What is true of this vLLM, of all that is relied on or of some of it."""
    return {fact.title: fact.lines(source) for fact in (RELIED_ON if facts is None else facts)}


def path_of(minor: str) -> Path:
    """Where the contract of `0.32` lies."""
    return FOLDER / f"vllm-{minor}.txt"


def versions() -> list[str]:
    """Every version with a contract, `0.32` before `0.33`."""
    found = [path.stem.removeprefix("vllm-") for path in FOLDER.glob("vllm-*.txt")]
    return sorted(found, key=lambda minor: [int(part) for part in minor.split(".")])


def write(minor: str, facts: Facts) -> None:
    """Keep `facts` as what was reviewed of this version."""
    head = f"What hooks/vllm relies on in vLLM {minor}, as reviewed. Made by: {ACCEPT}\n"
    sections = [f"\n## {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in facts.items()]
    path_of(minor).write_text(head + "".join(sections), encoding="utf-8")


def read(minor: str) -> dict[str, list[str]]:
    """What was reviewed of this version."""
    _, *sections = path_of(minor).read_text(encoding="utf-8").split("\n## ")
    split = (section.splitlines() for section in sections)
    return {title: [line for line in lines if line] for title, *lines in split}


def compare(source: Source) -> str:
    """How `source` differs from what was reviewed of its version, or of the last one if its own never was; empty if it
    does not."""
    minor = source.minor
    reviewed = minor if minor in versions() else versions()[-1]
    text = difference(read(reviewed), facts_of(source), names=(f"reviewed {reviewed}", f"found {source.version}"))
    if not text and reviewed == minor:
        return ""
    first = (
        f"vLLM {source.version} ({source.root}) differs from what was reviewed of {minor}."
        if reviewed == minor
        else f"vLLM {minor} was never reviewed; this is how {source.version} ({source.root}) differs from {reviewed}."
    )
    return (
        f"{first}\nRead what each change means for hooks/vllm, mend what it breaks, then: {ACCEPT}\n\n"
        f"{text or 'Nothing that is relied on has changed.'}"
    )


def difference(before: Facts, after: Facts, *, names: tuple[str, str]) -> str:
    """Every changed fact as a diff of its lines, under its file and name, with what relies on it."""
    why = {fact.title: fact.why for fact in RELIED_ON}
    found: list[str] = []
    for title in {**before, **after}:
        old, new = before.get(title, []), after.get(title, [])
        if old != new:
            heads = [f"{title} ({name})" for name in names]
            lines = difflib.unified_diff(old, new, fromfile=heads[0], tofile=heads[1], lineterm="")
            found += [*lines, f"relied on: {why.get(title, 'no more')}", ""]
    return "".join(f"{line}\n" for line in found)
