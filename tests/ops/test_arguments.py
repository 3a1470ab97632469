"""Bad input: an error at trace time whose message names the argument."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import _kernel

X = jnp.ones((3, 4))
NUMBERS = (((1,), (0,)), ((), ()))
SQUARE = jnp.ones((4, 4))


class Traced:
    """An argument that is an array known only when the compiled function runs."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "a traced array"


def case(error, match, function, *args, **options):
    given = ", ".join(f"{k}={getattr(v, 'dtype', v)!s:.40}{getattr(v, 'shape', '')}" for k, v in options.items())
    return pytest.param(error, match, function, args, options, id=f"{function}-{match}-{given}")


def softmax_cases(op):
    bool_x, complex_x = jnp.ones((3, 4), bool), jnp.ones((3, 4), jnp.complex64)
    yield case(TypeError, "x must be an array", op, [1.0, 2.0])
    yield case(TypeError, "x must be an array", op, (1.0, 2.0))
    yield case(TypeError, "x must be an array", op, None)
    yield case(TypeError, "x must be an array", op, "logits")
    yield case(TypeError, "x has dtype bool", op, bool_x)
    yield case(TypeError, "x has dtype bool", op, True, None)
    yield case(TypeError, "x must be an array or a scalar of numbers, got dtype <U1", op, np.array(["a"]))
    yield case(TypeError, "x must be an array or a scalar of numbers, got dtype object", op, np.array([None]))
    yield case(OverflowError, "x must be an array or a scalar of numbers, got 1180591620717411303424", op, 2**70, None)
    yield case(TypeError, "x has dtype float8", op, jnp.ones(4, jnp.float8_e4m3fn))
    yield case(ValueError, "axis 2 is out of bounds", op, X, axis=2)
    yield case(ValueError, "axis -3 is out of bounds", op, X, axis=-3)
    yield case(ValueError, "axis -1 is out of bounds", op, 1.0)
    yield case(ValueError, "axis 0 is out of bounds", op, jnp.ones(()), axis=0)
    yield case(ValueError, "axis must not name an axis twice", op, X, axis=(0, 0))
    yield case(ValueError, "axis must not name an axis twice", op, X, axis=(1, -1))
    yield case(TypeError, "axis must be an int", op, X, axis=1.0)
    yield case(TypeError, "axis must be an int", op, X, axis="rows")
    yield case(TypeError, "axis must be an int", op, X, axis=(0, None))
    yield case(TypeError, "axis must be an int", op, X, axis=Traced(1))
    yield case(ValueError, "where must be boolean, got dtype float32", op, X, where=X)
    yield case(ValueError, "where must be boolean, got dtype int32", op, X, where=jnp.ones((3, 4), jnp.int32))
    yield case(TypeError, "where must be an array", op, X, where=[[True] * 4] * 3)
    yield case(ValueError, r"do not broadcast: x \(3, 4\), where \(3, 5\)", op, X, where=jnp.ones((3, 5), bool))
    yield case(ValueError, r"scale must be a scalar, got shape \(4,\)", op, X, scale=jnp.ones(4))
    yield case(TypeError, "scale must be an array or a scalar, got list", op, X, scale=[1.0])
    yield case(TypeError, "scale must be an array or a scalar, got str", op, X, scale="2")
    yield case(TypeError, "scale has dtype complex64", op, X, scale=1j)
    yield case(TypeError, "scale has dtype bool", op, X, scale=True)
    yield case(TypeError, "bias must be an array", op, X, bias=[1.0] * 4)
    yield case(TypeError, "bias has dtype complex64", op, X, bias=complex_x)
    yield case(TypeError, "bias has dtype bool", op, X, bias=bool_x)
    yield case(ValueError, r"do not broadcast: x \(3, 4\), bias \(3,\)", op, X, bias=jnp.ones(3))
    yield case(TypeError, "causal must be True or False", op, X, causal="yes")
    yield case(TypeError, "causal must be True or False", op, X, causal=None)
    yield case(TypeError, "causal must be True or False", op, X, causal=Traced(True))
    yield case(TypeError, "causal must be True or False", op, X, causal=np.ones(4, bool))
    yield case(ValueError, "causal needs x to have at least 2 dimensions", op, jnp.ones(4), causal=True)
    yield case(TypeError, "dtype must be one of", op, X, dtype=jnp.int32)
    yield case(TypeError, "dtype must be one of", op, X, dtype="complex64")
    yield case(TypeError, "dtype must be one of", op, X, dtype="nonsense")
    yield case(TypeError, "dtype must be one of", op, X, dtype=jnp.float8_e5m2)
    yield case(TypeError, "not available for complex x", op, complex_x, scale=2.0)
    yield case(TypeError, "not available for complex x", op, complex_x, dtype=jnp.float32)
    yield case(TypeError, "unexpected keyword argument 'initial'", op, X, initial=0.0)
    yield case(TypeError, "positional argument", op, X, -1, None, 2.0)


