"""The parts of Triton's compiler that Triax uses: binding, specialisation, compilation.

Triton's own binder decides how each argument is typed and specialised, so annotations,
`do_not_specialize`, defaults and nested tuples mean here what they mean in Triton.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import errno
import functools
import importlib
import importlib.metadata
import inspect
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from triax.compat import versions
from triax.errors import CompilationError, MissingDependencyError, UnsupportedError

_PLACEHOLDER = (
    "The installed `triton` is the placeholder package of `pytorch-triton` 0.0.1, not Triton "
    "itself. Uninstall it (`pip uninstall pytorch-triton triton`) and install `triton>=3.5`."
)
HOW_TO_INSTALL = (
    "On Linux, `pip install 'triton>=3.5'`, or install Triax with the extra cuda13, cuda12 or, for "
    "the interpreter alone, interpreter. There is no Triton for other systems."
)


# Held while Triton's Python code is in a state that a forked child must not inherit, such as a
# half-computed hash of a kernel, or a locked lock: a fork waits for this lock.
front_end_lock = threading.RLock()
os.register_at_fork(
    before=front_end_lock.acquire,
    after_in_parent=front_end_lock.release,
    after_in_child=front_end_lock.release,
)


# Workaround: python <3.12: `functools.cached_property` holds one lock for all instances while it
# computes a value: a forked child would wait for ever for a thread that only its parent has.
def renew_property_locks(*owners: type) -> None:
    """Gives the cached properties of `owners` new locks, in a forked child."""
    for owner in owners:
        for attribute in vars(owner).values():
            if isinstance(attribute, functools.cached_property) and hasattr(attribute, "lock"):
                attribute.lock = threading.RLock()


def _renew_tritons_property_locks() -> None:
    for module, name in (
        ("triton.runtime.jit", "KernelParam"),
        ("triton.language.core", "tuple_type"),
    ):
        if owner := getattr(sys.modules.get(module), name, None):
            renew_property_locks(owner)


os.register_at_fork(after_in_child=_renew_tritons_property_locks)


@functools.cache
def triton() -> ModuleType:
    """Imports and returns the `triton` package.

    Raises:
      MissingDependencyError: not installed, or the placeholder of PyTorch's index.
      VersionError: too old.
    """
    try:
        module = importlib.import_module("triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingDependencyError(
            "Calling a Triton kernel needs `triton`, which is not installed. "
            f"{HOW_TO_INSTALL} `triax.moe` runs through XLA without it."
        ) from error
    except RuntimeError as error:  # the placeholder raises on import
        raise MissingDependencyError(_PLACEHOLDER) from error
    version = getattr(module, "__version__", None)
    if version is None:  # an empty namespace left behind by an uninstalled package
        raise MissingDependencyError(_PLACEHOLDER)
    versions.check_triton(version)
    return module


def require(gate: versions.Gate, what: str, remedy: str) -> None:
    """Raises `UnsupportedError`, which names `what`, if the installed Triton fails `gate`."""
    if not gate.passes(version := triton().__version__):
        raise UnsupportedError(
            f"{what} needs Triton {gate.stable} or later; {version} is installed. {remedy}"
        )


def check_variadic(function: str, parameter: str) -> None:
    """Raises `UnsupportedError` if the installed Triton does not compile `*parameter`."""
    require(
        versions.VARIADIC_KERNELS,
        f"The parameter `*{parameter}` of {function!r}",
        f"Take the star away, and pass a tuple by name: `{parameter}=(…)`.",
    )


def cache_folder() -> pathlib.Path:
    """Returns the folder of Triton's compilation cache."""
    return pathlib.Path(triton().knobs.cache.dir)


def cache_folder_is_given() -> bool:
    """Whether the cache folder was chosen: by ``TRITON_CACHE_DIR``, or in the program."""
    return bool(os.environ.get("TRITON_CACHE_DIR") or vars(triton().knobs.cache).get("dir"))


def set_cache_folder(folder: pathlib.Path) -> None:
    """Sets the cache folder, also for processes that this one starts."""
    triton().knobs.cache.dir = str(folder)


@functools.cache
def backend_for(compute_capability: int) -> Any:
    """Returns Triton's CUDA backend for an architecture."""
    target = triton().backends.compiler.GPUTarget("cuda", compute_capability, 32)
    return triton().compiler.make_backend(target)


@functools.cache
def small_floats(compute_capability: int) -> frozenset[str]:
    """Returns Triton's names of the 8-bit floats that kernels can use on an architecture."""
    options = {"enable_fp_fusion": True}  # Workaround: triton >=3.9: it warns without the option.
    return frozenset(backend_for(compute_capability).parse_options(options).supported_fp8_dtypes)


