"""flax.linen's layers on jaxops' kernels, and `swap`, which puts them into an existing linen model.

Every layer is a subclass of Flax's, of the same name: attributes, defaults, parameters, automatic names and result
dtypes are Flax's, and checkpoints fit both ways. What a layer has no kernel for (see `why_not` in
:class:`jaxops.flax._report.SwapReport`) it computes as Flax does, with a :class:`jaxops.FallbackWarning`.
"""

from jaxops.flax._report import SwapReport
from jaxops.flax.linen._attention import dot_product_attention, dot_product_attention_weights
from jaxops.flax.linen._layers import Dense, DenseGeneral, LayerNorm, RMSNorm
from jaxops.flax.linen._swap import MultiHeadAttention, MultiHeadDotProductAttention, swap, swapped

__all__ = [
    "Dense",
    "DenseGeneral",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "RMSNorm",
    "SwapReport",
    "dot_product_attention",
    "dot_product_attention_weights",
    "swap",
    "swapped",
]
