"""GGUF files: what the header leaves out, permuted rows, quantized embeddings, and conversions that are cut short."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from longctx.errors import ModelError
from longctx.models import gguf as gguf_module
from longctx.models.gguf import convert
from longctx.models.gguf_config import config_from_gguf, stop_ids
from longctx.models.gguf_reader import read_gguf
from longctx.models.load import load_config_only, load_model
from longctx.models.tokenizer import encode_prompt
from tests.helpers.gguf_files import round_embedding, write_gguf
from tests.helpers.tiny import hf_logits, make_tiny, random_ids
from tests.helpers.tokenizers import byte_level_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))


def saved_logits(model: PreTrainedModel, folder: Path, ids: list[int]) -> torch.Tensor:
    """The logits of the same model after the way through a safetensors folder."""
    model.save_pretrained(folder)
    return hf_logits(load_model(str(folder)).model, ids)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_are_unpermuted(kv_heads: int, tmp_path: Path) -> None:
    """B129: q and k rows permuted back with the wrong head count (huggingface/transformers#31788)."""
    model = make_tiny("llama", num_key_value_heads=kv_heads, peaky=True)
    round_embedding(model)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    ids = random_ids(40)
    expected = saved_logits(model, tmp_path / "folder", ids)
    assert torch.equal(expected, hf_logits(model, ids))
    assert (hf_logits(load_model(str(path)).model, ids) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "gemma2"])
def test_architectures_equal_their_source(kind: str, tmp_path: Path) -> None:
    """B129, B135: names, biases, norms, soft-caps, windows and head sizes by architecture (ggml-org/llama.cpp#8604)."""
    # llama.cpp derives Gemma's attention scale from the head size, so the source has to as well.
    overrides: dict[str, Any] = {"query_pre_attn_scalar": 32} if kind == "gemma2" else {}
    model = make_tiny(kind, **overrides)
    round_embedding(model)
    loaded = load_model(str(write_gguf(tmp_path / "tiny.gguf", model)))
    ids = random_ids(70)  # beyond the windows
    assert (hf_logits(loaded.model, ids) - hf_logits(model, ids)).abs().max() <= 1e-5


