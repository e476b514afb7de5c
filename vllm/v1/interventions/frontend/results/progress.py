# SPDX-License-Identifier: Apache-2.0
"""Captures of an offline run: their progress beside tqdm's count of prompts, and what was lost."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm.logger import init_logger
from vllm.outputs import RequestOutput

if TYPE_CHECKING:
    from vllm.v1.interventions.frontend.results.outputs import CaptureOutputs

logger = init_logger(__name__)

REFRESH_SECONDS = 0.1


def warn_of_losses(outputs: Iterable[Any]) -> None:
    """Log one line where captures of a run have failed, or lack rows that were asked for."""
    results = [
        result
        for output in outputs
        if isinstance(output, RequestOutput)
        for completion in output.outputs
        for result in (completion.capture_results or {}).values()
    ]
    if lost := [result for result in results if result.status != "ok"]:
        logger.warning(
            "%d of %d captures failed, the first: %s; see status and error of each in "
            "capture_results",
            len(lost), len(results), lost[0].error,
        )  # fmt: skip


class CaptureProgress:
    """Rows and bytes that were captured since it was made, and the results that are waited for.

    Args:
        bar: tqdm's, or what stands in its place; its postfix is a string.
    """

    def __init__(self, captures: "CaptureOutputs", bar: Any) -> None:
        self._captures, self._bar = captures, bar
        self._rows, self._bytes = captures.rows, captures.num_bytes
        self._shown = ""
        self._drawn = 0.0

    @property
    def has_bar(self) -> bool:
        """True if there is something to draw: a bar that `TQDM_DISABLE` turned off has neither a
        postfix nor a time that speeds can be made of."""
        return not (isinstance(self._bar, tqdm) and self._bar.disable)

    def show(self) -> None:
        """Bring the end of the bar's postfix up to date; before the bar is drawn, and after a step,
        so that a run that waits for files says so."""
        text = self._text()
        if not text and not self._shown:
            return
        self._bar.postfix = str(self._bar.postfix).removesuffix(self._shown) + text
        changed, self._shown = text != self._shown, text
        if changed and time.monotonic() - self._drawn > REFRESH_SECONDS:
            self._drawn = time.monotonic()
            self._bar.refresh()

    def _text(self) -> str:
        rows, num_bytes = self._captures.rows - self._rows, self._captures.num_bytes - self._bytes
        text = f", captured: {rows} rows, {num_bytes / 2**20:.1f} MiB" if rows else ""
        held = self._captures.num_held
        return text + (f", {held} captures pending" if held else "")
