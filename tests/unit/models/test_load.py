"""Loading from safetensors: strict, mapped into memory, digested; and what the tokenizer says about ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import Gemma3Config, PreTrainedModel

from longctx.errors import ModelError
from longctx.models.load import LoadedModel, load_config_only, load_model
from longctx.models.tokenizer import encode_chat, encode_prompt
from tests.helpers.tiny import TINY, hf_logits, make_tiny, random_ids
from tests.helpers.tokenizers import byte_level_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCTX_CACHE", str(tmp_path / "cache"))


def save(folder: Path, model: PreTrainedModel, tensors: dict[str, torch.Tensor] | None = None) -> str:
    """A model folder, holding `tensors` in place of the model's own when given."""
    model.save_pretrained(folder)
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("kind", TINY)
def test_every_type_equals_its_source(kind: str, tmp_path: Path) -> None:
    """Buffers that no file holds are computed, not left empty; experts are put together from their parts."""
    model = make_tiny(kind)
    loaded = load_model(save(tmp_path / "m", model))
    ids = random_ids(70)
    assert type(loaded.model) is type(model)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert not any(tensor.is_meta for tensor in (*loaded.model.parameters(), *loaded.model.buffers()))
    assert torch.equal(hf_logits(loaded.model, ids), hf_logits(model, ids))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_renamed_and_missing_tensors_are_named(kind: str, tmp_path: Path) -> None:
    """B131: tensors that match no parameter are dropped with a log line (vllm-project/vllm#10327)."""
    model = make_tiny(kind)
    path = save(tmp_path / "m", model)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    moved = {**tensors, "model.layers.1.self_attn.value.weight": tensors[name]}
    del moved[name]
    save(tmp_path / "m", model, moved)
    with pytest.raises(ModelError, match=rf"missing: {name}; unexpected: model\.layers\.1\.self_attn\.value\.weight"):
        load_model(path)
    save(tmp_path / "m", model, {n: t for n, t in tensors.items() if n != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"missing: model\.norm\.weight$"):
        load_model(path)


@pytest.mark.parametrize(
    "suffixes",
    [
        ["k_scale", "v_scale"],
        ["k_proj.k_scale"],
        ["attn.v_scale"],
        ["kv_scale"],
        ["k_proj.output_scale", "v_proj.output_scale"],
        [],
    ],
)
def test_scales_for_a_quantized_cache_are_said_to_be_unused(
    suffixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B52, B53: scales that came with a checkpoint crashed the loader, or were read and not used, or were no numbers
    (vllm-project/vllm#46264; sgl-project/sglang#20705, #31224, #40243): scales here are each token's own."""
    model = make_tiny("llama")
    scales = {f"model.layers.{i}.self_attn.{s}": torch.tensor(float("nan")) for s in suffixes for i in range(2)}
    loaded = load_model(save(tmp_path / "m", model, {**model.state_dict(), **scales}))
    assert torch.equal(hf_logits(loaded.model, random_ids(9)), hf_logits(model, random_ids(9)))
    warnings = [record.getMessage() for record in caplog.records if "scales for a quantized cache" in record.message]
    assert len(warnings) == (1 if suffixes else 0)
    assert all(f"(model.layers.0.self_attn.{sorted(suffixes)[0]}): not used" in line for line in warnings)
    other = {**model.state_dict(), "model.layers.0.self_attn.q_scale": torch.ones(1)}
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.0\.self_attn\.q_scale"):
        load_model(save(tmp_path / "n", model, other))


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    model = make_tiny("llama")
    tensors = {**model.state_dict(), "model.norm.weight": torch.ones(32)}
    with pytest.raises(ModelError, match=r"wrong shape: model\.norm\.weight \(32,\) instead of \(64,\)"):
        load_model(save(tmp_path / "m", model, tensors))


def test_old_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    model = make_tiny("llama")
    tensors = {**model.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert torch.equal(load_model(save(tmp_path / "m", model, tensors)).model.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_heads_tied_or_own(tied: bool, present: bool, tmp_path: Path) -> None:
    """B132: the flag and the file disagree about the head (ggml-org/llama.cpp#5824, vllm-project/vllm#30412)."""
    model = make_tiny("llama", tie_word_embeddings=tied)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if not present:
        del tensors["lm_head.weight"]
    path = save(tmp_path / "m", model, tensors)
    if not tied and not present:
        with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
            load_model(path)
        return
    loaded = load_model(path)
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied == loaded.spec.tied
    ids = random_ids(20)
    assert torch.equal(hf_logits(loaded.model, ids), hf_logits(model, ids))


def test_tied_flag_with_another_head_is_refused(tmp_path: Path) -> None:
    """B132: neither half of a contradiction is taken silently (vllm-project/vllm#6758)."""
    model = make_tiny("llama", tie_word_embeddings=True)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["lm_head.weight"] += 1
    with pytest.raises(ModelError, match="set tie_word_embeddings to false"):
        load_model(save(tmp_path / "m", model, tensors))


def test_head_size_is_read_not_derived(tmp_path: Path) -> None:
    """B135: hidden 60, 4 heads of 16, 2 KV heads (ggml-org/llama.cpp#8604, EricLBuehler/mistral.rs#1118)."""
    model = make_tiny("mistral", hidden_size=60, head_dim=16)
    loaded = load_model(save(tmp_path / "m", model))
    layer = loaded.spec.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.k_dim, layer.scale) == (4, 2, 16, 0.25)
    gemma = load_model(save(tmp_path / "g", make_tiny("gemma3_text", query_pre_attn_scalar=100)))
    assert gemma.spec.layers[0].scale == 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_frequencies_stay_fp32(dtype: str, tmp_path: Path) -> None:
    """B81: inverse frequencies in 16 bits make long-range phases noise (huggingface/transformers#29285)."""
    loaded = load_model(save(tmp_path / "m", make_tiny("llama")), dtype=dtype)
    rotary = loaded.model.model.rotary_emb
    assert loaded.model.dtype == getattr(torch, dtype) and rotary.inv_freq.dtype == torch.float32
    positions = torch.tensor([[255, 4097, 15962, 131071]])
    cos, _ = rotary(torch.zeros(1, dtype=loaded.model.dtype), positions)
    exact = (positions[0, :, None].double() / 1e4 ** (torch.arange(0, 16, 2).double() / 16)).cos()
    assert (cos[0, :, :8].double() - exact).abs().max() <= 0.005


def test_gemma_with_large_activations(tmp_path: Path) -> None:
    """B137: float16 overflows, and is refused; bfloat16 and float32 do not (huggingface/transformers#36822)."""
    model = make_tiny("gemma3_text")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(1).mul_(50).sub_(1)
    path = save(tmp_path / "m", model)
    with pytest.raises(ModelError, match="--dtype bfloat16 or float32"):
        load_model(path, dtype="float16")
    for dtype in ("bfloat16", "float32"):
        assert hf_logits(load_model(path, dtype=dtype).model, random_ids(40)).isfinite().all()


def test_tied_embedding_is_mapped_and_not_resident(tmp_path: Path) -> None:
    """Of a tied embedding only the rows in use occupy memory."""
    model = make_tiny("llama", vocab_size=250_000, tie_word_embeddings=True)
    path = save(tmp_path / "m", model)
    del model
    load_model(path)  # what loading itself needs once
    process = psutil.Process()
    before = process.memory_info().rss
    loaded = load_model(path)
    with torch.no_grad():
        loaded.model.model(torch.tensor([[5, 77, 249_999]]), use_cache=False)
    assert process.memory_info().rss - before < 16 << 20
    loaded.model.lm_head.weight.sum()
    assert process.memory_info().rss - before > 48 << 20  # 64 MB: the measure can fail


def test_corrupt_files_are_one_line(tmp_path: Path) -> None:
    path = save(tmp_path / "m", make_tiny("llama"))
    weights = tmp_path / "m" / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", b"garbage!" * 10, whole[:500], whole[:-100]):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors is c") as caught:
            load_model(path)
        assert "\n" not in str(caught.value)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors weights"):
        load_model(path)
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ModelError, match=r"config\.json .* cannot be read") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    (tmp_path / "m" / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(ModelError, match="no_such_type") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    model = make_tiny("llama")
    model.save_pretrained(tmp_path / "m", max_shard_size="100KB")
    path, ids = str(tmp_path / "m"), random_ids(20)
    assert torch.equal(hf_logits(load_model(path).model, ids), hf_logits(model, ids))
    lost = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name):
        load_model(path)


def test_unsupported_types_are_refused_before_any_weight(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 2}))
    for load in (load_model, load_config_only):
        with pytest.raises(ModelError, match="'mamba' cannot be served"):
            load(str(tmp_path / "m"), unverified=True)


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    TINY["llama"]().save_pretrained(tmp_path / "m")
    path = str(tmp_path / "m")
    first, second = (load_model(path, load_format="dummy") for _ in range(2))
    ids = random_ids(20)
    assert torch.equal(hf_logits(first.model, ids), hf_logits(second.model, ids))
    assert first.digest == second.digest and first.tokenizer is None and first.vocab_limit == 320
    real = load_model(save(tmp_path / "m", first.model))
    assert real.digest != first.digest
    with pytest.raises(ModelError, match="auto or dummy"):
        load_model(path, load_format="fast")


