"""Every argument of every public function and layer has bad input, which raises an error that names it.

tests/ops/test_arguments.py has the cases of the ops; here are the cases of everything else, and the count of all.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from ops import test_arguments

import jaxops
from jaxops import _warnings
from jaxops.flax import linen, nnx

X, SQUARE, Q = jnp.ones((3, 4)), jnp.ones((4, 4)), jnp.ones((2, 5, 3, 4))
KEY = jax.random.key(0)


def rngs():
    return flax_nnx.Rngs(0)


class Case:
    """A call that must raise `error` with a message that names `argument` and says `match`."""

    def __init__(self, argument, error, match, call):
        self.argument, self.error, self.match, self.call = argument, error, match, call


def wrong(call, **arguments):
    """Cases of one function: each argument with (error, match, values...)."""
    for name, (error, match, *values) in arguments.items():
        for value in values:
            yield Case(name, error, match, functools.partial(call, **{name: value}))


def attention(function, *operands, **more):
    """What the attention functions have in common; operands: how many arrays."""
    good = dict(zip(("query", "key", "value"), [Q] * len(operands), strict=False))

    def call(**bad):
        return function(**good | bad)

    def drop(**bad):
        return function(**good | {"dropout_rate": 0.5, "dropout_rng": KEY} | bad)

    flag = (TypeError, "must be True or False, got", "no", 1, None)
    for name in operands:
        yield from wrong(call, **{name: (TypeError, "must be an array", [[1.0]], None, "q")})
        yield from wrong(call, **{name: (ValueError, "must be .batch..., tokens, heads, features.*shape", jnp.ones(4))})
        yield from wrong(call, **{name: (ValueError, r"\(2, 5, 3, 4\)", jnp.ones((3, 5, 3, 4)))})
    yield from wrong(
        call,
        bias=(ValueError, r"do not broadcast.*\(2, 3, 5, 5\).*\(7,\)", jnp.ones(7)),
        mask=(ValueError, r"do not broadcast.*\(2, 3, 5, 5\).*\(7,\)", jnp.ones(7, bool)),
        dropout_rate=(ValueError, r"must be in \[0, 1\), got", -0.1, 1.0, 1.5),
        dropout_rng=(TypeError, "must be a key of jax.random or None, got", 3.5, "key"),
        dtype=(TypeError, "must be one of float64, float32", "nonsense", int, 3),
        precision=(ValueError, "must be one that jax.numpy.matmul takes, got", "exact", 3.5, ("highest",)),
        module=(TypeError, "must be a Flax module or None, got", 3),
        **dict.fromkeys(("broadcast_dropout", "deterministic"), flag),
        **more,
    )
    yield from wrong(call, **dict.fromkeys(("bias", "mask"), (TypeError, "must be an array", "b", [[1.0]])))
    yield from wrong(call, dropout_rate=(TypeError, "must be a Python number, got", "x", None, 1j))
    yield from wrong(drop, dropout_rng=(ValueError, "dropout_rate=0.5 needs a dropout_rng", None))


FLAG = (TypeError, "must be True or False, got", "no", 1, None)
CALLABLE = (TypeError, "must be callable, got", 3, None)
OPTIONAL_CALLABLE = (TypeError, "must be callable, got", 3)


def layer_calls(create, *, norm):
    """Calls of a layer, whose features are 4; create: a function that makes a callable of it."""
    if norm:
        yield from wrong(
            lambda x=X, **options: create()(x, **options),
            x=(TypeError, "x must be an array, got", "x", None),
            residual=(TypeError, "residual must be an array or a scalar, got", "r", [1.0]),
            mask=(TypeError, "mask must be an array, got", "m"),
        )
        yield from wrong(
            lambda **options: create()(X, **options),
            residual=(ValueError, r"residual must have x's shape \(3, 4\), got", jnp.ones(4), 1.0),
            mask=(ValueError, r"mask", jnp.ones((3, 5), bool), jnp.ones((2, 3, 4), bool)),
        )
    else:
        yield from wrong(create(), inputs=(TypeError, "inputs must be an array, got", "x", None))
        yield from wrong(create(), inputs=(ValueError, "inputs must have at least 1 dimension", 1.0))


def linen_layer(layer):
    return lambda: lambda *args, **options: layer.init_with_output(KEY, *args, **options)


WIDTH = (ValueError, "must be at least 1, got", 0, -2)


def gated_mlp_calls(create):
    """Calls of a gated MLP of 4 features."""
    dtype = (TypeError, "must be one of float64, float32", "nonsense", int, jnp.complex64, jnp.float8_e4m3fn)
    metadata = (TypeError, "must be a mapping or None, got", 3)
    names = {name for name in inspect.signature(create(None)).parameters if name.endswith("metadata")}
    yield from wrong(
        lambda **options: create(options)(X),
        hidden_features=WIDTH,
        out_features=WIDTH,
        activation=(ValueError, "activation must be one of 'relu'.*got", None, "swish", jax.nn.silu),
        dtype=dtype,
        param_dtype=(*dtype, None),
        precision=(ValueError, "must be one that jax.numpy.matmul takes, got", "exact", 3.5),
        recompute=FLAG,
        promote_dtype=CALLABLE,
        kernel_init=CALLABLE,
        down_kernel_init=OPTIONAL_CALLABLE,
        **dict.fromkeys(names, metadata),
    )
    yield from wrong(
        lambda **options: create(options)(X), hidden_features=(TypeError, "must be a Python int", 1.5, "x")
    )
    yield from wrong(lambda **options: create(options)(X), out_features=(TypeError, "must be a Python int", 1.5, True))
    yield from wrong(create({}), inputs=(TypeError, "inputs must be an array, got", "x", None))
    yield from wrong(create({}), inputs=(ValueError, "inputs must have at least 1 dimension", 1.0))
    yield from wrong(create({}), inputs=(TypeError, "inputs promotes to complex64; accepted are", X + 1j))


def linen_gated_mlp(options):
    if options is None:
        return linen.GatedMLP
    layer = linen.GatedMLP(**{"hidden_features": 6} | options)
    return lambda inputs: layer.init_with_output(KEY, inputs)


def nnx_gated_mlp(options):
    if options is None:
        return nnx.GatedMLP
    return nnx.GatedMLP(**{"in_features": 4, "hidden_features": 6, "rngs": rngs()} | options)


ACTIVATION = (ValueError, "must be one of None, 'relu'.*got", "tanh", jax.nn.relu, 3)


def dot_product_attention_cases():
    query, key = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 7, 2, 8))

    def call(**bad):
        return jaxops.dot_product_attention(**{"query": query, "key": key, "value": key} | bad)

    given = (
        ({"query": [1.0]}, TypeError, "query must be an array"),
        ({"query": query[0, 0]}, ValueError, "must all have 3 or all have 4 dimensions"),
        ({"query": query[0]}, ValueError, "must all have 3 or all have 4 dimensions"),
        ({"query": query.astype(np.float16)}, ValueError, "must have one dtype"),
        ({"query": query[:1]}, ValueError, "the same batch and depth"),
        ({"query": query[..., :4]}, ValueError, "the same batch and depth"),
        ({"query": query[:, :, :3]}, ValueError, "key heads must divide the query's"),
        ({"key": None}, TypeError, "key must be an array"),
        ({"value": key[:, :6]}, ValueError, "value must have key's shape"),
        ({"query": query * 1j}, TypeError, "query has dtype complex"),
        ({"bias": np.zeros((5, 6))}, ValueError, "bias"),
        ({"mask": np.zeros((2, 1, 5, 7))}, ValueError, "mask must be boolean"),
        ({"mask": np.zeros((3, 1, 5, 7), bool)}, ValueError, "mask"),
        ({"mask": np.zeros((1, 1, 1, 5, 7), bool)}, ValueError, "mask must broadcast"),
        ({"scale": np.inf}, ValueError, "scale must be finite"),
        ({"scale": np.ones(2)}, ValueError, "scale must be a scalar"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False"),
        ({"return_residual": None}, TypeError, "return_residual must be True or False"),
        ({"query_seq_lengths": np.zeros(2)}, ValueError, "query_seq_lengths must be of integers"),
        ({"key_value_seq_lengths": np.zeros(3, int)}, ValueError, "key_value_seq_lengths must have the shape"),
        ({"query_segment_ids": np.zeros((2, 5), int)}, ValueError, "needs key_value_segment_ids"),
        ({"key_value_segment_ids": np.zeros((2, 7), int)}, ValueError, "needs query_segment_ids"),
        ({"local_window_size": 1.5}, TypeError, "local_window_size must be an int or a pair"),
        ({"local_window_size": (1, 2, 3)}, TypeError, "local_window_size must be an int or a pair"),
        ({"local_window_size": -1}, ValueError, "local_window_size must be at least 0"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be positive"),
        ({"sinks": np.zeros(2)}, ValueError, "sinks must have the shape"),
        ({"implementation": "triton"}, ValueError, "implementation must be one of None, 'jaxops', 'cudnn', 'xla'"),
        ({"implementation": "jaxops"}, ValueError, "no attention kernel for float32"),
        ({"implementation": "cudnn", "sinks": np.zeros(4)}, ValueError, "'cudnn' does not take sinks"),
    )
    for bad, error, match in given:
        yield Case(list(bad)[-1], error, f"dot_product_attention: .*{match}", functools.partial(call, **bad))


LOSS_OPTIONS = {
    "label_smoothing": (ValueError, r"label_smoothing must be (in \[0, 1\]|finite and at least 0), got", 1.5, -0.1),
    "z_loss": (TypeError, "must be a Python number, got", "x", None),
    "logits_soft_cap": (ValueError, "must be (above 0|finite and at least 0)", 0.0, -1.0),
    "ignore_index": (TypeError, "must be a Python int, got", 1.5, "pad", True),
    "return_logsumexp": FLAG,
}


def loss_calls():
    def call(**arguments):
        return jaxops.softmax_cross_entropy_with_integer_labels(**{"logits": X, "labels": np.zeros(3, int)} | arguments)

    yield from wrong(
        call,
        logits=(
            TypeError,
            "logits must be (an array|of a floating dtype)",
            [[1.0]],
            None,
            np.ones((3, 4), int),
            X + 1j,
        ),
        labels=(TypeError, "labels must be (an array|integers)", [0, 1, 2], None, np.zeros(3), np.zeros(3, bool)),
        axis=(ValueError, "axis (2 is out of bounds|must name at least one axis|must not name)", 2, (), (0, 0)),
        where=(ValueError, "where.*(boolean|does not fit|must have the shape)", X, np.ones((3, 5), bool), X[0, 0] > 0),
        **LOSS_OPTIONS,
    )
    yield from wrong(
        call,
        labels=(
            ValueError,
            r"labels (must have the shape of logits|must be in \[-4, 4\), got|\(2, 1\))",
            np.zeros((3, 1), int),
            np.array([0, 4, 1]),
            np.array([0, -5, 1]),
            np.zeros(2, int),
        ),
    )


def value_and_grad_calls():
    def call(**arguments):
        return jaxops.softmax_cross_entropy_value_and_grad(**{"logits": X, "labels": np.zeros(3, int)} | arguments)

    yield from wrong(
        call,
        logits=(TypeError, "logits must be (an array|of a floating dtype)", [[1.0]], np.ones((3, 4), int)),
        labels=(
            ValueError,
            "labels must (have the shape|be in|not enlarge)",
            np.zeros((3, 1), int),
            np.array([0, 4, 1]),
        ),
        weights=(ValueError, r"weights must broadcast to \[3\]|do not broadcast.*weights", X[:2], np.ones(2)),
        axis=(TypeError, "axis must be a Python int", (1,), None, 1.0),
        where=(ValueError, "where.*(boolean|does not fit)", X, np.ones((3, 5), bool)),
        **{name: case for name, case in LOSS_OPTIONS.items() if name != "return_logsumexp"},
    )


def linear_loss_calls():
    def call(**arguments):
        given = {"x": jnp.ones((3, 4)), "w": jnp.ones((4, 5)), "labels": np.zeros(3, int)}
        return jaxops.linear_cross_entropy(**given | arguments)

    yield from wrong(
        call,
        x=(TypeError, "x must be (an array|of a floating dtype)", [[1.0]], np.ones((3, 4), int)),
        w=(ValueError, r"w must be \[width, vocabulary\]", jnp.ones((5, 4)), jnp.ones(4)),
        labels=(ValueError, "labels must (have the shape|be in)", np.zeros((3, 1), int), np.array([0, 5, 1])),
        bias=(ValueError, "bias must have the vocabulary's shape", jnp.ones(4), jnp.ones((1, 5))),
        transposed=FLAG,
        weights=(ValueError, r"weights must broadcast to \[3\]|do not broadcast.*weights", X, np.ones(2)),
        reduction=(ValueError, "reduction must be None, 'sum' or 'mean', got", "max", True),
        precision=(ValueError, "precision must be one that jax.numpy.matmul takes", "exact"),
        chunk_tokens=(ValueError, "chunk_tokens must be at least 1", 0, -3),
        **LOSS_OPTIONS,
    )
    yield from wrong(
        lambda **options: call(reduction="sum", **options),
        return_logsumexp=(ValueError, "return_logsumexp must be False with a reduction", True),
    )


CASES = {
    "jaxops.softmax_cross_entropy_value_and_grad": list(value_and_grad_calls()),
    "jaxops.linear_cross_entropy": list(linear_loss_calls()),
    "jaxops.patch_optax": list(wrong(lambda listener: jaxops.patch_optax(listener).__enter__(), listener=CALLABLE)),
    "jaxops.dot_product_attention": list(dot_product_attention_cases()),
    "jaxops.softmax_cross_entropy_with_integer_labels": list(loss_calls()),
    "jaxops.gated_matmul": [
        *wrong(
            lambda **options: jaxops.gated_matmul(**{"x": X, "w_gate": SQUARE, "w_up": SQUARE} | options),
            x=(TypeError, "x", [1.0], "x"),
            w_gate=(ValueError, "w_gate must be", np.ones(3), np.ones((1, 2))),
            w_up=(ValueError, "w_up must (be|have the shape)", np.ones(3), np.ones((X.shape[-1], 2))),
            activation=(ValueError, "activation must be one of", None, "swish"),
            precision=(ValueError, "precision", "exact"),
            recompute=FLAG,
        ),
    ],
    "jaxops.gated_mlp": [
        *wrong(
            lambda **options: jaxops.gated_mlp(
                **{"x": X, "w_gate": SQUARE, "w_up": SQUARE, "w_down": SQUARE} | options
            ),
            x=(TypeError, "x", [1.0], "x"),
            w_gate=(ValueError, "w_gate must be", np.ones(3), np.ones((1, 2))),
            w_up=(ValueError, "w_up must (be|have the shape)", np.ones(3), np.ones((X.shape[-1], 2))),
            w_down=(ValueError, "w_down must be", np.ones(3), np.ones((1, 2))),
            activation=(ValueError, "activation must be one of", None, "swish"),
            precision=(ValueError, "precision", "exact"),
            recompute=FLAG,
        ),
    ],
    "jaxops.logsumexp": [
        *wrong(
            jaxops.logsumexp,
            a=(TypeError, "a must be an array|a has dtype bool", [1.0], None, "a", X > 0),
        ),
        *wrong(
            lambda **options: jaxops.logsumexp(X, **options),
            axis=(ValueError, "axis", 2, -3, (1, -1)),
            b=(TypeError, "b must be an array|b has dtype bool", [1.0], "b", X > 0),
            keepdims=FLAG,
            return_sign=FLAG,
            where=(ValueError, r"boolean|do not broadcast: a \(3, 4\), where \(3, 5\)", X, jnp.ones((3, 5), bool)),
        ),
    ],
    "jaxops.disabled_checks": [],
    "jaxops.explain": [
        *wrong(lambda function: jaxops.explain(function, X), function=(TypeError, "must be callable, got int", 3)),
        *wrong(
            lambda platform: jaxops.explain(jaxops.softmax, X, platform=platform),
            platform=(ValueError, "must be one of cpu, cuda, rocm, tpu or None, got", "gpu", 3, ("cpu",)),
        ),
    ],
    "jaxops.fuse": [
        *wrong(lambda f: jaxops.fuse(f), f=CALLABLE),
        *wrong(
            lambda report: jaxops.fuse(jaxops.softmax, report=report),
            report=(TypeError, "must be callable or None, got", 3),
        ),
        *wrong(
            lambda only: jaxops.fuse(jaxops.softmax, only=only),
            only=(ValueError, "must name ops among .*softmax.*, got", "relu", ("softmax", 3), 3),
        ),
    ],
    "jaxops.patch_jax_nn": list(wrong(lambda listener: jaxops.patch_jax_nn(listener).__enter__(), listener=CALLABLE)),
    "jaxops.checkpoint_policies.save_only_these_ops": list(
        wrong(
            lambda ops: jaxops.checkpoint_policies.save_only_these_ops(ops),
            ops=(ValueError, "must be among .*layer_norm, .*got", "relu", 3, ["matmul"]),
        )
    ),
    "jaxops.flax.linen.dot_product_attention": [
        *attention(
            linen.dot_product_attention,
            "query",
            "key",
            "value",
            **dict.fromkeys(("force_fp32_for_softmax", "causal"), FLAG),
            **dict.fromkeys(
                ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"), OPTIONAL_CALLABLE
            ),
        ),
        Case(
            "qk_attn_weights_einsum",
            ValueError,
            "must be given together",
            lambda: linen.dot_product_attention(Q, Q, Q, qk_attn_weights_einsum=jnp.einsum),
        ),
    ],
    "jaxops.flax.linen.dot_product_attention_weights": [
        *attention(
            linen.dot_product_attention_weights,
            "query",
            "key",
            **dict.fromkeys(("force_fp32_for_softmax", "causal"), FLAG),
            **dict.fromkeys(("einsum_dot_general", "einsum"), OPTIONAL_CALLABLE),
        ),
        Case(
            "einsum",
            ValueError,
            "exclude each other",
            lambda: linen.dot_product_attention_weights(Q, Q, einsum=jnp.einsum, precision="highest"),
        ),
    ],
    "jaxops.flax.nnx.dot_product_attention": list(
        attention(
            nnx.dot_product_attention,
            "query",
            "key",
            "value",
            is_causal=FLAG,
            promote_dtype=CALLABLE,
            dot_general=CALLABLE,
        )
    ),
    "jaxops.flax.nnx.dot_product_attention_with_rope": [
        *attention(
            functools.partial(nnx.dot_product_attention_with_rope, rope=lambda x, positions: x), "query", "key", "value"
        ),
        *wrong(lambda rope: nnx.dot_product_attention_with_rope(Q, Q, Q, rope=rope), rope=CALLABLE),
        *wrong(
            lambda input_positions: nnx.dot_product_attention_with_rope(
                Q, Q, Q, rope=lambda x, positions: x, input_positions=input_positions
            ),
            input_positions=(TypeError, "input_positions (must be|has dtype)", "x", jnp.ones(5, complex)),
        ),
    ],
    "jaxops.flax.linen.swap": [
        *wrong(linen.swap, model=(TypeError, "must be a flax.linen module, got", 3, jnp.ones, None)),
        *wrong(lambda products: linen.swap(flax_linen.Dense(3), products=products), products=FLAG),
        Case("model", TypeError, "bound to variables", lambda: linen.swap(flax_linen.Dense(3).bind({}))),
    ],
    "jaxops.flax.linen.swapped": list(wrong(linen.swapped, functions=FLAG, products=FLAG)),
    "jaxops.flax.nnx.swap": [
        *wrong(nnx.swap, model=(TypeError, "must be a flax.nnx module, got", 3, flax_linen.Dense(3))),
        *wrong(lambda **options: nnx.swap(flax_nnx.Linear(3, 4, rngs=rngs()), **options), copy=FLAG, products=FLAG),
    ],
    "jaxops.flax.linen.LayerNorm": list(layer_calls(linen_layer(linen.LayerNorm()), norm=True)),
    "jaxops.flax.linen.RMSNorm": list(layer_calls(linen_layer(linen.RMSNorm()), norm=True)),
    "jaxops.flax.linen.Dense": [
        *layer_calls(linen_layer(linen.Dense(3)), norm=False),
        *wrong(lambda activation: linen.Dense(3, activation=activation).init(KEY, X), activation=ACTIVATION),
        Case(
            "activation",
            ValueError,
            "is part of the kernel, but dot_general= is given",
            lambda: linen.Dense(3, activation="relu", dot_general=jax.lax.dot_general).init(KEY, X),
        ),
    ],
    "jaxops.flax.linen.DenseGeneral": [
        *layer_calls(linen_layer(linen.DenseGeneral(3)), norm=False),
        Case("axis", ValueError, "axis 5 is out of bounds", lambda: linen.DenseGeneral(3, axis=5).init(KEY, X)),
    ],
    "jaxops.flax.linen.GatedMLP": list(gated_mlp_calls(linen_gated_mlp)),
    "jaxops.flax.nnx.GatedMLP": [
        *gated_mlp_calls(nnx_gated_mlp),
        *wrong(
            lambda **options: nnx_gated_mlp(options), in_features=WIDTH, rngs=(TypeError, "must be flax.nnx.Rngs", 0)
        ),
        *wrong(nnx_gated_mlp({}), inputs=(ValueError, r"inputs must be \[..., 4\], got \(3, 5\)", jnp.ones((3, 5)))),
    ],
    "jaxops.flax.linen.MultiHeadDotProductAttention": [],
    "jaxops.flax.linen.MultiHeadAttention": [],
    "jaxops.flax.nnx.LayerNorm": list(layer_calls(lambda: nnx.LayerNorm(4, rngs=rngs()), norm=True)),
    "jaxops.flax.nnx.RMSNorm": list(layer_calls(lambda: nnx.RMSNorm(4, rngs=rngs()), norm=True)),
    "jaxops.flax.nnx.Linear": [
        *layer_calls(lambda: nnx.Linear(4, 3, rngs=rngs()), norm=False),
        *wrong(nnx.Linear(4, 3, rngs=rngs()), inputs=(ValueError, r"inputs \(3, 5\) must have", jnp.ones((3, 5)))),
        *wrong(
            lambda out_sharding: nnx.Linear(4, 3, rngs=rngs())(X, out_sharding=out_sharding),
            out_sharding=(TypeError, "out_sharding", "x", 3),
        ),
        *wrong(lambda activation: nnx.Linear(4, 3, activation=activation, rngs=rngs())(X), activation=ACTIVATION),
    ],
    "jaxops.flax.nnx.LinearGeneral": [
        *layer_calls(lambda: nnx.LinearGeneral(4, 3, rngs=rngs()), norm=False),
        *wrong(
            nnx.LinearGeneral(4, 3, rngs=rngs()), inputs=(ValueError, r"inputs \(3, 5\) must have", jnp.ones((3, 5)))
        ),
        *wrong(
            lambda out_sharding: nnx.LinearGeneral(4, 3, rngs=rngs())(X, out_sharding=out_sharding),
            out_sharding=(TypeError, "out_sharding", "x", 3),
        ),
    ],
    "jaxops.flax.nnx.MultiHeadAttention": list(
        wrong(
            nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=False, rngs=rngs()),
            inputs_q=(TypeError, "inputs_q must be an array, got", "x", None),
        )
    ),
}

#: What users get but do not call, and what JAX calls.
RESULTS = {
    *("Explanation", "FallbackWarning", "FuseReport", "SwapReport"),
    *("dots_saveable", "dots_with_no_batch_dims_saveable"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name):
    """The messages name the argument, or show its value in the name's place, at trace time."""
    for case in CASES[name]:
        with pytest.raises(case.error) as caught:
            jax.eval_shape(lambda call=case.call: call())
        message = str(caught.value)
        assert case.argument in message, f"{case.argument}: {message}"
        assert re.search(case.match, message, re.DOTALL), f"{case.argument}: {message}"


