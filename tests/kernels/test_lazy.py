"""torch at first use, and the number of threads before and after, each in a new interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specserve.kernels.lazy import cores

BEGIN = "import sys\nfrom specserve.kernels import lazy\n"


def run(code: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_it_is_imported_when_it_is_used_and_not_before() -> None:
    code = """
@lazy.inference
def mode(x):
    return lazy.torch.is_inference_mode_enabled(), x
print(hasattr(lazy.torch, "__wrapped__"), lazy.loaded())
print(mode(3), lazy.loaded(), lazy.torch.is_inference_mode_enabled(), lazy.torch.float32)
"""
    assert run(code) == ["False", "False", "(True,", "3)", "True", "False", "torch.float32"]


@pytest.mark.parametrize("first", ["lazy.torch.empty(0)", "lazy.load()", "import torch; lazy.torch.empty(0)"])
def test_threads_that_were_set_before_are_torch_s(first: str) -> None:
    code = f"""
print(lazy.num_threads())
lazy.set_num_threads(3)
print(lazy.num_threads(), lazy.loaded())
{first}
import torch
print(lazy.num_threads(), torch.get_num_threads())
torch.set_num_threads(1)
print(lazy.num_threads())
lazy.set_num_threads(2)
print(lazy.num_threads(), torch.get_num_threads())
"""
    assert run(code) == [str(cores()), "3", "False", "3", "3", "1", "2", "2"]


def test_a_thread_that_used_torch_before_is_told_too() -> None:
    """The library for grammars may bring torch in a thread of its own; the number is of the one that computes."""
    code = """
import threading
lazy.set_num_threads(1)
thread = threading.Thread(target=lambda: __import__("torch").zeros(1000).add(1))
thread.start()
thread.join()
print(lazy.num_threads())
print(lazy.torch.get_num_threads(), lazy.num_threads())
"""
    assert run(code) == ["1", "1", "1"]


def test_each_thread_that_computes_has_a_number_of_its_own() -> None:
    """As have engines of one process, before torch is there and after."""
    code = """
import threading
turns = [threading.Barrier(2) for _ in range(3)]
found = {}
def compute(count):
    lazy.set_num_threads(count)
    for i, turn in enumerate(turns):
        turn.wait()
        if i == 1 and count == 1:
            lazy.torch.empty(0)
        found[count, i] = lazy.num_threads()
    found[count, "torch"] = lazy.torch.get_num_threads()
threads = [threading.Thread(target=compute, args=(count,)) for count in (1, 3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*(found[count, i] for count in (1, 3) for i in (0, 1, 2, "torch")))
"""
    assert run(code) == ["1"] * 4 + ["3"] * 4