def test_config_only_reads_no_weights(tmp_path: Path) -> None:
    TINY["gemma3_text"]().save_pretrained(tmp_path / "m")
    config, spec = load_config_only(str(tmp_path / "m"), max_model_len=1000)
    assert config.model_type == spec.model_type == "gemma3_text" and spec.max_positions == 1000


def test_scaling_reaches_the_model(tmp_path: Path) -> None:
    path = save(tmp_path / "m", make_tiny("llama"))
    plain, scaled = load_model(path), load_model(path, max_model_len=8192, rope_scaling="linear")
    frequencies = [m.model.model.rotary_emb.inv_freq for m in (plain, scaled)]
    assert torch.allclose(frequencies[0], 2 * frequencies[1])
    assert scaled.digest != plain.digest and scaled.spec.max_positions == 8192


def test_text_part_of_a_picture_model(tmp_path: Path) -> None:
    text = make_tiny("gemma3_text")
    text.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    Gemma3Config(text_config=text.config.to_dict()).save_pretrained(tmp_path / "m")
    ids = random_ids(50)
    for prefix in ("language_model.model.", "model.language_model."):
        tensors = {n.replace("model.", prefix, 1): t for n, t in text.state_dict().items() if n != "lm_head.weight"}
        tensors["vision_tower.patch.weight"] = torch.ones(4)
        save_file(tensors, tmp_path / "m" / "model.safetensors")
        assert torch.equal(hf_logits(load_model(str(tmp_path / "m")).model, ids), hf_logits(text, ids))


