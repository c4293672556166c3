"""Makes OpenVINO's own 8-bit model of a GGUF file: ``python export_openvino.py FILE.gguf TARGET``.

Run in the interpreter that has ``openvino-genai`` and ``nncf``. Weights get a scale and a zero point per output row;
a GGUF file is kept by OpenVINO in its groups of 32, for which it has other kernels.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import nncf
import openvino
import openvino_genai


def export(source: Path, target: Path) -> None:
    """Write the model and its tokenizer into the directory ``target``."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        link = Path(scratch) / "model.gguf"
        os.symlink(source.absolute(), link)
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)  # saves it beside the GGUF file
        model = openvino.Core().read_model(Path(scratch) / "openvino_model.xml")
        compressed = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        target.mkdir()
        openvino.save_model(compressed, target / "openvino_model.xml", compress_to_fp16=False)
        for file in Path(scratch).glob("openvino_*tokenizer.*"):
            shutil.copy(file, target)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
