"""jaxops: softmax, norms, losses, matrix products and attention for JAX, on its own CPU and CUDA kernels."""

from jaxops import _load
from jaxops._explain import Explanation, explain
from jaxops._kernel import disabled_checks
from jaxops._patch import patch_jax_nn, patch_optax
from jaxops._version import __version__
from jaxops._warnings import FallbackWarning
from jaxops.ops.attention import dot_product_attention
from jaxops.ops.cross_entropy import softmax_cross_entropy_value_and_grad, softmax_cross_entropy_with_integer_labels
from jaxops.ops.gated_matmul import gated_matmul, gated_mlp
from jaxops.ops.layer_norm import layer_norm
from jaxops.ops.linear_cross_entropy import linear_cross_entropy
from jaxops.ops.log_softmax import log_softmax
from jaxops.ops.logsumexp import logsumexp
from jaxops.ops.matmul import dot_general, matmul
from jaxops.ops.rms_norm import rms_norm
from jaxops.ops.softmax import softmax

from jaxops import checkpoint_policies  # isort: skip  (it knows the kernels that the ops declare)
from jaxops._fuse import FuseReport, fuse  # isort: skip  (it calls the ops)

_load.register()

__all__ = [
    "Explanation",
    "FallbackWarning",
    "FuseReport",
    "__version__",
    "checkpoint_policies",
    "disabled_checks",
    "dot_general",
    "dot_product_attention",
    "explain",
    "fuse",
    "gated_matmul",
    "gated_mlp",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "matmul",
    "patch_jax_nn",
    "patch_optax",
    "rms_norm",
    "softmax",
    "softmax_cross_entropy_value_and_grad",
    "softmax_cross_entropy_with_integer_labels",
]
