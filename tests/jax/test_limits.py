"""The choice of a kernel knows the handlers' limits and the compiled architectures."""

import functools
import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import _device, _kernel, _limits
from jaxops._device import H200, Device
from jaxops.ops import _matmul_choice as choices
from jaxops.ops._matmul_kernel import Spec, joined_axes, kernel, precision_of

ROOT = Path(__file__).parents[2]


def test_both_lists_of_limits_are_one():
    """The constants kMax... in ffi/ equal the constants in jaxops/_limits.py."""
    found = {}
    for path in [*(ROOT / "ffi").rglob("*.h"), *(ROOT / "ffi").rglob("*.cuh")]:
        for name, value in re.findall(r"^inline constexpr \w+ k(Max\w+) = ([^;]+);", path.read_text(), re.MULTILINE):
            value = re.sub(r"int64_t\{(\d+)\}", r"\1", value).replace("std::numeric_limits<int>::max()", "(2**31 - 1)")
            found[re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()] = eval(value)
    assert found == {name: value for name, value in vars(_limits).items() if name.startswith("MAX_")}


@pytest.mark.parametrize("name", [n for n in vars(_limits) if n.startswith("MAX_")])
def test_every_limit_is_asked_for(name):
    texts = [p.read_text() for p in (ROOT / "jaxops").rglob("*.py") if p.name != "_limits.py"]
    assert any(re.search(rf"[<>] {name}\b", text) for text in texts)


def broadcasting(rank):
    """Shapes of batches whose neighbouring axes do not join."""
    return tuple(2 if a % 2 else 1 for a in range(rank)), tuple(1 if a % 2 else 2 for a in range(rank))


def test_batch_axes_that_join():
    assert joined_axes((2, 3, 4), (2, 3, 4), (2, 3, 4)) == 1
    assert joined_axes((2, 3, 4), (2, 3, 4), (1, 1, 1)) == 1
    assert joined_axes((2, 3, 4), (2, 1, 4), (2, 3, 4)) == 3
    assert joined_axes((2, 1, 4), (2, 1, 4), (2, 1, 4)) == 1
    assert joined_axes((), (), ()) == 0
    assert joined_axes((2,) * 9, *broadcasting(9)) == 9


@pytest.mark.parametrize("rank", [8, 9])
def test_more_batch_axes_than_a_handler_takes(rank, rng, full_precision):
    first, second = broadcasting(rank)
    shapes = [jax.ShapeDtypeStruct((*batch, 512, 512), jnp.float32) for batch in (first, second)]
    spec = Spec(False, False, np.dtype("float32"), precision=precision_of("highest"))
    choice = kernel.choice(*shapes, spec=spec)
    assert (choice.kernel == "xla" and "axes" in choice.why) == (rank > _limits.MAX_BATCH_AXES)
    if jax.default_backend() == "gpu":
        a, b = (rng.standard_normal((*batch, 512, 512)).astype(np.float32) for batch in (first, second))
        wanted = jnp.matmul(a, b, precision="highest")
        np.testing.assert_allclose(jaxops.matmul(a, b, precision="highest"), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "architecture, capability, runs",
    [
        ("80-real", "8.0", True),
        ("80-real", "8.9", True),
        ("80-real", "9.0", False),
        ("80", "9.0", True),  # PTX
        ("80-virtual", "12.0", True),
        ("86-real", "8.0", False),
        ("90a-real", "9.0", True),
        ("90a", "10.0", False),
        ("100-real", "10.3", True),
        ("100f", "10.3", True),
        ("100f", "11.0", False),
        ("100a", "10.3", False),
        ("120-real", "12.1", True),
        ("120-real", "10.0", False),
    ],
)
def test_where_an_architecture_runs(architecture, capability, runs):
    device = Device(capability, 132, ("75-real", architecture))
    assert (device.why_no_kernels() is None) == runs
    if not runs:
        assert "JAXOPS_CUDA_ARCHITECTURES" in device.why_no_kernels()


@pytest.mark.parametrize("arithmetic", choices.ARITHMETICS)
def test_kernels_that_were_not_compiled_are_not_chosen(arithmetic):
    """Hopper's, in a build without 90a."""
    large = choices.Product(8192, 8192, 8192, arithmetic, result_bytes=4)
    uneven = choices.Product(4095, 4097, 4093, "16bit")
    for compiled, hopper in ((("80",), False), (("80-real", "90a-real"), True), (None, True)):
        device = Device("9.0", 132, compiled)
        choice = choices.choose(large, device, activation=True)
        assert choice == choices.choose(large, H200, activation=True) if hopper else choice.kernel == "xla"
        assert hopper or "JAXOPS_CUDA_ARCHITECTURES" in choice.why
        assert choices.choose(uneven, device).kernel == ("wgmma" if hopper else "general")


@pytest.mark.parametrize("op", ["softmax", "layer_norm", "matmul"])
def test_without_kernels_for_the_gpu_the_ops_run_on_xla(op, monkeypatch):
    """And a warning names the option of the build."""
    monkeypatch.setitem(_kernel.HANDLERS, "cuda", _kernel.HANDLERS["cpu"] | {"matmul", "epilogue_bwd"})
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    function = functools.partial(jaxops.matmul, activation="gelu") if op == "matmul" else getattr(jaxops, op)
    operands = (x, x) if op == "matmul" else (x,)

    def text(compiled):
        monkeypatch.setattr(_kernel, "local_device", lambda: Device("9.0", 132, compiled))
        lowered = jax.jit(lambda *xs: function(*xs)).trace(*operands).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    assert "custom_call @jaxops" in text(("90a-real",))
    with pytest.warns(jaxops.FallbackWarning, match="compiled for 100-real .*JAXOPS_CUDA_ARCHITECTURES.* not for 9.0"):
        assert "custom_call @jaxops" not in text(("100-real",))


@pytest.mark.cuda
def test_the_module_says_what_it_was_compiled_for():
    cuda = importlib.import_module("jaxops._cuda")
    assert cuda.cuda_architectures.split() == list(_device._compiled_architectures())
