"""flax.linen's layers on jaxops' kernels, and `swap`, which moves an existing linen model onto them.

Every layer but :class:`GatedMLP`, which Flax does not have, is a subclass of the Flax layer with the same name.
Attributes, defaults, parameters, automatic names and result dtypes are Flax's, and checkpoints fit both ways. A call
without a kernel runs on Flax's code, with a :class:`jaxops.FallbackWarning`. If you pass your own function for a
layer's products, the layer uses it without a warning.
"""

from jaxops.flax._report import SwapReport
from jaxops.flax.linen._attention import dot_product_attention, dot_product_attention_weights
from jaxops.flax.linen._layers import Dense, DenseGeneral, GatedMLP, LayerNorm, RMSNorm
from jaxops.flax.linen._swap import MultiHeadAttention, MultiHeadDotProductAttention, swap, swapped

__all__ = [
    "Dense",
    "DenseGeneral",
    "GatedMLP",
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
