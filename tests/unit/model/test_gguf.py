"""GGUF files become checkpoints: tiny models of every architecture through gguf's own writer, and the default model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from foreword.core.errors import ModelLoadError
from foreword.model import embedded
from foreword.model import gguf as conversion
from foreword.model.config import ModelConfig
from foreword.model.gguf_config import llama3_factors
from foreword.model.gguf_unpack import unpack
from foreword.model.load import load_model
from foreword.model.source import home, resolve
from foreword.ops.cpu import CpuOps
from foreword.ops.protocol import Quantization, QuantizedWeight
from foreword.ops.quantize import dequantize, quantize
from foreword.text.conversation import encode_chat
from foreword.text.tokenizer import Tokenizer

from .gguf_files import HEADS, KV_HEADS, interleave, tiny_model, write_gguf

Q = gguf.GGMLQuantizationType
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("arch", "tied", "rope"),
    [("llama", False, None), ("llama", True, LLAMA3_ROPE), ("qwen2", True, None), ("qwen3", False, None)],
)
def test_transformers_loads_the_conversion_and_gives_the_same_logits(
    tmp_path: Path, arch: str, tied: bool, rope: dict[str, Any] | None
) -> None:
    model = tiny_model(arch, tied, rope)
    file = write_gguf(tmp_path / "tiny.gguf", arch, model, **({"rope.freq_base": 500000.0} if rope else {}))
    conversion.convert(file, tmp_path / "out", digest="d")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert loaded.config.tie_word_embeddings is tied
    ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SHARD_BYTES", 30_000)
    model = tiny_model("qwen2")
    conversion.convert(write_gguf(tmp_path / "tiny.gguf", "qwen2", model), tmp_path / "out", digest="d")
    weight_map = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == weight_map.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name].float(), tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q6_K])
def test_unpacking_gives_what_ggml_means(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Random bytes of every format, with sensible scales, against the reference in the gguf package, bit for bit."""
    generator = np.random.default_rng(3)
    values = generator.standard_normal((6, 512), dtype=np.float32)
    try:
        packed = gguf.quants.quantize(values, kind)
    except NotImplementedError:  # K-quants cannot be packed there: any bytes will do, where no scale is NaN
        block, size = gguf.GGML_QUANT_SIZES[kind]
        packed = generator.integers(0, 60, (6, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = conversion.open_gguf(tmp_path / "x.gguf").tensors["x"]
    found = unpack(tensor)
    assert found.shape == (6, 512)
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(packed, kind))
    assert np.isfinite(found.numpy()).all()


def test_the_default_model_is_unpacked_right() -> None:
    """Two of its weights, through the gguf package's own unpacking and the documented row order."""
    directory = resolve("smollm2-135m").directory
    weights = load_file(directory / "model.safetensors")
    file = conversion.open_gguf(embedded.gguf_file(home()))
    for name, source in (("mlp.down_proj", "ffn_down"), ("self_attn.q_proj", "attn_q")):
        tensor = file.tensors[f"blk.7.{source}.weight"]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ours = weights[f"model.layers.7.{name}.weight"]
        stored = interleave(ours.float().numpy(), 9) if source == "attn_q" else ours.float().numpy()
        assert np.array_equal(stored, torch.from_numpy(expected).bfloat16().float().numpy())
    packed = {name for name in weights if name.endswith((".q4_1", ".q8_0"))}
    assert len(weights) - len(packed) == 272
    assert {tensor.dtype for name, tensor in weights.items() if name not in packed} == {torch.bfloat16}
    assert {weights[name].dtype for name in packed} == {torch.uint8}
    kinds = [tensor.tensor_type.name for tensor in file.tensors.values()]
    assert len(packed) == kinds.count("Q4_1") + kinds.count("Q8_0") > 200


def test_the_default_models_blocks_are_its_bytes() -> None:
    """Kept blocks are the file's, byte for byte; read back they are the bfloat16 weights to rounding."""
    weights = load_file(resolve("smollm2-135m").directory / "model.safetensors")
    file = conversion.open_gguf(embedded.gguf_file(home()))
    for name, source, heads in (
        ("mlp.down_proj", "ffn_down", None),
        ("self_attn.v_proj", "attn_v", None),
        ("self_attn.q_proj", "attn_q", 9),
        ("self_attn.k_proj", "attn_k", 3),
    ):
        tensor, target = file.tensors[f"blk.7.{source}.weight"], f"model.layers.7.{name}.weight"
        suffix, scheme = KEPT[tensor.tensor_type.name]
        blocks, plain = weights[target + suffix], weights[target]
        stored = blocks.numpy() if heads is None else interleave(blocks.numpy(), heads)
        assert stored.tobytes() == tensor.data.tobytes(), name
        found = dequantize(QuantizedWeight(scheme, blocks, (plain.shape[0], plain.shape[1])))
        assert torch.equal(found.bfloat16(), plain), name


KEPT: dict[str, tuple[str, Quantization]] = {"Q4_1": (".q4_1", "int4"), "Q8_0": (".q8_0", "int8")}


class Recorder(CpuOps):
    """Torch operations that keep what linear layers are made of."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.weights: list[torch.Tensor | QuantizedWeight] = []

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None) -> Any:
        self.weights.append(weight)
        return super().linear(weight, bias)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q8_0])
def test_blocks_reach_the_linear_layers_without_a_detour(
    tmp_path: Path, arch: str, kind: gguf.GGMLQuantizationType
) -> None:
    """An engine of the file's own scheme computes with its very bytes: fused in order, heads as checkpoints have them.
    One of the other scheme, or of none, gets the bfloat16 weights."""
    scheme = KEPT[kind.name][1]
    model = tiny_model(arch)
    file = write_gguf(tmp_path / "tiny.gguf", arch, model, kind=kind)
    conversion.convert(file, tmp_path / "out", digest="d")
    config = ModelConfig.from_directory(tmp_path / "out")

    def loaded(quantization: Quantization | None) -> list[torch.Tensor | QuantizedWeight]:
        ops = Recorder()
        load_model(tmp_path / "out", config, dtype=torch.bfloat16, ops=ops, quantization=quantization)
        return ops.weights

    tensors = conversion.open_gguf(file).tensors

    def expected(*names: str) -> np.ndarray:
        rows = []
        for name in names:
            data = np.asarray(tensors[name].data)
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[2]) if arch == "llama" else None
            if heads:  # undo the order of the file
                data = data[np.argsort(interleave(np.arange(len(data)), heads))]
            rows.append(data)
        return np.concatenate(rows)

    found, plain = loaded(scheme), loaded(None)
    for layer in range(2):
        parts = [("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",)]
        for number, names in enumerate(parts):
            weight, wanted = found[4 * layer + number], plain[4 * layer + number]
            assert isinstance(weight, QuantizedWeight)
            assert isinstance(wanted, torch.Tensor)
            assert np.array_equal(weight.blocks, expected(*(f"blk.{layer}.{name}.weight" for name in names))), names
            assert torch.equal(dequantize(weight).bfloat16(), wanted), names
    other: Quantization = "int8" if scheme == "int4" else "int4"
    for weight, wanted in zip(loaded(other)[:8], plain, strict=False):
        assert isinstance(weight, QuantizedWeight)
        assert isinstance(wanted, torch.Tensor)
        assert torch.equal(weight.blocks, quantize(wanted, other).blocks)


def test_the_head_never_has_fewer_than_eight_bits(tmp_path: Path) -> None:
    """Blocks of 8 bits are taken as they are; of 4 bits the bfloat16 weights are quantised to 8."""
    for kind in (Q.Q8_0, Q.Q4_1):
        for tied in (True, False):
            out = tmp_path / f"{kind.name}-{tied}"
            file = write_gguf(tmp_path / "tiny.gguf", "qwen2", tiny_model("qwen2", tied), kind=kind)
            conversion.convert(file, out, digest="d")
            ops = Recorder()
            load_model(out, ModelConfig.from_directory(out), dtype=torch.bfloat16, ops=ops, quantization="int4")
            head, name = ops.weights[-1], "token_embd.weight" if tied else "output.weight"
            assert isinstance(head, QuantizedWeight)
            assert head.scheme == "int8"
            stored = conversion.open_gguf(file).tensors[name]
            if kind == Q.Q8_0:
                assert np.array_equal(head.blocks, stored.data)
            else:
                wanted = unpack(stored).bfloat16()
                assert torch.equal(head.blocks, quantize(wanted, "int8").blocks)


@pytest.fixture(scope="module")
def default_model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(resolve("smollm2-135m").directory, dtype=torch.float32)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France? Answer briefly.", "Paris"),
        ("Which city is the capital of Japan?", "Tokyo"),
        ("What is the chemical symbol for water?", "H2O"),
    ],
)
def test_the_default_model_answers(default_model: Any, question: str, answer: str) -> None:
    tokenizer = Tokenizer.from_directory(resolve("smollm2-135m").directory)
    ids = torch.tensor([encode_chat(tokenizer, [{"role": "user", "content": question}])])
    out = default_model.generate(ids, max_new_tokens=9, do_sample=False)
    assert answer in tokenizer.decode(out[0, ids.shape[1] :].tolist())


def test_transformers_reads_the_tokenizer_as_we_do() -> None:
    directory = resolve("smollm2-135m").directory
    ours, theirs = Tokenizer.from_directory(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for text in ("a  3", "x\n\n1. foo\n2. bar", "<|im_start|>user\nabc123def 日本<|im_end|>"):
        assert theirs(text).input_ids == ours.encode(text)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.encode(rendered, add_special_tokens=False) == encode_chat(ours, messages)
    assert theirs.eos_token_id in ours.eos_token_ids


def test_rope_scaling_by_metadata(tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", tiny_model("qwen2"), **scaling)
    conversion.convert(file, tmp_path / "out", digest="d")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_unsupported_rope_scaling_is_named_before_anything_is_converted(tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768}
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", tiny_model("qwen2"), **scaling)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf.*yarn"):
        conversion.convert(file, tmp_path / "out", digest="d")
    assert not (tmp_path / "out").exists()


def test_llama3_factors_leave_fast_frequencies_and_stretch_slow_ones() -> None:
    factors = llama3_factors(500000.0, 128, 32.0)
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(32.0)
    assert factors == sorted(factors)


@pytest.mark.parametrize(
    ("arch", "metadata", "said"),
    [
        ("mamba", {}, "architecture 'mamba': supported in GGUF are llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"block_count": None}, r"llama\.block_count is missing"),
        ("llama", {"rope.dimension_count": 8}, "rotates 8 of 16"),
        ("qwen2", {"rope.scaling.type": "longrope"}, "scaling 'longrope'"),
        ("qwen3", {}, "tensors that qwen3 models do not have: .*extra"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, arch: str, metadata: dict[str, Any], said: str) -> None:
    model = tiny_model(arch if arch.startswith("qwen") else "llama")
    if arch == "qwen3":
        model.extra = torch.nn.Linear(2, 2)
    file = write_gguf(tmp_path / "odd.gguf", arch, model, **metadata)
    with pytest.raises(ModelLoadError, match=rf"odd\.gguf.*{said}"):
        conversion.convert(file, tmp_path / "out", digest="d")
    assert [path.name for path in tmp_path.iterdir()] == ["odd.gguf"]  # nothing half-made stays behind


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama", tiny_model("llama")).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf is no GGUF file"):
        conversion.convert(tmp_path / "cut.gguf", tmp_path / "out", digest="d")


def test_the_marker_tells_formats_and_sources_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "llama", tiny_model("llama"))
    target = tmp_path / "out"
    assert not conversion.is_converted(target)
    conversion.convert(file, target, digest="one")
    assert conversion.is_converted(target, "one")
    assert not conversion.is_converted(target, "two")
    monkeypatch.setattr(conversion, "FORMAT_VERSION", conversion.FORMAT_VERSION + 1)
    assert not conversion.is_converted(target, "one")
    conversion.convert(file, target, digest="one")  # replaces the older one
    assert conversion.is_converted(target, "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]
