"""The language of the needle model: its tokens, prompts with needles at given depths, and the one right answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, NONE = 0, 1, 2
_FIRST = 3


@dataclass(frozen=True)
class NeedleVocab:
    """Token ids: `<bos> <eos> none`, answers `v3`, queries `k7?`, pairs `k7=v3`, fillers `w5`.

    One pair token is one needle. Each filler and each pair carries a value, so that attention to a wrong place shows.
    """

    num_keys: int
    num_values: int
    num_fillers: int

    @property
    def size(self) -> int:
        return self.filler(self.num_fillers)

    def answer(self, value: int) -> int:
        return _FIRST + value

    def query(self, key: int) -> int:
        return _FIRST + self.num_values + key

    def pair(self, key: int, value: int) -> int:
        return _FIRST + self.num_values + self.num_keys + key * self.num_values + value

    def filler(self, index: int) -> int:
        return self.pair(self.num_keys, 0) + index

    def make_prompt(self, length: int, needles: Mapping[int, float], seed: int = 0) -> list[int]:
        """A haystack of exactly `length` tokens: BOS, fillers, and one pair per needle with a random value.

        `needles` maps keys to depths: 0 is right behind BOS, 1 the last token. A place that is taken moves a needle to
        the nearest free one. Ask by appending `[query(key)]`, as often as wanted. Raises ValueError for a needle that
        does not exist or does not fit.
        """
        for key, depth in needles.items():
            if not (0 <= key < self.num_keys and 0.0 <= depth <= 1.0):
                raise ValueError(
                    f"needle {key} at depth {depth}: keys go from 0 to {self.num_keys - 1}, depths from 0 to 1"
                )
        if len(needles) > length - 1:
            raise ValueError(f"{len(needles)} needles do not fit into {length} tokens behind the first")
        rng = np.random.default_rng(seed)
        ids = self.filler(0) + rng.integers(0, self.num_fillers, length)
        ids[0] = BOS
        taken = {0}
        for key, depth in needles.items():
            place = 1 + round(depth * (length - 2))
            near = (place + sign * step for step in range(length) for sign in (1, -1))
            place = next(p for p in near if 0 < p < length and p not in taken)
            taken.add(place)
            ids[place] = self.pair(key, int(rng.integers(self.num_values)))
        return ids.tolist()

    def expected(self, ids: Sequence[int]) -> int:
        """The right next token behind `ids`, which end with a query: the answer of its key's pair.

        `none` where the key has no pair, or pairs that contradict each other.
        """
        key = ids[-1] - self.query(0)
        assert 0 <= key < self.num_keys, "the last token must be a query"
        values = np.asarray(ids) - self.pair(key, 0)
        found = np.unique(values[(values >= 0) & (values < self.num_values)])
        return self.answer(int(found[0])) if len(found) == 1 else NONE

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Words separated by spaces, BOS in front: so that text prompts and answers work like any model's."""
        names = ["<bos>", "<eos>", "none", *(f"v{v}" for v in range(self.num_values))]
        names += [f"k{k}?" for k in range(self.num_keys)]
        names += [f"k{k}=v{v}" for k in range(self.num_keys) for v in range(self.num_values)]
        names += [f"w{i}" for i in range(self.num_fillers)]
        tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="none"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
