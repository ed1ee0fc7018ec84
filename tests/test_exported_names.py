from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import layerstream

ROOT = Path(__file__).resolve().parent.parent


def modules_loaded_by(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    # -I: neither the folder the tests run in nor PYTHONPATH decides what is found.
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "layerstream",
        "layerstream.capacity",
        "layerstream.cli.app",
        "layerstream.config",
        "layerstream.coordinator",
        "layerstream.hooks.vllm.register",
        "layerstream.model_store",
    ],
)
def test_import_loads_no_heavy_package(module: str) -> None:
    loaded = modules_loaded_by(f"import {module}")
    assert module in loaded
    assert not loaded & {"torch", "triton", "vllm", "transformers"}


def test_modules_behind_the_links_import_by_their_full_names_alone() -> None:
    loaded = modules_loaded_by("import layerstream.hooks.vllm.register, layerstream.graphs.mode")
    assert {"layerstream.hooks", "layerstream.graphs"} <= loaded
    assert not loaded & {"hooks", "graphs", "kernels"}


@pytest.mark.parametrize("folder", ["kernels", "hooks", "graphs"])
def test_folder_is_real_at_the_top_and_linked_inside_the_package(folder: str) -> None:
    assert not (ROOT / folder).is_symlink() and (ROOT / folder).is_dir()
    assert (ROOT / "layerstream" / folder).readlink() == Path("..") / folder
    assert not (ROOT / folder / "__init__.py").exists(), "it would shadow other distributions of that name"


def test_vllm_finds_the_plugin_and_the_shell_the_command() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="layerstream")
    assert plugin.value == "layerstream.hooks.vllm.register:register"
    assert callable(plugin.load())
    (command,) = entry_points(group="console_scripts", name="layerstream")
    assert command.value == "layerstream.cli.app:main"
    assert callable(command.load())


def test_version_is_the_installed_one() -> None:
    (command,) = entry_points(group="console_scripts", name="layerstream")
    assert command.dist is not None and command.dist.version == layerstream.__version__


def test_runtime_dependencies_are_the_ones_docs_and_doctor_name() -> None:
    from layerstream.cli.doctor import RUNTIME_PACKAGES

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert declared == set(RUNTIME_PACKAGES)
    documented = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert [name for name in sorted(declared) if f"| {name} |" not in documented] == []
