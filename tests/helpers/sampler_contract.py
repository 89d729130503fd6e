"""What every sampler must do, whatever it runs on: subclass it in a test file and say how to sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longctx.params import SamplingParams
from longctx.penalties import TokenCounts
from longctx.step import StepRow


def step_row(params: SamplingParams, seed: int = 0, position: int = 10, prompt=(0,), output=()) -> StepRow:
    """A row that samples the token at `position`, after `prompt` and `output` as far as penalties are concerned."""
    token = np.array([1], np.int64)
    counts = TokenCounts(params, list(prompt))
    for token_id in output:
        counts.add(token_id)
    history = counts.snapshot() if params.penalizes else None
    return StepRow("r", position - 1, token, (), 1, 0, params, seed, sample=True, history=history)


class SamplerContract:
    """Give `sample_rows(logits [R, V], rows, vocab_limit) -> list of token ids or errors`."""

    def sample_rows(self, logits_RV, rows, vocab_limit):
        raise NotImplementedError

    def draw(self, logits_V, params, seeds=range(1), position=10, vocab_limit=None, **before):
        logits_RV = torch.as_tensor(logits_V, dtype=torch.float32).expand(len(seeds), -1)
        limit = vocab_limit or logits_RV.shape[1]
        return self.sample_rows(logits_RV, [step_row(params, seed, position, **before) for seed in seeds], limit)

    def frequencies_fit(self, logits_V, params, expected, num_draws=2000, **before):
        """Chi-square against the expected probabilities, at fixed seeds; zero probability must never be drawn."""
        counts = np.bincount(self.draw(logits_V, params, range(num_draws), **before), minlength=len(expected))
        expected = np.asarray(expected)
        assert counts[expected == 0].sum() == 0
        kept = expected > 0
        chi2 = np.sum((counts[kept] - num_draws * expected[kept]) ** 2 / (num_draws * expected[kept]))
        # mean + 4 standard deviations of chi-square with this many degrees of freedom
        freedom = kept.sum() - 1
        assert chi2 <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9, (chi2, counts)

    def test_greedy_takes_the_best_and_the_lowest_id_of_equals(self):
        greedy = SamplingParams()
        assert self.draw([0.0, 3.0, 1.0], greedy) == [1]
        assert self.draw([0.0, 3.0, 1.0, 3.0, 3.0], greedy) == [1]
        many = torch.zeros(5000)
        many[[4000, 1234, 4999]] = 7.0
        assert self.draw(many, greedy) == [1234]

    def test_temperature(self):
        logits = [0.0, 1.0, 2.0, -1.0, -torch.inf]
        for temperature in (0.5, 1.0, 3.0):
            probs = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0).numpy()
            self.frequencies_fit(logits, SamplingParams(temperature=temperature), probs)

    def test_tiny_temperature_is_greedy_and_a_huge_one_is_flat(self):
        logits = [0.0, 50.0, 49.0, 1.0]
        for temperature in (1e-300, 1e-9, 1e-4):
            assert set(self.draw(logits, SamplingParams(temperature=temperature), range(50))) == {1}
        assert set(self.draw([0.0, 2.0, 2.0], SamplingParams(temperature=1e-6), range(50))) == {1}, "lowest of equals"
        assert set(self.draw(logits, SamplingParams(temperature=100.0), range(50))) == {0, 1, 2, 3}

    def test_top_k(self):
        logits = np.log([0.1, 0.4, 0.2, 0.3])
        self.frequencies_fit(logits, SamplingParams(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7])
        self.frequencies_fit(logits, SamplingParams(temperature=1.0, top_k=3), [0, 4 / 9, 2 / 9, 3 / 9])
        assert set(self.draw(logits, SamplingParams(temperature=1.0, top_k=1), range(50))) == {1}

    @pytest.mark.parametrize("top_k", [0, 4, 5, 10**9])
    def test_top_k_off_or_not_below_the_vocabulary_changes_nothing(self, top_k):
        probs = [0.1, 0.4, 0.2, 0.3]
        self.frequencies_fit(np.log(probs), SamplingParams(temperature=1.0, top_k=top_k), probs)

    def test_ties_at_the_border_of_top_k_keep_the_lowest_ids(self):
        params = SamplingParams(temperature=1.0, top_k=3)
        assert set(self.draw([1.0, 2.0, 1.0, 1.0, 1.0], params, range(200))) == {0, 1, 2}

    def test_top_p(self):
        logits = np.log([0.1, 0.4, 0.2, 0.3])
        self.frequencies_fit(logits, SamplingParams(temperature=1.0, top_p=0.65), [0, 4 / 7, 0, 3 / 7])
        self.frequencies_fit(logits, SamplingParams(temperature=1.0, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9])
        self.frequencies_fit(logits, SamplingParams(temperature=1.0, top_p=0.95), [0.1, 0.4, 0.2, 0.3])

    @pytest.mark.parametrize("top_p", [1e-300, 1e-17, 1e-6, 0.3])
    def test_a_small_top_p_keeps_the_best(self, top_p):
        assert set(
            self.draw(np.log([0.1, 0.4, 0.2, 0.3]), SamplingParams(temperature=1.0, top_p=top_p), range(50))
        ) == {1}

    def test_ties_at_the_border_of_top_p_keep_the_lowest_ids(self):
        params = SamplingParams(temperature=1.0, top_p=0.49)
        assert set(self.draw(torch.zeros(10), params, range(300))) == {0, 1, 2, 3, 4}

    def test_top_p_counts_the_mass_that_top_k_and_temperature_left(self):
        logits = np.log([0.1, 0.4, 0.2, 0.3])  # of the best two, the first holds 4/7
        params = SamplingParams(temperature=1.0, top_k=2, top_p=0.55)
        assert set(self.draw(logits, params, range(100))) == {1}
        # at temperature 1/2 the squares count: 0.16 of 0.30
        params = SamplingParams(temperature=0.5, top_p=0.52)
        assert set(self.draw(logits, params, range(100))) == {1}

    def test_min_p(self):
        logits = np.log([0.1, 0.4, 0.2, 0.3])
        self.frequencies_fit(logits, SamplingParams(temperature=1.0, min_p=0.6), [0, 4 / 7, 0, 3 / 7])
        self.frequencies_fit(logits, SamplingParams(temperature=1.0, min_p=0.4), [0, 4 / 9, 2 / 9, 3 / 9])
        for min_p in (1e-300, 0.2):
            self.frequencies_fit(logits, SamplingParams(temperature=1.0, min_p=min_p), [0.1, 0.4, 0.2, 0.3])

    def test_min_p_is_a_share_of_the_best_after_temperature(self):
        """At temperature 2 the roots count: 0.1 is half as probable as 0.4, and no longer a quarter."""
        logits = np.log([0.1, 0.4, 0.2, 0.3])
        assert set(self.draw(logits, SamplingParams(temperature=2.0, min_p=0.45), range(200))) == {0, 1, 2, 3}
        assert set(self.draw(logits, SamplingParams(temperature=1.0, min_p=0.45), range(200))) == {1, 2, 3}
        assert set(self.draw(logits, SamplingParams(temperature=0.5, min_p=0.45), range(200))) == {1, 3}

    def test_min_p_of_one_leaves_the_best_and_its_equals(self):
        assert set(self.draw([1.0, 3.0, 2.0], SamplingParams(temperature=9.0, min_p=1.0), range(50))) == {1}
        assert set(self.draw([3.0, 1.0, 3.0], SamplingParams(temperature=9.0, min_p=1.0), range(50))) == {0, 2}

    def test_min_p_beside_top_k_and_top_p(self):
        logits = np.log([0.1, 0.4, 0.2, 0.3])
        for kwargs in ({"top_k": 3}, {"top_p": 0.85}, {"top_k": 3, "top_p": 0.99}):
            kept = set(self.draw(logits, SamplingParams(temperature=1.0, min_p=0.6, **kwargs), range(100)))
            assert kept == {1, 3}, kwargs

    def test_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones(self):
        """Prompt and output count alike, and once however often a token came."""
        params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
        logits = [1.0, 1.0, -1.0, -1.0, 0.0]
        expected = np.exp([0.5, 1.0, -2.0, -1.0, 0.0])
        for before in ({"prompt": [0, 2, 4, 0]}, {"prompt": [0, 4], "output": [2, 2, 2]}, {"output": [2, 0, 4]}):
            self.frequencies_fit(logits, params, expected / expected.sum(), **before)

    def test_a_repetition_penalty_below_one_favours_what_came(self):
        params = SamplingParams(repetition_penalty=0.5)
        assert self.draw([1.0, 1.5, 0.0], params, prompt=[0]) == [0]
        assert self.draw([-1.0, -1.0, -1.5], params, prompt=[2]) == [2]

    def test_presence_and_frequency_count_the_output_only(self):
        """OpenAI's formula: minus count x frequency, minus presence where the count is above zero."""
        params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
        expected = np.exp([1.0, 1.0 - 0.5 - 3 * 0.25, 1.0 - 0.5 - 0.25, 1.0])
        self.frequencies_fit([1.0] * 4, params, expected / expected.sum(), prompt=[3, 3, 3], output=[1, 2, 1, 1])
        negative = SamplingParams(presence_penalty=-1.0)
        assert self.draw([0.0, 0.5, 0.0], negative, prompt=[0], output=[2]) == [2]

    def test_all_penalties_together_and_bias_last(self):
        """Repetition on the model's own logits, then presence and frequency, then the bias as it was given."""
        params = SamplingParams(
            temperature=1.0,
            repetition_penalty=2.0,
            presence_penalty=1.0,
            frequency_penalty=0.5,
            logit_bias={0: 2.0, 1: -1.0},
        )
        expected = np.exp([4.0 / 2 - 1.0 - 0.5 + 2.0, 2.0 - 1.0, 2.0 / 2])
        self.frequencies_fit([4.0, 2.0, 2.0], params, expected / expected.sum(), prompt=[2], output=[0])

    def test_bias_forces_and_forbids(self):
        logits = [0.0, 5.0, 3.0, -torch.inf]
        assert self.draw(logits, SamplingParams(logit_bias={0: 100.0})) == [0]
        assert self.draw(logits, SamplingParams(logit_bias={1: -100.0})) == [2]
        assert set(self.draw(logits, SamplingParams(temperature=5.0, logit_bias={1: -100.0}), range(50))) == {0, 2}
        assert self.draw(logits, SamplingParams(logit_bias={3: 100.0})) == [1], "what is impossible stays so"

    def test_penalties_and_bias_come_before_the_filters(self):
        logits = [3.0, 2.0, 1.0, 0.0]
        options = {"temperature": 1.0, "top_k": 2}
        assert set(self.draw(logits, SamplingParams(**options, presence_penalty=2.0), range(50), output=[0])) == {0, 1}
        assert set(self.draw(logits, SamplingParams(**options, frequency_penalty=2.0), range(50), output=[0] * 2)) == {
            1,
            2,
        }
        assert set(self.draw(logits, SamplingParams(**options, logit_bias={3: 9.0}), range(50))) <= {0, 3}
        # Temperature divides what the penalties left: at 0.1 a difference of 1 is a factor of 22,000.
        params = SamplingParams(temperature=0.1, presence_penalty=2.0)
        assert set(self.draw(logits, params, range(50), output=[0])) == {1}

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_the_logits_stay_as_they_are(self, temperature):
        """Logprobs are read from them afterwards, and a step may be repeated."""
        logits_RV = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
        before = logits_RV.clone()
        params = SamplingParams(
            temperature=temperature, repetition_penalty=1.5, presence_penalty=1.0, logit_bias={4: 3.0}, min_p=0.1
        )
        self.sample_rows(logits_RV, [step_row(params, prompt=range(20), output=[3, 4])], 50)
        assert torch.equal(logits_RV, before)

    def test_padded_ids_in_a_prompt_are_no_trouble(self):
        logits = torch.zeros(8)
        logits[2] = 1.0
        params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
        assert self.draw(logits, params, vocab_limit=5, prompt=[7, 5, 2], output=[2]) == [0]

    def test_padded_ids_are_never_sampled(self):
        """B99: the LM head had more rows than the tokenizer knows, and the model emitted them
        (vllm-project/vllm#13175). Tokenizer 300, weights 512, bias +20 on the padded rows."""
        logits = torch.randn(512, generator=torch.Generator().manual_seed(1))
        logits[300:] += 20.0
        for kwargs in (
            {},
            {"temperature": 1.0},
            {"temperature": 5.0, "top_k": 400},
            {"temperature": 1.0, "top_p": 0.9},
        ):
            tokens = self.draw(logits, SamplingParams(**kwargs), range(200), vocab_limit=300)
            assert max(tokens) < 300
        assert self.draw(logits, SamplingParams(), vocab_limit=300) == [int(logits[:300].argmax())]

    def test_poison_in_padded_ids_is_not_read(self):
        logits = torch.zeros(8)
        logits[2], logits[5:] = 3.0, torch.nan
        assert self.draw(logits, SamplingParams(), vocab_limit=5) == [2]

    def test_the_draw_depends_on_seed_and_position_only(self):
        """Neither on batch mates nor on the place in the batch: so not on preemption or on how a step was filled."""
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(6, 64, generator=generator)
        options = [
            {},
            {"top_k": 5, "repetition_penalty": 1.3},
            {"top_p": 0.8, "min_p": 0.02},
            {"top_k": 9, "top_p": 0.5, "presence_penalty": 1.0, "frequency_penalty": 0.3},
            {"logit_bias": {7: 2.0}},
            {"top_p": 0.99, "logprobs": 3},
        ]
        rows = [
            step_row(SamplingParams(temperature=1.0, **o), i % 3, 50 + i, range(i, 40), [3, 5, 5, 60][: i + 1])
            for i, o in enumerate(options)
        ]
        together = self.sample_rows(logits, rows, 64)
        for order in ([5, 4, 3, 2, 1, 0], [2], [0, 3], [1, 3, 4]):
            assert self.sample_rows(logits[order], [rows[i] for i in order], 64) == [together[i] for i in order]

    def test_seeds_and_positions_give_different_draws(self):
        logits, params = torch.zeros(1000), SamplingParams(temperature=1.0)
        assert len(set(self.draw(logits, params, range(200)))) > 150
        assert len({self.draw(logits, params, [7], position)[0] for position in range(1, 201)}) > 150
        assert self.draw(logits, params, [2**64 - 1]) == self.draw(logits, params, [2**64 - 1])

    @pytest.mark.parametrize("bad", [[0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3])
    @pytest.mark.parametrize(
        "kwargs",
        [
            {},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_k": 2, "top_p": 0.5},
            {"temperature": 1.0, "min_p": 0.5},
            {"repetition_penalty": 1.2, "presence_penalty": 1.0, "logit_bias": {1: 1.0}},
        ],
    )
    def test_a_broken_row_fails_alone(self, bad, kwargs):
        """A row with NaN, +inf or nothing to choose from gives an error that says so; its mates get their tokens."""
        logits = torch.tensor([[0.0, 9.0, 0.0], bad, [0.0, 0.0, 9.0]])
        rows = [step_row(SamplingParams()), step_row(SamplingParams(**kwargs), position=77), step_row(SamplingParams())]
        first, error, last = self.sample_rows(logits, rows, 3)
        assert (first, last) == (1, 2)
        assert isinstance(error, RuntimeError)
        assert "position 77" in str(error)