def test_digest_is_of_content_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama")
    path = save(tmp_path / "m", model)
    first = load_model(path).digest
    assert load_model(save(tmp_path / "copy", model)).digest == first
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert load_model(path).digest == first
        assert load_model(path, dtype="bfloat16").digest == first  # dtype is a part of the key by itself
    assert load_model(save(tmp_path / "other", make_tiny("llama", seed=1))).digest != first
    model.config.rms_norm_eps = 1e-3
    assert load_model(save(tmp_path / "m", model)).digest != first


def with_tokenizer(folder: Path, model: PreTrainedModel | None = None, **changes: Any) -> LoadedModel:
    tokenizer = byte_level_tokenizer.__wrapped__()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return load_model(save(folder, model or make_tiny("llama")))


def test_padding_rows_are_beyond_the_limit(tmp_path: Path) -> None:
    """B99: rows of the head that the tokenizer does not know are never sampled (vllm-project/vllm#13175)."""
    loaded = with_tokenizer(tmp_path / "m", make_tiny("llama", vocab_size=512))
    known = byte_level_tokenizer().get_vocab()
    assert loaded.vocab_limit == max(known.values()) + 1 == len(known) < loaded.spec.vocab_size == 512
    larger_tokenizer = with_tokenizer(tmp_path / "n", make_tiny("llama", vocab_size=100))
    assert larger_tokenizer.vocab_limit == 100


