"""`feed_forward`: checks its arguments and runs the layer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.activations import api as activations
from triax.moe.activations.reference import Activation, GluSpec
from triax.moe.layer import parts, recipes
from triax.moe.layer.parts import FeedForward, Operands, Options, WeightsOn
from triax.moe.layer.recipes import Recipe, Scaling
from triax.moe.layer.weights import RecipeWeights, prepare
from triax.moe.quantization import scaled as quantized
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.router.api import GroupScore, Score
from triax.moe.shared import arguments
from triax.moe.shared.arguments import Array, AxisName
from triax.moe.shared.implementation import Implementation
from triax.sharding import explicit

Weights: TypeAlias = Array | ScaledArray


def feed_forward(
    x: Array,
    logits: Array | None,
    w_gate_up: Weights | tuple[Weights, Weights],
    w_down: Weights,
    *,
    top_k: int | None = None,
    routing: tuple[Array, Array] | None = None,
    b_gate_up: Array | tuple[Array, Array] | None = None,
    b_down: Array | None = None,
    activation: Activation = "swiglu",
    interleaved: bool = False,
    transpose_weights: bool = False,
    weights_on: WeightsOn = "output",
    capacity: int | None = None,
    align_size: int = 1,
    axis_name: AxisName | None = None,
    recipe: Recipe | Scaling | None = None,
    quantized_weights: Sequence[RecipeWeights | Sequence[RecipeWeights]] | None = None,
    keep: Sequence[str] = (),
    score: Score = "softmax",
    bias: Array | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    group_score: GroupScore = "top2",
    normalize: bool | float = False,
    scale: float = 1.0,
    expert_scale: Array | None = None,
    implementation: Implementation | None = None,
) -> FeedForward:
    """Runs each token through its best experts, and sums their outputs.

        out = moe.feed_forward(x, x @ w_router, w_gate_up, w_down, top_k=8, normalize=True)
        out.tokens  # [tokens, hidden]
        loss = task_loss + 0.01 * moe.load_balancing_loss(logits, out.group_counts)

    ``tokens[t] = sum over k of weights[t, k] * ffn[experts[t, k]](x[t])``, with the weights and
    experts that `route` returns, where expert e is

        ffn[e](x) = inner @ w_down[e] + b_down[e]
        inner = activation(x @ w_gate[e] + b_gate[e], x @ w_up[e] + b_up[e])

    This calls `route`, `make_plan`, `permute`, `ragged_dot`, `glu`, `ragged_dot` and `unpermute` in
    turn. If you need anything else in between, call them yourself.

    Routing is in float32. Matmuls sum in float32, add the bias, and round their results to the
    dtype of `x`. The activation and its product with the router's weight are computed in float32
    and rounded once, and so is the sum over a token's experts. Each gradient has the dtype of its
    argument.

    Kept for the gradient are the arguments, the routing and the first matmul's result. The rows of
    tokens and the activation's results are made again; with `axis_name` tokens are kept as they
    came. All have their ops' names for `jax.checkpoint`.

    Args:
      x: float [tokens, hidden], 16 bits or more; or with more dimensions in front, which `logits`,
        `routing` and the results then have too.
      logits: float [tokens, experts], usually from a matmul in float32; None with `routing`.
      w_gate_up: [experts, hidden, 2 * width] in the dtype of `x`, with the gate's columns first; or
        two arrays [experts, hidden, width], gate and up, as a tuple; [experts, hidden, width] for
        activations without a gate.
      w_down: [experts, width, hidden] in the dtype of `x`. Weights may be `ScaledArray`s, as
        `ragged_dot` takes them; they have no gradient.
      top_k: experts per token.
      routing: weights float [tokens, top_k] and experts integer [tokens, top_k], instead of logits
        and all of `route`'s arguments. Experts out of range are not routed.
      b_gate_up, b_down: [experts, columns of their weights], biases; two for two arrays.
      activation: as in `glu`: a name, a `Swiglu`, or a JAX function of gate and up,
        which is given each row by itself, [1, width].
      interleaved: whether gate and up are the even and the odd columns of `w_gate_up` (gpt-oss).
      transpose_weights: whether weights are [experts, out, in], as in torch.
      weights_on: "output", or "input": the router's weights multiply the tokens before the experts
        (Llama 4).
      capacity: the most pairs an expert takes, first come first served; None for no limit. A pair
        that is dropped contributes nothing to its token. A capacity also bounds the rows made.
        With `axis_name` it is that of `dispatch`: the most tokens from one device to another.
      align_size: each group of rows is padded to a multiple of this; `ragged_dot` needs no padding.
      axis_name: for calls inside `jax.shard_map`: the mesh axis, or axes, over which the experts of
        the weights and biases are cut. Tokens go to their experts and back by `dispatch` and
        `combine`; `logits`, `bias` and `expert_scale` name all experts.
      recipe: which products are in 8 bits, in training: a `Recipe`, or "rows" or "blocks" for
        `Recipe("rows", "rows")` and `Recipe("blocks", "blocks")`. Such a layer has gradients, but
        no forward mode and no second derivatives.
      quantized_weights: with a recipe, what `quantize_weights` makes of `w_gate_up` (two for two
        arrays) and of `w_down`, for weights that are the same in several calls. None makes them.
      keep: what else to keep for the gradient: "triax_permuted_rows", "triax_glu" or both. With a
        recipe tokens are kept instead of rows, unless `weights_on` is "input".
      score, bias, num_groups, top_groups, group_score, normalize, scale, expert_scale: how experts
        are chosen and weighted, as in `route`.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      `FeedForward`: the tokens, group_counts, num_dropped, weights and experts.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape or is out of range.
    """
    if (logits is None) == (routing is None):
        raise ArgumentTypeError(
            "Arguments `logits` and `routing`: one of them must be given, and the other None."
        )
    router: dict[str, Any] = {
        "score": score,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "group_score": group_score,
        "normalize": normalize,
        "scale": scale,
    }
    lead, x, logits, routing = _flattened(x, logits, routing)
    messages.check_sizes_known("x", x.shape)
    num_tokens, hidden = x.shape
    messages.check_bool(interleaved=interleaved, transpose_weights=transpose_weights)
    down = ("experts", "hidden", "width") if transpose_weights else ("experts", "width", "hidden")
    w_down = _weights("w_down", w_down, down)
    num_local = num_experts = w_down.shape[0]
    if axis_name is not None:
        axis_name, num_devices = arguments.mesh_axis(axis_name, "feed_forward")
        num_experts *= num_devices
    if routing is not None:
        _check_no_router(router | {"bias": bias, "expert_scale": expert_scale})
        routing = _check_routing(routing, num_tokens, top_k)
        routing = routing[0], arguments.as_int32(routing[1])
        top_k = routing[1].shape[1]
    else:
        if top_k is None:
            raise ArgumentTypeError(
                "Argument `top_k` is missing: how many experts a token chooses."
            )
        logits = arguments.array("logits", logits, ("tokens", "experts"), jnp.floating)
        beside = "the tokens of `x`"
        if axis_name is None:  # what is wrong is more often the weights
            num_local = num_experts = logits.shape[1]
        else:
            beside += (
                f" and `w_down`, which has {num_local} experts on each of {num_devices} devices "
                "(each gets its own experts' weights, and the logits of all experts)"
            )
        _check_shape("logits", logits, (num_tokens, num_experts), beside)
    right_way = w_down.shape[1 if transpose_weights else 2] == hidden
    width = w_down.shape[1 if right_way != transpose_weights else 2]
    shapes = _Shapes(num_local, transpose_weights)
    beside, of_weights = "`x` and `logits`", w_down.shape[0]
    if axis_name is None and 0 < of_weights < num_experts and num_experts % of_weights == 0:
        beside += " (if each device has a part of the experts, pass `axis_name`)"
    _check_shape("w_down", w_down, shapes.shape(width, hidden), beside)
    spec, _ = activations.resolve(activation, interleaved)
    recipe = recipes.resolve(recipe, x)
    w_gate_up, b_gate_up = _check_gate_up(w_gate_up, b_gate_up, spec, shapes, x, width, recipe)
    _check_dtype("w_down", w_down, x, recipe)
    b_down = shapes.bias("b_down", b_down, hidden)
    w_gate_up, w_down = prepare(quantized_weights, (w_gate_up, w_down), recipe, transpose_weights)
    arguments.check_choice("weights_on", weights_on, ("output", "input"))
    options = Options(
        num_experts=num_experts,
        top_k=top_k,
        activation=activation,
        interleaved=interleaved,
        transpose_weights=transpose_weights,
        weights_on=weights_on,
        capacity=capacity,
        align_size=align_size,
        axis_name=axis_name,
        recipe=recipe,
        keep=_check_keep(keep),
        implementation=implementation,
        router=router,
    )
    operands = Operands(
        x, logits, bias, expert_scale, routing, w_gate_up, w_down, b_gate_up, b_down
    )
    out = parts.feed_forward(options, operands)
    if len(lead) == 1:
        return out
    back = {name: getattr(out, name) for name in ("tokens", "weights", "experts")}
    return out._replace(**{n: jnp.reshape(a, (*lead, a.shape[-1])) for n, a in back.items()})


def _flattened(x: Any, logits: Any, routing: Any) -> tuple[tuple[int, ...], jax.Array, Any, Any]:
    """The dimensions in front of the last of `x`; and all three with one dimension in front."""
    lead = x.shape[:-1] if jax_private.is_array(x) else ()
    if len(lead) > 1:
        if logits is not None and getattr(logits, "shape", ())[:-1] == lead:
            logits = _flat(logits)
        if routing is not None:
            both = routing if isinstance(routing, tuple) else ()
            if {getattr(array, "shape", ())[:-1] for array in both} != {lead}:
                raise ArgumentValueError(
                    "Argument `routing` must be two arrays, weights and experts, with the "
                    f"dimensions {list(lead)} of `x` in front; got {messages.shown(routing)}."
                )
            routing = tuple(_flat(array) for array in both)
        x = _flat(x)
    return lead, _float_array("x", x, ("tokens", "hidden")), logits, routing


def _flat(array: Any) -> jax.Array:
    # JAX reshapes what explicit axes cut only where these cut the first or the last dimension.
    array = explicit.gathered(arguments.as_jax(array), 0, array.ndim - 1)
    return jnp.reshape(array, (math.prod(array.shape[:-1]), array.shape[-1]))


def _check_keep(keep: Any) -> tuple[str, ...]:
    """Names of what is kept for the gradient, in one order."""
    known = " and ".join(f'"{name}"' for name in parts.KEPT)
    if isinstance(keep, str) or not isinstance(keep, Sequence):
        raise ArgumentTypeError(
            f"Argument `keep` must be a sequence of {known}; got {messages.short(keep)}."
        )
    for name in keep:
        if name not in parts.KEPT:
            raise ArgumentValueError(
                f"Argument `keep` must name {known}, or none of them; got {messages.short(name)}."
            )
    return tuple(name for name in parts.KEPT if name in keep)


def _check_no_router(given: dict[str, Any]) -> None:
    """Raises if an argument of the router is not its default, beside `routing`."""
    defaults = inspect.signature(feed_forward).parameters
    unused = [
        name
        for name, value in given.items()
        if (
            value is not None if defaults[name].default is None else value != defaults[name].default
        )
    ]
    if unused:
        raise ArgumentTypeError(
            "Argument `routing` is given, and so are arguments of the router, "
            f"`{'`, `'.join(unused)}`. Pass them to `route`."
        )


def _check_routing(routing: Any, num_tokens: int, top_k: Any) -> tuple[jax.Array, jax.Array]:
    if not isinstance(routing, tuple) or len(routing) != 2:
        raise ArgumentTypeError(
            "Argument `routing` must be two arrays, weights and experts, as `route` returns them; "
            f"got {messages.shown(routing)}."
        )
    weights = arguments.array("routing[0]", routing[0], ("tokens", "top_k"), jnp.floating)
    experts = arguments.array("routing[1]", routing[1], ("tokens", "top_k"), jnp.integer)
    if weights.shape != experts.shape or len(weights) != num_tokens:
        raise ArgumentValueError(
            f"Argument `routing` must have weights and experts for each of the {num_tokens} tokens "
            f"of `x`; got {weights.shape} and {experts.shape}."
        )
    if top_k not in (None, weights.shape[1]):
        raise ArgumentValueError(
            f"Argument `top_k` is {top_k}, and `routing` has {weights.shape[1]} experts per token. "
            "Leave it out."
        )
    return weights, experts


def _check_gate_up(
    weights: Any,
    bias: Any,
    spec: GluSpec,
    shapes: _Shapes,
    x: jax.Array,
    width: int,
    recipe: Recipe | None,
) -> tuple[Any, Any]:
    """The first matmul's weights and biases: an array each, or a tuple of two."""
    hidden = x.shape[1]
    if isinstance(weights, list):
        raise ArgumentTypeError(
            "Argument `w_gate_up` must be an array, or a tuple of two, gate and up; got "
            f"{messages.shown(weights)}. Use tuple(w_gate_up)."
        )
    if not isinstance(weights, tuple):
        columns, other = (2 * width, width) if spec.gated else (width, 2 * width)
        beside = () if spec.gated else ("an `activation` of one array, without a gate",)
        remedies = {shapes.shape(hidden, other): activations.remedy_by_gate(spec)}
        weights = shapes.weights("w_gate_up", weights, hidden, columns, *beside, remedies=remedies)
        _check_dtype("w_gate_up", weights, x, recipe)
        return weights, shapes.bias("b_gate_up", bias, columns)
    activations.check_two("w_gate_up", weights, spec)
    weights = tuple(shapes.weights("w_gate_up", array, hidden, width) for array in weights)
    for name, array in zip(("w_gate_up", "w_gate_up[1]"), weights, strict=True):
        _check_dtype(name, array, x, recipe)
    if bias is None:
        return weights, None
    if not isinstance(bias, tuple) or len(bias) != 2:
        raise ArgumentValueError(
            "Argument `b_gate_up` must be two arrays, as `w_gate_up` is; got "
            f"{messages.shown(bias)}."
        )
    return weights, tuple(shapes.bias("b_gate_up", array, width) for array in bias)


