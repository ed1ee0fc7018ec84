"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layerstream.config import options_table

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]


def test_the_options_table_is_the_codes_own() -> None:
    found = re.search(
        r"<!-- options: .*? -->\n(.*)<!-- end of options -->", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert found is not None
    assert found.group(1) == options_table()


def test_the_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^make (\S+)", text, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)`", text))
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"README names `make {target}`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)
    for link in links:
        if "://" not in link:
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_every_place_named_in_the_architecture_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for path in re.findall(r"`((?:layerstream|hooks|kernels|graphs|tests)/[\w/.]+\.py)`", text):
        assert (ROOT / path).exists(), path
