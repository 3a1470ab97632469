"""Some random calls to every op, the same in every run, and the calls that once failed. `make fuzz` runs many more."""

import fuzz
import jax
import numpy as np
import pytest
from fuzz import Case

#: Calls that failed, as small as they were found.
REGRESSIONS = {
    # A scale's tangent was lost if the probability underflows.
    "log_softmax's tangent of an underflowing probability": Case(
        "log_softmax",
        (("x", (1, 2047), "float32"), ("scale", (), "float32")),
        options=(("axis", -1),),
        values=("logits", "one hot"),
        derivative="jvp",
    ),
    # A bias's tangent, alone, had the bias's shape.
    **{
        f"{op}'s tangent of a bias that broadcasts": Case(
            op, (("x", (5, 7), "int8"), ("bias", (1,), "float32")), (("axis", -1),), derivative="jvp"
        )
        for op in ("softmax", "log_softmax")
    },
    # XLA rounds a float64 gradient to 0 if bfloat16 has only denormals for it; the check asked for the denormals.
    "softmax's gradient of a bfloat16 bias beside float64": Case(
        "softmax",
        (("x", (32,), "float64"), ("bias", (32,), "bfloat16")),
        options=(("axis", -1),),
        values=("logits",),
        derivative="vjp",
        seed=59,
    ),
    # A squared distance between means overflowed.
    "layer_norm of rows with means beyond 1.8e19": Case(
        "layer_norm",
        (("x", (4, 256), "float32"), ("scale", (256,), "float32")),
        options=(("axis", -1), ("epsilon", 1e-6)),
        values=("far",),
        derivative="vjp",
    ),
    # Batch axes that cannot be merged are more than the kernels take.
    "nine batch axes": Case(
        "matmul",
        (("a", (2, 1, 2, 1, 2, 1, 2, 1, 2, 3, 4), "float32"), ("b", (1, 2, 1, 2, 1, 2, 1, 2, 1, 4, 3), "float32")),
        options=(("precision", "highest"),),
        derivative="vjp",
    ),
    # XLA's product was rounded before it was scaled.
    "sums beyond float16 that a scale brings back": Case(
        "matmul",
        (("a", (3, 64), "float16"), ("b", (64, 5), "float16"), ("lhs_scale", (), "float32")),
        values=("forty",),
    ),
    # The scale's tangent was left out where the bias, not x, hides an entry.
    "log_softmax's tangent of a scale where the bias hides": Case(
        "log_softmax",
        (("x", (5, 8), "bfloat16"), ("scale", (), "float16"), ("bias", (1, 8), "float16")),
        options=(("axis", -1),),
        values=("hidden",),
        derivative="jvp",
    ),
    # The logits' tangent was rounded to float16 and overflowed.
    "softmax's tangent of a scale, in float16": Case(
        "softmax",
        (("x", (1,), "float16"), ("scale", (), "float16")),
        options=(("axis", None),),
        values=("huge",),
        derivative="jvp",
        mapped=(("x", 0), ("scale", 0)),
        layout="transposed",
        seed=1382,
    ),
    # The terms of an entry that does not count overflowed, times 0.
    "layer_norm's gradient beside huge values that do not count": Case(
        "layer_norm",
        (
            ("x", (129, 2), "bfloat16"),
            ("bias", (2,), "float32"),
            ("where", (1, 2), "bool"),
            ("residual", (129, 2), "bfloat16"),
        ),
        options=(("axis", -1), ("epsilon", 1e-6)),
        values=("huge",),
        derivative="vjp",
        layout="Fortran",
        seed=488,
    ),
    # On GPUs, slices were refused that begin between multiples of 16 bytes.
    **{
        f"{op} of a slice of a vector": Case(
            op, (("x", (4096,), "float32"),), (("axis", -1), *options), layout="behind", derivative="vjp"
        )
        for op, options in (("softmax", ()), ("layer_norm", (("epsilon", 1e-6),)))
    },
    # On GPUs, XLA multiplied few 8-bit numbers as float16.
    "few 8-bit products beyond float16": Case(
        "matmul",
        (("a", (2, 2), "float8_e5m2"), ("b", (1, 2, 17), "float8_e5m2")),
        options=(("preferred_element_type", "float32"),),
        values=("wide",),
        seed=264,
    ),
    # XLA:CPU had no dot for it.
    "bf16 times a batch of one": Case(
        "matmul", (("a", (6, 31), "bfloat16"), ("b", (1, 31, 3), "bfloat16")), layout="transposed", derivative="vjp"
    ),
}


