# SPDX-License-Identifier: Apache-2.0
"""Writes tests/steering/pyreft: folders that pyreft saves, and what pyreft itself makes of rows.

    pip install --no-deps pyreft==0.1.0 pyvene==0.1.8 evaluate==0.4.3 datasets==3.2.0
    pip install transformers==4.45.1 accelerate==1.0.1     # all apart from ours
    python reft_oracles.py tests/steering/pyreft

The package runs as shipped, apart from the tests, which read the files. In `rows.safetensors` of a
folder are, for each layer with an intervention, rows as the intervention got them and as it
returned them, and those that the block of a Llama returned without and with it at one position.
"""

import sys
from pathlib import Path

import pyreft
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, ROWS, TOKENS, AT = 16, 12, 7, 3
RANKS = {0: 4, 2: 1}
"""Layer -> rank."""
KINDS = ("Loreft", "Noreft", "Consreft", "Lobireft", "Direft", "Nodireft")


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def write(kind: str, folder: Path) -> None:
    """Save the interventions of a kind, with random numbers, and what they do."""
    model = small_llama()
    model.config.output_hidden_states = True
    made = getattr(pyreft, f"{kind}Intervention")
    torch.manual_seed(len(kind))
    asked = [
        {
            "layer": layer,
            "component": "block_output",
            "low_rank_dimension": rank,
            "intervention": made(
                embed_dim=HIDDEN, low_rank_dimension=rank, add_bias=True, dtype=torch.float32
            ),
        }
        for layer, rank in RANKS.items()
    ]
    reft = pyreft.get_reft_model(model, pyreft.ReftConfig(representations=asked))
    for intervention in reft.interventions.values():
        intervention.eval()
        for name, parameter in intervention.named_parameters():
            if "parametrizations" not in name:
                parameter.data = torch.randn_like(parameter)
    reft.save(save_directory=str(folder), include_model=False)
    ids = torch.arange(3, 3 + TOKENS)[None]
    found: dict[str, torch.Tensor] = {}
    locations = {"sources->base": (None, [[[AT]]] * len(RANKS))}
    with torch.no_grad():
        _, steered = reft({"input_ids": ids}, unit_locations=locations)
        for layer, intervention in zip(RANKS, reft.interventions.values(), strict=True):
            rows = torch.randn(ROWS, HIDDEN)
            found |= {f"{layer}.before": rows, f"{layer}.after": intervention(rows[:, None])[:, 0]}
        first = min(RANKS)
        plain = model(ids)
        found["block.plain"] = plain.hidden_states[first + 1][0]
        found["block.steered"] = steered.hidden_states[first + 1][0]
    save_file(
        {name: rows.contiguous() for name, rows in found.items()}, folder / "rows.safetensors"
    )


def main() -> None:
    out = Path(sys.argv[1])
    for kind in KINDS:
        write(kind, out / kind.lower())


if __name__ == "__main__":
    main()
