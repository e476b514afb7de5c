# SPDX-License-Identifier: Apache-2.0
"""Forms in which files keep rows, smaller or wider than the model's dtype.

A small row has a code of one byte for each value, and one float32 scale: value = number of the code
* scale, where the scale maps the row's greatest absolute value to the greatest number that a code
has (absmax scaling). A site's codes are the tensor of its name, its scales that name with `.scale`.

int8      numbers -127 to 127; a value is off by at most 1/254 of the row's greatest.
float8    e4m3 as of the OCP 8-bit floating point specification, greatest 448; a value is off by at
          most 1/16 of itself, or by 1/458,752 of the row's greatest where that is more. Codes are
          bytes, since numpy has no such dtype; the tensor `float8` has the number of each.
"""

from typing import Literal, get_args

import torch

StoreDtype = Literal["float32", "int8", "float8"]
SmallDtype = Literal["int8", "float8"]
SMALL_DTYPES: tuple[SmallDtype, ...] = get_args(SmallDtype)

SCALE = ".scale"
"""Suffix of the tensor of a site's scales."""


class SmallRows:
    """Rows as codes and scales.

    Args:
        codes: dtype of the codes, as files have it.
        numbers: dtype whose values the codes are, of the same size.
        table: name of the tensor that has the number of each code; "" if codes are numbers.
    """

    def __init__(self, codes: torch.dtype, numbers: torch.dtype, most: float, table: str) -> None:
        self.codes, self._numbers, self._most, self._table = codes, numbers, most, table

    def pack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [..., width] and float32 scales [...] of rows [..., width].

        The scale of a row with a number that is not finite is NaN, and so is all that is read of
        it.
        """
        values = rows.float()
        most = values.abs().amax(dim=-1) if values.numel() else values.new_zeros(rows.shape[:-1])
        scales = (most / self._most).where(most.isfinite(), torch.nan)
        # A row of zeros, or of numbers that underflow, has the scale 0 and is read as zeros.
        scaled = (values / scales.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0)
        whole = scaled if self._numbers.is_floating_point else scaled.round()
        numbers = whole.clamp(-self._most, self._most).to(self._numbers)
        return numbers.view(self.codes), scales

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return rows, float32 [..., width], of what `pack` returned."""
        return codes.view(self._numbers).float() * scales.unsqueeze(-1)

    def shared(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a file has once: the number of each code, float32 [256]."""
        if not self._table:
            return {}
        every = torch.arange(256, dtype=torch.uint8)
        return {self._table: every.view(self._numbers).float()}

    def num_bytes(self, rows: torch.Tensor) -> int:
        """Return the bytes of these rows, packed."""
        return rows.numel() + 4 * rows.shape[:-1].numel()


FORMS: dict[str, SmallRows] = {
    "int8": SmallRows(torch.int8, torch.int8, 127, ""),
    "float8": SmallRows(torch.uint8, torch.float8_e4m3fn, 448, "float8"),
}
"""Name -> form, of `SMALL_DTYPES`."""


def is_site(name: str) -> bool:
    """Tell whether a tensor of this name has the rows of a site, and is not beside them."""
    return not name.endswith(SCALE) and name not in FORMS
