"""The handlers' limits. The kernel choice respects them; calls beyond a limit run on XLA.

Each limit is also a constant in ffi/ (`kMaxAxes`); tests/jax/test_limits.py compares both lists.
"""

#: A row kernel's normalised axes after joining, and its other axes after joining.
MAX_AXES = 12

#: Elements in a row.
MAX_COLUMNS = 2**31 - 2**20 - 1

#: Queries, and keys, in a causal softmax on a GPU.
MAX_CAUSAL_SIZE = 2**31 - 2

#: A product's batch axes after joining: see `joined_axes` in ops/_matmul_kernel.py.
MAX_BATCH_AXES = 8

#: A product's m, n and k on Hopper's kernel, whose 32-bit counts reach one tile beyond the end.
MAX_MATRIX_SIZE = 2**31 - 1 - 512

#: Elements in a row that threads load in pieces.
MAX_PIECES = 2**26