def public():
    """Every public function and class by its full name."""
    for module, names in (
        (jaxops, jaxops.__all__),
        (jaxops.checkpoint_policies, policies()),
        (linen, linen.__all__),
        (nnx, nnx.__all__),
    ):
        for name in names:
            value = getattr(module, name)
            if callable(value) and name not in RESULTS:
                yield f"{module.__name__}.{name}", value


def policies():
    module = jaxops.checkpoint_policies
    return [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]


def parameters(value):
    """The names of the arguments that are jaxops' own: a layer's constructor has Flax's own besides."""
    if not inspect.isclass(value):
        return named(value)
    flax = next(base for base in value.__mro__ if base.__module__.startswith("flax."))
    own_call = named(value.__call__) - {"self"} if "__call__" in vars(value) else set()
    return (named(value) - named(flax) - {"parent", "name"}) | own_call  # which every linen module has


def named(function):
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds or p.name == "ops"}


def covered(name):
    """The arguments that have a case of bad input: cases of the ops say in `match` which they mean."""
    if name in CASES:
        return {case.argument for case in CASES[name]}
    op = name.removeprefix("jaxops.")
    matches = [param.values[1] for param in test_arguments.CASES if param.values[2] == op]
    return {word for match in matches for word in re.findall(r"\w+", match)}


