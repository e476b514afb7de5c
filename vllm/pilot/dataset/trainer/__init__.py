# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a stream of rows: an engine in another process runs `dataset.feed`.

Torch and pyzmq are all that this folder needs: copy it to where vLLM is not installed, and import
`trainer` there.
"""

from .adapters import DictionaryBuffer, for_dictionary_learning, for_sae_lens
from .streaming import Batch, Stream, StreamError, stream

__all__ = [
    "Batch",
    "DictionaryBuffer",
    "Stream",
    "StreamError",
    "for_dictionary_learning",
    "for_sae_lens",
    "stream",
]
