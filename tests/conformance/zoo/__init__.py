# SPDX-License-Identifier: Apache-2.0
"""Every architecture of vLLM 0.32.0: a tiny model, or the reason why there is none.

A file a family. A row is as short as the architecture allows: its config, and where a transformers
block keeps the points when that is not `model.layers` with the branch `self_attn`.
"""

from __future__ import annotations

from ..tiny import TinyModel
from .again import AGAIN
from .backend import BACKEND
from .bailing import BAILING
from .deepseek_v4 import DEEPSEEK_V4
from .dense import DENSE
from .dsa import DSA
from .hybrid import HYBRID
from .inkling import INKLING
from .latent import LATENT
from .longcat import LONGCAT
from .looped import LOOPED
from .minimax_m3 import MINIMAX_M3
from .moe import MOE
from .parallel import PARALLEL_ROWS
from .pictures import PICTURE_ROWS
from .pictures_molmo import MOLMO_ROWS
from .pictures_mrope import MROPE_ROWS
from .pictures_tiles import TILE_ROWS
from .plain import PLAIN
from .sandwich import SANDWICH_ROWS
from .sparse import SPARSE
from .translated import TRANSLATED

MODELS: dict[str, TinyModel] = {
    row.name: row
    for rows in (
        DENSE,
        SANDWICH_ROWS,
        PARALLEL_ROWS,
        MOE,
        HYBRID,
        LATENT,
        DSA,
        MINIMAX_M3,
        INKLING,
        LONGCAT,
        SPARSE,
        DEEPSEEK_V4,
        LOOPED,
        TRANSLATED,
        PLAIN,
        BAILING,
        AGAIN,
        BACKEND,
        PICTURE_ROWS,
        MOLMO_ROWS,
        MROPE_ROWS,
        TILE_ROWS,
    )
    for row in rows
}
