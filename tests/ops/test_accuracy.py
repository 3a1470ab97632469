"""The bounds in accuracy.py hold on the device at hand, and its page shows the measured figures."""

import accuracy
import fuzz
import pytest
from accuracy import FIGURES, bound

#: An op counts as no worse than the reference below these, a few roundings, or below so many times its error: each
#: figure is the worst among few numbers, for a scale's gradient a single one, and chance decides which of two is
#: nearer. The most, on the CPU: 1.9 times, for the gradient of softmax's scale in float64; and 1.4 times, for x's
#: gradient in float16 over rows of 2^20, whose probabilities are denormal.
ROUNDING = {"ulp": 3.0, "units": 1.25, "norm": 4.0, "gradient_units": 1.25}
TIMES = 2.0
#: So many times as much in float64, which nothing wider sums: chance also decides whose summation order suits the
#: numbers.
ROUNDING_OF_FLOAT64 = 8

QUICK = [(op, dtype) for op in accuracy.OPS for dtype in ("float32", "bfloat16")]
REST = [(op, dtype) for op in accuracy.OPS for dtype in ("float16", "float64")]
EIGHT_BITS = [("matmul", dtype) for dtype in fuzz.EIGHT_BITS]


def assert_within(what, errors, limits):
    for name in FIGURES:
        figure, limit = getattr(errors, name), limits[name]
        assert figure <= limit, f"{what}: {name} {figure:.3g} from {errors.worst!r}, allowed {limit:.3g}"


@pytest.mark.parametrize("op, dtype", [*QUICK, *EIGHT_BITS])
def test_bounds(op, dtype, on_gpu):
    for options, several in accuracy.cases(op, dtype, long=False).items():
        (errors,) = accuracy.measure(several, (fuzz._call,))
        assert_within(f"{op} of {dtype}, {options}", errors, bound(op, dtype, options, on_gpu)._asdict())


@pytest.mark.slow
@pytest.mark.parametrize("op, dtype", [*QUICK, *REST, *EIGHT_BITS])
def test_never_worse_than_the_reference(op, dtype, on_gpu):
    for options, several in accuracy.cases(op, dtype).items():
        ours, theirs = accuracy.measure(several)
        limits = bound(op, dtype, options, on_gpu)._asdict()
        assert_within(f"{op} of {dtype}, {options}", ours, limits)
        if on_gpu or op not in ("matmul", "dot_general"):  # on the CPU both are XLA's dots
            few = {name: ROUNDING[name] * (ROUNDING_OF_FLOAT64 if dtype == "float64" else 1) for name in FIGURES}
            worse = {name: max(TIMES * getattr(theirs, name), few[name]) for name in FIGURES}
            assert_within(f"{op} of {dtype}, {options} against the reference", ours, worse)


def test_the_page_is_that_of_the_results():
    rows = accuracy.read()
    assert accuracy.PAGE.read_text() == accuracy.page(rows), "run `make accuracy`"
    assert {row.op for row in rows} == set(accuracy.OPS)
    assert [row for row in rows if not row.within()] == []


def test_errors_are_seen():
    """An error of 3 ulp in one element counts as an error, and so does a NaN that should not be there."""
    case = accuracy.cases("rms_norm", "float32", long=False)[""][0]

    def wrong(factor):
        def call(case, arrays):
            (y,) = fuzz._call(case, arrays)
            return (y.at[1, 2].multiply(factor),)

        return call

    good, bad, worst = accuracy.measure([case], (fuzz._call, wrong(1 + 2**-15), wrong(float("nan"))))
    assert good.units < 1 < 50 < bad.units < worst.units == float("inf")
