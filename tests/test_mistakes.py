"""Mistakes of people who are new to Triax: what they wrote, and the words that help them.

Each error names the argument and what was given, and says what to do. Mistakes that the tests of a
function have already, such as most of `triton_call`'s in `test_call`, are not repeated here.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import triax
from tests import kernels
from tests.moe import flat
from tests.primitives import own
from triax import cli, moe, testing
from triax.errors import ArgumentTypeError, ArgumentValueError

# --- right calls, of which a mistake changes something ----------------------------------------

X = jnp.arange(100, dtype=jnp.float32)
OUT = jax.ShapeDtypeStruct((100,), jnp.float32)

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 6, 8, 16, 4, 2
x = jnp.ones((TOKENS, HIDDEN))
logits = jnp.ones((TOKENS, EXPERTS))
w_gate_up = jnp.ones((EXPERTS, HIDDEN, 2 * WIDTH))
w_down = jnp.ones((EXPERTS, WIDTH, HIDDEN))
weights, experts = jnp.ones((TOKENS, TOP_K)), jnp.zeros((TOKENS, TOP_K), jnp.int32)


def variable(array):
    """A stand-in for a user's kind of `nnx.Param`: its type's module, the array's attributes."""
    param = type("Param", (), {"__module__": "flax.nnx.variablelib"})
    of_user = type("OfUser", (param,), {"__module__": __name__})()
    vars(of_user).update(shape=array.shape, dtype=array.dtype, ndim=array.ndim)
    return of_user


def add(*operands, **changes):
    arguments = {"n": 100, "BLOCK": 64, "kernel": kernels.add_kernel, "out_type": OUT, "grid": 2}
    return triax.triton_call(*(operands or (X, X)), **arguments | changes)


def tuned(*names):
    """The kernel with one config for each name of a meta-parameter, without a BLOCK of the call."""
    configs = [triton.Config({name: 64}) for name in names]
    return functools.partial(
        triax.triton_call,
        *(X, X),
        n=100,
        out_type=OUT,
        grid=2,
        kernel=triton.autotune(configs, key=["n"])(kernels.add_kernel),
    )


def lowered(rule=None, **changes):
    """Adds by a primitive whose lowering rule calls `triton_call_lowering`."""
    arguments = {"constexprs": {"n": 100, "BLOCK": 64}, "grid": 2} | changes

    def as_usual(ctx, *operands):
        return triax.triton_call_lowering(ctx, kernels.add_kernel, *operands, **arguments)

    return jax.jit(own(rule or as_usual, lambda x, y: [x]))(X, X)


def with_constexpr_of_the_rule(ctx, x, y):
    constexprs = {"n": x, "BLOCK": 64}
    return triax.triton_call_lowering(ctx, kernels.add_kernel, x, y, grid=2, constexprs=constexprs)


def layer(**changes):
    given = {"x": x, "logits": logits, "w_gate_up": w_gate_up, "w_down": w_down, "top_k": TOP_K}
    return flat.layer(**given | changes)


def dot(**changes):
    arguments = {"rows": x, "weights": w_gate_up, "group_sizes": jnp.array([2, 0, 3, 1])} | changes
    return moe.ragged_dot(**arguments)


@functools.cache
def plan():
    return jax.jit(moe.make_plan, static_argnums=1)(experts, EXPERTS)


def eight_bits():
    return moe.quantize(x, block=(1, None))


def on_two_devices(function, *arrays):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(*arrays)


def norm(x, weight):
    return x * weight


def on_parts(function, rule="t h -> t h"):
    """A function of x that `triax.sharded` cuts, on two devices."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(x, NamedSharding(mesh, P("d")))
    return jax.jit(triax.sharded(function, rule, cut="t"))(placed)


def in_jit(function):
    return jax.jit(function)(X)


def command(*arguments):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = cli.main(list(arguments))
    raise SystemExit(f"{status}: {said.getvalue()}")


# --- the mistakes -----------------------------------------------------------------------------

of_type, of_value = ArgumentTypeError, ArgumentValueError


class Mistake(NamedTuple):
    what: str
    call: Any
    error: type[BaseException] | tuple[type[BaseException], ...]
    text: str  # a pattern: the argument, what was given, what to do


MISTAKES = [
    # Calling a kernel
    Mistake(
        "an output as a pair",
        lambda: add(out_type=(X.shape, X.dtype)),
        of_type,
        r"`out_type\[0\]` must have `shape` and `dtype`; got 100 .*jax.ShapeDtypeStruct",
    ),
    Mistake(
        "the kernel as an operand",
        lambda: add(kernels.add_kernel, X),
        of_type,
        r"`x_ptr` .*must be an array.*got JITFunction.*goes to `kernel`",
    ),
    Mistake(
        "a shape as a size",
        lambda: add(n=X.shape),
        (AttributeError, TypeError),  # Triton's; which one depends on its version
        r"'tuple'.*kernel `add_kernel`.*gets a tuple for `n`",
    ),
    Mistake(
        "a block that is no power of two",
        lambda: add(BLOCK=100),
        ValueError,
        r"power of 2.*constexprs are BLOCK=100",
    ),
    Mistake(
        "a block as a string",
        lambda: add(BLOCK="64"),
        AttributeError,
        r"'str' object.*constexprs are BLOCK='64'",
    ),
    Mistake(
        "a block that was divided",
        lambda: add(BLOCK=128 / 2),
        ValueError,
        r"constexpr.*constexprs are BLOCK=64\.0",
    ),
    Mistake(
        "a meta-parameter misspelt in the configs",
        lambda: tuned("BLOK")(),
        of_type,
        r"needs a value for its constexpr `BLOCK`.*sets `BLOK`.*Did you mean `BLOCK`",
    ),
    Mistake(
        "arrays to tune on",
        lambda: add(tuning_inputs=[X, X]),
        of_type,
        r"`tuning_inputs` must be a function; got \[float32\[100\]",
    ),
    Mistake("debug", lambda: add(debug="no"), of_type, r"`debug` must be a bool; got 'no'"),
    Mistake(
        "a side effect",
        lambda: add(has_side_effect="no"),
        of_type,
        r"`has_side_effect` must be a bool; got 'no'",
    ),
    *(
        Mistake(
            f"integers that {kind}32 cannot hold",
            lambda kind=kind: add(np.full(100, 2**40, f"{kind}64"), X),
            of_value,
            rf"`x_ptr` has values that {kind}32 cannot hold.*disabled {kind}64.*jax_enable_x64",
        )
        for kind in ("int", "uint")
    ),
    Mistake(
        "a meta-parameter as an attribute",
        lambda: add(grid=lambda meta: triton.cdiv(100, meta.BLOCK)),
        AttributeError,
        r"in a dictionary: write `meta\['BLOCK'\]`",
    ),
    Mistake(
        "threads in place of warps",
        lambda: add(num_warps=128),
        of_value,
        r"`num_warps` must be at most 32, because a block has at most 1024 threads; got 128",
    ),
    Mistake(
        "warps that no config has",
        lambda: tuned("BLOCK")(num_warps=16),
        of_value,
        r"No config .* agrees .*`num_warps`=16\. Its configs are: BLOCK: 64, num_warps: 4, "
        r"num_ctas: 1, num_stages: \d\. Leave the argument out",
    ),
    Mistake(
        "an array as a scalar",
        lambda: triax.triton_call(3, kernel=kernels.scalar_array_kernel, out_type=X, grid=1),
        Exception,
        r"gets a number for `x_ptr`\. If it reads it with tl\.load, pass an array, such as",
    ),
    # Inside a lowering rule
    Mistake(
        "no context",
        lambda: triax.triton_call_lowering(kernels.add_kernel, kernels.add_kernel, X, X, grid=2),
        of_type,
        r"`ctx` must be the context that JAX passes to a lowering rule; got .*JITFunction",
    ),
    Mistake(
        "types for operands",
        lambda: lowered(
            lambda ctx, *_: triax.triton_call_lowering(
                ctx, kernels.add_kernel, *ctx.avals_in, grid=2
            )
        ),
        of_type,
        r"`operands` must be the MLIR values that the lowering rule gets, all 2.*float32\[100\]",
    ),
    Mistake(
        "an operand that is left out",
        lambda: lowered(
            lambda ctx, x, y: triax.triton_call_lowering(ctx, kernels.add_kernel, x, grid=2)
        ),
        of_type,
        r"`operands` must be the MLIR values that the lowering rule gets, all 2 of them; got",
    ),
    Mistake(
        "constexprs as pairs",
        lambda: lowered(constexprs=[("n", 100), ("BLOCK", 64)]),
        of_type,
        r"`constexprs` must be a mapping from parameters to values; got \[\('n', 100\)",
    ),
    Mistake(
        "an operand as a constexpr",
        lambda: lowered(with_constexpr_of_the_rule),
        of_type,
        r"`constexprs` must have Python values.*an MLIR value for `n`\. Pass it as an operand",
    ),
    Mistake(
        "warps among the constexprs",
        lambda: lowered(constexprs={"n": 100, "BLOCK": 64, "num_warps": 8}),
        of_type,
        r"no parameter `num_warps`.*It is a compiler option: pass it in a triton\.Config",
    ),
    Mistake(
        "aliases as pairs",
        lambda: lowered(input_output_aliases=[(0, 0)]),
        of_type,
        r"`input_output_aliases` must be a mapping from operands to outputs.*got \[\(0, 0\)\]",
    ),
    Mistake(
        "aliases by name, in a rule",
        lambda: lowered(input_output_aliases={"x_ptr": "out_ptr"}),
        of_type,
        r"`input_output_aliases` must map indices of operands.*got \{'x_ptr': 'out_ptr'\}",
    ),
    Mistake(
        "an alias of an operand past the last",
        lambda: lowered(input_output_aliases={2: 0}),
        of_value,
        r"`input_output_aliases` must name operands by index; got 2, and the primitive has 2",
    ),
    Mistake(
        "a capability as nvcc writes it, in a rule",
        lambda: lowered(compute_capability="sm_90"),
        of_value,
        r"`compute_capability` must be an int such as 90 .*got 'sm_90'",
    ),
    Mistake(
        "arrays to tune on, in a rule",
        lambda: lowered(tuning_inputs=[X, X]),
        of_type,
        r"`tuning_inputs` must be a function; got \[float32\[100\]",
    ),
    Mistake(
        "a name that is none",
        lambda: lowered(name=3),
        of_type,
        r"`name` must be a string; got 3 of type int",
    ),
    # Around it
    Mistake(
        "strides of an array",
        lambda: triax.strides_from_shape(x),
        of_type,
        r"`shape` must be a tuple of ints; got float32\[6,8\].*Use its `shape`",
    ),
    Mistake(
        "strides of sizes that are not ints",
        lambda: triax.strides_from_shape((2.0, -3)),
        of_type,
        r"`shape` must be a tuple of non-negative ints; got \(2\.0, -3\)",
    ),
    # The layer
    Mistake(
        "logits of another number of experts",
        lambda: layer(logits=jnp.ones((TOKENS, 5))),
        of_value,
        r"`logits` must have shape \(6, 4\) to go with the .* `experts`; got \(6, 5\)\.$",
    ),
    Mistake(
        "the weights in the other order",
        lambda: layer(w_gate_up=w_down, w_down=w_gate_up),
        of_value,
        r"`w_gate_up` must have shape \(4, 32, 16\).*got \(4, 16, 8\).* right in the other order",
    ),
    Mistake(
        "weights in torch's layout",
        lambda: layer(w_gate_up=w_gate_up.swapaxes(1, 2), w_down=w_down.swapaxes(1, 2)),
        of_value,
        r"`w_gate_up` must have shape .* `transposed=True`: True is for \[experts, out, in\]",
    ),
    Mistake(
        "weights in place of experts",
        lambda: moe.feed_forward(x, logits, w_gate_up, w_down),
        of_type,
        r"`experts` must be moe\.Experts, .*got float32\[4,8,32\].*`moe\.Experts\(w_gate_up",
    ),
    Mistake(
        "no router",
        lambda: layer(top_k=None),
        of_type,
        r"`router` is missing: it says how logits choose experts\. Pass a `moe\.Router\(top_k\)",
    ),
    Mistake(
        "gate and up in a list",
        lambda: layer(w_gate_up=[w_gate_up[..., :WIDTH], w_gate_up[..., WIDTH:]]),
        of_type,
        r"`w_gate_up` must be an array, or a tuple of two.*of type list.*Use tuple\(w_gate_up\)",
    ),
    Mistake(
        "routing in the other order",
        lambda: layer(logits=moe.Routing(experts, weights), top_k=None),
        of_type,
        r"`routing\.weights` must have a floating-point dtype; got int32",
    ),
    Mistake(
        "a routing as a tuple",
        lambda: layer(logits=(weights, experts), top_k=None),
        of_type,
        r"`logits_or_routing` must be an array of logits, or a Routing.*`moe\.Routing\(w",
    ),
    Mistake(
        "columns that are not interleaved",
        lambda: layer(interleaved="no"),
        of_type,
        r"`interleaved` must be a bool; got 'no'",
    ),
    Mistake(
        "the gate's function for the activation of both",
        lambda: layer(activation=jax.nn.silu),
        of_value,
        r"`activation` must have a gate, because `w_gate_up` of shape \(4, 8, 32\) has 2 × "
        r"`width` .*; got <.*silu.*>\. For gate and up, pass a JAX function of both\. Without",
    ),
    *(
        Mistake(
            f"{name} for weights of gate and up",
            lambda name=name: layer(activation=name),
            of_value,
            r"`activation` must have a gate, because `w_gate_up` of shape \(4, 8, 32\) has 2 × "
            rf"`width` columns beside `w_down` of shape \(4, 16, 8\); got '{name}'\. For gate and "
            rf"up, pass {gated}\. '{name}' itself is for experts without a gate\. Without a gate "
            r"`w_gate_up` has shape \(4, 8, 16\), `width` columns\.$",
        )
        for name, gated in (
            ("silu", "`activation='swiglu'`, 'silu' of the gate times up"),
            ("gelu", "`activation='geglu'`, 'gelu' of the gate times up"),
            ("gelu_exact", "`activation='geglu_exact'`, 'gelu_exact' of the gate times up"),
            ("relu2", "a JAX function of both"),
        )
    ),
    Mistake(
        "silu for weights of gate and up in torch's layout",
        lambda: layer(
            activation="silu", w_gate_up=w_gate_up.swapaxes(1, 2), w_down=w_down.swapaxes(1, 2)
        ),
        of_value,
        r"`activation` must have a gate.*`activation='swiglu'`.*shape \(4, 16, 8\), `width` columns"
        r"\. The weights would be right with `transposed=True`",
    ),
    Mistake(
        "two arrays that are too wide for their activation",
        lambda: layer(w_gate_up=(w_gate_up, w_gate_up)),
        of_value,
        r"`w_gate_up\[0\]` must have shape \(4, 8, 16\) to go with `w_down` of shape \(4, 16, 8\) "
        r"and `activation` 'swiglu'; got \(4, 8, 32\)\.$",
    ),
    *(
        Mistake(
            f"{name} for weights of one array",
            lambda name=name: layer(
                activation=name,
                w_gate_up=jnp.ones((EXPERTS, WIDTH, HIDDEN)),
                w_down=jnp.ones((EXPERTS, HIDDEN, WIDTH)),
                transposed=True,
            ),
            of_value,
            r"`activation` must have no gate, because `w_gate_up` of shape \(4, 16, 8\) has "
            rf"`width` columns.*; got {got}\. For experts without a gate, pass {alone}\. With a "
            r"gate `w_gate_up` has shape \(4, 32, 8\), 2 × `width` columns\.$",
        )
        for name, got, alone in (
            ("swiglu", "'swiglu'", "`activation='silu'`"),
            ("geglu", "'geglu'", "`activation='gelu'`"),
            (moe.Swiglu(limit=7.0), r"Swiglu\(.*\)", "a JAX function of one array"),
        )
    ),
    Mistake(
        "one array's activation for gate and up",
        lambda: moe.glu((x, x), activation="gelu"),
        of_value,
        r"`activation` must have a gate, because `gate_up` is two arrays.*got 'gelu'\. For gate "
        r"and up, pass `activation='geglu'`",
    ),
    Mistake(
        "a class for an activation",
        lambda: layer(activation=moe.Swiglu),
        of_type,
        r"`activation` is the class Swiglu\. Pass one: `Swiglu\(\)`",
    ),
    Mistake(
        "a router beside a routing",
        lambda: layer(logits=moe.Routing(weights, experts)),
        of_type,
        r"Arguments for logits, `router`, are given with a Routing\. Pass them to `route`",
    ),
    Mistake(
        "a traced number of choices",
        lambda: jax.jit(lambda top_k: layer(top_k=top_k))(2),
        of_type,
        r"`top_k` must be a Python int.*got traced int32\[\].*static_argnames",
    ),
    Mistake(
        "weights that are not cut",
        lambda: on_two_devices(
            lambda *args: layer(x=args[0], logits=args[1], axis_name="d"), x, logits
        ),
        of_value,
        r"`logits` must have shape \(3, 8\).*has 4 on each of 2 devices.*got \(3, 4\)\. If the "
        r"logits are right, shard `experts` over 'd', or let `axis_name` name just the axes that",
    ),
    Mistake(
        "no axis, where experts are cut",
        lambda: on_two_devices(
            lambda *args: flat.layer(*args, top_k=2).tokens, x, logits, w_gate_up, w_down
        ),
        of_value,
        r"`logits` must have shape \(3, 2\).*; got \(3, 4\)\. If each device has a part of the "
        r"experts, pass `axis_name`",
    ),
    # Variables of Flax NNX in place of arrays
    Mistake(
        "experts whose arrays are variables",
        lambda: layer(w_gate_up=variable(w_gate_up)),
        of_type,
        r"`experts\.w_gate_up` must be an array.*got float32\[4,8,32\] of type OfUser\. Use "
        r"`nnx\.as_pure\(experts\)`\.$",
    ),
    Mistake(
        "a variable of experts",
        lambda: moe.feed_forward(x, logits, variable(w_down), moe.Router(TOP_K)),
        of_type,
        r"`experts` must be moe\.Experts.*\. Use `nnx\.as_pure\(experts\)`\.$",
    ),
    Mistake(
        "a variable of logits",
        lambda: layer(logits=variable(logits)),
        of_type,
        r"`logits_or_routing` must be an array.*\. Use `nnx\.as_pure\(logits\)`\.$",
    ),
    Mistake(
        "quantized experts whose arrays are variables",
        lambda: layer(
            w_down=jax.tree.map(variable, moe.quantize(w_down, block=(1, None, 1))),
        ),
        of_type,
        r"`experts\.w_down` must have an array as its `values`.* Use `nnx\.as_pure\(experts\)`\.$",
    ),
    # Its pieces
    Mistake(
        "both results of the router",
        lambda: moe.make_plan(moe.Routing(weights, experts), EXPERTS),
        of_type,
        r"`selected_experts` must be an array.*got Routing.*one of its fields: weights, experts",
    ),
    Mistake(
        "both results of permute",
        lambda: moe.unpermute(
            jax.eval_shape(lambda: moe.permute(x, plan(), weights=weights)), plan()
        ),
        of_type,
        r"`rows` must be an array.*got Permuted.*Use its `rows`",
    ),
    Mistake(
        "counts of another kind",
        lambda: moe.load_balancing_loss(logits, experts),
        of_value,
        r"`group_counts` must have shape \[experts\]; got \(6, 2\)",
    ),
    Mistake(
        "half a group",
        lambda: dot(group_offset=0.5),
        of_type,
        r"`group_offset` must be an int, or an integer array of shape \[\]; got 0\.5",
    ),
    Mistake(
        "weights of torch's layout, by a word",
        lambda: dot(transpose_weights="torch"),
        of_type,
        r"`transpose_weights` must be a bool; got 'torch'",
    ),
    Mistake(
        "rows of 8 bits, where there are none",
        lambda: moe.glu(eight_bits()),
        of_type,
        r"`gate_up` must be an array.*of type ScaledArray. Use `gate_up.dequantize\(dtype\)`",
    ),
    Mistake(
        "8 bits again",
        lambda: moe.quantize(eight_bits(), block=(1, None)),
        of_type,
        r"`array` must be an array.*of type ScaledArray. Use `array.dequantize\(dtype\)`",
    ),
    Mistake(
        "transposed, by a word",
        lambda: moe.quantize(x, block=(1, None), transposed="no"),
        of_type,
        r"`transposed` must be a bool; got 'no'",
    ),
    Mistake(
        "the layer's result for its counts",
        lambda: moe.load_balancing_loss(logits, jax.eval_shape(layer)),
        of_type,
        r"`group_counts` must be an array.*got FeedForward.*Use its `group_counts`",
    ),
    # Around a program
    Mistake(
        "a dimension that is summed, in both",
        lambda: triax.sharded(norm, "t h, h -> t h, h", cut="t", reduce="t"),
        of_value,
        r"`reduce` has 't', and so has `cut`.*are sharded too.*leave the name out of `cut`",
    ),
    Mistake(
        "a rule as einsum has it",
        lambda: triax.sharded(norm, "th,h->th", cut="t"),
        of_value,
        r"`cut` must have names of arguments in `rule`.*got 't'\. Separate names by blanks: "
        r"'t h', not 'th'",
    ),
    Mistake(
        "a size from outside",
        lambda: on_parts(lambda x: x + jnp.ones((TOKENS, 1))),
        (jax.errors.JaxRuntimeError, of_value),
        r"ArgumentValueError: .*: on a device's part of the arrays, of shapes \(3, 8\): add got "
        r"incompatible shapes.*The function must take sizes from its arguments",
    ),
    Mistake(
        "tuning in a function that is traced",
        lambda: in_jit(lambda x: triax.tune(add, x, x)),
        of_type,
        r"`tune` runs a function on arrays with values; got traced float32\[100\].*outside of "
        "`jax.jit`",
    ),
    Mistake(
        "tuning a closure that is traced",
        lambda: in_jit(lambda x: triax.tune(lambda: add(x, x))),
        of_type,
        r"`tune` runs a function on arrays with values; got traced float32\[100\]",
    ),
    Mistake(
        "functions by number",
        lambda: triax.benchmark(jnp.sin, X, against={1: jnp.sin}),
        of_type,
        r"`against` must be .*by their names; got 1 of type int for a name",
    ),
    Mistake(
        "one word for a bool",
        lambda: triax.benchmark(jnp.sin, X, compare="no"),
        of_type,
        r"`compare` must be a bool; got 'no'",
    ),
    Mistake(
        "configs to a file",
        lambda: triax.Records().save(__file__),
        of_value,
        r"`folder` must be the path of a folder; '.*test_mistakes.py' is a file",
    ),
    Mistake(
        "no folder",
        lambda: triax.Records().save(None),
        of_type,
        r"`folder` must be the path of a folder; got None",
    ),
    Mistake(
        "comparing what is traced",
        lambda: in_jit(lambda x: testing.assert_close(x, np.zeros(100))),
        of_type,
        r"`actual` must have values; got traced float32\[100\].*Compare outside of `jax.jit`",
    ),
    Mistake(
        "zero, expected as what rounding left",
        lambda: testing.assert_close(jnp.zeros(3), np.full(3, 1e-17)),
        AssertionError,
        r"at \(0,\) it is 0, not 1e-17; errors are relative to the largest magnitude expected",
    ),
    Mistake(
        "integers that should be close",
        lambda: testing.assert_close(jnp.ones(3, int), np.ones(3)),
        of_type,
        r"`actual` must be an array of one of float64.*got int32\[3\].*`assert_same_bits`",
    ),
    Mistake(
        "a tolerance in place of terms",
        lambda: testing.assert_close(X, np.asarray(X), terms=1e-3),
        of_value,
        r"`terms` must be an int.*how many values were summed.*got 0\.001",
    ),
    Mistake(
        "a seed",
        lambda: testing.hostile_values(0, (3,), np.float32),
        of_type,
        r"`rng` must be a NumPy generator; got 0.*np\.random\.default_rng",
    ),
    Mistake(
        "bytes in words",
        lambda: testing.poison("1GB"),
        of_type,
        r"`num_bytes` must be an int of at least 0; got '1GB'",
    ),
    Mistake(
        "configs into a file",
        lambda: command("tune", "nofile.py:main", "--into", __file__),
        SystemExit,
        r"1: triax: `--into` must be a folder; .*test_mistakes.py is a file",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_mistakes(mistake, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIAX_CACHE_DIR", str(tmp_path))
    with pytest.raises(mistake.error) as caught:
        mistake.call()
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(mistake.text, said, re.DOTALL), said


def test_saving_nothing_is_said(caplog, monkeypatch, tmp_path):
    """On a GPU the program was compiled before the block, so no call in it gets a config."""
    call = jax.jit(add)
    call(X, X)
    with triax.record() as records:
        call(X, X)
    for platform, why in (
        ("cpu", "This process runs on cpu, and configs are measured on a GPU."),
        ("gpu", "Programs compiled before the block of `record` are not lowered again in it."),
    ):
        monkeypatch.setattr("triax.compat.jax_private.default_platform", lambda at=platform: at)
        assert records.save(tmp_path) == []
        assert caplog.messages.pop().endswith(f"no call got a config that was measured. {why}")


def test_a_grid_sees_the_dtype_that_the_kernel_gets():
    """NumPy's float64 arrives as float32, unless JAX has 64 bits enabled."""
    found = []

    def grid(meta):
        found.append(meta["x_ptr"].dtype)
        return 2

    x = np.arange(100.0)
    out = add(x, X, grid=grid)
    assert found == [np.float32]
    testing.assert_same_bits(out, 2 * np.asarray(X))
