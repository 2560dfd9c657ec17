"""Weight initialization laws: one function per paper in `INITS`, from a matrix to a distribution. No torch.

Under every law biases start at 0 and norm weights at 1. Laws apply to the parts of a fused matrix (query, key, value;
gate, up), which papers refer to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Literal

from ropewalk.config.registry import Kind, Registry

if TYPE_CHECKING:
    from .spec import Spec

Part = Literal["embedding", "positions", "head", "query", "key", "value", "out", "gate", "up", "down"]

STD = 0.02
"""Standard deviation of GPT-2 (Radford et al. 2019)."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One unfused matrix: role, layer and size."""

    part: Part
    layer: int
    """From 0; also 0 outside blocks."""
    inputs: int
    outputs: int

    @property
    def writes_residual(self) -> bool:
        return self.part in ("out", "down")

    @property
    def in_block(self) -> bool:
        return self.part not in ("embedding", "positions", "head")

    @property
    def glorot_std(self) -> float:
        """Glorot and Bengio 2010: variance 2 / (inputs + outputs)."""
        return sqrt(2 / (self.inputs + self.outputs))


@dataclass(frozen=True, slots=True)
class Distribution:
    """I.i.d. values with mean 0."""

    kind: Literal["normal", "uniform"]
    std: float

    @property
    def bound(self) -> float:
        """Maximum absolute value of the uniform kind."""
        return self.std * sqrt(3)


Law = Callable[[Matrix, "Spec"], Distribution]


def gaussian(matrix: Matrix, spec: Spec) -> Distribution:
    """The same standard deviation for all matrices."""
    return Distribution("normal", STD)


def depth_scaled(matrix: Matrix, spec: Spec) -> Distribution:
    """GPT-2: divides matrices that write to the residual stream by the square root of their number, 2 x layers."""
    return Distribution("normal", STD / sqrt(2 * spec.layers) if matrix.writes_residual else STD)


def lipschitz(matrix: Matrix, spec: Spec) -> Distribution:
    """LRI (Xu et al. 2019, arXiv 1911.03179), for `post`.

    A norm after x + f(x) divides the residual stream by the deviation of that sum; the paper prevents shrinking with an
    f that starts Lipschitz with constant at most 1. Linear layers are uniform in +-sqrt(1 / inputs): each output is
    then 1-Lipschitz, as a row has norm at most 1. Embeddings are uniform in +-sqrt(2 / (C + V)).
    """
    if matrix.part in ("embedding", "positions"):
        return Distribution("uniform", sqrt(2 / (matrix.inputs + matrix.outputs)) / sqrt(3))
    return Distribution("uniform", sqrt(1 / matrix.inputs) / sqrt(3))


DS_ALPHA = 1.0
"""The factor of DS-Init; Zhang et al. use 1."""


def ds_init(matrix: Matrix, spec: Spec) -> Distribution:
    """DS-Init (Zhang, Titov and Sennrich 2019, arXiv 1908.11365), for `post`.

    Matrices of layer l (from 1) are uniform in +-alpha sqrt(6 / (inputs + outputs)) / sqrt(l): less variance in upper
    layers, where branches otherwise outweigh the stream. The paper leaves embeddings to the base model: 0.02 here.
    """
    if not matrix.in_block:
        return Distribution("uniform", STD)
    return Distribution("uniform", DS_ALPHA * matrix.glorot_std / sqrt(matrix.layer + 1))


def t_fixup(matrix: Matrix, spec: Spec) -> Distribution:
    """T-Fixup (Huang et al. 2020), for `norm = "none"` and no warm-up, adapted to a decoder without cross-attention.

    Start with Glorot matrices and embeddings of deviation width^(-1/2), then multiply values, outputs, feed-forward
    matrices and embeddings by s. The paper bounds the first update of the output by a sum over branches w v x: each
    adds |v|^2 |x|^2 + |w|^2 |x|^2 + |v|^2 |w|^2, which is 3 s^4 if all three are s. Its decoder has 3 branches per
    layer: 9 N s^4 = 1, hence its (9N)^(-1/4). Its encoder has 2, with inputs already scaled by (9N)^(-1/4):
    2 (2 s^2 / (3 sqrt(N)) + s^4) N = 1, hence its 0.67 N^(-1/4). A decoder without cross-attention has 2 branches, all
    at s: 6 N s^4 = 1, so s = (6N)^(-1/4). A gated feed-forward adds one factor of at most s: the bound holds.
    """
    scale = (6 * spec.layers) ** -0.25
    if matrix.part in ("embedding", "positions"):
        return Distribution("normal", scale * spec.width**-0.5)
    scaled = matrix.part in ("value", "out", "gate", "up", "down")
    return Distribution("uniform", matrix.glorot_std * (scale if scaled else 1.0))


def zero_projection(matrix: Matrix, spec: Spec) -> Distribution:
    """Matrices that write to the residual stream start at 0: every block starts as the identity (as the last layer of
    a branch in Fixup, Zhang, Dauphin and Ma 2019)."""
    return Distribution("normal", 0.0 if matrix.writes_residual else STD)


def adapter(inputs: int) -> Distribution:
    """A of an adapter under any law; B starts at 0 (Hu et al. 2021, section 4.1).

    The paper says Gaussian without a deviation; sqrt(1 / (3 inputs)) is that of its code (uniform there).
    """
    return Distribution("normal", sqrt(1 / (3 * inputs)))


INITS: Registry[Kind] = Registry(
    "init",
    {
        "gaussian": Kind(target=gaussian, doc="The same deviation everywhere."),
        "depth-scaled": Kind(target=depth_scaled, doc="GPT-2: smaller where matrices write to the residual stream."),
        "lipschitz": Kind(target=lipschitz, doc="Xu et al. 2020, for `post`."),
        "ds-init": Kind(target=ds_init, doc="Zhang, Titov and Sennrich 2019, for `post`."),
        "t-fixup": Kind(target=t_fixup, doc='Huang et al. 2020, for `norm = "none"`.'),
        "zero-projection": Kind(target=zero_projection, doc="Matrices that write to the residual stream start at 0."),
    },
)
"""The target is a `Law`."""
