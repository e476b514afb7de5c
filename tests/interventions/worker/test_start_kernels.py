# SPDX-License-Identifier: Apache-2.0
"""What a start launches of our Triton kernels, so that no request waits for a compiler."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance.engine import engine
from vllm.model_executor.layers import row_capture, steering_terms
from vllm.v1.interventions.makings import Attention
from vllm.v1.interventions.worker import runner as worker_runner
from vllm.v1.interventions.worker.attention import keys as layer_reader
from vllm.v1.interventions.worker.attention import products
from vllm.v1.interventions.worker.attention.keys import LayerReader, Queriers
from vllm.v1.interventions.worker.attention.pages import Pages, Sight
from vllm.v1.interventions.worker.attention.reader import AttentionReader
from vllm.v1.interventions.worker.check import attention as attention_check
from vllm.v1.interventions.worker.check.attention import attended
from vllm.v1.interventions.worker.focus import kernel as focus_kernel
from vllm.v1.interventions.worker.focus import table as focus_table
from vllm.v1.interventions.worker.focus.kernel import TOKENS, Workspace
from vllm.v1.interventions.worker.focus.table import FocusedAttention, FocusTable
from vllm.v1.interventions.worker.token_map import TokenMap

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

OURS = Path(__file__).parents[3] / "vllm"
HEADS, KEY_HEADS, WIDTH, BLOCK, KEYS = 8, 2, 16, 16, 40
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
Variants = dict[str, set[Any]]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Launched:
    """Stands in for a kernel: notes which variants of it are launched."""

    def __init__(self, variants: set[Any]) -> None:
        self._variants = variants

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self

    def __call__(self, *args: Any, **constants: Any) -> None:
        dtypes = tuple(a.dtype for a in args if isinstance(a, torch.Tensor))
        self._variants.add((dtypes, *sorted(constants.items())))


def launched_kernels(source: str) -> set[str]:
    """The kernels in a source that it launches, or others may: those no kernel calls."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    kernels = [
        f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)
    ]
    calls = [n for f in kernels for n in ast.walk(f) if isinstance(n, ast.Call)]
    return {f.name for f in kernels} - {ast.unparse(call.func) for call in calls}


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def watched(monkeypatch: pytest.MonkeyPatch) -> Variants:
    found: Variants = {"sum_kernel": set(), "join_kernel": set(), "_products_kernel": set()}
    sizes = SimpleNamespace(cdiv=lambda a, b: -(-a // b), next_power_of_2=next_power_of_2)
    for module in (focus_kernel, products):
        monkeypatch.setattr(module, "triton", sizes)  # which V1 turns off on a CPU
    for name in ("sum_kernel", "join_kernel"):
        monkeypatch.setattr(focus_kernel, name, Launched(found[name]))
    monkeypatch.setattr(products, "_products_kernel", Launched(found["_products_kernel"]), False)
    return found


def test_every_kernel_is_among_those_that_start_with_the_engine() -> None:
    """A new one is to be launched by a start, and held here."""
    found = {
        name
        for path in OURS.rglob("*.py")
        if "triton.jit" in (source := path.read_text())
        for name in launched_kernels(source)
    }
    assert found == {*OF_FOCUS, "_products_kernel", *IN_PLACE_OF}
    assert launched_kernels("@triton.jit\ndef new(x):\n    pass") == {"new"}


OF_FOCUS = ("sum_kernel", "join_kernel")


@pytest.mark.parametrize("lse", [False, True])
def test_focus(lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any number of tokens, with sums of the backend or without, launch no variant of the
    kernels that `FocusedAttention.warm` does not."""
    cache = torch.zeros(4, KEY_HEADS, BLOCK, WIDTH, dtype=DTYPE)
    monkeypatch.setattr(focus_table, "pages_of", lambda module: Pages(cache, cache))
    monkeypatch.setattr(focus_table, "sight_of", lambda module: SIGHT)
    monkeypatch.setattr(focus_table, "unreadable", lambda module: "")
    module: Any = SimpleNamespace(num_heads=HEADS, head_size=WIDTH, head_size_v=WIDTH)
    tokens = TokenMap(2 * TOKENS, CPU)
    tokens.focuses = True
    table = FocusTable({0: HEADS}, 2, CPU).at[0]
    workspace = Workspace.of(HEADS, WIDTH, CPU)
    block_table = torch.zeros(2, 4, dtype=torch.int32)
    focused = FocusedAttention(module, block_table, tokens, table, workspace)
    variants = watched(monkeypatch)
    focused.warm(lse)
    warm = {name: set(variants[name]) for name in OF_FOCUS}
    assert all(warm.values())
    for number in (1, 7, TOKENS, TOKENS + 1, 2 * TOKENS):
        query = torch.zeros(number, HEADS, WIDTH, dtype=DTYPE)
        for sums in (None, torch.zeros(HEADS, number)) if lse else (None,):
            focused.attend(query, query.clone(), sums)
    assert {name: variants[name] for name in OF_FOCUS} == warm
    if not lse:
        focused.attend(query, query.clone(), torch.zeros(HEADS, number))
        assert {name: variants[name] for name in OF_FOCUS} != warm


SIGHT = Sight(0.3, 0.0, 0, 0, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_with_keys(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of requests, of the model's dtype, launch what the proof launched."""
    cache = torch.randn(9, KEY_HEADS, BLOCK, WIDTH).to(dtype)
    monkeypatch.setattr(layer_reader, "pages_of", lambda module: Pages(cache, cache))
    monkeypatch.setattr(layer_reader, "sight_of", lambda module: SIGHT)
    on_gpu = monkeypatch.setattr
    on_gpu(LayerReader, "for_pages", lambda self, queries, heads: queries.as_subclass(OnGpu))
    module: Any = SimpleNamespace(head_size=WIDTH, num_heads=HEADS, num_kv_heads=KEY_HEADS)
    table = torch.zeros(3, 4, dtype=torch.int32)
    layer, variants = LayerReader(module, table), watched(monkeypatch)
    found = variants["_products_kernel"]
    attended(layer, torch.randn(HEADS, WIDTH).to(dtype), table[0], KEYS, 0)
    warm = set(found)
    assert len(warm) == 1
    reader = AttentionReader({3: layer}, CPU)
    for heads in ((0, 2, 3), tuple(range(HEADS))):
        read = Attention(("mass",), ("a",), ((0, 3),), 0, "", KEYS)
        queries, at = torch.randn(2, len(heads) * WIDTH).to(dtype), torch.tensor([2, 11])
        asked = Queriers.of([1, 0], [1, 1], [read.ranges] * 2, CPU)
        reader.read(read.grouped(), reader.sites([(3, heads)]), queries, at, asked, KEYS)
    assert found == warm
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    attended(layer, torch.randn(HEADS, WIDTH).to(other), table[0], KEYS, 0)
    assert found != warm


IN_PLACE_OF = {
    "_capture_rows_kernel": (row_capture, "_capture_rows_cpu"),
    "_steer_rows_kernel": (steering_terms, "steer_rows_torch"),
}
"""Kernel -> what a CPU runs where a GPU launches it."""


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    calls: dict[str, list[int]] = {name: [] for name in IN_PLACE_OF}
    for kernel, (module, name) in IN_PLACE_OF.items():
        run = getattr(module, name)

        def noted(*args: Any, kernel: str = kernel, run: Any = run, **more: Any) -> None:
            calls[kernel].append(len(args[0]))
            run(*args, **more)

        monkeypatch.setattr(module, name, noted)
    yield calls


@pytest.mark.full
@pytest.mark.parametrize("enabled", [True, False])
def test_capture_and_operations(
    enabled: bool, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any request; nothing of them where an engine has neither. What proves attention reads
    queries as requests capture them."""
    monkeypatch.setattr(worker_runner, "NATIVE_ROWS", False)
    options: dict[str, Any] = {}
    if enabled:
        options = {"enable_steering": True, "steering_families": ["add", "scale", "ablate"]}
        options |= {"capture_consumers": ["inline"], "capture_points": ["post_block", "q", "z"]}
    proved: list[torch.dtype] = []

    def noted(layer: LayerReader, q: torch.Tensor, *args: Any) -> torch.Tensor:
        proved.append(q.dtype)
        return attended(layer, q, *args)

    monkeypatch.setattr(attention_check, "attended", noted)
    options["dtype"] = "bfloat16"
    with counted(monkeypatch) as calls, engine(tiny_models.path("llama"), **options):
        assert all(bool(found) == enabled for found in calls.values()), calls
    assert set(proved) == ({torch.bfloat16} if enabled else set())
