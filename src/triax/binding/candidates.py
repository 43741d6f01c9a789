"""Resolves a kernel and the caller's values to candidate configs, each with its grid.

In: a kernel view, its runtime arguments as heuristics and grids see them, keywords and compiler
options. Out: one `Candidate` per config, with every constexpr resolved and the grid evaluated on
the values that config is compiled with.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from triax import messages, settings
from triax.binding import dtypes, exact, hooks
from triax.binding import grid as grids
from triax.binding.kernel import Hook, Kernel, MetaParameters, Parameter
from triax.binding.launch import (
    SANITIZER_OPTION,
    Alias,
    Argument,
    ArrayType,
    Candidate,
    Descriptor,
    Operand,
    Result,
    leaves,
    rebuild,
)
from triax.binding.values import CONFIG_OPTIONS, Config, is_constexpr, pack_values, plain
from triax.compat import jax_private, triton_private
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from triax.messages import counted, near_misses, short

logger = logging.getLogger(__name__)

# Options of Triton's launcher that jaxlib's launcher lacks: the value for "off", and the remedy.
_LAUNCH_OPTIONS: dict[str, tuple[Any, str]] = {
    "launch_cooperative_grid": (
        False,
        "Split the kernel at the points where its programs wait for each other.",
    ),
    "launch_pdl": (False, "XLA decides when a kernel starts; leave the option out."),
    "cluster_dims": ((1, 1, 1), "Use `num_ctas`."),
    SANITIZER_OPTION: ("", "Use triax.testing.sanitized."),
    "ptx_options": (None, "Set JAX_TRITON_PTXAS_EXTRA_FLAGS, which jaxlib gives to its ptxas."),
}

_MOST_WARPS = 32

ZeroedOutputs: TypeAlias = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class UnresolvedCall:
    """A call whose candidates are to be built.

    `parameters` has the argument of each runtime parameter, `arguments` the same as callables see
    them: arrays as `stand_in.Array`, scalars by value. `keywords` are constexprs and
    meta-parameters, `options` compiler options. `block_shapes` has the callable block shapes of
    descriptors, by buffer. For `conflicts` see `Kernel.expand`. `other_names` are names besides
    the kernel's parameters to suggest for a misspelt keyword.
    """

    kernel: Kernel
    parameters: tuple[tuple[str, Argument], ...]
    arguments: Mapping[str, Any]
    keywords: Mapping[str, Any]
    options: Mapping[str, Any]
    grid: grids.GridLike
    num_results: int
    aliases: tuple[Alias, ...] = ()
    zeroed_outputs: ZeroedOutputs = ()
    block_shapes: Mapping[Operand | Result, Callable[[Mapping[str, Any]], Any]] = dataclasses.field(
        default_factory=dict
    )
    conflicts: str = "filter"
    other_names: Collection[str] = ()


def build(request: UnresolvedCall) -> tuple[Candidate, ...]:
    """Builds all candidates, in the order of the kernel's configs, without duplicates.

    Raises:
      ArgumentTypeError, ArgumentValueError: a constexpr is missing or not static, a
        keyword is unknown, the grid or an option is impossible, or an argument is not
        what the kernel's annotation says.
    """
    kernel = request.kernel
    for parameter in (p for p in kernel.parameters if p.number):
        _check_number(kernel, parameter, request.arguments.get(parameter.name))
    keywords = _static_values(request.keywords)
    options = check_options(request.options)
    expanded, used = kernel.expand(
        request.arguments, keywords, options, conflicts=request.conflicts
    )
    candidates = [
        _candidate(request, config, hook, keywords, options, used) for config, hook in expanded
    ]
    _check_keywords(kernel, keywords, [config for config, _ in expanded], used, request.other_names)
    if kernel.autotuner is not None:
        _check_reset(request, candidates)
    if len(candidates) == 1:
        return tuple(candidates)
    # Configs that differ only in values the caller sets are duplicates. The remaining ones are
    # numbered where their texts are equal, because configs are stored by text.
    distinct: dict[Candidate, Candidate] = {}
    for candidate in candidates:
        distinct.setdefault(dataclasses.replace(candidate, config=Config()), candidate)
    numbers = collections.Counter[str]()
    named = []
    for candidate in distinct.values():
        numbers[str(candidate.config)] += 1
        config = dataclasses.replace(candidate.config, number=numbers[str(candidate.config)])
        named.append(dataclasses.replace(candidate, config=config))
    return tuple(named)


def _check_number(kernel: Kernel, parameter: Parameter, value: Any) -> None:
    """Refuses an argument that does not fit a parameter annotated as a number.

    Triton trusts the annotation: it would use an array's address as the number.
    """
    if isinstance(value, (bool, int, float)):
        dtypes.launch_scalar(parameter.name, value, parameter.number)
    elif value is not None:
        raise ArgumentTypeError(
            f"Argument `{parameter.name}` of kernel {kernel.name!r} must be a number, because "
            f"the kernel declares it as {parameter.number}; got {value}. Pass a Python int or "
            "float, or drop the annotation and read the array in the kernel with tl.load."
        )


def _check_reset(request: UnresolvedCall, candidates: Sequence[Candidate]) -> None:
    """Warns of outputs that the kernel seems to read although the program does not fill them."""
    filled = {alias.result for alias in request.aliases}.union(*(c.zeroed for c in candidates))
    arguments = dict(request.parameters)
    for option in ("reset_to_zero", "restore_value"):
        for name in getattr(request.kernel.autotuner, option, None) or ():
            argument = arguments.get(name)
            output = getattr(argument, "buffer", argument)
            if isinstance(output, Result) and output.index not in filled:
                # jaxlib does not zero what is written through a descriptor.
                zero = f"pass `zeroed_outputs=({output.index},)`, or " if output is argument else ""
                _warn(
                    f"kernel {request.kernel.name}: `{option}` names the output `{name}`, but "
                    "takes effect only while configs are measured: in the program, an output is "
                    f"uninitialised. If the kernel adds to the output, {zero}alias an operand with "
                    "the initial values to it."
                )


@functools.cache  # each text once, however often a kernel is traced
def _warn(text: str) -> None:
    logger.warning(text)


def _candidate(
    request: UnresolvedCall,
    config: Config,
    hook: Hook | None,
    keywords: Mapping[str, Any],
    options: Mapping[str, Any],
    used: set[str],
) -> Candidate:
    kernel = request.kernel
    defaults = {p.name: p.default for p in kernel.parameters if p.is_constexpr and p.has_default}
    set_by_config = {name: static_value(name, static.value) for name, static in config.values}
    # As in Triton, an option that is also a kernel parameter reaches the kernel and the compiler.
    config_options = config.options()
    shared = {*kernel.parameter_names} - request.arguments.keys()
    set_by_config |= {n: v for n, v in config_options.items() if n in shared}
    meta = {**defaults, **keywords, **set_by_config}
    missing = [p.name for p in kernel.parameters if p.is_constexpr and p.name not in meta]
    if missing:
        unknown = [n for n in keywords if n not in kernel.parameter_names]
        hint = "".join(f" It has no parameter `{n}`.{near_misses(n, missing)}" for n in unknown)
        hint += "".join(
            f" A config or heuristic sets `{n}`, not a parameter.{near_misses(n, missing)}"
            for n in set_by_config
            if n not in kernel.parameter_names and n not in triton_private.option_names()
        )
        raise ArgumentTypeError(
            f"Kernel {kernel.name!r} needs a value for its constexpr "
            f"{', '.join(f'`{n}`' for n in missing)}: pass it as a keyword.{hint} Its parameters "
            f"are {', '.join(kernel.parameter_names)}."
        )
    compiler_options = {
        **options,
        **{n: v for n, v in set_by_config.items() if n in triton_private.option_names()},
        **config_options,
    }
    _refuse_launch_options(kernel.name, compiler_options)
    if (sanitizer := settings.sanitizer.value) is not None:
        compiler_options[SANITIZER_OPTION] = sanitizer
    seen = MetaParameters({**request.arguments, **meta, **compiler_options}, used)
    of_kernel = f"of kernel {kernel.name!r}"
    grid, source = request.grid, ""
    if callable(grid) and not is_constexpr(grid):
        grid, source = seen.given_to(grid, f"argument `grid` {of_kernel}"), " from its callable"
    grid = grids.normalize(grid, source)
    wanted = request.zeroed_outputs
    if callable(wanted):
        wanted = seen.given_to(wanted, f"argument `zeroed_outputs` {of_kernel}")
    zeroed = _check_zeroed(wanted, request.num_results)
    block_shapes = {
        buffer: seen.given_to(shape, f"the `block_shape` of a descriptor {of_kernel}")
        for buffer, shape in request.block_shapes.items()
    }
    if hook is not None:
        where = f"The `pre_hook` of config [{config}] of kernel {kernel.name!r}"
        zeroed_too, new_block_shapes = hooks.find_effects(
            hook, where, request.parameters, request.arguments, request.aliases
        )
        zeroed = tuple(sorted({*zeroed, *zeroed_too}))
        block_shapes |= new_block_shapes
    return Candidate(
        config=config,
        constants=pack_values({n: v for n, v in meta.items() if n in kernel.parameter_names}),
        options=pack_values(compiler_options),
        grid=grid,
        zeroed=zeroed,
        block_shapes=_check_block_shapes(block_shapes, request.parameters) if block_shapes else (),
    )


def _static_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v if type(v) in exact.PLAIN else static_value(n, v) for n, v in values.items()}


def static_value(name: str, value: Any) -> Any:
    """Converts a constexpr to a hashable Python value.

    Raises:
      ArgumentTypeError: the value is an array, traced or not, or cannot be hashed.
    """
    value = plain(value)
    if jax_private.is_array(value):
        raise ArgumentTypeError(
            f"Argument `{name}` must be known when the function is traced, because the kernel is "
            f"compiled for it; got {messages.shown(value)}. Pass a Python value; under jax.jit, "
            "mark it static (static_argnames), under custom_vmap or custom_vjp close over it."
        )
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, tuple):
        return rebuild(value, [static_value(f"{name}[{i}]", v) for i, v in enumerate(value)])
    try:
        hash(value)
    except TypeError:
        raise ArgumentTypeError(
            f"Argument `{name}` must be hashable, because kernels are cached by it; got "
            f"{messages.shown(value)}. Use a tuple, a number, a string or a dtype."
        ) from None
    return value


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks compiler options, and drops unset ones.

    Raises:
      ArgumentValueError: Triton has no such option, or does not allow this value.
    """
    known = triton_private.option_names()
    for name in options:
        if name not in known:
            raise ArgumentValueError(
                f"Argument `backend_options` has {name!r}, which Triton's CUDA compiler does not "
                f"know.{near_misses(name, known)}"
            )
    options = _static_values({n: v for n, v in options.items() if v is not None})
    for name in options.keys() & CONFIG_OPTIONS:
        _check_count(name, options[name])
    return options


