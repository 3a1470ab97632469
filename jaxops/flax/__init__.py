"""Flax layers on jaxops' kernels: `jaxops.flax.linen` and `jaxops.flax.nnx`, for which `pip install 'jaxops[flax]'`.

Each has the layers that jaxops has kernels for, with Flax's constructor arguments, parameters and results, and `swap`,
which puts them into an existing model.
"""