def test_gemma3_pattern_thetas_and_window(tmp_path: Path) -> None:
    """The header lacks the layer pattern and the local theta; a window that is left out is 512."""
    model = make_tiny(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    round_embedding(model)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    loaded = load_model(str(path))
    ids = random_ids(70)
    assert (hf_logits(loaded.model, ids) - hf_logits(model, ids)).abs().max() <= 1e-5
    assert [layer.window for layer in loaded.spec.layers] == [32] * 5 + [None]

    bare = write_gguf(tmp_path / "bare.gguf", model, header={"rope.freq_base": None, "attention.sliding_window": None})
    config = config_from_gguf(read_gguf(bare))
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert config.sliding_window == 512


def test_gemma3_linear_scaling_is_for_global_layers(tmp_path: Path) -> None:
    model = make_tiny("gemma3_text")
    header = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = config_from_gguf(read_gguf(write_gguf(tmp_path / "tiny.gguf", model, header=header)))
    assert config.rope_parameters == model.config.rope_parameters


@pytest.mark.parametrize(("architecture", "layers", "by_hidden"), [("gemma2", 46, True), ("gemma2", 42, False)])
def test_gemma_scale_of_the_largest_sizes(architecture: str, layers: int, by_hidden: bool, tmp_path: Path) -> None:
    """B135: query_pre_attn_scalar is not in the header; the 27B models use hidden / heads (ggml-org/llama.cpp#8604)."""
    path = write_gguf(tmp_path / "tiny.gguf", make_tiny(architecture), header={"block_count": layers})
    assert config_from_gguf(read_gguf(path)).query_pre_attn_scalar == (16 if by_hidden else 32)


def test_phi3_factors_come_from_tensors(tmp_path: Path) -> None:
    model = make_tiny("phi3_longrope")
    round_embedding(model)
    rope = model.config.rope_parameters
    path = write_gguf(
        tmp_path / "tiny.gguf",
        model,
        header={"rope.scaling.original_context_length": 64},
        add={f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"], np.float32) for n in ("long", "short")},
    )
    loaded = load_model(str(path))
    ids = random_ids(50)
    assert loaded.spec.rope.kind == "longrope" and loaded.spec.rope.original_positions == 64
    for total in (50, 100):
        assert (hf_logits(loaded.model, ids, total) - hf_logits(model, ids, total)).abs().max() <= 1e-5


def test_llama3_factors_are_recognized(tmp_path: Path) -> None:
    """Llama 3.1's scaling is in the file as factors only; losing it is silent up to 8K tokens and wrong beyond."""
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **scaling}
    model = make_tiny("llama", rope_parameters=rope)
    plain = 1.0 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 7.9
    path = write_gguf(tmp_path / "tiny.gguf", model, add={"rope_freqs.weight": factors})
    assert config_from_gguf(read_gguf(path)).rope_parameters == rope
    other = write_gguf(tmp_path / "other.gguf", model, add={"rope_freqs.weight": factors * np.float32(1.5)})
    with pytest.raises(ModelError, match="rope factors"):
        load_config_only(str(other))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_quantized_embedding_is_dequantized(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """B131: a quantized token embedding is dropped or left uninitialized (sgl-project/sglang#38363)."""
    model = make_tiny("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model, embedding_type=kind)
    round_embedding(model, kind)
    assert torch.equal(load_model(str(path)).model.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_renamed_and_missing_tensors_are_named(tmp_path: Path) -> None:
    """B131: tensors that match no parameter vanish with a log line (vllm-project/vllm#10327)."""
    model = make_tiny("llama")
    renamed = write_gguf(tmp_path / "a.gguf", model, rename={"blk.1.attn_v.weight": "blk.1.attn_value.weight"})
    with pytest.raises(ModelError, match=r"missing: blk\.1\.attn_v\.weight; unexpected: blk\.1\.attn_value\.weight"):
        convert(renamed)
    with pytest.raises(ModelError, match=r"missing: output_norm\.weight$"):
        convert(write_gguf(tmp_path / "b.gguf", model, drop=["output_norm.weight"]))
    with pytest.raises(ModelError, match=r"wrong shape: .*blk\.0\.ffn_up\.weight \(96, 64\) instead of \(80, 64\)"):
        convert(write_gguf(tmp_path / "c.gguf", model, header={"feed_forward_length": 80}))


@pytest.mark.parametrize("copy_head", ["absent", "equal", "own"])
def test_heads_tied_or_own(copy_head: str, tmp_path: Path) -> None:
    """B132: no output weight means tied, an equal one too; another one is used (ggml-org/llama.cpp#5824)."""
    model = make_tiny("llama", tie_word_embeddings=copy_head != "own")
    round_embedding(model)
    add = {"output.weight": model.model.embed_tokens.weight.numpy()} if copy_head == "equal" else None
    path = write_gguf(tmp_path / "tiny.gguf", model, add=add, embedding_type=GGMLQuantizationType.F32)
    loaded = load_model(str(path))
    ids = random_ids(20)
    assert loaded.spec.tied == (copy_head != "own")
    assert (hf_logits(loaded.model, ids) - hf_logits(model, ids)).abs().max() <= 1e-5


def test_head_size_is_read_not_derived(tmp_path: Path) -> None:
    """B135: hidden 60, 4 heads of 16 (InternLM/lmdeploy#2761)."""
    model = make_tiny("mistral", hidden_size=60, head_dim=16)
    path = write_gguf(tmp_path / "tiny.gguf", model, embedding_type=GGMLQuantizationType.F32)
    loaded = load_model(str(path))
    assert (loaded.spec.layers[0].k_dim, loaded.spec.layers[0].scale) == (16, 0.25)
    ids = random_ids(30)
    assert (hf_logits(loaded.model, ids) - hf_logits(model, ids)).abs().max() <= 1e-5
    other = make_tiny("mistral")
    with pytest.raises(ModelError, match="different size"):
        load_config_only(str(write_gguf(tmp_path / "b.gguf", other, header={"attention.value_length": 8})))


def write_with_tokenizer(path: Path, **tokenizer_header: Any) -> Path:
    return write_gguf(
        path,
        make_tiny("llama", tie_word_embeddings=True),
        tokenizer=byte_level_tokenizer(),
        tokenizer_header={"ggml.eos_token_id": 1, **tokenizer_header},
    )


def test_digits_are_split_as_smollm_does(tmp_path: Path) -> None:
    """transformers' reader does not know the rule `smollm`, which decides about spaces before numbers."""
    loaded = load_model(str(write_with_tokenizer(tmp_path / "tiny.gguf", **{"ggml.pre": "smollm"})))
    reference = byte_level_tokenizer.__wrapped__()
    digits, byte_level = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    for text in ("the key is  4711", "open\n\n5 doors", "the lazy dog"):
        assert loaded.tokenizer is not None
        assert encode_prompt(loaded.tokenizer, text) == reference(text).input_ids
        split = loaded.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert split == reference.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    with pytest.raises(ModelError, match="'klingon'"):
        convert(write_with_tokenizer(tmp_path / "b.gguf", **{"ggml.pre": "klingon"}))


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_rule_and_template_are_carried_over(add_bos: bool, tmp_path: Path) -> None:
    """B133: BOS by the header's rule, and the chat template kept (ggml-org/llama.cpp#15086)."""
    header = {"ggml.bos_token_id": 0, "ggml.add_bos_token": add_bos, "chat_template": "{{ messages[0].content }}"}
    loaded = load_model(str(write_with_tokenizer(tmp_path / "tiny.gguf", **header)))
    assert loaded.chat_template == "{{ messages[0].content }}"
    assert loaded.tokenizer is not None
    ids = encode_prompt(loaded.tokenizer, "the door")
    assert ids.count(0) == add_bos and (ids[0] == 0) == add_bos


def test_stops_are_merged(tmp_path: Path) -> None:
    """B138: eos and eot of the header, and the turn's end that its template writes (vllm-project/vllm#45591)."""
    header = {"ggml.eot_token_id": 7, "chat_template": "{{ messages[0].content }}<|end|>"}
    path = write_with_tokenizer(tmp_path / "tiny.gguf", **header)
    assert load_model(str(path)).eos_token_ids == {1, 7}
    without = write_with_tokenizer(tmp_path / "b.gguf", **{"ggml.eos_token_id": 3, "chat_template": "x<|end|>"})
    assert stop_ids(read_gguf(without)) == [1, 3]
    base = write_with_tokenizer(tmp_path / "c.gguf", **{"ggml.eos_token_id": 3})
    assert stop_ids(read_gguf(base)) == [3]  # a base model's text may hold the spelling


def test_second_load_reads_no_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_tiny("llama"))
    seen: list[tuple[str, float, float]] = []
    folder = convert(path, lambda *report: seen.append(report))
    assert seen[-1][1] == seen[-1][2] and all(a[1] <= b[1] for a, b in itertools.pairwise(seen))
    monkeypatch.setattr(gguf_module, "read_gguf", lambda _: pytest.fail("converted twice"))
    assert convert(path) == folder


def test_changed_file_is_converted_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_tiny("llama"))
    first = convert(path)
    write_gguf(path, make_tiny("llama", seed=1))
    assert convert(path) != first


def test_weights_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model, embedding_type=GGMLQuantizationType.F32)
    monkeypatch.setattr(gguf_module, "_SHARD_BYTES", 100_000)
    folder = convert(path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(folder.glob("*.safetensors"))) > 2
    ids = random_ids(20)
    assert torch.equal(hf_logits(load_model(str(folder)).model, ids), hf_logits(model, ids))


def leftovers(tmp_path: Path) -> list[str]:
    return [p.name for p in (tmp_path / "cache" / "converted").iterdir() if not p.name.endswith(".lock")]


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_tiny("llama"))
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 0, 1 << 20))
        with pytest.raises(ModelError, match=r"needs 32 MiB and .* has 1 MiB free"):
            convert(path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_module, "save_file", full)
        with pytest.raises(ModelError, match="no space for the converted tiny") as caught:
            convert(path)
    assert "\n" not in str(caught.value) and leftovers(tmp_path) == []
    assert convert(path).is_dir()


