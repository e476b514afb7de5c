# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in transformers, whose residual stream is read and changed with gradients.

A block's input is `pre_attn` of its layer and its output `post_block`, as the engine has them. One
function at a site stands for both: it returns what it is given, or another stream.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from vllm.pilot.bench import encode_with
from vllm.pilot.pairs import Text

Site = tuple[str, int]
"""A point and a layer."""

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of a stream [n, tokens, hidden] and of which tokens are real, bool [n, tokens]."""

POINTS = ("pre_attn", "post_block")
_ROOM = 1.25
"""Memory for weights and what is computed of them, as a multiple of the weights."""


class TorchModel:
    """A causal language model of transformers, without gradients of its weights.

    Args:
        module: the model.
        tokenizer: its tokenizer.
        name: the folder or the name it was loaded from.

    Raises:
        ValueError: it has no list of blocks that the config counts.
    """

    def __init__(self, module: nn.Module, tokenizer: Any, name: str) -> None:
        self.module = module.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        config = module.config.get_text_config()  # type: ignore[operator, union-attr]
        count, self.hidden = config.num_hidden_layers, int(config.hidden_size)
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise ValueError(
                f"model: {type(module).__name__} has no list of {count} blocks; take a decoder "
                "whose layers are one list"
            )
        self.blocks = list(lists[0])
        self.layers: dict[int, tuple[str, ...]] = dict.fromkeys(range(count), POINTS)

    @classmethod
    def load(cls, name: str, dtype: torch.dtype = torch.float32) -> "TorchModel":
        """Load a checkpoint on the GPU, or on the CPU where there is none.

        Raises:
            ValueError: it is quantised, does not fit in memory, or is not there.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(name)
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ValueError(f"model: transformers cannot load {name!r}: {error}") from error
        need_differentiable(config)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _need_memory(empty, device)
        # Other kernels of attention leave out what some models do to their scores.
        made: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation="eager"
        )
        return cls(made.to(device), AutoTokenizer.from_pretrained(name), name)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.module.parameters()).device

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        """Return the tokens of a text, or of a chat; see `vllm.pilot.bench.Coder.encode`."""
        return encode_with(self.tokenizer, text, special, answer)

    def log_probs(
        self, texts: Sequence[Sequence[int]], changes: Mapping[Site, Change] | None = None
    ) -> torch.Tensor:
        """Run texts at once, with functions on the stream.

        Shorter texts are filled up behind their end, which no token before it sees.

        Returns:
            log P of each next token, float32 or wider, [n, tokens, vocabulary].

        Raises:
            ValueError: a function is at a site that the model does not have.
        """
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        real = torch.zeros(len(texts), longest, dtype=torch.bool)
        for i, text in enumerate(texts):
            ids[i, : len(text)] = torch.tensor(text)
            real[i, : len(text)] = True
        with self._hooked(changes or {}, real.to(self.device)):
            logits = self.module(ids.to(self.device), use_cache=False).logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return wide.log_softmax(-1)

    @contextmanager
    def _hooked(self, changes: Mapping[Site, Change], real: torch.Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            for (point, layer), change in changes.items():
                if point not in self.layers.get(layer, ()):
                    raise ValueError(
                        f"site: {point!r} of layer {layer} has no gradients here; take one of "
                        f"{', '.join(POINTS)} of layers 0-{len(self.blocks) - 1}"
                    )
                handle = _HOOKS[point](self.blocks[layer], _for(change, real))
                stack.callback(handle.remove)
            yield


def need_differentiable(config: Any) -> None:
    """Raise ValueError where a config says that the weights are quantised."""
    if (how := getattr(config, "quantization_config", None)) is not None:
        said = how.get("quant_method") if isinstance(how, Mapping) else how.quant_method
        raise ValueError(
            f"model: is quantised ({said}), and transformers has no gradients through it; learn on "
            "the checkpoint that it was made of, what is learned is served on both"
        )


def _need_memory(empty: nn.Module, device: str) -> None:
    need = sum(one.numel() * one.element_size() for one in empty.parameters()) * _ROOM
    free = psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]
    if need > free:
        raise ValueError(
            f"model: needs {need / (1 << 30):.1f} GiB to learn on, {free / (1 << 30):.1f} GiB are "
            "free; take --dtype bfloat16, or a machine with more memory"
        )


def _for(change: Change, real: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function for texts of one run, in the stream's dtype."""
    return lambda stream: change(stream, real).to(stream.dtype)


def _before(block: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return block.register_forward_pre_hook(hook, with_kwargs=True)


def _after(block: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    return block.register_forward_hook(hook)


_HOOKS = {"pre_attn": _before, "post_block": _after}
"""Point -> what puts a function there."""
