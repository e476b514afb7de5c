# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of single characters, for programs that give texts to a tiny random model."""

from __future__ import annotations

import string
from pathlib import Path

import transformers
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel


def spell(model: Path, folder: Path) -> Path:
    """Make `folder` the model with that tokenizer, and return it."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    vocabulary = {character: i for i, character in enumerate(string.printable[:95])}
    tokenizer = Tokenizer(WordLevel({**vocabulary, "<unk>": len(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>"
    ).save_pretrained(folder)
    return folder
