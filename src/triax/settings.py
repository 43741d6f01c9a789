"""The environment variables and modes that configure Triax, validated in one place.

Each variable is read when it is needed, so a program or a test may set it late. An invalid value
raises a `SettingError` that says what is allowed; an empty value counts as unset. A variable
without effect, such as a misspelt name or a folder that does not exist, is logged once.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, get_args

import jax

from triax.errors import SettingError
from triax.messages import check_bool, check_choice

logger = logging.getLogger(__name__)

_MOST_SECONDS = 3600
TuningMode = Literal["auto", "cached", "strict", "off", "runtime"]
TUNING_MODES: tuple[TuningMode, ...] = get_args(TuningMode)
Sanitizer = Literal["consan", "fpsan"]

# All are part of `jax.jit`'s cache key.
_tuning_mode = jax.make_user_context(None)
_same_bits = jax.make_user_context(None)
checked_runs = jax.make_user_context(False)
sanitizer = jax.make_user_context(None)

# JAX's config contexts that change the result of a function.
_SETTINGS_OF_JAX = (
    "default_matmul_precision",
    "default_prng_impl",
    "enable_x64",
    "threefry_partitionable",
)


def mode_in_force(tuning: TuningMode | None = None) -> str:
    """A call's argument `tuning`, else the mode of the innermost `tuning_mode` block, else
    ``TRIAX_AUTOTUNE``, else "auto". A sanitizer's code is not worth timing: "off"."""
    check_choice("tuning", tuning, (None, *TUNING_MODES))
    if sanitizer.value is not None:
        return "off"
    if (mode := tuning or _tuning_mode.value) is not None:
        return str(mode)
    rule = f"be one of {', '.join(TUNING_MODES)}"
    return _read("TRIAX_AUTOTUNE", "|".join(TUNING_MODES), rule) or "auto"


def tuning_mode(mode: TuningMode) -> AbstractContextManager[None]:
    """Sets the tuning mode for the calls inside the block.

        with triax.tuning_mode("strict"):
            compiled = jax.jit(step).lower(x).compile()

    The mode is read when a function is traced, and is part of `jax.jit`'s cache key: a function
    called under another mode is traced again. ``TRIAX_AUTOTUNE`` is not part of the key: a function
    traced outside any block keeps the value it had then.

    Args:
      mode: "auto", "cached", "strict", "off" or "runtime".

    Raises:
      ArgumentValueError: `mode` is none of these.
    """
    check_choice("mode", mode, TUNING_MODES)
    return _inside(_tuning_mode, mode)


@contextlib.contextmanager
def _inside(context: Callable[[Any], AbstractContextManager[Any]], value: Any) -> Iterator[None]:
    with context(value):
        yield


def one_order_of_sums() -> bool:
    """Whether the innermost `same_bits` block, else ``TRIAX_SAME_BITS``, asks for sums whose order
    does not depend on the number of rows."""
    if (on := _same_bits.value) is not None:
        return bool(on)
    return _read("TRIAX_SAME_BITS", "[01]", "be 0 or 1") == "1"


def same_bits(on: bool = True) -> AbstractContextManager[None]:
    """Gives a row or token the same bits in every batch, in calls inside the block.

        with triax.same_bits():
            logits = decode(params, token)

    The order of a sum in the MoE ops then follows from the shapes and dtypes of weights alone,
    never from the number of rows. Most ops have the same bits anyway: the documentation, "Trust",
    says which do not, and when those take longer. Like the mode of `tuning_mode`, this is read
    when a function is traced, and is part of `jax.jit`'s cache key; ``TRIAX_SAME_BITS`` is not.

    Args:
      on: whether bits are to be the same; False overrides ``TRIAX_SAME_BITS=1``.

    Raises:
      ArgumentTypeError: `on` is not a bool.
    """
    check_bool(on=on)
    return _inside(_same_bits, bool(on))


def checked() -> bool:
    """Whether interpreted kernels are checked for races and for uninitialised reads."""
    return bool(checked_runs.value)


def captured() -> Callable[[], AbstractContextManager[None]]:
    """Captures this thread's settings; the returned context applies them in another thread."""
    contexts = _tuning_mode, _same_bits, checked_runs, sanitizer
    held = [(context, context.value) for context in contexts]
    values = {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS_OF_JAX}

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context, value in held:
                stack.enter_context(context(value))
            for name, value in values.items():
                stack.enter_context(getattr(jax, name)(value))
            yield

    return restored


def enforce_autotuning() -> bool:
    """``TRIAX_ENFORCE_AUTOTUNING``: fail rather than fall back to one fixed config."""
    return _read("TRIAX_ENFORCE_AUTOTUNING", "[01]", "be 0 or 1") == "1"


def cuda_arch() -> int | None:
    """``TRIAX_CUDA_ARCH`` as a compute capability (90 for "90", "9.0", "sm_90"), or None."""
    # Triton has no target below 7.0, and LLVM accepts any number without an error.
    pattern = r"(sm_?)?([7-9]|1[0-9])\.?[0-9]a?"
    rule = "be a CUDA compute capability such as 90, 9.0 or sm_90"
    value = _read("TRIAX_CUDA_ARCH", pattern, rule)
    return int(re.sub("[^0-9]", "", value)) if value else None


def gpu() -> str | None:
    """``TRIAX_GPU``: the GPU that exported or cross-compiled programs are for, by name, or None."""
    return _read("TRIAX_GPU") or None


