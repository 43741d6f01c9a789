"""One view of everything Triton calls a kernel.

`@triton.jit` and Gluon functions, and `@triton.autotune` and `@triton.heuristics` around
them in any nesting, become a `Kernel`: its parameters, and the configs to choose from
with every value a config or heuristic sets. The user's objects are never modified.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from triax import messages
from triax.binding.values import CONFIG_OPTIONS, Config, Static, pack_values, plain
from triax.compat import triton_private
from triax.errors import ArgumentTypeError, ArgumentValueError, MissingName, UnsupportedError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. `default` is None where `has_default` is false.

    `number` is Triton's name of the annotated number type ("i32"), else "". `is_variadic` marks
    ``*args``, which takes a tuple, by default an empty one.
    """

    name: str
    is_constexpr: bool
    has_default: bool
    default: Any
    number: str
    is_variadic: bool = False


class Hook(NamedTuple):
    """A config's `pre_hook`, and the values it receives besides the runtime arguments."""

    function: Callable[[dict[str, Any]], Any]
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel as the user wrote it (`source`) and the function inside it (`function`).

    `stages` are the decorators around the function, the outermost first; `autotuner` is the
    `@triton.autotune` among them, or None. Two views of the same object are equal.
    """

    source: Any
    function: Any
    stages: tuple[Any, ...]
    autotuner: Any | None
    name: str
    parameters: tuple[Parameter, ...]
    is_gluon: bool

    @classmethod
    def of(cls, source: Any) -> Kernel:
        """Returns the view of a kernel object, made once per object.

        Raises:
          ArgumentTypeError: `source` is not a jitted function, alone or decorated.
          UnsupportedError: `@triton.autotune` has host hooks, or is used more than once, or the
            kernel has `*args`, which the installed Triton does not compile.
        """
        view = _views.get(id(source))
        if view is None or view.source is not source:
            view = cls._new(source)
            if len(_views) >= _MOST_VIEWS:
                _views.clear()
            _views[id(source)] = view
        return view

    @classmethod
    def _new(cls, source: Any) -> Kernel:
        runtime = triton_private.triton().runtime
        stages = []
        function = source
        while isinstance(function, (runtime.Autotuner, runtime.Heuristics)):
            stages.append(function)
            function = function.fn
        if not isinstance(function, runtime.JITFunction):
            hint = " Decorate it with @triton.jit." if callable(function) else ""
            if getattr(function, "__qualname__", "").startswith("KernelInterface."):  # kernel[grid]
                hint = " Pass the kernel without [grid], and give `grid` beside it."
            elif type(function).__name__ == "InterpretedFunction":
                hint = " Unset TRITON_INTERPRET: Triax calls the interpreter by itself."
            raise ArgumentTypeError(
                "Argument `kernel` must be a function decorated with @triton.jit (or Gluon's jit), "
                "optionally with @triton.autotune or @triton.heuristics around it; "
                f"got {messages.shown(function)}.{hint}"
            )
        name = str(function.fn.__name__)
        tuners = [stage for stage in stages if isinstance(stage, runtime.Autotuner)]
        if len(tuners) > 1:
            raise UnsupportedError(
                f"Kernel {name!r} is decorated with @triton.autotune {len(tuners)} times. "
                "Merge the configs into one."
            )
        for tuner in tuners:
            _refuse_hooks(name, tuner)
        parameters, signature = [], function.signature.parameters
        for p in function.params:
            number = "" if p.is_constexpr else str(p.annotation_type)
            number = "" if number.startswith("*") else number  # a pointer
            if is_variadic := signature[p.name].kind is inspect.Parameter.VAR_POSITIONAL:
                triton_private.check_variadic(name, p.name)
            default = p.default if p.has_default else () if is_variadic else None
            parameters.append(
                Parameter(
                    *(p.name, p.is_constexpr, p.has_default or is_variadic, default),
                    *(number, is_variadic),
                )
            )
        return cls(
            source=source,
            function=function,
            stages=tuple(stages),
            autotuner=tuners[0] if tuners else None,
            name=name,
            parameters=tuple(parameters),
            is_gluon=bool(function.is_gluon()),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.source is other.source

    def __hash__(self) -> int:
        return id(self.source)

    @functools.cached_property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    @functools.cached_property
    def variadic(self) -> Parameter | None:
        """The parameter of ``*args``, or None."""
        return next((p for p in self.parameters if p.is_variadic), None)

    @functools.cached_property
    def runtime_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that are not constexpr."""
        return tuple(p for p in self.parameters if not p.is_constexpr)

    def values_set_by_stages(self, begin: int = 0) -> frozenset[str]:
        """The names that configs and heuristics set in stage `begin` and the stages inside it."""
        names: set[str] = set()
        for stage in self.stages[begin:]:
            names.update(getattr(stage, "values", ()))
            names.update(*(config.all_kwargs() for config in getattr(stage, "configs", ())))
        return frozenset(names)

    def expand(
        self,
        arguments: Mapping[str, Any],
        keywords: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        conflicts: str = "filter",
    ) -> tuple[list[tuple[Config, Hook | None]], set[str]]:
        """Lists the configs to choose from, each with all values that configs and heuristics set.

        Args:
          arguments: runtime arguments by parameter, as heuristics see them.
          keywords: constexprs and other meta-parameters the caller gave.
          options: `num_warps` and the like that the caller gave.
          conflicts: what to do with a name that both the caller and a config set: "filter" keeps
            the configs that agree with the caller, "config" takes the config's value, "caller" the
            caller's.

        Returns:
          The configs in the order the user listed them, each with its `pre_hook`, and the names
          that heuristics read.

        Raises:
          ArgumentValueError: no config is left.
        """
        branches = [_Branch(dict(keywords), {}, dict(options))]
        read: set[str] = set()
        for number, stage in enumerate(self.stages, 1):
            if stage is self.autotuner:
                (branch,) = branches  # there is one autotuner
                branches = self._branches(stage, branch, arguments, conflicts)
            else:
                for branch in branches:
                    set_later = self.values_set_by_stages(number)
                    branch.apply_heuristics(stage.values, self.name, arguments, read, set_later)
        return [(branch.config(), branch.hook) for branch in branches], read

    def _branches(
        self, tuner: Any, branch: _Branch, arguments: Mapping[str, Any], conflicts: str
    ) -> list[_Branch]:
        configs = [c for c in tuner.configs if conflicts != "filter" or branch.agrees(c)]
        if not configs:
            by_caller = {**branch.keywords, **branch.options}
            clashing = sorted(
                name for name in by_caller if any(name in c.all_kwargs() for c in tuner.configs)
            )
            raise ArgumentValueError(
                f"No config of kernel {self.name!r} agrees with the values given for "
                f"{', '.join(f'`{n}`={messages.short(by_caller[n])}' for n in clashing)}. Its "
                f"configs are: {'; '.join(map(_set_by, tuner.configs))}. Leave the argument out to "
                "let a config decide."
            )
        if len(configs) < len(tuner.configs):
            logger.info(
                "Kernel %r: %d of its %d configs agree with the call's own values.",
                *(self.name, len(configs), len(tuner.configs)),
            )
        configs = _prune(self.name, tuner, configs, arguments, branch.keywords)
        if not configs:
            raise ArgumentValueError(
                f"The `early_config_prune` or `perf_model` of kernel {self.name!r} left no config."
            )
        return [branch.with_config(config, caller_wins=conflicts == "caller") for config in configs]