def test_stops_are_the_union(tmp_path: Path) -> None:
    """B138: a list of EOS ids dropped by an override (vllm-project/vllm#45591, mlc-ai/mlc-llm#3191)."""
    model = make_tiny("llama", eos_token_id=1)
    model.generation_config.eos_token_id = [1, 106]
    loaded = with_tokenizer(tmp_path / "m", model, eos_token="z")
    z = byte_level_tokenizer().convert_tokens_to_ids("z")
    assert loaded.eos_token_ids == {1, 106, z} and 107 not in loaded.eos_token_ids
    assert load_model(save(tmp_path / "n", make_tiny("llama", eos_token_id=[2, 5]))).eos_token_ids == {2, 5}


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


def bos_tokenizer(add_bos: bool, template: str | None) -> Any:
    tokenizer = byte_level_tokenizer.__wrapped__()
    tokenizer.bos_token = "<|start|>"
    if add_bos:
        start = ("<|start|>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|start|> $A", special_tokens=[start])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("in_template", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_bos_exactly_once(add_bos: bool, in_template: bool, saved: bool, tmp_path: Path) -> None:
    """B133: two BOS when the template has one, or none where it is needed (ggml-org/llama.cpp#15086, #15326,
    sgl-project/sglang#888, abetlen/llama-cpp-python#1501)."""
    template = ("{{ bos_token }}" if in_template else "") + TEMPLATE
    tokenizer = bos_tokenizer(add_bos, template)
    if saved:
        tokenizer.save_pretrained(tmp_path / "m")
        loaded = load_model(save(tmp_path / "m", make_tiny("llama")))
        assert loaded.chat_template == template
        tokenizer = loaded.tokenizer
    bos = tokenizer.bos_token_id
    prompt = encode_prompt(tokenizer, "open the door")
    assert prompt == [bos] * add_bos + tokenizer("open the door", add_special_tokens=False).input_ids

    messages = [{"role": "user", "content": "open the door"}]
    chat = encode_chat(tokenizer, messages)
    assert chat == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert chat.count(bos) == in_template
    # A rendered template that is sent as a plain prompt keeps its own BOS and gets no second.
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert encode_prompt(tokenizer, rendered).count(bos) == (add_bos or in_template)


def test_spelled_bos_is_the_users(tmp_path: Path) -> None:
    """B133: user text containing the spelling becomes the token, as Hugging Face does it; two of them stay two."""
    tokenizer = bos_tokenizer(True, None)
    bos = tokenizer.bos_token_id
    assert encode_prompt(tokenizer, "open <|start|> door").count(bos) == 2
    assert encode_prompt(tokenizer, "<|start|><|start|>open").count(bos) == 3
    plain = bos_tokenizer(False, None)
    assert encode_prompt(plain, "<|start|><|start|>open").count(bos) == 2


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        encode_chat(bos_tokenizer(True, None), [{"role": "user", "content": "hello"}])
    strict = bos_tokenizer(True, "{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(ModelError, match="refuses these messages: roles must alternate"):
        encode_chat(strict, [{"role": "user", "content": "hello"}])


def test_corrupt_tokenizer_is_one_line(tmp_path: Path) -> None:
    path = save(tmp_path / "m", make_tiny("llama"))
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be read") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
