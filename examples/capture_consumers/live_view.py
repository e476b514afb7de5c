# SPDX-License-Identifier: Apache-2.0
"""Watch a model write: each token in the colour of its projection on a direction, as it comes.

    python -m examples.capture_consumers.live_view [--model DIR --prompt TEXT ...]

The direction is the difference of two sets of prompts. `project` multiplies the rows with it on the
device, so that of every token one number a direction leaves it, and a callback gets these while the
model goes on. Without `--model` SmolLM2-135M-Instruct writes (93 MB, once).
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from demo.environment import prepare_environment

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.capture import CapturedRows
    from vllm.v1.capture.consumer import RequestInfo

POINT = "post_block"


@dataclass
class View:
    """What was seen of one request. `rows` is called by the capture, drawing by the terminal."""

    decode: Any
    """Token id -> its text."""
    names: Sequence[str]
    """Of the directions."""
    tokens: list[str] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    """Of each token: [directions]."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self, request: RequestInfo, rows: Mapping[tuple[str, int], CapturedRows]) -> None:
        """The callback. There is one site, so `values` is [new tokens, directions]."""
        (site,) = rows.values()
        with self.lock:
            self.tokens += [self.decode([token]) for token in site.token_ids.tolist()]
            self.scores += list(site.values)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self.lock:
            tokens, scores = list(self.tokens), list(self.scores)
        if not tokens:
            return
        table = torch.stack(scores)
        panels = []
        for name, column in zip(self.names, table.T, strict=True):
            greatest = float(column.abs().max()) or 1.0
            text = Text()
            for token, score in zip(tokens, column.tolist(), strict=True):
                text.append(token, style=shade(score / greatest))
            panels.append(Panel(text, title=f"{name}  {column[-1]:+.2f}", title_align="left"))
        yield Group(*panels)


def shade(strength: float) -> str:
    """A style for -1 to 1: blue, nothing, red."""
    faded = round(255 * (1 - min(abs(strength), 1.0)))
    red, green, blue = (255, faded, faded) if strength > 0 else (faded, faded, 255)
    return f"black on rgb({red},{green},{blue})"


def start(model: Path, view: View, dtype: Any = "auto") -> LLM:
    """An engine whose capture "view" goes to `view`, one call at a time."""
    from vllm import LLM

    consumer = {"consumer": view.rows, "instance_name": "view", "threads": 1}
    return LLM(
        model=str(model),
        dtype=dtype,
        capture_consumers=["inline", consumer],
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 28,
        seed=0,
    )


def direction(llm: LLM, layer: int, toward: Sequence[str], away: Sequence[str]) -> torch.Tensor:
    """[hidden], of length 1: from the mean of one set of prompts to the other's."""
    from vllm import SamplingParams
    from vllm.v1.capture import stack

    read = {"inline": {"hooks": {POINT: [layer]}, "positions": "last_prompt"}}
    params = SamplingParams(max_tokens=1, capture=read)
    means = [
        stack(llm.generate(list(prompts), params, use_tqdm=False), POINT, [layer])[:, 0]
        .float()
        .mean(dim=0)
        for prompts in (toward, away)
    ]
    return torch.nn.functional.normalize(means[0] - means[1], dim=0)


def watch(llm: LLM, prompt: str, layer: int, directions: torch.Tensor, max_tokens: int) -> Any:
    """Generate; the rows that chose each token go to the view. `directions`: [k, hidden]."""
    from vllm import SamplingParams

    capture = {
        "view": {"hooks": {POINT: [layer]}, "positions": "all", "project": directions},
    }
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=1, capture=capture)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face format")
    parser.add_argument("--prompt", default="We drove to the coast. All in all, the day was")
    parser.add_argument("--toward", nargs="+", default=["I love this place.", "A wonderful day!"])
    parser.add_argument("--away", nargs="+", default=["I hate this place.", "An awful day!"])
    parser.add_argument("--layer", type=int, help="default: the middle one")
    parser.add_argument("--max-tokens", type=int, default=60)
    given = parser.parse_args()
    prepare_environment(small_model=False)
    from vllm.pilot.checkpoints import checkpoint

    console = Console()
    view = View(decode=None, names=["mood", "random"])
    llm = start(given.model or checkpoint(), view)
    view.decode = llm.get_tokenizer().decode
    config = llm.model_config
    layer = config.get_total_num_hidden_layers() // 2 if given.layer is None else given.layer
    found = direction(llm, layer, given.toward, given.away)
    chance = torch.nn.functional.normalize(torch.randn_like(found), dim=0)  # something to compare
    with Live(view, console=console, refresh_per_second=10):
        watch(llm, given.prompt, layer, torch.stack([found, chance]), given.max_tokens)


if __name__ == "__main__":
    main()
