"""Limits of the handlers. The choice of a kernel respects them; calls beyond a limit run on XLA.

Each limit is also a constant in ffi/ (`kMaxAxes`); tests/jax/test_limits.py compares both lists.
"""

#: Normalised axes of a row kernel after joining, and its other axes after joining.
MAX_AXES = 12

#: Elements of a row.
MAX_COLUMNS = 2**31 - 2**20 - 1

#: Queries, and keys, of a causal softmax on a GPU.
MAX_CAUSAL_SIZE = 2**31 - 2

#: Batch axes of a product after joining: see `joined_axes` in ops/_matmul_kernel.py.
MAX_BATCH_AXES = 8

#: m, n and k of a product on Hopper's kernel, whose 32-bit counts reach one tile beyond the end.
MAX_MATRIX_SIZE = 2**31 - 1 - 512

#: Elements of a row that threads load in pieces.
MAX_PIECES = 2**26
