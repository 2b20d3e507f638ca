"""The pre-tokenizers that ``tokenizer.ggml.pre`` names, for byte-level BPE: where a text is cut before merging.

Each name stands for the exact rule of the tokenizer it was taken from. A name that is not here is refused: a wrong cut
would give a model that answers, a little worse, with nothing to show why. Old files say ``default``, or nothing: their
makers did not know the rule. It is that of the vocabulary, where this is one that is known by its own special tokens.
Else ``default`` is the rule that llama.cpp has for it, with a warning; a file that says nothing is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers

from executor_svc.weights.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Style:
    """``splits``: patterns whose matches are cut out, one after the other; ``digits``: then every digit is cut out;
    ``gpt2``: GPT-2's own pattern last. ``ignore_merges``: a piece that is a token itself is not merged from parts."""

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    ignore_merges: bool = False
    normalize_nfc: bool = False
    add_bos: bool = False  # where the file does not say

    def pre_tokenizer(self) -> Any:
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False) for pattern in self.splits
        ]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3: Final = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_PUNCTUATION}"
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}"
)
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The letters that have a case, of the Unicode of that tokenizer's day and not all of them; by number, as some of them
# look like others.
_DEEPSEEK_LETTERS: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
_SEED_CODER: Final = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT: Final = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")


_GPT2_STYLE: Final = Style(gpt2=True)
_DIGITS_STYLE: Final = Style(digits=True, gpt2=True)
_LLAMA3_STYLE: Final = Style((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_STYLE: Final = Style((_QWEN2,), normalize_nfc=True)

STYLES: Final[dict[str, Style]] = {
    "gpt-2": _GPT2_STYLE,
    "phi-2": _GPT2_STYLE,
    "olmo": _GPT2_STYLE,
    "smollm": _DIGITS_STYLE,
    "starcoder": _DIGITS_STYLE,
    "refact": _DIGITS_STYLE,
    "llama-bpe": _LLAMA3_STYLE,
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "qwen2": _QWEN2_STYLE,
    "deepseek-r1-qwen": _QWEN2_STYLE,
    "tekken": Style((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": Style((_GPT4O,)),
    "dbrx": Style((_LLAMA3,)),
    "smaug-bpe": Style((_LLAMA3,), add_bos=True),
    "seed-coder": Style((_SEED_CODER,)),
    "deepseek-v3": Style(_DEEPSEEK3),
    "deepseek-llm": Style(_DEEPSEEK_LLM, digits=True),
    "deepseek-coder": Style(_DEEPSEEK_CODER, digits=True),
}

DEFAULT: Final = Style(_DEFAULT)
# Vocabularies that old files carry: a special token, its id, and the name of the rule.
_LANDMARKS: Final = (
    ("<|begin_of_text|>", 128000, "llama-bpe"),
    ("<|im_start|>", 151644, "qwen2"),
    ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", 32013, "deepseek-coder"),
    ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", 100000, "deepseek-llm"),
)


def style_of(name: object, tokens: Sequence[str]) -> Style:
    """The rule by ``tokenizer.ggml.pre``, None where the file has none, and its vocabulary. ``CheckpointError`` for a
    name that is not known, or none."""
    if isinstance(name, str) and name in STYLES:
        return STYLES[name]
    if name in (None, "default"):
        for text, index, known in _LANDMARKS:
            if index < len(tokens) and tokens[index] == text:
                log.info("pre-tokenizer by the vocabulary", extra={"stated": name, "pre_tokenizer": known})
                return STYLES[known]
    if name == "default":
        log.warning("the file's maker did not know the model's pre-tokenizer: texts may be cut as in no training")
        return DEFAULT
    raise CheckpointError(f"gguf: pre-tokenizer {name!r} is not supported (supported: {[*STYLES, 'default']})")