def check_capability(value: Any) -> None:
    """Raises `ArgumentValueError` unless `value` is a compute capability, or None."""
    if value is not None and (not grids.is_int(value) or not 50 <= value < 200):
        raise ArgumentValueError(
            "Argument `compute_capability` must be an int such as 90 (for 9.0); got "
            f"{messages.shown(value)}."
        )


def _refuse_launch_options(kernel: str, options: Mapping[str, Any]) -> None:
    """Refuses options that Triton's launcher honours and jaxlib's would silently ignore."""
    for name, (nothing, remedy) in _LAUNCH_OPTIONS.items():
        if (value := options.get(name, nothing)) not in (nothing, None):
            raise UnsupportedError(
                f"Kernel {kernel!r} has the option `{name}`={value!r}, which jaxlib's launcher "
                f"does not support. {remedy}"
            )


def _check_count(name: str, value: Any) -> None:
    whole = grids.is_int(value)
    power = whole and value > 0 and value & (value - 1) == 0
    if name in ("num_warps", "num_ctas") and not power:
        raise ArgumentValueError(
            f"Argument `{name}` must be an int, a power of two; got {messages.shown(value)}."
        )
    if name == "num_warps" and value > _MOST_WARPS:
        raise ArgumentValueError(
            f"Argument `num_warps` must be at most {_MOST_WARPS}, because a block has at most 1024 "
            f"threads; got {value}."
        )
    if not whole or value < 0:
        raise ArgumentValueError(
            f"Argument `{name}` must be an int of at least 0; got {messages.shown(value)}."
        )


