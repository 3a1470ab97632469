"""Flax layers on jaxops' kernels: `jaxops.flax.linen` and `jaxops.flax.nnx`, for which `pip install 'jaxops[flax]'`.

Each has norm, dense and attention layers with Flax's constructor arguments, parameters and results, a gated MLP, and
`swap`, which moves an existing model onto them.
"""
