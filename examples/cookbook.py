# SPDX-License-Identifier: Apache-2.0
"""Runs the blocks of docs/cookbook.md, or of another page, as the programs that they are, and
leaves their pictures.

    python -m examples.cookbook [--model DIR] [--out DIR] [--page docs/analyzers.md]

Without `--model` SmolLM2-135M-Instruct is taken (93 MB, once). Blocks that need a server are left
out.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from demo.environment import prepare_environment
from vllm.pilot.checkpoints import checkpoint

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cookbook.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(model: Path, out: Path, page: Path = PAGE) -> dict[str, Any]:
    """Run a page's program, but for its clients of a server, in the folder `out`; returns its
    variables."""
    out.mkdir(parents=True, exist_ok=True)
    blocks = [b for b in _BLOCK.findall(page.read_text()) if "SteeringClient(" not in b]
    program = "".join(blocks).replace("/path/to/model", str(model.resolve()))
    before = Path.cwd()
    os.chdir(out)
    try:
        made: dict[str, Any] = {"__name__": page.stem}
        exec(compile(program, str(page), "exec"), made)
    finally:
        os.chdir(before)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.cookbook", description=__doc__)
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face format")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cookbook")
    parser.add_argument("--page", type=Path, default=PAGE, help="a page with one program")
    given = parser.parse_args()
    prepare_environment(small_model=False)
    run(given.model or checkpoint(), given.out, given.page)
    print(f"pictures: {given.out}")


if __name__ == "__main__":
    main()
