"""Flax layers on jaxops' kernels: `jaxops.flax.linen` and `jaxops.flax.nnx`, which need Flax (`pip install '.[flax]'`).

Each has norm, dense and attention layers with Flax's constructor arguments, parameters and results, a gated MLP, and
`swap`, which moves an existing model onto them.
"""