@pytest.mark.parametrize("name, value", [pytest.param(*pair, id=pair[0]) for pair in public()])
def test_every_argument_has_bad_input(name, value):
    """A new argument needs a case."""
    missing = parameters(value) - covered(name)
    assert not missing, f"{name}: no bad input for {sorted(missing)}"


def test_every_case_is_of_something_public():
    assert set(CASES) <= dict(public()).keys()


# --- unsupported devices and options: a warning that says so once ---


def test_a_fallback_is_said_once(monkeypatch, recwarn):
    monkeypatch.setattr(_warnings, "_said", set())
    for _ in range(3):
        jax.clear_caches()
        jaxops.matmul(jnp.ones((2, 2), np.int8), jnp.ones((2, 2), np.int8))
    assert [w.category for w in recwarn.list] == [jaxops.FallbackWarning]


def test_an_ignored_float64_is_said():
    """Without x64 mode JAX has no float64."""
    with pytest.warns(UserWarning, match="softmax: dtype float64 is float32 unless jax_enable_x64 is set"):
        assert jaxops.softmax(X, dtype=np.float64).dtype == np.float32


def test_an_ignored_preferred_element_type_is_said():
    with pytest.warns(UserWarning, match="matmul: preferred_element_type float64 is float32 unless jax_enable_x64"):
        assert jaxops.matmul(SQUARE, SQUARE, preferred_element_type=np.float64).dtype == np.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda: jaxops.softmax(X, dtype=np.float64),
        lambda: jaxops.dot_general(SQUARE, SQUARE, (((1,), (0,)), ((), ())), preferred_element_type=np.float64),
        lambda: jaxops.matmul(jnp.ones((2, 2), np.int8), jnp.ones((2, 2), np.int8)),
        lambda: jax.jit(lambda x: jaxops.softmax(x + 1j))(X),
        lambda: linen.RMSNorm(epsilon=-1e-3).init(jax.random.key(0), X),
    ],
    ids=["softmax", "dot_general", "fallback", "inside jit", "Flax"],
)
def test_warnings_point_at_the_callers_line(call, monkeypatch):
    monkeypatch.setattr(_warnings, "_said", set())
    with pytest.warns(UserWarning) as caught:
        call()
    assert [w.filename for w in caught.list] == [__file__]


