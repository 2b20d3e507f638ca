"""Small tokenizers of the two families, made here so that no test needs a model."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog. STOP here, stop there; user: hello, assistant: hi!",
    "café naïve 你好世界 текст \U0001f600\U0001f680\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 the end of the story and the end of the text",
]
LONG = "L" * 2000
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE. Ids 0, 1, 2 are SPECIALS, the last is LONG."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool \u00e9>", special=False), AddedToken(LONG, special=False)])
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    """BPE with byte fallback, as Llama 2's. Ids 0, 1, 2 are <unk>, <s>, </s>; 3 to 258 are the bytes."""
    words = [
        "\u2581",
        "\u2581the",
        "\u2581end",
        "the",
        "e",
        "t",
        "h",
        "n",
        "d",
        "a",
        "\u00e9",
        "\u4f60",
        ".",
        "\u2581\u2581",
    ]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for word in words:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """The same vocabulary with the one-step decoder."""
    tokenizer = Tokenizer.from_str(sentencepiece().to_str())
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
