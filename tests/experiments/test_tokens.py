"""Texts and tokens of tied_lm: splitting by document, memory mapping, windows as a function of (seed, step)."""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.experiments.tied_lm import LanguageModelConfig
from loopscope.experiments.tied_lm.corpus import Corpus, Tokenizer, python_documentation, read_corpus
from loopscope.experiments.tied_lm.tokens import TokenLoader, evenly_spaced_windows, open_tokens, unigram_entropy
from loopscope.experiments.tied_lm.training import LanguageData

CPU = torch.device("cpu")
TEXTS = {f"doc {index}": f"The quick brown fox number {index} jumps. " * (5 + index) for index in range(12)}


def loader(tokens: np.ndarray, *, context: int = 4, batch_size: int = 3, vocabulary: int = 100, seed: int = 1):
    return TokenLoader(tokens, context=context, batch_size=batch_size, vocabulary=vocabulary, seed=seed, device=CPU)


def test_documentation_corpus_splits_by_document() -> None:
    """Validation has whole documents of at most 10% of the text, and the digest depends on the text."""
    corpus = python_documentation()
    training, validation = corpus.split(0.1)
    assert training.documents.keys() | validation.documents.keys() == corpus.documents.keys()
    assert not training.documents.keys() & validation.documents.keys()
    sizes = [sum(map(len, side.documents.values())) for side in (training, validation)]
    assert 0.05 < sizes[1] / sum(sizes) <= 0.1
    changed = Corpus("any", {**corpus.documents, "assert": corpus.documents["assert"] + " "})
    assert corpus.digest != changed.digest
    assert len(corpus.digest) == 16


@given(share=st.floats(0.01, 0.99), lengths=st.lists(st.integers(1, 300), min_size=2, max_size=30))
@settings(max_examples=60, deadline=None)
def test_split_keeps_both_sides_nonempty(share: float, lengths: list[int]):
    """The validation side has at most the requested share, or a single document."""
    corpus = Corpus("any", {f"d{index}": "x" * length for index, length in enumerate(lengths)})
    training, validation = corpus.split(share)
    assert training.documents
    assert validation.documents
    held_out = sum(map(len, validation.documents.values()))
    assert held_out <= share * sum(lengths) or len(validation.documents) == 1


def test_decoding_restores_the_text() -> None:
    tokenizer = Tokenizer(list(TEXTS.values()), 280)
    text = "Strange signs: é ∂ 🦊, and the quick brown fox."
    tokens = tokenizer.encode([text])
    assert tokens[-1] == tokenizer.end
    assert tokenizer.decode(tokens[:-1].tolist()) == text
    assert (tokens < tokenizer.vocabulary).all()


def test_unfillable_vocabulary_is_refused() -> None:
    """The error contains the number of different tokens in the text."""
    with pytest.raises(UsageError, match=r"vocabulary is 4096, but the text yields only \d+ different tokens; choose"):
        Tokenizer(["some short text"], 4096)


