"""Runs the tests on every supported JAX and Triton, each in its own environment under .matrix.

    make matrix                                             # all of them
    make matrix ARGS="-s 'matrix(0.8.0)' 'matrix(0.12.*)'"   # some
    make matrix ARGS="-- tests/binding -k scalars"          # other tests, options for pytest

It is a file for nox, which lists the environments (`-l`) and says in the end which of them failed.
"""

from __future__ import annotations

import os

import nox

nox.needs_version = ">=2024.4.15"
nox.options.envdir = "../.matrix"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

# JAX, Triton, and the oldest Python that will do.
VERSIONS = (
    ("0.8.0", "3.5.1", "3.11"),
    ("0.9.2", "3.6.0", "3.11"),
    ("0.10.0", "3.7.1", "3.11"),
    ("0.10.2", "3.9.0", "3.11"),
    ("0.11.2", "3.6.0", "3.12"),
    ("0.12.*", "3.9.0", "3.12"),
)
TESTS = (
    *("tests/test_call.py", "tests/test_cases.py", "tests/test_lowering.py"),
    *("tests/test_primitive.py", "tests/test_settings.py"),
    *("tests/binding", "tests/compat", "tests/compiling", "tests/emitting", "tests/interpreting"),
    *("tests/moe", "tests/tuning"),
)


@nox.session
@nox.parametrize("jax,triton,python", VERSIONS, ids=[jax for jax, *_ in VERSIONS])
def matrix(session: nox.Session, jax: str, triton: str) -> None:
    """The tests that need no GPU, or those named after `--`."""
    session.chdir("..")
    tools = ("pytest", "hypothesis", "numpy", "packaging")
    session.install(f"jax=={jax}", f"triton=={triton}", *tools)
    # Without its dependencies: what lowering for CUDA needs, and none of NVIDIA's libraries.
    version = session.run("python", "-c", "import jax; print(jax.__version__)", silent=True)
    session.install("--no-deps", f"jax-cuda13-plugin=={str(version).strip()}")
    # The plugin is there by construction, so that its absence is a failure, as in CI.
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.path.abspath("src"), "CI": "true"}
    named = any(word.startswith("tests") for word in session.posargs)
    options = ("-q", "-m", "not gpu", "-p", "no:cacheprovider", *session.posargs)
    session.run("python", "-m", "pytest", *options, *(() if named else TESTS), env=environment)