def norm_cases(op):
    yield case(TypeError, "x must be an array", op, [1.0, 2.0])
    yield case(TypeError, "x has dtype bool", op, jnp.ones(4, bool))
    yield case(TypeError, "x has dtype complex64", op, jnp.ones(4, jnp.complex64))
    yield case(ValueError, "axis 2 is out of bounds", op, X, axis=2)
    yield case(ValueError, "axis -1 is out of bounds", op, 1.0)
    yield case(ValueError, "axis must not name an axis twice", op, X, axis=(1, -1))
    yield case(TypeError, "axis must be an int", op, X, axis=0.5)
    yield case(TypeError, "epsilon must be a Python number, got a traced array", op, X, epsilon=Traced(1e-6))
    yield case(TypeError, "epsilon must be a Python number", op, X, epsilon="small")
    yield case(TypeError, "epsilon must be a Python number", op, X, epsilon=None)
    yield case(TypeError, "epsilon must be a Python number", op, X, epsilon=10**400)
    yield case(TypeError, "epsilon must be a Python number", op, X, epsilon=1j)
    yield case(TypeError, "epsilon must be a Python number", op, X, epsilon=np.ones(3))
    yield case(ValueError, "epsilon must be finite and at least 0, got -1", op, X, epsilon=-1e-6)
    yield case(ValueError, "epsilon must be finite and at least 0, got nan", op, X, epsilon=float("nan"))
    yield case(ValueError, "epsilon must be finite and at least 0, got inf", op, X, epsilon=float("inf"))
    yield case(TypeError, "epsilon must be a Python number, got '1e-6'", op, X, epsilon="1e-6")
    yield case(TypeError, "epsilon must be a Python number, got array", op, X, epsilon=np.array([1e-6]))
    for name in ("scale", "bias") if op == "layer_norm" else ("scale",):
        shape = f"{name} must have the shape of the normalised axes"
        yield case(ValueError, rf"{shape}, \(4,\), got \(3,\)", op, X, **{name: jnp.ones(3)})
        yield case(ValueError, rf"{shape}, \(4,\), got \(1, 4\)", op, X, **{name: jnp.ones((1, 4))})
        yield case(ValueError, rf"{shape}, \(4,\), got \(\)", op, X, **{name: 1.0})
        yield case(ValueError, rf"{shape}, \(3, 4\), got \(4,\)", op, X, axis=(0, 1), **{name: jnp.ones(4)})
        yield case(TypeError, f"{name} must be an array", op, X, **{name: [1.0] * 4})
        yield case(TypeError, f"{name} has dtype bool", op, X, **{name: jnp.ones(4, bool)})
        yield case(TypeError, f"{name} has dtype complex64", op, X, **{name: jnp.ones(4, jnp.complex64)})
    yield case(ValueError, r"residual must have x's shape \(3, 4\), got \(4,\)", op, X, residual=jnp.ones(4))
    yield case(ValueError, r"residual must have x's shape \(3, 4\), got \(\)", op, X, residual=1.0)
    yield case(TypeError, "residual must be an array", op, X, residual=[1.0])
    yield case(TypeError, "residual has dtype bool", op, X, residual=jnp.ones((3, 4), bool))
    yield case(TypeError, "dtype must be one of", op, X, dtype=jnp.int8)
    yield case(TypeError, "dtype must be one of", op, X, dtype="nonsense")
    if op == "layer_norm":
        yield case(ValueError, "where must be boolean", op, X, where=X)
        yield case(TypeError, "where must be an array", op, X, where=[True])
        yield case(ValueError, "where", op, X, where=jnp.ones((3, 5), bool))
        yield case(ValueError, "where must broadcast to x's shape", op, X, where=jnp.ones((2, 3, 4), bool))
        yield case(TypeError, "positional argument", op, X, None, None, -1)
    else:
        yield case(TypeError, "positional argument", op, X, None, -1)


