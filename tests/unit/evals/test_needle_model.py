"""The needle model under Hugging Face eager: always right, and wrong exactly where its cache was damaged."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from longctx.evals.needle_model import MATCH, SINK, NeedleModel
from longctx.evals.needle_prompt import EOS, NONE

LENGTH, BLOCK = 4096, 256
SHAPES = [(16, 4, 4), (16, 4, 2), (16, 4, 1), (32, 4, 2)]  # head dim, query heads, kv heads
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # the new name came with 5.24


def eager(needle: NeedleModel) -> LlamaForCausalLM:
    model = needle.build()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def needle(request):
    head_dim, num_heads, num_kv_heads = request.param
    return NeedleModel(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.fixture(scope="module")
def model(needle):
    return eager(needle)


def prefill(model, ids, positions=None):
    """The cache of a haystack. In the only layer it depends on the tokens alone, so a fast attention may compute it."""
    model.set_attn_implementation("sdpa")
    past = model(torch.tensor([ids]), position_ids=positions, use_cache=True, logits_to_keep=1).past_key_values
    model.set_attn_implementation("eager")
    return past


def ask_all(needle, model, ids, damage=lambda keys, values: None, stretch=1):
    """(keys whose answer is right, answers by key), asked in a row: to each question the earlier ones are more sinks.

    `stretch` is the distance between positions.
    """
    keys = range(needle.vocab.num_keys)
    positions = torch.arange(len(ids) + len(keys))[None] * stretch
    past = prefill(model, ids, positions[:, : len(ids)])
    damage(past.layers[0].keys, past.layers[0].values)
    queries = torch.tensor([[q for k in keys for q in needle.query_ids(k)]])
    logits = model(queries, past_key_values=past, position_ids=positions[:, len(ids) :]).logits[0]
    answers = {k: needle.predict(row) for k, row in zip(keys, logits, strict=True)}
    return {k for k in keys if answers[k] == needle.answer(ids + needle.query_ids(k))}, answers


def spread(needle, rotation=0, count=11):
    """Every key but the last at one of `count` depths, another one in each rotation."""
    return {k: (k + rotation) % count / (count - 1) for k in range(needle.vocab.num_keys - 1)}


def test_it_is_an_unmodified_llama(model):
    assert type(model) is LlamaForCausalLM


def test_all_keys_at_all_depths(needle, model):
    """100 % at 4K: every key at each of eleven depths, and `none` for the key that is not there."""
    everything = set(range(needle.vocab.num_keys))
    for rotation in range(11):
        ids = needle.make_prompt(LENGTH, spread(needle, rotation), seed=rotation)
        right, answers = ask_all(needle, model, ids)
        assert right == everything
        assert answers[needle.vocab.num_keys - 1] == NONE
        assert NONE not in list(answers.values())[:-1]


def test_a_whole_prompt_in_one_eager_forward():
    needle = NeedleModel()
    ids = needle.make_prompt(LENGTH, spread(needle), seed=99)
    logits = eager(needle)(torch.tensor([ids + needle.query_ids(12)]), logits_to_keep=1).logits[0, -1]
    assert needle.predict(logits) == needle.answer(ids + needle.query_ids(12)) != NONE


def test_two_million_positions(needle, model):
    """The rotary angles of 2M positions, without their tokens: a prompt stretched over all of them."""
    assert needle.max_angle < 0.01
    ids = needle.make_prompt(LENGTH, spread(needle))
    stretch = needle.config.max_position_embeddings // (LENGTH + needle.vocab.num_keys)
    right, _ = ask_all(needle, model, ids, stretch=stretch)
    assert len(right) == needle.vocab.num_keys


def damaged_block(needle, ids, block):
    start, end = block * BLOCK, (block + 1) * BLOCK
    inside = {(token - needle.vocab.pair(0, 0)) // needle.vocab.num_values for token in ids[start:end]}
    return slice(start, end), inside & set(range(needle.vocab.num_keys))


@pytest.mark.parametrize("block", [0, 5, LENGTH // BLOCK - 1])
@pytest.mark.parametrize("kind", ["zeroed", "K halved", "K zeroed", "V zeroed", "one head's K halved"])
def test_damage_fails_exactly_the_needles_inside(needle, model, kind, block):
    """Zeroing one block, or halving its K, in all heads or in one, turns exactly its needles into `none`."""
    if kind.startswith("one head") and needle.config.num_key_value_heads == 1:
        pytest.skip("there is one head")
    keys = range(needle.vocab.num_keys - 1)
    ids = needle.make_prompt(LENGTH, {k: k / (len(keys) - 1) for k in keys}, seed=block)
    place, inside = damaged_block(needle, ids, block)
    assert inside

    def damage(k, v):
        if kind in ("zeroed", "K zeroed"):
            k[:, :, place] = 0
        if kind in ("zeroed", "V zeroed"):
            v[:, :, place] = 0
        if kind == "K halved":
            k[:, :, place] *= 0.5
        if kind == "one head's K halved":
            k[:, -1, place] *= 0.5

    right, answers = ask_all(needle, model, ids, damage)
    assert set(range(needle.vocab.num_keys)) - right == inside
    assert {answers[k] for k in inside} == {NONE}


def test_swapped_heads_fail_every_needle(needle, model):
    """The heads hold different codes, so reading another head's cache is not an answer by luck."""
    if needle.config.num_key_value_heads == 1:
        pytest.skip("there is one head")

    def swap(k, v):
        k.copy_(k.flip(1))
        v.copy_(v.flip(1))

    ids = needle.make_prompt(512, spread(needle))
    _, answers = ask_all(needle, model, ids, swap)
    assert list(answers.values()).count(NONE) >= needle.vocab.num_keys - 1