# By the object's id, because Triton's hash of a kernel parses its source.
_views: dict[int, Kernel] = {}
_MOST_VIEWS = 1024


@dataclasses.dataclass
class _Branch:
    """One path through the decorators. Stages set `values`; `keywords` adds the caller's own."""

    keywords: dict[str, Any]
    values: dict[str, Any]
    options: dict[str, Any]
    hook: Hook | None = None

    def agrees(self, config: Any) -> bool:
        by_caller, by_config = {**self.keywords, **self.options}, config.all_kwargs()
        both = by_caller.keys() & by_config.keys()
        return all(Static(by_caller[name]) == Static(plain(by_config[name])) for name in both)

    def with_config(self, config: Any, *, caller_wins: bool) -> _Branch:
        values, options = dict(self.values), dict(self.options)
        by_caller = {**self.keywords, **self.options} if caller_wins else {}
        for name, value in config.all_kwargs().items():
            target = options if name in CONFIG_OPTIONS else values
            target[name] = by_caller.get(name, value)
        keywords = {**self.keywords, **values}
        hook = None
        if config.pre_hook is not None:  # a hook does not see values that heuristics add later
            hook = Hook(config.pre_hook, {**keywords, **options})
        return _Branch(keywords, values, options, hook)

    def apply_heuristics(
        self,
        heuristics: Mapping[str, Callable[..., Any]],
        kernel: str,
        arguments: Mapping[str, Any],
        read: set[str],
        set_later: frozenset[str],
    ) -> None:
        for name, heuristic in heuristics.items():
            known = {**arguments, **self.options, **self.keywords}
            where = f"the heuristic for `{name}` of kernel {kernel!r}"
            value = MetaParameters(known, read, set_later).given_to(heuristic, where)
            if name in CONFIG_OPTIONS:
                self.options[name] = value
            else:
                self.values[name] = value
                self.keywords[name] = value

    def config(self) -> Config:
        options = {n: self.options[n] for n in CONFIG_OPTIONS if n in self.options}
        return Config(pack_values(self.values) if self.values else (), **options)


