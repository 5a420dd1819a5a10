"""The folder kernels/ never answers to the name `kernels`, which belongs to another package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION as VERSION

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, path: str = "") -> str:
    """Run from the repository's root, where sys.path starts with the folder that holds kernels/."""
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_transformers_sees_no_kernels_package():
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    assert python(code) == "False"


def test_an_installed_kernels_package_is_found_first(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = '{VERSION}'\n")
    metadata = tmp_path / f"kernels-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {VERSION}\n")
    assert python("import kernels; print(kernels.__file__)", str(tmp_path)) == str(package / "__init__.py")
    code = "from transformers.utils import is_kernels_available; import specserve.kernels.reference as r; "
    assert (
        python(code + "print(is_kernels_available(), r.__name__)", str(tmp_path)) == "True specserve.kernels.reference"
    )


@pytest.mark.parametrize("name", ["reference", "cpu.ops", "cpu.native", "cpu.build", "cpu.linear"])
def test_modules_refuse_the_other_name(name):
    code = (
        "import importlib\n"
        f"try: importlib.import_module('kernels.{name}')\n"
        "except ImportError as error: print('specserve.kernels' in str(error))"
    )
    assert python(code) == "True"
