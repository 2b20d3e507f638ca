"""The pre-tokenizers that ``tokenizer.ggml.pre`` names, for byte-level BPE: where a text is cut before merging.

Each name stands for the exact rule of the tokenizer it was taken from. A name that is not here is refused, ``default``
too: it says that the file's maker did not know the rule, and a wrong cut would give a model that answers, a little
worse, with nothing to show why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers


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
    "deepseek-v3": Style(_DEEPSEEK3),
    "deepseek-coder": Style(_DEEPSEEK_CODER, digits=True),
}
