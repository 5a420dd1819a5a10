"""The package's own build of the native kernels: one library for each instruction set, beside the sources.

Named in pyproject.toml as setuptools' commands. They run where the package itself cannot be imported yet, hence
isa.py and build.py are loaded by their paths. Nothing here fails an installation: a library that cannot be compiled is
left out with a message, and what is missing is compiled at first use, or torch's operations serve.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

FOLDER = Path(__file__).resolve().parent

log = logging.getLogger("specserve.kernels")


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"specserve_build_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def compile_libraries(target: Path, best_only: bool) -> list[str]:
    """Compile into `target`, which then holds no other of our libraries; names of the instruction sets that it has.

    Args:
        best_only: only what this very machine will load, else everything for its architecture.
    """
    isa, build = _module("isa"), _module("build")
    variants = isa.runnable()[-1:] if best_only else isa.for_this_machine()
    done = []
    for old in target.glob("libspecserve_*.so"):
        if not (best_only and any(build.built(v, target) == old for v in variants)):
            old.unlink()
    for number, variant in enumerate(variants, 1):
        try:
            if build.built(variant, target) is None:
                log.warning("compiling the native kernels for %s (%d of %d)", variant.name, number, len(variants))
                build.compile_into(variant, target)
            done.append(variant.name)
        except (build.BuildError, OSError) as error:
            log.warning("the native kernels for %s are left out: %s", variant.name, error)
    if not done:
        log.warning("no native kernels were compiled; the slower torch operations serve where none can be later")
    return done


class BuildPackage(build_py):
    """A wheel gets every instruction set of this architecture, the sources of an editable install the best one."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            compile_libraries(FOLDER, best_only=True)
            return
        target = Path(self.build_lib) / "specserve" / "kernels" / "cpu"
        target.mkdir(parents=True, exist_ok=True)
        compile_libraries(target, best_only=False)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3 of a platform: the libraries speak plain C."""

    def finalize_options(self) -> None:
        self.distribution.has_ext_modules = lambda: True  # what makes setuptools treat it as a platform's
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]
