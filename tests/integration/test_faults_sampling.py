"""Fault cases around the LM head: rows it is given, memory it takes, and ids that must never come out of it."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
import torch

from longctx.build import score_alone
from longctx.events import TokenEvent
from longctx.kv.memory import max_scored
from longctx.params import SamplingParams
from longctx.request import ScoreSheet
from tests.helpers.engine import generate, make_engine, run_all
from tests.helpers.tiny import hf_logits, make_tiny, random_ids


class PeakMemory:
    """The largest resident size of this process while the block runs, above that at its start."""

    def __enter__(self) -> PeakMemory:
        self._process = psutil.Process()
        self._start = self._peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.is_set():
            self._peak = max(self._peak, self._process.memory_info().rss)
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._peak - self._start


def test_scoring_a_long_prompt_takes_bounded_memory() -> None:
    """B89: logits [tokens, vocabulary] and their fp32 log-softmax at once (vllm-project/vllm#5907, #52054, #1532).

    3,000 tokens of a vocabulary of 200,000 would take 2.4 GB; a slice of rows and its copy are what is allowed.
    """
    vocab = 200_000
    model = make_tiny("llama", num_hidden_layers=1, hidden_size=16, head_dim=16, vocab_size=vocab)
    engine = make_engine(model, kv_tokens=3072, max_chunk_tokens=4096)
    ids = random_ids(3000)
    sheet = ScoreSheet()
    engine.submit(engine.make_request(ids[:100], SamplingParams(max_tokens=1), score=sheet))
    run_all(engine)
    short = torch.cat([torch.as_tensor(x) for x in sheet.logprobs])
    unsliced = hf_logits(model, ids[:100]).log_softmax(-1)
    assert (short[:-1] - unsliced[torch.arange(99), torch.tensor(ids[1:100])]).abs().max() <= 1e-4

    sheet = ScoreSheet()
    engine.submit(engine.make_request(ids, SamplingParams(max_tokens=1), score=sheet))
    rows_per_slice = max_scored(vocab)
    most = 0
    with PeakMemory() as memory:
        while engine.has_work:
            engine.step()
            assert engine.last_step is not None
            most = max(most, engine.last_step.num_tokens)
    assert most == rows_per_slice and sum(map(len, sheet.logprobs)) == 3000
    assert 0 < memory.growth <= 2 * rows_per_slice * vocab * 4 + (16 << 20)


def test_prompt_logprobs_of_a_long_prompt_take_bounded_memory() -> None:
    """B89 again, for logprobs beside an answer, and for eight requests at once: they share one slice of logits."""
    vocab = 200_000
    model = make_tiny("llama", num_hidden_layers=1, hidden_size=16, head_dim=16, vocab_size=vocab)
    engine = make_engine(model, kv_tokens=8192, max_chunk_tokens=4096)
    prompts = [random_ids(400, seed=i) for i in range(8)]
    generate(engine, prompts[0][:50], 2, prompt_logprobs=1, logprobs=1)
    params = SamplingParams(max_tokens=3, prompt_logprobs=1, logprobs=20, repetition_penalty=1.2, ignore_eos=True)
    requests = [engine.add(ids, params) for ids in prompts]
    with PeakMemory() as memory:
        ends = run_all(engine)
    assert [len(ends[r.id].prompt_logprobs or ()) for r in requests] == [400] * 8
    assert 0 < memory.growth <= 2 * max_scored(vocab) * vocab * 4 + (16 << 20)


def test_scoring_keeps_no_logits_that_nobody_wants() -> None:
    """B89: only the logprobs of the tokens themselves are kept."""
    engine = make_engine(make_tiny("llama"))
    sheet = ScoreSheet()
    engine.submit(engine.make_request(random_ids(90), SamplingParams(max_tokens=1), score=sheet))
    run_all(engine)
    assert sheet.logits == [] and sum(map(len, sheet.logprobs)) == 90


def test_the_head_sees_the_rows_that_sample_and_no_others() -> None:
    """B90: logits for every position of the prompt (Blaizzy/mlx-vlm#1732, huggingface/transformers#46660, #30860).

    A prompt in chunks beside decoding requests: the head is given one row for each sequence that samples in a step.
    """
    engine = make_engine(make_tiny("llama"), chunk_tokens=24)
    rows: list[int] = []
    engine.runner._model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[-2]))
    for i in range(3):
        engine.add(random_ids(10 + i, seed=i), SamplingParams(max_tokens=12, ignore_eos=True))
    engine.add(random_ids(400), SamplingParams(max_tokens=3, ignore_eos=True))
    sampling = []
    while engine.has_work:
        tokens = sum(isinstance(event, TokenEvent) for event in engine.step())
        assert engine.last_step is not None
        assert tokens == sum(row.sample for row in engine.last_step.rows)
        sampling.append(tokens)
    assert rows == sampling and {0, 1, 3} <= {*rows} and max(rows) <= 4


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 5.0, "top_k": 400}, {"top_p": 0.9}])
def test_ids_that_the_tokenizer_does_not_know_are_never_generated(options: dict[str, float]) -> None:
    """B99: rows of the head beyond the tokenizer are sampled (vllm-project/vllm#13175).

    300 known ids, 512 rows, 20 added to the logits of the padded ones.
    """
    engine = make_engine(make_tiny("llama", vocab_size=512), vocab_limit=300)
    boost = torch.zeros(512)
    boost[300:] = 20.0
    engine.runner._model.lm_head.register_forward_hook(lambda _, __, logits: logits + boost)
    assert score_alone(engine, random_ids(10, vocab=300))[-1].argmax() >= 300, "the model does want them"
    for seed in range(3):
        event = generate(engine, random_ids(10, vocab=300), 40, ignore_eos=True, seed=seed, **options)
        assert len(event.token_ids) == 40 and max(event.token_ids) < 300
        # What was generated is a prompt like any other.
        assert generate(engine, event.token_ids, 1, ignore_eos=True).reason == "length"
