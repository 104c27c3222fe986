"""What importing thinpoint costs, and which rooms work without torch."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import thinpoint

HEAVY = ("torch", "numba", "llvmlite", "rich", "typer", "click", "zstandard", "safetensors")
TORCH_FREE = ("thinpoint.codec", "thinpoint.digest", "thinpoint.errors", "thinpoint.file", "thinpoint.store")


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def torch_free_modules() -> list[str]:
    package_dir = str(Path(thinpoint.__file__).parent)
    names = [found.name for found in pkgutil.walk_packages([package_dir], prefix="thinpoint.", onerror=None)]
    return [name for name in names if name.startswith(TORCH_FREE) and not name.endswith(".__main__")]


def test_importing_thinpoint_loads_nothing_heavy() -> None:
    loaded = run_python(f"import sys, thinpoint; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


def test_listing_what_thinpoint_offers_loads_nothing_heavy() -> None:
    loaded = run_python(
        f"import sys, thinpoint; dir(thinpoint); print([n for n in {HEAVY} if n in sys.modules])"
    )
    assert loaded == "[]"


def test_the_rooms_that_promise_it_import_without_torch() -> None:
    modules = torch_free_modules()
    assert {"thinpoint.codec.contract", "thinpoint.digest", "thinpoint.errors"} <= set(modules)
    run_python(
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
    )


@pytest.mark.parametrize("missing", ["torch", "numba"])
def test_importing_thinpoint_works_without(missing: str) -> None:
    run_python(
        f"import sys; sys.modules[{missing!r}] = None; import thinpoint, thinpoint.errors, thinpoint.digest"
    )


def test_without_numba_everything_works_and_the_log_says_why_it_is_slow(tmp_path: Path) -> None:
    path = str(tmp_path / "state.thin")
    output = run_python(
        "import logging, sys\n"
        "sys.modules['numba'] = None\n"
        "logging.basicConfig(stream=sys.stdout, format='%(name)s %(message)s')\n"
        "import torch, thinpoint\n"
        "weight = torch.arange(5000.0).sqrt()\n"
        f"report = thinpoint.save(weight, {path!r})\n"
        f"assert thinpoint.load({path!r}).equal(weight)\n"
        "print(report.backend)\n"
        "try:\n"
        f"    thinpoint.load({path!r}, backend='cpu')\n"
        "except thinpoint.errors.BackendUnavailableError as error:\n"
        "    print(error)\n"
    )
    logged, backend, refused = output.splitlines()
    assert logged.startswith("thinpoint using backend 'reference', which is slower") and "numba" in logged
    assert backend == "reference"
    assert refused.startswith("backend 'cpu' cannot run here") and "numba" in refused
