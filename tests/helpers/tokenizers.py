"""Small real tokenizers, built in memory: no hub is needed and no file is read."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LINES = (
    "the quick brown fox jumps over the lazy dog",
    " the key is 4711 and the door is open; say it again: open the door.",
    "naïve café — Übergröße, señor; 東京 今日は 你好 世界 नमस्ते दुनिया",
    "family 👩‍👩‍👧‍👦 and flag 🇩🇪 and thumbs 👍🏽, e\u0301 combined",
)
SPECIALS = ("<|start|>", "<|end|>")


@functools.cache
def byte_level_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2 and SmolLM2 have it: few merges, so most characters span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(LINES[:2], trainer)
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[1])


def byte_fallback_tokenizer(strip_first: bool) -> PreTrainedTokenizerFast:
    """A SentencePiece-like BPE with byte fallback: `strip_first` as Llama 2 (drops the first space), else as Gemma."""
    words = ["▁", "▁the", "▁x", "x", "a", "b", "c", "é", "今", "▁key", "▁▁"]
    tokens = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words, "\ufffd"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip_first:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), tokenizer.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", *SPECIALS)])
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[1], unk_token="<unk>")


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """A Unigram model with the Metaspace decoder and no byte fallback, as T5 and XLM-R have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[1], unk_token="<unk>")