@functools.cache
def option_names() -> frozenset[str]:
    """Returns the names of the compiler options that Triton's CUDA backend knows."""
    module = importlib.import_module("triton.backends.nvidia.compiler")
    return frozenset(field.name for field in dataclasses.fields(module.CUDAOptions))


def aggregate_members(class_: type) -> list[Any] | None:
    """Returns the parts of an aggregate's definition that Triton hashes; None for other classes."""
    if "__triton_aggregate__" not in vars(class_):
        return None
    return [vars(class_).get("__annotations__"), *class_.hash_attrs]


class _ElementType(str):
    """A Triton type name with the two attributes that Triton reads from a torch dtype."""

    is_floating_point: bool
    itemsize: int


class _ArrayStub(types.SimpleNamespace):
    """A type of its own, because Triton caches how to specialise each Python type."""


@functools.cache
def array_stub(type_name: str, itemsize: int) -> Any:
    """Makes a stand-in for an array that Triton specialises: a dtype and the address 0.

    The address is aligned because XLA aligns every buffer to 16 bytes or more.
    """
    dtype = _ElementType(type_name)
    dtype.itemsize = itemsize
    dtype.is_floating_point = type_name[:2] in ("fp", "bf")
    return _ArrayStub(dtype=dtype, data_ptr=int)


def descriptor_stub(base: Any, leaf: Any) -> Any:
    """Makes a stand-in for a host TMA descriptor (a `Descriptor`) that Triton specialises."""
    lists = (list(leaf.shape), list(leaf.strides), list(leaf.block_shape))
    descriptor = _descriptor_class(leaf.layout)
    layout = () if leaf.layout is None else (leaf.layout,)
    return descriptor(base, *lists, *layout, leaf.padding)  # rounding to tf32 changes no code


def descriptor_stand_in(layout: Any, **fields: Any) -> Any:
    """Makes an instance of Triton's own class of host TMA descriptors with the given fields.

    The constructor is not called: it requires an address and a final block shape.
    """
    descriptor = _descriptor_class(layout)
    stand_in = object.__new__(descriptor)
    vars(stand_in).update(fields if layout is None else {**fields, "layout": layout})
    return stand_in


def _descriptor_class(layout: Any) -> Any:
    if layout is not None:
        return importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
    return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor


def specialize(
    function: Any, backend: Any, values: Mapping[str, Any], folded: frozenset[str]
) -> Any:
    """Types and specialises the values of all parameters the way Triton's launcher does.

    The parameters named in `folded` become constants, although they are not constexpr.

    Returns:
      Triton's `ASTSource`, which is compiled by `compile_to_ptx`: `signature` maps parameters to
      type names (nested for tuples), and `constants` and `attrs` are keyed by path.
    """
    arguments = inspect.BoundArguments(function.signature, collections.OrderedDict(values))
    binder = triton().runtime.jit.create_function_from_signature(
        function.signature, function.params, backend
    )
    global _torch_was_left_alone
    with contextlib.ExitStack() as stack:
        if not _torch_was_left_alone and "torch" not in sys.modules:
            finder = _TorchFinder()
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        bound, specialization, _ = binder(*arguments.args, **arguments.kwargs)
    _torch_was_left_alone = True
    _, signature, constants, attributes = function._pack_args(
        backend, {"enable_fp_fusion": True}, bound, specialization, {}
    )
    for position, parameter in enumerate(function.params):
        if parameter.name in folded and not parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            attributes = {p: a for p, a in attributes.items() if p[0] != position}
            constants = {p: c for p, c in constants.items() if p[0] != position}
            constants[(position,)] = bound[parameter.name]
    source = triton().compiler.ASTSource
    if function.is_gluon():
        source = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    return source(function, signature, constants, attributes)


def type_name(source: Any, parameter: str, path: tuple[int, ...]) -> str:
    """Returns the type of one leaf of a source: "*fp32", "i32", "constexpr", …"""
    type_ = source.signature[parameter]
    for index in path:
        type_ = type_[index]
    return str(type_)


def is_divisible_by_16(source: Any, path: tuple[int, ...]) -> bool:
    """Whether a source is specialised for one leaf, or its address, being divisible by 16."""
    return ["tt.divisibility", 16] in source.attrs.get(path, [])


# Workaround: triton <3.7: 3.6 imports torch, which takes seconds, at its first specialisation, to
# recognise torch's tensors; without torch it recognises tensors by their attributes.
class _TorchFinder:
    """An import hook that denies torch to the thread that makes it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("torch is not needed here", name="torch")


_torch_was_left_alone = False


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of compiling a kernel with Triton up to PTX, as plain data.

    `ir_path` is the file in Triton's cache with the IR of its front end: see `read_ir`.
    """

    entry: str
    ptx: str
    num_warps: int
    num_ctas: int
    shared_bytes: int
    global_scratch_bytes: int
    global_scratch_align: int
    profile_scratch_bytes: int
    profile_scratch_align: int
    tensor_descriptors: tuple[dict[str, Any], ...]
    ir_path: str