def scale_cases(op, *args):
    for name in ("lhs_scale", "rhs_scale"):
        yield case(ValueError, rf"{name} must be a scalar, got shape \(4,\)", op, *args, **{name: jnp.ones(4)})
        yield case(TypeError, f"{name} must be an array or a scalar, got list", op, *args, **{name: [1.0]})
        yield case(TypeError, f"{name} has dtype complex64", op, *args, **{name: 1j})
        yield case(TypeError, f"{name} has dtype bool", op, *args, **{name: True})


def matmul_cases():
    op = "matmul"
    yield from scale_cases(op, X, SQUARE)
    yield case(TypeError, "a must be an array", op, [[1.0]], SQUARE)
    yield case(TypeError, "b must be an array", op, SQUARE, [[1.0]])
    yield case(ValueError, r"a float32\[\], b float32\[4, 4\] do not fit together: .*operand 0", op, 1.0, SQUARE)
    yield case(ValueError, "operand 1", op, SQUARE, jnp.ones(()))
    yield case(TypeError, r"a float32\[3, 4\], b float32\[3, 4\] do not fit together: .*contracting", op, X, X)
    yield case(TypeError, "contracting dimensions", op, X, jnp.ones(3))
    yield case(ValueError, "matmul", op, jnp.ones((2, 3, 4)), jnp.ones((3, 4, 5)))
    yield case(ValueError, "activation must be one of None, 'relu'", op, X, SQUARE, activation="tanh")
    yield case(ValueError, "activation must be one of None, 'relu'", op, X, SQUARE, activation=jax.nn.relu)
    yield case(ValueError, "activation must be one of None, 'relu'", op, X, SQUARE, activation=["relu"])
    yield case(ValueError, r"do not broadcast: result \(3, 4\), bias \(3,\)", op, X, SQUARE, bias=jnp.ones(3))
    yield case(ValueError, "bias must broadcast to the result's shape", op, X, SQUARE, bias=jnp.ones((2, 3, 4)))
    yield case(TypeError, "bias must be an array", op, X, SQUARE, bias=[1.0] * 4)
    yield case(TypeError, "bias has dtype bool", op, X, SQUARE, bias=jnp.ones(4, bool))
    yield case(TypeError, "bias has dtype complex64", op, X, SQUARE, bias=jnp.ones(4, jnp.complex64))
    precision = "precision must be one that jax.numpy.matmul takes, got"
    yield case(ValueError, f"{precision} 'exact'", op, X, SQUARE, precision="exact")
    yield case(ValueError, f"{precision} 3.5", op, X, SQUARE, precision=3.5)
    yield case(TypeError, f"{precision} {{}}", op, X, SQUARE, precision={})
    yield case(TypeError, "preferred_element_type", op, X, SQUARE, preferred_element_type="nonsense")
    yield case(TypeError, "out_sharding must be a NamedSharding, a PartitionSpec or None", op, X, X.T, out_sharding="x")
    yield case(TypeError, "positional argument", op, X, SQUARE, None)


def dot_general_cases():
    op = "dot_general"
    yield from scale_cases(op, X, SQUARE, NUMBERS)
    yield case(TypeError, "lhs must be an array", op, [[1.0]], SQUARE, NUMBERS)
    yield case(TypeError, "rhs must be an array", op, SQUARE, [[1.0]], NUMBERS)
    yield case(TypeError, "contracting dimensions", op, X, X, NUMBERS)
    yield case(TypeError, "lhs", op, X, SQUARE, (((2,), (0,)), ((), ())))
    yield case(TypeError, "lhs", op, X, SQUARE, (((-1,), (0,)), ((), ())))
    yield case(TypeError, "lhs_batch and rhs_batch", op, X, SQUARE, (((1,), (0,)), ((0,), ())))
    yield case(TypeError, "batch", op, X, SQUARE, (((1,), (0,)), ((0,), (1,))))
    yield case(TypeError, "dimension_numbers must be", op, X, SQUARE, None)
    yield case(TypeError, "dimension_numbers must be", op, X, SQUARE, 1)
    yield case(TypeError, "dimension_numbers must be", op, X, SQUARE, ((1,), (0,)))
    yield case(TypeError, "dimension_numbers must be", op, X, SQUARE, (((1,), (0,)),))
    yield case(TypeError, "dimension_numbers must be", op, X, SQUARE, ((("k",), (0,)), ((), ())))
    yield case(ValueError, "(?i)precision", op, X, SQUARE, NUMBERS, precision="exact")
    yield case(TypeError, "preferred_element_type", op, X, SQUARE, NUMBERS, preferred_element_type="nonsense")
    yield case(TypeError, "out_sharding must be a NamedSharding", op, X, SQUARE, NUMBERS, out_sharding=3)