def cache_folder() -> Path | None:
    """The folder of tuned configs: ``TRIAX_CACHE_DIR``, else triax/ in the user's cache folder.

    None if the user has no home folder, as in a container that runs under an arbitrary user id.
    """
    if folder := _environment("TRIAX_CACHE_DIR"):
        return _absolute("TRIAX_CACHE_DIR", folder)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # XDG says to ignore a relative path
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
        if not base.is_absolute():  # it would be in the working directory
            return None
    return base / "triax"


def temporary_folder() -> Path:
    """Returns this user's own folder for temporary files, created if needed.

    Raises:
      OSError: the folder cannot be created, or other users can write to it.
    """
    folder = Path(_temporary_files(), f"triax-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")
    return folder


def new_temporary_folder() -> Path:
    """Creates a temporary folder with an unguessable name.

    Raises:
      OSError: the folder cannot be created.
    """
    return Path(tempfile.mkdtemp(prefix="triax-", dir=_temporary_files()))


def _temporary_files() -> str:
    folder = tempfile.gettempdir()
    named = {os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")}
    # The working directory is Python's last resort.
    if folder not in {*named, "/tmp", "/var/tmp", "/usr/tmp"} and folder == os.getcwd():
        raise FileNotFoundError("there is no folder for temporary files; set TMPDIR")
    return folder


def cache_path() -> list[Path]:
    """Read-only stores of tuned configs: ``TRIAX_CACHE_PATH``, separated as in PATH."""
    named = _environment("TRIAX_CACHE_PATH").split(os.pathsep)
    folders = [_absolute("TRIAX_CACHE_PATH", folder) for folder in named if folder]
    for folder in folders:
        if not os.path.exists(folder):
            _report_missing(folder)
    return folders


def tuning_bytes() -> int | None:
    """``TRIAX_TUNING_BYTES``: the most GPU memory that measuring may use, or None."""
    rule = "be a whole number of bytes above 0, such as 1000000000"
    text = _read("TRIAX_TUNING_BYTES", "(?=0*[1-9])[0-9]{1,18}", rule)
    return int(text) if text else None


def tuning_timeout_s() -> float:
    """``TRIAX_TUNING_TIMEOUT``: seconds for one run of a config; compiling gets six times that."""
    text = _read("TRIAX_TUNING_TIMEOUT")
    seconds = 0.0
    with contextlib.suppress(ValueError):
        seconds = float(text or "10")
    if not 0 < seconds <= _MOST_SECONDS:  # false for a NaN, too
        rule = f"be a number of seconds above 0 and up to {_MOST_SECONDS}"
        raise _wrong("TRIAX_TUNING_TIMEOUT", rule, text)
    return seconds


# The reader of each variable; it raises `SettingError` for an invalid value.
VARIABLES: dict[str, Callable[[], object]] = {
    "TRIAX_AUTOTUNE": mode_in_force,
    "TRIAX_CACHE_DIR": cache_folder,
    "TRIAX_CACHE_PATH": cache_path,
    "TRIAX_CUDA_ARCH": cuda_arch,
    "TRIAX_ENFORCE_AUTOTUNING": enforce_autotuning,
    "TRIAX_GPU": gpu,
    "TRIAX_SAME_BITS": one_order_of_sums,
    "TRIAX_TUNING_BYTES": tuning_bytes,
    "TRIAX_TUNING_TIMEOUT": tuning_timeout_s,
}


def _read(name: str, pattern: str = "", rule: str = "") -> str:
    """A variable's value without surrounding blanks, "" if it is unset.

    Raises:
      SettingError: the value does not match `pattern`, which `rule` puts into words.
    """
    _report_unknown()
    value = os.environ.get(name, "").strip()
    if value and pattern and not re.fullmatch(pattern, value):
        raise _wrong(name, rule, value)
    return value


def _environment(name: str) -> str:
    _report_unknown()
    return os.environ.get(name, "")


def suggestion(name: str) -> str:
    """A sentence that suggests the variable closest to a misspelt one, or lists all variables."""
    prefix = "TRIAX_"  # left out of the comparison, because it makes any two names similar
    known = [known.removeprefix(prefix) for known in VARIABLES]
    close = difflib.get_close_matches(name.removeprefix(prefix), known, n=1)
    return f"Did you mean {prefix}{close[0]}?" if close else f"Known: {', '.join(VARIABLES)}."


# These are logged, because a program may turn Python warnings into errors.


@functools.cache
def _report_unknown() -> None:
    """Logs unknown ``TRIAX_`` variables when the first setting is read."""
    for name in sorted(os.environ):
        if name.startswith("TRIAX_") and name not in VARIABLES:
            logger.warning(
                "the environment variable %s is set, but Triax does not know it. %s",
                name,
                suggestion(name),
            )


@functools.cache
def _report_missing(folder: Path) -> None:
    logger.warning("TRIAX_CACHE_PATH names %s, which does not exist or cannot be seen", folder)


def _wrong(name: str, rule: str, value: str) -> SettingError:
    return SettingError(f"{name} must {rule}; got {value!r}.")


def _absolute(name: str, folder: str) -> Path:
    """The folder as a `Path`; raises `SettingError` if it depends on the working directory."""
    if not os.path.isabs(folder):
        raise _wrong(name, "hold absolute paths", folder)
    return Path(folder)
