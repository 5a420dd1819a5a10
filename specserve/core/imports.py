"""Imports that are put off until a request needs them, and may then be wanted by several threads at once."""

from __future__ import annotations

import threading

# Held by whoever imports transformers or what imports it (xgrammar), or has it load a class: its modules make their
# names when they are first asked for, and a second thread that asks meanwhile is told that there is no such name.
TRANSFORMERS = threading.RLock()
