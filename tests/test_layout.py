"""The rules of the layout, measured: direction of imports, sizes, and the fixed top level."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {
    "core": 0,
    "kv": 1,
    "guided": 1,
    "sched": 2,
    "spec": 2,
    "models": 3,
    "worker": 4,
    "engine": 5,
    "cluster": 6,
    "server": 7,
    "cli": 8,
    "llm": 9,  # the public face in process: it may use everything
    "__init__": 10,
}
TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", "Makefile", "specserve", "kernels", "grammars", "tests", "bench",
}  # fmt: skip
MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_MEDIAN = 400, 60, 250, 150


def sources(*folders: str) -> list[Path]:
    """Every Python file of ours below the folders; specserve/kernels is a link to kernels and is not met twice."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any((ROOT / folder).joinpath(*part).is_symlink() for part in prefixes(path, ROOT / folder)):
                found.append(path)
    return found


def prefixes(path: Path, base: Path) -> list[tuple[str, ...]]:
    parts = path.relative_to(base).parts
    return [parts[: i + 1] for i in range(len(parts))]


def imported_modules(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide a package's level"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "specserve").parts
    return parts[0].removesuffix(".py")


def wrong_imports(package: str, modules: list[str]) -> list[str]:
    """Modules of specserve that `package` may not import: of a higher level, or another package of its own."""
    wrong = []
    for module in modules:
        parts = module.split(".")
        if parts[0] == "kernels":
            wrong.append(module)
        if parts[0] != "specserve" or len(parts) < 2 or parts[1] == package:
            continue
        if parts[1] == "kernels":
            allowed = LEVELS[package] >= LEVELS["models"]
        else:
            allowed = LEVELS.get(parts[1], 0 if parts[1] in ("__version__",) else 10) < LEVELS[package]
        if not allowed:
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("path", sources("specserve"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    wrong = wrong_imports(package_of(path), imported_modules(ast.parse(path.read_text())))
    assert not wrong, f"{path.relative_to(ROOT)} may not import {wrong}"


def test_the_import_rule_can_fail() -> None:
    assert wrong_imports("kv", ["specserve.guided.masks"]), "packages of one level"
    assert wrong_imports("sched", ["specserve.engine.engine"]), "upward"
    assert wrong_imports("kv", ["specserve.kernels.reference"]), "no compute below models"
    assert not wrong_imports("sched", ["specserve.kv.manager", "specserve.core.plan"])


def test_kernels_never_import_specserve() -> None:
    for path in sources("kernels"):
        names = imported_modules(ast.parse(path.read_text()))
        assert not [n for n in names if n.startswith("specserve.") and not n.startswith("specserve.kernels")], path


@pytest.mark.parametrize("package", ["core", "kv", "sched"])
def test_packages_without_torch_load_without_it(package: str) -> None:
    modules = [
        str(p.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for p in sources(f"specserve/{package}")
    ]
    heavy = ("torch", "numpy", "transformers") if package == "core" else ("torch", "transformers")
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += f"bad = [m for m in {heavy!r} if m in sys.modules]\nassert not bad, bad"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sizes() -> None:
    lengths, over = [], []
    for path in sources("specserve", "kernels"):
        text = path.read_text()
        lines = text.count("\n")
        if lines > 5:
            lengths.append(lines)
        if lines > MAX_FILE:
            over.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            limit = {ast.FunctionDef: MAX_FUNCTION, ast.AsyncFunctionDef: MAX_FUNCTION, ast.ClassDef: MAX_CLASS}.get(
                type(node)
            )
            if limit is not None and node.end_lineno - node.lineno + 1 > limit:  # type: ignore[attr-defined]
                over.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")  # type: ignore[attr-defined]
    assert not over, over
    assert median(lengths) <= MAX_MEDIAN


def test_benches_and_tests_stay_readable() -> None:
    over = [str(p.relative_to(ROOT)) for p in sources("bench", "tests") if p.read_text().count("\n") > MAX_FILE]
    assert not over, over


def test_top_level_is_the_design() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL
