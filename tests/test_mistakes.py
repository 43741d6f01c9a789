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
from triax.errors import ArgumentTypeError, ArgumentValueError, OutOfBounds

# --- right calls, of which a mistake changes something ----------------------------------------

X = jnp.arange(100, dtype=jnp.float32)
OUT = jax.ShapeDtypeStruct((100,), jnp.float32)

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 6, 8, 16, 4, 2
x = jnp.ones((TOKENS, HIDDEN))
logits = jnp.ones((TOKENS, EXPERTS))
w_gate_up = jnp.ones((EXPERTS, HIDDEN, 2 * WIDTH))
w_down = jnp.ones((EXPERTS, WIDTH, HIDDEN))
weights, experts = jnp.ones((TOKENS, TOP_K)), jnp.zeros((TOKENS, TOP_K), jnp.int32)


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


def asks_for(name):
    return triton.heuristics({"BLOCK": lambda args: args[name]})(kernels.add_kernel)


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


def dispatch(num_experts=EXPERTS, axis_name="d", **changes):
    def send(x, weights, experts):
        return moe.dispatch(x, weights, experts, num_experts, axis_name, **changes).rows

    return on_two_devices(send, x, weights, experts)


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
        "an output as a dtype",
        lambda: add(out_type=jnp.float32),
        of_type,
        r"`out_type` must have `shape` and `dtype`; got .*float32.*jax.ShapeDtypeStruct",
    ),
    Mistake(
        "an output of a size that torch would infer",
        lambda: add(out_type=jax.ShapeDtypeStruct((-1,), jnp.float32)),
        of_type,
        r"`out_type` must have a shape of non-negative ints; got \(-1,\)",
    ),
    Mistake(
        "an output that is too small",
        lambda: add(out_type=jax.ShapeDtypeStruct((50,), jnp.float32)),
        OutOfBounds,
        r"store to `out_ptr` at element 50, outside its 50 elements.*Mask the access",
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
        "a block that no config has",
        lambda: tuned("BLOCK")(BLOCK=256),
        of_value,
        r"No config of kernel 'add_kernel' agrees .*`BLOCK`=256.*BLOCK: 64.*Leave the argument out",
    ),
    Mistake(
        "a heuristic of an argument that is not there",
        lambda: triax.triton_call(X, X, n=100, kernel=asks_for("m"), out_type=OUT, grid=2),
        KeyError,
        r"^The heuristic for `BLOCK` of kernel 'add_kernel' reads `m`, which the call does not "
        r"have\. It may read n, out_ptr, x_ptr, y_ptr\.$",
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
    Mistake(
        "integers that 32 bits cannot hold",
        lambda: add(np.full(100, 2**40), X),
        of_value,
        r"`x_ptr` has values that int32 cannot hold.*disabled int64.*jax_enable_x64",
    ),
    Mistake(
        "a grid that was rounded up",
        lambda: add(grid=np.ceil(100 / 64)),
        of_type,
        r"`grid` must be an int.*value=np\.float64\(2\.0\).*triton\.cdiv",
    ),
    Mistake(
        "a grid from an array's values",
        lambda: jax.jit(lambda x: add(x, x, grid=x.max()))(X),
        of_type,
        r"`grid` must be an int.*value=float32\[\].*from shapes or static arguments",
    ),
    Mistake(
        "an alias by the output's name",
        lambda: add(input_output_aliases={"x_ptr": "out_ptr"}),
        of_type,
        r"`input_output_aliases` must map to the index of an output; got 'out_ptr' .*'x_ptr'",
    ),
    Mistake(
        "an output to be zeroed, by name",
        lambda: add(zeroed_outputs=("out_ptr",)),
        of_type,
        r"`zeroed_outputs` must be a sequence of output indices.*got \('out_ptr',\)",
    ),
    Mistake(
        "a grid that is a quotient",
        lambda: add(grid=100 / 64),
        of_type,
        r"`grid` must be an int.*value=1\.5625\. Divide ints with // or triton\.cdiv",
    ),
    Mistake(
        "a grid of four axes",
        lambda: add(grid=(2, 1, 1, 1)),
        of_value,
        r"`grid` must have one to three dimensions; got 4: \(2, 1, 1, 1\)",
    ),
    Mistake(
        "a meta-parameter as an attribute",
        lambda: add(grid=lambda meta: triton.cdiv(100, meta.BLOCK)),
        AttributeError,
        r"in a dictionary: write `meta\['BLOCK'\]`",
    ),
    Mistake(
        "a grid of no argument",
        lambda: add(grid=lambda: 2),
        of_type,
        r"`grid` .* is called with one dictionary.*`lambda meta: …`; got .*too many positional",
    ),
    Mistake(
        "the kernel with its grid",
        lambda: add(kernel=kernels.add_kernel[(2,)]),
        of_type,
        r"`kernel` must be a function decorated.*Pass the kernel without \[grid\]",
    ),
    Mistake(
        "warps as a string",
        lambda: add(num_warps="4"),
        of_value,
        r"`num_warps` must be an int, a power of two; got '4' of type str",
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
        "a scalar as an array",
        lambda: add(n=jnp.int32(100)),
        Exception,  # Triton's, of a class that it does not export
        r"gets a pointer for `n`, as for every array\. If it needs the number, pass a Python int",
    ),
    Mistake(
        "an array as a scalar",
        lambda: triax.triton_call(3, kernel=kernels.scalar_array_kernel, out_type=X, grid=1),
        Exception,
        r"gets a number for `x_ptr`\. If it reads it with tl\.load, pass an array, such as",
    ),
    Mistake(
        "a block that is traced",
        lambda: jax.jit(lambda block: add(BLOCK=block))(64),
        of_type,
        r"`BLOCK` must be known when the function is traced.*got traced int32\[\].*static_argnames",
    ),
    Mistake(
        "an alias the wrong way round",
        lambda: add(input_output_aliases={"out_ptr": "x_ptr"}),
        of_value,
        r"`input_output_aliases` names operand 'out_ptr', which was not given",
    ),
    Mistake(
        "a capability as nvcc writes it",
        lambda: add(compute_capability="sm_90"),
        of_value,
        r"`compute_capability` must be an int such as 90 \(for 9\.0\); got 'sm_90' of type str",
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
        "a scalar that is left out",
        lambda: lowered(constexprs={"BLOCK": 64}),
        of_value,
        r"has 4 parameters besides `constexprs` \(x_ptr, y_ptr, out_ptr, n\), and the primitive "
        r"has 2 inputs and 1 output\. Each input and output takes one parameter; scalars go to "
        r"`constexprs`",
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
    Mistake(
        "one size for a block of two dimensions",
        lambda: triax.TensorDescriptor.from_array(x, 8),
        of_type,
        r"`block_shape` of TensorDescriptor must be a tuple of Python ints.*got 8",
    ),
    # The layer
    Mistake(
        "logits of another number of experts",
        lambda: layer(logits=jnp.ones((TOKENS, 5))),
        of_value,
        r"`experts.w_down` must have shape \(5, 16, 8\) to go with `x` and the logits; got \(4, ",
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
        "a number in place of a router",
        lambda: moe.route(logits, 2),
        of_type,
        r"`router` must be a moe\.Router, .*got 2 of type int\. Make one: `moe\.Router\(2\)`",
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
        "a capacity factor",
        lambda: layer(capacity=1.25),
        of_type,
        r"`capacity` must be a Python int.*got 1\.25 of type float",
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
        "a recipe by a dtype's name",
        lambda: layer(recipe="fp8"),
        of_type,
        r"`recipe` must be 'rows', 'blocks', a moe\.Recipe or None; got 'fp8'",
    ),
    Mistake(
        "a bias of all experts",
        lambda: layer(b_down=jnp.ones(HIDDEN)),
        of_value,
        r"`b_down` must have shape \(4, 8\) to go with `w_down`; got \(8,\)\.$",
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
        r"`logits` must have shape \(3, 8\).*has 4 on each of 2 devices.*got \(3, 4\)",
    ),
    Mistake(
        "no axis, where experts are cut",
        lambda: on_two_devices(
            lambda *args: flat.layer(*args, top_k=2).tokens, x, logits, w_gate_up, w_down
        ),
        of_value,
        r"`experts\.w_down` must have shape \(4, 16, 8\).*; got \(2, 16, 8\)\. If each device has "
        r"a part of the experts, pass `axis_name`",
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
        "experts in place of a plan",
        lambda: moe.permute(x, experts),
        of_type,
        r"`plan` must be a Plan, from `make_plan`; got int32\[6,2\]",
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
        "rows of 8 bits, weights of 32",
        lambda: dot(rows=eight_bits()),
        of_type,
        r"`rows` and `weights` must both be.*got float8_e4m3fn and float32.*`dequantize\(dtype\)`",
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
        "an axis that the mesh lacks",
        lambda: dispatch(axis_name="data"),
        of_value,
        r"`axis_name` must name a mesh axis .*`dispatch`.*got 'data'",
    ),
    Mistake(
        "experts that devices cannot share",
        lambda: dispatch(num_experts=5),
        of_value,
        r"`num_experts` must be a multiple of the 2 devices of axis 'd'; got 5",
    ),
    Mistake(
        "a mask in place of experts",
        lambda: moe.make_plan(jnp.ones((TOKENS, EXPERTS), bool), EXPERTS),
        of_type,
        r"`selected_experts` must have an integer dtype; got bool.*goes to `make_plan_from_mask`",
    ),
    Mistake(
        "weights and experts in the other order",
        lambda: on_two_devices(
            lambda *args: moe.dispatch(*args, EXPERTS, "d").rows, x, experts, weights
        ),
        of_type,
        r"`experts` must have an integer dtype; got float32",
    ),
    Mistake(
        "the layer's result for its counts",
        lambda: moe.load_balancing_loss(logits, jax.eval_shape(layer)),
        of_type,
        r"`group_counts` must be an array.*got FeedForward.*Use its `group_counts`",
    ),
    Mistake(
        "8 bits by two letters",
        lambda: moe.quantize(x, "fp8", block=(1, None)),
        of_value,
        r"`dtype` must be float8_e4m3fn, .*got 'fp8'",
    ),
    # Around a program
    Mistake(
        "a dimension that is summed, in both",
        lambda: triax.sharded(norm, "t h, h -> t h, h", cut="t", reduce="t"),
        of_value,
        r"`reduce` has 't', and so has `cut`.*are sharded too.*leave the name out of `cut`",
    ),
    Mistake(
        "an axis of the mesh",
        lambda: triax.sharded(norm, "t h, h -> t h", cut="data"),
        of_value,
        r"`cut` must have names of arguments in `rule`.*got 'data'\. Known: h, t",
    ),
    Mistake(
        "a partition as a rule",
        lambda: triax.sharded(norm, P("t"), cut="t"),
        of_type,
        r"`rule` must be a string such as 't h, h -> t h'; got P",
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
        "an array by keyword",
        lambda: triax.sharded(norm, "t h, h -> t h", cut="t")(x, weight=x[0]),
        of_type,
        r"argument `weight` is an array, so it must be passed by position",
    ),
    Mistake(
        "an axis too many in a rule",
        lambda: triax.sharded(norm, "b t h, h -> b t h", cut="b")(x, x[0]),
        of_value,
        r"`rule` names 3 dimensions of argument 0, 'b t h'; got float32\[6,8\]",
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
        "a mode that is none, not entered",
        lambda: triax.tuning_mode("Strict"),
        of_value,
        r"`mode` must be one of 'auto', .*; got 'Strict'",
    ),
    Mistake(
        "functions in a list",
        lambda: triax.benchmark(jnp.sin, X, against=[jnp.cos]),
        of_type,
        r"`against` must be a function, or a dictionary of functions by their names; got \[",
    ),
    Mistake(
        "functions by number",
        lambda: triax.benchmark(jnp.sin, X, against={1: jnp.sin}),
        of_type,
        r"`against` must be .*by their names; got 1 of type int for a name",
    ),
    Mistake(
        "a result in place of a function",
        lambda: triax.benchmark(jnp.sin(X), X),
        of_type,
        r"`function` must be a function; got float32\[100\]",
    ),
    Mistake(
        "another result",
        lambda: triax.benchmark(jnp.sin, X, against=lambda x: x[:3]),
        of_value,
        r"`against`: 'against' and 'sin' do not compute the same: the results have shapes "
        r"\[\(3,\)\] and \[\(100,\)\]\. If that is right, pass `compare=False`",
    ),
    Mistake(
        "a tolerance as a string",
        lambda: triax.benchmark(jnp.sin, X, tolerance="1e-3"),
        of_type,
        r"`tolerance` must be a number of at least 0.*got '1e-3'",
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
        "a file that is not there",
        lambda: command("explain", "nofile.py:main"),
        SystemExit,
        r"1: triax: `triax explain` needs FILE:FUNCTION.*got 'nofile.py:main'.*no file 'nofile.py'",
    ),
    Mistake(
        "configs into a file",
        lambda: command("tune", "nofile.py:main", "--into", __file__),
        SystemExit,
        r"1: triax: `--into` must be a folder; .*test_mistakes.py is a file",
    ),
    Mistake(
        "a file without a function",
        lambda: command("explain", __file__),
        SystemExit,
        r"1: triax: `triax explain` needs FILE:FUNCTION .*names no function",
    ),
    Mistake(
        "a config that is not there",
        lambda: command("cache", "show", "nope"),
        SystemExit,
        r"1: triax: no tuned config named 'nope'; `triax cache list` shows",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_mistakes(mistake, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIAX_CACHE_DIR", str(tmp_path))
    with pytest.raises(mistake.error) as caught:
        mistake.call()
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(mistake.text, said, re.DOTALL), said


def test_saving_nothing_is_said(caplog, tmp_path):
    """The program was compiled before the block, so no call in it gets a config."""
    call = jax.jit(add)
    call(X, X)
    with triax.record() as records:
        call(X, X)
    assert records.save(tmp_path) == []
    assert re.search(r"nothing is saved in .*compiled before the block of `record`", caplog.text)


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