def _check_keywords(
    kernel: Kernel,
    keywords: Mapping[str, Any],
    configs: Sequence[Config],
    used: set[str],
    other_names: Collection[str],
) -> None:
    """Refuses unused names, so that a misspelt parameter is not silently ignored."""
    known = {*kernel.parameter_names, *used}
    options = triton_private.option_names()
    for name in [name for name in keywords if name not in known]:
        hint = near_misses(name, kernel.parameter_names, other_names)
        if name in options:
            place = "`backend_options`" if "backend_options" in other_names else "a triton.Config"
            hint = f" It is a compiler option: pass it in {place}."
        raise ArgumentTypeError(
            f"Kernel {kernel.name!r} has no parameter `{name}`, and no grid or heuristic reads "
            f"it.{hint}"
        )
    for name in [name for config in configs for name, _ in config.values]:
        if name not in known and name not in options:
            raise ArgumentTypeError(
                f"A config of kernel {kernel.name!r} sets `{name}`, which is neither a parameter "
                "of the kernel, nor a compiler option, nor read by the grid."
                f"{near_misses(name, kernel.parameter_names)}"
            )


def _check_zeroed(zeroed: Any, num_results: int) -> tuple[int, ...]:
    try:
        outputs = tuple(zeroed)
    except TypeError:  # also raised by arrays of no dimension, although they have __iter__
        outputs = (None,)
    if not all(map(grids.is_int, outputs)):
        raise ArgumentTypeError(
            "Argument `zeroed_outputs` must be a sequence of output indices, such as (0,), or a "
            f"callable that returns one; got {messages.shown(zeroed)}."
        )
    indices = tuple(sorted({int(i) for i in outputs}))
    for index in indices:
        if not 0 <= index < num_results:
            raise ArgumentValueError(
                f"Argument `zeroed_outputs` has index {index}, but the call has "
                f"{counted(num_results, 'output')}."
            )
    return indices


