"""Texts for language models: Python's documentation, or the user's files, split by document and tokenized."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from loopscope.errors import UsageError
from loopscope.option_words import option_text
from loopscope.optional_packages import require_package

END_OF_DOCUMENT = "<|end|>"
SMALLEST_VOCABULARY = 257  # one token for each byte, and one for the end of a document


@dataclass(frozen=True)
class Corpus:
    """Documents by name, with their source."""

    source: str
    documents: Mapping[str, str]

    @property
    def digest(self) -> str:
        """A 64-bit digest of all names and texts, in hexadecimal."""
        summary = xxhash.xxh3_64()
        for name, text in self.documents.items():
            summary.update(f"{name}\0{text}\0".encode())
        return summary.hexdigest()

    def split(self, share: float) -> tuple["Corpus", "Corpus"]:
        """Split into training and validation documents; the latter have about ``share`` of the characters.

        Documents are assigned to validation in the order of the digest of their names, if they fit into what remains of
        the share. Each part gets at least one document.
        """
        ordered = sorted(self.documents, key=lambda name: xxhash.xxh3_64_intdigest(name.encode()))
        remaining = share * sum(map(len, self.documents.values()))
        held_out: set[str] = set()
        for name in ordered[:-1]:
            if len(self.documents[name]) <= remaining:
                held_out.add(name)
                remaining -= len(self.documents[name])
        held_out = held_out or {ordered[0]}
        training = {name: text for name, text in self.documents.items() if name not in held_out}
        validation = {name: text for name, text in self.documents.items() if name in held_out}
        return Corpus(self.source, training), Corpus(self.source, validation)


def python_documentation() -> Corpus:
    """Return the English documentation that CPython contains: about 465,000 characters, depending on its version."""
    from pydoc_data.topics import topics

    return Corpus("pydoc_data.topics", dict(sorted(topics.items())))


def read_corpus(path: Path) -> Corpus:
    """Read a text file or a folder of ``.txt`` and ``.md`` files.

    Every file of a folder is a document. A single file is split at empty lines into at most about 200 documents, so
    that a part of it can be held out.

    Raises:
        UsageError: if there is no text, or only one document.
    """
    if path.is_dir():
        files = sorted(file for kind in ("*.txt", "*.md") for file in path.rglob(kind))
        if not files:
            raise UsageError(
                f"{option_text('data', path)} is a folder without .txt or .md files; name a folder of texts, or a file."
            )
        documents = {str(file.relative_to(path)): _read_text(file) for file in files}
    else:
        documents = _split_text(_read_text(path))
    documents = {name: text for name, text in documents.items() if text.strip()}
    if len(documents) < 2:
        content = "only one document" if documents else "no text"
        raise UsageError(
            f"{option_text('data', path)} contains {content}; at least two documents are needed, one of them for "
            "validation."
        )
    return Corpus(str(path), documents)


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        sentence = f"{path} is not UTF-8 text: byte {error.start} is invalid; convert the file to UTF-8."
        raise UsageError(sentence) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _split_text(text: str, parts: int = 200) -> dict[str, str]:
    """Split a text at empty lines into about ``parts`` documents of similar length."""
    smallest, documents, document = len(text) / parts, [], ""
    for paragraph in text.split("\n\n"):
        document += paragraph + "\n\n"
        if len(document) >= smallest:
            documents.append(document)
            document = ""
    return {f"part {index}": part for index, part in enumerate([*documents, document])}


class Tokenizer:
    """A byte-level byte-pair encoding of the package ``tokenizers``, trained on documents."""

    def __init__(self, documents: Sequence[str], vocabulary: int) -> None:
        """Train the encoding.

        Raises:
            UsageError: if the vocabulary is too small for single bytes or too large for the text, or if the package
                ``tokenizers`` is missing.
        """
        if vocabulary < SMALLEST_VOCABULARY:
            raise UsageError(
                f"vocabulary is {vocabulary}; for texts it must be at least {SMALLEST_VOCABULARY}: one token for each "
                "byte, and one for the end of a document."
            )
        require_package("tokenizers", "A vocabulary for texts")
        from tokenizers import Tokenizer as Encoder
        from tokenizers import decoders, models, pre_tokenizers, trainers

        self._encoder = Encoder(models.BPE())
        self._encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._encoder.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[END_OF_DOCUMENT],
            show_progress=False,
        )
        self._encoder.train_from_iterator(documents, trainer)
        if self.vocabulary < vocabulary:
            raise UsageError(
                f"vocabulary is {vocabulary}, but the text yields only {self.vocabulary} different tokens; choose "
                f"{option_text('vocabulary', self.vocabulary)} or less, or a longer text."
            )

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return int(self._encoder.get_vocab_size())

    @property
    def end(self) -> int:
        """The token after each document."""
        return self._encoder.get_vocab()[END_OF_DOCUMENT]

    def encode(self, documents: Iterable[str]) -> np.ndarray:
        """Return the concatenated tokens of all documents, int64, each followed by the end token."""
        encodings = self._encoder.encode_batch(list(documents))
        return np.concatenate([np.array([*encoding.ids, self.end], dtype=np.int64) for encoding in encodings])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without end tokens."""
        return str(self._encoder.decode(list(tokens)))