def test_eight_bits_are_enough(needle, model):
    """K and V rounded to 8 bits with one scale per token and head change no answer."""

    def to_int8(k, v):
        for x in (k, v):
            scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
            x.copy_((x / scale).round() * scale)

    ids = needle.make_prompt(512, spread(needle), seed=3)
    right, _ = ask_all(needle, model, ids, to_int8)
    assert len(right) == needle.vocab.num_keys


def test_bfloat16_is_enough(needle):
    ids = needle.make_prompt(512, spread(needle), seed=4)
    right, _ = ask_all(needle, eager(needle).to(torch.bfloat16), ids)
    assert len(right) == needle.vocab.num_keys


def test_questions_one_after_another(needle, model):
    """One haystack, many questions and their answers in a row, and the end after each answer."""
    ids = needle.make_prompt(512, spread(needle), seed=5)
    for key in (3, 31, 0, 3, 17):
        ids = ids + needle.query_ids(key)
        answer = needle.predict(model(torch.tensor([ids])).logits[0, -1])
        assert answer == needle.answer(ids)
        ids = [*ids, answer]
        assert needle.predict(model(torch.tensor([ids])).logits[0, -1]) == EOS


def test_contradicting_needles_are_none(needle, model):
    ids = needle.make_prompt(300, {7: 0.5}, seed=6)
    first = next(token for token in ids if needle.vocab.pair(7, 0) <= token < needle.vocab.pair(8, 0))
    value = first - needle.vocab.pair(7, 0)
    for second, expected in ((value, needle.vocab.answer(value)), ((value + 1) % needle.vocab.num_values, NONE)):
        asked = [*ids, needle.vocab.pair(7, second), *needle.query_ids(7)]
        assert needle.answer(asked) == expected == needle.predict(model(torch.tensor([asked])).logits[0, -1])


