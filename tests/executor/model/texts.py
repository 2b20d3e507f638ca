"""Seeded texts to compare tokenizers on: many scripts, emoji, whitespace, control characters, special tokens."""

from __future__ import annotations

import random

_WORDS = """
    the quick brown fox jumps over lazy dog scheduler executor runs one step after another tokens in and out
    I'm You'LL they've it's don't naïve café Größe über façade Ångström résumé
    東京 世界 你好 こんにちは カタカナ 안녕하세요 привет мир текст Ελληνικά עברית العربية हिन्दी सूर्य ไทย தமிழ்
    ქართული Հայերեն አማርኛ ສະບາຍດີ 0 12 345 6789 1,000,000 3.14159 2026-11-30 aaa aaaa bbb abab == === ----
    http://a.b/c?d=e&f=g def f(x): return x**2 {"a":[1,2]} CamelCaseWord snake_case ĳ ﬁ ½ ²
"""
WORDS = _WORDS.split()
EMOJI = ["🙂", "🚀", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "🇫🇷🇯🇵", "👍🏽", "❤️", "1️⃣", "🧑🏿\u200d🚀", "\U0001fae8"]
WHITESPACE = [
    " ",
    "  ",
    "   ",
    " " * 9,
    " " * 40,
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    *"\u00a0\u3000\u2003\u200b\u2028",
]
CONTROL = [*map(chr, range(32)), *"\x7f\x85\ufeff\ufffd\ufffe\u202e\u2581\U000e0041\U0010ffff"]
COMBINING = [
    "e\u0301",
    "a\u0308\u0323",
    "\u0e01\u0e34\u0e4c",
    "q\u0307\u0323",
    "\u1100\u1161\u11a8",
    "Z\u0351\u036b\u0343",
]
PUNCTUATION = [*".,(-…—。！“”", "!?", "...", ")[]{}", "<|", "|>", "</", "'s", "'S", "''", "#$%"]


def texts(count: int, seed: int, special: tuple[str, ...] = ()) -> list[str]:
    """``count`` different texts of up to some hundred characters; ``special`` tokens stand in some of them."""
    rng = random.Random(seed)
    pools = [WORDS, WORDS, EMOJI, WHITESPACE, CONTROL, COMBINING, PUNCTUATION]

    def piece() -> str:
        kind = rng.random()
        if kind < 0.35:
            return rng.choice(WORDS) + rng.choice(["", " ", " ", "  ", "\n"])
        if kind < 0.40:
            return "".join(
                chr(rng.choice((rng.randrange(0x20, 0x250), rng.randrange(0x370, 0xD800)))) for _ in range(4)
            )
        if kind < 0.43 and special:
            return rng.choice(special)
        if kind < 0.45:
            return rng.choice("a- \n=.0你") * rng.randint(2, 40)
        return rng.choice(rng.choice(pools))

    found: dict[str, None] = dict.fromkeys(("", " ", "\n", *WORDS, *EMOJI, *WHITESPACE, *CONTROL, *special))
    while len(found) < count:
        found["".join(piece() for _ in range(rng.randint(1, 16)))] = None
    return list(found)[:count]
