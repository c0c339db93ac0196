"""A tokenizer for grammars: one token for each row of the embedding.

A tokenizer may have fewer tokens than the embedding has rows, or more, and ids between them that no token has. A
grammar may ask for no token without a row, and its end may be a row without a token. So the grammar library is given a
tokenizer whose ids are exactly the rows that matter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

    from asyncengine.api.model_info import ModelInfo
    from asyncengine.text.tokenizer import Tokenizer


def grammar_ends(model: ModelInfo, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a sequence where its grammar ends: the model's own.

    A row that means no text stands in for them if there are none: one that the tokenizer has no token for, or else a
    special token. Empty if there is no such row.
    """
    if model.eos_token_ids:
        return model.eos_token_ids
    if model.vocab_size > tokenizer.vocab_size:
        return (model.vocab_size - 1,)
    special = min(tokenizer.special_token_ids, default=model.vocab_size)
    return (special,) if special < model.vocab_size else ()


def describe(backend: tokenizers.Tokenizer, num_rows: int, ends: Sequence[int]) -> str:
    """tokenizer.json of ``backend`` without the tokens that have no row, and with a special token for each missing id.

    ``num_rows``: rows of the embedding. ``ends``: ids below it that the result has in any case.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    size = max((max(vocabulary.values(), default=-1) + 1, *(end + 1 for end in ends)))
    description = backend.to_str()
    if size <= num_rows and len(set(vocabulary.values())) == size:
        return description
    values = json.loads(description)
    _cut(values, num_rows)
    kept = {token: i for token, i in vocabulary.items() if i < num_rows}
    _fill(values, kept, min(size, num_rows))
    return json.dumps(values)


def _cut(values: dict[str, Any], num_rows: int) -> None:
    """Leave out tokens with ids from ``num_rows`` on, and the merges that would make them."""
    model = values["model"]
    values["added_tokens"] = [token for token in values.get("added_tokens") or () if token["id"] < num_rows]
    if isinstance(model["vocab"], list):  # Unigram: the index is the id
        model["vocab"] = model["vocab"][:num_rows]
        if (model.get("unk_id") or 0) >= num_rows:
            model["unk_id"] = None
        return
    vocab = model["vocab"] = {token: i for token, i in model["vocab"].items() if i < num_rows}
    if model.get("merges"):
        pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"])
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [[a, b] for a, b in pairs if a in vocab and b in vocab and a + b[prefix:] in vocab]


def _fill(values: dict[str, Any], kept: dict[str, int], size: int) -> None:
    """Add a special token for each id below ``size`` that no token of ``kept`` has.

    Its name goes into the model's vocabulary as well: the library numbers added tokens that are not there anew.
    """
    tokens = {i: token for token, i in kept.items()}
    for i in range(size):
        if i in tokens:
            continue
        tokens[i] = f"<|row {i} without a token|>"
        values["added_tokens"].append(
            {
                "id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
        )  # fmt: skip
    vocab = values["model"]["vocab"]
    if isinstance(vocab, list):
        vocab += [[tokens[i], _NEVER] for i in range(len(vocab), size)]
    else:
        vocab |= {token: i for i, token in tokens.items() if i < size}


_NEVER = -1e6
"""Score of a token that Unigram chooses for no text."""