def _reading(name: str) -> Any:
    method = getattr(dict, name)

    def read(self: MetaParameters, *key_and_more: Any) -> Any:
        self._read.update(key_and_more[:1] or dict.keys(self))
        return method(self, *key_and_more)

    return read


class MetaParameters(dict[str, Any]):
    """The dictionary that a grid, heuristic or hook receives: the arguments of a call by name.

    Keys that are read are added to `read`; iterating reads all keys. The names in `set_later` are
    missing because an inner decorator sets them later.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        read: set[str] | None = None,
        set_later: frozenset[str] = frozenset(),
        reader: str = "",
    ):
        super().__init__(values)
        self._read = set() if read is None else read
        self._set_later, self._reader = set_later, reader

    def given_to(self, function: Callable[..., Any], where: str) -> Any:
        """Calls a user's function, which `where` names in messages, with this dictionary."""
        self._reader = where
        takes = "one dictionary, the meta-parameters by name, as in `lambda meta: …`"
        return messages.call(function, where, takes, self)

    def __missing__(self, key: str) -> Any:
        names = sorted(dict.keys(self))
        meant = messages.near_misses(key, names)
        why = "the call does not have." + ("" if meant.startswith(" Known: ") else meant)
        if key in self._set_later:
            why = (
                "an inner decorator sets only later. Put `@triton.heuristics` next to "
                "`@triton.jit`, below that decorator."
            )
        where = self._reader[:1].upper() + self._reader[1:]
        raise MissingName(f"{where} reads `{key}`, which {why} It may read {', '.join(names)}.")

    def __getattr__(self, name: str) -> Any:
        if dict.__contains__(self, name):
            raise AttributeError(f"Meta-parameters are in a dictionary: write `meta[{name!r}]`.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    __getitem__, get, __contains__ = map(_reading, ("__getitem__", "get", "__contains__"))
    keys, values, items, __iter__ = map(_reading, ("keys", "values", "items", "__iter__"))


def _set_by(config: Any) -> str:
    """The values that a config sets, as text."""
    return ", ".join(f"{n}: {v}" for n, v in config.all_kwargs().items() if v is not None)


def _refuse_hooks(name: str, tuner: Any) -> None:
    """Refuses hooks of `@triton.autotune` itself: they wrap timing that Triax replaces."""
    names = [n for n in ("pre_hook", "post_hook") if getattr(tuner, f"user_defined_{n}", False)]
    if names:
        hooks = ", ".join(f"@triton.autotune({name}=…)" for name in names)
        raise UnsupportedError(
            f"Kernel {name!r} has host hooks, which cannot run inside a compiled program: "
            f"{hooks}. To restore operands between the timed runs of its configs, use "
            "`restore_value` or `reset_to_zero`; to zero an output in the program, use "
            "`zeroed_outputs` or a `pre_hook` of its configs."
        )


def _prune(
    kernel: str,
    tuner: Any,
    configs: Sequence[Any],
    arguments: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> list[Any]:
    """Applies `prune_configs_by` to a list of configs, as `@triton.autotune` documents it."""
    configs = list(configs)
    if tuner.early_config_prune is not None:
        # Triton passes positional arguments in a dictionary, and keyword arguments by name. How the
        # caller passed a runtime argument is not known here, so it is passed in both ways.
        named = {**arguments, **keywords}
        where = f"the `early_config_prune` of kernel {kernel!r}"
        takes = "the configs, the arguments in a dictionary, and the same by name (**kwargs)"
        meta = MetaParameters(named, reader=where)
        pruned = messages.call(tuner.early_config_prune, where, takes, configs, meta, **named)
        configs = list(pruned)
    if tuner.perf_model is not None and configs:
        top_k = tuner.configs_top_k
        if isinstance(top_k, float) and top_k <= 1.0:
            top_k = max(1, int(len(configs) * top_k))
        if len(configs) > top_k:
            where = f"the `perf_model` of kernel {kernel!r}"
            takes = "the arguments of the call and of the config by name (**kwargs)"
            times = {
                id(config): messages.call(
                    *(tuner.perf_model, where, takes),
                    **{**arguments, **keywords, **config.all_kwargs()},
                )
                for config in configs
            }
            configs = sorted(configs, key=lambda config: times[id(config)])[:top_k]
    return configs
