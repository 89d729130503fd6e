"""Text to ids by the model's own rules: BOS exactly once, chat templates as the tokenizer renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longctx.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, None when it has none. Raises ModelError when it has one that cannot be read."""
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions for corrupt files
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"the tokenizer in {folder} cannot be read: {reason}; download it again") from error
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a plain prompt, with BOS at the front exactly when the model's tokenizer adds one.

    A text that already starts with the BOS token's spelling (a rendered template) keeps that one and gets no second.
    Spellings of special tokens elsewhere in the text become those tokens, as Hugging Face does it.
    """
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if bos is None or ids[:2] != [bos, bos]:
        return ids
    plain = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    added_one = plain[:1] == [bos] and plain[1:2] != [bos]
    return ids[1:] if added_one else ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **template_options: Any,
) -> list[int]:
    """The ids of a conversation, as `apply_chat_template(tokenize=True)` gives them: the template decides about BOS.

    Raises ModelError for a model without a template, and for messages that the template refuses.
    """
    return encode_rendered(tokenizer, render_chat(tokenizer, messages, add_generation_prompt, **template_options))


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **template_options: Any,
) -> str:
    """The text that the model's template makes of a conversation; raises as `encode_chat` does."""
    if not tokenizer.chat_template:
        raise ModelError(
            "this model has no chat template (it is a base model): send a plain prompt (/v1/completions, --prompt), "
            "or load an instruction-tuned model"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_options,
        )
    except Exception as error:  # jinja's errors share no base with the template's own raise_exception
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the model's chat template refuses these messages: {reason or type(error).__name__}"
        ) from error
    assert isinstance(text, str)
    return text


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that a template has rendered: nothing is added to it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
