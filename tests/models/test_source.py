"""What a model's name may be, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from specserve.core.errors import ModelLoadError
from specserve.models import source
from specserve.models.source import resolve


def test_demo_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "fetch_demo", lambda progress: tmp_path / "demo.gguf")
    assert resolve("demo") == source.ModelSource("demo", "gguf", tmp_path / "demo.gguf")


def test_a_gguf_file_is_known_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    for name in ("a.gguf", "blob"):
        (tmp_path / name).write_bytes(b"GGUF....")
        assert resolve(str(tmp_path / name)).kind == "gguf"
    (tmp_path / "b.safetensors").write_bytes(b"12345678")
    with pytest.raises(ModelLoadError, match=r"not a GGUF file.*folder that holds config\.json"):
        resolve(str(tmp_path / "b.safetensors"))


def test_a_folder_needs_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"GGUF files.*m\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == source.ModelSource(str(tmp_path), "folder", tmp_path)


@pytest.mark.parametrize("name", ["nothing", "./org/name", "~/org/name", "a/b/c", "org/name.gguf", "org/na me", ""])
def test_what_is_neither_here_nor_a_hub_name_is_said_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kw: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError) as caught:
        resolve(name)
    assert caught.value.param == "model"


def test_a_hub_name_with_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name").path == tmp_path
    assert resolve("org/name@v1.0", weights=False).kind == "folder"
    assert [(repo, revision) for repo, revision, _ in asked] == [("org/name", None), ("org/name", "v1.0")]
    assert "*.safetensors" in asked[0][2]
    assert "*.safetensors" not in asked[1][2]
    assert not any(pattern.endswith((".py", ".bin")) for _, _, patterns in asked for pattern in patterns)


def test_offline_and_not_in_the_cache_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"hf download org/name"):
        resolve("org/name")
