"""flax.linen's layers on jaxops' kernels, and `swap`, which puts them into an existing linen model.

Every layer is a subclass of Flax's, of the same name: attributes, defaults, parameters, automatic names and result
dtypes are Flax's, and checkpoints fit both ways. What a layer has no kernel for it computes as Flax does, with a
:class:`jaxops.FallbackWarning`; where it is given functions of the caller's for its products, without one.
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
