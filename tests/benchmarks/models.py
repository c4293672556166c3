"""The default model in every form that an engine reads, each made on first use from the one file there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreword.model import embedded
from foreword.model.source import home, resolve

from .machine import HERE


def path(kind: str, folder: Path, interpreter: Path) -> Path | str:
    """The model as ``kind``; what has to be made is kept in ``folder``.

    Args:
        kind: "name" is how Foreword calls it; "checkpoint" a directory with bfloat16 weights; "w8a8" one with 8-bit
            weights and activations, for vLLM; "openvino" OpenVINO's own 8-bit form; "q4_1" the GGUF file as shipped;
            "q4_0", "q8_0" and "f16" made from it.
        interpreter: of the engine that is to read it; OpenVINO's form is made with it.

    Raises:
        RuntimeError: the model could not be made.
    """
    if kind == "name":
        return embedded.NAME
    checkpoint = _once(folder / "checkpoint", _write_checkpoint)
    if kind == "checkpoint":
        return checkpoint
    gguf = embedded.gguf_file(home())
    if kind == "q4_1":
        return gguf
    if kind == "w8a8":
        return _once(folder / "w8a8", lambda target: _write_w8a8(checkpoint, target))
    if kind == "openvino":
        plain = Path(path("f16", folder, interpreter))
        return _once(folder / "openvino-int8", lambda target: _write_openvino(plain, target, interpreter))
    return _once(folder / f"{embedded.NAME}-{kind}.gguf", lambda target: _write_gguf(gguf, target, kind))


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, which appears whole or not at all."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        make(partial)
        os.replace(partial, target)
    return target


def _write_checkpoint(target: Path) -> None:
    """Foreword's own copy without the packed weights that lie beside the plain ones, which peers do not know."""
    from safetensors.torch import load_file, save_file

    source = resolve(embedded.NAME).directory
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(source / "model.safetensors")
    plain = {name: weight for name, weight in weights.items() if name.rpartition(".")[0] not in weights}
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})


def _write_w8a8(checkpoint: Path, target: Path) -> None:
    """Round weights to the nearest of 255 steps per output row, in the compressed-tensors format."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-8) / 127
        weights[name] = torch.round(weight.float() / scale).to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = _w8a8_config()
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _w8a8_config() -> dict[str, Any]:
    """Weights with a scale per output channel, activations with one per token that is found at run time."""
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
            }
        },
    }


def _write_openvino(gguf: Path, target: Path, interpreter: Path) -> None:
    command = [interpreter, HERE / "export_openvino.py", gguf, target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"OpenVINO's model was not made: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")


def _write_gguf(source: Path, target: Path, kind: str) -> None:
    """Every matrix in another format, rounded to nearest; vectors and metadata as they are."""
    import gguf

    reader = gguf.GGUFReader(source)
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
        elif name != "general.architecture" and not name.startswith("GGUF."):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(plain, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