def test_scores_are_as_documented(needle):
    """160 asked, 120 itself, below 44 any other, 0 fillers: a gap of 40 on each side of the sink."""
    ids = needle.make_prompt(256, spread(needle))
    model = eager(needle)
    model.model.layers[0].self_attn.q_proj.weight /= 4  # all weights of the softmax stay within fp32
    asked = torch.tensor([ids + needle.query_ids(9)])
    weights = model(asked, output_attentions=True).attentions[0][0, :, -1]
    below_asked = 4 * (weights.amax(-1, keepdim=True).log() - weights.log())
    pairs = [i for i, t in enumerate(ids) if needle.vocab.pair(0, 0) <= t < needle.vocab.filler(0)]
    place = next(i for i in pairs if needle.vocab.pair(9, 0) <= ids[i] < needle.vocab.pair(10, 0))
    rest = [i for i in range(256) if i not in pairs]
    assert (below_asked[:, place] == 0).all()
    assert (below_asked[:, -1] - (MATCH - SINK)).abs().max() < 0.1
    assert below_asked[:, [i for i in pairs if i != place]].min() > MATCH - 44
    assert (below_asked[:, rest] - MATCH).abs().max() < 0.1


def test_saved_folder_loads_with_tokenizer(tmp_path):
    needle = NeedleModel(max_positions=4096)
    needle.save(tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in tmp_path.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == model.config.vocab_size
    ids = tokenizer("w1 k7=v3 w2 w3 k7?")["input_ids"]
    assert ids[-1:] == needle.query_ids(7)
    new = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, len(ids) :]
    assert tokenizer.decode(new, skip_special_tokens=True) == "v3"
    assert new.tolist() == [needle.vocab.answer(3), EOS]


def test_prompts():
    needle = NeedleModel()
    pairs = range(needle.vocab.pair(0, 0), needle.vocab.filler(0))
    depths = {1: 0.0, 2: 0.5, 3: 0.9, 4: 1.0}
    ids = needle.make_prompt(102, depths, seed=1)
    assert len(ids) == 102
    assert [i for i, token in enumerate(ids) if token in pairs] == [1, 51, 91, 101]
    assert ids == needle.make_prompt(102, depths, seed=1) != needle.make_prompt(102, depths, seed=2)
    crowded = needle.make_prompt(33, dict.fromkeys(range(32), 1.0))
    assert crowded[0] == 0 and all(token in pairs for token in crowded[1:]), "each moves to the nearest free place"
    assert needle.make_prompt(2, {0: 0.5})[1] in pairs
    for length, needles in ((100, {32: 0.5}), (100, {0: 1.5}), (2, {0: 0.1, 1: 0.2})):
        with pytest.raises(ValueError, match="needle"):
            needle.make_prompt(length, needles)


def test_token_ids_do_not_overlap():
    vocab = NeedleModel(num_keys=5, num_values=3, num_fillers=4).vocab
    borders = [vocab.answer(0), vocab.query(0), vocab.pair(0, 0), vocab.filler(0), vocab.size]
    assert [b - a for a, b in pairwise(borders)] == [3, 5, 15, 4]
    names = vocab.tokenizer().convert_ids_to_tokens(
        [vocab.answer(2), vocab.query(4), vocab.pair(4, 1), vocab.filler(3)]
    )
    assert names == ["v2", "k4?", "k4=v1", "w3"]
    assert len(vocab.tokenizer()) == vocab.size


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_keys": 65}, "64"),
        ({"num_values": 32}, "31"),
        ({"head_dim": 8}, "larger head_dim"),
        ({"max_positions": 2**30}, "fewer positions"),
        ({"head_dim": 48, "num_values": 3}, "power of two"),
    ],
)
def test_what_does_not_fit(options, text):
    with pytest.raises(ValueError, match=text):
        NeedleModel(**options)


def test_the_most_that_fits():
    needle = NeedleModel(num_keys=64, num_values=31)
    model = eager(needle)
    ids = needle.make_prompt(512, {k: k / 62 for k in range(63)})
    right, _ = ask_all(needle, model, ids)
    assert len(right) == 64