class _Shapes:
    """What the shapes of weights and biases must be."""

    def __init__(self, num_experts: int, transposed: bool):
        self.num_experts, self.transposed = num_experts, transposed

    def shape(self, depth: int, columns: int) -> tuple[int, ...]:
        return (self.num_experts, *((columns, depth) if self.transposed else (depth, columns)))

    def weights(
        self, name: str, value: Any, depth: int, columns: int, *beside: str, **remedies: Any
    ) -> Any:
        array = _weights(name, value, ("experts", "hidden", "columns"))
        *some, last = ("`x`", "`logits`", "`w_down`", *beside)
        of = f"{', '.join(some)} and {last}"
        _check_shape(name, array, self.shape(depth, columns), of, **remedies)
        return array

    def bias(self, name: str, value: Any, columns: int) -> jax.Array | None:
        if value is None:
            return None
        array = _float_array(name, value, ("experts", "columns"))
        _check_shape(name, array, (self.num_experts, columns), "its weights")
        return array


def _weights(name: str, value: Any, axes: tuple[str, ...]) -> Any:
    if not isinstance(value, ScaledArray):
        quantized.check_no_bytes(name, value, range(6))
        return _float_array(name, value, axes)
    quantized.check(name, value)
    if value.ndim != 3:
        raise ArgumentValueError(
            f"Argument `{name}` must have shape [{', '.join(axes)}]; got a ScaledArray of "
            f"{value.shape}."
        )
    return value


