"""Names of models: "demo", a folder in Hugging Face format, a GGUF file, or a hub name. One resolver for all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specserve.core.errors import ModelLoadError
from specserve.models.demo import fetch_demo

Progress = Callable[[int, int, str], None]
DEMO = "demo"
_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
# Never code (*.py), never weights that are pickles.
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
_WEIGHT_FILES = ["*.safetensors"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are. `kind` says what `path` is; `name` is as the user wrote it."""

    name: str
    kind: Literal["folder", "gguf"]
    path: Path


def resolve(name: str, *, weights: bool = True, progress: Progress | None = None) -> ModelSource:
    """Find a model by its name, fetching it where it is not on this machine.

    Args:
        weights: also fetch the weights of a hub name; False for the tokenizer alone.
        progress: called with (bytes done, bytes in all, what).

    Raises:
        ModelLoadError: there is no such model; the message says what was looked for and what to do.
    """
    if name == DEMO:
        return ModelSource(name, "gguf", fetch_demo(progress))
    path = Path(name).expanduser()
    if path.is_file():
        return ModelSource(name, "gguf", _checked_file(path))
    if path.is_dir():
        return ModelSource(name, "folder", _checked_folder(path))
    hub = _HUB_NAME.fullmatch(name)
    if hub is None or path.suffix == ".gguf" or name.startswith((".", "~")):
        raise ModelLoadError(
            f'model: there is no file or folder {name!r} here; give "demo", a folder in Hugging Face format, a GGUF '
            'file or a hub name such as "org/name" or "org/name@revision"',
            param="model",
        )
    folder = _fetch(hub["repo"], hub["revision"], weights)
    return ModelSource(name, "folder", _checked_folder(folder))


def _checked_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return path
    try:
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return path
    except OSError as error:
        raise ModelLoadError(f"model: cannot read {path}: {error.strerror}", param="model") from None
    raise ModelLoadError(
        f"model: {path} is a file but not a GGUF file; for Hugging Face weights name the folder that holds config.json",
        param="model",
    )


def _checked_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(inner.name for inner in path.glob("*.gguf"))
    hint = f"; it holds GGUF files, name one of them: {', '.join(files[:5])}" if files else ""
    raise ModelLoadError(
        f"model: the folder {path} has no config.json, so it is no model in Hugging Face format{hint}", param="model"
    )


def _fetch(repo: str, revision: str | None, weights: bool) -> Path:
    # Imported here: it takes as long as a packed model to load, and only names of the hub need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = _TEXT_FILES + (_WEIGHT_FILES if weights else [])
    where = f"{repo}@{revision}" if revision else repo
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        reason = "its owner asks you to accept terms first: do so on the model's page, then run `hf auth login`"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private: check the spelling, or run `hf auth login`"
    except RevisionNotFoundError:
        reason = f"the model has no revision {revision!r}"
    except LocalEntryNotFoundError:
        reason = (
            "it is not in the hub's cache on this machine and the hub cannot be reached; check the network, or fetch "
            f"it on another machine with `hf download {repo}` and name the folder"
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    raise ModelLoadError(f"model: cannot fetch {where} from the hub: {reason}", param="model")
