"""A real Llama with weights set by hand, which finds a needle at any depth and length or says `none`.

Legend: D head dim, H query heads, G kv heads, E hidden size.

How it works. One layer, no MLP. A query token `k7?` asks, in every head, for the code of key 7; the pair token `k7=v3`
offers that code as its K, and the code of value 3 as its V. The codes lie only on rotary dimensions that practically
do not turn (`NeedleModel.max_angle`), so the distance does not matter. The scores are far apart:

    160  the asked pair                     (MATCH)
    120  the query token itself, whose V says `none`   (SINK)
     80  the asked pair with its K halved
    <44  any other pair;  0: fillers, and whatever was zeroed

Two million fillers weigh exp(14.6) together, so a gap of 40 leaves nothing to chance, and a needle whose K was lost,
halved or not attended to loses to `none`. Head by head the codes are dealt out differently, and the value is named
only if all query heads agree: one head that reads a wrong place, or another head's cache, is enough for `none`.

K and V hold only -1, 0 and 1 (times rounding), which every quantized format represents well, so the model is an oracle
for these too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from longctx.evals.needle_prompt import BOS, EOS, NONE, NeedleVocab

MATCH, SINK = 160.0, 120.0
_ROPE_THETA = 1e36  # its powers stay below fp32's largest number
_MAX_ANGLE = 0.01  # radians that a code's dimension may turn over all positions; moves a score by at most 1 %
_CODE_BITS = 11
_CODE_DISTANCE = 4  # bits in which two keys differ at least: another pair's score is MATCH * (1 - 2 * 4 / 11) at most
_LOGIT_SCALE = 40.0


class NeedleModel:
    """The weights, prompts and answers of one needle model.

    At most 64 keys, and 2 * head_dim - 1 values. Raises ValueError where the codes do not fit.
    """

    def __init__(
        self,
        num_keys: int = 32,
        num_values: int = 16,
        max_positions: int = 2**21,
        head_dim: int = 16,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        num_fillers: int = 32,
    ) -> None:
        self.vocab = NeedleVocab(num_keys, num_values, num_fillers)
        self._head_dim, self._num_kv_heads = head_dim, num_kv_heads
        self._still = _still_dims(head_dim, max_positions)
        if len(self._still) < _CODE_BITS + 1:
            raise ValueError(
                f"head_dim {head_dim} has {len(self._still)} dimensions that stay still over {max_positions} positions "
                f"and {_CODE_BITS + 1} are needed: use a larger head_dim or fewer positions"
            )
        if num_values + 1 > 2 * head_dim:
            raise ValueError(f"{num_values} values do not fit: head_dim {head_dim} holds {2 * head_dim - 1}")
        self._key_codes = _key_codes(num_keys)
        self._value_codes = _value_codes(num_values + 1, head_dim)
        # Hidden dimensions: per key offered, per key asked, per value of a token, per value read by the heads; flags.
        widths = {"offer": num_keys, "ask": num_keys, "value": num_values + 1, "read": num_values + 1}
        widths |= {"asking": 1, "answered": 1, "norm": 1}
        starts = np.cumsum([0, *widths.values()]).tolist()
        self._at = dict(zip(widths, starts, strict=False))
        self.config = LlamaConfig(
            vocab_size=self.vocab.size,
            hidden_size=-(-starts[-1] // 16) * 16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
            rms_norm_eps=1e-12,
            bos_token_id=BOS,
            eos_token_id=EOS,
            tie_word_embeddings=False,
            dtype="float32",
        )

    @property
    def max_angle(self) -> float:
        """Radians by which the fastest dimension in use turns over all positions."""
        pair = self._still[0]
        return self.config.max_position_embeddings * _ROPE_THETA ** (-2 * pair / self._head_dim)

    def make_prompt(self, length: int, needles: Mapping[int, float], seed: int = 0) -> list[int]:
        """A haystack of `length` tokens with a pair for each key at its depth; see `NeedleVocab.make_prompt`."""
        return self.vocab.make_prompt(length, needles, seed)

    def query_ids(self, key: int) -> list[int]:
        """What to append to a haystack, or to an earlier question, to ask for `key`."""
        return [self.vocab.query(key)]

    def answer(self, ids: Sequence[int]) -> int:
        """The right next token behind `ids`, which end with a query."""
        return self.vocab.expected(ids)

    def predict(self, logits_V: torch.Tensor) -> int:
        """The model's answer: the best of all tokens."""
        return int(logits_V.argmax())

    def save(self, folder: str | Path) -> Path:
        """Writes config, safetensors and tokenizer into `folder`, ready for `LLM(folder)` and for transformers."""
        self.build().save_pretrained(folder)
        self.vocab.tokenizer().save_pretrained(folder)
        return Path(folder)

    def build(self) -> LlamaForCausalLM:
        """The model in fp32, in eval mode: an unmodified `LlamaForCausalLM`."""
        model = LlamaForCausalLM(self.config).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)  # norms pass their input on, everything else is off
        model.model.embed_tokens.weight.copy_(self._embeddings())
        attention = model.model.layers[0].self_attn
        assert isinstance(attention, LlamaAttention)
        for head in range(self.config.num_attention_heads):
            self._set_query_head(attention, head)
        for head in range(self._num_kv_heads):
            self._set_kv_head(attention, head)
        model.lm_head.weight.copy_(self._head())
        return model

    def _embeddings(self) -> torch.Tensor:
        """[V, E]: what each token is, in flags of size 1; `norm` fills each row up so that RMSNorm changes nothing."""
        vocab, at = self.vocab, self._at
        weight = torch.zeros(vocab.size, self.config.hidden_size)
        for key in range(vocab.num_keys):
            weight[vocab.query(key), [at["ask"] + key, at["asking"], at["value"] + vocab.num_values]] = 1.0
            for value in range(vocab.num_values):
                weight[vocab.pair(key, value), [at["offer"] + key, at["value"] + value]] = 1.0
        for index in range(vocab.num_fillers):
            weight[vocab.filler(index), at["value"] + index % vocab.num_values] = 1.0
        for token in (NONE, *map(vocab.answer, range(vocab.num_values))):
            weight[token, at["answered"]] = 1.0
        weight[:, at["norm"]] = (self.config.hidden_size - weight.square().sum(1)).sqrt()
        return weight

    def _set_query_head(self, attention: LlamaAttention, head: int) -> None:
        """Query: the asked key's code and the sink. Output: how well what came back matches each value's code."""
        dim, at = self._head_dim, self._at
        kv_head = head * self._num_kv_heads // self.config.num_attention_heads
        rows = head * dim + self._still
        scale = dim**0.5
        codes = self._dealt(self._key_codes, kv_head)
        attention.q_proj.weight[rows[1:], at["ask"] : at["ask"] + len(codes)] = codes.T * (scale * MATCH / _CODE_BITS)
        attention.q_proj.weight[rows[0], at["asking"]] = scale * SINK
        values = self._dealt(self._value_codes, kv_head)
        read = slice(at["read"], at["read"] + len(values))
        attention.o_proj.weight[read, head * dim : (head + 1) * dim] = values / (dim * self.config.num_attention_heads)

    def _set_kv_head(self, attention: LlamaAttention, head: int) -> None:
        dim, at = self._head_dim, self._at
        rows = head * dim + self._still
        codes, values = self._dealt(self._key_codes, head), self._dealt(self._value_codes, head)
        attention.k_proj.weight[rows[1:], at["offer"] : at["offer"] + len(codes)] = codes.T
        attention.k_proj.weight[rows[0], at["asking"]] = 1.0
        attention.v_proj.weight[head * dim : (head + 1) * dim, at["value"] : at["value"] + len(values)] = values.T

    def _head(self) -> torch.Tensor:
        """[V, E]: answers from what the heads read, 1 if all agree; `none` wins as soon as half a head is missing."""
        vocab, at, heads = self.vocab, self._at, self.config.num_attention_heads
        weight = torch.zeros(vocab.size, self.config.hidden_size)
        for value in range(vocab.num_values):
            weight[vocab.answer(value), at["read"] + value] = 1.0
        weight[NONE, at["read"] + vocab.num_values] = 1.0
        weight[NONE, at["asking"]] = 1.0 - 0.5 / heads
        weight[EOS, at["answered"]] = 1.0
        return weight * _LOGIT_SCALE * heads

    def _dealt(self, codes: torch.Tensor, head: int) -> torch.Tensor:
        """The codes in this kv head's own order."""
        order = np.random.default_rng([head, len(codes)]).permutation(len(codes))
        return codes[torch.from_numpy(order)]