def compile_to_ptx(
    source: Any,
    backend: Any,
    options: Mapping[str, Any],
    code: Callable[[], str],
    on_miss: Callable[[], None] | None = None,
) -> Compiled:
    """Compiles an `ASTSource` up to PTX, through Triton's disk cache; only under `TRITON.shared`.

    `code` returns a key of the kernel's code, helpers and constants included; Triton's own hash is
    not updated after the first compilation. `on_miss` is called if the cache has no entry, before
    the compilation begins.
    """
    environment = {**_environment_up_to_ptx(), _CODE: code()}
    source = copy.copy(source)  # its `make_ir` is replaced
    make_ir = source.make_ir

    def make_ir_after_miss(*args: Any, **kwargs: Any) -> Any:
        if on_miss is not None:
            on_miss()
        module = make_ir(*args, **kwargs)
        if code() != environment[_CODE]:
            raise CompilationError("it was changed while it was compiled; call it again")
        return module

    source.make_ir = make_ir_after_miss  # a hit needs no IR
    try:
        kernel = triton().compile(
            source, target=backend.target, options=dict(options), _env_vars=environment
        )
    except OSError as error:
        folder, is_full = cache_folder(), error.errno in (errno.ENOSPC, errno.EDQUOT)
        place = pathlib.Path(os.fsdecode(error.filename or os.devnull))
        if is_full or place.is_relative_to(folder) or folder.is_relative_to(place):
            remedy = "Make room there" if is_full else "Make it a folder that can be written"
            raise CompilationError(
                f"Triton cannot write its cache in {folder} ({error.strerror}). {remedy}, or set "
                "TRITON_CACHE_DIR to another folder."
            ) from error
        raise
    metadata = kernel.metadata
    files = {pathlib.Path(path).suffix: str(path) for path in kernel.metadata_group.values()}
    return Compiled(
        entry=metadata.name,
        ptx=kernel.asm["ptx"],
        num_warps=metadata.num_warps,
        num_ctas=metadata.num_ctas,
        shared_bytes=metadata.shared,
        global_scratch_bytes=metadata.global_scratch_size or 0,
        global_scratch_align=metadata.global_scratch_align or 1,
        profile_scratch_bytes=getattr(metadata, "profile_scratch_size", 0) or 0,
        profile_scratch_align=getattr(metadata, "profile_scratch_align", 1) or 1,
        tensor_descriptors=tuple(getattr(metadata, "tensordesc_meta", None) or ()),
        ir_path=files.get(".ttir") or files[".ttgir"],
    )


def read_ir(path: str, compute_capability: int) -> Any:
    """Reads IR that Triton's compiler wrote to a file, with its parser; under `front_end_lock`."""
    ir = importlib.import_module("triton._C.libtriton").ir
    try:
        return ir.parse_mlir_module(path, _ir_context(compute_capability))
    except RuntimeError as error:
        raise CompilationError(f"Triton cannot read {path}, which it has written") from error


@functools.cache  # making a context takes longer than reading most kernels
def _ir_context(compute_capability: int) -> Any:
    ir = importlib.import_module("triton._C.libtriton").ir
    context = ir.context()
    # Workaround: triton <3.6: its contexts have threads, which a forked child does not have.
    if hasattr(context, "disable_multithreading"):
        context.disable_multithreading()
    ir.load_dialects(context)
    backend_for(compute_capability).load_dialects(context)
    return context


STOPS_AT = "TRIAXSTOPS_AT"
_CODE = "TRIAXCODE"


def _environment_up_to_ptx() -> dict[str, str]:
    """Returns the environment variables of Triton's cache key, and one that stops it at PTX.

    XLA makes the machine code itself. Because that variable is in the key, a compilation that needs
    machine code never finds an entry without it; Triton passes it to its stages too, so whether
    there is machine code depends on the key alone.
    """
    compiler = importlib.import_module("triton.compiler.compiler")
    environment = dict(compiler.get_cache_invalidating_env_vars())
    if triton().knobs.compilation.dump_ir:  # the dump should have the machine code too
        return environment
    return {**environment, STOPS_AT: "ptx"}


def assemble(backend: Any, ptx: str, options: Mapping[str, Any]) -> bytes:
    """Assembles PTX to machine code with Triton's ptxas; only under `TRITON.shared`."""
    parsed = backend.parse_options(dict(options))
    return bytes(backend.make_cubin(ptx, {}, parsed, backend.target.arch))


def host_element_type(device_element_type: int, *, tf32: bool) -> int:
    """Converts the compiler's number for a TMA element type to the driver's."""
    module = importlib.import_module("triton.backends.nvidia.driver")
    if tf32:
        return int(module.TMA_TF32)
    return int(module.TMA_DTYPE_DEVICE_TO_HOST[device_element_type])