def _float_array(name: str, value: Any, axes: tuple[str, ...]) -> jax.Array:
    value = arguments.array(name, value, axes, jnp.floating)
    arguments.check_wide(name, value, "For 8-bit floats, call `ragged_dot` with scales.")
    return value


def _check_shape(
    name: str,
    array: Any,
    shape: tuple[int, ...],
    of: str,
    remedies: dict[tuple[int, ...], str] | None = None,
) -> None:
    """Raises if an array has another shape; `remedies` has what to do about some."""
    if array.shape != shape:
        swapped = len(shape) == 3 and array.shape == (shape[0], shape[2], shape[1])
        remedy = (remedies or {}).get(array.shape, "")
        remedy = arguments.transpose_remedy() if swapped else remedy
        raise ArgumentValueError(
            f"Argument `{name}` must have shape {shape} to go with {of}; got {array.shape}.{remedy}"
        )


def _check_dtype(name: str, array: Any, x: jax.Array, recipe: Recipe | None) -> None:
    if isinstance(array, ScaledArray):
        if recipe is not None:
            raise ArgumentTypeError(
                f"Argument `{name}` is a ScaledArray, and `recipe` is given, which quantizes the "
                "weights itself. Leave one of them out."
            )
    elif array.dtype != x.dtype:
        raise ArgumentTypeError(
            f"Argument `{name}` must have the dtype of `x`, {x.dtype}; got {array.dtype}. Cast "
            f"it, `{name}.astype(x.dtype)`, and its gradient still has its own dtype; or cast "
            "`x`, which makes the matmuls many times slower if that is float32."
        )