def _still_dims(head_dim: int, max_positions: int) -> np.ndarray:
    """Dimensions that turn by less than `_MAX_ANGLE` over all positions, the sink's and the codes' (at most 12).

    Llama's rotary pairs dimension i with i + D/2, both at frequency theta ** (-2i / D).
    """
    pairs = np.arange(head_dim // 2)
    still = pairs[max_positions * _ROPE_THETA ** (-2.0 * pairs / head_dim) <= _MAX_ANGLE]
    return np.concatenate([still, still + head_dim // 2])[: _CODE_BITS + 1]


def _key_codes(num_keys: int) -> torch.Tensor:
    """[keys, bits] of -1 and 1, each two at least `_CODE_DISTANCE` apart: a lexicode (Conway and Sloane 1986)."""
    words: list[int] = []
    for word in range(2**_CODE_BITS):
        if len(words) == num_keys:
            break
        if all((word ^ other).bit_count() >= _CODE_DISTANCE for other in words):
            words.append(word)
    if len(words) < num_keys:
        raise ValueError(f"{num_keys} keys do not fit: there are codes for {len(words)}")
    return torch.tensor([[1.0 - 2.0 * (word >> bit & 1) for bit in range(_CODE_BITS)] for word in words])


def _value_codes(count: int, dim: int) -> torch.Tensor:
    """[count, dim] of -1 and 1: rows of a Hadamard matrix (Sylvester's construction), then their negatives."""
    if dim & (dim - 1):
        raise ValueError(f"head_dim must be a power of two, got {dim}")
    rows = torch.ones(1, 1)
    while len(rows) < dim:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return torch.cat([rows, -rows])[:count]