def test_killed_conversion_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill leaves a temporary folder behind: never used, and removed by the next conversion."""
    path = write_gguf(tmp_path / "tiny.gguf", make_tiny("llama"))
    target = convert(path)
    shutil.rmtree(target)
    stale = target.with_name(f"{target.name}.tmp-999999")
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"half")
    assert convert(path) == target
    assert leftovers(tmp_path) == [target.name]


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_tiny("llama"))
    written, write = [], gguf_module._write_weights
    monkeypatch.setattr(gguf_module, "_write_weights", lambda *a: (written.append(1), write(*a)))
    threads = [threading.Thread(target=convert, args=(path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and len(leftovers(tmp_path)) == 1


@pytest.mark.parametrize("keep", [0, 3, 40, 700, 60_000])
def test_truncated_file_is_one_line(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_tiny("llama"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"truncated|not a GGUF file") as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_unknown_architecture_and_experts_are_refused(tmp_path: Path) -> None:
    model = make_tiny("llama")
    with pytest.raises(ModelError, match="mixture of experts"):
        load_config_only(str(write_gguf(tmp_path / "a.gguf", model, header={"expert_count": 8})))
    with pytest.raises(ModelError, match=r"rotates 8 of 16"):
        load_config_only(str(write_gguf(tmp_path / "b.gguf", model, header={"rope.dimension_count": 8})))
    with pytest.raises(ModelError, match=r"lacks the header value 'llama\.block_count'"):
        load_config_only(str(write_gguf(tmp_path / "c.gguf", model, header={"block_count": None})))
    with pytest.raises(ModelError, match="'granite'"):
        load_config_only(str(write_gguf(tmp_path / "d.gguf", make_tiny("granite"))))
