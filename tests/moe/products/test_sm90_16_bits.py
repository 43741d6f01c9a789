"""Which products in 16 bits go to the kernel in Gluon, and the op that also applies `glu`."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.moe.products.test_programs import kernels
from triax import moe
from triax.compat import jax_private, versions
from triax.moe.activations import options as activations
from triax.moe.products import ops, sm90_16_bits
from triax.moe.products.operands import Parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.product import RaggedDot
from triax.moe.shared.target import Target
from triax.testing import assert_close

HALF = "bfloat16"
HOPPER = Target(compute_capability=90, multiprocessors=132, tensor_maps=True)


def shape(*sizes, dtype=HALF):
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def layer_ptx(tokens=4000, dtype=HALF, first=400, bias=None, **how):
    """The kernels of a layer's forward pass, with two choices for a token and five experts."""

    def run(x, logits, w_gate_up, w_down, b_gate_up=None):
        experts = moe.Experts(w_gate_up, w_down, b_gate_up=b_gate_up, **how)
        return moe.feed_forward(x, logits, experts, moe.Router(2)).tokens

    w_gate_up = (5, first, 128) if how.get("transposed") else (5, 128, first)
    width = first if how.get("activation") == "relu2" else first // 2
    w_down = (5, 128, width) if how.get("transposed") else (5, width, 128)
    sizes = (tokens, 128), (tokens, 5), w_gate_up, w_down, (5, first)
    dtypes = dtype, "float32", dtype, dtype, bias
    arrays = [shape(*s, dtype=d) for s, d in zip(sizes, dtypes, strict=True) if d]
    return kernels(jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)))


def count(ptx):
    """How many kernels multiply in warp groups of their own, and how many apply `glu` alone."""
    own = sum("setmaxnreg" in text and "wgmma" in text for text in ptx)
    return own, sum("_glu_kernel" in text for text in ptx)


def needs_descriptors():
    if not jax_private.supports_tensor_maps():
        pytest.skip("this jaxlib encodes no descriptors")
    if not versions.GLUON.passes(versions.installed("triton")):
        pytest.skip(f"needs Triton {versions.GLUON.stable}")


@pytest.mark.cuda_plugin
@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    ("arch", "how", "found"),
    [
        (90, {}, (1, 0)),
        (90, {"dtype": "float16", "activation": moe.Swiglu(1.702, 7.0, 1.0)}, (1, 0)),
        (90, {"activation": "geglu_exact"}, (1, 0)),
        (90, {"interleaved": True}, (1, 0)),
        (90, {"interleaved": True, "bias": HALF}, (1, 0)),
        (90, {"activation": "relu2", "bias": "float32"}, (1, 0)),
        (90, {"transposed": True, "first": 404, "bias": "float32"}, (1, 0)),
        (90, {"transposed": True, "first": 404, "bias": HALF}, (0, 1)),  # 808 bytes
        (90, {"tokens": 100}, (0, 1)),
        (90, {"dtype": "float32"}, (0, 1)),
        (100, {}, (0, 1)),
        (80, {}, (0, 1)),
    ],
)
def test_a_layers_products(monkeypatch, arch, how, found):
    """The second product has too few columns for it."""
    needs_descriptors()
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    assert count(layer_ptx(**how)) == found


@pytest.mark.cuda_plugin
@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    ("arch", "how", "found"),
    [
        (90, {}, 1),
        (90, {"dtype": "float16", "left": 40, "transposed": True}, 1),
        (90, {"left": 20}, 0),  # rows that begin at no multiple of 16 bytes
        (90, {"right": 128}, 0),
        (90, {"num_rows": 320}, 0),
        (90, {"dtype": "float32"}, 0),
        (100, {}, 0),
        (80, {}, 0),
    ],
)
def test_the_gradient_of_weights(monkeypatch, arch, how, found):
    """It loads boxes of 64 columns: two of the left side, and four of the right one."""
    needs_descriptors()
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    given = {"num_rows": 4000, "left": 200, "right": 136, "dtype": HALF, "transposed": False} | how
    num_rows, left, right, dtype, transposed = given.values()

    def gradient(rows, weights, sizes, out):
        multiply = functools.partial(moe.ragged_dot, rows, transpose_weights=transposed)
        return jax.vjp(lambda w: multiply(w, sizes), weights)[1](out)

    depth, columns = (right, left) if transposed else (left, right)
    shapes = (num_rows, depth), (5, left, right), (num_rows, columns)
    rows, weights, out = (shape(*of, dtype=dtype) for of in shapes)
    traced = jax.jit(gradient).trace(rows, weights, shape(5, dtype="int32"), out)
    ptx = [k for k in kernels(traced.lower(lowering_platforms=("cuda",))) if "group_outer" in k]
    own = [text for text in ptx if "setmaxnreg" in text]
    assert (len(ptx), len(own)) == (1, found)
    for text in own:
        assert text.count("cp.async.bulk.tensor.4d") == 6
        assert text.count("wgmma.mma_async") == 8