@pytest.mark.parametrize("name", ["scale", "residual"])
def test_strict_promotion_names_the_arguments(name):
    x = {"scale": X[0], "residual": X}[name]
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(ValueError, match=f"rms_norm: .* x bfloat16, {name} float32"),
    ):
        jaxops.rms_norm(X.astype(jnp.bfloat16), **{name: x})


# --- what is accepted ---


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda key: jaxops.matmul(key, SQUARE), "matmul: a"),
        (lambda key: jaxops.matmul(SQUARE, SQUARE, bias=key), "matmul: bias"),
        (lambda key: jaxops.dot_general(SQUARE, key, (((1,), (0,)), ((), ()))), "dot_general: rhs"),
        (jaxops.softmax, "softmax: x"),
        (lambda key: jaxops.softmax(X, where=key), "softmax: where"),
        (jaxops.rms_norm, "rms_norm: x"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_are_no_numbers(call, name):
    match = rf"{name} must be an array or a scalar of numbers, got dtype key<fry>"
    for run in (call, jax.jit(call)):
        with pytest.raises(TypeError, match=match):
            run(KEY)


@pytest.mark.parametrize(
    "op, argument, dtype, others",
    [
        ("matmul", "bias", bool, " and integers"),
        ("matmul", "bias", complex, " and integers"),
        ("softmax", "x", bool, ", integers and complex"),
    ],
)
def test_refused_dtypes_are_not_listed(op, argument, dtype, others):
    call = {"matmul": lambda x: jaxops.matmul(SQUARE, SQUARE, bias=x), "softmax": jaxops.softmax}[op]
    match = rf"{op}: {argument} has dtype {dtype.__name__}\d*; accepted are float64, .*bfloat16{others}$"
    with pytest.raises(TypeError, match=match):
        call(jnp.ones(4, dtype))
