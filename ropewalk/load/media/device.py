"""Windows of a whole batch -> tensors of the model, on the device: a few large operations, whatever the batch.

Images cross to the device as uint8, cut to what their windows need and laid side by side in one block as large as the
largest. Resampling is then two batched matrix products with the filter's weights: dense, though most weights are zero,
since tensor cores do 0.4 GFLOP an image in microseconds, while operations on one image at a time cost their launches
(0.1 ms an image). Flips are a reversed order of weights. Legend: B samples, H W source, h w result, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """Where each sample of a batch is resampled along one side, in pixels of its block; float64, B."""

    start: Tensor
    stop: Tensor
    low: Tensor
    """The filter reads from this pixel on,"""
    high: Tensor
    """to this one, exclusive."""


def resampled(
    pixels_BHWC: Tensor, rows: Axis, columns: Axis, *, size: tuple[int, int], flips: Tensor, precision: torch.dtype
) -> Tensor:
    """The windows of uint8 `pixels_BHWC` as B C h w of `precision`, in levels 0..255, not rounded.

    float16 holds every level exactly and errs by 0.1 level in the result: enough on a GPU, where it is twice as fast
    as float32.
    """
    batch, high, wide, _ = pixels_BHWC.shape
    weights_BhH = _weights(rows, size=size[0], length=high).to(precision)
    weights_BwW = _weights(columns, size=size[1], length=wide)
    weights_BwW = torch.where(flips[:, None, None], weights_BwW.flip(1), weights_BwW).to(precision)
    # Rows first: the block is H x (W C) as it lies, so that nothing is moved before it has become smaller.
    half_BhWC = torch.bmm(weights_BhH, pixels_BHWC.to(precision).reshape(batch, high, wide * 3))
    half_BChW = half_BhWC.reshape(batch, size[0], wide, 3).permute(0, 3, 1, 2).reshape(batch, 3 * size[0], wide)
    return torch.bmm(half_BChW, weights_BwW.transpose(1, 2)).reshape(batch, 3, *size)


def recoloured(
    levels_BChw: Tensor, *, colours_B34: Tensor | None, scale_C: Tensor, shift_C: Tensor, dtype: torch.dtype
) -> Tensor:
    """Levels 0..255 mapped by a matrix for each sample (None: left as they are), then scaled and shifted by channel;
    contiguous, of `dtype`."""
    levels = levels_BChw.float()
    if colours_B34 is not None:
        mapped = torch.einsum("bij,bjhw->bihw", colours_B34[:, :, :3], levels)
        levels = (mapped + colours_B34[:, :, 3, None, None]).clamp(0, 255)
    return torch.addcmul(shift_C[:, None, None], levels, scale_C[:, None, None]).to(dtype).contiguous()


def levels(levels_BChw: Tensor) -> Tensor:
    """Rounded to uint8: a contiguous copy, of what is uint8 already too."""
    if levels_BChw.dtype == torch.uint8:
        return levels_BChw.clone(memory_format=torch.contiguous_format)
    return levels_BChw.float().add(0.5).clamp(0, 255).to(torch.uint8)


def _weights(axis: Axis, *, size: int, length: int) -> Tensor:
    """How much of each of `length` source pixels goes into each of `size` results: B size length, rows sum to one."""
    device = axis.start.device
    scale_B = (axis.stop - axis.start) / size
    centres = torch.arange(size, device=device, dtype=torch.float64) + 0.5
    # Positions in double precision on the B x size part only; the large part is single.
    centre_Bs = (axis.start[:, None] + centres * scale_B[:, None]).float()
    support_B = scale_B.clamp(min=1).float()
    source_L = torch.arange(length, device=device, dtype=torch.float32) + 0.5
    weight = 1 - (source_L - centre_Bs[:, :, None]).abs() / support_B[:, None, None]
    inside = (source_L > axis.low[:, None].float()) & (source_L < axis.high[:, None].float())
    weight = weight.clamp(min=0) * inside[:, None]
    return weight / weight.sum(2, keepdim=True)