def test_folder_has_one_document_per_file(tmp_path: Path) -> None:
    """Files with the suffixes .txt and .md are read, also from subfolders, and other files are ignored."""
    for name in ("b.txt", "a/c.md", "ignored.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert read_corpus(tmp_path).documents == {"a/c.md": "text of a/c.md", "b.txt": "text of b.txt"}


def test_file_is_split_at_empty_lines(tmp_path: Path) -> None:
    """The documents of a text file join to the complete text."""
    text = "\n\n".join(f"Paragraph {index} " * 20 for index in range(500))
    (tmp_path / "book.txt").write_text(text)
    documents = read_corpus(tmp_path / "book.txt").documents
    assert 100 < len(documents) <= 201
    assert "".join(documents.values()).strip() == text.strip()


REFUSED = {
    "empty.txt": (b"", "contains no text; at least two documents are needed"),
    "one.txt": (b"a single paragraph", "contains only one document; at least two documents are needed"),
    "latin.txt": ("é".encode("latin-1") + b"\n\nx", "is not UTF-8 text: byte 0 is invalid; convert the file"),
    "odd.u32": (b"1234567", "has 7 bytes; it must have a multiple of 4 bytes"),
    "odd.bin": (b"123", "has 3 bytes; it must have a multiple of 2 bytes"),
    "empty.u16": (b"", "is empty; it must contain tokens"),
    "not.npy": (b"no array", "is not a file of tokens"),
    "short.u16": (np.arange(50, dtype="<u2").tobytes(), "data has 45 tokens, but a context of 256 needs at least 257"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_untrainable_data_is_refused(tmp_path: Path, name: str) -> None:
    """Empty, too short, wrongly encoded and truncated files each raise a UsageError with the reason."""
    content, sentence = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        LanguageData.load(LanguageModelConfig(data=tmp_path / name))


def test_missing_or_textless_path_is_refused(tmp_path: Path) -> None:
    """A path that does not exist and a folder without text files raise a UsageError."""
    with pytest.raises(UsageError, match="does not exist; name a text file"):
        LanguageData.load(LanguageModelConfig(data=tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"is a folder without \.txt or \.md files"):
        LanguageData.load(LanguageModelConfig(data=tmp_path))


def test_non_token_arrays_are_refused(tmp_path: Path) -> None:
    """Arrays of floats and two-dimensional arrays raise an error with their dtype or shape."""
    np.save(tmp_path / "floats.npy", np.zeros(3))
    np.save(tmp_path / "table.npy", np.zeros((3, 2), dtype=np.uint16))
    for name, form in (("floats", "float64 of shape"), ("table", r"uint16 of shape \(3, 2\)")):
        with pytest.raises(UsageError, match=form):
            open_tokens(tmp_path / f"{name}.npy")


@pytest.mark.parametrize(("name", "kind"), [("t.u16", "<u2"), ("t.bin", "<u2"), ("t.u32", "<u4"), ("t.npy", "<i8")])
def test_every_file_format_keeps_its_tokens(tmp_path: Path, name: str, kind: str) -> None:
    tokens = np.arange(1000).astype(kind)
    path = tmp_path / name
    np.save(path, tokens) if name.endswith("npy") else path.write_bytes(tokens.tobytes())
    assert np.array_equal(open_tokens(path), tokens)


def test_huge_token_file_opens_without_reading(tmp_path: Path) -> None:
    """Opening and sampling a sparse file of 100 GB takes less than 1 second and 5 MB."""
    path = tmp_path / "huge.u16"
    with path.open("wb") as file:
        file.truncate(100 * 10**9)
    tracemalloc.start()
    begin = time.process_time()
    data = LanguageData.load(LanguageModelConfig(data=path, validation_share=0.001))
    batch = loader(data.train, context=256, batch_size=8).batch(5)
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch[0].shape == (8, 256)
    assert seconds < 1
    assert peak < 5e6


def test_batch_depends_on_seed_and_index_only() -> None:
    """A batch is the same wherever the iteration starts, and another seed gives other batches."""
    tokens = np.arange(100, dtype=np.uint16)
    tokens_loader = loader(tokens)
    straight = [batch for epoch in range(2) for batch in tokens_loader.batches(epoch)]
    assert len(tokens_loader) == 8
    for number in (3, 9, 15):
        inputs, targets = next(tokens_loader.batches(number // 8, number % 8))
        assert torch.equal(inputs, straight[number][0])
        assert torch.equal(targets, inputs + 1)
    assert not torch.equal(loader(tokens, seed=2).batch(0)[0], straight[0][0])
    assert torch.equal(tokens_loader.shuffled(2).batch(0)[0], loader(tokens, seed=2).batch(0)[0])


def test_windows_are_drawn_from_the_whole_data() -> None:
    firsts = torch.cat([loader(np.arange(20), batch_size=50).batch(number)[0][:, 0] for number in range(10)])
    assert set(firsts.tolist()) == set(range(16))


def test_token_outside_vocabulary_is_refused() -> None:
    """Reading a batch with a negative id or an id beyond the vocabulary raises a UsageError with the id."""
    with pytest.raises(
        UsageError, match="contains the token id 99, which is outside the vocabulary of 50; set vocabulary"
    ):
        next(loader(np.full(60, 99, dtype=np.uint32), vocabulary=50).batches(0))
    with pytest.raises(UsageError, match="contains the token id -1"):
        loader(np.full(60, -1)).batch(0)


def test_validation_windows_do_not_overlap() -> None:
    """The windows extend from the first token to the last."""
    windows = evenly_spaced_windows(np.arange(101), context=10, limit=100)
    assert windows.shape == (10, 11)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 100
    assert (np.diff(windows[:, 0]) >= 10).all()


def test_unigram_entropy_matches_token_frequencies() -> None:
    assert unigram_entropy(np.array([0, 1, 2, 3] * 5), 10) == pytest.approx(np.log(4))
    assert unigram_entropy(np.array([0, 0, 0, 1]), 2) == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))