@pytest.mark.parametrize("op", fuzz.OPS)
def test_random_calls(op):
    assert fuzz.run(op, (3 if op in fuzz.SEPARATE else fuzz.CALLS) * fuzz.DRAWS, seed=0) == []


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_failed(name):
    fuzz.check([REGRESSIONS[name]])


@pytest.mark.parametrize("name", ["out", "key", "value"])
def test_wrong_attention_is_seen(name, monkeypatch):
    right = fuzz.attention_cases.value_and_gradients

    def wrong(case, function, cotangent, floats=None):
        found = right(case, function, cotangent, floats)
        return found | {name: found[name] * (1 if function is fuzz.attention_cases.dense else 1.2)}

    monkeypatch.setattr(fuzz.attention_cases, "value_and_gradients", wrong)
    (_, error) = fuzz.run("attention", 1, seed=0)
    assert error.startswith(f"{name}:") and "ulp" in error


@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_wrong_losses_are_seen(op, monkeypatch):
    right = fuzz.loss_cases.Case.ours
    monkeypatch.setattr(fuzz.loss_cases.Case, "ours", lambda *arguments: 1.001 * right(*arguments))
    (_, error) = fuzz.run(op, 1, seed=0)
    assert "ulp" in error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_lost_gradients_of_losses_are_seen(name, dtype, monkeypatch):
    """In calls with 8 columns or more; with fewer, gradients may cancel."""
    right = fuzz.loss_cases.Case.ours

    def wrong(case, floats, arrays):
        stopped = {key: jax.lax.stop_gradient(x) if key == name else x for key, x in floats.items()}
        return right(case, stopped, arrays)

    seen = []
    for seed in range(200):
        rng = np.random.default_rng((11, seed))
        case = fuzz.loss_cases.random_case(rng, dtype, linear=True)
        size = case.arrays["labels"].size * case.arrays["w"].size
        if name not in case.arrays or size > 1 << 18 or min(case.arrays["w"].shape) < 8:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(fuzz.loss_cases.Case, "ours", wrong)
            try:
                fuzz.loss_cases.check(case, rng)
            except AssertionError as error:
                assert name in str(error)
                seen.append(True)
            else:
                seen.append(False)
        if len(seen) == 3:
            break
    assert sum(seen) >= 2


@pytest.mark.parametrize("op", [op for op in fuzz.OPS if op not in fuzz.SEPARATE])
def test_wrong_results_are_seen(op, monkeypatch):
    """A result with one element off by a few units fails."""
    operands = (("a", (3, 4), "float32"), ("b", (4, 5), "float32"))
    options = {"dot_general": (("dimension_numbers", (((1,), (0,)), ((), ()))),), "matmul": ()}
    options = {name: (*given, ("precision", "highest")) for name, given in options.items()}
    if op not in options:
        operands = (("x", (3, 40), "bfloat16"),)
        options[op] = (("axis", -1), *([("epsilon", 1e-6)] if op.endswith("norm") else []))
    case = Case(op, operands, options[op], derivative="vjp")
    fuzz.check([case])
    call = fuzz._call

    def wrong(case, arrays):
        (y,) = call(case, arrays)
        return (y.at[1, 2].multiply(1 + 16 * float(fuzz.jnp.finfo(y.dtype).eps)),)

    monkeypatch.setattr(fuzz, "_call", wrong)
    with pytest.raises(AssertionError, match="units off"):
        fuzz.check([case])
