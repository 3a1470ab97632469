"""What the handlers do not take: each is asked for where a kernel is chosen, and what is beyond it is left to XLA.

Each is a constant of that name in ffi/ (`kMaxAxes`); tests/test_limits.py compares both lists.
"""

#: The normalised axes of a row kernel, and its other axes, that do not join.
MAX_AXES = 12

#: The elements of a row.
MAX_COLUMNS = 2**31 - 2**20 - 1

#: The queries, and the keys, of a causal softmax on a GPU.
MAX_CAUSAL_SIZE = 2**31 - 2

#: The batch axes of a product that do not join: see `joined_axes` in ops/_matmul_kernel.py.
MAX_BATCH_AXES = 8

#: The rows, columns and terms of a product on Hopper's kernel, which counts with those of a tile beyond the last.
MAX_MATRIX_SIZE = 2**31 - 1 - 512

#: The elements of a row that threads load in pieces.
MAX_PIECES = 2**26
