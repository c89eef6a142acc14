"""Texts: the one that comes with Python, a file or a folder of the user's, split by document and turned into tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import xxhash
from loopscope.errors import UsageError

END_OF_DOCUMENT = "<|end|>"
SMALLEST_VOCABULARY = 257  # one token for each byte, and one for the end of a document


@dataclass(frozen=True)
class Corpus:
    """Documents by name, and where they come from."""

    source: str
    documents: Mapping[str, str]

    @property
    def digest(self) -> str:
        """A 64-bit digest of all names and texts, as text."""
        summary = xxhash.xxh3_64()
        for name, text in self.documents.items():
            summary.update(f"{name}\0{text}\0".encode())
        return summary.hexdigest()

    def split(self, share: float) -> tuple["Corpus", "Corpus"]:
        """Return the documents for training and those for validation, which have about ``share`` of the characters.

        Documents are looked at in the order of the digest of their names, and held out as long as they fit; one at
        least is, and one at least is not.
        """
        ordered = sorted(self.documents, key=lambda name: xxhash.xxh3_64_intdigest(name.encode()))
        room = share * sum(map(len, self.documents.values()))
        held_out: set[str] = set()
        for name in ordered[:-1]:
            if len(self.documents[name]) <= room:
                held_out.add(name)
                room -= len(self.documents[name])
        held_out = held_out or {ordered[0]}
        training = {name: text for name, text in self.documents.items() if name not in held_out}
        validation = {name: text for name, text in self.documents.items() if name in held_out}
        return Corpus(self.source, training), Corpus(self.source, validation)


def python_documentation() -> Corpus:
    """Return the English documentation inside CPython: about 465,000 characters, varying with the Python version."""
    from pydoc_data.topics import topics

    return Corpus("pydoc_data.topics", dict(sorted(topics.items())))


def read_corpus(path: Path) -> Corpus:
    """Read a text file or a folder of ``.txt`` and ``.md`` files; raises :class:`UsageError` for what is no text.

    A folder has one document per file. A file has one per paragraph that follows an empty line, gathered to a few
    hundred, so that a single text can be split as well.
    """
    if path.is_dir():
        files = sorted(file for kind in ("*.txt", "*.md") for file in path.rglob(kind))
        if not files:
            raise UsageError(f"--data {path} is a folder without .txt or .md files; name a folder of texts, or a file.")
        documents = {str(file.relative_to(path)): _text(file) for file in files}
    else:
        documents = _parts(_text(path))
    documents = {name: text for name, text in documents.items() if text.strip()}
    if len(documents) < 2:
        found = "one document" if documents else "no text"
        raise UsageError(f"--data {path} holds {found}; two documents are needed, one of them for validation.")
    return Corpus(str(path), documents)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        sentence = f"{path} is not UTF-8 text: byte {error.start} cannot be read; convert it to UTF-8."
        raise UsageError(sentence) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _parts(text: str, most: int = 200) -> dict[str, str]:
    """Cut a text at empty lines into at most ``most`` documents of about the same length."""
    least, documents, gathered = len(text) / most, [], ""
    for paragraph in text.split("\n\n"):
        gathered += paragraph + "\n\n"
        if len(gathered) >= least:
            documents.append(gathered)
            gathered = ""
    return {f"part {index}": part for index, part in enumerate([*documents, gathered])}


class Tokenizer:
    """A byte-level byte-pair encoding, trained on the documents it is made of (package ``tokenizers``)."""

    def __init__(self, documents: Sequence[str], vocabulary: int) -> None:
        """Train; raises :class:`UsageError` for a vocabulary that the text cannot fill."""
        if vocabulary < SMALLEST_VOCABULARY:
            raise UsageError(
                f"vocabulary is {vocabulary}; a text needs at least {SMALLEST_VOCABULARY}: one token for each byte, "
                "and one for the end of a document."
            )
        if find_spec("tokenizers") is None:
            raise UsageError("Texts need the package tokenizers, which is not installed: pip install 'loopscope[lm]'.")
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
                f"vocabulary is {vocabulary}, but the text has only {self.vocabulary} different pieces; choose "
                f"--vocabulary {self.vocabulary} or less, or a longer text."
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
        """Return the tokens of all documents, one after the other, each with its end."""
        encoded = self._encoder.encode_batch(list(documents))
        return np.concatenate([np.array([*each.ids, self.end], dtype=np.int64) for each in encoded])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without ends of documents."""
        return str(self._encoder.decode(list(tokens)))