def suits(rows=(4000, 512), columns=400, scales=None, out=HALF, share=1.0, dtype=HALF, **how):
    x, w = Parts(shape(*rows), scales), Parts(shape(2, rows[1], columns, dtype=dtype))
    given = {"target": HOPPER, "transposed": False, "implementation": None} | how
    operands = {"left": x, "right": w, "weights": w.values}
    operands["groups"] = Groups(shape(2, dtype="int32"))
    options = Options(jnp.dtype(out), None, share)
    return sm90_16_bits.needs(RaggedDot(**operands, options=options, **given)) is None


def test_what_suits(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "3.6.0")
    assert suits()
    assert not suits(rows=(128, 512))  # 64 rows in a group
    assert suits(rows=(130, 512))
    assert not suits(rows=(130, 512), share=0.5)
    assert not suits(rows=(4000, 500))  # rows that begin at no multiple of 16 bytes
    assert not suits(columns=128)
    assert suits(bias=shape(2, 400))
    assert not suits(columns=404, bias=shape(2, 404))
    assert not suits(scales=0)
    assert not suits(dtype="float16")
    assert not suits(out="float32")
    assert not suits(implementation="interpret")
    assert not suits(target=dataclasses.replace(HOPPER, compute_capability=100))
    assert not suits(target=dataclasses.replace(HOPPER, tensor_maps=False))
    monkeypatch.setattr(versions, "installed", lambda package: "3.5.1")
    assert not suits()


def draw(transposed):
    rng = np.random.default_rng(0)
    normal = lambda *sizes: rng.standard_normal(sizes).astype(jnp.dtype(HALF))
    weights = normal(3, 12, 16) if transposed else normal(3, 16, 12)
    # Rows of no group behind the last one.
    row_weights, bias = rng.standard_normal(20).astype(np.float32), normal(3, 12)
    return normal(20, 16), weights, Groups(jnp.array([7, 0, 9], jnp.int32)), bias, row_weights


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_rows_cut_over_devices():
    """Each device has the groups of its rows."""
    spec, _ = activations.resolve("swiglu")
    rows, weights, groups, bias, row_weights = draw(False)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = lambda array, *axes: jax.device_put(
        array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    )
    options = {"transposed": False, "options": Options(jnp.dtype(HALF), None), "spec": spec}
    options["keep_product"] = True
    run = jax.jit(lambda *operands: ops.ragged_dot_glu(*operands, implementation=None, **options))
    operands = cut(rows, "d"), cut(weights), groups, cut(bias), cut(row_weights, "d")
    program = run.lower(*operands).compile()
    assert "all-gather" not in program.as_text()
    for part, whole in zip(
        program(*operands), run(rows, weights, groups, bias, row_weights), strict=True
    ):
        assert part.sharding.spec[0] == "d"
        assert_close(part, np.asarray(whole, np.float64), terms=16)


@pytest.mark.sampled(3, 3)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize(
    ("transposed", "cut"), [(False, "columns"), (True, "columns"), (False, "depth"), (True, "both")]
)
@pytest.mark.parametrize("keep_product", [True, False])
def test_weights_cut_over_devices_stay_there(transposed, cut, kind, keep_product):
    """Results travel, which are smaller: few rows are multiplied by many weights."""
    spec, _ = activations.resolve("swiglu")
    rows, weights, groups, bias, row_weights = draw(transposed)
    axes = {"columns": (None, ("a", "b")), "depth": (("a", "b"), None), "both": ("a", "b")}[cut]
    places = [P(None, axes[0]), P(None, *(axes[::-1] if transposed else axes))]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    options = {"transposed": transposed, "options": Options(jnp.dtype(HALF), None), "spec": spec}
    options["keep_product"] = keep_product
    run = jax.jit(lambda *operands: ops.ragged_dot_glu(*operands, implementation="xla", **options))
    wanted = run(rows, weights, groups, bias, row_weights)
    with jax.set_mesh(mesh):
        put = lambda array, place: jax.device_put(array, jax.sharding.NamedSharding(mesh, place))
        whole = jax.tree.map(lambda array: put(array, P()), (groups, bias, row_weights))
        operands = *map(put, (rows, weights), places), *whole
        program = run.lower(*operands).compile()
        found = program(*operands)
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:all-gather|all-reduce)\(", program.as_text())
    assert moved
    assert all(shape.count(",") == 1 for shape in moved)  # weights have three dimensions
    assert (found[0] is not None) == keep_product
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(a, np.asarray(b, np.float64), terms=16)
