# SPDX-License-Identifier: Apache-2.0
"""Writes tests/pilot/saelens.safetensors: small autoencoders as SAELens saves them, and what
SAELens itself makes of random rows with them.

    pip install sae-lens==6.54.12          # in an environment of its own
    python saelens_oracle.py tests/pilot/saelens.safetensors

It is run with SAELens as shipped, apart from the tests, which read the file.
"""

import json
import sys
import tempfile
from pathlib import Path

import sae_lens
import torch
from safetensors.torch import load_file, save_file

HIDDEN, FEATURES, ROWS = 8, 32, 20
KINDS = {"Standard": {}, "JumpReLU": {}, "TopK": {"k": 4}, "Gated": {}}


def main(out: str) -> None:
    """Write the file."""
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, str] = {}
    for kind, more in KINDS.items():
        for subtracts in (True, False):
            torch.manual_seed(len(configs))
            config = getattr(sae_lens, f"{kind}SAEConfig")(
                d_in=HIDDEN, d_sae=FEATURES, apply_b_dec_to_input=subtracts, **more
            )
            sae = getattr(sae_lens, f"{kind}SAE")(config)
            for name, parameter in sae.named_parameters():
                values = torch.randn_like(parameter) / 2
                parameter.data = values.abs() if name == "threshold" else values
            with tempfile.TemporaryDirectory() as folder:
                sae.save_model(folder)
                [weights] = Path(folder).glob("*.safetensors")
                case = f"{kind}-{subtracts}"
                configs[case] = json.dumps(json.loads((Path(folder) / "cfg.json").read_text()))
                tensors |= {f"{case}/{name}": each for name, each in load_file(weights).items()}
            rows = torch.randn(ROWS, HIDDEN)
            with torch.no_grad():
                activations = sae.encode(rows)
                decoded = sae.decode(activations)
            made = {"rows": rows, "activations": activations, "decoded": decoded}
            tensors |= {f"{case}.{name}": each for name, each in made.items()}
    save_file({name: each.contiguous() for name, each in tensors.items()}, out, configs)


if __name__ == "__main__":
    main(sys.argv[1])
