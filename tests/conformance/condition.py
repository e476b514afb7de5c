# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.conformance.condition NAME ...`: how far rounding alone moves a tiny model.

The reference beside itself, at every point, unsteered and under every case of a write check: in
float32 against float64, and with each weight off by up to one unit in the last place. Two right
implementations in float32 differ by about as much, so a model whose rows move by more than a tenth
of what they may be off says little. `--raw`: without what the row changes of the random weights.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import replace

import torch

from .engine import prepare_environment

ULP = 2.0**-23


def main() -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.condition")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--raw", action="store_true")
    options = parser.parse_args()
    prepare_environment("v1")
    from . import models, reference
    from .cases import steering_cases
    from .completions import GENERATED
    from .runner import prompts, worst_row

    for name in options.names:
        row = models.MODELS[name]
        row = replace(row, adjust=None) if options.raw else row
        model = models.build(row)
        exact, near = copy.deepcopy(model).double(), copy.deepcopy(model)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in near.parameters():
                noise = torch.rand(weight.shape, generator=generator)
                weight.mul_(1 + ULP * (2 * noise - 1))
        sequences = [prompt + prompt[: GENERATED - 1] for prompt in prompts()]
        cases = steering_cases(reference.run(model, row.adapter, sequences[0]), row.points)
        rounded = moved = 0.0
        for i, case in enumerate([None, None, None, *cases]):
            tokens = sequences[i % len(sequences)]
            deltas = case.deltas(len(tokens), len(tokens) - GENERATED + 1) if case else {}
            doubled = {site: delta.double() for site, delta in deltas.items()}
            rows = reference.run(model, row.adapter, tokens, deltas).rows
            want = reference.run(exact, row.adapter, tokens, doubled).rows
            others = reference.run(near, row.adapter, tokens, deltas).rows
            rounded = max(rounded, *(worst_row(rows[site].double(), want[site]) for site in rows))
            moved = max(moved, *(worst_row(others[site], rows[site]) for site in rows))
        raw = " raw" if options.raw else ""
        print(f"{name}{raw}: float32 {rounded:.1e} from float64; an ulp moves rows {moved:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