CASES = [
    *softmax_cases("softmax"),
    *softmax_cases("log_softmax"),
    *norm_cases("layer_norm"),
    *norm_cases("rms_norm"),
    *matmul_cases(),
    *dot_general_cases(),
]


@pytest.mark.parametrize("error, match, function, args, options", CASES)
def test_bad_input(error, match, function, args, options):
    """At trace time: directly, inside jit and inside eval_shape, with the arrays traced."""

    def traced(value):
        return isinstance(value, jax.Array | Traced)

    def call(arrays):
        arrays = iter(arrays)
        filled = [next(arrays) if traced(v) else v for v in args]
        named = {k: next(arrays) if traced(v) else v for k, v in options.items()}
        return getattr(jaxops, function)(*filled, **named)

    arrays = [getattr(v, "value", v) for v in (*args, *options.values()) if traced(v)]
    tracers_only = any(isinstance(v, Traced) for v in options.values())
    for run in (jax.jit(call), lambda a: jax.eval_shape(call, a), *([] if tracers_only else [call])):
        with pytest.raises(error) as caught:
            run(arrays)
        assert re.search(match, str(caught.value)), str(caught.value)


SIGNATURES = {
    "softmax": "(x, axis=-1, where=None, *, scale=None, bias=None, causal=False, dtype=None)",
    "log_softmax": "(x, axis=-1, where=None, *, scale=None, bias=None, causal=False, dtype=None)",
    "layer_norm": "(x, scale=None, bias=None, *, axis=-1, epsilon=1e-06, where=None, residual=None, dtype=None)",
    "rms_norm": "(x, scale=None, *, axis=-1, epsilon=1e-06, residual=None, dtype=None)",
    "matmul": "(a, b, *, precision=None, preferred_element_type=None, out_sharding=None, bias=None, activation=None, "
    "lhs_scale=None, rhs_scale=None)",
    "dot_general": "(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *, out_sharding=None, "
    "lhs_scale=None, rhs_scale=None)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    """The contract includes names, kinds and defaults."""
    signature = inspect.signature(getattr(jaxops, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


# --- the handlers' own checks, behind Python's checks ---

F32, I32, BF16, BOOL = np.float32, np.int32, jnp.bfloat16, np.bool_
SHAPE, ROW, COLUMN = (2, 3, 4), (2, 3, 1), (1, 1, 4)
FULL, STATISTIC, PARAMETER = (SHAPE, F32), (ROW, F32), (COLUMN, F32)
WORKSPACE = ((1, 1, 2, 4), F32)
AXES = {"axes": np.array([2])}
LOGITS = AXES | {"query_axis": np.int64(-1), "key_axis": np.int64(-1)}
LOGITS |= {"has_scale": False, "has_bias": False, "has_where": False, "has_parts": False}
LOGITS_BACKWARD = LOGITS | {"masked": False}
LOG = LOGITS | {"has_max": False}
SPLIT = LOGITS | {"has_parts": True}
LOG_BACKWARD = [FULL, STATISTIC, STATISTIC, FULL]
NORM = AXES | {"has_residual": False, "has_scale": True, "has_bias": False, "has_where": False, "has_parts": False}
NORM |= {"epsilon": 1e-6}
RESIDUAL = NORM | {"has_residual": True}
NORM_BACKWARD = AXES | {
    "has_scale": True,
    "has_where": False,
    "has_parts": False,
    "has_dsum": False,
    "has_dscale": True,
    "has_dbias": False,
}
RMS_BACKWARD = [FULL, PARAMETER, STATISTIC, FULL]


def causal(query, key):
    return LOGITS | {"query_axis": np.int64(query), "key_axis": np.int64(key)}


#: Wrong calls: kernel, operands, results and attributes.
HANDLER_CASES = {
    "axes beyond the rank": ("softmax_fwd", [((3,), F32)], [((3,), F32)], LOGITS),
    "a negative axis": ("softmax_fwd", [FULL], [FULL], LOGITS | {"axes": np.array([-1])}),
    "an axis twice": ("log_softmax_fwd", [FULL], [FULL], LOG | {"axes": np.array([1, 1])}),
    "axes of another type": ("softmax_fwd", [FULL], [FULL], LOGITS | {"axes": np.array([2], F32)}),
    "rank 0": ("softmax_fwd", [((), F32)], [((), F32)], LOGITS),
    "result's shape": ("softmax_fwd", [FULL], [((2, 3, 5), F32)], LOGITS),
    "result's rank": ("log_softmax_fwd", [FULL], [((24,), F32)], LOG),
    "integers": ("softmax_fwd", [(SHAPE, I32)], [(SHAPE, I32)], LOGITS),
    "result's dtype": ("softmax_fwd", [FULL], [(SHAPE, I32)], LOGITS),
    "too few operands": ("softmax_bwd", [FULL], [FULL], LOGITS_BACKWARD),
    "too many operands": ("softmax_fwd", [FULL, FULL], [FULL], LOGITS),
    "no attributes": ("softmax_fwd", [FULL], [FULL], {}),
    "dy's shape": ("softmax_bwd", [FULL, ((2, 3, 3), F32)], [FULL], LOGITS_BACKWARD),
    "a bias of softmax's gradient": (
        "softmax_bwd",
        [FULL, PARAMETER, FULL],
        [FULL],
        LOGITS_BACKWARD | {"has_bias": True},
    ),
    "too many results": ("log_softmax_bwd", LOG_BACKWARD, [FULL, FULL], LOGITS_BACKWARD),
    "no such query axis": ("softmax_fwd", [FULL], [FULL], causal(3, 2)),
    "no such key axis": ("softmax_fwd", [FULL], [FULL], causal(1, -1)),
    "queries that are keys": ("log_softmax_fwd", [FULL], [FULL], causal(1, 1) | {"has_max": False}),
    "no scale": ("softmax_fwd", [FULL], [FULL], LOGITS | {"has_scale": True}),
    "scale's dtype": ("softmax_fwd", [FULL, ((1, 1, 1), BF16)], [FULL], LOGITS | {"has_scale": True}),
    "bias's shape": ("softmax_fwd", [FULL, ((1, 2, 4), F32)], [FULL], LOGITS | {"has_bias": True}),
    "bias's rank": ("log_softmax_fwd", [FULL, ((4,), F32)], [FULL], LOG | {"has_bias": True}),
    "bias's dtype": ("softmax_fwd", [FULL, (COLUMN, I32)], [FULL], LOGITS | {"has_bias": True}),
    "where's dtype": ("log_softmax_fwd", [FULL, PARAMETER], [FULL], LOG | {"has_where": True}),
    "where's shape": ("softmax_fwd", [FULL, ((2, 3, 3), BOOL)], [FULL], LOGITS | {"has_where": True}),
    "max without total": ("log_softmax_fwd", [FULL], [FULL, STATISTIC], LOG | {"has_max": True}),
    "max's shape": ("log_softmax_bwd", [FULL, PARAMETER, STATISTIC, FULL], [FULL], LOGITS_BACKWARD),
    "total's dtype": ("log_softmax_bwd", [FULL, STATISTIC, (STATISTIC[0], BF16), FULL], [FULL], LOGITS_BACKWARD),
    "no parts": ("softmax_fwd", [FULL], [FULL], SPLIT),
    "parts of fewer values": ("softmax_fwd", [FULL], [FULL, ((2, 1, 6), F32)], SPLIT),
    "parts of other rows": ("softmax_fwd", [FULL], [FULL, ((2, 2, 2, 3), F32)], SPLIT),
    "more parts than columns": ("softmax_fwd", [FULL], [FULL, ((5, 2, 6), F32)], SPLIT),
    "parts' dtype": ("softmax_bwd", [FULL, FULL], [FULL, ((2, 1, 6), BF16)], LOGITS_BACKWARD | {"has_parts": True}),
    "too few attributes": ("layer_norm_fwd", [FULL, PARAMETER], [FULL, STATISTIC, STATISTIC], AXES),
    "attribute's type": ("rms_norm_fwd", [FULL, PARAMETER], [FULL, STATISTIC], NORM | {"has_scale": 1.5}),
    "scale's shape": ("rms_norm_fwd", [FULL, ((1, 1, 5), F32)], [FULL, STATISTIC], NORM),
    "scale's rows": ("rms_norm_fwd", [FULL, ((3, 1, 4), F32)], [FULL, STATISTIC], NORM),
    "scale's rank": ("rms_norm_fwd", [FULL, ((4,), F32)], [FULL, STATISTIC], NORM),
    "dtype of a norm's scale": ("rms_norm_fwd", [FULL, (COLUMN, I32)], [FULL, STATISTIC], NORM),
    "no scale of a norm": ("rms_norm_fwd", [FULL], [FULL, STATISTIC], NORM),
    "a scale too many": ("rms_norm_fwd", [FULL, PARAMETER, PARAMETER], [FULL, STATISTIC], NORM),
    "a bias of rms_norm": (
        "rms_norm_fwd",
        [FULL, PARAMETER, PARAMETER],
        [FULL, STATISTIC],
        NORM | {"has_bias": True},
    ),
    "a mask of rms_norm": (
        "rms_norm_fwd",
        [FULL, PARAMETER, (COLUMN, BOOL)],
        [FULL, STATISTIC],
        NORM | {"has_where": True},
    ),
    "rstd's shape": ("rms_norm_fwd", [FULL, PARAMETER], [FULL, ((2, 4, 1), F32)], NORM),
    "no mean": ("layer_norm_fwd", [FULL, PARAMETER], [FULL, STATISTIC], NORM),
    "residual's dtype": ("rms_norm_fwd", [FULL, (SHAPE, BF16), PARAMETER], [FULL, FULL, STATISTIC], RESIDUAL),
    "residual's shape": (
        "rms_norm_fwd",
        [FULL] + [PARAMETER] * 2,
        [FULL, FULL, STATISTIC],
        NORM | {"has_residual": True},
    ),
    "no sum": ("rms_norm_fwd", [FULL, FULL, PARAMETER], [FULL, STATISTIC], RESIDUAL),
    "no parts of a norm": ("rms_norm_fwd", [FULL, PARAMETER], [FULL, STATISTIC], NORM | {"has_parts": True}),
    "a norm's parts of more values": (
        "rms_norm_fwd",
        [FULL, PARAMETER],
        [FULL, STATISTIC, ((2, 3, 6), F32)],
        NORM | {"has_parts": True},
    ),
    "dsum's dtype": ("rms_norm_bwd", [*RMS_BACKWARD, (SHAPE, BF16)], [FULL], NORM_BACKWARD | {"has_dsum": True}),
    "dx's dtype": ("rms_norm_bwd", RMS_BACKWARD, [(SHAPE, BF16), WORKSPACE, PARAMETER], NORM_BACKWARD),
    "dscale and dbias apart": (
        "layer_norm_bwd",
        [FULL, PARAMETER, STATISTIC, STATISTIC, FULL],
        [FULL, ((2, 1, 2, 4), F32), PARAMETER, ((1, 3, 4), F32)],
        NORM_BACKWARD | {"has_dbias": True},
    ),
    "dscale without workspace": ("rms_norm_bwd", RMS_BACKWARD, [FULL, PARAMETER], NORM_BACKWARD),
    "dscale's shape": ("rms_norm_bwd", RMS_BACKWARD, [FULL, WORKSPACE, STATISTIC], NORM_BACKWARD),
    "dscale's dtype": ("rms_norm_bwd", RMS_BACKWARD, [FULL, WORKSPACE, (COLUMN, BF16)], NORM_BACKWARD),
    "workspace's groups": ("rms_norm_bwd", RMS_BACKWARD, [FULL, WORKSPACE, ((1, 3, 4), F32)], NORM_BACKWARD),
    "workspace's rank": ("rms_norm_bwd", RMS_BACKWARD, [FULL, ((8,), F32), PARAMETER], NORM_BACKWARD),
    "workspace without chunks": ("rms_norm_bwd", RMS_BACKWARD, [FULL, ((1, 1, 0, 4), F32), PARAMETER], NORM_BACKWARD),
    "workspace's dtype": ("rms_norm_bwd", RMS_BACKWARD, [FULL, ((1, 1, 2, 4), BF16), PARAMETER], NORM_BACKWARD),
}


@pytest.mark.parametrize("name", HANDLER_CASES)
def test_handlers_refuse_wrong_calls(name):
    """A wrong call to a handler itself is an error that leaves the process alive."""
    kernel, operands, results, attributes = HANDLER_CASES[name]
    call = jax.jit(
        lambda *xs: jax.ffi.ffi_call(
            _kernel.target_name(kernel), [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
        )(*xs, **attributes)
    )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arrays = [jnp.ones(shape, dtype) for shape, dtype in operands]
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
            jax.block_until_ready(call(*arrays))
        np.testing.assert_array_equal(jaxops.softmax(jnp.zeros((1, 2))), [[0.5, 0.5]])
