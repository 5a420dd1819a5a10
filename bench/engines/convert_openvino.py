"""Runs in the peers' environment: a float16 GGUF file -> folders that OpenVINO GenAI reads, float16, int8 and int4.

The model comes from OpenVINO GenAI's own reader of GGUF, the precisions from its compressor of weights.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nncf  # type: ignore[import-not-found]
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

MODEL = "openvino_model.xml"
INT4_GROUP = 64  # divides every width of the demo model; the usual 128 does not


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    half = folder / "f16"
    shutil.rmtree(folder, ignore_errors=True)
    half.mkdir(parents=True)
    copy = Path(shutil.copy(source, half))  # the reader writes beside the file
    openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    copy.unlink()
    modes = {
        "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
        "int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": INT4_GROUP, "ratio": 1.0},
    }
    for name, mode in modes.items():
        model = openvino.Core().read_model(half / MODEL)
        shutil.copytree(half, folder / name, ignore=shutil.ignore_patterns("openvino_model.*"))
        openvino.save_model(nncf.compress_weights(model, **mode), folder / name / MODEL, compress_to_fp16=False)


if __name__ == "__main__":
    main()
