"""What the scheduler tokenises with, after the assets' path, against the libraries that the vocabularies come from."""

from __future__ import annotations

import io
import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from executor_svc.weights.checkpoint import open_checkpoint
from executor_svc.weights.errors import CheckpointError
from executor_svc.weights.gguf_header import read_header
from executor_svc.weights.gguf_tokenizer import build_tokenizer
from executor_svc.weights.pre_tokenizers import STYLES, style_of
from scheduler_svc.api.text.detokenizer import Detokenizer
from scheduler_svc.api.text.tokenizer import Tokenizer
from tests.executor.model.texts import WORDS, texts

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ]
)  # fmt: skip

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
AFTER_WORDS = (r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


def ours(assets: dict[str, bytes]) -> Tokenizer:
    """As the scheduler makes it of the files that it fetched."""
    return Tokenizer(assets["tokenizer.json"], json.loads(assets["tokenizer_config.json"]))


def assert_same(tokenizer: Tokenizer, expected: Callable[[str], list[int]], sample: list[str]) -> None:
    wrong = [text for text in sample if tokenizer.encode(text, bos=False) != expected(text)]
    assert not wrong, f"{len(wrong)} of {len(sample)}: {wrong[:3]!r}"


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer.pieces)
    return "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()


def isolated(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [isolated(pattern), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def byte_level(pre: str) -> Library:
    """A trained byte-level vocabulary with the pre-tokenizer as the original tokenizer's file spells it."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    own = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library = Library(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    library.pre_tokenizer = {
        "gpt-2": own,
        "smollm": pre_tokenizers.Sequence([digits, own]),
        "llama-bpe": split(LLAMA3_SPLIT),
        "qwen2": split(LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")),
        "dbrx": split(LLAMA3_SPLIT),
        "smaug-bpe": split(LLAMA3_SPLIT),
        "tekken": split("|".join([*WORDS_BY_CASE, r"\p{N}", *AFTER_WORDS])),
        "gpt-4o": split("|".join([*(word + CONTRACTION + "?" for word in WORDS_BY_CASE), r"\p{N}{1,3}", *AFTER_WORDS])),
        "deepseek-coder": pre_tokenizers.Sequence(
            [
                *map(isolated, [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]),
                digits,
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        "default": pre_tokenizers.Sequence(
            [
                *map(isolated, [r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"]),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    }[pre]
    if pre == "qwen2":
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts(800, seed=5), trainer)
    library.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    return library


def gguf_assets(path: Path, fields: dict[str, Any]) -> dict[str, bytes]:
    """``fields`` through a GGUF file and back, as assets."""
    writer = GGUFWriter(str(path), "llama")
    for key, value in fields.items():
        {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)](
            f"tokenizer.ggml.{key}", value
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    built = build_tokenizer(read_header(path).fields, len(fields["tokens"]))
    return {"tokenizer.json": built.json, "tokenizer_config.json": json.dumps({"bos_token": built.bos}).encode()}


def gguf_of(library: Library, pre: str, **more: Any) -> dict[str, Any]:
    spec = json.loads(library.to_str())
    vocabulary = spec["model"]["vocab"] | {t["content"]: t["id"] for t in spec["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    added = {t["content"]: 3 if t["special"] else 4 for t in spec["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [added.get(token, 1) for token in tokens],
        "merges": merges, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    "pre",
    [
        "gpt-2", "smollm", "llama-bpe", "qwen2", "dbrx", "smaug-bpe", "tekken", "gpt-4o", "deepseek-coder", "default",
    ],
)  # fmt: skip
def test_byte_level_vocabularies_through_gguf(pre: str, tmp_path: Path) -> None:
    library = byte_level(pre)
    tokenizer = ours(gguf_assets(tmp_path / "a.gguf", gguf_of(library, pre, bos_token_id=1)))
    sample = texts(1200, seed=1, special=(*SPECIAL, "<tool é>"))
    assert_same(tokenizer, lambda text: list(library.encode(text, add_special_tokens=False).ids), sample)
    assert tokenizer.encode("a", bos=True)[:-1] == ([1] if pre in ("llama-bpe", "smaug-bpe", "tekken") else [])
    for text in sample[:300]:
        if pre != "qwen2" and not any(special in text for special in SPECIAL):
            assert decoded(tokenizer, tokenizer.encode(text, bos=False)) == text


@pytest.mark.parametrize("pre", [*STYLES, "default"])
def test_pre_tokenizers_cut_as_another_regex_library_does(pre: str) -> None:
    """The rule's patterns one after the other, what lies between matches being a piece too."""
    style = style_of(pre, [])
    patterns = [*style.splits, *[r"\p{N}"] * style.digits, *[GPT2_SPLIT] * style.gpt2]
    cut = style.pre_tokenizer()
    # Of what Unicode got after this Python, the two libraries need not know the same.
    sample = [text for text in texts(1600, seed=11) if all(unicodedata.category(char) != "Cn" for char in text)]
    assert len(sample) > 1000
    for text in sample:
        pieces = [text]
        for pattern in patterns:
            # The library's split gives what was captured, the matches, and what lies between.
            pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
        assert [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)] == pieces, text


def test_the_letters_of_deepseek_llm_are_the_cased_ones_of_its_day() -> None:
    pattern = regex.compile(STYLES["deepseek-llm"].splits[1].removeprefix(r"\s?"))
    letters = [char for char in map(chr, range(0x110000)) if pattern.fullmatch(char)]
    assert len(letters) == 2729
    assert {unicodedata.category(char) for char in letters} == {"Lu", "Ll", "Lt"}
    cut = STYLES["deepseek-llm"].pre_tokenizer()
    for text, pieces in (
        ("Hello world, 2024!\n  x ", ["Hello", " world", ",", " ", "2", "0", "2", "4", "!", "\n", " ", " x", " "]),
        ("我想在apple工作1314天～ ", ["我想在", "apple", "工作", "1", "3", "1", "4", "天", "～", " "]),
        ("ա ა हिन्दी  ", ["ա ", "ა", " ", "हिन्दी", "  "]),  # these are no letters to it
    ):
        assert [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("stated", [{}, {"pre": "default"}])
def test_old_files_by_their_vocabulary(stated: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    for text, index, name in (
        ("<|begin_of_text|>", 128000, "llama-bpe"), ("<|im_start|>", 151644, "qwen2"),
        ("<｜begin▁of▁sentence｜>", 32013, "deepseek-coder"), ("<｜begin▁of▁sentence｜>", 100000, "deepseek-llm"),
    ):  # fmt: skip
        tokens = [""] * index + [text]
        assert style_of(stated.get("pre"), tokens) is STYLES[name]
        assert style_of("gpt-2", tokens) is STYLES["gpt-2"]  # what is stated counts
        tokens[index] = "x"
        if stated:
            style_of("default", tokens)
            assert "did not know" in caplog.text
        else:
            with pytest.raises(CheckpointError, match="pre-tokenizer None is not supported"):
                style_of(None, tokens)


@pytest.mark.parametrize("pre", STYLES)
def test_every_pre_tokenizer_keeps_every_byte(pre: str, tmp_path: Path) -> None:
    tokenizer = ours(gguf_assets(tmp_path / "a.gguf", gguf_of(byte_level("gpt-2"), pre)))
    for text in texts(150, seed=2):
        if not STYLES[pre].normalize_nfc:
            assert decoded(tokenizer, tokenizer.encode(text, bos=False)) == text


def test_begin_token_of_a_gguf(tmp_path: Path) -> None:
    library = byte_level("gpt-2")
    for more, expected in (({"add_bos_token": True}, [2]), ({"add_bos_token": False}, []), ({}, [])):
        fields = gguf_of(library, "gpt-2", bos_token_id=2, **more)
        tokenizer = ours(gguf_assets(tmp_path / "a.gguf", fields))
        assert tokenizer.encode("", bos=True) == expected, more
        assert tokenizer.encode("x", bos=True)[:-1] == expected, more


def trained(**options: Any) -> bytes:
    """A SentencePiece model with byte fallback, trained on the words of the texts."""
    out = io.BytesIO()
    corpus = [" ".join(WORDS[i : i + 9]) for i in range(len(WORDS))] * 20
    settings = {"vocab_size": 700, "normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=out, byte_fallback=True, hard_vocab_limit=False, num_threads=1,
        minloglevel=2, **settings,
    )  # fmt: skip
    return out.getvalue()


GEMMA = {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁", "▁▁▁▁", "\n\n", "\n", "<tool>"]}
SPM = {
    "bpe": {"model_type": "bpe"},
    "bpe as Gemma's": {"model_type": "bpe", **GEMMA},
    "bpe of single spaces": {"model_type": "bpe", "remove_extra_whitespaces": True},
    "bpe with runs of spaces": {"model_type": "bpe", "allow_whitespace_only_pieces": True, "split_digits": True},
    "unigram": {"model_type": "unigram"},
    "unigram without a first space": {"model_type": "unigram", "add_dummy_prefix": False},
}


def folder_with(tiny: Path, tmp_path: Path, model: bytes, **config: Any) -> Path:
    """The tiny model's folder with tokenizer.model in the place of tokenizer.json."""
    folder = Path(shutil.copytree(tiny, tmp_path / "folder"))
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", SPM)
def test_sentencepiece_models(name: str, tiny: Path, tmp_path: Path) -> None:
    data = trained(**SPM[name])
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    sample = texts(1600, seed=3)
    if "unigram" in name:  # a run has many segmentations of one score: the two libraries take different ones
        sample = [text for text in sample if not re.search(r"(.)\1{5,}", text)]
    assert len(sample) > 1000
    folder = folder_with(tiny, tmp_path, data, bos_token="<s>", eos_token="</s>")
    tokenizer = ours(open_checkpoint(folder).assets)
    assert_same(tokenizer, library.encode, sample)
    assert tokenizer.encode("a", bos=True)[0] == library.bos_id()
    for text in sample[:300]:
        if "single" not in name:
            assert decoded(tokenizer, tokenizer.encode(text, bos=False)) == text.replace("▁", " ")
    if "bpe" in name:
        pieces = range(library.get_piece_size())
        kinds = [
            2 if library.is_unknown(i) else 3 if library.is_control(i) else 6 if library.is_byte(i) else 1
            for i in pieces
        ]
        symbols = set(SPM[name].get("user_defined_symbols", ()))
        tokens = [library.id_to_piece(i) for i in pieces]
        fields = {
            "model": "llama", "pre": "default", "tokens": tokens, "scores": [library.get_score(i) for i in pieces],
            "token_type": [4 if token in symbols else kind for token, kind in zip(tokens, kinds, strict=True)],
            "bos_token_id": library.bos_id(), "add_space_prefix": SPM[name].get("add_dummy_prefix", True),
            "remove_extra_whitespaces": "single" in name,
        }  # fmt: skip
        from_gguf = ours(gguf_assets(tmp_path / "a.gguf", fields))
        assert_same(from_gguf, library.encode, sample)
        assert from_gguf.encode("a", bos=True) == [library.bos_id(), *library.encode("a")]


def test_sentencepiece_as_transformers_reads_it(tiny: Path, tmp_path: Path) -> None:
    """Special tokens in the text: found, and what follows them is a text of its own, as for the legacy Llama class."""
    data = trained(model_type="bpe")
    folder = folder_with(
        tiny, tmp_path, data, bos_token={"content": "<s>"}, eos_token="</s>", add_bos_token=False,
        added_tokens_decoder={
            "700": {"content": "<|user|>", "special": True, "rstrip": True},
            "701": {"content": "<|end|>", "special": True},
        },
    )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    assert library.get_piece_size() == 700
    tokenizer = ours(open_checkpoint(folder).assets)
    assert tokenizer.encode("a", bos=True) == library.encode("a")
    expected = [700, *library.encode("hi there"), 701, 1, *library.encode(" x"), 2]
    assert tokenizer.encode("<|user|> \n hi there<|end|><s> x</s>", bos=False) == expected


@pytest.mark.parametrize("stated", [{}, {"add_bos_token": True}])
def test_a_folder_as_transformers_reads_it(stated: dict[str, bool], tiny: Path, tmp_path: Path) -> None:
    """A text's first token comes from tokenizer.json (as Llama 3's does) where nothing else is said."""
    from transformers import PreTrainedTokenizerFast

    folder = Path(shutil.copytree(tiny, tmp_path / "folder"))
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", **stated}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = ours(open_checkpoint(folder).assets)
    for text in texts(1000, seed=6, special=SPECIAL):
        assert tokenizer.encode(text, bos=True) == reference.encode(text), text
        assert tokenizer.encode(text, bos=False) == reference.encode(text, add_special_tokens=False), text


def test_the_real_model(real_model: Path) -> None:
    """A GGUF's vocabulary against the same one as the ``gguf`` reader and the original's recipe give it."""
    assets = open_checkpoint(real_model).assets
    from gguf import GGUFReader

    fields = {key: f.contents() for key, f in GGUFReader(real_model).fields.items() if key.startswith("tokenizer")}
    tokens = fields["tokenizer.ggml.tokens"]
    library = Library(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]],
        )
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    special = [tokens[i] for i, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3]
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|im_end|>")
    sample = texts(1500, seed=4, special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    assert_same(ours(assets), lambda text: list(reference.encode(text, add_special_tokens=False)), sample)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "t5"}, "tokenizer model 't5'"),
        ({"model": "rwkv"}, "tokenizer model 'rwkv'"),
        ({"pre": "falcon"}, "pre-tokenizer 'falcon'"),
        ({"pre": "Default"}, "pre-tokenizer 'Default'"),
        ({"pre": ["gpt-2"]}, "pre-tokenizer ['gpt-2']"),
        ({"tokens": ["a"] * 904}, "1 different tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"merges": ["a b c d"]}, "tokenizer"),
        ({"merges": "a b"}, "merges"),
        ({"bos_token_id": 10**6}, "bos_token_id = 1000000"),
        ({"model": "llama"}, "scores"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    fields = gguf_of(byte_level("gpt-2"), "gpt-2") | change
    with pytest.raises(CheckpointError) as error:
        gguf_assets(tmp_path / "a.gguf", fields)
    assert words in str(error.value)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_giant_pieces_are_refused(kind: str) -> None:
    """Before they are cut in two everywhere, or looked for."""
    fields = {"model": kind, "pre": "gpt-2", "merges": [], "scores": [0.0] * 2, "tokens": ["a" * 10**7, "b"]}
    for token_type, words in ((3, "special and added tokens of 10000000"), (4, "special and added"), (1, "squares")):
        if (kind, token_type) != ("gpt2", 1):
            with pytest.raises(CheckpointError, match=words):
                build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in fields.items()} | {
                    "tokenizer.ggml.token_type": [token_type, 1]
                }, 2)  # fmt: skip


def test_unusable_sentencepiece_models_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = folder_with(tiny, tmp_path, b"")
    for data, words in (
        (b"", "no pieces"),
        (b"\xff" * 99, "not a SentencePiece model"),
        (trained(model_type="char"), "type 4"),
        (trained(model_type="bpe", treat_whitespace_as_suffix=True), "spaces after words"),
    ):
        (folder / "tokenizer.model").write_bytes(data)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(folder)
    (folder / "tokenizer.model").write_bytes(trained(model_type="bpe"))
    (folder / "added_tokens.json").write_text(json.dumps({"<x>": 9999}))
    with pytest.raises(CheckpointError, match="added token '<x>' has id 9999"):
        open_checkpoint(folder)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json and no tokenizer\.model"):
        open_checkpoint(folder)
