"""Tiny models, data and tokenizers, created in memory."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH = 24, 8, 8


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Draw normal numbers from a separate generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen(most: int, *shape: int, seed: int = 1) -> Tensor:
    """Draw integers below ``most`` from a separate generator."""
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed))


def classifier() -> nn.Module:
    """Create a network with buffers and dropout."""
    return nn.Sequential(
        nn.Linear(6, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 3),
    )


def points(rows: int = 24, seed: int = 1) -> TensorDataset:
    """Create points with one of three classes."""
    return TensorDataset(drawn(rows, 6, seed=seed), chosen(3, rows, seed=seed))


def loader(data: Any = None, batch: int = 4) -> Any:
    """Create a shuffled loader, which draws from torch's generator."""
    return DataLoader(points() if data is None else data, batch, shuffle=True)


def classification_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of a batch of points."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class LanguageModel(nn.Module):
    """A transformer with tied embeddings, dropout and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.1, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, **options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        hidden = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def language_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of the next tokens."""
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def token_rows(rows: int = 24, seed: int = 1) -> Tensor:
    """Draw rows of tokens, one longer than the model's input."""
    return chosen(VOCABULARY, rows, LENGTH + 1, seed=seed)


# Models, data and tokenizers of Hugging Face


def gpt2(**changed: Any) -> Any:
    """Create a small GPT-2 with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes | tokens | {"loss_type": "ForCausalLMLoss"} | changed))


def llama(kind: str = "LlamaForCausalLM", **changed: Any) -> Any:
    """Create a small Llama, or a classifier of its architecture."""
    import transformers

    sizes = {"vocab_size": len(WORDS), "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.1}
    return getattr(transformers, kind)(transformers.LlamaConfig(**sizes | heads | tokens | changed))


def bert_folder(folder: Path) -> str:
    """Write a small BERT and its tokenizer, as sentence-transformers loads them from a folder."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, pad_token_id=0, **sizes)).save_pretrained(
        folder
    )
    tokenizer().save_pretrained(folder)
    return str(folder)


ANIMALS, VERBS = ("cat", "dog", "bird", "fish", "horse"), ("runs", "sleeps", "sings", "swims", "eats")
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":", "the", "a", "yes", "no", *ANIMALS, *VERBS)


def tokenizer() -> Any:
    """Create a tokenizer of whole words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=64, **special, sep_token="</s>", cls_token="<s>"
    )
    made.chat_template = (
        "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    )
    return made


def sentences(rows: int = 16) -> list[str]:
    """Return sentences, all different."""
    made = [f"{article} {animal} {verb}" for article in ("the", "a") for animal in ANIMALS for verb in VERBS]
    return made[:rows]