def _check_block_shapes(
    block_shapes: Mapping[Operand | Result, Any], parameters: Sequence[tuple[str, Argument]]
) -> tuple[tuple[Operand | Result, tuple[int, ...]], ...]:
    """Checks the block shapes of one config; returns them by the descriptors' buffers.

    Raises:
      ArgumentTypeError, ArgumentValueError: a block shape is not one positive int per dimension.
    """
    checked = []
    for name, argument in parameters:
        for leaf in leaves(argument):
            if isinstance(leaf, Descriptor) and leaf.buffer in block_shapes:
                block_shape = block_shapes[leaf.buffer]
                rank = len(leaf.shape)
                if not isinstance(block_shape, (tuple, list)) or len(block_shape) != rank:
                    raise ArgumentValueError(
                        f"Argument `block_shape` of descriptor `{name}` must have {rank} sizes, "
                        f"like its shape {leaf.shape}; got {short(block_shape)}."
                    )
                sizes = tuple(static_value("block_shape", size) for size in block_shape)
                if not all(grids.is_int(n) and n > 0 for n in sizes):
                    raise ArgumentTypeError(
                        f"Argument `block_shape` of descriptor `{name}` must be positive ints; got "
                        f"{short(block_shape)}."
                    )
                checked.append((leaf.buffer, sizes))
    return tuple(checked)


def check_aliases(
    pairs: Mapping[int, int],
    operands: Sequence[ArrayType],
    results: Sequence[ArrayType],
    names: Sequence[str],
) -> tuple[Alias, ...]:
    """Checks aliases from array operands to outputs; `names` are the operands' names in messages.

    Raises:
      ArgumentValueError: an index is out of range, an output is named twice, or the buffers differ
        in shape or dtype.
    """
    aliases = []
    taken: dict[int, int] = {}
    for operand, result in pairs.items():
        if not 0 <= result < len(results):
            raise ArgumentValueError(
                f"Argument `input_output_aliases` names output {result}, but the call has "
                f"{counted(len(results), 'output')}."
            )
        if result in taken:
            raise ArgumentValueError(
                f"Argument `input_output_aliases` gives output {result} to two operands, "
                f"`{names[taken[result]]}` and `{names[operand]}`; an output has one buffer."
            )
        taken[result] = operand
        if operands[operand] != results[result]:
            raise ArgumentValueError(
                f"Argument `input_output_aliases` gives operand `{names[operand]}` "
                f"({short(operands[operand])}) the buffer of output {result} "
                f"({short(results[result])}); they must have the same shape and dtype."
            )
        aliases.append(Alias(operand, result))
    return tuple(aliases)
